"""Braces in the name of a source: ``{000000..000009}`` and ``{train,val}``, which name objects without a listing.

::

    https://host/shards/{000000..000009}.tar    ten files, asked for by name: no index page is needed
    s3://bucket/{train,val}/                     two folders as one source
    data/run{7,8,12}.h5                          three files of this machine

Numbers have as many digits as their ends, zeros in front. Several braces multiply. Braces without ``..`` or ``,`` are
part of a name, and so are all in the name of a file that exists here.
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
from cachetool.stores.base import HTTP_SCHEMES
from cachetool.stores.registry import open_store

__all__ = ["MOST", "Braces", "braces_of"]

MOST = 100_000
"""Names that one source may have in braces."""
_AT_ONCE = 1000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")


class Braces:
    """The objects, or folders, that a name with braces stands for."""

    def __init__(self, url: str, place: str, names: list[str]) -> None:
        """Made by :func:`braces_of`. ``names`` are below the folder at ``place``."""
        self.url, self.place, self.names = url, place, names

    def pages(self, store: Store) -> Iterator[list[Object]]:
        """The objects as a listing of the folder's ``store`` names them. Raises :class:`NotFound` naming a missing
        one."""
        with ThreadPoolExecutor(max(1, min(store.concurrency, 32))) as threads:
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
                f"{redact(self.url)}: there is no {name!r}, which the braces name; the name of a folder ends with /"
            ) from error

    def _is_folder(self, name: str) -> bool:
        if name.endswith("/"):
            return True
        return split_url(self.place)[0] in ("", "file") and os.path.isdir(os.path.join(local_path(self.place), name))

    def _below(self, name: str) -> Iterator[list[Object]]:
        place, mark, query = _parts(self.place)
        folder = open_store(f"{place}{name.rstrip('/')}/{mark}{query}")
        try:
            count = 0
            for page in folder.list():
                count += len(page)
                yield [replace(item, key=f"{name.rstrip('/')}/{item.key}") for item in page]
            if not count:
                raise NotFound(f"{redact(self.url)}: there is nothing in {name.rstrip('/')}/")
        finally:
            folder.close()


def _parts(url: str) -> tuple[str, str, str]:
    """The place, and the query of a web server's URL behind its mark."""
    return url.partition("?") if split_url(url)[0] in HTTP_SCHEMES else (url, "", "")


def braces_of(url: str) -> Braces | None:
    """The names that the braces in a path or URL stand for; None for a name without any. Raises :class:`UsageError` for
    too many names, for an empty range, and for braces in the name of a server or bucket."""
    scheme, _ = split_url(url)
    place, mark, query = _parts(url)
    if scheme in ("", "file") and os.path.lexists(local_path(url)):
        return None
    pieces = [(match, values) for match in _BRACES.finditer(place) if (values := _values(match[1], url)) is not None]
    if not pieces:
        return None
    cut = place.rfind("/", 0, pieces[0][0].start()) + 1
    if scheme and cut <= len(scheme) + len("://"):
        raise UsageError(f"{redact(url)}: braces choose among files and folders, not among servers or buckets")
    count = math.prod(len(values) for _, values in pieces)
    if count > MOST:
        raise UsageError(f"{redact(url)}: its braces stand for {count} names, at most {MOST}; name their folder")
    texts, at = [], cut
    for match, values in pieces:
        texts += [[place[at : match.start()]], values]
        at = match.end()
    names = ["".join(parts) for parts in itertools.product(*texts, [place[at:]])]
    return Braces(url, f"{place[:cut] or './'}{mark}{query}", list(dict.fromkeys(names)))


def _values(inside: str, url: str) -> list[str] | None:
    """The texts that one pair of braces stands for; None for braces that are part of a name."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else None
    first, last = match.groups()
    if int(first) > int(last):
        raise UsageError(f"{redact(url)}: the range {{{inside}}} goes down; write it from the smaller number")
    if int(last) - int(first) >= MOST:
        raise UsageError(f"{redact(url)}: {{{inside}}} stands for more than {MOST} names; name their folder")
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
