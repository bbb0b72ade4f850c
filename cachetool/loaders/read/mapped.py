"""All parts of a view in one range of addresses: where any samples lie is one computation, whatever their parts.

::

    index -> part -> position = start[part] + stride[part] * index        arrays over the parts, in memory
                     (or start[part] + offsets of the part[index])        columns of extents.bin, mapped or held

with the number of the part's first sample already taken off ``start`` and the positions of the columns.

The columns lie in the same range as the data, so they are looked up in the same way; those of large files are mapped,
and shared by all processes. Maps stay for parts that are in the next view too: a fresh map runs at half speed, since
the processor's tables of pages are filled by faults.

The data of a part for which there was no map is read when a batch needs it (:mod:`cachetool.loaders.read.unmapped`),
from positions that are computed in the same way. A compressed part is read as
:class:`~cachetool.loaders.read.gather.Parts` does it.

Samples of several batches that were located together, copied one batch at a time.

What is the same for all of these batches is done once: of a batch of 256 samples of 3 KiB that is a tenth of the time.
"""

from __future__ import annotations

import functools
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column
from cachetool.core.errors import CorruptError
from cachetool.core.extents import Extents
from cachetool.core.schema import Field, Schema
from cachetool.formats.files import map_file, missing_is_corrupt, not_plain, open_plain, refuse_links
from cachetool.formats.runs import Bytes, Int64s, Rows
from cachetool.loaders.read.arena import Arena, Memory, open_arena
from cachetool.loaders.read.gather import (
    Empty,
    Located,
    Parts,
    Runs,
    check_inside,
    check_shapes,
    copied,
    evicted_errors,
    gather,
    new_array,
    open_by_library,
    short,
)
from cachetool.loaders.read.readahead import NEAR, Readahead, Windows
from cachetool.loaders.read.unmapped import Descriptors, Unmapped
from cachetool.loaders.view import ShardFile, View

__all__ = ["Chunk", "MappedParts"]


_Copy = Callable[[npt.NDArray[Any], int, int], None]


class Chunk:
    """Where the fields of ``schema`` lie for some samples, in the order in which they are asked for."""

    def __init__(self, located: Located, schema: Schema) -> None:
        self._schema, self._groups = schema, located
        self._columns: list[tuple[Field, Runs, _Copy | None]] = []
        if len(located) == 1 and located[0][0] is None:
            runs = located[0][1]
            self._columns = [(field, runs[field.name], _copier(runs[field.name], field)) for field in schema]

    def take(self, start: int, stop: int, *, empty: Empty) -> dict[str, Column]:
        """The columns of samples ``start`` to ``stop - 1``, in memory that ``empty`` makes, C-contiguous."""
        columns: dict[str, Column] = {}
        count = stop - start
        if not self._columns:
            return copied(self._of(start, stop), count, self._schema, empty=empty)
        for field, runs, copy in self._columns:
            if copy is None:
                columns |= copied([(None, {field.name: runs.slice(start, stop)})], count, (field,), empty=empty)
            else:
                columns[field.name] = out = empty(field, (count, *field.sizes))
                copy(out, start, stop)
        return columns

    def _of(self, start: int, stop: int) -> Located:
        """What was located of these samples."""
        located: Located = []
        for to, runs in self._groups:
            if to is None:
                located.append((None, {name: field_runs.slice(start, stop) for name, field_runs in runs.items()}))
                continue
            begin, end = np.searchsorted(to, (start, stop)).tolist()
            if begin < end:
                rows = None if end - begin == stop - start else to[begin:end] - start
                located.append((rows, {name: field_runs.slice(begin, end) for name, field_runs in runs.items()}))
        return located


def _copier(runs: Runs, field: Field) -> _Copy | None:
    """Copies the values of samples ``start`` to ``stop - 1``; None where they are not all of one size."""
    if field.kind != "fixed":
        return None
    if not field.is_scalar:
        return Rows(runs.buffer, runs.starts, field.nbytes).copy
    return _scalars(runs.buffer, runs.starts)


def _scalars(buffer: npt.NDArray[Any], starts: Int64s) -> _Copy:
    def copy(out: npt.NDArray[Any], start: int, stop: int) -> None:
        buffer.take(starts[start:stop], out=out, mode="clip")

    return copy


