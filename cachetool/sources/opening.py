"""Opening of files by their kind: the facts about one file of rows or records, and reading runs of rows of several
files.

:func:`open_served` and :func:`open_path` run in the guarded process, in two situations. When files are listed, each is
opened once to find its :class:`FileFacts`. When samples are read, a file is opened at its first sample.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.cf import Packing
from cachetool.core.closing import Closing
from cachetool.core.errors import UsageError
from cachetool.core.schema import Schema
from cachetool.sources.byte_source import MemoryRanges, Ranges, ServedRanges, SourceFile
from cachetool.sources.kinds import kind_named
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import (
    LimitedAccess,
    MisfitRows,
    RandomAccess,
    RecordFile,
    bounded,
    of_file,
)
from cachetool.sources.rows import ColumnFile, Part, StoredColumn
from cachetool.sources.shapes import common, conform

__all__ = ["FileFacts", "OpenedFiles", "facts_of_records", "facts_of_rows", "open_path", "open_served", "units_of"]


MAX_PARTS = 2**19
"""Most chunks of one file whose places are kept, 40 bytes each."""
_PACKED = 4
"""Estimated bytes that come out of one compressed byte."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The facts about one file that a listing keeps."""

    rows: int
    chunk: int
    """Number of rows to fetch together."""
    piece: int
    """Bytes of the largest part that is in memory at once."""
    schema: list[dict[str, Any]]
    offsets: dict[str, int]
    """The byte at which the first row of each field lies if its rows lie one after another, otherwise -1."""
    stored: dict[str, str]
    """The dtype in the file, for each field with an offset."""
    cuts: list[int] | None = None
    """The rows at which units end, if units differ in size."""
    parts: list[Part] = field(default_factory=list)
    """The parts of the file that units consist of, to be fetched before the library asks for them. Empty if the places
    are unknown or too many."""
    row: int = 0
    """Approximate bytes of a row in the file, if rows differ in size."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in the file, for fields that have another name."""
    grid: list[tuple[str, int, int]] = field(default_factory=list)
    """The blocks that are the samples, if rows are not: see :data:`cachetool.sources.rows.Grid`."""
    packing: dict[str, Packing] = field(default_factory=dict)
    """The CF attributes of fields whose numbers stand for other values."""


def facts_of_rows(file: ColumnFile, size: int) -> FileFacts:
    """Return the facts of a file of ``size`` bytes whose rows are samples."""
    columns = file.columns
    # Units follow the chunks of the largest array, because fetching its chunks twice would cost most.
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
        # The arrays of a block have a known size before they are read, so no block is fetched to measure it.
        row=(sum(c.nbytes for c in columns.values()) if file.grid else size) // max(1, file.samples),
        grid=list(file.grid),
        packing={name: dict(column.packing) for name, column in columns.items() if column.packing},
    )


def _parts(columns: list[StoredColumn]) -> list[Part]:
    parts: list[Part] = []
    for column in columns:
        if column.parts is not None:
            # One more than is kept: enough to see that there are too many, without listing all chunks of a hostile
            # file.
            parts += itertools.islice(column.parts(), MAX_PARTS + 1)
    # The variables of a netCDF record lie in the same part.
    parts = list(dict.fromkeys(parts))
    return parts if len(parts) <= MAX_PARTS else []


