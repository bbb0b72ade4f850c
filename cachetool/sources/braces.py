"""Braces in the name of a source: ``{000000..000009}`` and ``{train,val}`` name objects without a listing.

::

    https://host/shards/{000000..000009}.tar    ten files, fetched by name: no index page is needed
    s3://bucket/{train,val}/                     two folders as one source
    data/run{7,8,12}.h5                          three files of this machine

Numbers have as many digits as the ends of their range, with zeros in front. Several pairs of braces multiply. Braces
without ``..`` or ``,`` are part of a name. So are all braces in the name of a file that exists on this machine.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cachetool.core.errors import NotFound, UsageError
from cachetool.stores import Object, Store, local_path, redact, split_url
from cachetool.stores.base import HTTP_SCHEMES, Batch
from cachetool.stores.registry import open_store

__all__ = ["MOST", "Braces", "braces_of"]

MOST = 100_000
"""The largest number of names that the braces of one source may stand for."""
_AT_ONCE = 1000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")


class Braces:
    """The objects, or folders, that a name with braces stands for."""

    def __init__(self, url: str, place: str, names: list[str]) -> None:
        """Store the names, which are relative to the folder ``place``. :func:`braces_of` creates this object."""
        self.url, self.place, self.names = url, place, names

    def pages(self, store: Store) -> Iterator[Batch]:
        """Yield the objects in pages, as a listing of the folder's ``store`` would. Raise :class:`NotFound` that names
        a missing object."""
        with ThreadPoolExecutor(max(1, min(store.concurrency, 32))) as threads:
            # Steps of 1,000 names bound the page: threads.map submits all of its tasks at once, and 100,000 names would
            # wait before the first page came.
            for start in range(0, len(self.names), _AT_ONCE):
                some = self.names[start : start + _AT_ONCE]
                yield list(
                    threads.map(lambda name: self._found(store, name), itertools.filterfalse(self._is_folder, some))
                )
        for name in filter(self._is_folder, self.names):
            yield from self._below(name)

    def _found(self, store: Store, name: str) -> Object:
        try:
            return store.find(name)
        except NotFound as error:
            raise NotFound(
                f"{redact(self.url)}: {name!r} does not exist; write / at the end of the name of a folder"
            ) from error

    def _is_folder(self, name: str) -> bool:
        if name.endswith("/"):
            return True
        # Only a local path can be checked for free. On a remote store the trailing slash decides, because a name alone
        # does not tell a folder from an object there.
        return split_url(self.place)[0] in ("", "file") and os.path.isdir(os.path.join(local_path(self.place), name))

    def _below(self, name: str) -> Iterator[Batch]:
        # A URL may carry a signature in its query, so each folder's URL needs the same query again.
        place, mark, query = _parts(self.place)
        folder = open_store(f"{place}{name.rstrip('/')}/{mark}{query}")
        try:
            count = 0
            for page in folder.list():
                count += len(page)
                yield [replace(item, key=f"{name.rstrip('/')}/{item.key}") for item in page]
            if not count:
                raise NotFound(f"{redact(self.url)}: no objects in {name.rstrip('/')}/")
        finally:
            folder.close()


def _parts(url: str) -> tuple[str, str, str]:
    """Split a URL into the place, "?" and the query. Only a web server's URL has a query."""
    return url.partition("?") if split_url(url)[0] in HTTP_SCHEMES else (url, "", "")


def braces_of(url: str) -> Braces | None:
    """Return the names that the braces in a path or URL stand for, or None for a name without braces.

    Raise :class:`UsageError` for too many names, for an empty range, and for braces in the name of a server or
    bucket.
    """
    scheme, _ = split_url(url)
    place, mark, query = _parts(url)
    # An existing file wins, because its name may contain braces. A link whose target is missing counts as existing, too
    # (lexists): the user named that link.
    if scheme in ("", "file") and os.path.lexists(local_path(url)):
        return None
    pieces = [(match, values) for match in _BRACES.finditer(place) if (values := _values(match[1], url)) is not None]
    if not pieces:
        return None
    cut = place.rfind("/", 0, pieces[0][0].start()) + 1
    if scheme and cut <= len(scheme) + len("://"):
        raise UsageError(f"{redact(url)}: braces can stand for files and folders, not for servers or buckets")
    # The number is computed before the names are built: a few braces can multiply to billions of names, which would
    # fill the memory.
    count = math.prod(len(values) for _, values in pieces)
    if count > MOST:
        raise UsageError(
            f"{redact(url)}: the braces stand for {count} names, but at most {MOST} are read; give the folder instead"
        )
    texts, at = [], cut
    for match, values in pieces:
        texts += [[place[at : match.start()]], values]
        at = match.end()
    names = ["".join(parts) for parts in itertools.product(*texts, [place[at:]])]
    # A repeated name, as in {a,a}, would make every sample of the file appear twice.
    return Braces(url, f"{place[:cut] or './'}{mark}{query}", list(dict.fromkeys(names)))


def _values(inside: str, url: str) -> list[str] | None:
    """Return the texts that one pair of braces stands for, or None for braces that are part of a name."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else None
    first, last = match.groups()
    if int(first) > int(last):
        raise UsageError(f"{redact(url)}: the range {{{inside}}} is descending; write the smaller number first")
    # Checked before the list is built: a range of up to 18 digits would fill the memory.
    if int(last) - int(first) >= MOST:
        raise UsageError(f"{redact(url)}: {{{inside}}} stands for more than {MOST} names; give the folder instead")
    # As in a shell, zeros before either end ask for numbers of one width; without them 9..10 keeps its natural
    # widths.
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
