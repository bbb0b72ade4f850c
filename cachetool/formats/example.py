"""The packing of one sample into a serialised ``tf.train.Example``, for whole blocks at once.

This module works on bytes and arrays and needs no library.

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

Every record of a schema has the same pieces. The head has all entries of constant size: fixed fields in schema order,
then shapes. For each other field an entry head and the value follow::

    Features tag, length | head | entry head, value | entry head, value | ...

Numbers of protocol buffers (varints) are padded with zero groups to the width that their type may need. So the pieces
differ only in bytes at known places, and one vectorised copy for each place writes or reads a block. Readers of
protocol buffers accept any width up to ten bytes. Records by other programs may have any order and width, packed or
not: this module does not read them. :mod:`cachetool.sources.tfrecord` and :mod:`cachetool.core.tf_example` do.
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
    """Return ``value`` (0 to 2**64 - 1) as a varint of at least ``width`` bytes."""
    out = bytearray()
    while value > 0x7F or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varints(values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint8]:
    """Return each of ``values`` as a varint of exactly ``width`` bytes, uint8 (k, width). The values must fit."""
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    groups = (values[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    # The top bit says that more bytes follow. It is set in padding too, which makes the width constant.
    groups[:, :-1] |= 0x80
    return groups


def unpad_varints(groups: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64] | None:
    """Return the numbers that :func:`varints` encoded, int64 (k,), as two's complement.

    None when a row is not a varint of exactly that width.
    """
    more = groups >= 0x80
    # A shorter varint is legal, but cachetool never writes it: the record is not of this layout.
    if not more[:, :-1].all() or more[:, -1:].any():
        return None
    shifts = np.arange(groups.shape[1], dtype=np.uint64) * np.uint64(7)
    values: npt.NDArray[np.uint64] = ((groups & 0x7F).astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64)
    return values.view(np.int64)


StorageKind = Literal["int64", "float", "bytes"]

MAX_RECORD = 2**31 - 1
"""Bytes of the largest protocol buffer message."""
# Bytes of a padded length: five groups of 7 bits hold MAX_RECORD.
_LENGTH = 5
# Bytes of a padded dimension: nine groups of 7 bits are 63 bits, the largest positive int64.
_SIZE = 9


def storage_kind(field: Field) -> StorageKind:
    """Return the list of a Feature that holds the values of ``field``, by the table above.

    ``bytes`` means one byte string: the value itself for bytes and str, raw little-endian values otherwise.
    """
    # float64 is stored as bytes, because a float_list holds 32 bits. Datetimes are stored as bytes, because their unit
    # would be lost.
    if field.is_scalar and field.numpy.kind in "biu":
        return "int64"
    if field.is_scalar and field.numpy == np.dtype("<f4"):
        return "float"
    return "bytes"


def shape_name(field: Field) -> str:
    """Return the name of the ``int64_list`` that holds the shape of a ragged field."""
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
    """The entry head before the value of a variable field, with its four lengths as zeros."""

    field: Field
    constant: bytes
    lengths: tuple[tuple[int, int], ...]
    """Pairs: the offset of a padded length in the entry head, and the bytes to add to those of the value."""


def _int_width(dtype: np.dtype[Any]) -> int:
    """Return the bytes of the longest varint of this type."""
    # A negative number is sign-extended to 64 bits, so every signed type may need ten bytes.
    return 10 if dtype.kind == "i" else max(1, -(-8 * dtype.itemsize // 7)) if dtype.kind == "u" else 1


def _entry_head(name: str, kind: int, nbytes: int, width: int = 0) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Return the bytes before a value of ``nbytes``, and its four lengths: where they lie and what they count.

    Each length takes at least ``width`` bytes.
    """
    raw = name.encode()
    key = b"\x0a" + varint(len(raw)) + raw
    value = b"\x0a" + varint(nbytes, width)
    inner = varint(len(value) + nbytes, width)
    # From the inside out: each message begins with its length, which counts everything inside of it.
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
    """The pieces of every record of ``schema``. Encodes and decodes whole blocks."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.places: list[_Place] = []
        self._constants: list[tuple[int, bytes]] = []
        prefix = 1 + _LENGTH
        at = prefix
        heads = [(f.name, f, _KINDS[storage_kind(f)]) for f in schema if f.kind == "fixed"]
        # Shapes have a constant size too, so they stand in the head, at the same offsets in every record.
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
        """Bytes before the first entry of a variable field, or the whole record if the schema has none."""
        self.entries = [_Entry(f, *_entry_head(f.name, BYTES, 0, _LENGTH)) for f in schema if f.kind != "fixed"]
        self.overhead = at - schema.fixed_nbytes + sum(len(entry.constant) for entry in self.entries)
        """Bytes of a record beyond those of its fields."""
        # Known before the first sample comes, so the pull fails before it fetches anything for this shard.
        if self.head > MAX_RECORD:
            raise UsageError(f"a sample has {self.head} bytes, but tfrecord holds at most {MAX_RECORD}")

    def positions(self, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Return where the values of the variable fields begin inside each record, and the size of each record.

        ``sizes`` is (samples, variable fields) in bytes. The results have that shape and (samples,).
        """
        starts = np.empty_like(sizes)
        at = np.full(len(sizes), self.head, dtype=np.int64)
        for column, entry in enumerate(self.entries):
            starts[:, column] = at + len(entry.constant)
            at = starts[:, column] + sizes[:, column]
        return starts, at

    def variable_sizes(self, block: Block) -> Int64s:
        """Return the bytes of the variable fields of each sample, (samples, variable fields)."""
        out = np.empty((block.samples, len(self.entries)), dtype=np.int64)
        for column, entry in enumerate(self.entries):
            ragged = block.columns[entry.field.name]
            if isinstance(ragged, Ragged):
                out[:, column] = ragged.sizes * ragged.values.itemsize
        return out

    def encode(self, block: Block, *, before: int = 0, after: int = 0) -> tuple[Bytes, Int64s, Int64s]:
        """Return the records of a canonical block: a buffer, and starts and sizes of the records in it.

        Each record has ``before`` free bytes before it and ``after`` behind it. Raises :class:`UsageError` when a
        record is larger than a protocol buffer can be.
        """
        sizes = self.variable_sizes(block)
        within, totals = self.positions(sizes)
        # Protobuf refuses to parse a larger message, so no reader could use such a record.
        if len(totals) and int(totals.max()) > MAX_RECORD:
            raise UsageError(f"a sample has {int(totals.max())} bytes, but tfrecord holds at most {MAX_RECORD}")
        bounds = ends(totals + (before + after))
        starts = bounds[:-1] + before
        out = np.empty(int(bounds[-1]), dtype=np.uint8)
        # 0x0a: field 1 of Example (features), wire type 2 (length and bytes).
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
        """Return the samples of records that :meth:`encode` made, copied; None when any record is anything else.

        ``starts`` and ``sizes`` must lie inside ``buffer``.
        """
        if not len(starts):
            return Block.from_samples(self.schema, [])
        # The sizes come from the file. Everything in the head is read at fixed offsets, so it must be there.
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
            # A number that does not fit the dtype shows that the record is of another schema. A cast alone would change
            # it silently.
            if not np.array_equal(values.astype(np.int64), numbers):
                return None
            columns[place.field.name] = values
        at, stop = starts + self.head, starts + sizes
        for entry in self.entries:
            decoded = self._decode_entry(entry, buffer, at, stop, shapes.get(entry.field.name))
            if decoded is None:
                return None
            columns[entry.field.name], at = decoded
        # The entries must end exactly where the record ends.
        return Block(self.schema, columns) if np.array_equal(at, stop) else None

    def _decode_entry(
        self, entry: _Entry, buffer: Bytes, at: Int64s, stop: Int64s, shapes: Int64s | None
    ) -> tuple[Ragged, Int64s] | None:
        """Return the values of one variable field, and where the next entry begins in each record; None if it is no
        entry of ours."""
        if not (at + len(entry.constant) <= stop).all():
            return None
        # The last length is the value's size. The whole entry head is then rebuilt from it and compared, which checks
        # the other three lengths and the name at once.
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
        # The product is computed in floating point first: a damaged shape may have a product that wraps around int64.
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
    """Write the same number of bytes at each of the positions ``at``."""
    if rows.shape[-1]:
        windows(out, rows.shape[-1])[at] = rows


def _same(buffer: Bytes, at: Int64s, constant: bytes) -> bool:
    """Return True if ``constant`` stands at each of the positions ``at``."""
    return bool((windows(buffer, len(constant))[at] == np.frombuffer(constant, dtype=np.uint8)).all())


def _typed(raw: npt.NDArray[np.uint8], field: Field) -> npt.NDArray[Any]:
    if not field.nbytes:
        return np.empty((len(raw), *field.sizes), dtype=field.numpy)
    return np.ascontiguousarray(raw).reshape(-1).view(field.numpy).reshape(len(raw), *field.sizes)


def _place_bytes(place: _Place, column: Column) -> npt.NDArray[np.uint8]:
    """Return the bytes of a place, (samples, nbytes)."""
    count = len(column)
    if isinstance(column, Ragged):
        shapes = np.zeros((count, 0), dtype=np.int64) if column.shapes is None else column.shapes
        return varints(shapes.reshape(-1).astype(np.uint64), _SIZE).reshape(count, place.nbytes)
    if place.mode == "int":
        return varints(column.astype(np.int64).view(np.uint64), place.nbytes)
    return as_bytes(column).reshape(count, place.nbytes)
