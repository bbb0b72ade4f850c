"""Keys and ETags on disk, 64 objects at a time: neighbours share most of their text, which zlib takes out.

::

    objects.npy   uint8             the blocks, one after another
    blocks.npy    int64 (blocks + 1,)   where each begins

    a block       zlib: kind of the ETags, lengths of keys (uint16 each), lengths of ETags, keys
                  zlib: ETags; bytes in place of hexadecimal digits, if they are nothing else; absent without any

A key of ImageNet takes 4.2 bytes of its 36. Shared prefixes alone, without zlib, left 10. A block of 128 saves half a
byte more and takes twice as long to read for one key. The checksums of zlib find damage.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.stores.base import KEY_BYTES

__all__ = ["BLOCK", "KeyBlocks", "packed"]

BLOCK = 64
"""Objects of a block; the last one may have fewer."""
_NONE, _TEXT, _HEX = b"\0", b"\1", b"\2"
_MOST = BLOCK * (KEY_BYTES + 4) + 1
"""Bytes of one of the two parts, at most."""
_KEPT = 16
"""Blocks that stay in memory: objects are often read in their order."""

Pair = tuple[bytes, bytes]
"""A key and its ETag."""


def packed(keys: Sequence[bytes], etags: Sequence[bytes]) -> bytes:
    """The block of at most :data:`BLOCK` objects."""
    text = b"".join(etags)
    kind, body = (_TEXT, text) if text else (_NONE, b"")
    try:
        if (digits := bytes.fromhex(text.decode("ascii"))).hex().encode() == text and text:
            kind, body = _HEX, digits
    except ValueError:
        pass
    lengths = struct.pack(f"<{2 * len(keys)}H", *map(len, keys), *map(len, etags))
    first = zlib.compress(kind + lengths + b"".join(keys))
    return first + (zlib.compress(body) if body else b"")


class KeyBlocks:
    """The blocks of a listing, memory-mapped."""

    def __init__(self, folder: Path, data: npt.NDArray[Any], starts: npt.NDArray[Any], objects: int) -> None:
        """Raises :class:`CorruptError` for arrays that are not of so many objects."""
        self._folder, self._data, self._starts, self._objects = folder, data, starts, objects
        self._block = functools.lru_cache(_KEPT)(self._unpacked)
        bounds_fit = starts.shape == (-(-objects // BLOCK) + 1,) and starts.dtype == np.int64
        if not (bounds_fit and data.dtype == np.uint8 and data.shape == (starts[-1],)):
            raise self._damaged()

    def __getitem__(self, index: int) -> Pair:
        """Key and ETag of the object at a position. Raises :class:`CorruptError` for a damaged block."""
        number, at = divmod(index, BLOCK)
        keys, etags, bounds, etag_bounds = self._block(number)
        return keys[bounds[at] : bounds[at + 1]], etags[etag_bounds[at] : etag_bounds[at + 1]]

    def __iter__(self) -> Iterator[Pair]:
        """All of them, in order."""
        for number in range(len(self._starts) - 1):
            keys, etags, bounds, etag_bounds = self._unpacked(number)
            yield from zip(_cut(keys, bounds), _cut(etags, etag_bounds), strict=True)

    def _unpacked(self, number: int) -> tuple[bytes, bytes, list[int], list[int]]:
        """Keys and ETags of a block, one after another, and where each of them begins and ends."""
        start, stop = self._starts[number : number + 2].tolist()
        if not 0 <= start < stop <= min(len(self._data), start + 2 * _MOST):
            raise self._damaged()
        count = min(BLOCK, self._objects - number * BLOCK)
        try:
            head, rest = _inflated(self._data[start:stop].tobytes())
            lengths = struct.unpack_from(f"<{2 * count}H", head, 1)
            kind, keys, etags = head[:1], head[1 + 4 * count :], b""
            if kind != _NONE:
                etags, rest = _inflated(rest)
            if kind == _HEX:
                etags = etags.hex().encode()
        except (zlib.error, struct.error) as error:
            raise self._damaged() from error
        bounds, etag_bounds = ([0, *accumulate(part)] for part in (lengths[:count], lengths[count:]))
        if kind not in (_NONE, _TEXT, _HEX) or rest or (bounds[-1], etag_bounds[-1]) != (len(keys), len(etags)):
            raise self._damaged()
        return keys, etags, bounds, etag_bounds

    def _damaged(self) -> CorruptError:
        return CorruptError(f"listing {str(self._folder)!r} is damaged; remove it to list again")


def _inflated(data: bytes) -> tuple[bytes, bytes]:
    """What is packed, and what follows. Raises ``zlib.error`` for more than :data:`_MOST` bytes."""
    stream = zlib.decompressobj()
    out = stream.decompress(data, _MOST)
    if not stream.eof:
        raise zlib.error("it does not end")
    return out, stream.unused_data


def _cut(data: bytes, bounds: Iterable[int]) -> Iterator[bytes]:
    return (data[start:stop] for start, stop in pairwise(bounds))
