"""Child process with TensorFlow in it: ``tensorflow_records.py FOLDER``.

Reads every ``ours*.tfrecord`` of the folder by ``TFRecordDataset`` and ``parse_single_example`` after ``schema.json``
and writes what it found to ``<name>.json``: for each sample and field the values' bytes in hexadecimal.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

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


def main(folder: Path) -> None:
    schema = Schema.from_json(json.loads((folder / "schema.json").read_text()))
    for path in sorted(folder.glob("ours*.tfrecord")):
        path.with_suffix(".json").write_text(json.dumps(read(path, schema)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
