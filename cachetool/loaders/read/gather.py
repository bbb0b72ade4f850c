"""Copies of the values of any samples of a view, made once, out of any format.

::

    indices -> where the bytes of each field lie -> copied into one column a field
               Places.locate gives Runs

Two classes find the positions. :class:`~cachetool.loaders.read.mapped.MappedParts` computes them from the extents of
all uncompressed shards at once. :class:`Parts` (here) handles any other shard: the library of its format reads a block,
and that block is then the buffer from which values are copied.
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
from cachetool.loaders.padding import Layout
from cachetool.loaders.read.boxes import Boxes, copy_boxes, copy_packed
from cachetool.loaders.view import ShardFile, View

if TYPE_CHECKING:
    from cachetool.loaders.read.framed import Framed
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

_LONGEST_AXIS, _MOST_VALUES = 2**40, 2**48
"""Most values along an axis of one sample, and in the whole sample: more than any file has."""
Empty = Callable[[Field, tuple[int, ...]], npt.NDArray[Any]]
Opener = Callable[[ShardFile, Schema], "OpenPart"]


class Runs(NamedTuple):
    """The positions of the values of one field, for some samples."""

    buffer: npt.NDArray[Any]
    """The bytes that the positions refer to; for a scalar field the values themselves."""
    starts: Int64s
    """Position of each value in the buffer, (k,)."""
    sizes: Int64s | None = None
    """Bytes of each value, (k,); None for a fixed field, whose values all have the same size."""
    shapes: Int64s | None = None
    """Shape of each value of a ragged field, (k, rank)."""
    unmapped: Unmapped | Framed | None = None
    """The files that have the values, if these are not in a buffer: ``starts`` are then positions in the files, or
    in the values before compression."""
    boxes: Boxes | None = None
    """The boxes that are wanted of the values; None: the values as a whole."""

    def slice(self, start: int, stop: int) -> Runs:
        """Return the positions of samples ``start`` to ``stop`` alone."""
        sizes = None if self.sizes is None else self.sizes[start:stop]
        shapes = None if self.shapes is None else self.shapes[start:stop]
        unmapped = None if self.unmapped is None else self.unmapped.slice(start, stop)
        boxes = None if self.boxes is None else self.boxes.slice(start, stop)
        return Runs(self.buffer, self.starts[start:stop], sizes, shapes, unmapped, boxes)


Located = list[tuple[Int64s | None, Mapping[str, Runs]]]
"""Groups of samples: which of the samples asked for (None: all, in order), and the positions of their fields."""


class Places(Protocol):
    """A finder of the samples of a view. One thread of one process uses it."""

    def locate(self, view: View, indices: Int64s, schema: Schema) -> Located:
        """Return the positions of the fields of ``schema`` for the samples ``indices`` of ``view``, in groups.

        Raises ``IndexError``, :class:`CorruptError`, and :class:`UsageError` when a shard was evicted.
        """
        ...

    def keep(self, view: View) -> None:
        """Close the shards that are not in ``view``."""
        # A deleted file that is still mapped still takes its space on the disk.
        ...

    def close(self) -> None:
        """Close all files and maps. May be called twice."""
        ...


class OpenPart(Protocol):
    """One open shard. One thread of one process uses it."""

    def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
        """Return the positions of the fields of ``schema`` for the samples ``within`` the shard. Raises
        :class:`CorruptError`."""
        ...

    def close(self) -> None:
        """Close its files and maps."""
        ...


def check_inside(path: str, size: int, field: Field, starts: Int64s, sizes: Int64s | int) -> None:
    """Raise :class:`CorruptError` unless runs of ``sizes`` bytes from ``starts`` lie inside the ``size`` bytes of a
    file."""
    if not inside(starts, sizes, size):
        raise short(path, size, field)


def short(path: str, size: int, field: Field) -> CorruptError:
    """Return the error for a file that ends before the values of a field."""
    return CorruptError(f"{path} is cut short: it has {size} bytes, but field {field.name!r} needs more")


def check_shapes(path: str, field: Field, sizes: Int64s, shapes: Int64s | None) -> None:
    """Raise :class:`CorruptError` unless arrays of these ``shapes`` have these ``sizes`` in bytes."""
    if shapes is None:
        return
    # As floats first: a product of damaged shapes may wrap around int64 and look right.
    far = (shapes > _LONGEST_AXIS).any() or (shapes.astype(np.float64).prod(axis=1) > _MOST_VALUES).any()
    if far or (shapes < 0).any() or (shapes.prod(axis=1) * field.numpy.itemsize != sizes).any():
        raise CorruptError(f"{path}: field {field.name!r} has a shape that does not fit its bytes")


class _LibraryPart:
    """A shard that is read through the library of its format."""

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
    """Open a shard through the library of its format."""
    # A shard of a cache is checked first: a library would follow a link that another user planted
    # there. Files that the user names may be links, so they are not checked.
    if not part.links:
        check_library(part.folder, None if part.extents.exists() else part.digest or None)
    kind = get_format(part.format)
    return _LibraryPart(kind.open(part.folder / (part.file or f"data{kind.suffix}"), schema=schema))


@contextmanager
def evicted_errors(part: ShardFile) -> Iterator[None]:
    """Turn the error of opening a shard into :class:`UsageError` if the shard was evicted."""
    try:
        yield
    except (OSError, CacheToolError) as error:
        # Eviction deletes shard.json before any other file of a shard, so a missing one tells an
        # eviction from damage, at whatever moment the eviction is.
        if part.file or (part.folder / "shard.json").exists():
            raise
        from cachetool.cache.layout import cache_option

        repair = f"cachetool verify --repair{cache_option(part.folder.parent.parent)}"
        raise UsageError(
            f"shard {part.id} was evicted: these indices belong to an earlier snapshot, whose lease has ended"
            f" (if its files were deleted by hand, pull them again with: {repair})"
        ) from error


class Parts:
    """The open shards of this process: opened at first use, at most ``limit`` at a time, the least recently used closed
    first.

    After a fork, and in a pickled copy, nothing is open.
    """

    def __init__(self, opener: Opener, *, limit: int | None = None) -> None:
        self._opener = opener
        # A quarter of the descriptors of the process: a library may open several files for one
        # shard, and the program needs some as well.
        self.limit = limit or _descriptors() // 4
        self._open: OrderedDict[str, OpenPart] = OrderedDict()
        self._pid = os.getpid()

    def get(self, part: ShardFile, schema: Schema) -> OpenPart:
        """Return the open shard. Raises :class:`UsageError` when it was evicted, and the errors of opening it."""
        # A forked child closes what its parent had open before it opens its own. py-lmdb opens a
        # file only once in a process, and it counts an inherited one as open.
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
        """Return the positions of the samples, one group for each shard."""
        numbers, within = view.find(indices)
        # A stable sort keeps the samples of a shard in the order asked for.
        order = np.argsort(numbers, kind="stable")
        groups: Located = []
        chosen = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
        for to in chosen:
            number = int(numbers[to[0]])
            located = self.get(view.parts[number], view.schema_of(number)).locate(within[to], schema)
            # Positions would keep the maps of all these shards alive, more of them than may be
            # open.
            if len(chosen) > self.limit:
                located = {field.name: _copied(located[field.name], field) for field in schema}
            groups.append((to, located))
        return groups

    def keep(self, view: View) -> None:
        """Close the shards that are not in ``view``."""
        wanted = {part.id for part in view.parts}
        for name in [name for name in self._open if name not in wanted]:
            self._open.pop(name).close()

    def close(self) -> None:
        """Close all shards."""
        while self._open:
            self._open.popitem()[1].close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opener,)


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(soft, 4096)


def new_array(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return new memory for the values of a field."""
    return np.empty(shape, dtype=field.numpy)


