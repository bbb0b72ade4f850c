"""Moving many runs of bytes between two buffers at once: what packing, unpacking and gathering all come down to.

Buffers are flat ``uint8`` arrays. Small runs move by one vectorised copy, large ones slice by slice, since an index
vector costs eight bytes for each byte moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Int64s", "as_bytes", "copy_runs", "ends", "windows"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

_SLICED = 192  # mean bytes of a run from which slice by slice is faster than an index vector


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of a C-contiguous array as a flat view. A copy when it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def ends(sizes: npt.NDArray[np.int64]) -> Int64s:
    """Where runs of these sizes begin when laid end to end, (k + 1,): the last entry is the total."""
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def windows(buffer: Bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Every run of ``nbytes`` of ``buffer`` as a row, (positions, nbytes), overlapping.

    ``windows(b, 4)[offsets]`` gathers; assigning to rows of a writable buffer scatters. An index past the last whole
    run raises IndexError; negative ones must be kept out by the caller.
    """
    rows = max(0, len(buffer) - nbytes + 1)
    return np.lib.stride_tricks.as_strided(buffer, (rows, nbytes), (buffer.strides[0], buffer.strides[0]))


def copy_runs(out: Bytes, out_starts: Int64s, source: Bytes, starts: Int64s, sizes: Int64s) -> None:
    """Copy ``source[starts[i] : starts[i] + sizes[i]]`` to ``out[out_starts[i] : ...]`` for every i.

    Raises IndexError when a run does not lie inside its buffer.
    """
    if not len(sizes):
        return
    for buffer, at in ((out, out_starts), (source, starts)):
        if int(at.min()) < 0 or int(sizes.min()) < 0 or int((at + sizes).max()) > len(buffer):
            raise IndexError("a run of bytes reaches outside its buffer")
    first = int(sizes[0])
    if first == 0 and not sizes.any():
        return
    if first < 65536 and (sizes == first).all():
        windows(out, first)[out_starts] = windows(source, first)[starts]
    elif int(sizes.sum()) >= _SLICED * len(sizes):
        to, of = out.data, source.data
        for a, b, n in zip(out_starts.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            to[a : a + n] = of[b : b + n]
    else:
        within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(ends(sizes)[:-1], sizes)
        out[np.repeat(out_starts, sizes) + within] = source[np.repeat(starts, sizes) + within]
