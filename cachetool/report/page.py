"""The page: what a cache holds, where it came from and how training went, in one file that needs no other.

Nothing is loaded and nothing runs: no script, no font, no picture from elsewhere, and a policy in the page that forbids
them. Sections are made by :mod:`cachetool.report.sections`, each from :class:`cachetool.report.numbers.Figures`.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version

from cachetool.core.text import counted
from cachetool.core.units import format_size
from cachetool.report import sections
from cachetool.report.markup import Markup, element, joined
from cachetool.report.numbers import Figures, waiting
from cachetool.report.style import STYLE

__all__ = ["page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(figures: Figures) -> str:
    """The whole page, as text in UTF-8."""
    title = f"cache {os.path.abspath(figures.stats['root'])}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    made = time.strftime("%d %b %Y, %H:%M:%S", time.localtime(figures.made))
    about = f"cachetool {version('cachetool')}, {made}"
    if figures.dataset is not None:
        about += f"; shards, sources and epochs of the dataset {figures.dataset!r} alone, time lines of the whole cache"
    body = element(
        "body",
        element("header", element("h1", title), element("p", about, class_="quiet"), _tiles(figures)),
        element("main", *sections.all_of(figures)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _tiles(figures: Figures) -> Markup:
    """The figures that one looks for first."""
    stats, waited = figures.stats, waiting(figures.history.epochs)
    full = f"{100 * stats['used'] / stats['max_size']:.0f} %" if stats["max_size"] else "0 %"
    tiles = [
        (full, f"of {format_size(stats['max_size'])} used"),
        (f"{stats['samples']:,}", f"samples in {counted(stats['shards'], 'shard')}"),
        (f"{stats['evicted']:,}", "shards evicted so far"),
        (format_size(stats["fetched"]), "fetched so far"),
    ]
    if stats["reuse"] is not None:
        tiles.append((f"{stats['reuse']:.1f} times", "each fetched byte was used"))
    if waited is not None:
        tiles.append((f"{100 * waited:.1f} %", "of the time of epochs was waiting"))
    return element(
        "ul", *(element("li", joined([element("b", number), what])) for number, what in tiles), class_="tiles"
    )
