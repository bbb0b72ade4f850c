"""From positions to arrays: the values of any samples of a view, copied once, out of any format.

::

    indices -> (part, number within) -> where the bytes of each field lie in the part -> copied into one column a field
                                        OpenPart.locate gives Runs

An uncompressed part is mapped and read by its extents. Any other is read through its format's library, whose block is
then the buffer that is copied from.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.block import Column, Ragged
from cachetool.errors import CacheToolError, CorruptError, UsageError
from cachetool.extents import Extents
from cachetool.formats import get_format
from cachetool.formats.base import Reader
from cachetool.formats.files import map_file
from cachetool.formats.reading import load_extents
from cachetool.formats.runs import Bytes, Int64s, as_bytes, copy_runs, ends
from cachetool.loaders.view import Part, View
from cachetool.schema import Field, Schema

__all__ = ["OpenPart", "Parts", "Runs", "gather", "open_by_extents", "open_by_library"]

Empty = Callable[[Field, tuple[int, ...]], npt.NDArray[Any]]
Opener = Callable[[Part, Schema], "OpenPart"]


class Runs(NamedTuple):
    """Where the values of one field lie for some samples of one part."""

    buffer: Bytes
    starts: Int64s
    """Position of each value in the buffer, (k,)."""
    sizes: Int64s
    """Bytes of each value, (k,)."""
    shapes: Int64s | None
    """Shape of each value of a ragged field, (k, rank)."""


class OpenPart(Protocol):
    """One open part; belongs to one thread of one process."""

    def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
        """Where the fields of ``schema`` lie for the samples ``within``. Raises :class:`CorruptError`."""
        ...

    def close(self) -> None:
        """Let go of files and maps."""
        ...


class _MappedPart:
    """A part read out of memory maps of its files, by its extents."""

    def __init__(self, folder: Path, extents: Extents) -> None:
        self._folder, self._extents = folder, extents
        self._maps: dict[int, Bytes] = {}
        self._scalars: dict[str, Bytes] = {}

    def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
        return {field.name: self._locate(within, field) for field in schema}

    def _locate(self, within: Int64s, field: Field) -> Runs:
        extents = self._extents.fields[field.name]
        if extents.column is not None:
            itemsize = extents.column.itemsize
            return Runs(as_bytes(extents.column), within * itemsize, np.full(len(within), itemsize), None)
        buffer = self._maps.get(extents.file)
        if buffer is None:
            buffer = self._maps[extents.file] = map_file(self._folder / self._extents.files[extents.file])
        starts, sizes = extents.locate(within)
        shapes = None if extents.shapes is None else extents.shapes[within]
        if len(within) and not 0 <= int(starts.min()) <= int((starts + sizes).max()) <= len(buffer):
            raise CorruptError(
                f"{self._folder / self._extents.files[extents.file]} is cut short: it has {len(buffer)} bytes,"
                f" field {field.name!r} reaches to {int((starts + sizes).max())}"
            )
        return Runs(buffer, starts, sizes, shapes)

    def close(self) -> None:
        self._maps.clear()


class _LibraryPart:
    """A part read through its format's own library."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
        block = self._reader.take(within)
        return {field.name: _runs(block.columns[field.name], field) for field in schema}

    def close(self) -> None:
        self._reader.close()


def _runs(column: Column, field: Field) -> Runs:
    if isinstance(column, Ragged):
        starts = column.offsets * column.values.itemsize
        return Runs(as_bytes(column.values), starts[:-1], np.diff(starts), column.shapes)
    numbers = np.arange(len(column), dtype=np.int64)
    return Runs(as_bytes(column), numbers * field.nbytes, np.full(len(column), field.nbytes), None)


def open_by_library(part: Part, schema: Schema) -> OpenPart:
    """Open a part through its format's own library."""
    kind = get_format(part.format)
    return _LibraryPart(kind.open(part.folder / (part.file or f"data{kind.suffix}"), schema=schema))


def open_by_extents(part: Part, schema: Schema) -> OpenPart:
    """Open a part by its extents; through its format's library when it has none, as compressed ones do."""
    if not part.extents.exists():
        return open_by_library(part, schema)
    return _MappedPart(part.folder, load_extents(part.extents, schema))


