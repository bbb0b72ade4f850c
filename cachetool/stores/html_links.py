"""The links of an HTML page that somebody else wrote, found in one walk through it, however it is made.

Nothing here goes back: the quantifiers are possessive, what has no end ends the page, and of a long text nothing is
kept. :class:`html.parser.HTMLParser` is quadratic in unclosed tags, comments and quotes, and raises what it likes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import NamedTuple

__all__ = ["LONGEST", "Link", "links"]

LONGEST = 8192
"""Characters of a link that is followed, as most servers have it; of a longer text nothing is kept."""

_OPENED = re.compile("<!--|<[!?]|</(?![A-Za-z])|<(?=/?[A-Za-z])")
# A quote counts behind a "=" alone: elsewhere it is a letter of a name or of a value.
_TAG = re.compile(r"""<(/?)([A-Za-z][^\s/>]*+)((?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+'|))*+)>""")
_ATTRIBUTE = re.compile(r"""([^\s/=]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|(\S*+)))?+""")
_RAW = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")}


class Link(NamedTuple):
    """An ``<a href>`` and the text behind it, or the page's ``<base href>``."""

    href: str
    """Too long to be followed when it is longer than :data:`LONGEST`."""
    text: str = ""
    is_base: bool = False


def links(page: str) -> Iterator[Link]:
    """The links of a page, in their order; the text of each is what stands between it and the next one, behind
    its ``</a>`` if it has that."""
    href, texts = "", _Text()
    for tag, attributes, text in _tags(page):
        texts.add(text)
        if tag == "/a":
            texts = _Text()
        elif tag in ("a", "base") and (found := _href(attributes)):
            if tag == "base":
                yield Link(found, is_base=True)
                continue
            if href:
                yield Link(href, texts.whole())
            href, texts = found, _Text()
    if href:
        yield Link(href, texts.whole())


class _Text:
    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = LONGEST

    def add(self, text: str) -> None:
        if text and self._left >= 0:
            self._left -= len(text)
            self._parts.append(text)

    def whole(self) -> str:
        """Empty when it is long: the end of a number may be missing where it is cut."""
        return _read("".join(self._parts)) if self._left >= 0 else ""


def _tags(page: str) -> Iterator[tuple[str, str, str]]:
    """Name in lower case, with a ``/`` before that of an end, attributes, and the text before it; for the text at the
    end of the page no name."""
    at = 0
    while (opened := _OPENED.search(page, at)) is not None:
        text, here = page[at : opened.start()], opened.start()
        if opened[0] != "<":
            yield "", "", text
            end = "-->" if opened[0] == "<!--" else ">"
            stop = page.find(end, opened.end())
            at = len(page) if stop < 0 else stop + len(end)
        elif (tag := _TAG.match(page, here)) is None:
            yield "", "", text
            return  # it has no end
        else:
            name = tag[1] + tag[2].lower()
            yield name, tag[3], text
            at = tag.end()
            if name in _RAW:
                end_tag = _RAW[name].search(page, at)
                at = len(page) if end_tag is None else end_tag.start()
    yield "", "", page[at:]


def _href(attributes: str) -> str:
    for found in _ATTRIBUTE.finditer(attributes):
        if found[1].lower() == "href":
            written = found[2] or found[3] or found[4] or ""
            return (written if len(written) > LONGEST else _read(written)).strip(" \t\r\n\f")
    return ""


def _read(text: str) -> str:
    """The text with its character references replaced."""
    try:
        return unescape(text) if "&" in text else text
    except ValueError:  # &#999... of thousands of digits
        return text
