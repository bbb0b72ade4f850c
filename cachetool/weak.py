"""Sets that forget what nobody else has."""

from __future__ import annotations

import contextlib
import weakref
from typing import TypeVar

__all__ = ["members"]

T = TypeVar("T")


def members(of: weakref.WeakSet[T]) -> list[T]:
    """Those that are there now, also when another thread adds one just then."""
    while True:
        with contextlib.suppress(RuntimeError):  # it changed its size
            return list(of)
