"""How one sample becomes a serialised ``tf.train.Example``, for whole blocks at once. Pure: bytes and arrays.

=====================  ==============  =====================================================================
field                  list            values
=====================  ==============  =====================================================================
bool, int, uint ()     ``int64_list``  one number; uint64 above 2**63 - 1 as its two's complement
float32 ()             ``float_list``  one number
other scalars          ``bytes_list``  the little-endian bytes (float16, float64, complex, datetime64)
fixed array            ``bytes_list``  one value: C-order little-endian bytes
bytes, str             ``bytes_list``  one value (UTF-8)
ragged array           ``bytes_list``  as a fixed array; its shape in ``int64_list`` ``<name>/shape``
=====================  ==============  =====================================================================

Every record of a schema is made of the same pieces: a head (all entries of constant size: fixed fields in schema order,
then shapes), then for each other field an entry head and the value::

    Features tag, length | head | entry head, value | entry head, value | ...

Varints are padded to the width their type may need, so the pieces differ only in bytes at known places: a block is
written and read by one vectorised copy for each place. Records by others (any order, any width, packed or not) are no
shards: :mod:`cachetool.sources.tfrecord` reads them.

Writing varints, the numbers of protocol buffers, padded with zero groups to a width that is the same in all records.

Readers of protocol buffers take any width up to ten bytes. Reading records that anybody wrote is
:mod:`cachetool.core.tf_example`'s job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.tf_example import BYTES, FLOAT, INT64
from cachetool.formats.runs import Bytes, Int64s, as_bytes, copy_runs, ends, windows

__all__ = [
    "ExampleLayout",
    "MAX_RECORD",
    "StorageKind",
    "shape_name",
    "storage_kind",
    "unpad_varints",
    "varint",
    "varints",
]


def varint(value: int, width: int = 0) -> bytes:
    """``value`` (0 to 2**64 - 1) as a varint of at least ``width`` bytes."""
    out = bytearray()
    while value > 0x7F or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varints(values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint8]:
    """Each of ``values`` as a varint of exactly ``width`` bytes, (k, width). They must fit."""
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    groups = (values[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups


def unpad_varints(groups: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64] | None:
    """What :func:`varints` encoded, (k,) as two's complement; None when a row is no varint of exactly that width."""
    more = groups >= 0x80
    if not more[:, :-1].all() or more[:, -1:].any():
        return None
    shifts = np.arange(groups.shape[1], dtype=np.uint64) * np.uint64(7)
    values: npt.NDArray[np.uint64] = ((groups & 0x7F).astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64)
    return values.view(np.int64)


StorageKind = Literal["int64", "float", "bytes"]

MAX_RECORD = 2**31 - 1
"""Bytes of the largest protocol buffer message."""
_LENGTH = 5  # bytes of a padded length: enough for MAX_RECORD
_SIZE = 9  # bytes of a padded dimension: 63 bits


def storage_kind(field: Field) -> StorageKind:
    """Which list of a Feature holds the values of ``field``; see the table above.

    ``bytes`` means one byte string: the value itself for bytes and str, raw little-endian values otherwise.
    """
    if field.is_scalar and field.numpy.kind in "biu":
        return "int64"
    if field.is_scalar and field.numpy == np.dtype("<f4"):
        return "float"
    return "bytes"


def shape_name(field: Field) -> str:
    """Name of the ``int64_list`` that holds the shape of a ragged field."""
    return f"{field.name}/shape"


