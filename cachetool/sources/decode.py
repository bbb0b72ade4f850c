"""From the bytes of an object to the values of its fields. Nothing here unpickles; whatever does not parse is refused.

============  ============================================================================================
``.npy``      an array, without a copy where it is little-endian
``.npz``      its arrays, each a field; a single string of NumPy's is text or bytes
``.json``     its top-level keys: whole numbers int64, others float64, true/false bool, text str, anything
              nested as JSON text; a top level that is no object is one field named ``json``
``.cls .id``  a whole number, int64
``.txt``      text, UTF-8
images        bytes, or an array of pixels (:mod:`cachetool.sources.images`)
the rest      bytes
============  ============================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
import threading
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import MAX_RANK, storage_dtype
from cachetool.core.units import format_size
from cachetool.proc.arrays import literal
from cachetool.proc.folders import MAX_JSON
from cachetool.sources.keys import Part
from cachetool.sources.npz import directory_of, unpacked
from cachetool.sources.options import Pixels
from cachetool.sources.value_format import is_raw, raw_array

__all__ = ["NULL", "Unusable", "Value", "decode", "npy_layout", "parse_npy"]

Value = np.ndarray[Any, Any] | int | float | str | bytes | memoryview
"""A field's value; a Python number stands for one that was written without a type."""

MAX_HEADER = 64 * 1024
"""Bytes of the longest header of a ``.npy`` file that is read."""
_INT64 = range(-(2**63), 2**63)
_INFLATED = 64 * 2**20
_RATIO = 100
_HEADER = re.compile(rb"\x93NUMPY([\x01-\x03])\x00")
_OWN_MEMORY = 2**20
"""A document of JSON may take 30 times its bytes in memory: of larger ones than this one thread alone has one."""
_LARGE = threading.Lock()
_AS_STORED = Pixels()


class Unusable:
    """Stands for a value that no field can hold: fine until somebody wants the field."""

    def __init__(self, why: str) -> None:
        self.why = why
        """Behind the name of the field."""


NULL: Any = Unusable(" is null")


class _NotStored(BadObject):
    """An array of a dtype that no field has."""


def decode(
    part: Part, data: memoryview, *, images: bool, pixels: Pixels = _AS_STORED, values: str | None = None
) -> Iterator[tuple[str, Value]]:
    """The fields of one object, ``(name, value)``.

    ``images``: decode images, to ``pixels``; ``values``: what objects of bytes are, as ``--value-format`` says. Raises
    :class:`BadObject` with the reason
    alone; the caller names the object.
    """
    match part.kind:
        case "npy":
            yield part.field, parse_npy(data)
        case "npz":
            yield from _npz(part.field, data)
        case "json":
            yield from _json(part.field, data)
        case "int":
            yield part.field, _whole_number(data)
        case "str":
            yield part.field, _text(data)
        case "image" if images:
            from cachetool.sources.images import decode_image

            yield part.field, decode_image(data, pixels.size, masks=pixels.masks)
        case "bytes" if values == "npy":
            yield part.field, parse_npy(data)
        case "bytes" if values == "image":
            from cachetool.sources.images import decode_image

            yield part.field, decode_image(data, pixels.size, masks=pixels.masks)
        case "bytes" if values is not None and is_raw(values):
            yield part.field, raw_array(values, data)
        case _:
            yield part.field, data


def parse_npy(data: memoryview, *, text: bool = False) -> np.ndarray[Any, Any]:
    """The array in a ``.npy`` file; a view of ``data``.

    Layout: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. The file must hold exactly the
    array: bytes that are missing or left over are refused. ``text``: also strings of one width.
    """
    dtype, fortran, shape, start = npy_layout(data, text=text)
    if start + math.prod(shape) * dtype.itemsize != len(data):
        raise BadObject(
            f"{len(data) - start} bytes follow the header of a {dtype} array {shape},"
            f" which needs {math.prod(shape) * dtype.itemsize}"
        )
    if any(side >= 2**63 for side in shape) or math.prod(side for side in shape if side) >= 2**63:
        raise BadObject(f"its shape {shape} is larger than any array")  # with a 0 in it: of no bytes
    flat = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=start)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def npy_layout(head: memoryview, *, text: bool = False) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """What the beginning of a ``.npy`` file says: dtype, whether in Fortran's order, shape, where the values begin.

    ``text``: also for arrays of strings of one width. Raises :class:`BadObject` with the reason alone.
    """
    match = _HEADER.match(head[:8])
    if match is None:
        raise BadObject("not a .npy file (it does not begin with \\x93NUMPY)")
    wide = 2 if match.group(1) == b"\x01" else 4
    length = int.from_bytes(head[8 : 8 + wide], "little")
    start = 8 + wide + length
    if length > MAX_HEADER or start > len(head):
        raise BadObject("not a .npy file (its header is cut short or too long)")
    dtype, fortran, shape = _npy_header(bytes(head[8 + wide : start]), text=text)
    return dtype, fortran, shape, start


