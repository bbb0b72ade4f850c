"""The values of the fields of one object. Nothing here unpickles, and data that does not parse is refused.

============  ============================================================================================
``.npy``      an array, without a copy where it is little-endian
``.npz``      its arrays, each a field; a single string of NumPy's is text or bytes
``.json``     its top-level keys: whole numbers int64, others float64, true/false bool, text str, anything
              nested as JSON text; a top level that is no object is one field named ``json``
``.cls .id``  a whole number, int64
``.txt``      text, UTF-8
images        bytes, or an array of pixels (:mod:`cachetool.sources.images`)
all others    bytes
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

__all__ = ["NULL", "Unusable", "Value", "decode", "npy_layout", "parse_npy", "whole_number"]

Value = np.ndarray[Any, Any] | int | float | str | bytes | memoryview
"""The value of a field. A Python number is a value that was written without a type."""

MAX_HEADER = 64 * 1024
"""Largest header of a ``.npy`` file, in bytes, that is read."""
_INT64 = range(-(2**63), 2**63)
# An .npz may grow to 64 MiB, or to 100 times its size if that is more. Larger claims are those of decompression bombs.
_INFLATED = 64 * 2**20
_RATIO = 100
_HEADER = re.compile(rb"\x93NUMPY([\x01-\x03])\x00")
_OWN_MEMORY = 2**20
"""Size in bytes above which JSON documents are parsed one at a time: a document may take 30 times its size in
memory."""
_LARGE = threading.Lock()
_AS_STORED = Pixels()


class Unusable:
    """A value that no field can hold. It is an error only if the field is used."""

    def __init__(self, why: str) -> None:
        self.why = why
        """The reason, to follow the name of the field."""


NULL: Any = Unusable(" is null")


class _NotStored(BadObject):
    """Raised for an array of a dtype that no field has."""


def decode(
    part: Part, data: memoryview, *, images: bool, pixels: Pixels = _AS_STORED, values: str | None = None
) -> Iterator[tuple[str, Value]]:
    """Yield the fields of one object as ``(name, value)``.

    ``images``: decode images to ``pixels``. ``values``: the format of objects of bytes, as ``--value-format`` says.
    Raise :class:`BadObject` with the reason alone; the caller adds the name of the object.
    """
    match part.kind:
        case "npy":
            yield part.field, parse_npy(data)
        case "npz":
            yield from _npz(part.field, data)
        case "json":
            yield from _json(part.field, data)
        case "int":
            yield part.field, whole_number(data)
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
    """Return the array in a ``.npy`` file, as a view of ``data``.

    Layout: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. The file must hold exactly the
    array: missing and extra bytes are refused. ``text``: accept strings of one width, too.
    """
    dtype, fortran, shape, start = npy_layout(data, text=text)
    if start + math.prod(shape) * dtype.itemsize != len(data):
        raise BadObject(
            f"{len(data) - start} bytes follow the header, but a {dtype} array of shape {shape}"
            f" needs {math.prod(shape) * dtype.itemsize}"
        )
    # A shape with a 0 in it needs no bytes, so it passes the comparison above whatever its other sides are. NumPy would
    # overflow on them.
    if any(side >= 2**63 for side in shape) or math.prod(side for side in shape if side) >= 2**63:
        raise BadObject(f"its shape {shape} is too large for an array")
    flat = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=start)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def npy_layout(head: memoryview, *, text: bool = False) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Return dtype, True if in Fortran order, shape and offset of the values, from the beginning of a ``.npy`` file.

    ``text``: accept arrays of strings of one width, too. Raise :class:`BadObject` with the reason alone.
    """
    match = _HEADER.match(head[:8])
    if match is None:
        raise BadObject("not a .npy file (it does not begin with \\x93NUMPY)")
    # The length of the header is 2 bytes in version 1 of the format and 4 bytes in versions 2 and 3.
    wide = 2 if match.group(1) == b"\x01" else 4
    length = int.from_bytes(head[8 : 8 + wide], "little")
    start = 8 + wide + length
    if length > MAX_HEADER or start > len(head):
        raise BadObject("not a .npy file (its header is cut short or too long)")
    dtype, fortran, shape = _npy_header(bytes(head[8 + wide : start]), text=text)
    return dtype, fortran, shape, start