def gather(
    view: View, indices: Int64s, parts: Places, schema: Schema, *, empty: Empty = new_array
) -> dict[str, Column]:
    """Return the columns of the samples at ``indices`` of ``view``, in that order. An index may occur several times.

    ``schema`` chooses the fields. ``empty(field, shape)`` makes the arrays that values are copied into, C-contiguous:
    (k, *shape) of the field's dtype for a fixed field, flat for the values of any other field. Raises ``IndexError``
    for an index outside the view, and :class:`CorruptError` that names a file that is cut short.
    """
    return copied(parts.locate(view, indices, schema), len(indices), schema, empty=empty)


def copied(located: Located, count: int, fields: Iterable[Field], *, empty: Empty = new_array) -> dict[str, Column]:
    """Return the columns of ``count`` samples that were located: the second half of :func:`gather`."""
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
    if shapes is not None and isinstance(empty, Layout) and (place := empty.place(field, shapes)) is not None:
        values, to_starts, sizes = place
    else:
        values, to_starts = empty(field, (int(starts[-1]) // itemsize,)), starts[:-1]
    for to, runs in located:
        field_runs, rows = runs[field.name], slice(None) if to is None else to
        if field_runs.unmapped is not None:
            field_runs.unmapped.read(as_bytes(values), to_starts[rows], field_runs.starts, sizes[rows])
        else:
            copy_runs(as_bytes(values), to_starts[rows], field_runs.buffer, field_runs.starts, sizes[rows])
    return Ragged(values, starts // itemsize, shapes)


def _copy_fixed(out: npt.NDArray[Any], to: Int64s | None, runs: Runs, field: Field) -> None:
    if runs.boxes is not None:
        if runs.unmapped is None:
            copy_boxes(out, to, runs.buffer, runs.starts, runs.boxes)
        else:
            _read_boxes(out, to, runs, runs.boxes)
    elif runs.unmapped is not None:
        rows = np.arange(len(runs.starts), dtype=np.int64) if to is None else to
        sizes = np.full(len(rows), field.nbytes, dtype=np.int64)
        runs.unmapped.read(as_bytes(out), rows * field.nbytes, runs.starts, sizes)
    elif not field.is_scalar:
        copy_rows(as_bytes(out), to, runs.buffer, runs.starts, field.nbytes)
    elif to is None:
        # mode="clip" because numpy's default mode copies into a buffer of its own when it is given
        # out=. The positions were checked before.
        runs.buffer.take(runs.starts, out=out, mode="clip")
    else:
        out[to] = runs.buffer[runs.starts]


def _read_boxes(out: npt.NDArray[Any], to: Int64s | None, runs: Runs, boxes: Boxes) -> None:
    """Read what holds the boxes, one box after another, and copy the boxes out of it."""
    unmapped = runs.unmapped
    assert unmapped is not None
    rows = np.arange(len(runs.starts), dtype=np.int64) if to is None else to
    for at, row in enumerate(rows.tolist()):
        one = boxes.slice(at, at + 1)
        # A frame is decoded once, so the bytes between the rows of a box are taken from it as well.
        starts, sizes, axis = one.runs(unmapped.near)
        count, size = (starts.shape[1], int(sizes[0])) if sizes[0] else (0, 0)
        memory = np.empty(count * size, dtype=np.uint8)
        where = np.arange(count, dtype=np.int64) * size
        unmapped.slice(at, at + 1).repeat(count).read(
            memory, where, runs.starts[at] + starts[0, :count], np.full(count, size, dtype=np.int64)
        )
        copy_packed(out[row], memory, one, axis, size)
