"""HTML and SVG that cannot be broken out of: text becomes markup by being escaped here, and nowhere else.

What the page shows comes from remote keys, file names and programs. :func:`element` takes children and attributes as
plain text and escapes them; only what it made itself (:class:`Markup`) goes in as it is.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from cachetool.core.text import plain

__all__ = ["Markup", "element", "joined"]

_ALONE = {"meta", "br"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def joined(children: Iterable[object], between: str = "") -> Markup:
    """All children after each other, each escaped unless it is markup; None is nothing."""
    escaped = (
        child if isinstance(child, Markup) else html.escape(plain(child)) for child in children if child is not None
    )
    return Markup(html.escape(between).join(escaped))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """``<tag name="value">children</tag>``. In names of attributes ``_`` stands for ``-``, and one at the end for
    nothing (``class_``)."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(plain(_short(value)))}"'
        for name, value in attributes.items()
    )
    inner = joined(children)
    return Markup(f"<{tag}{named}>" if tag in _ALONE else f"<{tag}{named}>{inner}</{tag}>")


def _short(value: object) -> object:
    """Coordinates with a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
