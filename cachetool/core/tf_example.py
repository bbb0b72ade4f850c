"""A parser of ``tf.train.Example`` records, written by any program: many records at a time, from wire format into
columns.

::

    Example   { 1: Features { 1: repeated entry { 1: name, 2: Feature } } }
    Feature   { one of 1: BytesList, 2: FloatList, 3: Int64List }
    BytesList { 1: repeated bytes }    FloatList { 1: repeated fixed32 }    Int64List { 1: repeated varint }

(tensorflow/core/example/feature.proto; https://protobuf.dev/programming-guides/encoding.) Numbers may be packed,
unpacked, or both in one list. :func:`parse_example` only finds the places of the values of one record.
:class:`Gathered` converts them to numbers, once for all records of a block.

Any other bytes raise ValueError with the reason. No memory is allocated because of a length that a record states, and
no message nests deeper than the ones above.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BYTES", "EMPTY", "FLOAT", "INT64", "Feature", "Gathered", "parse_example"]

EMPTY, BYTES, FLOAT, INT64 = 0, 1, 2, 3
"""Kinds of a feature: no list, or the field number of one of the three lists."""

KIND_NAMES = ("no list", "a bytes_list", "a float_list", "an int64_list")

# Wire types of protocol buffers. Types 3 and 4 (groups) do not occur in an Example and are refused.
_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5


class Feature(NamedTuple):
    """One feature of one record."""

    kind: int
    parts: list[memoryview]
    """The values of a BytesList; for the other lists, raw pieces of little-endian float32 or of varints, in order."""


def parse_example(record: memoryview, wanted: Collection[str] | None = None) -> dict[str, Feature]:
    """Return the features of a record by name, as views of ``record``; if ``wanted`` is given, only those.

    Raises ValueError if the bytes are not a ``tf.train.Example``. Fields with unknown numbers are skipped.
    """
    out: dict[str, Feature] = {}
    for number, wire, begin, end in _fields(record, 0, len(record)):
        if number != 1 or wire != _LEN:
            if number == 2 and wire == _LEN:
                # An Example and a SequenceExample have the same first field. Only feature_lists tell them apart;
                # without this check its samples would silently lack them.
                raise ValueError("a SequenceExample: it has feature_lists, which a sample cannot hold")
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
                raise ValueError(f"feature {name[:100]!r} appears twice")
            if wanted is None or name in wanted:
                out[name] = _feature(record, *value)
    return out


def _feature(record: memoryview, begin: int, end: int) -> Feature:
    kind, parts = EMPTY, list[memoryview]()
    for number, wire, at, stop in _fields(record, begin, end):
        if wire != _LEN or not BYTES <= number <= INT64:
            continue
        # The list is a "oneof": as in every parser of protocol buffers the last kind counts, and lists of one kind are
        # joined.
        if number != kind:
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
    """Yield (number, wire type, begin, end) of each field of the message between ``at`` and ``end``."""
    while at < end:
        tag = view[at]
        at += 1
        # Most tags have one byte. They are read here, because a call of _varint() for each field of each record would
        # slow the whole loop.
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
        # A length may state any number of bytes; a field that ends behind its message would read bytes of the next one.
        if at > end or tag < 8:
            raise ValueError("a field reaches past the end of its message")
        yield tag >> 3, wire, begin, at


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    # A varint has at most ten bytes of seven bits. Without the limit a damaged record could build an integer of any
    # size.
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
    """One feature of many records, all of one kind: add the feature of each record, then read them as a column."""

    kind: int
    _parts: list[memoryview] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def add(self, feature: Feature | None) -> None:
        """Add the feature of the next record; None if the record has no feature of that name.

        The feature must be of this kind or EMPTY. Raises ValueError for a list that is cut short.
        """
        parts = feature.parts if feature is not None else ()
        if self.kind == FLOAT:
            if any(len(part) % 4 for part in parts):
                raise ValueError("a float_list that is cut short")
        # Pieces are joined before they are decoded. A piece that ends within a varint would merge with the first number
        # of the next record.
        elif self.kind == INT64 and any(len(part) and part[-1] > 0x7F for part in parts):
            raise ValueError("a varint is cut short")
        self._parts += parts
        self._counts.append(len(parts) if self.kind == BYTES else sum(map(len, parts)))

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of values of each record, int64, (records,)."""
        counts = np.array(self._counts, dtype=np.int64)
        if self.kind == FLOAT:
            return counts // 4
        if self.kind == INT64:
            # The last byte of a varint is below 0x80, so the number of values is the number of such bytes. self._counts
            # holds bytes here.
            ends = np.concatenate(([0], np.cumsum(self._raw() < 0x80, dtype=np.int64)))
            return np.diff(ends[np.concatenate(([0], np.cumsum(counts)))])
        return counts

    def values(self) -> npt.NDArray[Any]:
        """Return all values in order: float32, int64, or the uint8 bytes of all byte strings.

        Raises ValueError for a varint of more than ten bytes.
        """
        raw = self._raw()
        if self.kind == FLOAT:
            return raw.view("<f4")
        return _varints(raw) if self.kind == INT64 else raw

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of bytes of each byte string, int64."""
        return np.fromiter((len(part) for part in self._parts), dtype=np.int64, count=len(self._parts))

    def _raw(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(b"".join(self._parts), dtype=np.uint8)


def _varints(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Decode the packed varints in ``raw`` to int64; negative numbers are stored as two's complement."""
    last = np.flatnonzero(raw < 0x80)
    if not len(last):
        return np.empty(0, dtype=np.int64)
    first = np.concatenate(([0], last[:-1] + 1))
    lengths = last - first + 1
    longest = int(lengths.max())
    if longest > 10:
        raise ValueError("a varint of more than 10 bytes")
    values = np.zeros(len(first), dtype=np.uint64)
    # Each step decodes one byte of all numbers by NumPy, at most ten steps. Decoded together, 2,000 records of 3 KiB
    # take 3 ms; one by one they take 160 ms.
    for group in range(longest):
        has = lengths > group
        values[has] |= (raw[first[has] + group] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * group)
    return values.view(np.int64)
