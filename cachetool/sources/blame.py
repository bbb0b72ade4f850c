"""Whether an object or its store fails: an object may be lost, archived or forbidden on a store that works; and what to
do about an object."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable
from cachetool.sources.readers import MisfitRows
from cachetool.stores import Object, Store
from cachetool.stores.base import CHANGED

__all__ = ["Blame", "naming_skip"]

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


_AGAIN = "\nrun this again to read it as it is now, or leave such out, up to 1 % of all, with --on-error skip"


@contextlib.contextmanager
def naming_skip(*, skip_bad: bool, has_refresh: bool = True) -> Iterator[None]:
    """Around the reading of samples: the error of one that cannot be used says how to go on without it. Where the store
    refuses an object, the error is the store's, as it may come later. ``has_refresh``: whether the command can list
    again, as ``pull`` can; another lists whenever it runs."""
    try:
        yield
    except (BadObject, NotFound) as error:
        cause = error.__cause__
        if isinstance(cause, AccessDenied | Unreachable) and not skip_bad:
            raise type(cause)(
                f"{cause};\nother objects come: leave such out, up to 1 % of all, with --on-error skip"
            ) from error
        if CHANGED in str(error) and not has_refresh:
            raise type(error)(str(error).replace(CHANGED, _AGAIN)) from error
        if isinstance(error, MisfitRows):
            raise BadObject(f"{error}, or leave out such rows, up to 1 % of all, with --on-error skip") from error
        if skip_bad or " --" in str(error):  # it says what to do; the name of an object may have such dashes, too
            raise
        refresh = "list again with --refresh, or " if isinstance(error, NotFound) and has_refresh else ""
        raise type(error)(f"{error};\n{refresh}leave such out, up to 1 % of all, with --on-error skip") from error
