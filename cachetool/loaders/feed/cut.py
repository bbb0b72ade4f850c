"""The cutting of crops and windows out of the samples of a plan.

::

    codes -> samples, crops -> positions of the samples and of their neighbours -> boxes in their values -> one copy
             Numbers           Places.locate                                       corners

All fields of an item without ``offsets`` form one group of positions. The fields of each other set of offsets form one
more group, with several positions for each item.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.text import shown
from cachetool.formats.runs import Int64s, as_bytes
from cachetool.loaders.crop import Corner, Crops, corner_of, uniforms, window
from cachetool.loaders.items import Numbers
from cachetool.loaders.padding import fill_value
from cachetool.loaders.read.boxes import Boxes
from cachetool.loaders.read.gather import Empty, Located, Places, Runs, copied, new_array
from cachetool.loaders.read.mapped import Chunk
from cachetool.loaders.settings import Settings
from cachetool.loaders.view import View
from cachetool.proc.lines import TransformError

__all__ = ["Cut"]


class _Group(NamedTuple):
    """Fields that are located together."""

    offsets: tuple[int, ...]
    """Rows from the sample of an item; empty for the sample alone."""
    fields: tuple[Field, ...]
    """The fields with the shape that one position gives."""


class _Shape(NamedTuple):
    """The fields of batches, for the stored fields ``stored`` that are asked for."""

    stored: Schema
    given: Schema
    groups: tuple[_Group, ...]
    single: Schema
    """The fields with the shapes that one position gives."""


class Cut:
    """A finder of crops and windows in the samples of a view.

    ``corner`` is the user's function. One plan at a time is cut: :meth:`begin` begins it.
    """

    def __init__(self, settings: Settings, corner: Corner | None) -> None:
        self._crops: Crops | None = settings.crop
        self._boxes = dict(settings.crop.boxes) if settings.crop is not None else {}
        self._offsets, self._seed, self._corner = dict(settings.offsets), settings.seed, corner
        self._shape: _Shape | None = None
        self._fills: dict[str, Any] = {}
        """The number of ``crop_pad=`` in the type of each field."""
        self._kept: dict[int, Int64s] = {}
        """Corners that the user's function has chosen for coming items, by their codes."""
        self.located: Schema
        """The stored fields whose positions are looked up."""

    def begin(self, view: View, numbers: Numbers, *, stored: Schema, epoch: int) -> Schema:
        """Begin a plan whose batches have the fields ``stored``. Return these fields as they are after the cut: the
        same object for the same ``stored`` object."""
        self._view, self._numbers, self._epoch = view, numbers, epoch
        self._kept.clear()
        if self._shape is None or self._shape.stored is not stored:
            self._shape = self._shaped(stored)
        # The user's function may ask for any field, and tables of positions are made for one set of fields.
        self.located = stored if self._corner is None else view.schema
        return self._shape.given

    @property
    def single(self) -> Schema:
        """The fields with the shapes that one position gives."""
        assert self._shape is not None
        return self._shape.single

    def _shaped(self, stored: Schema) -> _Shape:
        for what, names in (("crop=", self._boxes), ("offsets=", self._offsets)):
            if missing := [name for name in names if name not in stored]:
                raise UsageError(
                    f"{what} names the field {shown(missing[0])}, but a batch has {', '.join(stored.names)}"
                )
        boxed = {field.name: self._boxed(field) for field in stored}
        corners = [Field(corner_of(name), "<i8", (stored[name].rank,)) for name in self._boxes]
        groups: dict[tuple[int, ...], list[Field]] = {(): []}
        for name, field in boxed.items():
            groups.setdefault(self._offsets.get(name, ()), []).append(field)
        groups[()] += corners
        given = Schema((*(window(field, self._offsets) for field in boxed.values()), *corners))
        parts = tuple(_Group(offsets, tuple(fields)) for offsets, fields in groups.items() if fields)
        # Corners lie in memory, so no disk is asked for them.
        return _Shape(stored, given, parts, Schema(tuple(boxed.values())))

    def _boxed(self, field: Field) -> Field:
        if field.name not in self._boxes:
            return field
        assert self._crops is not None
        if field.kind == "ragged" and field.name in self._offsets:
            raise UsageError(
                f"crop= and offsets= cannot both be used for field {field.name!r}, whose values differ in shape; choose"
                " one of them"
            )
        cropped, pad = self._crops.field(field), self._crops.pad
        if pad is not None and not isinstance(pad, str):
            self._fills[field.name] = fill_value(field, pad, what="crop_pad=")
        return cropped

    @property
    def positions(self) -> int:
        """Most positions of one item."""
        return max(1, *(len(group.offsets) for group in self._groups))

    # -- where items lie -----------------------------------------------------------------------------------------------

    def samples(self, codes: Int64s) -> Int64s:
        """Return all samples that these items are made of, each once, (n,)."""
        here = self._numbers.samples(codes)
        sets = [here, *(self._neighbours(here, group.offsets) for group in self._groups if group.offsets)]
        return np.unique(np.concatenate(sets))

    def chunk(self, places: Places, codes: Int64s) -> CutChunk:
        """Return the positions of items."""
        assert self._shape is not None
        return CutChunk(list(self._located(places, codes)), self._shape.given)

    def locate(self, places: Places, codes: Int64s) -> Located:
        """Return the positions of items for readahead: every group names the items that it is for."""
        out: Located = []
        for group, located in self._located(places, codes, keep=True):
            each = max(1, len(group.offsets))
            for to, runs in located:
                if each > 1:
                    to = (np.arange(len(codes) * each, dtype=np.int64) if to is None else to) // each
                out.append((to, runs))
        return out

    @property
    def _groups(self) -> Sequence[_Group]:
        assert self._shape is not None
        return self._shape.groups

    def _neighbours(self, samples: Int64s, offsets: Sequence[int]) -> Int64s:
        """Return the neighbours of samples, those of one sample after another, (k * offsets,)."""
        found = [self._numbers.neighbours[offset][samples] for offset in offsets]
        neighbours: Int64s = np.stack(found, axis=1).reshape(-1)
        return neighbours

    def _located(self, places: Places, codes: Int64s, *, keep: bool = False) -> Iterator[tuple[_Group, Located]]:
        assert self._shape is not None
        samples = self._numbers.samples(codes)
        draws = np.empty((len(codes), 0))
        if self._boxes:
            axes = max(self._shape.stored[name].rank for name in self._boxes)
            draws = uniforms(codes, axes, of="crop", seed=self._seed, epoch=self._epoch)
        chosen = self._chosen(places, codes, samples, keep=keep)
        corners = {name: np.zeros((len(codes), self._shape.stored[name].rank), dtype=np.int64) for name in self._boxes}
        found: list[tuple[_Group, Located]] = []
        for group in self._groups:
            each = max(1, len(group.offsets))
            asked = self._neighbours(samples, group.offsets) if group.offsets else samples
            located: Located = []
            for to, runs in places.locate(self._view, asked, self.located):
                items = (np.arange(len(asked), dtype=np.int64) if to is None else to) // each
                kept = dict(runs)
                for name in [field.name for field in group.fields if field.name in self._boxes]:
                    wanted = None if chosen is None else chosen[items]
                    boxes = self._cut(name, runs[name], codes[items], draws[items], wanted)
                    kept[name] = runs[name]._replace(sizes=None, shapes=None, boxes=boxes)
                    corners[name][items] = boxes.corners
                located.append((to, kept))
            found.append((group, located))
        for group, located in found:
            # Corners are fields like others, whose values lie in an array that was made here.
            mine = {} if group.offsets else corners
            yield group, [(to, {**runs, **self._corners(to, mine)}) for to, runs in located]

    def _cut(
        self, name: str, runs: Runs, codes: Int64s, draws: npt.NDArray[np.float64], chosen: Int64s | None
    ) -> Boxes:
        assert self._crops is not None
        assert self._shape is not None
        stored = self._shape.stored[name]
        box = self._crops.box(stored)
        shapes = runs.shapes
        if shapes is None:
            shapes = np.broadcast_to(np.array(stored.sizes, dtype=np.int64), (len(codes), stored.rank))
        elif self._crops.pad is None and len(bad := np.flatnonzero((shapes < np.array(box)).any(axis=1))):
            size = tuple(shapes[bad[0]].tolist())
            raise UsageError(
                f"a sample of field {name!r} has the shape {size}, smaller than the box {box} of crop=; give a smaller"
                " box, or fill up with crop_pad=0"
            )
        if chosen is None:
            corners = self._crops.corners(shapes, box, codes % self._numbers.crops, draws)
        else:
            if chosen.shape[1] != stored.rank:
                raise UsageError(
                    f"corner= returned {chosen.shape[1]} numbers, but field {name!r} has {stored.rank} axes; return one"
                    " number for each axis"
                )
            # A box around a point near the edge is moved inside.
            corners = np.clip(chosen, 0, np.maximum(shapes - np.array(box, dtype=np.int64), 0))
        return Boxes(box, corners, shapes, stored.numpy.itemsize, self._fills.get(name, self._crops.pad))

    def _corners(self, to: Int64s | None, corners: Mapping[str, Int64s]) -> dict[str, Runs]:
        out = {}
        for name, values in corners.items():
            rows = np.arange(len(values), dtype=np.int64) if to is None else to
            out[corner_of(name)] = Runs(as_bytes(values), rows * values[:1].nbytes)
        return out

    def _chosen(self, places: Places, codes: Int64s, samples: Int64s, *, keep: bool) -> Int64s | None:
        """Return the corners that the user's function chooses, (k, rank); None without such a function.

        With ``keep`` they are kept for the next call, because readahead asks for them before the batch does.
        """
        if self._corner is None or not len(codes):
            return None
        rows = []
        for code, sample in zip(codes.tolist(), samples.tolist(), strict=True):
            if (kept := self._kept.pop(code, None)) is not None:
                rows.append(kept)
                continue
            rng = np.random.default_rng((self._seed % 2**64, self._epoch, code))
            try:
                given = self._corner(_Sample(self._view, sample, places), rng)
            # Ctrl-C with workers=0. Feeders ignore the signal.
            except KeyboardInterrupt:
                raise
            # Any error of the user's function, as of a transform.
            except BaseException as error:
                raise TransformError(f" (sample {sample})", option="corner=") from error
            rows.append(_corner(given))
        if keep:
            self._kept.update(zip(codes.tolist(), rows, strict=True))
        try:
            return np.stack(rows).reshape(len(rows), -1)
        except ValueError:
            raise UsageError("corner= must return one number for each axis, as many for every sample") from None