_KINDS = {"bytes": BYTES, "float": FLOAT, "int64": INT64}
_Mode = Literal["raw", "int", "shape"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of the head that differ from record to record."""

    field: Field
    mode: _Mode
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """The entry head before the value of a variable field, its four lengths left zero."""

    field: Field
    constant: bytes
    lengths: tuple[tuple[int, int], ...]
    """(offset of a padded length in the entry head, what is added to the bytes of the value)."""


def _int_width(dtype: np.dtype[Any]) -> int:
    """Bytes of the longest varint of this type; a negative number is 64 bits of two's complement."""
    return 10 if dtype.kind == "i" else max(1, -(-8 * dtype.itemsize // 7)) if dtype.kind == "u" else 1


def _entry_head(name: str, kind: int, nbytes: int, width: int = 0) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """What stands before a value of ``nbytes``, and where the four lengths are, of at least ``width`` bytes each."""
    raw = name.encode()
    key = b"\x0a" + varint(len(raw)) + raw
    value = b"\x0a" + varint(nbytes, width)
    inner = varint(len(value) + nbytes, width)
    feature = bytes([kind << 3 | 2]) + inner + value
    outer = varint(len(feature) + nbytes, width)
    entry = key + b"\x12" + outer + feature
    head = b"\x0a" + varint(len(entry) + nbytes, width) + entry
    at = len(head)
    lengths = (
        (1, len(entry)),
        (at - len(feature) - len(outer), len(feature)),
        (at - len(value) - len(inner), len(value)),
        (at - len(value) + 1, 0),
    )
    return head, lengths


class ExampleLayout:
    """The pieces that every record of ``schema`` is made of; encodes and decodes whole blocks."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.places: list[_Place] = []
        self._constants: list[tuple[int, bytes]] = []
        prefix = 1 + _LENGTH
        at = prefix
        heads = [(f.name, f, _KINDS[storage_kind(f)]) for f in schema if f.kind == "fixed"]
        heads += [(shape_name(f), f, INT64) for f in schema if f.kind == "ragged"]
        for name, field, kind in heads:
            mode: _Mode = "shape" if field.kind == "ragged" else "int" if kind == INT64 else "raw"
            width = {"raw": field.nbytes, "int": _int_width(field.numpy), "shape": _SIZE * field.rank}[mode]
            constant, _ = _entry_head(name, kind, width)
            self._constants.append((at, constant))
            at += len(constant)
            self.places.append(_Place(field, mode, at, width))
            at += width
        self.head = at
        """Bytes before the first entry of a variable field; the whole record when there is none."""
        self.entries = [_Entry(f, *_entry_head(f.name, BYTES, 0, _LENGTH)) for f in schema if f.kind != "fixed"]
        self.overhead = at - schema.fixed_nbytes + sum(len(entry.constant) for entry in self.entries)
        """Bytes of a record beyond those of its fields."""
        if self.head > MAX_RECORD:
            raise UsageError(f"a sample of {self.head} bytes; tfrecord holds at most {MAX_RECORD}")

    def positions(self, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Where the values of the variable fields begin inside each record, and the size of each record.

        ``sizes`` is (samples, variable fields) in bytes; the results are of that shape, and (samples,).
        """
        starts = np.empty_like(sizes)
        at = np.full(len(sizes), self.head, dtype=np.int64)
        for column, entry in enumerate(self.entries):
            starts[:, column] = at + len(entry.constant)
            at = starts[:, column] + sizes[:, column]
        return starts, at

    def variable_sizes(self, block: Block) -> Int64s:
        """Bytes of the variable fields of each sample, (samples, variable fields)."""
        out = np.empty((block.samples, len(self.entries)), dtype=np.int64)
        for column, entry in enumerate(self.entries):
            ragged = block.columns[entry.field.name]
            if isinstance(ragged, Ragged):
                out[:, column] = ragged.sizes * ragged.values.itemsize
        return out

    def encode(self, block: Block, *, before: int = 0, after: int = 0) -> tuple[Bytes, Int64s, Int64s]:
        """The records of a canonical block, each with room ``before`` and ``after`` it: buffer, starts, sizes.

        Raises :class:`UsageError` when a record is larger than a protocol buffer can be.
        """
        sizes = self.variable_sizes(block)
        within, totals = self.positions(sizes)
        if len(totals) and int(totals.max()) > MAX_RECORD:
            raise UsageError(f"a sample of {int(totals.max())} bytes; tfrecord holds at most {MAX_RECORD}")
        bounds = ends(totals + (before + after))
        starts = bounds[:-1] + before
        out = np.empty(int(bounds[-1]), dtype=np.uint8)
        _put(out, starts, np.frombuffer(b"\x0a", dtype=np.uint8))
        _put(out, starts + 1, varints((totals - 1 - _LENGTH).astype(np.uint64), _LENGTH))
        for offset, constant in self._constants:
            _put(out, starts + offset, np.frombuffer(constant, dtype=np.uint8))
        for place in self.places:
            _put(out, starts + place.offset, _place_bytes(place, block.columns[place.field.name]))
        for column, entry in enumerate(self.entries):
            ragged = block.columns[entry.field.name]
            size, value = sizes[:, column], starts + within[:, column]
            head = value - len(entry.constant)
            _put(out, head, np.frombuffer(entry.constant, dtype=np.uint8))
            for offset, extra in entry.lengths:
                _put(out, head + offset, varints((size + extra).astype(np.uint64), _LENGTH))
            if isinstance(ragged, Ragged):
                copy_runs(out, value, as_bytes(ragged.values), ragged.offsets[:-1] * ragged.values.itemsize, size)
        return out, starts, totals

    def decode(self, buffer: Bytes, starts: Int64s, sizes: Int64s) -> Block | None:
        """The samples of records as :meth:`encode` makes them, copied; None when one is anything else.

        ``starts`` and ``sizes`` must lie inside ``buffer``.
        """
        if not len(starts):
            return Block.from_samples(self.schema, [])
        if not (sizes >= self.head).all():
            return None
        length = unpad_varints(windows(buffer, _LENGTH)[starts + 1])
        if length is None or not np.array_equal(length, sizes - 1 - _LENGTH) or (buffer[starts] != 0x0A).any():
            return None
        if not all(_same(buffer, starts + offset, constant) for offset, constant in self._constants):
            return None
        columns: dict[str, Column] = {}
        shapes: dict[str, Int64s] = {}
        for place in self.places:
            raw = windows(buffer, place.nbytes)[starts + place.offset]
            if place.mode == "raw":
                columns[place.field.name] = _typed(raw, place.field)
                continue
            numbers = unpad_varints(raw.reshape(-1, _SIZE) if place.mode == "shape" else raw)
            if numbers is None:
                return None
            if place.mode == "shape":
                shapes[place.field.name] = numbers.reshape(len(starts), place.field.rank)
                continue
            values = numbers.astype(place.field.numpy)
            if not np.array_equal(values.astype(np.int64), numbers):
                return None
            columns[place.field.name] = values
        at, stop = starts + self.head, starts + sizes
        for entry in self.entries:
            decoded = self._decode_entry(entry, buffer, at, stop, shapes.get(entry.field.name))
            if decoded is None:
                return None
            columns[entry.field.name], at = decoded
        return Block(self.schema, columns) if np.array_equal(at, stop) else None

    def _decode_entry(
        self, entry: _Entry, buffer: Bytes, at: Int64s, stop: Int64s, shapes: Int64s | None
    ) -> tuple[Ragged, Int64s] | None:
        if not (at + len(entry.constant) <= stop).all():
            return None
        head = windows(buffer, len(entry.constant))[at].copy()
        size = unpad_varints(head[:, -_LENGTH:])
        if size is None or not (at + len(entry.constant) + size <= stop).all():
            return None
        expected = np.tile(np.frombuffer(entry.constant, dtype=np.uint8), (len(at), 1))
        for offset, extra in entry.lengths:
            expected[:, offset : offset + _LENGTH] = varints((size + extra).astype(np.uint64), _LENGTH)
        itemsize = entry.field.numpy.itemsize
        if not np.array_equal(head, expected) or (size % itemsize).any():
            return None
        # In floating point first: a damaged shape may have a product that wraps around.
        if shapes is not None and (
            (shapes < 0).any()
            or (shapes.astype(np.float64).prod(axis=1) > size).any()
            or not np.array_equal(shapes.prod(axis=1) * itemsize, size)
        ):
            return None
        to = ends(size)
        values = np.empty(int(to[-1]), dtype=np.uint8)
        copy_runs(values, to[:-1], buffer, at + len(entry.constant), size)
        return Ragged(values.view(entry.field.numpy), to // itemsize, shapes), at + len(entry.constant) + size


def _put(out: Bytes, at: Int64s, rows: npt.NDArray[np.uint8]) -> None:
    if rows.shape[-1]:
        windows(out, rows.shape[-1])[at] = rows


def _same(buffer: Bytes, at: Int64s, constant: bytes) -> bool:
    return bool((windows(buffer, len(constant))[at] == np.frombuffer(constant, dtype=np.uint8)).all())


def _typed(raw: npt.NDArray[np.uint8], field: Field) -> npt.NDArray[Any]:
    if not field.nbytes:
        return np.empty((len(raw), *field.sizes), dtype=field.numpy)
    return np.ascontiguousarray(raw).reshape(-1).view(field.numpy).reshape(len(raw), *field.sizes)


def _place_bytes(place: _Place, column: Column) -> npt.NDArray[np.uint8]:
    """The bytes of a place, (samples, nbytes)."""
    count = len(column)
    if isinstance(column, Ragged):
        shapes = np.zeros((count, 0), dtype=np.int64) if column.shapes is None else column.shapes
        return varints(shapes.reshape(-1).astype(np.uint64), _SIZE).reshape(count, place.nbytes)
    if place.mode == "int":
        return varints(column.astype(np.int64).view(np.uint64), place.nbytes)
    return as_bytes(column).reshape(count, place.nbytes)
