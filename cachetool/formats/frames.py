"""Frames: compressed pieces of a field's values, each of which is decoded alone.

::

    values of a field   | sample 0 | sample 1 | sample 2 | ...             before compression, positions of FieldExtents
    frames              |  frame 0   |  frame 1   |  frame 2   | ...       FRAME_BYTES, or one sample if it is larger
    file                [frame 0][frame 1] ... [frame 2]                   where Frames says

A large sample is one frame, so it is decoded straight into a batch. Small samples share a frame. A frame that several
of the wanted samples share is decoded once. There is one call of a codec for each frame, so this module loops over
frames: a codec takes 7 us for the smallest.

The bytes come from a file that may be damaged or hostile. So the size that a frame claims is compared with the size
that it must have before a codec writes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cachetool.core.errors import CorruptError
from cachetool.core.extents import Frames
from cachetool.formats.runs import Bytes, Int64s, inside

__all__ = [
    "FRAME_BYTES",
    "Fetch",
    "Scratch",
    "check_frames",
    "frame_rows",
    "framed_overhead",
    "frames_of",
    "read_frames",
]

# Smaller frames compress worse, and larger ones are decoded for nothing when one sample of 3 KiB is wanted: see
# docs/explanation/decisions.md for the figures.
FRAME_BYTES = 2**13
"""Bytes of a frame before compression, unless one sample is larger."""

# Most bytes that a codec and a format add to a frame that does not compress.
_MOST_OVERHEAD = 96

Fetch = Callable[[int, int], memoryview]
"""A function ``fetch(position, size)`` that returns bytes of a file, fewer at its end. They are valid until the next
call."""


# Most bytes of a frame of values whose samples differ in size: larger ones decode no faster.
_MOST = 2**18


def frame_rows(row_nbytes: int, sample_nbytes: int = 0) -> int:
    """Return the rows of ``row_nbytes`` bytes in a frame.

    ``sample_nbytes``: bytes of a sample on average, if one sample has many rows.
    """
    # A power of two, so that a few samples more or less do not change it: equal samples shall make equal files.
    whole = 1 << max(0, min(sample_nbytes, _MOST).bit_length() - 1)
    return max(1, max(FRAME_BYTES, whole) // max(1, row_nbytes))


def framed_overhead(nbytes: int, arrays: int) -> int:
    """Return the most bytes that frames of ``nbytes`` bytes of values in so many arrays take beside the values."""
    # Rows of half a frame and a bit more leave nearly half of each frame empty, which makes the most frames. The last
    # frame of each array is filled up.
    return _MOST_OVERHEAD * (2 * nbytes // FRAME_BYTES + 2 * arrays) + (nbytes >> 8)


class Scratch:
    """Memory for one compressed and one decoded frame. It grows and is used again. One thread uses it."""

    def __init__(self) -> None:
        self._packed = self._plain = np.empty(0, dtype=np.uint8)

    def packed(self, nbytes: int) -> memoryview:
        """Return memory for a compressed frame."""
        if len(self._packed) < nbytes:
            self._packed = np.empty(nbytes + (nbytes >> 2), dtype=np.uint8)
        return self._packed.data[:nbytes]

    def plain(self, nbytes: int) -> Bytes:
        """Return memory for a decoded frame."""
        if len(self._plain) < nbytes:
            self._plain = np.empty(nbytes, dtype=np.uint8)
        return self._plain[:nbytes]


def check_frames(path: str, frames: Frames, field: str) -> None:
    """Raise :class:`CorruptError` unless the frames of ``field`` have sizes and positions that can be read."""
    sizes, starts = frames.sizes, frames.starts
    good = not len(sizes) or (int(frames.offsets.min()) >= 0 and int(sizes.min()) >= 0 and int(sizes.max()) < 2**31)
    if starts is not None:
        steps = np.diff(starts)
        good = good and int(starts[0]) == 0 and bool(((steps > 0) & (steps < 2**31)).all())
    if not good:
        raise CorruptError(f"{path}: the frames of field {field!r} have sizes or positions that nobody wrote")


def frames_of(frames: Frames, starts: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Return the number of the first frame of each run of values, and of the frame behind its last one."""
    last = starts + np.maximum(sizes, 1) - 1
    if frames.starts is None:
        return starts // frames.nbytes, last // frames.nbytes + 1
    return np.searchsorted(frames.starts, starts, "right") - 1, np.searchsorted(frames.starts, last, "right")


