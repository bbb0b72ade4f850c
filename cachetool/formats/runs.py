"""Moving many runs of bytes between two buffers at once: what packing, unpacking and gathering all come down to.

Buffers are flat ``uint8`` arrays. Small runs move by one vectorised copy, large ones slice by slice, since an index
vector costs eight bytes for each byte moved.

Copying rows from anywhere in memory by one call of the interpreter's own library.

A buffer whose rows are found by pointers (PEP 3118, "suboffsets") is what ``PyBuffer_ToContiguous`` makes one piece of:
a ``memcpy`` a row. The structure and the function belong to the stable ABI since Python 3.11.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Bytes",
    "Int64s",
    "Placed",
    "Pointed",
    "Rows",
    "as_bytes",
    "copy_rows",
    "copy_runs",
    "ends",
    "inside",
    "place_runs",
    "put_rows",
    "windows",
]


_Pair = ctypes.c_ssize_t * 2
_WORD = ctypes.sizeof(ctypes.c_void_p)
_STRIDES = _Pair(_WORD, 1)
_SUBOFFSETS = _Pair(0, -1)
"""Along the first axis a pointer is followed, along the second none is."""


class _Buffer(ctypes.Structure):
    """``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_join = ctypes.pythonapi.PyBuffer_ToContiguous
_join.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Buffer), ctypes.c_ssize_t, ctypes.c_char]


class Pointed:
    """Rows of ``nbytes`` at ``starts`` of ``source``, flat and contiguous, of which any run is copied by one call.

    Belongs to one thread at a time. Raises IndexError when a row does not lie inside the source.
    """

    __slots__ = ("_address", "_keeps", "_nbytes", "_rows", "_shape")

    def __init__(self, source: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], nbytes: int) -> None:
        # As unsigned numbers the negative ones are too large as well. Not .max(), which is Python around this.
        if len(starts) and int(np.maximum.reduce(starts.view(np.uint64))) > len(source) - nbytes:
            raise IndexError("a run of bytes reaches outside its buffer")
        pointers = starts + source.ctypes.data
        self._keeps = source, pointers
        self._address: int = pointers.ctypes.data
        self._nbytes = nbytes
        self._shape = _Pair(0, nbytes)
        at = [ctypes.addressof(array) for array in (self._shape, _STRIDES, _SUBOFFSETS)]
        self._rows = _Buffer(None, None, 0, 1, 1, 2, b"B", *at, None)

    def join(self, out: npt.NDArray[np.uint8], at: int, first: int, last: int) -> None:
        """Copy rows ``first`` to ``last - 1`` to byte ``at`` of ``out``, which is contiguous. Keeps the GIL.

        Raises IndexError when they do not lie inside ``out``.
        """
        count = last - first
        size = count * self._nbytes
        if count < 0 or first < 0 or last > len(self._keeps[1]) or at < 0 or at + size > out.nbytes:
            raise IndexError("a run of bytes reaches outside its buffer")
        if not size:
            return
        self._rows.buf = self._address + _WORD * first
        self._rows.len = size
        self._shape[0] = count
        _join(ctypes.addressof(ctypes.c_char.from_buffer(out.data, at)), self._rows, size, b"C")


Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Placed = list[tuple[int, Bytes]]
"""Where runs of bytes belong in a buffer, and what they are: for whoever writes that buffer out."""

_SLICED = 192  # mean bytes of a run from which slice by slice is faster than an index vector
_LARGE = 16384  # bytes of scattered runs of one size from which slice by slice is faster than a vectorised copy
_POINTED = 1024  # bytes of rows from which finding them by pointers is faster than by NumPy, which copies them twice
_UNBROKEN = 2**22  # bytes of rows that are copied before other threads have a turn of the GIL
_UNCOPIED = 2**18  # bytes of a run from which a copy costs more than a piece of its own in a write
_PIECE = 2**17  # bytes copied at once: NumPy copies twice, through an array of its own, which stays in the L2 cache


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of a C-contiguous array as a flat view. A copy when it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def ends(sizes: npt.NDArray[np.int64]) -> Int64s:
    """Where runs of these sizes begin when laid end to end, (k + 1,): the last entry is the total."""
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def inside(starts: Int64s, sizes: Int64s | int, total: int) -> bool:
    """Whether runs of ``sizes`` from ``starts`` all lie between 0 and ``total``, whatever numbers they are."""
    sizes = np.asarray(sizes, dtype=np.int64)
    # Not starts + sizes: a sum of numbers out of a damaged file may wrap around.
    return not bool(((starts < 0) | (sizes < 0) | (sizes > total) | (starts > total - sizes)).any())


