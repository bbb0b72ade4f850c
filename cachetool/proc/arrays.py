"""Reading of ``.npy`` arrays, and of the literals in their headers, while other threads parse Python.

CPython 3.11 counts the depth of a syntax tree for all threads together. When two threads parse at once, CPython
sometimes raises ``SystemError`` (https://github.com/python/cpython/issues/106905). NumPy's ``load`` parses a header.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["literal", "load_array"]

_TRIES = 100
_Result = TypeVar("_Result")


def literal(text: str) -> Any:
    """Return the value of a literal of Python. Raises what :func:`ast.literal_eval` does."""
    return _parsing(lambda: ast.literal_eval(text))


def load_array(path: Path, *, mapped: bool = False) -> npt.NDArray[Any]:
    """Return the array in a ``.npy`` file, never unpickled; as a view of the file if ``mapped``.

    Raises what NumPy's ``load`` does, and ``ValueError`` for every header that cannot be read.
    """
    try:
        array: npt.NDArray[Any] = _parsing(lambda: np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False))
    except (SyntaxError, OverflowError, TokenError) as error:
        raise ValueError(f"{str(path)!r} has no header of an array") from error
    return array.view(np.ndarray)


def _parsing(call: Callable[[], _Result]) -> _Result:
    # Parsed once more rather than under a lock: threads of the user's program parse too, at any
    # time, and know nothing of a lock of ours.
    for _ in range(_TRIES):
        try:
            return call()
        except SystemError:
            continue
    return call()
