"""Reading ``tf.train.Example`` records that anybody wrote, many at a time: protocol buffer wire format into columns.

::

    Example   { 1: Features { 1: repeated entry { 1: name, 2: Feature } } }
    Feature   { one of 1: BytesList, 2: FloatList, 3: Int64List }
    BytesList { 1: repeated bytes }    FloatList { 1: repeated fixed32 }    Int64List { 1: repeated varint }

(tensorflow/core/example/feature.proto; https://protobuf.dev/programming-guides/encoding.) Numbers come packed,
unpacked, or both in one list. :func:`parse_example` only finds where the values of one record lie; turning them into
numbers is left to :class:`Gathered`, once for all records of a block.

Whatever is not that raises ValueError with the reason. Nothing is allocated by what a length claims, and nothing nests
deeper than the message above.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BYTES", "EMPTY", "FLOAT", "INT64", "Feature", "Gathered", "parse_example"]

EMPTY, BYTES, FLOAT, INT64 = 0, 1, 2, 3
"""Kinds of a feature: no list at all, and the field numbers of the three lists."""

KIND_NAMES = ("no list", "a bytes_list", "a float_list", "an int64_list")

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5


class Feature(NamedTuple):
    """One feature of one record."""

    kind: int
    parts: list[memoryview]
    """Of a BytesList its values; else raw pieces of little-endian float32, or of varints, one after another."""


def parse_example(record: memoryview, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """The features of a record by name, those in ``wanted`` only; parts are views of ``record``.

    Raises ValueError when the bytes are no ``tf.train.Example``. Unknown fields are passed over.
    """
    out: dict[str, Feature] = {}
    for number, wire, begin, end in _fields(record, 0, len(record)):
        if number != 1 or wire != _LEN:
            if number == 2 and wire == _LEN:
                raise ValueError("a SequenceExample: it has feature_lists, which have no place in a sample")
            continue
        for entry, entry_wire, entry_begin, entry_end in _fields(record, begin, end):
            if entry != 1 or entry_wire != _LEN:
                continue
            name, value = "", (0, 0)
            for part, part_wire, at, stop in _fields(record, entry_begin, entry_end):
                if part_wire == _LEN and part == 1:
                    name = str(record[at:stop], "utf-8")
                elif part_wire == _LEN and part == 2:
                    value = (at, stop)
            if name in out:
                raise ValueError(f"feature {name[:100]!r} is there twice")
            if wanted is None or name in wanted:
                out[name] = _feature(record, *value)
    return out


def _feature(record: memoryview, begin: int, end: int) -> Feature:
    kind, parts = EMPTY, list[memoryview]()
    for number, wire, at, stop in _fields(record, begin, end):
        if wire != _LEN or not BYTES <= number <= INT64:
            continue
        if number != kind:  # one of three: the last kind counts, lists of one kind are joined
            kind, parts = number, []
        single = (_LEN, _FIXED32, _VARINT)[kind - BYTES]
        for inner, inner_wire, low, high in _fields(record, at, stop):
            if inner != 1:
                continue
            if inner_wire not in (single, _LEN):
                raise ValueError(f"{KIND_NAMES[kind]} holds wire type {inner_wire}")
            parts.append(record[low:high])
    return Feature(kind, parts)


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, begin, end) of every field of the message between ``at`` and ``end``."""
    while at < end:
        tag = view[at]
        at += 1
        if tag > 0x7F:
            tag, at = _varint(view, at - 1, end)
        wire = tag & 7
        begin = at
        if wire == _LEN:
            size, begin = _varint(view, at, end)
            at = begin + size
        elif wire == _VARINT:
            _, at = _varint(view, at, end)
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at > end or tag < 8:
            raise ValueError("a field reaches past the end of its message")
        yield tag >> 3, wire, begin, at


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a varint is cut short")


@dataclass(slots=True)
class Gathered:
    """One feature of many records: add each record's, then read them as a column. All of one kind."""

    kind: int
    _parts: list[memoryview] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def add(self, feature: Feature | None) -> None:
        """The feature of the next record; None where the record has none of that name.

        Raises ValueError for a list that is none; the feature must be of this kind, or EMPTY.
        """
        parts = feature.parts if feature is not None else ()
        if self.kind == FLOAT:
            if any(len(part) % 4 for part in parts):
                raise ValueError("a float_list that is cut short")
        elif self.kind == INT64 and any(len(part) and part[-1] > 0x7F for part in parts):
            raise ValueError("a varint is cut short")
        self._parts += parts
        self._counts.append(len(parts) if self.kind == BYTES else sum(map(len, parts)))

    def counts(self) -> npt.NDArray[np.int64]:
        """How many values each record has, (records,)."""
        counts = np.array(self._counts, dtype=np.int64)
        if self.kind == FLOAT:
            return counts // 4
        if self.kind == INT64:
            ends = np.concatenate(([0], np.cumsum(self._raw() < 0x80, dtype=np.int64)))
            return np.diff(ends[np.concatenate(([0], np.cumsum(counts)))])
        return counts

    def values(self) -> npt.NDArray[Any]:
        """All values one after another: float32, int64, or the uint8 of all byte strings.

        Raises ValueError for a varint of more than ten bytes.
        """
        raw = self._raw()
        if self.kind == FLOAT:
            return raw.view("<f4")
        return _varints(raw) if self.kind == INT64 else raw

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each byte string."""
        return np.fromiter((len(part) for part in self._parts), dtype=np.int64, count=len(self._parts))

    def _raw(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(b"".join(self._parts), dtype=np.uint8)


def _varints(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """All varints that ``raw`` holds, packed, as two's complement."""
    last = np.flatnonzero(raw < 0x80)
    if not len(last):
        return np.empty(0, dtype=np.int64)
    first = np.concatenate(([0], last[:-1] + 1))
    lengths = last - first + 1
    longest = int(lengths.max())
    if longest > 10:
        raise ValueError("a varint of more than 10 bytes")
    values = np.zeros(len(first), dtype=np.uint64)
    for group in range(longest):
        has = lengths > group
        values[has] |= (raw[first[has] + group] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * group)
    return values.view(np.int64)
