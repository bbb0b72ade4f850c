"""tf.data over TFRecord files: parse each record and then batch, or batch and then parse.

The last argument is ``parse-batch`` or ``batch-parse``. A buffer of 1,000 records shuffles them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import tensorflow as tf
from feeding import Batches, Job, arrays, serve

SHARDS = 8


def prepare(job: Job) -> Callable[[], Batches]:
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(job.folder / f"{shard}.tfrecord")) as writer:
            for number in range(shard, len(job.x), SHARDS):
                feature = {
                    "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[job.x[number].tobytes()])),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    spec = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.int64)}

    def one(raw: tf.Tensor) -> dict[str, tf.Tensor]:
        found = tf.io.parse_single_example(raw, spec)
        return {"x": tf.io.decode_raw(found["x"], tf.float32, fixed_length=job.x[0].nbytes), "y": found["y"]}

    def many(raw: tf.Tensor) -> dict[str, tf.Tensor]:
        found = tf.io.parse_example(raw, spec)
        return {"x": tf.io.decode_raw(found["x"], tf.float32, fixed_length=job.x[0].nbytes), "y": found["y"]}

    files = sorted(str(path) for path in job.folder.glob("*.tfrecord"))
    data = tf.data.TFRecordDataset(files, num_parallel_reads=job.workers).shuffle(min(1000, len(job.x)))
    if sys.argv[6] == "parse-batch":
        data = data.map(one, num_parallel_calls=tf.data.AUTOTUNE).batch(job.batch, drop_remainder=True)
    else:
        data = data.batch(job.batch, drop_remainder=True).map(many, num_parallel_calls=tf.data.AUTOTUNE)
    data = data.prefetch(tf.data.AUTOTUNE)
    return lambda: arrays(data)


if __name__ == "__main__":
    serve(prepare)
