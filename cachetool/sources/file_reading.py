"""The samples of a unit, made from its bytes: by known offsets, through a library, or from a complete archive."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from cachetool.core.block import Block, Column
from cachetool.core.errors import BadObject
from cachetool.core.schema import Field
from cachetool.sources.byte_source import Files, MemoryRanges, SourceFile, renamed
from cachetool.sources.file_opening import (
    MAX_WHOLE,
    OpenedRows,
    WholeFile,
    called,
    nameless,
    open_at,
    records_options,
    refuse_large,
    run_of_blocks,
    write_body,
)
from cachetool.sources.file_table import Run, Table
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import LeftOut, RandomAccess, RecordFile, of_file
from cachetool.sources.shapes import common

__all__ = ["Reader", "Want", "reader_of"]

RESIDENT = 16 * 2**20
"""Largest size in bytes, in one file, of a field of small rows that is fetched completely and cached."""
_SMALL_ROW = 4 * 2**10
_KEPT = 64 * 2**20
_PART = 8 * 2**20
# Two blocks of zeros end a tar archive. A unit cut out of the middle lacks them, and the reader would call it
# truncated.
_TAR_END = 1024


@dataclass(frozen=True, slots=True)
class Want:
    """A request for bytes ``start`` to ``stop`` of an object."""

    item: int
    start: int
    stop: int


class Reader(Protocol):
    """A reader of one kind of files: it says what to fetch for a run, and makes samples of the bytes. One thread uses
    it."""

    labels: bool
    """True if the reader adds the label for ``--label-from-folder`` itself."""
    numbered: bool
    """True if samples of one file are distinguished by numbers."""
    in_order: bool
    """True if reading is fast only from the first sample to the last."""
    fetched: int
    """Bytes that the reader has fetched by itself so far."""
    skipped: LeftOut
    """Data of files that were opened as a whole and that is in no sample. The tables do not list it."""

    def wants(self, run: Run) -> list[Want]:
        """Return the parts to fetch, in the order in which :meth:`block` takes them."""
        ...

    def nbytes(self, run: Run) -> int:
        """Return about how many bytes the run's unit takes in memory."""
        ...

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        """Return all samples of the run's unit. Raise :class:`BadObject` if they cannot be read."""
        ...

    def close(self) -> None:
        """End the processes of the reader."""
        ...


def reader_of(files: Files, table: Table, options: SourceOptions) -> Reader:
    """Return the reader for these tables."""
    if table.kind.records:
        return _Records(files, table, options)
    if all(layout.stored for layout in table.layouts):
        return _Extents(files, table)
    return _Opened(files, table, options)


class _Extents:
    """A reader of rows at known offsets in their files. It needs no library."""

    labels, numbered, in_order = False, True, False

    def __init__(self, files: Files, table: Table) -> None:
        self._files, self._table = files, table
        self._kept: OrderedDict[tuple[int, str], memoryview] = OrderedDict()
        self.fetched, self.skipped = 0, LeftOut()

    def _resident(self, file: int, nbytes: int) -> bool:
        # A small field beside larger ones, such as a label, would cost one request for each unit. Fetched once for the
        # file it costs one request in all.
        return self._several(file) and bool(nbytes < _SMALL_ROW and nbytes * self._table.rows[file] <= RESIDENT)

    def _several(self, file: int) -> bool:
        return len(self._table.layouts[self._table.layout[file]].schema) > 1

    def wants(self, run: Run) -> list[Want]:
        out = []
        for field in self._table.layouts[self._table.layout[run.file]].schema:
            if not self._resident(run.file, field.nbytes):
                offset = self._table.offset(run.file, field.name)
                out.append(Want(run.file, offset + run.start * field.nbytes, offset + run.stop * field.nbytes))
        return out

    def nbytes(self, run: Run) -> int:
        return int((run.stop - run.start) * self._table.layouts[self._table.layout[run.file]].schema.fixed_nbytes)

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        layout = self._table.layouts[self._table.layout[run.file]]
        columns: dict[str, Column] = {}
        parts = iter(bodies)
        for index, field in enumerate(layout.schema):
            if self._resident(run.file, field.nbytes):
                body = self._column(run.file, field)[run.start * field.nbytes : run.stop * field.nbytes]
            else:
                body = next(parts)
            rows = np.frombuffer(body, dtype=layout.stored[index]).reshape(run.stop - run.start, *field.sizes)
            # Little-endian rows stay views of the fetched bytes. Only big-endian files are copied.
            columns[field.name] = rows.astype(field.numpy, copy=False)
        return Block(layout.schema, columns)

    def _column(self, file: int, field: Field) -> memoryview:
        """Return all values of a small field of a file, from the cache if possible."""
        body = self._kept.get((file, field.name))
        if body is None:
            offset, count = self._table.offset(file, field.name), field.nbytes * int(self._table.rows[file])
            body = self._files.store.get_range(self._files.item(file), offset, count)
            self.fetched += len(body)
            self._kept[file, field.name] = body
            while sum(map(len, self._kept.values())) > _KEPT and len(self._kept) > 1:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end((file, field.name))
        return body

    def close(self) -> None:
        self._kept.clear()


