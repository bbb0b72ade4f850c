"""The common part of HDF5 and Zarr: a shard is a set of arrays, one for a fixed field, two or three for any other
field.
::

    field            arrays
    fixed            NAME          (n, *shape)
    bytes, str       NAME          (total,) uint8    NAME.offsets (n + 1,) int64
    ragged           NAME          (total,)          NAME.offsets (n + 1,) int64    NAME.shapes (n, rank) int64

Sample i of a field whose samples differ in size is ``NAME[offsets[i]:offsets[i + 1]]``, for a ragged field in the shape
``shapes[i]``. A ``/`` in a name makes nested groups. The attribute ``cachetool`` of the root group is :func:`header`.

:class:`ColumnarWriter` turns blocks into rows of these arrays, and each format stores the rows in its own way.

:class:`ColumnarReader` reads any samples back. It asks a format's library only for few, long runs of rows
(:meth:`ColumnarReader._fetch`): it sorts the requested samples, reads neighbours together, and puts the rows into the
requested order.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.closing import Closing
from cachetool.core.errors import CacheToolError, CorruptError
from cachetool.core.extents import FieldExtents, Frames
from cachetool.core.schema import Field, Schema
from cachetool.formats.frames import frame_rows
from cachetool.formats.reading import check_indices, check_range, field_extents
from cachetool.formats.runs import Bytes, Int64s, as_bytes, copy_runs, ends
from cachetool.formats.writing import ShardWriter

__all__ = [
    "ATTRIBUTE",
    "ArrayPlan",
    "ColumnarReader",
    "ColumnarWriter",
    "Held",
    "Place",
    "STREAM_BYTES",
    "Steps",
    "array_plans",
    "corrupt_errors",
    "header",
    "parse_header",
]


ATTRIBUTE = "cachetool"
"""Name of the attribute of the root group that holds :func:`header`."""

STREAM_BYTES = 2**20
"""Arrays of fixed fields from this size on are written as blocks arrive. Smaller arrays wait in memory."""

_LAYOUT = 1


class Place(NamedTuple):
    """The place of an array."""

    file: str
    """Name of a file, relative to the folder of the shard."""
    start: int = 0
    """Byte position in the file where the array begins."""
    frames: Frames | None = None
    """The compressed pieces of the array, if it is compressed."""


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array of a shard."""

    name: str
    """Path inside the root group, with ``/`` between its parts."""
    field: Field
    """The field to which the array belongs."""
    role: Literal["values", "offsets", "shapes"]
    """Kind of content: the values, offsets or shapes of the field."""
    dtype: np.dtype[Any]
    """Dtype of the values, little-endian."""
    row: tuple[int, ...]
    """Shape of one row. The array has the shape (rows, *row)."""

    @property
    def row_nbytes(self) -> int:
        """Return the bytes of one row."""
        return int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_index(self) -> bool:
        """Return True for a scalar, offsets or shapes: a few bytes a sample, which wait in memory."""
        return self.role != "values" or self.field.is_scalar

    def rows(self, samples: int, values: int = 0) -> int:
        """Return the rows in a shard of ``samples`` samples.

        ``values`` is the number of values of the field if its samples differ in size.
        """
        if self.role == "offsets":
            return samples + 1
        return samples if self.role == "shapes" or self.field.kind == "fixed" else values


def array_plans(schema: Schema) -> tuple[ArrayPlan, ...]:
    """Return the arrays of a shard of ``schema``, field by field, the values before their offsets and shapes.

    No array has the name of another array's group, because :class:`~cachetool.core.schema.Field` refuses such names.
    """
    plans: list[ArrayPlan] = []
    int64 = np.dtype("<i8")
    for field in schema:
        fixed = field.kind == "fixed"
        plans.append(ArrayPlan(field.name, field, "values", field.numpy, field.sizes if fixed else ()))
        if not fixed:
            plans.append(ArrayPlan(f"{field.name}.offsets", field, "offsets", int64, ()))
        if field.kind == "ragged":
            plans.append(ArrayPlan(f"{field.name}.shapes", field, "shapes", int64, (field.rank,)))
    return tuple(plans)


def header(schema: Schema, samples: int) -> dict[str, Any]:
    """Return the content of the root's attribute: the version of this layout, the number of samples and the schema."""
    return {"layout": _LAYOUT, "samples": samples, "schema": schema.to_json()}


