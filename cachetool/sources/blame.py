"""Whether an object or its store fails: an object may be lost, archived or forbidden on a store that works."""

from __future__ import annotations

from cachetool.errors import AccessDenied, BadObject, SourceError, Unreachable
from cachetool.stores import Object, Store

__all__ = ["Blame"]

_SMALL = 2**16
"""Bytes of an object that is asked for whole: not every server knows ranges."""


class Blame:
    """Knows an object that came, to be asked for again. Used by many threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._came: Object | None = None

    def came(self, item: Object) -> None:
        """This one was fetched."""
        self._came = item

    def of(self, error: AccessDenied | Unreachable) -> BadObject:
        """The object's fault, caused by ``error``, if another one still comes; else raises that, the store's."""
        good = self._came
        if good is None or (isinstance(error, Unreachable) and not error.answered):
            raise error
        try:
            if good.size < _SMALL:
                self._store.get(good)
            else:
                self._store.get_range(good, 0, 1)
        except SourceError:
            raise error from None
        found = BadObject(f"{error}; other objects come")
        found.__cause__ = error
        return found
