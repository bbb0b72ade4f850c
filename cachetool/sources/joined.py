"""Several files of one kind as one input: their samples one after another, under a schema that holds them all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block, Column, Ragged
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.sources.readers import ClosingFile, RandomAccess, bounded

__all__ = ["JoinedFiles", "common", "conform"]


class JoinedFiles(ClosingFile):
    """Files of one kind; see :class:`cachetool.sources.readers.RandomAccess`. One is open at a time."""

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        open_one: Callable[[Path], RandomAccess],
        notice: Callable[[Path], None],
    ) -> None:
        """Opens each of ``files`` once; ``notice`` is told which one is touched next.

        Raises :class:`BadObject` naming two files whose samples differ.
        """
        self.path, self._notice = path, notice
        self._files: list[RandomAccess] = []
        skipped: list[tuple[str, str]] = []
        for file in files:
            notice(file)
            opened = open_one(file)
            opened.close()
            self._files.append(opened)
            skipped += [(f"{file.name}: {name}", reason) for name, reason in opened.skipped]
        self.skipped = bounded(skipped)
        self.piece = max(source.piece for source in self._files)
        self.schema = self._files[0].schema
        for other in self._files[1:]:
            self.schema = common(self.schema, other.schema, first=self._files[0].path, then=other.path)
        self._starts = [0, *accumulate(source.samples for source in self._files)]
        self.samples = self._starts[-1]

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        parts = []
        while start < stop:
            index = bisect_right(self._starts, start) - 1
            first, end = self._starts[index], min(stop, self._starts[index + 1])
            self._notice(self._files[index].path)
            parts.append(conform(self._files[index].read(start - first, end - first), self.schema))
            if end == self._starts[index + 1]:
                self._files[index].close()
            start = end
        return Block.concat(parts) if parts else Block.from_samples(self.schema, [])

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All samples in order; no block holds samples of two files."""
        for file in self._files:
            self._notice(file.path)
            try:
                for block in file.blocks(block_bytes=block_bytes):
                    yield conform(block, self.schema)
            finally:
                file.close()

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()


def common(a: Schema, b: Schema, *, first: Path, then: Path) -> Schema:
    """The schema that holds samples of both: arrays whose sizes differ become ragged.

    Raises :class:`BadObject` naming the two files when there is none.
    """
    if set(a.names) != set(b.names):
        only = sorted(set(a.names) ^ set(b.names))
        raise BadObject(
            f"{first} and {then} differ in their fields: {', '.join(only)[:200]}; choose some that all have with"
            " --fields, or convert them apart"
        )
    fields = []
    for field in a:
        other = b[field.name]
        if field == other:
            fields.append(field)
        elif field.dtype == other.dtype and field.rank == other.rank:
            fields.append(Field(field.name, field.dtype, (None,) * field.rank))
        else:
            raise BadObject(
                f"field {field.name!r} is {field.describe()} in {first} but {other.describe()} in {then};"
                " leave it out with --fields, or convert them apart"
            )
    return Schema(tuple(fields))


def conform(block: Block, schema: Schema) -> Block:
    """The same samples under a schema that :func:`common` made; columns stay views."""
    if block.schema == schema:
        return block
    columns: dict[str, Column] = {}
    for field in schema:
        column = block.columns[field.name]
        if field.kind == "ragged" and not isinstance(column, Ragged):
            size = int(np.prod(column.shape[1:], dtype=np.int64))
            offsets = np.arange(len(column) + 1, dtype=np.int64) * size
            shapes = np.tile(np.array(column.shape[1:], dtype=np.int64), (len(column), 1))
            column = Ragged(np.ascontiguousarray(column).reshape(-1), offsets, shapes)
        columns[field.name] = column
    return Block(schema, columns)
