"""HTML and SVG that no text can break out of: text becomes markup by being escaped here, and nowhere else.

The page shows remote keys, file names and names of programs. :func:`element` takes children and attributes as plain
text and escapes them. Only its own results (:class:`Markup`) are used unchanged.
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
    """Return all children in a row, each escaped unless it is markup; None is left out."""
    escaped = (
        child if isinstance(child, Markup) else html.escape(plain(child)) for child in children if child is not None
    )
    return Markup(html.escape(between).join(escaped))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Return ``<tag name="value">children</tag>``.

    In names of attributes ``_`` stands for ``-``; one at the end is dropped (``class_``).
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(plain(_short(value)))}"'
        for name, value in attributes.items()
    )
    inner = joined(children)
    return Markup(f"<{tag}{named}>" if tag in _ALONE else f"<{tag}{named}>{inner}</{tag}>")


def _short(value: object) -> object:
    """Return a coordinate with a tenth of a pixel, other values unchanged."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
