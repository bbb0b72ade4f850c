"""From positions to arrays: the values of any samples of a view, copied once, out of any format.

::

    indices -> where the bytes of each field lie -> copied into one column a field
               Places.locate gives Runs

Who knows where they lie: :class:`~cachetool.loaders.read.mapped.MappedParts`, by their extents, for all uncompressed
parts at once; of any other part :class:`Parts`, part by part (here): it is read through its format's library, whose
block is then the buffer that is copied from.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import CacheToolError, CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.base import Reader
from cachetool.formats.runs import Int64s, as_bytes, copy_rows, copy_runs, ends, inside
from cachetool.formats.shard import check_library
from cachetool.loaders.view import ShardFile, View

if TYPE_CHECKING:
    from cachetool.loaders.read.unmapped import Unmapped

__all__ = [
    "Empty",
    "Located",
    "OpenPart",
    "Parts",
    "Places",
    "Runs",
    "check_inside",
    "check_shapes",
    "copied",
    "evicted_errors",
    "gather",
    "new_array",
    "open_by_library",
    "short",
]

Empty = Callable[[Field, tuple[int, ...]], npt.NDArray[Any]]
Opener = Callable[[ShardFile, Schema], "OpenPart"]


class Runs(NamedTuple):
    """Where the values of one field lie for some samples."""

    buffer: npt.NDArray[Any]
    """Bytes; the values themselves for a scalar field."""
    starts: Int64s
    """Position of each value in the buffer, (k,)."""
    sizes: Int64s | None = None
    """Bytes of each value, (k,); None for a fixed field, whose values all have as many."""
    shapes: Int64s | None = None
    """Shape of each value of a ragged field, (k, rank)."""
    unmapped: Unmapped | None = None
    """Where they are not in a buffer, but in files: ``starts`` are positions in these."""

    def slice(self, start: int, stop: int) -> Runs:
        """The same of samples ``start`` to ``stop``."""
        sizes = None if self.sizes is None else self.sizes[start:stop]
        shapes = None if self.shapes is None else self.shapes[start:stop]
        unmapped = None if self.unmapped is None else self.unmapped.slice(start, stop)
        return Runs(self.buffer, self.starts[start:stop], sizes, shapes, unmapped)


Located = list[tuple[Int64s | None, Mapping[str, Runs]]]
"""Which of the samples asked for (None: all, in order), and where the fields of those lie."""


class Places(Protocol):
    """Knows where the samples of a view lie; belongs to one thread of one process."""

    def locate(self, view: View, indices: Int64s, schema: Schema) -> Located:
        """Where the fields of ``schema`` lie for the samples ``indices`` of ``view``, in groups that differ.

        Raises ``IndexError``, :class:`CorruptError`, and :class:`UsageError` when a part was evicted.
        """
        ...

    def keep(self, view: View) -> None:
        """Close what is not in ``view``: an unlinked file that is still mapped still fills the disk."""
        ...

    def close(self) -> None:
        """Let go of files and maps. May be called twice."""
        ...


class OpenPart(Protocol):
    """One open part; belongs to one thread of one process."""

    def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
        """Where the fields of ``schema`` lie for the samples ``within``. Raises :class:`CorruptError`."""
        ...

    def close(self) -> None:
        """Let go of files and maps."""
        ...


def check_inside(path: str, size: int, field: Field, starts: Int64s, sizes: Int64s | int) -> None:
    """Raise :class:`CorruptError` unless runs of ``sizes`` from ``starts`` lie inside the ``size`` bytes of a file."""
    if not inside(starts, sizes, size):
        raise short(path, size, field)


def short(path: str, size: int, field: Field) -> CorruptError:
    """The error that says so."""
    return CorruptError(f"{path} is cut short: it has {size} bytes, field {field.name!r} reaches out of them")


def check_shapes(path: str, field: Field, sizes: Int64s, shapes: Int64s | None) -> None:
    """Raise :class:`CorruptError` unless arrays of these ``shapes`` have these ``sizes`` in bytes."""
    if shapes is not None and ((shapes < 0).any() or (shapes.prod(axis=1) * field.numpy.itemsize != sizes).any()):
        raise CorruptError(f"{path}: field {field.name!r} has a shape that does not fit its bytes")


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
    return Runs(column, numbers) if field.is_scalar else Runs(as_bytes(column), numbers * field.nbytes)


def open_by_library(part: ShardFile, schema: Schema) -> OpenPart:
    """Open a part through its format's own library."""
    if not part.links:
        check_library(part.folder, None if part.extents.exists() else part.digest or None)
    kind = get_format(part.format)
    return _LibraryPart(kind.open(part.folder / (part.file or f"data{kind.suffix}"), schema=schema))


