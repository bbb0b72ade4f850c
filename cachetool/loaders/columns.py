"""Columns of a batch that are decoded when they are looked at: 256 strings made at once would cost 30 us a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from cachetool.block import Ragged

__all__ = ["Strings"]


class Strings(Sequence[Any]):
    """The str or bytes of a batch. Each is made when it is asked for; ``list(strings)`` makes them all."""

    __slots__ = ("_text", "column")

    def __init__(self, column: Ragged, *, text: bool) -> None:
        self.column = column
        """Their bytes, one after another, and where each begins."""
        self._text = text

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        raw = self.column[range(len(self))[index]].tobytes()
        return raw.decode("utf-8", "surrogateescape") if self._text else raw

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Strings | list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Strings({list(self)!r})"

    def __reduce__(self) -> Any:
        return list, (list(self),)
