"""Functions that move many runs of bytes between two buffers. Packing, unpacking and gathering of samples use them.

Buffers are flat ``uint8`` arrays. Small runs move by one vectorised copy. Large runs move slice by slice, because an
index vector costs eight bytes for each byte that it moves.

:class:`Pointed` copies rows from anywhere in memory by one call of the interpreter's own library. A buffer may find its
rows by pointers (PEP 3118, "suboffsets"). ``PyBuffer_ToContiguous`` joins such rows with one ``memcpy`` each. The
structure and the function belong to the stable ABI since Python 3.11.
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
    "row_dtype",
    "windows",
]


_Pair = ctypes.c_ssize_t * 2
_WORD = ctypes.sizeof(ctypes.c_void_p)
_STRIDES = _Pair(_WORD, 1)
_SUBOFFSETS = _Pair(0, -1)
"""Offsets behind a pointer: along the first axis the pointer is followed, along the second axis there is none (-1)."""


class _Buffer(ctypes.Structure):
    """The C structure ``Py_buffer``."""

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
    """Rows of ``nbytes`` bytes at the positions ``starts`` of ``source``. One call copies any run of these rows.

    ``source`` is flat and contiguous. One thread at a time may use the object. Raises IndexError when a row does not
    lie inside ``source``.
    """

    __slots__ = ("_address", "_keeps", "_nbytes", "_rows", "_shape")

    def __init__(self, source: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], nbytes: int) -> None:
        # The check is needed because memcpy reads wherever a pointer leads. As unsigned numbers, negative starts are
        # too large as well, so one comparison finds both. ``np.maximum.reduce`` instead of ``.max()``, which runs more
        # Python code around the same loop, and this runs for each part of a batch.
        if len(starts) and int(np.maximum.reduce(starts.view(np.uint64))) > len(source) - nbytes:
            raise IndexError("a run of bytes reaches outside its buffer")
        pointers = starts + source.ctypes.data
        # The structure below holds bare addresses. The arrays must live as long as this object, or the addresses would
        # point into freed memory.
        self._keeps = source, pointers
        self._address: int = pointers.ctypes.data
        self._nbytes = nbytes
        self._shape = _Pair(0, nbytes)
        at = [ctypes.addressof(array) for array in (self._shape, _STRIDES, _SUBOFFSETS)]
        # The structure is built once, and ``join`` changes it in place: building one takes 2 us.
        self._rows = _Buffer(None, None, 0, 1, 1, 2, b"B", *at, None)

    def join(self, out: npt.NDArray[np.uint8], at: int, first: int, last: int) -> None:
        """Copy rows ``first`` to ``last - 1`` to byte ``at`` of ``out``, which is contiguous. Holds the GIL.

        Raises IndexError when the rows do not lie inside ``out``.
        """
        count = last - first
        size = count * self._nbytes
        # ctypes checks nothing: without this test a wrong number would write outside of ``out``.
        if count < 0 or first < 0 or last > len(self._keeps[1]) or at < 0 or at + size > out.nbytes:
            raise IndexError("a run of bytes reaches outside its buffer")
        if not size:
            return
        # ``buf`` points at the first pointer to follow, not at bytes, because the first axis has a suboffset.
        self._rows.buf = self._address + _WORD * first
        self._rows.len = size
        self._shape[0] = count
        _join(ctypes.addressof(ctypes.c_char.from_buffer(out.data, at)), self._rows, size, b"C")


Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Placed = list[tuple[int, Bytes]]
"""Runs of bytes and the positions where they belong in a buffer, for the code that writes this buffer to a file."""

# The limits below were measured; each is the size from which the named way is the faster one.
# Mean bytes of a run from which copying slice by slice is faster than an index vector.
_SLICED = 192
# Bytes of scattered runs of one size from which copying slice by slice is faster than a vectorised copy.
_LARGE = 16384
# Bytes of a row from which finding rows by pointers is faster than NumPy, which copies such rows twice.
_POINTED = 1024
# Bytes of rows that are copied before other threads get the GIL, so that a training script's own threads run on.
_UNBROKEN = 2**22
# Bytes of a run from which a copy costs more than a buffer of its own in the list of one write.
_UNCOPIED = 2**18
# Bytes that NumPy copies at once. NumPy copies twice, through an array of its own, and this size stays in the L2 cache.
_PIECE = 2**17


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """Return the bytes of a C-contiguous array as a flat view, or of a copy when the array is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def ends(sizes: npt.NDArray[np.int64]) -> Int64s:
    """Return where runs of these sizes begin when they lie end to end, int64 of shape (k + 1,). The last entry is the
    total."""
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def inside(starts: Int64s, sizes: Int64s | int, total: int) -> bool:
    """Return True if runs of ``sizes`` bytes from ``starts`` all lie between 0 and ``total``. Any int64 numbers are
    allowed."""
    sizes = np.asarray(sizes, dtype=np.int64)
    # ``total - sizes`` instead of ``starts + sizes``: a sum of two numbers out of a damaged file may wrap around int64
    # and look small.
    return not bool(((starts < 0) | (sizes < 0) | (sizes > total) | (starts > total - sizes)).any())


