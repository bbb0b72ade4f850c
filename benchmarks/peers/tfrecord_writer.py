"""The ``tfrecord`` package's writer: the array's bytes and the number, one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tfrecord
from common import serve


def write(folder: Path, x: np.ndarray) -> None:
    folder.mkdir()
    writer = tfrecord.TFRecordWriter(str(folder / "data.tfrecord"))
    for number, row in enumerate(x):
        writer.write({"x": (row.tobytes(), "byte"), "y": (number, "int")})
    writer.close()


if __name__ == "__main__":
    serve(write)