def windows(buffer: Bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Every run of ``nbytes`` of ``buffer`` as a row, (positions, nbytes), overlapping.

    ``windows(b, 4)[offsets]`` gathers; assigning to rows of a writable buffer scatters. An index past the last whole
    run raises IndexError; negative ones must be kept out by the caller.
    """
    rows = max(0, len(buffer) - nbytes + 1)
    return np.lib.stride_tricks.as_strided(buffer, (rows, nbytes), (buffer.strides[0], buffer.strides[0]))


@functools.cache
def _value(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))


def _overlapping(buffer: Bytes, nbytes: int) -> npt.NDArray[Any]:
    """As :func:`windows`, each run one value of ``nbytes``: NumPy moves such a value at once."""
    count = max(0, len(buffer) - nbytes + 1)
    return np.ndarray((count,), _value(nbytes), buffer, 0, (1,))


class Rows:
    """Rows of ``nbytes`` at ``starts`` of ``source``, of which any run is copied at once; for one thread at a time.

    All must lie inside the source; not every way of copying notices when one does not.
    """

    __slots__ = ("_nbytes", "_pointed", "_source", "_starts")

    def __init__(self, source: Bytes, starts: Int64s, nbytes: int) -> None:
        self._source, self._starts, self._nbytes = source, starts, nbytes
        self._pointed = Pointed(source, starts, nbytes) if nbytes >= _POINTED else None

    def copy(self, out: npt.NDArray[Any], first: int, last: int) -> None:
        """Copy rows ``first`` to ``last - 1`` to the beginning of ``out``, which is C-contiguous."""
        nbytes, starts = self._nbytes, self._starts[first:last]
        if not nbytes:
            return
        # One byte of each first, whose loads the processor makes side by side: the copies then find their pages known
        # and their first lines near. At 3 KiB out of a map that is 0.79 of np.take from memory instead of 0.61.
        self._source[starts]
        flat = as_bytes(out)
        if self._pointed is not None:
            step = max(1, _UNBROKEN // nbytes)
            for at in range(first, last, step):
                self._pointed.join(flat, (at - first) * nbytes, at, min(at + step, last))
            return
        target, values = flat.view(_value(nbytes)), _overlapping(self._source, nbytes)
        step = _PIECE // nbytes
        for at in range(0, len(starts), step):
            target[at : at + step] = values[starts[at : at + step]]


def copy_rows(out: Bytes, to: Int64s | None, source: Bytes, starts: Int64s, nbytes: int) -> None:
    """Copy ``source[starts[i] : starts[i] + nbytes]`` to row ``to[i]`` (None: i) of ``out``, rows of ``nbytes``.

    All must lie inside their buffers; not every way of copying notices when one does not.
    """
    if not nbytes:
        return
    if to is None:
        Rows(source, starts, nbytes).copy(out, 0, len(starts))
        return
    if nbytes >= _LARGE:
        into, of = out.data, source.data
        for row, start in zip(to.tolist(), starts.tolist(), strict=True):
            at = row * nbytes
            into[at : at + nbytes] = of[start : start + nbytes]
        return
    source[starts]  # as in Rows.copy
    target, values = out.view(_value(nbytes)), _overlapping(source, nbytes)
    step = _PIECE // nbytes
    for at in range(0, len(starts), step):
        target[to[at : at + step]] = values[starts[at : at + step]]


def put_rows(out: Bytes, starts: Int64s, rows: npt.NDArray[np.uint8]) -> None:
    """Copy row i of the contiguous ``rows`` to ``out[starts[i] : ...]``. No position is checked."""
    if rows.size:
        nbytes = rows.shape[1]
        _overlapping(out, nbytes)[starts] = rows.view(_value(nbytes))[:, 0]


def copy_runs(out: Bytes, out_starts: Int64s, source: Bytes, starts: Int64s, sizes: Int64s) -> None:
    """Copy ``source[starts[i] : starts[i] + sizes[i]]`` to ``out[out_starts[i] : ...]`` for every i.

    Raises IndexError when a run does not lie inside its buffer.
    """
    if not len(sizes):
        return
    for buffer, at in ((out, out_starts), (source, starts)):
        if not inside(at, sizes, len(buffer)):
            raise IndexError("a run of bytes reaches outside its buffer")
    first = int(sizes[0])
    if first == 0 and not sizes.any():
        return
    if first < _LARGE and (sizes == first).all():
        target, values = _overlapping(out, first), _overlapping(source, first)
        step = _PIECE // first
        for begin in range(0, len(sizes), step):
            target[out_starts[begin : begin + step]] = values[starts[begin : begin + step]]
    elif int(sizes.sum()) >= _SLICED * len(sizes):
        to, of = out.data, source.data
        for a, b, n in zip(out_starts.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            to[a : a + n] = of[b : b + n]
    else:
        within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(ends(sizes)[:-1], sizes)
        out[np.repeat(out_starts, sizes) + within] = source[np.repeat(starts, sizes) + within]


def place_runs(out: Bytes, out_starts: Int64s, source: Bytes, starts: Int64s, sizes: Int64s) -> Placed:
    """:func:`copy_runs`, but large runs stay where they are, and are given back with their places in ``out``."""
    large = sizes >= _UNCOPIED
    if not large.any():
        copy_runs(out, out_starts, source, starts, sizes)
        return []
    if not (inside(out_starts, sizes, len(out)) and inside(starts, sizes, len(source))):
        raise IndexError("a run of bytes reaches outside its buffer")
    copy_runs(out, out_starts[~large], source, starts[~large], sizes[~large])
    runs = zip(out_starts[large].tolist(), starts[large].tolist(), sizes[large].tolist(), strict=True)
    return [(to, source[at : at + size]) for to, at, size in runs]