class Parts:
    """The open parts of this process: opened at first use, at most ``limit`` at a time, the least used closed first.

    After a fork, and in a pickled copy, nothing is open: what the parent had open is closed in the child before the
    child opens its own (py-lmdb opens a file only once a process, and counts an inherited one).
    """

    def __init__(self, opener: Opener, *, limit: int | None = None) -> None:
        self._opener = opener
        self.limit = limit or _descriptors() // 4
        self._open: OrderedDict[str, OpenPart] = OrderedDict()
        self._pid = os.getpid()

    def get(self, part: Part, schema: Schema) -> OpenPart:
        """The open part. Raises :class:`UsageError` when it was evicted, and what opening it raises."""
        if self._pid != os.getpid():
            self.close()
            self._pid = os.getpid()
        found = self._open.get(part.id)
        if found is not None:
            self._open.move_to_end(part.id)
            return found
        while len(self._open) >= self.limit:
            self._open.popitem(last=False)[1].close()
        try:
            found = self._opener(part, schema)
        except (OSError, CacheToolError) as error:
            # Eviction unlinks shard.json before anything else of a shard.
            if part.file or (part.folder / "shard.json").exists():
                raise
            raise UsageError(
                f"shard {part.id} was evicted: these indices are of an earlier snapshot, whose lease is over"
            ) from error
        self._open[part.id] = found
        return found

    def keep(self, view: View) -> None:
        """Close what is not in ``view``: an unlinked file that is still mapped still fills the disk."""
        wanted = {part.id for part in view.parts}
        for name in [name for name in self._open if name not in wanted]:
            self._open.pop(name).close()

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._open.popitem()[1].close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opener,)


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(soft, 4096)


def _new(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.empty(shape, dtype=field.numpy)


def gather(view: View, indices: Int64s, parts: Parts, schema: Schema, *, empty: Empty = _new) -> dict[str, Column]:
    """The columns of the samples at ``indices`` of ``view``, in that order, repeats allowed.

    ``schema`` chooses the fields. ``empty(field, shape)`` makes the arrays that values are copied into: (k, *shape) of
    the field's dtype for a fixed field, flat for the values of any other. Raises ``IndexError`` for an index outside
    the view, :class:`CorruptError` naming a file that is cut short.
    """
    numbers, within = view.find(indices)
    order = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    groups: list[tuple[Int64s, Mapping[str, Runs]]] = []
    chosen = np.split(order, cuts) if len(order) else []
    for to in chosen:
        part = view.parts[int(numbers[to[0]])]
        located = parts.get(part, view.schema).locate(within[to], schema)
        if len(chosen) > parts.limit:  # else the runs would keep more files mapped than may be open
            located = {name: _copied(runs) for name, runs in located.items()}
        groups.append((to, located))
    return {field.name: _column(field, len(indices), groups, empty) for field in schema}


def _copied(runs: Runs) -> Runs:
    starts = ends(runs.sizes)
    buffer = np.empty(int(starts[-1]), dtype=np.uint8)
    copy_runs(buffer, starts[:-1], runs.buffer, runs.starts, runs.sizes)
    return Runs(buffer, starts[:-1], runs.sizes, runs.shapes)


def _column(field: Field, count: int, groups: list[tuple[Int64s, Mapping[str, Runs]]], empty: Empty) -> Column:
    if field.kind == "fixed":
        fixed = empty(field, (count, *field.sizes))
        _copy(as_bytes(fixed), np.arange(count, dtype=np.int64) * field.nbytes, field.name, groups)
        return fixed
    sizes = np.zeros(count, dtype=np.int64)
    shapes = np.zeros((count, field.rank), dtype=np.int64) if field.kind == "ragged" else None
    for to, runs in groups:
        found = runs[field.name]
        sizes[to] = found.sizes
        if shapes is not None and found.shapes is not None:
            shapes[to] = found.shapes
    starts = ends(sizes)
    itemsize = field.numpy.itemsize
    if shapes is not None and (shapes.prod(axis=1) * itemsize != sizes).any():
        raise CorruptError(f"field {field.name!r}: a shape that does not fit its bytes")
    values = empty(field, (int(starts[-1]) // itemsize,))
    _copy(as_bytes(values), starts[:-1], field.name, groups)
    return Ragged(values, starts // itemsize, shapes)


def _copy(out: Bytes, starts: Int64s, name: str, groups: list[tuple[Int64s, Mapping[str, Runs]]]) -> None:
    for to, runs in groups:
        found = runs[name]
        copy_runs(out, starts[to], found.buffer, found.starts, found.sizes)