class _Opened:
    """A reader of rows through a library, which requests the bytes that it needs."""

    labels, numbered, in_order = False, True, False

    def __init__(self, files: Files, table: Table, options: SourceOptions) -> None:
        self._files, self._table, self._options = files, table, options
        self._schema = table.layouts[0].schema
        for layout in table.layouts[1:]:
            self._schema = common(self._schema, layout.schema, first=Path("one file"), then=Path("another"))
        self._open: OpenedRows | None = None
        self._at_hand = table.in_order and not table.roots and files.at_hand
        self.fetched, self.skipped = 0, LeftOut()

    def wants(self, run: Run) -> list[Want]:
        # The guarded process reads these bytes out of the file of this machine, through a descriptor. Fetching them as
        # well would read them twice.
        if self._at_hand:
            return []
        return [Want(item, start, stop) for item, start, stop in self._table.parts_of(run).tolist()]

    def nbytes(self, run: Run) -> int:
        row = self._schema.fixed_nbytes if self._schema.is_fixed else 0
        # Samples that differ in size have no size known here. 1 MiB a run keeps a batch to a few such runs. Blocks have
        # the size of the largest part at most.
        grid = self._table.layouts[self._table.layout[run.file]].grid
        return (run.stop - run.start) * (row or (self._table.piece if grid else 0)) or 2**20

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        if self._open is None:
            self._open = OpenedRows(
                self._files,
                self._table.kind,
                self._options,
                roots=self._table.roots,
                folders=self._table.folders,
                schema=self._schema,
                rows=self._table.rows.tolist(),
                piece=self._table.piece,
                in_order=self._table.in_order,
            )
        ranges, before = self._open.ranges, self._open.ranges.fetched
        ranges.given = [
            (self._files.name(want.item) if self._table.roots else want.item, want.start, want.stop, body)
            for want, body in zip(self.wants(run), bodies, strict=True)
        ]
        first = int(self._table.starts[run.file])
        # The bodies were fetched by many threads beforehand. The library asks for them one by one, and is answered out
        # of memory.
        block: Block = self._open.read(first + run.start, first + run.stop)
        ranges.given = []
        self.fetched += ranges.fetched - before
        return block

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


class _Records:
    """A reader of files of records: complete files, or the parts that an index names. Both are in memory while they are
    read."""

    def __init__(self, files: Files, table: Table, options: SourceOptions) -> None:
        self._files, self._table, self._kind, self._options = files, table, table.kind, options
        self.labels = table.kind.name == "tar"
        self.numbered = True
        self.fetched, self.skipped = 0, LeftOut()
        self._open: tuple[int, WholeFile] | None = None
        self._in_parts = np.zeros(len(table.rows), dtype=np.bool_)
        self._in_parts[table.parts[:, 0]] = True
        by_path = table.kind.by_path or table.ours is not None
        apart = self._in_parts | (table.rows == 0)
        self.in_order = bool(not table.file_is_unit and not by_path and not apart.all())

    def wants(self, run: Run) -> list[Want]:
        if not self._table.file_is_unit:
            return [Want(item, start, stop) for item, start, stop in self._table.parts_of(run).tolist()]
        size = self._files.item(run.file).size
        if size > MAX_WHOLE:
            return []
        return [Want(run.file, at, min(at + _PART, size)) for at in range(0, size, _PART)]

    def nbytes(self, run: Run) -> int:
        if not self._table.file_is_unit:
            return sum(want.stop - want.start for want in self.wants(run)) or _PART
        return int(self._files.item(run.file).size)

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        item, table = self._files.item(run.file), self._table
        layout = table.layouts[table.layout[run.file]] if table.layouts else None
        if table.file_is_unit:
            refuse_large(item)
        elif not self._in_parts[run.file]:
            if self._open is None or self._open[0] != run.file:
                self.close()
                self._open = run.file, WholeFile(self._files, run.file, self._kind, self._options, table.ours, layout)
            return self._open[1].read(run.start, run.stop)
        if self._kind.by_path or (table.ours is not None and self._kind.name == "tfrecord"):
            block = self._by_path(bodies, called(self._files, run.file, self._kind), run.file)
        else:
            if self._kind.name == "tar" and not table.file_is_unit:
                # The unit is a part of the archive without the end mark that a tar reader looks for.
                bodies.append(memoryview(bytes(_TAR_END)))
            body = bodies[0] if len(bodies) == 1 else b"".join(bodies)
            file = SourceFile(
                Path(item.key), len(body), MemoryRanges(body), in_order=True, schema=layout.schema if layout else None,
                names=layout.names if layout else {},
            )  # fmt: skip
            source: RecordFile = self._kind.opened(file, records_options(self._options, self._kind))
            self._note(run.file, source)
            blocks = list(source.blocks())
            block = Block.concat(blocks) if blocks else Block.from_samples(source.schema, [])
        # An index beside the file may be old or forged. Other counts would shift samples against the numbers of their
        # draws.
        if not table.file_is_unit and len(block) != run.stop - run.start:
            raise BadObject(f"{item.key!r} has other records than its index says")
        return block

    def _note(self, file: int, source: RecordFile | RandomAccess) -> None:
        """Remember the data of an opened file that is in no sample."""
        if self._table.file_is_unit:
            several = len(self._table.rows) > 1
            self.skipped.update(of_file(self._files.name(file), source.skipped) if several else source.skipped)

    def _by_path(self, bodies: list[memoryview], name: str, file: int) -> Block:
        options = records_options(self._options, self._kind)
        with nameless() as (fd, path):
            while bodies:
                # Each body is released once it is in the file. Otherwise the archive would be in memory twice.
                write_body(fd, bodies.pop(0))
            with renamed(path, name):
                source = open_at(path, self._kind, options, self._table.ours)
                with contextlib.closing(source):
                    self._note(file, source)
                    blocks = list(run_of_blocks(source, 0, source.samples))
                    return Block.concat(blocks) if blocks else Block.from_samples(source.schema, [])

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
