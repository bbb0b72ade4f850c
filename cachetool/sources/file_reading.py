"""From the bytes of a unit to its samples: by extents, through a library, or out of a whole archive."""

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
"""A field of few bytes a row that takes no more than this in its file is fetched whole and kept."""
_SMALL_ROW = 4 * 2**10
_KEPT = 64 * 2**20
_PART = 8 * 2**20
_TAR_END = 1024


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes ``start`` to ``stop`` of an object."""

    item: int
    start: int
    stop: int


class Reader(Protocol):
    """What a kind of files needs fetched for a run, and what it makes of that. Used by one thread."""

    labels: bool
    """Whether it takes care of ``--label-from-folder`` itself."""
    numbered: bool
    """Whether samples are told apart by their numbers."""
    in_order: bool
    """Whether only who reads all in order reads fast."""
    fetched: int
    """Bytes that it fetched itself so far."""
    skipped: LeftOut
    """What is not taken of the files that were opened as a whole so far, of which the tables do not tell."""

    def wants(self, run: Run) -> list[Want]:
        """The parts to fetch, in the order in which :meth:`block` takes them."""
        ...

    def nbytes(self, run: Run) -> int:
        """About how many bytes its unit takes in memory."""
        ...

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        """All samples of the run's unit. Raises :class:`BadObject`."""
        ...

    def close(self) -> None:
        """Let go of processes."""
        ...


def reader_of(files: Files, table: Table, options: SourceOptions) -> Reader:
    """The reader for these tables."""
    if table.kind.records:
        return _Records(files, table, options)
    if all(layout.stored for layout in table.layouts):
        return _Extents(files, table)
    return _Opened(files, table, options)


class _Extents:
    """Rows that lie one after another in their files: their place is known, and no library is needed."""

    labels, numbered, in_order = False, True, False

    def __init__(self, files: Files, table: Table) -> None:
        self._files, self._table = files, table
        self._kept: OrderedDict[tuple[int, str], memoryview] = OrderedDict()
        self.fetched, self.skipped = 0, LeftOut()

    def _resident(self, file: int, nbytes: int) -> bool:
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
            columns[field.name] = rows.astype(field.numpy, copy=False)
        return Block(layout.schema, columns)

    def _column(self, file: int, field: Field) -> memoryview:
        """All of a small field."""
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
    """Rows that a library finds, which asks for the bytes that it needs."""

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
        if self._at_hand:  # whoever needs them reads them out of the file
            return []
        return [Want(item, start, stop) for item, start, stop in self._table.parts_of(run).tolist()]

    def nbytes(self, run: Run) -> int:
        row = self._schema.fixed_nbytes if self._schema.is_fixed else 0
        return (run.stop - run.start) * row or 2**20

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
        block: Block = self._open.read(first + run.start, first + run.stop)
        ranges.given = []
        self.fetched += ranges.fetched - before
        return block

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


class _Records:
    """Files of records, whole or by those parts of them that an index names, in memory while they are read."""

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
        if not table.file_is_unit and len(block) != run.stop - run.start:
            raise BadObject(f"{item.key!r} holds other records than its index says")
        return block

    def _note(self, file: int, source: RecordFile | RandomAccess) -> None:
        """Keep what is not taken of a file that was opened."""
        if self._table.file_is_unit:
            several = len(self._table.rows) > 1
            self.skipped.update(of_file(self._files.name(file), source.skipped) if several else source.skipped)

    def _by_path(self, bodies: list[memoryview], name: str, file: int) -> Block:
        options = records_options(self._options, self._kind)
        with nameless() as (fd, path):
            while bodies:
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
