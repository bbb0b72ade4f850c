"""Names that become paths, checked where they are read and made of nothing else.

A catalog, a ``shard.json`` or a message from another node may come from somebody else, who may write into it what he
likes. Text out of it leads nowhere before it is one of these::

    Name   one file or folder: no separator, not ``..``, nothing that a path could leave its folder by
    Id     a Name of sixteen hexadecimal digits: shards, sources (their listings and records), holders

What makes or removes files takes these types, and asks for them at run time too: a row's value is ``Any`` to a type
checker.
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
"""Bytes of a name on every file system that caches lie on."""


class Name(str):
    """The name of one file or folder in a folder of ours. Raises :class:`CatalogError` for text that is none."""

    __slots__ = ()
    _what = "a file"

    def __new__(cls, text: object) -> Self:
        """Take ``text`` if it is such a name."""
        if isinstance(text, cls):
            return text
        if not isinstance(text, str) or not cls._fits(text):
            raise CatalogError(
                f"{shown(text)} is no name of {cls._what}, and cachetool never wrote it: nothing was changed;\n"
                "a folder from somebody you do not trust is best deleted; one of your own:"
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
        """Whether ``text`` is one."""
        return isinstance(text, str) and cls._fits(text)


class Id(Name):
    """What the catalog calls a shard, a source or a holder."""

    __slots__ = ()
    _what = "a shard, a source or a holder"

    @classmethod
    def _fits(cls, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    @classmethod
    def new(cls) -> Self:
        """One that nothing has yet."""
        return cls(secrets.token_hex(8))
