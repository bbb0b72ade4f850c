"""The decision whether an object or its store has failed, and the advice that an error gives.

An object may be lost, archived or forbidden on a store that works. Then a pull can leave the object out and
continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable
from cachetool.sources.readers import MisfitRows
from cachetool.stores import Object, Store
from cachetool.stores.base import CHANGED

__all__ = ["Blame", "naming_skip"]

TRIED = 3
"""Number of other objects to try when no object has been fetched yet."""
_SMALL = 2**16
"""Objects of fewer bytes are fetched completely, because some servers do not support ranges."""


class Blame:
    """A judge of failed requests, which remembers an object that was fetched and fetches it again. Many threads may use
    it.

    ``find(number)`` returns one of the ``count`` objects of the source.
    """

    def __init__(self, store: Store, find: Callable[[int], Object], count: int) -> None:
        self._store, self._find, self._count = store, find, count
        self._came: Object | None = None

    def came(self, item: Object) -> None:
        """Remember ``item`` as an object that was fetched successfully."""
        self._came = item

    def of(self, error: AccessDenied | Unreachable) -> BadObject:
        """Return ``error`` as the object's fault if another object can be fetched now. Otherwise raise ``error``,
        because the store has failed."""
        # No server answered at all, so no single object is at fault.
        if isinstance(error, Unreachable) and not error.answered:
            raise error
        came = self._came
        # An object that was fetched before is the best witness. Without one, three objects are tried: one of them may
        # be forbidden or archived like the object that failed.
        tried = range(min(TRIED, self._count)) if came is None else (-1,)
        if not any(self._comes(came, number) for number in tried):
            raise error
        fault = BadObject(f"{error}; other objects can be read")
        fault.__cause__ = error
        return fault

    def _comes(self, item: Object | None, number: int) -> bool:
        try:
            item = item or self._find(number)
            # A small object is read completely, since not every server supports ranges. Of a larger one a single byte
            # shows whether the store works.
            if 0 <= item.size < _SMALL:
                self._store.get(item)
            else:
                self._store.get_range(item, 0, 1)
        except SourceError:
            return False
        self._came = item
        return True


_AGAIN = "\nrun the command again to read the new content, or skip such samples (up to 10 or 1 %) with --on-error skip"


@contextlib.contextmanager
def naming_skip(*, skip_bad: bool, has_refresh: bool = True) -> Iterator[None]:
    """Add to an error about an unusable object the option with which the command continues without that object.

    Where the store refuses an object, the error keeps the store's class, because the object may be available later.
    ``has_refresh``: True if the command can list the source again, as ``pull`` can. Other commands list the source
    whenever they run.
    """
    try:
        yield
    except (BadObject, NotFound) as error:
        # Blame chained the store's error. Without --on-error skip it is raised as that class again: the caller then
        # treats it as an error of the store, which may be temporary.
        cause = error.__cause__
        if isinstance(cause, AccessDenied | Unreachable) and not skip_bad:
            raise type(cause)(
                f"{cause};\nother objects can be read: skip such samples (up to 10 or 1 %) with --on-error skip"
            ) from error
        if CHANGED in str(error) and not has_refresh:
            raise type(error)(str(error).replace(CHANGED, _AGAIN)) from error
        if isinstance(error, MisfitRows):
            raise BadObject(f"{error}, or skip such rows (up to 10 or 1 %) with --on-error skip") from error
        # A message with an option in it gives its own advice already. The space in front tells an option from two
        # dashes inside the name of an object.
        if skip_bad or " --" in str(error):
            raise
        refresh = "list the source again with --refresh, or " if isinstance(error, NotFound) and has_refresh else ""
        raise type(error)(f"{error};\n{refresh}skip such samples (up to 10 or 1 %) with --on-error skip") from error