def _corner(given: object) -> Int64s:
    """Return the result of the user's function as numbers. Raises :class:`UsageError`."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        values = np.asarray(given)
        # Whole numbers may come as floats, for example out of a mean that was rounded.
        if values.dtype.kind in "iuf" and (values == np.rint(values)).all() and (abs(values) < 2**62).all():
            return values.astype(np.int64)
    raise UsageError(f"corner= returned {shown(given)}; return one whole number for each axis")


class CutChunk:
    """The positions of items of several batches, in the order in which they are asked for; see
    :class:`~cachetool.loaders.read.mapped.Chunk`."""

    def __init__(self, groups: Sequence[tuple[_Group, Located]], given: Schema) -> None:
        self._groups = [(group, Chunk(located, group.fields)) for group, located in groups]
        self._given = given

    def take(self, start: int, stop: int, *, empty: Empty) -> dict[str, Column]:
        """Return the columns of items ``start`` to ``stop - 1``, in memory that ``empty`` makes, C-contiguous."""
        columns: dict[str, Column] = {}
        for group, chunk in self._groups:
            if not (each := len(group.offsets)):
                columns |= chunk.take(start, stop, empty=empty)
                continue
            whole: dict[str, npt.NDArray[Any]] = {}

            def rows(field: Field, shape: tuple[int, ...], each: int = each, whole: dict[str, Any] = whole) -> Any:
                field = self._given[field.name]
                whole[field.name] = empty(field, (shape[0] // each, *field.sizes))
                return whole[field.name].reshape(shape)

            chunk.take(start * each, stop * each, empty=rows)
            columns |= whole
        return columns


class _Sample(Mapping[str, Any]):
    """One sample for the user's function, whose fields are read when they are asked for."""

    def __init__(self, view: View, index: int, places: Places) -> None:
        self._view, self._index, self._places = view, np.array([index], dtype=np.int64), places

    def __getitem__(self, name: str) -> Any:
        if name not in self._view.schema:
            raise KeyError(name)
        schema = self._view.schema
        columns = copied(self._places.locate(self._view, self._index, schema), 1, (schema[name],), empty=new_array)
        return Block(schema.select([name]), columns).sample(0)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._view.schema.names)

    def __len__(self) -> int:
        return len(self._view.schema)