def read_frames(
    frames: Frames, fetch: Fetch, out: Bytes, to: Int64s, starts: Int64s, sizes: Int64s, scratch: Scratch
) -> None:
    """Decode ``sizes[i]`` bytes from ``starts[i]`` of the values before compression to ``out[to[i] :]``, for every i.

    ``fetch`` reads the file. Raises IndexError when a run lies outside of the values, and :class:`CorruptError`, which
    names the position in the file and no file, for a frame that cannot be decoded.
    """
    if not (inside(to, sizes, len(out)) and inside(starts, sizes, frames.total)):
        raise IndexError("a run of bytes reaches outside its buffer")
    if len(starts) > 1:
        to, starts, sizes = _joined(to, starts, sizes)
    first, _ = frames_of(frames, starts, sizes)
    # In the order of the frames, so that neighbours in one frame are decoded once, and the file is read forwards.
    order = np.argsort(first, kind="stable")
    decode = _decoder(frames.codec)
    nbytes, shuffle, begins = frames.nbytes, frames.shuffle, frames.starts
    offsets, packed_sizes = frames.offsets, frames.sizes
    held, plain, memory = -1, out[:0], out.data
    for frame, at, start, size in zip(
        first[order].tolist(), to[order].tolist(), starts[order].tolist(), sizes[order].tolist(), strict=True
    ):
        while size:
            begin = frame * nbytes if begins is None else int(begins[frame])
            length = nbytes if begins is None else int(begins[frame + 1]) - begin
            skip = start - begin
            count = min(size, length - skip)
            whole = count == length
            if whole or frame != held:
                into = out[at : at + count] if whole else scratch.plain(length)
                position, stored = int(offsets[frame]), int(packed_sizes[frame])
                data = fetch(position, stored)
                if len(data) != stored:
                    raise CorruptError(f"is cut short: a frame needs {stored} bytes at {position}")
                _unpack(decode, data, into, shuffle, position)
                if not whole:
                    held, plain = frame, into
            if not whole:
                memory[at : at + count] = plain.data[skip : skip + count]
            at, start, size, frame = at + count, start + count, size - count, frame + 1


def _joined(to: Int64s, starts: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return the runs with neighbours, that are also neighbours in the target, made one run."""
    follows = (starts[1:] == starts[:-1] + sizes[:-1]) & (to[1:] == to[:-1] + sizes[:-1])
    if not follows.any():
        return to, starts, sizes
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    return to[begins], starts[begins], np.add.reduceat(sizes, begins)


def _unpack(decode: _Decode, data: memoryview, out: Bytes, shuffle: int, position: int) -> None:
    """Decode one frame, which fills all of ``out``."""
    try:
        decode(data, out, shuffle)
    except MemoryError:
        raise
    # Each codec has errors of its own for damaged bytes, so the class says nothing.
    except Exception as error:
        raise CorruptError(f"has a damaged frame at {position}: {error}") from error


_Decode = Callable[[memoryview, Bytes, int], None]


@functools.cache
def _decoder(codec: str) -> _Decode:
    """Return the function of a codec that decodes a frame into memory of exactly its size."""
    return {"blosc": _blosc, "zstd": _zstd, "zlib": _zlib, "deflate": _deflate}[codec]()


def _blosc() -> _Decode:
    # Imported here: numcodecs takes 150 ms to load, and a reader of uncompressed shards never needs it.
    from numcodecs import blosc

    # As zarr has it: the threads of blosc do not survive a fork, and feeders are the parallel part here.
    blosc.use_threads = False
    decompress: Any = blosc.decompress

    def decode(data: memoryview, out: Bytes, shuffle: int) -> None:
        # Little-endian numbers of the chunk's header: bytes before and after compression
        # (https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst).
        claims = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
        if claims != (len(out), len(data)):
            raise ValueError(f"it claims {claims[0]} bytes, not {len(out)}")
        decompress(data, out)

    return decode


def _zstd() -> _Decode:
    from numcodecs import zstd

    decompress: Any = zstd.decompress

    def decode(data: memoryview, out: Bytes, shuffle: int) -> None:
        if (claim := _zstd_size(data)) != len(out):
            raise ValueError(f"it claims {claim} bytes, not {len(out)}")
        decompress(data, out)

    return decode


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _zstd_size(data: memoryview) -> int:
    """Return the bytes before compression from the header of a zstd frame, or -1 if it does not have them.

    RFC 8878, section 3.1.1.1 (https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1.1).
    """
    # Other frames, which the library skips, would leave the memory of the result as it was.
    if bytes(data[:4]) != _ZSTD_MAGIC:
        return -1
    descriptor = data[4]
    flag, single = descriptor >> 6, descriptor >> 5 & 1
    if not flag and not single:
        return -1
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(data[at : at + (1, 2, 4, 8)[flag]], "little")
    return size + 256 if flag == 1 else size


def _zlib() -> _Decode:
    # libdeflate takes less than half the time of zlib: 0.11 ms in place of 0.24 for 128 KiB. It decodes only whole
    # pieces, and a frame is one.
    import deflate

    def decode(data: memoryview, out: Bytes, shuffle: int) -> None:
        _ordered(deflate.zlib_decompress(data, len(out)), out, shuffle)

    return decode


# An empty last block: a frame of a longer stream has none, and the decoder would take it for cut short.
_LAST_BLOCK = b"\x03\x00"


def _deflate() -> _Decode:
    import deflate

    def decode(data: memoryview, out: Bytes, shuffle: int) -> None:
        _ordered(deflate.deflate_decompress(bytes(data) + _LAST_BLOCK, len(out)), out, shuffle)

    return decode


def _ordered(decoded: bytearray, out: Bytes, shuffle: int) -> None:
    """Copy the bytes of a frame to ``out``, in order."""
    if len(decoded) != len(out):
        raise ValueError(f"it has {len(decoded)} bytes, not {len(out)}")
    plain = np.frombuffer(decoded, dtype=np.uint8)
    if shuffle == 1:
        out[:] = plain
        return
    # One assignment for each byte of the items: a transposed copy takes five times as long.
    items, planes = out.reshape(-1, shuffle), plain.reshape(shuffle, -1)
    for byte in range(shuffle):
        items[:, byte] = planes[byte]
