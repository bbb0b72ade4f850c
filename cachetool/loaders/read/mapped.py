"""All shards of a view in one range of addresses: the positions of any samples are one computation, whatever their
shards.

::

    index -> part -> position = start[part] + stride[part] * index        arrays over the parts, in memory
                     (or start[part] + offsets of the part[index])        columns of extents.bin, mapped or held

The number of the first sample of a part is already subtracted from ``start`` and from the positions of the columns. A
part is a shard, or a data file of an exported folder.

The columns are in the same range as the data, so they are looked up in the same way. Columns of large files are mapped,
and all processes share them. Maps of parts that are in the next view too stay, because a fresh map is read at half
speed: each of its pages costs a fault at first.

The data of a part that got no map is read when a batch needs it (:mod:`cachetool.loaders.read.unmapped`). Its positions
are computed in the same way. So are those of a compressed part, whose data is decoded
(:mod:`cachetool.loaders.read.framed`). A part without extents is read by
:class:`~cachetool.loaders.read.gather.Parts`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column
from cachetool.core.errors import CacheToolError, CorruptError
from cachetool.core.extents import Extents, Frames
from cachetool.core.schema import Field, Schema
from cachetool.formats.files import map_file, missing_is_corrupt, not_plain, open_plain, refuse_links
from cachetool.formats.frames import Scratch, check_frames
from cachetool.formats.runs import Bytes, Int64s, Rows
from cachetool.loaders.read.arena import Arena, Memory, open_arena
from cachetool.loaders.read.framed import Framed
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

__all__ = ["Chunk", "Cutting", "MappedParts", "Taken"]


_Copy = Callable[[npt.NDArray[Any], int, int], None]


class Cutting(Protocol):
    """A finder of items that are parts of samples, or several samples; see :class:`~cachetool.loaders.feed.cut.Cut`."""

    @property
    def single(self) -> Schema:
        """The fields with the shapes that one position gives."""
        ...

    @property
    def positions(self) -> int:
        """Most positions of one item."""
        ...

    def locate(self, places: MappedParts, codes: Int64s) -> Located:
        """Return the positions of items for readahead."""
        ...

    def chunk(self, places: MappedParts, codes: Int64s) -> Taken:
        """Return the positions of items of several batches."""
        ...


class Taken(Protocol):
    """The positions of several batches, in the order in which they are asked for."""

    def take(self, start: int, stop: int, *, empty: Empty) -> dict[str, Column]:
        """Return the columns of items ``start`` to ``stop - 1``, in memory that ``empty`` makes, C-contiguous."""
        ...


class Chunk:
    """The positions of the fields of ``schema`` for samples of several batches, in the order in which they are asked
    for.

    The samples are located together and copied one batch at a time. Work that is the same for all of these batches is
    done once: for a batch of 256 samples of 3 KiB that work is a tenth of the time.
    """

    def __init__(self, located: Located, schema: Iterable[Field]) -> None:
        self._schema, self._groups = tuple(schema), located
        self._columns: list[tuple[Field, Runs, _Copy | None]] = []
        if len(located) == 1 and located[0][0] is None:
            runs = located[0][1]
            self._columns = [(field, runs[field.name], _copier(runs[field.name], field)) for field in self._schema]

    def take(self, start: int, stop: int, *, empty: Empty) -> dict[str, Column]:
        """Return the columns of samples ``start`` to ``stop - 1``, in memory that ``empty`` makes, C-contiguous."""
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
        """Return the positions of samples ``start`` to ``stop - 1``."""
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
    """Return a function that copies the values of samples ``start`` to ``stop - 1``; None if they differ in size, or
    are boxes."""
    if field.kind != "fixed" or runs.boxes is not None:
        return None
    if not field.is_scalar:
        return Rows(runs.buffer, runs.starts, field.nbytes).copy
    return _scalars(runs.buffer, runs.starts)


def _scalars(buffer: npt.NDArray[Any], starts: Int64s) -> _Copy:
    def copy(out: npt.NDArray[Any], start: int, stop: int) -> None:
        # mode="clip", because the default mode of numpy.take with out= copies into a buffer of its
        # own first. The positions were checked when the part was opened.
        buffer.take(starts[start:stop], out=out, mode="clip")

    return copy


# Samples located at once: enough that the calls of NumPy, 5 to 10 us each from cold processor
# caches, are few a batch.
_AT_ONCE = 4096
# The look-up table of parts has at most so many entries a part. With parts of very unequal sizes it
# would be large, and a search is used instead.
_RUNS = 16
_MAPPED, _READ, _FRAMED, _BY_LIBRARY, _UNOPENED = range(5)
"""The way in which the data of a part is read."""
# The part of the maps of a process that the files may bring it to: in a feeder, which needs none
# for anything else, and beside a user's program.
_ALONE, _BESIDE = 0.95, 0.75
# The size of a file that is not mapped: unknown, so its positions are checked when it is read.
_FARTHEST = 2**62
# Bytes of extents up to which they are copied rather than mapped. 10,000 shards then need 10,300
# maps instead of 40,300.
_SMALL = 2**15
_ROW = 7
"""Numbers of a field in a part: index of its file; start and stride; origin of its offsets; bytes of a value;
origins of its sizes and of its shapes. An origin is the place of a column in the range, counted in values; -1 if
there is none."""
_EAGER = 256
"""Parts of a view that are opened at once. So most caches report a missing or damaged file at the first batch, and the
way in which the parts are read is known."""


class MappedParts:
    """The open parts of this process, mapped side by side; a :class:`~cachetool.loaders.read.gather.Places`.

    A part is opened when the first of its samples is located; of a new view the first parts are opened at once. A
    pickled copy shares nothing with the original.

    ``maps`` is false where no data shall be mapped. ``alone`` is true in a process in which nothing else needs many
    maps or descriptors.
    """

    def __init__(self, *, maps: bool = True, alone: bool = False) -> None:
        self._maps, self._alone = maps, alone
        self._library_parts = Parts(open_by_library)
        self._changes = 0
        # The thread of a feeder that receives plans opens the parts of the next view (:meth:`prepare`).
        self._opening = threading.RLock()
        self._descriptors = Descriptors(share=0.75 if alone else 0.25)
        self._scratch = Scratch()
        self.close()

    def close(self) -> None:
        """Close all maps and files."""
        with self._opening:
            self._close()

    def _close(self) -> None:
        self._changes += 1
        self._arena: Arena | Memory | None = None
        self._open: dict[str, _Opened] = {}
        # The tuple of file names that most parts have in common, kept once: a cache may have 20,000
        # parts.
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        # The tables hold arrays that point into the maps, so they are dropped together with the
        # range.
        self._tables: dict[str, _Table] = {}
        # The tables belong to this view; another view needs new ones.
        self._view: View | None = None
        self._ahead: Readahead | Windows | None = None
        self._schema: Schema | None = None
        self._descriptors.close()
        self._library_parts.close()

    def keep(self, view: View) -> None:
        """Close the parts that are not in ``view``."""
        with self._opening:
            self._keep(view)

    def prepare(self, view: View) -> None:
        """Open those parts of the next view that the present one lacks, beside the thread that makes batches.

        The next epoch then begins without this work. An error is left to that epoch.
        """
        present, schema = self._view, self._schema
        if present is None or schema is None or present.schema != view.schema:
            return
        with contextlib.suppress(CacheToolError, OSError):
            for number, part in enumerate(view.parts):
                if part.id in self._open:
                    continue
                # For each part, so that the other thread never waits for more than one.
                with self._opening:
                    if self._schema is not schema or self._arena is None or self._arena.spent:
                        return
                    opened = self._opened(part, view.schema_of(number), schema, self._arena)
                    # No map is left until old parts are closed; this part shall get one then.
                    if opened is not None and opened.way == _READ and self._maps:
                        self._open.pop(part.id).close(self._arena)
                        return

    def _keep(self, view: View) -> None:
        wanted = {part.id for part in view.parts}
        gone = [name for name in self._open if name not in wanted]
        if gone and self._arena is not None:
            # The tables first: afterwards they would point to addresses without memory, and reading
            # there kills the process.
            self._forget()
            for name in gone:
                self._open.pop(name).close(self._arena)
        self._descriptors.keep(wanted)
        self._library_parts.keep(view)

    def locate(self, view: View, indices: Int64s, schema: Schema) -> Located:
        """Return the positions of the samples: one group if all their parts are mapped."""
        self._look_at(view, schema)
        # As unsigned numbers negative indices are too large as well, so one comparison finds both
        # errors.
        if len(indices) and int(indices.view(np.uint64).max()) >= view.samples:
            # This call raises the IndexError with its message.
            view.find(indices)
        parts = self._parts_of(indices)
        if self._unopened:
            self._open_for(parts)
        if self._all_mapped:
            return [(None, self._runs(parts, indices))]
        located: Located = []
        ways = self._ways[parts]
        for way in (_MAPPED, _READ, _FRAMED):
            if len(to := np.flatnonzero(ways == way)):
                located.append((to, self._runs(parts[to], indices[to], way=way)))
        if self._any_by_library:
            others = np.flatnonzero(ways == _BY_LIBRARY)
            for group, runs in self._library_parts.locate(view, indices[others], schema):
                located.append((others if group is None else others[group], runs))
        return located

    def batches(
        self,
        view: View,
        batches: Sequence[Int64s],
        schema: Schema,
        *,
        empty: Empty = new_array,
        cut: Cutting | None = None,
    ) -> Iterator[dict[str, Column]]:
        """Yield what :func:`~cachetool.loaders.read.gather.gather` returns for one batch after another, each when it is
        asked for. With ``cut`` the numbers of ``batches`` are items that it finds."""
        at = 0
        while at < len(batches):
            self._look_at(view, schema)
            if self._any_by_library:
                if cut is None:
                    yield gather(view, batches[at], self, schema, empty=empty)
                else:
                    yield cut.chunk(self, batches[at]).take(0, len(batches[at]), empty=empty)
                at += 1
                continue
            stop, count = at + 1, len(batches[at])
            # Several batches are located at once. For a batch of 256 samples of 3 KiB the
            # computation of positions alone would be a tenth of the time.
            while stop < len(batches) and count < _AT_ONCE:
                count += len(batches[stop])
                stop += 1
            those = np.concatenate(batches[at:stop])
            chunk = Chunk(self.locate(view, those, schema), schema) if cut is None else cut.chunk(self, those)
            changes, start, ahead = self._changes, 0, self._ahead
            # The caller may have closed parts between two batches. Their addresses may be unmapped
            # by then, so the other batches are located again.
            while at < stop and changes == self._changes:
                end = start + len(batches[at])
                if ahead is not None:
                    ahead.gathering(end - start)
                yield chunk.take(start, end, empty=empty)
                start, at = end, at + 1

    def expect(
        self,
        view: View,
        batches: Sequence[Int64s],
        schema: Schema,
        *,
        first: bool = False,
        near: int = NEAR,
        cut: Cutting | None = None,
    ) -> None:
        """Announce batches that :meth:`batches` is asked for later, after those announced before.

        With ``first`` the batches announced before are dropped. The bytes that are not in memory are read ahead, with
        gaps of at most ``near`` bytes.
        """
        if self._reads_ahead(view, schema) and self._arena is not None:
            if first or not isinstance(self._ahead, Readahead):
                if cut is None:
                    self._ahead = Readahead(self._arena, schema, self._locate, near=near)
                else:
                    locate = functools.partial(cut.locate, self)
                    self._ahead = Readahead(self._arena, cut.single, locate, near=near, positions=cut.positions)
            self._ahead.expect(batches)

    def expect_windows(self, view: View, them: Iterable[tuple[int, Int64s]], schema: Schema, reached: Int64s) -> None:
        """Announce all batches of an epoch in windows, once. See :class:`~cachetool.loaders.read.readahead.Windows`."""
        if self._reads_ahead(view, schema) and self._arena is not None:
            self._ahead = Windows(self._arena, schema, self._locate, them, reached)

    def _look_at(self, view: View, schema: Schema) -> None:
        # By identity, because comparing thousands of parts would cost more than the batch.
        if view is not self._view or schema is not self._schema:
            self._switch_to(view, schema)

    def _reads_ahead(self, view: View, schema: Schema) -> bool:
        """Return True if the positions of all parts of ``view`` can be computed."""
        self._look_at(view, schema)
        return not self._any_by_library

    def _forget(self) -> None:
        """Drop what was located and the tables, because they may point to addresses that are unmapped now."""
        self._changes += 1
        self._view = self._ahead = None

    def _index(self) -> None:
        """Make a table of the part in which each run of 2**n samples begins. n is chosen so that a run reaches into two
        parts at most."""
        smallest = int(np.diff(self._ends, prepend=0).min(initial=1 << 40))
        self._shift = max(1, smallest).bit_length() - 1
        runs = (int(self._ends[-1]) >> self._shift) + 1 if len(self._ends) else 0
        few = runs <= _RUNS * len(self._ends)
        firsts = np.arange(runs if few else 0, dtype=np.int64) << self._shift
        self._first = self._ends.searchsorted(firsts, "right") if few else None

    def _parts_of(self, indices: Int64s) -> npt.NDArray[np.intp]:
        """Return the part of each of these samples."""
        # Among 780 parts a binary search takes ten times as long as this look-up.
        if self._first is None:
            return self._ends.searchsorted(indices, "right")
        parts: npt.NDArray[np.intp] = self._first.take(indices >> self._shift)
        # A run may reach into a second part: the samples behind the end of the first one belong to
        # that.
        parts += indices >= self._ends.take(parts)
        return parts

    def _runs(self, parts: npt.NDArray[np.intp], indices: Int64s, *, way: int = _MAPPED) -> Mapping[str, Runs]:
        by_field = {name: table.runs(parts, indices) for name, table in self._tables.items()}
        if way == _MAPPED:
            return by_field
        for name, names in self._files.items():
            where: Unmapped | Framed = Unmapped(self._descriptors, self._parts, names, parts)
            if way == _FRAMED:
                where = Framed(self._descriptors, self._scratch, self._parts, names, self._frames[name], parts)
            by_field[name] = by_field[name]._replace(unmapped=where)
        return by_field

    def _locate(self, indices: Int64s) -> Located:
        assert self._view is not None
        assert self._schema is not None
        return self.locate(self._view, indices, self._schema)

    def _switch_to(self, view: View, schema: Schema) -> None:
        """Open the parts of ``view`` and compute its tables for the fields of ``schema``."""
        with self._opening:
            self._switch(view, schema)

    def _switch(self, view: View, schema: Schema) -> None:
        self._forget()
        # Old parts are closed before new ones are opened, because both at once may be more maps
        # than a process may have.
        self.keep(view)
        # Addresses are not used twice. A range that is mostly spent is closed, and all parts are
        # opened anew in a new one.
        if self._arena is not None and self._arena.spent:
            self.close()
        if self._arena is None:
            self._arena = open_arena(share=_ALONE if self._alone else _BESIDE)
        arena = self._arena
        arena.look()
        count = len(view.parts)
        self._ways = np.full(count, _UNOPENED, dtype=np.int8)
        self._any_by_library, self._all_mapped = False, True
        firsts = view.starts[:-1]
        self._tables = {field.name: _Table(field, firsts) for field in schema}
        self._files: dict[str, list[str]] = {}
        self._frames: dict[str, list[Frames | None]] = {}
        self._parts = view.parts
        self._ends = view.starts[1:].copy()
        self._index()
        at, others = list[int](), list[int]()
        for number, part in enumerate(view.parts):
            have = self._open.get(part.id)
            (others if have is None or have.schema is not schema else at).append(number)
        # The others are opened when a batch needs them. The first batch would wait for seconds if 10,000 parts were
        # opened before it.
        at += others[:_EAGER]
        self._unopened = count - len(at)
        self._enter(view, schema, arena, at)
        self._view, self._schema = view, schema

    def _open_for(self, parts: npt.NDArray[np.intp]) -> None:
        """Open those of these parts that are not open yet."""
        missing = np.unique(parts[self._ways[parts] == _UNOPENED])
        if len(missing):
            with self._opening:
                assert self._view is not None
                assert self._schema is not None
                assert self._arena is not None
                self._enter(self._view, self._schema, self._arena, missing.tolist())
                self._unopened -= len(missing)

    def _enter(self, view: View, schema: Schema, arena: Arena | Memory, at: Sequence[int]) -> None:
        """Open the parts with these numbers, and put the positions of their fields into the tables."""
        opened = {
            # Most parts of a view are open already; a call for each would take half of the time of a switch.
            number: have
            if (have := self._open.get(view.parts[number].id)) is not None and have.schema is schema
            else self._opened(view.parts[number], view.schema_of(number), schema, arena)
            for number in at
        }
        ways = [_BY_LIBRARY if part is None else part.way for part in opened.values()]
        self._any_by_library |= _BY_LIBRARY in ways
        self._all_mapped &= set(ways) <= {_MAPPED}
        located = {number: part for number, part in opened.items() if part is not None}
        rows = b"".join([part.rows for part in located.values()])
        numbers = np.frombuffer(rows, dtype=np.int64).reshape(len(located), len(schema), _ROW)
        places = np.fromiter(located, np.intp, len(located))
        for index, field in enumerate(schema):
            self._tables[field.name].put(places, numbers[:, index], arena)
            if (_READ in ways or _FRAMED in ways) and not field.is_scalar:
                names = self._files.setdefault(field.name, [""] * len(view.parts))
                frames = self._frames.setdefault(field.name, [None] * len(view.parts))
                for (number, part), file in zip(located.items(), numbers[:, index, 0].tolist(), strict=True):
                    names[number], frames[number] = part.names[file], part.frames.get(field.name)
        # Last, because a part counts as open only when its positions are in the tables.
        self._ways[np.fromiter(opened, np.intp, len(opened))] = ways

    def _opened(self, part: ShardFile, stored: Schema, schema: Schema, arena: Arena | Memory) -> _Opened | None:
        """Return the part with the positions of these fields; None when it has no extents."""
        opened = self._open.get(part.id)
        if opened is not None and opened.schema == schema:
            return opened
        with evicted_errors(part):
            try:
                extents, at = _extents(part, stored, arena)
            except FileNotFoundError:
                # Read by its library if it never had extents. If they are missing although they
                # were there a moment ago, the part is being evicted, and that must be said.
                if opened is None and not part.extents.exists():
                    return None
                raise
            if opened is None:
                if not part.links:
                    # Before the first file is opened: a link in a shard may lead out of the cache.
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
    """Return the memory as values of a scalar field."""
    return memory[: len(memory) // field.nbytes * field.nbytes].view(field.numpy)


def _extents(part: ShardFile, schema: Schema, arena: Arena | Memory) -> tuple[Extents, int | None]:
    """Return the extents of a part, and the position at which they are mapped, or None. Raises
    :class:`CorruptError`."""
    at = None
    try:
        fd, size = open_plain(part.extents_name, links=part.links)
    except IsADirectoryError as error:
        raise not_plain(part.extents_name) from error
    try:
        # One read in place of a map: a map a small file would use up the limit of maps.
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
            raise CorruptError(f"{part.extents_name} has {extents.samples} samples, but the shard has {part.samples}")
    except BaseException:
        # After an error no object knows of this map, which would stay in the range for ever.
        if at is not None:
            arena.unmap(at)
        raise
    return extents, at


class _Opened:
    """One part: the checked positions of the fields asked for, and what is mapped and held of it."""

    __slots__ = ("_at", "_held_bytes", "_maps", "frames", "names", "rows", "schema", "way")

    def __init__(self, at: int | None, *, maps: bool) -> None:
        self._at = at
        """Position of its extents, if they are mapped."""
        self._maps: dict[int, tuple[int, int]] = {}
        self._held_bytes = 0
        self.names: tuple[str, ...] = ()
        """The names of its files."""
        self.schema: Schema | None = None
        """The fields asked for."""
        self.rows = b""
        """:data:`_ROW` numbers for each field, as bytes."""
        self.frames: dict[str, Frames] = {}
        """The frames of the fields asked for, if the part is compressed."""
        self.way = _MAPPED if maps else _READ

    def look_at(self, part: ShardFile, extents: Extents, schema: Schema, arena: Arena | Memory) -> None:
        """Map the files of these fields and note the positions of the fields.

        Raises :class:`CorruptError` for files that are missing or short.
        """
        self.frames = {f.name: frames for f in schema if (frames := extents.fields[f.name].frames) is not None}
        if self._at is None:
            # The buffer of extents that are not mapped is not kept, only the few arrays of it that are needed.
            self.frames = {name: frames.copy() for name, frames in self.frames.items()}
        # A compressed part is compressed in all its fields, and fields without bytes have no frames.
        if self.frames:
            self.way = _FRAMED
        if self.way == _MAPPED and not self._mapped(part, extents, schema, arena):
            # A part is mapped completely or not at all, because a group of samples is copied in one
            # way.
            self.way = _READ
            self._unmap(arena)
        arena.let_go(self._held_bytes)
        self._held_bytes = 0
        rows = [self._row(part, field, extents, arena) for field in schema]
        # As bytes, so that the rows of all parts are joined and become one array in one call.
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
        # A file that is not mapped counts as very long here. It shows its true size when it is
        # read.
        base, size = self._maps.get(place.file, (0, _FARTHEST))
        if place.frames is not None:
            check_frames(path, place.frames, field.name)
            # Positions in frames are those before compression, wherever the file may be mapped.
            base, size = 0, place.frames.total
        elif self.way == _FRAMED:
            # Only a field without bytes has no frames here.
            size = 0
        sizes: Int64s | None = place.sizes
        # Every position is checked once, when a part is opened. A position outside the maps would
        # kill the process when a batch is copied.
        if sizes is None:
            first, last = place.start, place.start + place.stride * max(0, samples - 1)
            if place.offsets is not None and samples:
                first, last = int(place.offsets.min()), int(place.offsets.max())
            if samples and (min(first, last) < 0 or max(first, last) > size - place.nbytes):
                raise short(path, size, field)
        else:
            # The size of the file is asked for, because the sizes of values come from extents that
            # may be damaged. Unchecked, memory for them would be asked for before the read could
            # fail.
            if place.frames is None and place.file not in self._maps:
                with missing_is_corrupt(path):
                    status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    raise not_plain(path)
                size = status.st_size
            check_inside(path, size, field, place.locate(np.arange(samples))[0], sizes)
        if field.kind != "fixed":
            value_sizes = np.full(samples, place.nbytes) if sizes is None else sizes
            if (value_sizes % field.numpy.itemsize != 0).any():
                raise CorruptError(f"{path}: the size of field {field.name!r} is not a multiple of its item size")
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
        """Unmap all of it."""
        self._unmap(arena)
        if self._at is not None:
            arena.unmap(self._at)
        # Held copies cannot be freed one by one; the range is replaced when most of them are of no
        # use.
        arena.let_go(self._held_bytes)


class _Numbers:
    """One number for each sample: ``start[part] + stride[part] * index``.

    In parts whose ``origin`` is 0 or more, ``table[origin[part] + index]`` is added. The first sample of part i has the
    number ``firsts[i]``. The numbers of a part are known once they were :meth:`put`.
    """

    def __init__(self, firsts: Int64s) -> None:
        self._firsts, self._table = firsts, np.empty(0, dtype=np.int64)
        self._start, self._stride, self._origin = (np.zeros(len(firsts), dtype=np.int64) for _ in range(3))
        self._listed = np.zeros(len(firsts), dtype=np.bool_)
        self._strides: set[int] = set()
        # One stride for all parts is the usual case, and spares a look-up for each sample.
        self._one: int | None = None
        self._any, self._all = False, True

    def put(self, places: npt.NDArray[np.intp], table: Int64s, start: Int64s, stride: Int64s, origin: Int64s) -> None:
        """Note the numbers of the parts at ``places``."""
        if not len(places):
            return
        self._table = table
        firsts, listed = self._firsts[places], origin >= 0
        self._start[places] = start - firsts * stride
        self._stride[places] = stride
        self._listed[places] = listed
        self._origin[places] = np.where(listed, origin - firsts, 0)
        # Two are enough to know that there are several.
        self._strides |= {int(stride.min()), int(stride.max())}
        self._one = next(iter(self._strides)) if len(self._strides) == 1 else None
        self._any |= bool(listed.any())
        self._all &= bool(listed.all())

    def at(self, parts: npt.NDArray[np.intp], indices: Int64s) -> Int64s:
        """Return the number of each sample. Sample ``indices[i]`` of the view is in the part ``parts[i]``."""
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
    """The positions of one field in all parts of a view. The first sample of part i has the number ``firsts[i]``."""

    def __init__(self, field: Field, firsts: Int64s) -> None:
        self._field = field
        # Samples can be located only in parts that were put, but a batch may have none.
        self._table: Int64s = np.empty(0, dtype=np.int64)
        self._buffer: npt.NDArray[Any] = np.empty(0, dtype=field.numpy if field.is_scalar else np.uint8)
        self._starts = _Numbers(firsts)
        self._sizes = None if field.kind == "fixed" else _Numbers(firsts)
        self._shapes = _Numbers(firsts) if field.kind == "ragged" else None
        self._dimensions = np.arange(field.rank, dtype=np.int64)

    def put(self, places: npt.NDArray[np.intp], rows: Int64s, arena: Arena | Memory) -> None:
        """Note the positions in the parts at ``places``. ``rows`` has :data:`_ROW` numbers for each of them."""
        self._table = arena.bytes[: len(arena.bytes) & -8].view(np.int64)
        self._buffer = _values(arena.bytes, self._field) if self._field.is_scalar else arena.bytes
        # Copied to contiguous arrays, because NumPy computes with these in half the time.
        start, stride, offsets, nbytes, sizes, shapes = np.ascontiguousarray(rows.T[1:])
        self._starts.put(places, self._table, start, stride, offsets)
        if self._sizes is not None:
            self._sizes.put(places, self._table, np.where(sizes < 0, nbytes, 0), np.zeros_like(start), sizes)
        if self._shapes is not None:
            # The shapes of a part begin at its origin.
            rank = np.full_like(shapes, self._field.rank)
            self._shapes.put(places, self._table, shapes, rank, np.full_like(shapes, -1))

    def runs(self, parts: npt.NDArray[np.intp], indices: Int64s) -> Runs:
        """Return the positions of the field for samples ``indices``, which are in ``parts``."""
        starts = self._starts.at(parts, indices)
        sizes = None if self._sizes is None else self._sizes.at(parts, indices)
        shapes = None
        if self._shapes is not None:
            shapes = self._table[self._shapes.at(parts, indices)[:, None] + self._dimensions]
        return Runs(self._buffer, starts, sizes, shapes)
