"""Another kind of file for ``pull`` and ``convert``, in one file of its own package: raw rows of float32.

::

    scans.rawrows   b"RAWROWS1" | u32 rank | u32 side ...    little-endian, up to five sides
                    float32 values, one row after another    each row is a sample

Put the file into a package with these lines in its ``pyproject.toml``, and install the package::

    [project]
    name = "cachetool-rawrows"
    version = "1.0"
    dependencies = ["cachetool", "numpy"]

    [project.entry-points."cachetool.sources"]
    rawrows = "custom_kind:KIND"

After that ``cachetool pull s3://bucket/scans.rawrows`` and ``cachetool convert scans.rawrows --to hdf5 --out DIR`` read
such files from every store, by byte ranges. ``pytest tests/contracts/test_kinds.py -k rawrows`` in a clone of cachetool
tests the kind as it tests the others.

``cachetool/sources/kinds.py`` says what a kind is. Its function takes a ``SourceFile``
(``cachetool/sources/byte_source.py``), whose bytes come from a disk or a server, and returns columns. Here the rows
of a column are contiguous, so the column only has to name their offset: cachetool then fetches many rows with one
request. With ``guarded=True``, the default, a separate process with limits on memory and time reads the file. Use it
for libraries that a damaged file may crash.
"""

from __future__ import annotations

import struct

import numpy as np

from cachetool.core.errors import BadObject
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.kinds import Kind
from cachetool.sources.options import SourceOptions
from cachetool.sources.rows import ColumnFile, StoredColumn

MAGIC = b"RAWROWS1"
MOST_SIDES = 5


def write(path: str, rows: np.ndarray) -> None:
    """Write ``rows``, an array of shape (n, ...), as a file of this kind."""
    with open(path, "wb") as file:
        file.write(MAGIC + struct.pack(f"<{rows.ndim}I", rows.ndim - 1, *rows.shape[1:]))
        file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())


def open_rows(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the rows of one file. Raise BadObject, which names the file, if the file does not hold whole rows."""
    head = bytes(file.ranges.part(file.number, 0, len(MAGIC) + 4 + 4 * MOST_SIDES))
    rank = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 4], "little")
    start = len(MAGIC) + 4 + 4 * rank
    if not head.startswith(MAGIC) or rank > MOST_SIDES or len(head) < start:
        raise BadObject(f"{file} is not a file of raw rows")
    sides = struct.unpack_from(f"<{rank}I", head, len(MAGIC) + 4)
    row = 4
    for side in sides:
        row *= side
    if row == 0 or (file.size - start) % row:
        raise BadObject(f"{file}: {file.size - start} bytes are not whole rows of {row}")
    count = (file.size - start) // row

    def read(first: int, stop: int) -> np.ndarray:
        body = file.ranges.part(file.number, start + first * row, (stop - first) * row)
        return np.frombuffer(body, dtype="<f4").reshape(stop - first, *sides)

    column = StoredColumn("x", "<f4", (count, *sides), count * row, read, offset=start, stored="<f4")
    return ColumnFile(file, [column], options, stored=file.size)


KIND = Kind(
    "rawrows",
    (".rawrows",),
    "custom_kind:open_rows",
    lambda head: head.startswith(MAGIC),
    guarded=False,
)
