"""What HDF5 and Zarr do alike: a shard is a set of arrays, one to a fixed field, two or three to the others.

::

    field            arrays
    fixed            NAME          (n, *shape)
    bytes, str       NAME          (total,) uint8    NAME.offsets (n + 1,) int64
    ragged           NAME          (total,)          NAME.offsets (n + 1,) int64    NAME.shapes (n, rank) int64

Sample i of a field of differing sizes is ``NAME[offsets[i]:offsets[i + 1]]``, for a ragged field in the shape
``shapes[i]``. A ``/`` in a name nests groups. The attribute ``cachetool`` of the root says the rest (:func:`header`).

:class:`ColumnarWriter` turns blocks into rows of these arrays; where the rows go is each format's own part.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CorruptError
from cachetool.core.extents import FieldExtents
from cachetool.core.schema import Field, Schema
from cachetool.formats.reading import field_extents
from cachetool.formats.runs import Bytes, as_bytes
from cachetool.formats.writing import ShardWriter

__all__ = [
    "ATTRIBUTE",
    "STREAM_BYTES",
    "ArrayPlan",
    "ColumnarWriter",
    "Held",
    "Place",
    "Steps",
    "array_plans",
    "header",
    "parse_header",
]

ATTRIBUTE = "cachetool"
"""Name of the attribute of the root group that holds :func:`header`."""

STREAM_BYTES = 2**20
"""Arrays of fixed fields from this size on are written as blocks arrive; smaller ones wait in memory."""

_LAYOUT = 1

Place = tuple[str, int]
"""A file, relative to the folder of the shard, and the position in it where an array begins."""


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array of a shard."""

    name: str
    """Path inside the root group, ``/`` between parts."""
    field: Field
    """The field it belongs to."""
    role: Literal["values", "offsets", "shapes"]
    """What it holds."""
    dtype: np.dtype[Any]
    """Of its values, little-endian."""
    row: tuple[int, ...]
    """Shape of one row: the array is (rows, *row)."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_index(self) -> bool:
        """Whether it is a few bytes a sample that wait in memory: a scalar, offsets or shapes."""
        return self.role != "values" or self.field.is_scalar

    def rows(self, samples: int, values: int = 0) -> int:
        """Rows in a shard of ``samples`` samples, whose field has ``values`` values if its samples differ in size."""
        if self.role == "offsets":
            return samples + 1
        return samples if self.role == "shapes" or self.field.kind == "fixed" else values


def array_plans(schema: Schema) -> tuple[ArrayPlan, ...]:
    """The arrays of a shard of ``schema``, field by field, the values before their offsets and shapes.

    None of them lies where another one's folder is: :class:`~cachetool.core.schema.Field` keeps their names free.
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
    """What the root's attribute says: the version of this layout, the number of samples and the schema."""
    return {"layout": _LAYOUT, "samples": samples, "schema": schema.to_json()}


