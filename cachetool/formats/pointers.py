"""Copying rows from anywhere in memory by one call of the interpreter's own library.

A buffer whose rows are found by pointers (PEP 3118, "suboffsets") is what ``PyBuffer_ToContiguous`` makes one piece of:
a ``memcpy`` a row. The structure and the function belong to the stable ABI since Python 3.11.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

__all__ = ["Pointed"]

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
        at = [ctypes.addressof(each) for each in (self._shape, _STRIDES, _SUBOFFSETS)]
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
