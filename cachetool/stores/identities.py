"""What the answers of a web server tell about which content of an object they are of.

Many listings name no ETags (HTML indexes, plain manifests), but most answers do. The first one that brings a part of an
object decides which content it is from then on, so that no two versions are put together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from email.message import Message

from cachetool.stores.http_listing import MODIFIED

__all__ = ["MOST", "Identities", "identity_of"]

MOST = 2**17
"""Objects that are remembered, those asked for last."""
_LONGEST = 1024
"""Characters of an identity; a longer one is as good as none."""


def identity_of(headers: Message, *, like: str | None = None) -> str | None:
    """The ETag of an answer, else its time of modification; with ``like`` whichever of them that is. None where it has
    none."""
    told: str | None = None
    if like is None or not like.startswith(MODIFIED):
        told = headers.get("ETag", "").removeprefix("W/").strip('"') or None
    if (told is None if like is None else like.startswith(MODIFIED)) and headers.get("Last-Modified"):
        told = f"{MODIFIED}{headers['Last-Modified']}"
    return told if told is None or len(told) <= _LONGEST else None


class Identities:
    """The first identity that was seen of each object. Used by many threads."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: str) -> str | None:
        """What was seen first."""
        with self._lock:
            return self._first.get(key)

    def first(self, key: str, headers: Message) -> str | None:
        """What was seen first, this answer included."""
        told = identity_of(headers)
        with self._lock:
            if told is not None:
                self._first.setdefault(key, told)
            if key in self._first:
                self._first.move_to_end(key)
            while len(self._first) > MOST:
                self._first.popitem(last=False)
            return self._first.get(key)

    def all(self) -> dict[str, str]:
        """What is remembered, by key."""
        with self._lock:
            return dict(self._first)

    def clear(self) -> None:
        """Forget all: what is listed anew may have changed."""
        with self._lock:
            self._first.clear()
