"""The codecs of Zarr in this process, made to distrust what they read.

As they come they make room for whatever a chunk says that it unpacks to, or unpack it until it ends; and Blosc believes
its own length: behind a chunk that was cut it reads whatever lies there in memory, as values.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["distrust_codecs"]

_BLOSC_HEAD = 16
_ZSTD = b"\x28\xb5\x2f\xfd"

Decode = Callable[..., Any]


class _Limit:
    most = 0


def distrust_codecs(most: int) -> None:
    """Have all codecs of this process refuse, from now on, a chunk of which more than ``most`` bytes come; of several
    limits the highest holds."""
    _Limit.most = max(_Limit.most, most)
    _replace_all()


@functools.cache
def _replace_all() -> None:
    numcodecs = importlib.import_module("numcodecs")
    for name, claimed in {"Blosc": _blosc_claims, "LZ4": _lz4_claims, "Zstd": _zstd_claims}.items():
        codec = getattr(numcodecs, name)
        codec.decode = _believing(codec.decode, claimed)
    for name, read in {"GZip": _gunzip, "Zlib": _inflate, "BZ2": _bunzip, "LZMA": _unlzma}.items():
        if (codec := getattr(numcodecs, name, None)) is not None:  # Python may be without one of them
            codec.decode = _unpacking(read)


def _believing(decode: Decode, claimed: Callable[[bytes, int], int]) -> Decode:
    """``decode``, once what the chunk says of its size was looked at."""

    def checked(self: Any, buf: Any, out: Any = None) -> Any:
        chunk = np.frombuffer(buf, dtype=np.uint8)
        _check(claimed(chunk[:_BLOSC_HEAD].tobytes(), len(chunk)))
        return decode(self, buf, out)

    return checked


def _unpacking(read: Callable[[Any, bytes, int], bytes]) -> Decode:
    """A ``decode`` that stops one byte behind the limit."""

    def checked(self: Any, buf: Any, out: Any = None) -> Any:
        data = read(self, np.frombuffer(buf, dtype=np.uint8).tobytes(), _Limit.most + 1)
        _check(len(data))
        return data if out is None else importlib.import_module("numcodecs.compat").ndarray_copy(data, out)

    return checked


def _check(nbytes: int) -> None:
    if nbytes > _Limit.most:
        raise ValueError(f"a chunk unpacks to more than the {_Limit.most} bytes that it may have")


def _blosc_claims(head: bytes, stored: int) -> int:
    if len(head) < _BLOSC_HEAD or int.from_bytes(head[12:16], "little") != stored:
        raise ValueError("a Blosc chunk that is cut short or has a damaged length")
    return int.from_bytes(head[4:8], "little")


def _lz4_claims(head: bytes, stored: int) -> int:
    return int.from_bytes(head[:4], "little")


def _zstd_claims(head: bytes, stored: int) -> int:
    """The size in the head of a frame (RFC 8878, 3.1.1.1); 0 where it is not said: the process's memory is limited."""
    if len(head) < 5 or not head.startswith(_ZSTD):
        return 0
    how = head[4]
    single = how >> 5 & 1
    size = (single, 2, 4, 8)[how >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[how & 3]
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


def _gunzip(codec: Any, data: bytes, most: int) -> bytes:
    return gzip.GzipFile(fileobj=io.BytesIO(data)).read(most)


def _inflate(codec: Any, data: bytes, most: int) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(data, most)
    if not stream.eof and len(found) < most:
        raise ValueError("a chunk that is cut short")
    return found


def _bunzip(codec: Any, data: bytes, most: int) -> bytes:
    return bz2.BZ2File(io.BytesIO(data)).read(most)


def _unlzma(codec: Any, data: bytes, most: int) -> bytes:
    return lzma.LZMAFile(io.BytesIO(data), format=codec.format, filters=codec.filters).read(most)
