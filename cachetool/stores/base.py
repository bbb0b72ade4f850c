"""What a store is: remote bytes by key, under one URL.

Keys are relative to the store's URL, with ``/`` between parts, and are only ever used as names: no key becomes a local
path. Store objects are used by many threads of one process at once, and never in a forked child.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Object", "Store"]


@dataclass(frozen=True, slots=True)
class Object:
    """One remote object as the listing names it."""

    key: str
    """Relative to the store's URL."""
    size: int
    """Bytes."""
    etag: str | None = None
    """The store's identity of this content, without quotes; None where it has none."""


class Store(Protocol):
    """Remote bytes by key."""

    url: str
    """The place, without user info and query: fit to be shown and stored."""

    def list(self) -> Iterator[list[Object]]:
        """All objects, in batches, in no promised order; "folders" (keys ending in ``/``) left out.

        Raises :class:`NotFound` when the bucket does not exist, :class:`AccessDenied`, :class:`Unreachable`.
        """
        ...

    def get(self, item: Object) -> memoryview:
        """The whole object, read-only. Its length and, where known, its ETag are those of ``item``.

        Raises :class:`BadObject` when they are not, :class:`NotFound`, :class:`AccessDenied`, :class:`Unreachable`.
        """
        ...

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``; errors as for :meth:`get`, also when the object is shorter."""
        ...

    def close(self) -> None:
        """Let go of connections. May be called twice."""
        ...
