"""tf.data over TFRecord files of JPEG images: decoded by the fast transform, resized with ``antialias=True``.

Arguments and lines are those of ``imaging.py``. A random box is decoded alone (``decode_and_crop_jpeg``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from imaging import SIDE, Job, serve

AUTO = tf.data.AUTOTUNE
SHARDS = 4


def prepare(job: Job) -> Callable[[], Iterator[Any]]:
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(job.folder / f"{shard}.tfrecord")) as writer:
            for image in job.images[shard::SHARDS]:
                feature = {"image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image]))}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    spec = {"image": tf.io.FixedLenFeature([], tf.string)}

    def decoded(raw: tf.Tensor) -> tf.Tensor:
        data = tf.io.parse_single_example(raw, spec)["image"]
        if job.case == "whole":
            image = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_FAST", fancy_upscaling=False)
            return tf.image.resize(image, (SIDE, SIDE), antialias=True)
        shape = tf.io.extract_jpeg_shape(data)
        if job.case == "random":
            whole = tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4])
            begin, size, _ = tf.image.sample_distorted_bounding_box(
                shape, whole, aspect_ratio_range=(3 / 4, 4 / 3), area_range=(0.08, 1.0), max_attempts=10
            )
            top, left, _ = tf.unstack(begin)
            height, width, _ = tf.unstack(size)
        else:
            height = width = tf.minimum(shape[0], shape[1])
            top, left = (shape[0] - height) // 2, (shape[1] - width) // 2
        box = tf.stack([top, left, height, width])
        image = tf.io.decode_and_crop_jpeg(data, box, channels=3, dct_method="INTEGER_FAST", fancy_upscaling=False)
        image = tf.image.resize(image, (SIDE, SIDE), antialias=True)
        return tf.image.random_flip_left_right(image) if job.case == "random" else image

    files = sorted(str(path) for path in job.folder.glob("*.tfrecord"))
    data = tf.data.TFRecordDataset(files, num_parallel_reads=job.workers).shuffle(1000)
    data = data.map(decoded, num_parallel_calls=AUTO, deterministic=False).batch(job.batch).prefetch(AUTO)
    options = tf.data.Options()
    options.threading.private_threadpool_size = job.workers
    data = data.with_options(options)
    return lambda: iter(data)


if __name__ == "__main__":
    serve(prepare)
