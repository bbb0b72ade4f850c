"""What the guarded process opens for :mod:`cachetool.sources.files`: remote files, read by parts over a socket.

Twice: when they are listed, to see each of them once and tell what it is (:class:`FileFacts`), and when samples are
read, where a file is opened when the first of its samples is asked for.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import UsageError
from cachetool.core.schema import Schema
from cachetool.sources.byte_source import RangeFile, Ranges
from cachetool.sources.joined import common, conform
from cachetool.sources.readers import ClosingFile, FileOptions, bounded
from cachetool.sources.rows import ColumnFile, Part, StoredColumn

__all__ = ["FileFacts", "open_remote"]


MAX_PARTS = 2**19
"""Chunks of one file whose places are kept, 40 bytes each."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one file of rows is."""

    rows: int
    chunk: int
    """Rows to fetch together."""
    piece: int
    """Bytes of the largest part that is in memory at once."""
    schema: list[dict[str, Any]]
    offsets: dict[str, int]
    """For each field where its first row lies when rows lie one after another, else -1."""
    stored: dict[str, str]
    """For each of those fields the dtype in the file."""
    cuts: list[int] | None = None
    """Where units end, when they differ in size."""
    parts: list[Part] = field(default_factory=list)
    """What units consist of, to be fetched beforehand; empty when that cannot be told, or is too much to be kept."""


def open_remote(path: Path, options: FileOptions, *, notice: Callable[[Path], None]) -> RemoteFiles:
    """The files behind the socket at ``path``; see :func:`cachetool.sources.doors.open_here`."""
    ranges = Ranges(path)
    spec = ranges.spec
    files = _Files(ranges, spec, options, notice)
    if spec["schema"] is not None:
        return RemoteFiles(path, files, Schema.from_json(spec["schema"]), spec["rows"], spec["piece"], ())
    schema: Schema | None = None
    skipped: list[tuple[str, str]] = []
    rows, piece, first = [], 0, ""
    for number, name in enumerate(spec["files"]):
        file = files.open(number)
        facts = _facts(file)
        ranges.tell(asdict(facts))
        skipped += [(f"{name}: {array}" if len(spec["files"]) > 1 else array, why) for array, why in file.skipped]
        rows.append(facts.rows)
        piece = max(piece, facts.piece)
        if schema is None:
            schema, first = file.schema, name
        else:
            schema = common(schema, file.schema, first=Path(first), then=Path(name))
    files.close()
    if schema is None:
        raise UsageError("no files")
    return RemoteFiles(path, files, schema, rows, piece, bounded(skipped))


class RemoteFiles(ClosingFile):
    """Rows of remote files; see :class:`cachetool.sources.readers.RandomAccess`. One is open at a time."""

    def __init__(
        self,
        path: Path,
        files: _Files,
        schema: Schema,
        rows: list[int],
        piece: int,
        skipped: tuple[tuple[str, str], ...],
    ) -> None:
        self.path, self.schema, self.piece, self.skipped = path, schema, piece, skipped
        self._files = files
        self._starts = [0, *accumulate(rows)]
        self.samples = self._starts[-1]

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``, which are of one file."""
        number = bisect_right(self._starts, start) - 1
        first = self._starts[number]
        file = self._files.open(number)
        return conform(file.read(start - first, stop - first), self.schema)

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Nobody asks for all of it here."""
        raise UsageError("remote files are read by rows")

    def close(self) -> None:
        """Let go of the file."""
        self._files.close()


class _Files:
    """Opens a file by its number, once as long as no other is opened."""

    def __init__(
        self, ranges: Ranges, spec: dict[str, Any], options: FileOptions, notice: Callable[[Path], None]
    ) -> None:
        self._ranges, self._spec, self._options, self._notice = ranges, spec, options, notice
        self._number = -1
        self._open: ColumnFile | None = None

    def open(self, number: int) -> ColumnFile:
        if self._open is None or self._number != number:
            self.close()
            path = Path(self._spec["files"][number])
            self._notice(path)
            self._open, self._number = self._opened(path, number), number
        return self._open

    def _opened(self, path: Path, number: int) -> ColumnFile:
        size = self._spec["sizes"][number]
        if self._spec["kind"] == "zarr":
            from cachetool.sources.zarr import RemoteFolder, open_zarr

            root = self._spec["roots"][number]
            folder = RemoteFolder(self._ranges, root, self._spec["folders"])
            return open_zarr(path, self._options, folder, stored=size)
        file = RangeFile(self._ranges, number, size)
        if self._spec["kind"] == "parquet":
            from cachetool.sources.parquet import open_parquet

            return open_parquet(path, self._options, cast(BinaryIO, file), stored=size)
        from cachetool.sources.hdf5 import open_hdf5

        return open_hdf5(path, self._options, cast(BinaryIO, file), stored=size)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _facts(file: ColumnFile) -> FileFacts:
    columns = file.columns
    largest = max(columns.values(), key=lambda column: column.nbytes)
    return FileFacts(
        rows=file.samples,
        chunk=largest.chunk,
        piece=file.piece,
        schema=file.schema.to_json(),
        offsets={name: column.offset for name, column in columns.items()},
        stored={name: column.stored for name, column in columns.items() if column.offset >= 0},
        cuts=file.cuts,
        parts=_parts([column for column in columns.values() if column.chunk == largest.chunk]),
    )


def _parts(columns: list[StoredColumn]) -> list[Part]:
    parts: list[Part] = []
    for column in columns:
        if column.parts is not None:
            parts += itertools.islice(column.parts(), MAX_PARTS + 1)
    return parts if len(parts) <= MAX_PARTS else []