@contextmanager
def evicted_errors(part: ShardFile) -> Iterator[None]:
    """Turn what opening a part raises into :class:`UsageError` when the part was evicted."""
    try:
        yield
    except (OSError, CacheToolError) as error:
        # Eviction unlinks shard.json before anything else of a shard.
        if part.file or (part.folder / "shard.json").exists():
            raise
        from cachetool.cache.layout import cache_option

        repair = f"cachetool verify --repair{cache_option(part.folder.parent.parent)}"
        raise UsageError(
            f"shard {part.id} was evicted: these indices are of an earlier snapshot, whose lease is over"
            f" (or its files were deleted by hand, which this brings again: {repair})"
        ) from error


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

    def get(self, part: ShardFile, schema: Schema) -> OpenPart:
        """The open part. Raises :class:`UsageError` when it was evicted, and what opening it raises."""
        if self._pid != os.getpid():
            self.close()
            self._pid = os.getpid()
        opened = self._open.get(part.id)
        if opened is not None:
            self._open.move_to_end(part.id)
            return opened
        while len(self._open) >= self.limit:
            self._open.popitem(last=False)[1].close()
        with evicted_errors(part):
            opened = self._open[part.id] = self._opener(part, schema)
        return opened

    def locate(self, view: View, indices: Int64s, schema: Schema) -> Located:
        """Where the samples lie, one group a part."""
        numbers, within = view.find(indices)
        order = np.argsort(numbers, kind="stable")
        groups: Located = []
        chosen = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
        for to in chosen:
            part = view.parts[int(numbers[to[0]])]
            located = self.get(part, view.schema).locate(within[to], schema)
            if len(chosen) > self.limit:  # else the runs would keep more files mapped than may be open
                located = {field.name: _copied(located[field.name], field) for field in schema}
            groups.append((to, located))
        return groups

    def keep(self, view: View) -> None:
        """Close what is not in ``view``."""
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


def new_array(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Plain memory for the values of a field."""
    return np.empty(shape, dtype=field.numpy)


def gather(
    view: View, indices: Int64s, parts: Places, schema: Schema, *, empty: Empty = new_array
) -> dict[str, Column]:
    """The columns of the samples at ``indices`` of ``view``, in that order, repeats allowed.

    ``schema`` chooses the fields. ``empty(field, shape)`` makes the arrays that values are copied into, C-contiguous:
    (k, *shape) of the field's dtype for a fixed field, flat for the values of any other. Raises ``IndexError`` for an
    index outside the view, :class:`CorruptError` naming a file that is cut short.
    """
    return copied(parts.locate(view, indices, schema), len(indices), schema, empty=empty)


def copied(located: Located, count: int, fields: Iterable[Field], *, empty: Empty = new_array) -> dict[str, Column]:
    """The second half of :func:`gather`: the columns of ``count`` samples that were located."""
    return {field.name: _column(field, count, located, empty) for field in fields}


def _copied(runs: Runs, field: Field) -> Runs:
    if runs.sizes is None:
        values = np.empty((len(runs.starts), *field.sizes), dtype=field.numpy)
        _copy_fixed(values, None, runs, field)
        return _runs(values, field)
    starts = ends(runs.sizes)
    buffer = np.empty(int(starts[-1]), dtype=np.uint8)
    copy_runs(buffer, starts[:-1], runs.buffer, runs.starts, runs.sizes)
    return Runs(buffer, starts[:-1], runs.sizes, runs.shapes)


def _column(field: Field, count: int, located: Located, empty: Empty) -> Column:
    if field.kind == "fixed":
        fixed = empty(field, (count, *field.sizes))
        for to, runs in located:
            _copy_fixed(fixed, to, runs[field.name], field)
        return fixed
    sizes = np.zeros(count, dtype=np.int64)
    shapes = np.zeros((count, field.rank), dtype=np.int64) if field.kind == "ragged" else None
    for to, runs in located:
        field_runs, rows = runs[field.name], slice(None) if to is None else to
        if field_runs.sizes is not None:
            sizes[rows] = field_runs.sizes
        if shapes is not None and field_runs.shapes is not None:
            shapes[rows] = field_runs.shapes
    starts = ends(sizes)
    itemsize = field.numpy.itemsize
    values = empty(field, (int(starts[-1]) // itemsize,))
    for to, runs in located:
        field_runs, rows = runs[field.name], slice(None) if to is None else to
        if field_runs.unmapped is not None:
            field_runs.unmapped.read(as_bytes(values), starts[:-1][rows], field_runs.starts, sizes[rows])
        else:
            copy_runs(as_bytes(values), starts[:-1][rows], field_runs.buffer, field_runs.starts, sizes[rows])
    return Ragged(values, starts // itemsize, shapes)


def _copy_fixed(out: npt.NDArray[Any], to: Int64s | None, runs: Runs, field: Field) -> None:
    if runs.unmapped is not None:
        rows = np.arange(len(runs.starts), dtype=np.int64) if to is None else to
        sizes = np.full(len(rows), field.nbytes, dtype=np.int64)
        runs.unmapped.read(as_bytes(out), rows * field.nbytes, runs.starts, sizes)
    elif not field.is_scalar:
        copy_rows(as_bytes(out), to, runs.buffer, runs.starts, field.nbytes)
    elif to is None:
        runs.buffer.take(runs.starts, out=out, mode="clip")
    else:
        out[to] = runs.buffer[runs.starts]
