"""All parts of a view in one range of addresses: where any samples lie is one computation, whatever their parts.

::

    index -> part -> position = start[part] + stride[part] * index        arrays over the parts, in memory
                     (or start[part] + offsets of the part[index])        columns of extents.bin, mapped

with the number of the part's first sample already taken off ``start`` and the positions of the columns.

The parts' ``extents.bin`` lie in the same range as their data, so their columns are looked up in the same way and
shared by all processes. Maps stay for parts that are in the next view too: a fresh map runs at half speed, since the
processor's tables of pages are filled by faults.

A part that cannot be mapped here (compressed, or too many files) is read as :class:`~cachetool.loaders.gather.Parts`
does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.block import Column
from cachetool.errors import CorruptError
from cachetool.extents import Extents, FieldExtents
from cachetool.formats.files import missing_is_corrupt
from cachetool.formats.runs import Int64s
from cachetool.loaders.arena import Arena, open_arena
from cachetool.loaders.chunk import Chunk
from cachetool.loaders.gather import (
    Empty,
    Located,
    Parts,
    Runs,
    check_inside,
    check_shapes,
    evicted_errors,
    gather,
    new_array,
    open_by_extents,
)
from cachetool.loaders.readahead import NEAR, Readahead, Windows
from cachetool.loaders.view import Part, View
from cachetool.schema import Field, Schema

__all__ = ["MappedParts"]

_AT_ONCE = 4096  # samples located at once
_RUNS = 16  # runs of samples, for each part of a view, whose first part is looked up
_Row = tuple[int, int, int | None]
"""Start, stride, origin: see :class:`_Numbers`."""


class MappedParts:
    """The open parts of this process, mapped side by side; a :class:`~cachetool.loaders.gather.Places`.

    All parts of a view are opened when its first samples are located. Nothing is shared with a pickled copy.
    """

    def __init__(self) -> None:
        self._rest = Parts(open_by_extents)
        self._turns = 0
        self.close()

    def close(self) -> None:
        """Let go of all maps."""
        self._turns += 1
        self._arena: Arena | None = None
        self._open: dict[str, _Mapped] = {}
        self._tables: dict[str, _Table] = {}  # which refer to the maps as well
        self._view: View | None = None  # whose tables these are
        self._ahead: Readahead | Windows | None = None
        self._schema: Schema | None = None
        self._rest.close()

    def keep(self, view: View) -> None:
        """Unmap what is not in ``view``."""
        wanted = {part.id for part in view.parts}
        for name in [name for name in self._open if name not in wanted]:
            self._forget()
            self._open.pop(name).close()
        self._rest.keep(view)

    def locate(self, view: View, indices: Int64s, schema: Schema) -> Located:
        """Where the samples lie: all in one group, when all their parts are mapped."""
        whole = self._covers(view, schema)
        # As unsigned numbers the negative ones are too large as well.
        if len(indices) and int(indices.view(np.uint64).max()) >= view.samples:
            view.find(indices)  # raises
        parts = self._parts_of(indices)
        if whole:
            return [(None, self._runs(parts, indices))]
        here = self._mapped[parts]
        to, others = np.flatnonzero(here), np.flatnonzero(~here)
        located: Located = [(to, self._runs(parts[to], indices[to]))] if len(to) else []
        for group, runs in self._rest.locate(view, indices[others], schema):
            located.append((others if group is None else others[group], runs))
        return located

    def batches(
        self, view: View, batches: Sequence[Int64s], schema: Schema, *, empty: Empty = new_array
    ) -> Iterator[dict[str, Column]]:
        """:func:`~cachetool.loaders.gather.gather` of one batch after another, each when it is asked for.

        Where samples lie is computed for several batches at once: that alone is a tenth of the time which a batch of
        256 samples of 3 KiB takes.
        """
        at = 0
        while at < len(batches):
            if not self._covers(view, schema):
                yield gather(view, batches[at], self, schema, empty=empty)
                at += 1
                continue
            stop, count = at + 1, len(batches[at])
            while stop < len(batches) and count < _AT_ONCE:
                count += len(batches[stop])
                stop += 1
            [(_, runs)] = self.locate(view, np.concatenate(batches[at:stop]), schema)
            chunk = Chunk(runs, schema)
            turns, start, ahead = self._turns, 0, self._ahead
            while at < stop and turns == self._turns:  # else what was located may be unmapped by now
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
        if self._covers(view, schema) and self._arena is not None:
            if first or not isinstance(self._ahead, Readahead):
                self._ahead = Readahead(self._arena, schema, self._runs_of, near=near)
            self._ahead.expect(batches)

    def expect_windows(self, view: View, them: Iterable[tuple[int, Int64s]], schema: Schema, reached: Int64s) -> None:
        """Once for all batches, in place of :meth:`expect`: see :class:`~cachetool.loaders.readahead.Windows`."""
        if self._covers(view, schema) and self._arena is not None:
            self._ahead = Windows(self._arena, schema, self._runs_of, them, reached)

    def _covers(self, view: View, schema: Schema) -> bool:
        """Whether all parts of ``view`` can be mapped."""
        if view is not self._view or schema is not self._schema:
            self._turn(view, schema)
        return self._whole

    def _forget(self) -> None:
        """What was located, and the tables, may point into what is unmapped now."""
        self._turns += 1
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

    def _runs(self, parts: npt.NDArray[np.intp], indices: Int64s) -> Mapping[str, Runs]:
        return {name: table.runs(parts, indices) for name, table in self._tables.items()}

    def _runs_of(self, indices: Int64s) -> Mapping[str, Runs]:
        return self._runs(self._parts_of(indices), indices)

    def _turn(self, view: View, schema: Schema) -> None:
        """Map the parts of ``view`` and compute its tables of the fields of ``schema``."""
        self._forget()
        self.keep(view)
        if self._arena is not None and self._arena.spent:
            self.close()
        if self._arena is None:
            self._arena = open_arena()
        found = [self._mapped_part(part, view.schema, schema) for part in view.parts]
        self._mapped = np.array([each is not None for each in found], dtype=np.bool_)
        self._whole = bool(self._mapped.all())
        self._tables = {}
        if self._arena is not None:
            firsts = view.starts[:-1].tolist()
            self._tables = {field.name: _Table(field, firsts, found, self._arena) for field in schema}
        self._ends = view.starts[1:].copy()
        self._index()
        self._view, self._schema = view, schema

    def _mapped_part(self, part: Part, whole: Schema, schema: Schema) -> _Mapped | None:
        """The part with the files of these fields mapped; None when it cannot be."""
        with evicted_errors(part):
            found = self._open.get(part.id)
            if found is None:
                if self._arena is None or not part.extents.exists():
                    return None
                found = _Mapped.open(part, whole, self._arena)
                if found is None:
                    return None
                self._open[part.id] = found
            return found if found.map(schema) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _Mapped:
    """One part: its extents, mapped and checked, and the files of the fields asked for so far."""

    def __init__(self, arena: Arena, folder: Path, at: int, extents: Extents) -> None:
        self.extents = extents
        self._arena, self._folder, self._at = arena, folder, at
        self._files: dict[int, tuple[int, int]] = {}
        self._checked: set[str] = set()

    @classmethod
    def open(cls, part: Part, schema: Schema, arena: Arena) -> _Mapped | None:
        """Map the extents of a part. Raises :class:`CorruptError`; None when there is no room for more maps."""
        place = arena.map(part.extents)
        if place is None:
            return None
        at, size = place
        try:
            extents = Extents.from_buffer(arena.bytes[at : at + size], schema=schema, name=str(part.extents))
            if extents.samples != part.samples:
                raise CorruptError(f"{part.extents} is of {extents.samples} samples, the shard has {part.samples}")
        except BaseException:
            arena.unmap(at)
            raise
        return cls(arena, part.folder, at, extents)

    def map(self, schema: Schema) -> bool:
        """Map the files of these fields; False when there is no room.

        Raises :class:`CorruptError` for files that are missing or short.
        """
        for field in schema:
            extents = self.extents.fields[field.name]
            if field.name in self._checked or field.is_scalar:
                continue
            path = self._folder / self.extents.files[extents.file]
            if extents.file not in self._files:
                with missing_is_corrupt(path):
                    place = self._arena.map(path)
                if place is None:
                    return False
                self._files[extents.file] = place
            ends = np.array([0, self.extents.samples - 1][: self.extents.samples], dtype=np.int64)
            listed = extents.offsets is not None or extents.sizes is not None
            starts, sizes = extents.locate(np.arange(self.extents.samples) if listed else ends)
            if field.kind != "fixed" and ((sizes < 0) | (sizes % field.numpy.itemsize != 0)).any():
                raise CorruptError(f"{path}: field {field.name!r} has a size that is no whole value")
            check_inside(path, self._files[extents.file][1], field, starts, sizes)
            if extents.shapes is not None:
                check_shapes(path, field, extents.locate(np.arange(self.extents.samples))[1], extents.shapes)
            self._checked.add(field.name)
        return True

    def start(self, field: FieldExtents) -> int:
        """Position in the arena from which the offsets of a field count."""
        return self._files[field.file][0]

    def close(self) -> None:
        """Unmap all of it."""
        for at in (self._at, *(at for at, _ in self._files.values())):
            self._arena.unmap(at)


class _Numbers:
    """One number a sample, by three arrays over the parts: ``start[part] + stride[part] * index``, and in parts whose
    ``origin`` is known ``table[origin[part] + index]`` more."""

    def __init__(self, table: Int64s, rows: list[tuple[int, int, int | None]]) -> None:
        self._table = table
        self._start = np.array([start for start, _, _ in rows], dtype=np.int64)
        strides = [stride for _, stride, _ in rows]
        self._stride = np.array(strides, dtype=np.int64)
        self._one = strides[0] if len(set(strides)) == 1 else None
        self._origin = np.array([0 if origin is None else origin for _, _, origin in rows], dtype=np.int64)
        self._listed = np.array([origin is not None for _, _, origin in rows], dtype=np.bool_)
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
    """Where one field lies in all parts of a view, of which the first samples have the numbers ``firsts``."""

    def __init__(self, field: Field, firsts: list[int], parts: list[_Mapped | None], arena: Arena) -> None:
        self._table = arena.bytes.view(np.int64)
        self._buffer = arena.bytes.view(field.numpy) if field.is_scalar else arena.bytes
        self._sizes: _Numbers | None = None
        self._shapes: _Numbers | None = None
        self._dimensions = np.arange(field.rank, dtype=np.int64)
        found = [None if part is None else (part, part.extents.fields[field.name]) for part in parts]

        def numbers(row: Callable[[_Mapped, FieldExtents], _Row]) -> _Numbers:
            rows: list[_Row] = []
            for first, each in zip(firsts, found, strict=True):
                # A part that is not mapped is never asked for.
                start, stride, origin = (0, 0, None) if each is None else row(*each)
                rows.append((start - first * stride, stride, None if origin is None else origin - first))
            return _Numbers(self._table, rows)

        def origin(array: npt.NDArray[Any] | None) -> int | None:
            return None if array is None else arena.position(array) // array.itemsize

        def start(part: _Mapped, at: FieldExtents) -> _Row:
            base = part.start(at)
            return (base + at.start, at.stride, None) if at.offsets is None else (base, 0, origin(at.offsets))

        if field.is_scalar:
            self._starts = numbers(lambda _, at: (origin(at.column) or 0, 1, None))
            return
        self._starts = numbers(start)
        if field.kind != "fixed":
            self._sizes = numbers(lambda _, at: (at.nbytes if at.sizes is None else 0, 0, origin(at.sizes)))
        if field.kind == "ragged":
            self._shapes = numbers(lambda _, at: (origin(at.shapes) or 0, field.rank, None))

    def runs(self, parts: npt.NDArray[np.intp], indices: Int64s) -> Runs:
        """Where it lies for samples ``indices``, which are in ``parts``."""
        starts = self._starts.at(parts, indices)
        sizes = None if self._sizes is None else self._sizes.at(parts, indices)
        shapes = None
        if self._shapes is not None:
            shapes = self._table[self._shapes.at(parts, indices)[:, None] + self._dimensions]
        return Runs(self._buffer, starts, sizes, shapes)
