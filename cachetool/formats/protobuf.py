"""The parts of the protocol buffer wire format that ``tf.train.Example`` needs, read from anybody and written by us.

::

    Example   { 1: Features { 1: repeated entry { 1: name, 2: Feature } } }
    Feature   { one of 1: BytesList, 2: FloatList, 3: Int64List }
    BytesList { 1: repeated bytes }    FloatList { 1: repeated fixed32 }    Int64List { 1: repeated varint }

(tensorflow/core/example/feature.proto.) Numbers come packed, unpacked, or both in one list. Varints that we write are
padded with zero groups to the width their type may need, so that all records of a schema look alike; readers of
protocol buffers take any width up to ten bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.formats.runs import Bytes

__all__ = ["BYTES", "FLOAT", "INT64", "Feature", "parse_example", "read_varints", "unpad_varints", "varint", "varints"]

BYTES, FLOAT, INT64 = 1, 2, 3
"""Field numbers of the three lists inside a Feature."""

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5


class Feature(NamedTuple):
    """One feature of an example: exactly one of the three lists, or none (``kind`` 0)."""

    kind: int
    strings: list[memoryview]
    """Values of a BytesList, views of the record."""
    numbers: npt.NDArray[np.float32] | npt.NDArray[np.int64]
    """Values of a FloatList or Int64List."""


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


def read_varints(raw: Bytes) -> npt.NDArray[np.int64]:
    """All varints that ``raw`` holds, packed one after another. Raises ValueError when one is broken."""
    if not len(raw):
        return np.empty(0, dtype=np.int64)
    last = np.flatnonzero(raw < 0x80)
    if not len(last) or last[-1] != len(raw) - 1:
        raise ValueError("a varint is cut short")
    first = np.concatenate(([0], last[:-1] + 1))
    if int((last - first).max()) >= 10:
        raise ValueError("a varint of more than 10 bytes")
    shifts = (np.arange(len(raw)) - np.repeat(first, last - first + 1)).astype(np.uint64) * np.uint64(7)
    groups = (raw & 0x7F).astype(np.uint64) << shifts
    return np.add.reduceat(groups, first).view(np.int64)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise ValueError("a varint is cut short")
        byte = view[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at


def _fields(view: memoryview) -> list[tuple[int, int, memoryview]]:
    """(number, wire type, bytes) of every field of a message; a varint's bytes are the varint itself."""
    out = []
    at = 0
    while at < len(view):
        tag, at = _read_varint(view, at)
        wire = tag & 7
        begin = at
        if wire == _VARINT:
            _, at = _read_varint(view, at)
        elif wire == _LEN:
            size, begin = _read_varint(view, at)
            at = begin + size
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(view) or tag < 8:
            raise ValueError("a field reaches past its message")
        out.append((tag >> 3, wire, view[begin:at]))
    return out


def parse_example(record: memoryview) -> dict[str, Feature]:
    """The features of a serialised ``tf.train.Example`` by name; the last of several with one name counts.

    Raises ValueError when the bytes are not that. Unknown fields are passed over.
    """
    out: dict[str, Feature] = {}
    for number, wire, features in _fields(record):
        if (number, wire) != (1, _LEN):
            continue
        for entry_number, entry_wire, entry in _fields(features):
            if (entry_number, entry_wire) != (1, _LEN):
                continue
            name, value = "", memoryview(b"")
            for part, part_wire, content in _fields(entry):
                if (part, part_wire) == (1, _LEN):
                    name = str(content, "utf-8")
                elif (part, part_wire) == (2, _LEN):
                    value = content
            out[name] = _feature(value)
    return out


def _feature(message: memoryview) -> Feature:
    kind, content = 0, memoryview(b"")
    for number, wire, part in _fields(message):
        if wire == _LEN and number in (BYTES, FLOAT, INT64):
            kind, content = number, part
    none = np.empty(0, dtype=np.int64)
    if kind == BYTES:
        return Feature(kind, [part for n, w, part in _fields(content) if (n, w) == (1, _LEN)], none)
    parts = [(wire, part) for number, wire, part in _fields(content) if number == 1] if kind else []
    if kind == FLOAT:
        if any(wire not in (_LEN, _FIXED32) or len(part) % 4 for wire, part in parts):
            raise ValueError("a float list that is none")
        return Feature(kind, [], np.frombuffer(b"".join(part for _, part in parts), dtype="<f4"))
    if any(wire not in (_LEN, _VARINT) for wire, _ in parts):
        raise ValueError("an int64 list that is none")
    raw = np.frombuffer(b"".join(part for _, part in parts), dtype=np.uint8)
    return Feature(kind, [], read_varints(raw) if kind else none)
