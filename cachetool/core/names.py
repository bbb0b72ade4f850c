"""Types for names that become paths; each is checked when it is made.

A catalog, a ``shard.json`` or a message from another node may come from somebody else, who can write any text into it.
A path may therefore be built only from these types::

    Name   one file or folder: no separator, not ``..``, nothing by which a path could leave its folder
    Id     a Name of sixteen hexadecimal digits: shards, sources (their listings and records), holders

Functions that create or remove files take these types, and check them at run time too, because a value from a row of
the catalog is ``Any`` to a type checker.
"""

from __future__ import annotations

import re
import secrets
from typing import Self

from cachetool.core.errors import CatalogError
from cachetool.core.text import shown

__all__ = ["Id", "Name"]

_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST = 255
"""Longest name in bytes on every file system that a cache may lie on."""


class Name(str):
    """The name of one file or folder inside a folder of cachetool. Raises :class:`CatalogError` for any other text."""

    __slots__ = ()
    _what = "a file"

    def __new__(cls, text: object) -> Self:
        """Return ``text`` as a name. Raise :class:`CatalogError` if it cannot be one."""
        if isinstance(text, cls):
            return text
        if not isinstance(text, str) or not cls._fits(text):
            raise CatalogError(
                f"{shown(text)} is no name of {cls._what}, so cachetool did not write it; nothing was changed;\n"
                "if you do not trust the origin of this cache, delete it; otherwise run:"
                " cachetool verify --repair --cache CACHE"
            )
        return super().__new__(cls, text)

    @classmethod
    def _fits(cls, text: str) -> bool:
        return (
            text not in ("", ".", "..")
            and not any(mark in text for mark in "/\\\0")
            and len(text.encode("utf-8", "surrogatepass")) <= _LONGEST
        )

    @classmethod
    def fits(cls, text: object) -> bool:
        """Return True if ``text`` can be such a name."""
        return isinstance(text, str) and cls._fits(text)


class Id(Name):
    """The id of a shard, a source or a holder in the catalog: sixteen hexadecimal digits."""

    __slots__ = ()
    _what = "a shard, a source or a holder"

    @classmethod
    def _fits(cls, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    @classmethod
    def new(cls) -> Self:
        """Return a new random id."""
        # 64 random bits: processes choose ids without asking each other. secrets, because a user's random.seed() would
        # make two processes choose the same ids.
        return cls(secrets.token_hex(8))