def facts_of_records(file: RecordFile | RandomAccess, size: int, unit_bytes: int) -> FileFacts:
    """Return the facts of a file of ``size`` bytes whose records were all read. A unit has about ``unit_bytes``."""
    places, names = getattr(file, "places", []), getattr(file, "names", {})
    cuts: list[int] | None = None
    parts: list[Part] = []
    if places:
        cuts, parts = units_of(*np.array(places, dtype=np.int64).T, unit_bytes=unit_bytes)
    unpacked = size * _PACKED if hasattr(file, "places") else size
    chunk = max(1, file.samples * BLOCK_BYTES // max(1, unpacked))
    schema = file.schema.to_json()
    return FileFacts(file.samples, chunk, 0, schema, {}, {}, cuts, parts, size // max(1, file.samples), names)


def units_of(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], *, unit_bytes: int
) -> tuple[list[int], list[Part]]:
    """Return where units end, and their parts, from the first and last byte of each record.

    Records that begin in the same ``unit_bytes`` of the file share a unit; a larger record is a unit of its own.
    """
    changes = np.flatnonzero(np.diff(starts // unit_bytes)) + 1
    firsts = np.concatenate([[0], changes]) if len(starts) else np.zeros(0, dtype=np.int64)
    lasts = np.concatenate([changes, [len(starts)]]) if len(starts) else firsts
    begins, ends = starts[firsts], stops[lasts - 1] if len(starts) else stops[:0]
    parts = [(a, b, c - b, "") for a, b, c in zip(firsts.tolist(), begins.tolist(), ends.tolist(), strict=True)]
    return lasts.tolist(), parts


def open_served(
    path: str, options: SourceOptions, *, notice: Callable[[Path], None], about: Mapping[str, Any], sockets: list[int]
) -> OpenedFiles:
    """Return the files of rows that ``about`` describes. Their bytes come over a socket from the worker."""
    ranges, spec = ServedRanges(*sockets), about
    if spec["schema"] is not None:
        return OpenedFiles(ranges, spec, options, notice=notice)
    files = _Files(ranges, spec, options, notice)
    schema: Schema | None = None
    skipped: list[tuple[str, str]] = []
    rows, piece, first = [], 0, ""
    for number, name in enumerate(spec["files"]):
        file = files.opened(number)
        facts = facts_of_rows(file, spec["sizes"][number])
        # Sent file by file: the places of one file may take 20 MB (2**19 parts of 40 bytes), and a message at most 64
        # MiB.
        ranges.tell(asdict(facts))
        skipped += of_file(name, file.skipped) if len(spec["files"]) > 1 else file.skipped
        rows.append(facts.rows)
        piece = max(piece, facts.piece)
        if schema is None:
            schema, first = file.schema, name
        else:
            schema = common(schema, file.schema, first=Path(first), then=Path(name))
    files.close()
    if schema is None:
        raise UsageError("no files")
    known = {**spec, "schema": schema.to_json(), "rows": rows, "piece": piece}
    return OpenedFiles(ranges, known, options, notice=notice, skipped=bounded(skipped))


def open_path(
    path: str, options: SourceOptions, *, notice: Callable[[Path], None], about: Mapping[str, Any], sockets: list[int]
) -> LimitedAccess:
    """Return the file at ``path``, of the kind that ``about`` names. Its library reads only complete local files."""
    # The name is announced before the file is opened: if the library crashes, the worker names this file in the error.
    place = Path(path)
    notice(place)
    file = SourceFile(place, place.stat().st_size, MemoryRanges(memoryview(b"")), path=place)
    return cast(LimitedAccess, kind_named(about["kind"]).opened(file, options))


class OpenedFiles(Closing):
    """Rows of several files; see :class:`cachetool.sources.readers.RandomAccess`. One file is open at a time."""

    def __init__(
        self,
        ranges: Ranges,
        spec: Mapping[str, Any],
        options: SourceOptions,
        *,
        notice: Callable[[Path], None] = lambda path: None,
        skipped: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """``spec``: the description of the files, as :class:`cachetool.sources.file_listing.Opened` makes it."""
        self.schema, self.piece, self.skipped = Schema.from_json(spec["schema"]), int(spec["piece"]), skipped
        self._files = _Files(ranges, spec, options, notice)
        self._starts = [0, *accumulate(spec["rows"])]
        self.samples = self._starts[-1]

    def read(self, start: int, stop: int) -> Block:
        """Return the samples from ``start`` to ``stop``, which must lie in one file."""
        number = bisect_right(self._starts, start) - 1
        first = self._starts[number]
        file = self._files.opened(number)
        try:
            return conform(file.read(start - first, stop - first), self.schema)
        except MisfitRows as error:
            raise MisfitRows(file.path, conform(error.block, self.schema), error.misfits) from None

    def close(self) -> None:
        """Close the open file."""
        self._files.close()


class _Files:
    """Files by their number. A file stays open until another one is opened."""

    def __init__(
        self, ranges: Ranges, spec: Mapping[str, Any], options: SourceOptions, notice: Callable[[Path], None]
    ) -> None:
        self._ranges, self._spec, self._options, self._notice = ranges, spec, options, notice
        self._kind = kind_named(spec["kind"])
        self._number = -1
        self._open: ColumnFile | None = None

    def opened(self, number: int) -> ColumnFile:
        if self._open is None or self._number != number:
            self.close()
            spec, path = self._spec, Path(self._spec["files"][number])
            self._notice(path)
            file = SourceFile(
                path,
                spec["sizes"][number],
                self._ranges,
                number,
                root=spec["roots"][number] if spec["roots"] else "",
                folders=tuple(spec["folders"]),
                alone=len(spec["files"]) == 1,
                in_order=spec["in_order"],
            )
            self._open, self._number = self._kind.opened(file, self._options), number
        assert self._open is not None
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