@functools.lru_cache(maxsize=256)
def _npy_header(raw: bytes, *, text: bool) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    try:
        header = literal(raw.decode("latin-1").strip())
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if isinstance(descr, list):
            descr = np.dtype(descr)  # a compound type, to be named when it is refused
        typed = isinstance(descr, str | np.dtype) and isinstance(fortran, bool)
        if not (typed and sizes and len(header) == 3):
            raise ValueError("unexpected entries")
    except (ValueError, SyntaxError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise BadObject("not a .npy file of plain numbers (its header names no dtype and shape)") from error
    if len(shape) > MAX_RANK:
        raise BadObject(f"an array of {len(shape)} dimensions, at most {MAX_RANK}")
    if not (text and isinstance(descr, str) and re.fullmatch("[<>|][SU][1-9][0-9]{0,8}", descr)):
        try:
            storage_dtype(descr)
        except UsageError as error:
            raise _NotStored(str(error)) from None
    return np.dtype(descr), fortran, shape


def _npz(prefix: str, data: memoryview) -> Iterator[tuple[str, Value]]:
    try:
        with directory_of(io.BytesIO(data)) as archive:
            members = archive.infolist()
            # A bomb says how large it will be, or more comes out of it than it says.
            inflated = sum(member.file_size for member in members)
            if inflated > max(_INFLATED, _RATIO * len(data)):
                raise BadObject(f"an .npz that would grow from {len(data)} to {inflated} bytes is refused")
            names = [member.filename for member in members]
            if len(set(names)) != len(names):
                raise BadObject("the .npz holds two arrays of one name")
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise BadObject(
                        f"the .npz is compressed by method {member.compress_type}, which NumPy does not write"
                    )
                name = member.filename.removesuffix(".npy")
                if name == member.filename:
                    raise BadObject(f"the .npz holds {name[:100]!r}, which is no array")
                yield prefix + name, _member(memoryview(unpacked(archive, member)))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        raise BadObject(f"not an .npz file ({_reason(error)})") from error


def _member(data: memoryview) -> Any:
    try:
        array = parse_npy(data, text=True)
    except _NotStored as error:
        return Unusable(f": {error}")
    if array.dtype.kind not in "SU":
        return array
    if array.shape:
        return Unusable(f": an array of texts ({array.dtype}), where a field holds one text a sample")
    text = array.item()
    if isinstance(text, str):
        text.encode("utf-8")  # half a character is an error now
    return text


def _json(prefix: str, data: memoryview) -> Iterator[tuple[str, Value]]:
    if len(data) > MAX_JSON:
        raise BadObject(f"JSON of {format_size(len(data))}, and at most {format_size(MAX_JSON)} are read as one")
    with _LARGE if len(data) > _OWN_MEMORY else contextlib.nullcontext():
        fields = _parsed(prefix, data)
    yield from fields


def _parsed(prefix: str, data: memoryview) -> list[tuple[str, Value]]:
    fields = []
    try:
        text = str(data, "utf-8-sig")
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, too
        raise BadObject(f"not JSON ({_reason(error)})") from error
    if not isinstance(document, dict):
        document = {"json": document} if not prefix else {prefix.removesuffix("/"): document}
        prefix = ""
    for name, value in document.items():
        plain = _plain(name, value)
        if value in (math.inf, -math.inf) or (isinstance(value, dict | list) and "Infinity" in str(plain)):
            json.loads(text, parse_float=_within_float64)  # what is written Infinity may stay: only 1e400 is another
        fields.append((prefix + name, plain))
    return fields


def _within_float64(text: str) -> float:
    if math.isinf(number := float(text)):
        raise BadObject(f"the number {text[:50]} is beyond what float64 holds")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("one key twice in one object")
    return entries


def _plain(name: str, value: Any) -> Value:
    if value is None:
        return NULL  # type: ignore[no-any-return]
    if isinstance(value, dict | list):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
        raise BadObject(f"{name[:100]!r} is {str(value)[:50]}, which does not fit into int64")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadObject(f"{name[:100]!r} holds half a character (a lone surrogate)") from None
    return value  # type: ignore[no-any-return]


def _whole_number(data: memoryview) -> int:
    text = bytes(data[:64]).strip()
    if len(data) > 64 or not re.fullmatch(rb"[+-]?[0-9]{1,19}", text) or int(text) not in _INT64:
        raise BadObject(f"not a whole number: {bytes(data[:20])!r}")
    return int(text)


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise BadObject(f"not UTF-8 text ({error.reason} at byte {error.start})") from None


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0][:100]
    return text if text.isprintable() and text else type(error).__name__