def parse_header(value: Any, *, path: Path, schema: Schema | None) -> tuple[Schema, int]:
    """Return the schema and number of samples of a :func:`header`, given as JSON text or as plain values.

    Raises :class:`CorruptError`, naming ``path``, when the value is not a header, has a newer layout or another
    ``schema``.
    """
    try:
        plain = json.loads(value) if isinstance(value, str | bytes) else value
        layout, samples = int(plain["layout"]), int(plain["samples"])
        if samples < 0:
            raise ValueError(f"{samples} samples")
        # The version first: a newer layout may have other entries, and the message must say so.
        if layout != _LAYOUT:
            raise CorruptError(f"{path} has layout {layout}, this cachetool reads layout {_LAYOUT}; update cachetool")
        stored_schema = Schema.from_json(plain["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} has no readable description by cachetool: {error}") from error
    if schema is not None and schema != stored_schema:
        raise CorruptError(f"{path} holds {stored_schema.describe()}, not {schema.describe()}")
    return stored_schema, samples


class Held:
    """Rows that wait in memory for their place in a file."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Bytes]] = {}

    def add(self, name: str, rows: npt.NDArray[Any]) -> None:
        """Keep a copy of ``rows`` behind the rows held under ``name``."""
        # A copy, because the caller may use the block's memory again.
        self._parts.setdefault(name, []).append(as_bytes(rows).copy())

    def pop(self, name: str) -> Sequence[Bytes]:
        """Remove and return the bytes held under ``name``, in pieces."""
        return self._parts.pop(name, [])


class Steps:
    """A cutter of rows into runs of ``step`` rows, because a chunk is compressed as a whole. Rows arrive
    in any number."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._parts: list[npt.NDArray[Any]] = []
        self._held = 0

    def push(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Take ``rows``. Return as many rows as make whole steps (maybe a view of ``rows``), or None."""
        # Whole steps only: a part of a chunk would be compressed and written once more when its other rows come.
        ready = (self._held + len(rows)) // self.step * self.step
        if not ready:
            self._hold(rows)
            return None
        used = ready - self._held
        out = np.concatenate([*self._parts, rows[:used]]) if self._parts else rows[:used]
        self._parts, self._held = [], 0
        self._hold(rows[used:])
        return out

    def remaining_rows(self) -> npt.NDArray[Any] | None:
        """Return the rows that make no whole step, or None."""
        return np.concatenate(self._parts) if self._parts else None

    def _hold(self, rows: npt.NDArray[Any]) -> None:
        if len(rows):
            # A copy: the rows are a view of the caller's block.
            self._parts.append(rows.copy())
            self._held += len(rows)


class ColumnarWriter(ShardWriter):
    """The base class of the writers of HDF5 and Zarr. A format implements :meth:`_append` and :meth:`_complete`."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self.plans = array_plans(schema)
        # No more samples than this can come: each has at least the bytes of its fixed fields.
        sample_bytes = schema.fixed_nbytes
        self.capacity = min(samples, nbytes // sample_bytes) if sample_bytes else samples
        self._values = {f.name: 0 for f in schema if f.kind != "fixed"}
        self._index: dict[str, list[npt.NDArray[Any]]] = {p.name: [] for p in self.plans if p.role != "values"}

    def _put(self, block: Block) -> None:
        for plan in self.plans:
            if plan.role != "values" or plan.is_index:
                continue
            column = block.columns[plan.name]
            if isinstance(column, Ragged):
                # The offsets of a block begin at 0. In the shard they continue behind the values of the blocks before.
                self._index[f"{plan.name}.offsets"].append(column.offsets[1:] + self._values[plan.name])
                if column.shapes is not None:
                    self._index[f"{plan.name}.shapes"].append(column.shapes.copy())
                self._values[plan.name] += len(column.values)
                column = column.values
            if column.size:
                self._append(plan, column)

    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]]:
        fields = self.scalar_extents()
        index: dict[str, npt.NDArray[Any]] = {name: f.column for name, f in fields.items() if f.column is not None}
        for plan in self.plans:
            if plan.role != "values":
                # Offsets have one entry more than samples: the 0 in front.
                first = np.zeros((int(plan.role == "offsets"), *plan.row), dtype=plan.dtype)
                index[plan.name] = np.concatenate([first, *self._index[plan.name]])
        places = self._complete(index)
        # Each file once, in the order of the arrays: the file numbers of the extents must be the same for equal shards.
        files = tuple(dict.fromkeys(place.file for place in places.values()))
        for plan in self.plans:
            if plan.role == "values" and not plan.is_index:
                fields[plan.name] = _extents(plan, places[plan.name], files, index)
        return files, fields

    def rows(self, plan: ArrayPlan) -> int:
        """Return the rows of one array, counting the samples written so far."""
        return plan.rows(self.samples, self._values.get(plan.field.name, 0))

    def frame_rows(self, plan: ArrayPlan) -> int:
        """Return the rows of an array of values in a frame, if the shard is compressed."""
        mean = 0 if plan.field.kind == "fixed" else self.announced_nbytes // max(1, self.announced_samples)
        return frame_rows(plan.row_nbytes, mean)

    def streamed(self, least: int) -> list[ArrayPlan]:
        """Return the arrays to write as blocks arrive: those of fixed fields that may reach ``least`` bytes."""
        return [
            plan
            for plan in self.plans
            if plan.field.kind == "fixed" and not plan.is_index and self.capacity * plan.row_nbytes >= least
        ]

    @abstractmethod
    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        """Write ``rows``, of at least one byte, behind those of the same array. Keep only copies."""

    @abstractmethod
    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        """Write the ``index`` arrays whole and make the files durable.

        Return the place of every array of values except scalars.
        """


def _extents(
    plan: ArrayPlan, place: Place, files: Sequence[str], index: Mapping[str, npt.NDArray[Any]]
) -> FieldExtents:
    file, start, frames = files.index(place.file), place.start, place.frames
    if plan.field.kind == "fixed":
        return FieldExtents(file=file, start=start, stride=plan.row_nbytes, nbytes=plan.row_nbytes, frames=frames)
    offsets = index[f"{plan.name}.offsets"] * plan.dtype.itemsize
    shapes = index.get(f"{plan.name}.shapes")
    located = field_extents(plan.field, file=file, offsets=offsets[:-1] + start, sizes=np.diff(offsets), shapes=shapes)
    return replace(located, frames=frames)


# Most bytes that are read together, plus one sample: the memory of one read stays bounded.
_RUN_BYTES = 32 * 2**20
# Errors of this process, not of the file: too many open files, no permission, too little memory. Nobody must delete a
# shard for these.
_OURS = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOMEM)


