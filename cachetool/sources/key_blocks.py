"""Keys and ETags of a listing on disk, in blocks of 64 objects. Neighbouring keys share most of their text, which zlib
removes.

::

    objects.npy   uint8             the blocks, one after another
    blocks.npy    int64 (blocks + 1,)   where each begins

A key of ImageNet takes 4.2 of its 36 bytes. Removing shared prefixes without zlib left 10 bytes. Blocks of 128 objects
save another half byte, but reading one key takes twice as long. The checksums of zlib detect damage.
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
"""Number of objects in a block; the last block may have fewer."""
_NONE, _TEXT, _HEX = b"\0", b"\1", b"\2"
_MOST = BLOCK * (KEY_BYTES + 4) + 1
"""Most bytes of either part of a block: 64 keys of the longest length, their lengths, and the kind of the ETags."""
_KEPT = 16
"""Number of blocks kept unpacked in memory. Objects are often read in order, and unpacking a block takes about 20
us."""

Pair = tuple[bytes, bytes]
"""A key and its ETag."""


def packed(keys: Sequence[bytes], etags: Sequence[bytes]) -> bytes:
    """Return the block of at most :data:`BLOCK` objects as bytes."""
    text = b"".join(etags)
    kind, body = (_TEXT, text) if text else (_NONE, b"")
    try:
        # Most ETags are MD5 sums in hexadecimal, which take half the space as bytes. The comparison with `text` keeps
        # ETags as text if unpacking would not give back the same characters: fromhex also accepts capitals and spaces.
        if (digits := bytes.fromhex(text.decode("ascii"))).hex().encode() == text and text:
            kind, body = _HEX, digits
    except ValueError:
        pass
    lengths = struct.pack(f"<{2 * len(keys)}H", *map(len, keys), *map(len, etags))
    first = zlib.compress(kind + lengths + b"".join(keys))
    return first + (zlib.compress(body) if body else b"")


class KeyBlocks:
    """The memory-mapped blocks of a listing."""

    def __init__(self, folder: Path, data: npt.NDArray[Any], starts: npt.NDArray[Any], objects: int) -> None:
        """Raise :class:`CorruptError` for arrays that do not belong to ``objects`` objects."""
        self._folder, self._data, self._starts, self._objects = folder, data, starts, objects
        self._block = functools.lru_cache(_KEPT)(self._unpacked)
        bounds_fit = starts.shape == (-(-objects // BLOCK) + 1,) and starts.dtype == np.int64
        if not (bounds_fit and data.dtype == np.uint8 and data.shape == (starts[-1],)):
            raise self._damaged()

    def __getitem__(self, index: int) -> Pair:
        """Return the key and ETag of the object at a position. Raises :class:`CorruptError` for a damaged block."""
        number, at = divmod(index, BLOCK)
        keys, etags, bounds, etag_bounds = self._block(number)
        return keys[bounds[at] : bounds[at + 1]], etags[etag_bounds[at] : etag_bounds[at + 1]]

    def __iter__(self) -> Iterator[Pair]:
        """Yield the key and ETag of every object in order."""
        # Calls _unpacked, not the cached _block: a walk over all blocks would only push out the blocks kept for single
        # objects.
        for number in range(len(self._starts) - 1):
            keys, etags, bounds, etag_bounds = self._unpacked(number)
            yield from zip(_cut(keys, bounds), _cut(etags, etag_bounds), strict=True)

    def _unpacked(self, number: int) -> tuple[bytes, bytes, list[int], list[int]]:
        """Return the keys and the ETags of a block, each as one byte string with the bounds of its entries."""
        start, stop = self._starts[number : number + 2].tolist()
        # A damaged blocks.npy may name any range. Two parts of at most _MOST bytes bound what is copied out of the map.
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
        # zlib detects damage in its own bytes only. These checks find a block that was cut, extended or swapped as a
        # whole.
        if kind not in (_NONE, _TEXT, _HEX) or rest or (bounds[-1], etag_bounds[-1]) != (len(keys), len(etags)):
            raise self._damaged()
        return keys, etags, bounds, etag_bounds

    def _damaged(self) -> CorruptError:
        return CorruptError(f"listing {str(self._folder)!r} is damaged; remove it to list again")


def _inflated(data: bytes) -> tuple[bytes, bytes]:
    """Return the unpacked bytes of the first zlib stream in ``data``, and the bytes after that stream.

    Raises ``zlib.error`` for more than :data:`_MOST` bytes.
    """
    stream = zlib.decompressobj()
    # The limit counts unpacked bytes, because a few damaged or hostile bytes can unpack to gigabytes.
    out = stream.decompress(data, _MOST)
    if not stream.eof:
        raise zlib.error("it does not end")
    return out, stream.unused_data


def _cut(data: bytes, bounds: Iterable[int]) -> Iterator[bytes]:
    return (data[start:stop] for start, stop in pairwise(bounds))