_AT_ONCE = 4096  # samples located at once
_RUNS = 16  # runs of samples, for each part of a view, whose first part is looked up
_MAPPED, _READ, _BY_LIBRARY = range(3)  # how the data of a part is read
_ALONE, _BESIDE = 0.95, 0.75  # of the maps of a process, that the files may bring it to
_FARTHEST = 2**62
_SMALL = 2**15  # bytes of extents that are copied rather than mapped
_ROW = 7
"""Numbers of a field in a part: which file; start and stride; origin of its offsets; bytes of a value; origins of its
sizes and of its shapes. An origin is the place of a column in the range, counted in its values; -1: there is none."""
_NOWHERE = struct.pack("7q", 0, 0, 0, -1, 0, -1, -1)


class MappedParts:
    """The open parts of this process, mapped side by side; a :class:`~cachetool.loaders.read.gather.Places`.

    All parts of a view are opened when its first samples are located. Nothing is shared with a pickled copy.
    """

    def __init__(self, *, maps: bool = True, alone: bool = False) -> None:
        """``maps`` is false where no data shall be mapped. ``alone``: nobody else in this process needs many maps."""
        self._maps, self._alone = maps, alone
        self._library_parts = Parts(open_by_library)
        self._changes = 0
        self._descriptors = Descriptors(share=0.75 if alone else 0.25)
        self.close()

    def close(self) -> None:
        """Let go of all maps and files."""
        self._changes += 1
        self._arena: Arena | Memory | None = None
        self._open: dict[str, _Opened] = {}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}  # names of files, of which most parts have the same
        self._tables: dict[str, _Table] = {}  # which refer to the maps as well
        self._view: View | None = None  # whose tables these are
        self._ahead: Readahead | Windows | None = None
        self._schema: Schema | None = None
        self._descriptors.close()
        self._library_parts.close()

    def keep(self, view: View) -> None:
        """Let go of what is not in ``view``."""
        wanted = {part.id for part in view.parts}
        gone = [name for name in self._open if name not in wanted]
        if gone and self._arena is not None:
            self._forget()
            for name in gone:
                self._open.pop(name).close(self._arena)
        self._descriptors.keep(wanted)
        self._library_parts.keep(view)

    def locate(self, view: View, indices: Int64s, schema: Schema) -> Located:
        """Where the samples lie: all in one group, when all their parts are mapped."""
        self._look_at(view, schema)
        # As unsigned numbers the negative ones are too large as well.
        if len(indices) and int(indices.view(np.uint64).max()) >= view.samples:
            view.find(indices)  # raises
        parts = self._parts_of(indices)
        if self._all_mapped:
            return [(None, self._runs(parts, indices))]
        located: Located = []
        ways = self._ways[parts]
        for way in (_MAPPED, _READ):
            if len(to := np.flatnonzero(ways == way)):
                located.append((to, self._runs(parts[to], indices[to], unmapped=way == _READ)))
        if self._any_by_library:
            others = np.flatnonzero(ways == _BY_LIBRARY)
            for group, runs in self._library_parts.locate(view, indices[others], schema):
                located.append((others if group is None else others[group], runs))
        return located

    def batches(
        self, view: View, batches: Sequence[Int64s], schema: Schema, *, empty: Empty = new_array
    ) -> Iterator[dict[str, Column]]:
        """:func:`~cachetool.loaders.read.gather.gather` of one batch after another, each when it is asked for.

        Where samples lie is computed for several batches at once: that alone is a tenth of the time which a batch of
        256 samples of 3 KiB takes.
        """
        at = 0
        while at < len(batches):
            self._look_at(view, schema)
            if self._any_by_library:
                yield gather(view, batches[at], self, schema, empty=empty)
                at += 1
                continue
            stop, count = at + 1, len(batches[at])
            while stop < len(batches) and count < _AT_ONCE:
                count += len(batches[stop])
                stop += 1
            chunk = Chunk(self.locate(view, np.concatenate(batches[at:stop]), schema), schema)
            changes, start, ahead = self._changes, 0, self._ahead
            while at < stop and changes == self._changes:  # else what was located may be unmapped by now
                end = start + len(batches[at])
                if ahead is not None:
                    ahead.gathering(end - start)
                yield chunk.take(start, end, empty=empty)
                start, at = end, at + 1

    def expect(
        self, view: View, batches: Sequence[Int64s], schema: Schema, *, first: bool = False, near: int = NEAR
    ) -> None:
        """Batches that :meth:`batches` is asked for after those expected before (with ``first`` there are none): what
        of them is not in memory is read ahead, and what lies in between where it is at most ``near`` bytes."""
        if self._reads_ahead(view, schema) and self._arena is not None:
            if first or not isinstance(self._ahead, Readahead):
                self._ahead = Readahead(self._arena, schema, self._locate, near=near)
            self._ahead.expect(batches)

    def expect_windows(self, view: View, them: Iterable[tuple[int, Int64s]], schema: Schema, reached: Int64s) -> None:
        """Once for all batches, in place of :meth:`expect`: see :class:`~cachetool.loaders.read.readahead.Windows`."""
        if self._reads_ahead(view, schema) and self._arena is not None:
            self._ahead = Windows(self._arena, schema, self._locate, them, reached)

    def _look_at(self, view: View, schema: Schema) -> None:
        if view is not self._view or schema is not self._schema:
            self._switch_to(view, schema)

    def _reads_ahead(self, view: View, schema: Schema) -> bool:
        """Whether it is known of all parts of ``view`` where their samples lie."""
        self._look_at(view, schema)
        return not self._any_by_library

    def _forget(self) -> None:
        """What was located, and the tables, may point into what is unmapped now."""
        self._changes += 1
        self._view = self._ahead = None

    def _index(self) -> None:
        """Look up the part in which each run of 2**n samples begins, where runs reach into two parts at most."""
        smallest = int(np.diff(self._ends, prepend=0).min(initial=1 << 40))
        self._shift = max(1, smallest).bit_length() - 1
        runs = (int(self._ends[-1]) >> self._shift) + 1 if len(self._ends) else 0
        few = runs <= _RUNS * len(self._ends)
        firsts = np.arange(runs if few else 0, dtype=np.int64) << self._shift
        self._first = self._ends.searchsorted(firsts, "right") if few else None

    def _parts_of(self, indices: Int64s) -> npt.NDArray[np.intp]:
        """The part of each of these samples. Among 780 parts a search is ten times as slow as the look-up."""
        if self._first is None:
            return self._ends.searchsorted(indices, "right")
        parts: npt.NDArray[np.intp] = self._first.take(indices >> self._shift)
        parts += indices >= self._ends.take(parts)
        return parts

    def _runs(self, parts: npt.NDArray[np.intp], indices: Int64s, *, unmapped: bool = False) -> Mapping[str, Runs]:
        by_field = {name: table.runs(parts, indices) for name, table in self._tables.items()}
        if not unmapped:
            return by_field
        return {
            name: runs
            if (names := self._files.get(name)) is None
            else runs._replace(unmapped=Unmapped(self._descriptors, self._parts, names, parts))
            for name, runs in by_field.items()
        }

    def _locate(self, indices: Int64s) -> Located:
        assert self._view is not None
        assert self._schema is not None
        return self.locate(self._view, indices, self._schema)

    def _switch_to(self, view: View, schema: Schema) -> None:
        """Open the parts of ``view`` and compute its tables of the fields of ``schema``."""
        self._forget()
        self.keep(view)
        if self._arena is not None and self._arena.spent:
            self.close()
        if self._arena is None:
            self._arena = open_arena(share=_ALONE if self._alone else _BESIDE)
        arena = self._arena
        arena.look()
        opened = [self._opened(part, view.schema, schema, arena) for part in view.parts]
        ways = [_BY_LIBRARY if part is None else part.way for part in opened]
        self._ways = np.array(ways, dtype=np.int8)
        self._any_by_library = _BY_LIBRARY in ways
        self._all_mapped = not self._any_by_library and _READ not in ways
        nothing = _NOWHERE * len(schema)
        rows = b"".join([nothing if part is None else part.rows for part in opened])
        numbers = np.frombuffer(rows, dtype=np.int64).reshape(len(opened), len(schema), _ROW)
        firsts = view.starts[:-1]
        self._tables = {field.name: _Table(field, firsts, numbers[:, at], arena) for at, field in enumerate(schema)}
        self._files = {}
        if _READ in ways:
            for at, field in enumerate(schema):
                if not field.is_scalar:
                    files = numbers[:, at, 0].tolist()
                    self._files[field.name] = [
                        "" if part is None else part.names[file] for part, file in zip(opened, files, strict=True)
                    ]
        self._parts = view.parts
        self._ends = view.starts[1:].copy()
        self._index()
        self._view, self._schema = view, schema

    def _opened(self, part: ShardFile, view_schema: Schema, schema: Schema, arena: Arena | Memory) -> _Opened | None:
        """The part with what there is to know of these fields; None when it has no extents."""
        opened = self._open.get(part.id)
        if opened is not None and opened.schema == schema:
            return opened
        with evicted_errors(part):
            try:
                extents, at = _extents(part, view_schema, arena)
            except FileNotFoundError:
                if opened is None and not part.extents.exists():
                    return None
                raise
            if opened is None:
                if not part.links:
                    refuse_links(part.where, extents.files)
                opened = _Opened(at, maps=self._maps)
            opened.look_at(part, extents, schema, arena)
        names = tuple(extents.files)
        opened.names = self._names.setdefault(names, names)
        self._open[part.id] = opened
        return opened

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), maps=self._maps, alone=self._alone), ()