# The objects of a source share a few headers, so each header is parsed once and not once for each object. The limit of
# 256 bounds the memory that hostile headers can take.
@functools.lru_cache(maxsize=256)
def _npy_header(raw: bytes, *, text: bool) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    try:
        header = literal(raw.decode("latin-1").strip())
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if isinstance(descr, list):
            # A compound type is built only so that storage_dtype refuses it below by its name.
            descr = np.dtype(descr)
        typed = isinstance(descr, str | np.dtype) and isinstance(fortran, bool)
        if not (typed and sizes and len(header) == 3):
            raise ValueError("unexpected entries")
    except (ValueError, SyntaxError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise BadObject("not a .npy file of plain numbers (its header has no valid dtype and shape)") from error
    if len(shape) > MAX_RANK:
        raise BadObject(f"an array of {len(shape)} dimensions; at most {MAX_RANK} are supported")
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
            # Checked before the first member is unpacked. A bomb states how large it will be; or more comes out of it
            # than it states, which `unpacked` refuses.
            inflated = sum(member.file_size for member in members)
            if inflated > max(_INFLATED, _RATIO * len(data)):
                raise BadObject(f"the .npz is refused: unpacking it would turn {len(data)} bytes into {inflated}")
            names = [member.filename for member in members]
            # zipfile would return the last of two members of one name, and the other would be lost silently.
            if len(set(names)) != len(names):
                raise BadObject("the .npz has two arrays of the same name")
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise BadObject(
                        f"the .npz is compressed by method {member.compress_type}, which NumPy does not write"
                    )
                name = member.filename.removesuffix(".npy")
                if name == member.filename:
                    raise BadObject(f"the .npz has the member {name[:100]!r}, which is not an array")
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
        return Unusable(f" is an array of texts ({array.dtype}), but a field holds only one text per sample")
    text = array.item()
    if isinstance(text, str):
        # A lone surrogate (half a character) cannot be encoded. The error is raised here, where the object's name is
        # added, and not when the shard is written.
        text.encode("utf-8")
    return text


def _json(prefix: str, data: memoryview) -> Iterator[tuple[str, Value]]:
    if len(data) > MAX_JSON:
        raise BadObject(f"the JSON has {format_size(len(data))}, but at most {format_size(MAX_JSON)} can be read")
    # Many decoding threads run at once. A document takes up to 30 times its bytes, so only one large one is parsed at a
    # time.
    with _LARGE if len(data) > _OWN_MEMORY else contextlib.nullcontext():
        fields = _parsed(prefix, data)
    yield from fields


def _parsed(prefix: str, data: memoryview) -> list[tuple[str, Value]]:
    fields = []
    try:
        text = str(data, "utf-8-sig")
        document = json.loads(text, object_pairs_hook=_unique)
    # UnicodeDecodeError is a ValueError, too. Deep nesting of a hostile document raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise BadObject(f"not JSON ({_reason(error)})") from error
    if not isinstance(document, dict):
        document = {"json": document} if not prefix else {prefix.removesuffix("/"): document}
        prefix = ""
    for name, value in document.items():
        plain = _plain(name, value)
        if value in (math.inf, -math.inf) or (isinstance(value, dict | list) and "Infinity" in str(plain)):
            # Python's parser makes an infinity of 1e400, a number that float64 does not hold. Only that is refused; a
            # literal Infinity stays. The text is parsed again because the first pass does not tell the two apart.
            json.loads(text, parse_float=_within_float64)
        fields.append((prefix + name, plain))
    return fields


def _within_float64(text: str) -> float:
    if math.isinf(number := float(text)):
        raise BadObject(f"the number {text[:50]} does not fit into float64")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON with a repeated key is legal, and Python would keep the last value silently.
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has the same key twice")
    return entries


def _plain(name: str, value: Any) -> Value:
    if value is None:
        return NULL  # type: ignore[no-any-return]
    if isinstance(value, dict | list):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
        raise BadObject(f"{name[:100]!r} is {str(value)[:50]}, which does not fit into int64")
    # isascii is a fast check that spares most texts the encoding, which only detects a lone surrogate.
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadObject(f"{name[:100]!r} is not valid Unicode (it has a lone surrogate)") from None
    return value  # type: ignore[no-any-return]


def whole_number(data: memoryview) -> int:
    """Return the number that a file of text holds. Raise :class:`BadObject` with the reason alone."""
    # An object with this extension may have any size. 64 bytes hold every int64 with white space around it, and no more
    # is copied.
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
