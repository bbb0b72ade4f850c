"""Copying rows from anywhere in memory by one call of the interpreter's own library.

A buffer whose rows are found by pointers (PEP 3118, "suboffsets") is what ``PyBuffer_ToContiguous`` makes one piece of:
a ``memcpy`` a row. The structure and the function belong to the stable ABI since Python 3.11.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

__all__ = ["join_rows"]

_Pair = ctypes.c_ssize_t * 2
_STRIDES = _Pair(ctypes.sizeof(ctypes.c_void_p), 1)
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


def join_rows(
    out: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], nbytes: int
) -> None:
    """Copy ``source[starts[i] : starts[i] + nbytes]`` to row i of ``out``, all three flat and contiguous.

    Keeps the GIL. Raises IndexError when a row does not lie inside its buffer.
    """
    if not len(starts) or not nbytes:
        return
    size = len(starts) * nbytes
    # As unsigned numbers the negative ones are too large as well. Not .max(), which is Python around this.
    if size > len(out) or int(np.maximum.reduce(starts.view(np.uint64))) > len(source) - nbytes:
        raise IndexError("a run of bytes reaches outside its buffer")
    pointers = starts + source.ctypes.data
    shape = _Pair(len(starts), nbytes)
    at = [ctypes.addressof(each) for each in (shape, _STRIDES, _SUBOFFSETS)]
    rows = _Buffer(pointers.ctypes.data, None, size, 1, 1, 2, b"B", *at, None)
    _join(out.ctypes.data, rows, size, b"C")
