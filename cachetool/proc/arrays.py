"""Reads arrays in ``.npy`` files, and the literals in their headers, while other threads parse Python.

CPython 3.11 counts the depth of a syntax tree for all threads together. When two threads parse at once, it now and then
raises ``SystemError`` (https://github.com/python/cpython/issues/106905). NumPy's ``load`` parses a header, and a thread
of the user's program may parse at any time, so a lock here would not help: what failed is parsed once more.
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
    """The value of a literal of Python. Raises what :func:`ast.literal_eval` does."""
    return _parsing(lambda: ast.literal_eval(text))


def load_array(path: Path, *, mapped: bool = False) -> npt.NDArray[Any]:
    """The array in a ``.npy`` file, never unpickled; ``mapped``: as a view of the file. Raises what NumPy's ``load``
    does, and ``ValueError`` for every header that cannot be read."""
    try:
        array: npt.NDArray[Any] = _parsing(lambda: np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False))
    except (SyntaxError, OverflowError, TokenError) as error:
        raise ValueError(f"{str(path)!r} has no header of an array") from error
    return array.view(np.ndarray)


def _parsing(call: Callable[[], _Result]) -> _Result:
    for _ in range(_TRIES):
        try:
            return call()
        except SystemError:
            continue
    return call()