def _values(memory: Bytes, field: Field) -> npt.NDArray[Any]:
    """The memory as values of a scalar field."""
    return memory[: len(memory) // field.nbytes * field.nbytes].view(field.numpy)


def _extents(part: ShardFile, schema: Schema, arena: Arena | Memory) -> tuple[Extents, int | None]:
    """The extents of a part, and where they are mapped, if they are. Raises :class:`CorruptError`."""
    at = None
    try:
        fd, size = open_plain(part.extents_name, links=part.links)
    except IsADirectoryError as error:
        raise not_plain(part.extents_name) from error
    try:
        buffer: Any = os.pread(fd, size, 0) if size <= _SMALL else None
    finally:
        os.close(fd)
    if buffer is None and (place := arena.map(part.extents_name, links=part.links)) is not None:
        at, size = place
        buffer = arena.bytes[at : at + size]
    if buffer is None:
        buffer = map_file(part.extents, links=part.links)
    try:
        extents = Extents.from_buffer(buffer, schema=schema, name=part.extents_name)
        if extents.samples != part.samples:
            raise CorruptError(f"{part.extents_name} is of {extents.samples} samples, the shard has {part.samples}")
    except BaseException:
        if at is not None:
            arena.unmap(at)
        raise
    return extents, at


class _Opened:
    """One part: where the fields asked for lie, checked; and what is mapped and held of it."""

    __slots__ = ("_at", "_held_bytes", "_maps", "names", "rows", "schema", "way")

    def __init__(self, at: int | None, *, maps: bool) -> None:
        self._at = at  # of its extents, if they are mapped
        self._maps: dict[int, tuple[int, int]] = {}
        self._held_bytes = 0
        self.names: tuple[str, ...] = ()
        """Its files."""
        self.schema: Schema | None = None
        """The fields asked for."""
        self.rows = b""
        """Of each of them :data:`_ROW` numbers."""
        self.way = _MAPPED if maps else _READ

    def look_at(self, part: ShardFile, extents: Extents, schema: Schema, arena: Arena | Memory) -> None:
        """Map the files of these fields and note where they lie.

        Raises :class:`CorruptError` for files that are missing or short.
        """
        if self.way == _MAPPED and not self._mapped(part, extents, schema, arena):
            self.way = _READ
            self._unmap(arena)
        arena.let_go(self._held_bytes)
        self._held_bytes = 0
        rows = [self._row(part, field, extents, arena) for field in schema]
        self.rows, self.schema = struct.pack(f"{_ROW * len(schema)}q", *itertools.chain(*rows)), schema

    def _mapped(self, part: ShardFile, extents: Extents, schema: Schema, arena: Arena | Memory) -> bool:
        for field in schema:
            file = extents.fields[field.name].file
            if field.is_scalar or file in self._maps:
                continue
            path = f"{part.where}/{extents.files[file]}"
            with missing_is_corrupt(path):
                place = arena.map(path, links=part.links)
            if place is None:
                return False
            self._maps[file] = place
        return True

    def _row(self, part: ShardFile, field: Field, extents: Extents, arena: Arena | Memory) -> tuple[int, ...]:
        place, samples = extents.fields[field.name], extents.samples
        if field.is_scalar:
            return 0, self._origin(place.column, arena), 1, -1, 0, -1, -1
        path = f"{part.where}/{extents.files[place.file]}"
        base, size = self._maps.get(place.file, (0, _FARTHEST))  # of a file that is read it shows then
        sizes: Int64s | None = place.sizes
        if sizes is None:
            first, last = place.start, place.start + place.stride * max(0, samples - 1)
            if place.offsets is not None and samples:
                first, last = int(place.offsets.min()), int(place.offsets.max())
            if samples and (min(first, last) < 0 or max(first, last) > size - place.nbytes):
                raise short(path, size, field)
        else:
            if place.file not in self._maps:  # else memory for its values would be asked for before it is read
                with missing_is_corrupt(path):
                    status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    raise not_plain(path)
                size = status.st_size
            check_inside(path, size, field, place.locate(np.arange(samples))[0], sizes)
        if field.kind != "fixed":
            value_sizes = np.full(samples, place.nbytes) if sizes is None else sizes
            if (value_sizes % field.numpy.itemsize != 0).any():
                raise CorruptError(f"{path}: field {field.name!r} has a size that is no whole value")
            check_shapes(path, field, value_sizes, place.shapes)
        offsets, shapes = self._origin(place.offsets, arena), self._origin(place.shapes, arena)
        start, stride = (base, 0) if place.offsets is not None else (base + place.start, place.stride)
        return place.file, start, stride, offsets, place.nbytes, self._origin(place.sizes, arena), shapes

    def _origin(self, column: npt.NDArray[Any] | None, arena: Arena | Memory) -> int:
        if column is None:
            return -1
        if self._at is not None:
            assert isinstance(arena, Arena)
            return arena.position(column) // column.itemsize
        self._held_bytes += column.nbytes
        return arena.hold(column) // column.itemsize

    def _unmap(self, arena: Arena | Memory) -> None:
        for at, _ in self._maps.values():
            arena.unmap(at)
        self._maps.clear()

    def close(self, arena: Arena | Memory) -> None:
        """Let go of all of it."""
        self._unmap(arena)
        if self._at is not None:
            arena.unmap(self._at)
        arena.let_go(self._held_bytes)


class _Numbers:
    """One number a sample, by three arrays over the parts: ``start[part] + stride[part] * index``, and in parts whose
    ``origin`` is known ``table[origin[part] + index]`` more. The parts' first samples have the numbers ``firsts``."""

    def __init__(self, table: Int64s, firsts: Int64s, start: Int64s, stride: Int64s, origin: Int64s) -> None:
        self._table = table
        self._start = start - firsts * stride
        self._stride = stride
        self._one = int(stride[0]) if len(stride) and bool((stride == stride[0]).all()) else None
        self._listed = origin >= 0
        self._origin = np.where(self._listed, origin - firsts, 0)
        self._any, self._all = bool(self._listed.any()), bool(self._listed.all())

    def at(self, parts: npt.NDArray[np.intp], indices: Int64s) -> Int64s:
        """The numbers of samples ``indices``, which are in ``parts``."""
        out: Int64s = self._start[parts]
        if self._all:
            out += self._table[self._origin[parts] + indices]
            return out
        if self._one != 0:
            out += (self._stride[parts] if self._one is None else self._one) * indices
        if self._any:
            chosen = np.flatnonzero(self._listed[parts])
            out[chosen] += self._table[self._origin[parts[chosen]] + indices[chosen]]
        return out


class _Table:
    """Where one field lies in all parts of a view, of which the first samples have the numbers ``firsts``. ``rows``:
    :data:`_ROW` numbers for each part."""

    def __init__(self, field: Field, firsts: Int64s, rows: Int64s, arena: Arena | Memory) -> None:
        self._table = arena.bytes[: len(arena.bytes) & -8].view(np.int64)
        self._buffer = _values(arena.bytes, field) if field.is_scalar else arena.bytes
        self._sizes: _Numbers | None = None
        self._shapes: _Numbers | None = None
        self._dimensions = np.arange(field.rank, dtype=np.int64)
        start, stride, offsets, nbytes, sizes, shapes = np.ascontiguousarray(rows.T[1:])
        self._starts = _Numbers(self._table, firsts, start, stride, offsets)
        if field.kind != "fixed":
            none = np.zeros_like(start)
            self._sizes = _Numbers(self._table, firsts, np.where(sizes < 0, nbytes, 0), none, sizes)
        if field.kind == "ragged":
            # A part's shapes begin at its origin; one that is read by its library has none, and is never asked for.
            self._shapes = _Numbers(
                self._table, firsts, shapes, np.full_like(shapes, field.rank), np.full_like(shapes, -1)
            )

    def runs(self, parts: npt.NDArray[np.intp], indices: Int64s) -> Runs:
        """Where it lies for samples ``indices``, which are in ``parts``."""
        starts = self._starts.at(parts, indices)
        sizes = None if self._sizes is None else self._sizes.at(parts, indices)
        shapes = None
        if self._shapes is not None:
            shapes = self._table[self._shapes.at(parts, indices)[:, None] + self._dimensions]
        return Runs(self._buffer, starts, sizes, shapes)