@contextlib.contextmanager
def corrupt_errors(what: str) -> Iterator[None]:
    """Turn any error of a library about a damaged file into a :class:`CorruptError` with the
    text "``what``: message"."""
    try:
        yield
    except (CacheToolError, MemoryError):
        raise
    # Codecs and parsers raise classes of their own for damaged bytes, so the class says nothing.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OURS:
            raise
        # The first line only: HDF5 adds a stack of C functions.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CorruptError(f"{what}: {lines[0]}") from error


class ColumnarReader(Closing, ABC):
    """The base class of the readers of HDF5 and Zarr. A format opens and checks its arrays and implements
    :meth:`_fetch`."""

    gap_bytes = 2**16
    """Most bytes between two samples that are read and dropped, because one more call of the library
    costs more time."""

    def __init__(self, path: Path, schema: Schema, samples: int) -> None:
        self.path = path
        self.schema = schema
        self.samples = samples
        self.plans = {plan.name: plan for plan in array_plans(schema)}
        self._indexes: dict[str, tuple[Int64s, Int64s | None]] = {}

    @abstractmethod
    def _fetch(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``start`` to ``stop - 1`` of an array as a new array of its dtype. ``start < stop``.

        Raises :class:`CorruptError` naming the file.
        """

    @abstractmethod
    def _length(self, plan: ArrayPlan) -> int:
        """Return the number of rows of an array."""

    @abstractmethod
    def close(self) -> None:
        """Close files. Blocks that were returned stay valid. May be called twice."""

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop - 1``."""
        check_range(start, stop, self.samples)
        return Block(self.schema, {f.name: self._slice(f, start, stop) for f in self.schema})

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """Return the samples at ``indices``, in that order. Repeats are allowed."""
        at = check_indices(indices, self.samples)
        # Sorted samples are neighbours in the file, so few calls of the library read them. One call costs as much as 64
        # KiB to 2 MiB of bytes.
        order = np.argsort(at, kind="stable")
        return Block(self.schema, {f.name: self._gather(f, at, order) for f in self.schema})

    def _check_lengths(self) -> None:
        """Raise :class:`CorruptError` unless every array has the number of rows that the header's samples need."""
        for plan in self.plans.values():
            if plan.role != "values" or plan.field.kind == "fixed":
                length, wanted = self._length(plan), plan.rows(self.samples)
                # Without this check a sample behind the end of a short array would be read as nothing or as fill
                # values.
                if length != wanted:
                    raise CorruptError(f"{self.path}: {plan.name!r} has {length} rows, not {wanted}")

    def _rows(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows of an array. Arrays without bytes are not read."""
        # The libraries treat empty selections and rows without bytes differently, so they are never asked for these.
        if start < stop and plan.row_nbytes:
            return self._fetch(plan, start, stop)
        return np.empty((stop - start, *plan.row), dtype=plan.dtype)

    def _slice(self, field: Field, start: int, stop: int) -> Column:
        plan = self.plans[field.name]
        if field.kind == "fixed":
            return self._rows(plan, start, stop)
        offsets, shapes = self._index(field)
        first, last = int(offsets[start]), int(offsets[stop])
        values = self._rows(plan, first, last)
        return Ragged(values, offsets[start : stop + 1] - first, None if shapes is None else shapes[start:stop].copy())

    def _gather(self, field: Field, at: Int64s, order: Int64s) -> Column:
        plan = self.plans[field.name]
        if field.kind == "fixed":
            out = np.empty((len(at), *plan.row), dtype=plan.dtype)
            starts = at[order]
            for low, high in _runs(starts * plan.row_nbytes, (starts + 1) * plan.row_nbytes, self.gap_bytes):
                first = int(starts[low])
                rows = self._rows(plan, first, int(starts[high - 1]) + 1)
                out[order[low:high]] = rows[starts[low:high] - first]
            return out
        offsets, shapes = self._index(field)
        size = plan.dtype.itemsize
        begin, sizes = offsets[:-1][at], np.diff(offsets)[at]
        out_starts = ends(sizes)
        values = np.empty(int(out_starts[-1]), dtype=plan.dtype)
        target = as_bytes(values)
        for low, high in _runs(begin[order] * size, (begin + sizes)[order] * size, self.gap_bytes):
            chosen = order[low:high]
            first = int(begin[chosen[0]])
            rows = self._rows(plan, first, int((begin + sizes)[chosen[-1]]))
            copy_runs(
                target,
                out_starts[:-1][chosen] * size,
                as_bytes(rows),
                (begin[chosen] - first) * size,
                sizes[chosen] * size,
            )
        return Ragged(values, out_starts, None if shapes is None else shapes[at])

    def _index(self, field: Field) -> tuple[Int64s, Int64s | None]:
        """Return offsets and shapes of a field whose samples differ in size. They are read and checked once."""
        if field.name not in self._indexes:
            offsets = self._rows(self.plans[f"{field.name}.offsets"], 0, self.samples + 1)
            sizes, total = np.diff(offsets), self._length(self.plans[field.name])
            # The offsets are positions in another array. They are checked once, so that no sample can reach outside of
            # it or into another sample.
            if offsets[0] != 0 or offsets[-1] != total or (sizes < 0).any():
                raise CorruptError(f"{self.path}: offsets of field {field.name!r} do not fit its {total} values")
            shapes = None
            if field.kind == "ragged":
                shapes = self._rows(self.plans[f"{field.name}.shapes"], 0, self.samples)
                wrong = (shapes < 0).any(axis=1) | (shapes.prod(axis=1) != sizes)
                if wrong.any():
                    bad = int(np.argmax(wrong))
                    raise CorruptError(
                        f"{self.path}: sample {bad}: shape of field {field.name!r} does not fit its values"
                    )
            self._indexes[field.name] = (offsets, shapes)
        return self._indexes[field.name]


def _runs(starts: Int64s, stops: Int64s, gap: int) -> Iterator[tuple[int, int]]:
    """Yield runs of samples to read together, as (first, behind the last).

    The samples are sorted by the positions where their bytes start.
    """
    if not len(starts):
        return
    # A run ends at a large gap, and where a sample begins in another stretch of 32 MiB.
    apart = (starts[1:] - stops[:-1] > gap) | (starts[1:] // _RUN_BYTES != starts[:-1] // _RUN_BYTES)
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
    yield from itertools.pairwise(cuts)
