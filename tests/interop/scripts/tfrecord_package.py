"""Child process that imports the ``tfrecord`` package: ``tfrecord_package.py FOLDER``.

Reads ``ours.tfrecord`` by ``tfrecord_loader`` and writes ``ours.json`` (field name to lists of numbers, or hexadecimal
bytes).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tfrecord


def plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    array = np.asarray(value)
    return array.tobytes().hex() if array.dtype.kind in "uS" else array.reshape(-1).tolist()


def main(folder: Path) -> None:
    found = [
        {name: plain(value) for name, value in sample.items()}
        for sample in tfrecord.tfrecord_loader(str(folder / "ours.tfrecord"), None)
    ]
    (folder / "ours.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