def parse_header(value: Any, *, path: Path, schema: Schema | None) -> tuple[Schema, int]:
    """The schema and number of samples in a :func:`header`, as JSON text or plain values.

    Raises :class:`CorruptError` naming ``path`` when it is none, is of a newer layout or has not the ``schema`` given.
    """
    try:
        plain = json.loads(value) if isinstance(value, str | bytes) else value
        layout, samples = int(plain["layout"]), int(plain["samples"])
        if samples < 0:
            raise ValueError(f"{samples} samples")
        if layout != _LAYOUT:
            raise CorruptError(f"{path} has layout {layout}, this cachetool reads layout {_LAYOUT}; update cachetool")
        found = Schema.from_json(plain["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} has no description by cachetool that can be read: {error}") from error
    if schema is not None and schema != found:
        raise CorruptError(f"{path} holds {found.describe()}, not {schema.describe()}")
    return found, samples


class Held:
    """Rows that wait in memory for their place in a file."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Bytes]] = {}

    def add(self, name: str, rows: npt.NDArray[Any]) -> None:
        """Keep a copy of ``rows`` behind those held under ``name``."""
        self._parts.setdefault(name, []).append(as_bytes(rows).copy())

    def pop(self, name: str) -> Sequence[Bytes]:
        """The bytes held under ``name``, in pieces, which are then held no longer."""
        return self._parts.pop(name, [])


class Steps:
    """Cuts rows that arrive in any number into runs of ``step`` rows, since a chunk is compressed as a whole."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._parts: list[npt.NDArray[Any]] = []
        self._held = 0

    def push(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Take ``rows``; give back as many as make whole steps (maybe a view of ``rows``), or None."""
        ready = (self._held + len(rows)) // self.step * self.step
        if not ready:
            self._hold(rows)
            return None
        used = ready - self._held
        out = np.concatenate([*self._parts, rows[:used]]) if self._parts else rows[:used]
        self._parts, self._held = [], 0
        self._hold(rows[used:])
        return out

    def rest(self) -> npt.NDArray[Any] | None:
        """The rows that make no whole step; None when there are none."""
        return np.concatenate(self._parts) if self._parts else None

    def _hold(self, rows: npt.NDArray[Any]) -> None:
        if len(rows):
            self._parts.append(rows.copy())
            self._held += len(rows)


class ColumnarWriter(ShardWriter):
    """Base of the writers of HDF5 and Zarr: a format implements :meth:`_append` and :meth:`_complete`."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self.plans = array_plans(schema)
        # No more samples than this can come: each has at least the bytes of its fixed fields.
        each = schema.fixed_nbytes
        self.capacity = min(samples, nbytes // each) if each else samples
        self._values = {f.name: 0 for f in schema if f.kind != "fixed"}
        self._index: dict[str, list[npt.NDArray[Any]]] = {p.name: [] for p in self.plans if p.role != "values"}

    def _put(self, block: Block) -> None:
        for plan in self.plans:
            if plan.role != "values" or plan.is_index:
                continue
            column = block.columns[plan.name]
            if isinstance(column, Ragged):
                self._index[f"{plan.name}.offsets"].append(column.offsets[1:] + self._values[plan.name])
                if column.shapes is not None:
                    self._index[f"{plan.name}.shapes"].append(column.shapes.copy())
                self._values[plan.name] += len(column.values)
                column = column.values
            if column.size:
                self._append(plan, column)

    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]] | None:
        fields = self.scalar_extents()
        index: dict[str, npt.NDArray[Any]] = {name: f.column for name, f in fields.items() if f.column is not None}
        for plan in self.plans:
            if plan.role != "values":
                first = np.zeros((int(plan.role == "offsets"), *plan.row), dtype=plan.dtype)
                index[plan.name] = np.concatenate([first, *self._index[plan.name]])
        places = self._complete(index)
        if places is None:
            return None
        files = tuple(dict.fromkeys(place[0] for place in places.values()))
        for plan in self.plans:
            if plan.role == "values" and not plan.is_index:
                file, start = places[plan.name]
                fields[plan.name] = _extents(plan, files.index(file), start, index)
        return files, fields

    def rows(self, plan: ArrayPlan) -> int:
        """Rows of one array, of what was written so far."""
        return plan.rows(self.samples, self._values.get(plan.field.name, 0))

    def streamed(self, least: int) -> list[ArrayPlan]:
        """The arrays to be written as blocks arrive: of fixed fields, that may come to ``least`` bytes or more."""
        return [
            plan
            for plan in self.plans
            if plan.field.kind == "fixed" and not plan.is_index and self.capacity * plan.row_nbytes >= least
        ]

    @abstractmethod
    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        """Write ``rows``, of which there is at least one byte, behind those of the same array; keep only copies."""

    @abstractmethod
    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place] | None:
        """Write the ``index`` arrays whole and make the files durable.

        Gives the place of every array of values but scalars, None if compressed.
        """


def _extents(plan: ArrayPlan, file: int, start: int, index: Mapping[str, npt.NDArray[Any]]) -> FieldExtents:
    if plan.field.kind == "fixed":
        return FieldExtents(file=file, start=start, stride=plan.row_nbytes, nbytes=plan.row_nbytes)
    offsets = index[f"{plan.name}.offsets"] * plan.dtype.itemsize
    shapes = index.get(f"{plan.name}.shapes")
    return field_extents(plan.field, file=file, offsets=offsets[:-1] + start, sizes=np.diff(offsets), shapes=shapes)
