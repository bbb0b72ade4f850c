"""From the bytes of a unit to its samples: by extents, through the guarded process, or out of a whole archive."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from cachetool.core.block import Block, Column
from cachetool.core.errors import BadObject
from cachetool.core.schema import Field
from cachetool.core.units import format_size
from cachetool.sources.byte_source import Files, renamed
from cachetool.sources.file_table import Run, Table
from cachetool.sources.joined import common
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import FileOptions, FileSource

__all__ = ["Reader", "Want", "reader_of"]

RESIDENT = 16 * 2**20
"""A field of few bytes a row that takes no more than this in its file is fetched whole and kept."""
_SMALL_ROW = 4 * 2**10
_KEPT = 64 * 2**20
_PART = 8 * 2**20
_TAR_END = 1024
MAX_WHOLE = 4 * 2**30
"""Bytes of an archive that is fetched as a whole, since it lies in memory meanwhile."""


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
    fetched: int
    """Bytes that it fetched itself so far."""

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
    if not table.layouts:
        return _Archives(files, table, options)
    if all(layout.stored for layout in table.layouts):
        return _Extents(files, table)
    return _Guarded(files, table, options)


class _Extents:
    """Rows that lie one after another in their files: their place is known, and no library is needed."""

    labels, numbered = False, True

    def __init__(self, files: Files, table: Table) -> None:
        self._files, self._table = files, table
        self._kept: OrderedDict[tuple[int, str], memoryview] = OrderedDict()
        self.fetched = 0

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


class _Guarded:
    """Rows that a library finds: it reads in the guarded process, which asks for what it needs."""

    labels, numbered = False, True

    def __init__(self, files: Files, table: Table, options: SourceOptions) -> None:
        self._files, self._table, self._options = files, table, options
        self._schema = table.layouts[0].schema
        for layout in table.layouts[1:]:
            self._schema = common(self._schema, layout.schema, first=Path("one file"), then=Path("another"))
        self._open: object = None
        self.fetched = 0

    def wants(self, run: Run) -> list[Want]:
        return [Want(item, start, stop) for item, start, stop in self._table.parts_of(run).tolist()]

    def nbytes(self, run: Run) -> int:
        row = self._schema.fixed_nbytes if self._schema.is_fixed else 0
        return (run.stop - run.start) * row or 2**20

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        from cachetool.sources.file_listing import Guarded

        if self._open is None:
            self._open = Guarded(
                self._files,
                self._table.kind,
                self._options,
                roots=self._table.roots,
                folders=self._table.folders,
                schema=self._schema,
                rows=self._table.rows.tolist(),
                piece=self._table.piece,
            )
        assert isinstance(self._open, Guarded)
        server, source = self._open.server, self._open.source
        first = int(self._table.starts[run.file])
        before, server.failure = server.fetched, None
        server.given = [
            (self._files.name(want.item) if self._table.roots else want.item, want.start, want.stop, body)
            for want, body in zip(self.wants(run), bodies, strict=True)
        ]
        with renamed(server.path, self._files.store.url, server):
            block = source.read(first + run.start, first + run.stop)
        server.given = []
        self.fetched += server.fetched - before
        return block

    def close(self) -> None:
        from cachetool.sources.file_listing import Guarded

        if isinstance(self._open, Guarded):
            self._open.close()
        self._open = None


@contextlib.contextmanager
def _nameless() -> Iterator[tuple[int, Path]]:
    """A file in memory and a path to it, also for another process; where there is no such thing, a temporary one."""
    try:
        fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux; a sandbox that forbids it
        with tempfile.NamedTemporaryFile(prefix="cachetool-", buffering=0) as file:
            yield file.fileno(), Path(file.name)
        return
    try:
        yield fd, Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


class _Archives:
    """Files of records, whole or by those parts of them that an index names, in memory while they are read."""

    def __init__(self, files: Files, table: Table, options: SourceOptions) -> None:
        self._files, self._table, self._kind, self._options = files, table, table.kind, options
        self.labels = table.kind == "tar"
        self.numbered = True
        self.fetched = 0

    def wants(self, run: Run) -> list[Want]:
        if not self._table.file_is_unit:
            return [Want(item, start, stop) for item, start, stop in self._table.parts_of(run).tolist()]
        size = self._files.item(run.file).size
        if size > MAX_WHOLE:
            return []
        return [Want(run.file, at, min(at + _PART, size)) for at in range(0, size, _PART)]

    def nbytes(self, run: Run) -> int:
        if not self._table.file_is_unit:
            return sum(want.stop - want.start for want in self.wants(run))
        return int(self._files.item(run.file).size)

    def block(self, run: Run, bodies: list[memoryview]) -> Block:
        item = self._files.item(run.file)
        if self._table.file_is_unit and item.size > MAX_WHOLE:
            raise BadObject(f"{item.key!r} has {format_size(item.size)}; up to {format_size(MAX_WHOLE)} are read whole")
        with _nameless() as (fd, path):
            while bodies:
                body = bodies.pop(0)
                while body:
                    body = body[os.write(fd, body) :]
            if self._kind == "tar" and not self._table.file_is_unit:
                os.write(fd, bytes(_TAR_END))
            with renamed(path, item.key), self._opened(path) as source:
                blocks = list(source.blocks())
                block = Block.concat(blocks) if blocks else Block.from_samples(source.schema, [])
            if not self._table.file_is_unit and len(block) != run.stop - run.start:
                raise BadObject(f"{item.key!r} holds other records than its index says")
            return block

    def _opened(self, path: Path) -> FileSource:
        asked = {name: value for name, value in self._options.to_json().items() if name != "concurrency"}
        options = FileOptions.from_json({**asked, "label_from_folder": self.labels and asked["label_from_folder"]})
        if self._kind == "tar":
            from cachetool.sources.tar import TarFiles

            return TarFiles(path, [path], options)
        if self._kind == "tfrecord" and self._table.ours is not None:
            from cachetool.sources.ours import our_records

            return our_records(path, options, self._table.ours)
        if self._kind == "tfrecord":
            from cachetool.sources.tfrecord import TFRecordFiles

            return TFRecordFiles(path, [path], options)
        from cachetool.sources.guard import GuardedFile

        return GuardedFile(path, options)

    def close(self) -> None:
        pass
