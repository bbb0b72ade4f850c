"""Whether an object or its store fails: an object may be lost, archived or forbidden on a store that works."""

from __future__ import annotations

from collections.abc import Callable

from cachetool.core.errors import AccessDenied, BadObject, SourceError, Unreachable
from cachetool.stores import Object, Store

__all__ = ["Blame"]

TRIED = 3
"""Objects to be tried where none has come yet."""
_SMALL = 2**16
"""Bytes of an object that is asked for whole: not every server knows ranges."""


class Blame:
    """Knows an object that came, to be asked for again. Used by many threads.

    ``find`` gives one of ``count`` others by its number.
    """

    def __init__(self, store: Store, find: Callable[[int], Object], count: int) -> None:
        self._store, self._find, self._count = store, find, count
        self._came: Object | None = None

    def came(self, item: Object) -> None:
        """This one was fetched."""
        self._came = item

    def of(self, error: AccessDenied | Unreachable) -> BadObject:
        """The object's fault, caused by ``error``, if another one comes; else raises that, the store's."""
        if isinstance(error, Unreachable) and not error.answered:
            raise error
        came = self._came
        tried = range(min(TRIED, self._count)) if came is None else (-1,)
        if not any(self._comes(came, number) for number in tried):
            raise error
        fault = BadObject(f"{error}; other objects come")
        fault.__cause__ = error
        return fault

    def _comes(self, item: Object | None, number: int) -> bool:
        try:
            item = item or self._find(number)
            if 0 <= item.size < _SMALL:
                self._store.get(item)
            else:
                self._store.get_range(item, 0, 1)
        except SourceError:
            return False
        self._came = item
        return True
