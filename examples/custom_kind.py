"""A further kind of file that ``pull`` and ``convert`` read, in one file of a package of its own: raw rows.

::

    scans.rawrows   b"RAWROWS1" | u32 rank | u32 side ...    little-endian, up to five sides
                    float32 values, one row after another    each row is a sample

Put it into a package beside a ``pyproject.toml`` with these lines and install that; nothing else is needed::

    [project]
    name = "cachetool-rawrows"
    version = "1.0"
    dependencies = ["cachetool", "numpy"]

    [project.entry-points."cachetool.sources"]
    rawrows = "custom_kind:KIND"

From then on ``cachetool pull s3://bucket/scans.rawrows`` and ``cachetool convert scans.rawrows --to hdf5 --out DIR``
read such files from everywhere, by ranges, and ``pytest tests/contracts/test_kinds.py -k rawrows`` in a clone of
cachetool says whether the kind keeps all that the others promise.

What a kind is stands in ``cachetool/sources/kinds.py``, what its function is given in
``cachetool/sources/byte_source.py``: a ``SourceFile``, whose bytes come from a disk or from a server. It gives back
columns. Where the rows of a column lie one after another, as here, their place is all that is asked for: they are
fetched by it, many at a time. With ``guarded=True``, the default, a process of its own reads the file, with limits on
memory and time: for libraries that a damaged file may kill.
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
    """Write ``rows``, (n, ...), as such a file."""
    with open(path, "wb") as file:
        file.write(MAGIC + struct.pack(f"<{rows.ndim}I", rows.ndim - 1, *rows.shape[1:]))
        file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())


def open_rows(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """The rows of one file. Raises BadObject naming it when it does not hold whole rows."""
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
