"""Program that writes TFRecord files by TensorFlow into a folder, and the written values beside them as ``.npz``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf


def feature(value: object) -> tf.train.Feature:
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array.ravel()))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel()))


def main(folder: Path) -> None:
    chance = np.random.default_rng(0)
    count = 40
    columns = {
        "label": chance.integers(-(2**63), 2**63 - 1, count),
        "small": np.arange(count) - 20,
        "box": chance.normal(size=(count, 4)).astype(np.float32),
        "weight": chance.normal(size=count).astype(np.float32),
        "shape": chance.integers(0, 300, (count, 3)),
    }
    tokens = [chance.integers(0, 50000, int(n)) for n in chance.integers(0, 9, count)]
    scores = [chance.normal(size=int(n)).astype(np.float32) for n in chance.integers(0, 4, count)]
    images = [chance.bytes(int(n)) for n in chance.integers(0, 3000, count)]
    for name, compression in (("plain.tfrecord", None), ("packed.tfrecord.gz", "GZIP"), ("zlib.tfrecord", "ZLIB")):
        with tf.io.TFRecordWriter(str(folder / name), compression) as writer:
            for i in range(count):
                features = {key: feature(column[i]) for key, column in columns.items()}
                features["tokens"] = feature(tokens[i])
                if len(scores[i]) or i % 2:  # an empty list, and a missing one
                    features["scores"] = feature(scores[i])
                features["image/encoded"] = feature(images[i])
                features["tags"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a"] * (i % 3)))
                features["nothing"] = tf.train.Feature()
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    np.savez(
        folder / "written.npz",
        tokens=np.concatenate(tokens),
        tokens_sizes=[len(t) for t in tokens],
        scores=np.concatenate(scores),
        scores_sizes=[len(s) for s in scores],
        images=np.frombuffer(b"".join(images), dtype=np.uint8),
        images_sizes=[len(i) for i in images],
        **columns,
    )
    sequence = tf.train.SequenceExample(
        context=tf.train.Features(feature={"a": feature(1)}),
        feature_lists=tf.train.FeatureLists(feature_list={"b": tf.train.FeatureList(feature=[feature(2)])}),
    )
    with tf.io.TFRecordWriter(str(folder / "sequence.tfrecord")) as writer:
        writer.write(sequence.SerializeToString())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
