"""A base class for objects that are closed, as context managers."""

from __future__ import annotations

from typing import Self

__all__ = ["Closing"]


class Closing:
    """A context manager that calls :meth:`close` when its ``with`` block ends."""

    __slots__ = ()

    def close(self) -> None:
        """Release files and processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
