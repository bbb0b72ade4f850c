"""The names of a page of a listing, looked at all together. A listing of a million names has no time for a Python call
on each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Self

from cachetool.stores import Object
from cachetool.stores.base import Page

__all__ = ["NamedPage", "describes"]

_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|changelog|citation|authors|contributing)([_-][a-z-]+)?"
    r"(\.(md|markdown|txt|rst|html?|org|adoc|pdf|cff|bib|mit|apache|bsd))?"
    r"|(eh)?thumbs(_vista)?\.db|desktop\.ini|_success|dataset_infos?\.json|features\.json"
    r"|(check|md5|sha1|sha224|sha256|sha384|sha512)sums?(\.txt)?",
    re.IGNORECASE,
)
"""Names that only describe other files and never count."""
_STARTS = frozenset(("re", "li", "co", "no", "ch", "ci", "au", "th", "eh", "de", "_s", "da", "fe", "md", "sh"))
"""The first two letters of the names of ``_ABOUT``. They reject nearly all names without the regular expression."""
_STATS = "_stats.json"


def describes(name: str) -> bool:
    """Return True if the last part of a key is a name that only describes other files, such as ``README.md``."""
    # A listing may have a million names. Nearly all of them end here, which spares them the regular expression below.
    if name[:2].lower() not in _STARTS:
        return name.endswith(_STATS)
    return _ABOUT.fullmatch(name) is not None or name.endswith(_STATS)


class NamedPage(Page):
    """A page of a listing with the parts of its names."""

    @classmethod
    def of(cls, objects: Sequence[Object]) -> Self:
        """Return ``objects`` as such a page; such a page is returned as it is."""
        if isinstance(objects, cls):
            return objects
        page = Page.of(objects)
        return cls(page.keys, page.sizes, page.etags)

    @cached_property
    def text(self) -> str:
        """All keys in one text, with NUL between them. One search in it replaces a search in each key."""
        return "\0".join(self.keys)

    @cached_property
    def names(self) -> list[str]:
        """The last part of each key."""
        return [key.rpartition("/")[2] for key in self.keys]

    @cached_property
    def suffixes(self) -> list[str]:
        """The text of each name behind its first dot; empty for a name without a dot."""
        return [name.partition(".")[2] for name in self.names]

    @cached_property
    def starts(self) -> frozenset[str]:
        """The first two letters of the names."""
        return frozenset([name[:2] for name in self.names])

    @cached_property
    def hidden(self) -> list[int]:
        """Positions of the keys of which any part begins with a dot."""
        if not (self.text.startswith(".") or "/." in self.text or "\0." in self.text):
            return []
        return [at for at, key in enumerate(self.keys) if key.startswith(".") or "/." in key]

    @cached_property
    def describing(self) -> list[int]:
        """Positions of the names that only describe other files."""
        some = self.starting(_STARTS)
        if not some and _STATS not in self.text:
            return []
        return [
            at for at, name in enumerate(self.names) if (name[:2] in some or name.endswith(_STATS)) and describes(name)
        ]

    def starting(self, starts: frozenset[str]) -> frozenset[str]:
        """Return the members of :attr:`starts` that are among ``starts`` in lower case."""
        return frozenset([start for start in self.starts if start.lower() in starts])
