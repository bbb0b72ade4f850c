"""The context manager of all classes that are closed."""

from __future__ import annotations

from typing import Self

__all__ = ["Closing"]


class Closing:
    """A context manager that ends with :meth:`close`."""

    __slots__ = ()

    def close(self) -> None:
        """Let go of files and processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