def windows(buffer: Bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return every run of ``nbytes`` of ``buffer`` as a row: a view of shape (positions, nbytes) whose rows overlap.

    ``windows(b, 4)[offsets]`` gathers; an assignment to rows of a writable buffer scatters. An index behind the last
    whole run raises IndexError. The caller must exclude negative indices, which NumPy counts from the end.
    """
    # Only whole runs are rows. So NumPy's own check of an index keeps every access inside the buffer.
    rows = max(0, len(buffer) - nbytes + 1)
    return np.lib.stride_tricks.as_strided(buffer, (rows, nbytes), (buffer.strides[0], buffer.strides[0]))


# Making such a dtype takes 2 us, out of this cache 0.2 us, and a loader needs one for each field of each batch.
@functools.cache
def row_dtype(nbytes: int) -> np.dtype[np.void]:
    """Return the dtype of a run of bytes as one value, which NumPy moves with one copy."""
    return np.dtype((np.void, nbytes))


def _overlapping(buffer: Bytes, nbytes: int) -> npt.NDArray[Any]:
    """Return the rows of :func:`windows`, each as one value of ``nbytes``. NumPy moves such a value with one copy."""
    # A void dtype of ``nbytes`` at a stride of one byte. No copy, and NumPy does not loop over single bytes.
    count = max(0, len(buffer) - nbytes + 1)
    return np.ndarray((count,), row_dtype(nbytes), buffer, 0, (1,))


class Rows:
    """Rows of ``nbytes`` bytes at the positions ``starts`` of ``source``. Any run of these rows is copied at once.

    One thread at a time may use the object. All rows must lie inside ``source``: not every way of copying raises an
    error otherwise.
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
        # Read one byte of each row first. The processor makes these loads side by side, so the copies find their pages
        # mapped and their first cache lines loaded. For rows of 3 KiB out of a memory map this reaches 0.79 of
        # the speed of np.take from memory, without it 0.61.
        self._source[starts]
        flat = as_bytes(out)
        if self._pointed is not None:
            # The copy holds the GIL. In pieces of 4 MiB other threads of the training process get their turn between
            # two calls.
            step = max(1, _UNBROKEN // nbytes)
            for at in range(first, last, step):
                self._pointed.join(flat, (at - first) * nbytes, at, min(at + step, last))
            return
        target, values = flat.view(row_dtype(nbytes)), _overlapping(self._source, nbytes)
        step = _PIECE // nbytes
        for at in range(0, len(starts), step):
            target[at : at + step] = values[starts[at : at + step]]


def copy_rows(out: Bytes, to: Int64s | None, source: Bytes, starts: Int64s, nbytes: int) -> None:
    """Copy ``source[starts[i] : starts[i] + nbytes]`` to row ``to[i]`` of ``out``, whose rows have ``nbytes`` bytes.

    ``to`` None: to row i. All rows must lie inside their buffers: not every way of copying raises an error otherwise.
    """
    if not nbytes:
        return
    if to is None:
        Rows(source, starts, nbytes).copy(out, 0, len(starts))
        return
    # Slices of memoryviews: their assignment is a plain memcpy with less Python around it than NumPy's.
    if nbytes >= _LARGE:
        into, of = out.data, source.data
        for row, start in zip(to.tolist(), starts.tolist(), strict=True):
            at = row * nbytes
            into[at : at + nbytes] = of[start : start + nbytes]
        return
    # Loads the first cache line of each row in advance, as in Rows.copy.
    source[starts]
    target, values = out.view(row_dtype(nbytes)), _overlapping(source, nbytes)
    step = _PIECE // nbytes
    for at in range(0, len(starts), step):
        target[to[at : at + step]] = values[starts[at : at + step]]


def put_rows(out: Bytes, starts: Int64s, rows: npt.NDArray[np.uint8]) -> None:
    """Copy row i of the contiguous ``rows`` to ``out[starts[i] : ...]``. The positions are not checked."""
    if rows.size:
        nbytes = rows.shape[1]
        _overlapping(out, nbytes)[starts] = rows.view(row_dtype(nbytes))[:, 0]


def copy_runs(out: Bytes, out_starts: Int64s, source: Bytes, starts: Int64s, sizes: Int64s) -> None:
    """Copy ``source[starts[i] : starts[i] + sizes[i]]`` to ``out[out_starts[i] : ...]`` for every i.

    Raises IndexError when a run does not lie inside its buffer.
    """
    if not len(sizes):
        return
    # Positions and sizes may come from a damaged file. NumPy and memoryviews would count a negative position from the
    # end and copy wrong bytes.
    for buffer, at in ((out, out_starts), (source, starts)):
        if not inside(at, sizes, len(buffer)):
            raise IndexError("a run of bytes reaches outside its buffer")
    first = int(sizes[0])
    if first == 0 and not sizes.any():
        return
    # Runs of one size, such as fixed fields, need no index vector for single bytes.
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
        # Many short runs of different sizes: one index for each byte is still cheaper than one Python step for each
        # run.
        within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(ends(sizes)[:-1], sizes)
        out[np.repeat(out_starts, sizes) + within] = source[np.repeat(starts, sizes) + within]


def place_runs(out: Bytes, out_starts: Int64s, source: Bytes, starts: Int64s, sizes: Int64s) -> Placed:
    """Copy runs like :func:`copy_runs`, except runs of 256 KiB or more, which stay where they are.

    Return these large runs with their positions in ``out``. The caller writes them to the file from where they are.
    """
    large = sizes >= _UNCOPIED
    if not large.any():
        copy_runs(out, out_starts, source, starts, sizes)
        return []
    if not (inside(out_starts, sizes, len(out)) and inside(starts, sizes, len(source))):
        raise IndexError("a run of bytes reaches outside its buffer")
    # The small runs between large ones are copied: each buffer of its own in a write costs more than a copy of few
    # bytes.
    copy_runs(out, out_starts[~large], source, starts[~large], sizes[~large])
    runs = zip(out_starts[large].tolist(), starts[large].tolist(), sizes[large].tolist(), strict=True)
    return [(to, source[at : at + size]) for to, at, size in runs]
