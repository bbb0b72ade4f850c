"""Child process with TensorFlow in it: ``tensorflow_records.py FOLDER``.

Reads every ``ours*.tfrecord`` of the folder by ``TFRecordDataset`` and ``parse_single_example`` after ``schema.json``
and writes what it found to ``<name>.json``: for each sample and field the values' bytes in hexadecimal. Then writes
``theirs.tfrecord`` and ``theirs.gz.tfrecord`` with TensorFlow's own writer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

from cachetool.formats.tfrecord import shape_name, storage_kind
from cachetool.schema import Schema


def read(path: Path, schema: Schema) -> list[dict[str, str]]:
    types = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}
    features = {f.name: tf.io.FixedLenFeature([], types[storage_kind(f)]) for f in schema}
    features |= {shape_name(f): tf.io.FixedLenFeature([f.rank], tf.int64) for f in schema if f.kind == "ragged"}
    packed = "GZIP" if ".gz." in path.name else None
    out = []
    for record in tf.data.TFRecordDataset(str(path), compression_type=packed):
        parsed = tf.io.parse_single_example(record, features)
        raw: dict[str, str] = {}
        for field in schema:
            value = parsed[field.name].numpy()
            if storage_kind(field) == "int64":
                value = value.astype(field.numpy)
            raw[field.name] = (value if isinstance(value, bytes) else value.tobytes()).hex()
            if field.kind == "ragged":
                raw[shape_name(field)] = parsed[shape_name(field)].numpy().tobytes().hex()
        out.append(raw)
    return out


def feature(**lists: object) -> tf.train.Feature:
    return tf.train.Feature(**lists)


def write(path: Path, compression: str) -> None:
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression_type=compression)) as writer:
        for n in range(20):
            x = np.arange(6, dtype="<f4").reshape(2, 3) * n
            example = tf.train.Example(
                features=tf.train.Features(
                    feature={
                        "label": feature(int64_list=tf.train.Int64List(value=[-n])),
                        "x": feature(bytes_list=tf.train.BytesList(value=[x.tobytes()])),
                        "floats": feature(float_list=tf.train.FloatList(value=x.reshape(-1))),
                        "ints": feature(int64_list=tf.train.Int64List(value=range(n))),
                        "text": feature(bytes_list=tf.train.BytesList(value=[f"número {n}".encode()])),
                        "nothing": feature(),
                    }
                )
            )
            writer.write(example.SerializeToString())


def main(folder: Path) -> None:
    schema = Schema.from_json(json.loads((folder / "schema.json").read_text()))
    for path in sorted(folder.glob("ours*.tfrecord")):
        path.with_suffix(".json").write_text(json.dumps(read(path, schema)))
    write(folder / "theirs.tfrecord", "")
    write(folder / "theirs.gz.tfrecord", "GZIP")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
