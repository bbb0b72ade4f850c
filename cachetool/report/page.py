"""The page: what a cache holds, where it came from and how training went, in one file that needs no other.

Nothing is loaded and nothing runs: no script, no font, no picture from another place, and a policy in the page forbids
them. Sections are made by :mod:`cachetool.report.sections`, each from :class:`cachetool.report.numbers.Figures`.

The page is light or dark as the reader's system is, with one column on a phone and two on a desk.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version

from cachetool.core.markup import Markup, element, joined
from cachetool.core.text import counted
from cachetool.core.units import format_size
from cachetool.report import sections
from cachetool.report.numbers import Figures, waiting

__all__ = ["STYLE", "page"]


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --ink: #1c2128; --quiet: #5b6572; --rule: #e1e4e8; --axis: #8b949e;
  --blue: #2563c9; --area: #c9dcf8; --orange: #d9730d; --green: #2b8a57; --red: #c92a2a; --violet: #7a4fc0;
  --rest: #e6e8eb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #171b22; --ink: #e3e7ec; --quiet: #9aa4b0; --rule: #2a303a; --axis: #6b7684;
    --blue: #5b9dff; --area: #1d3a66; --orange: #f0963c; --green: #4cc38a; --red: #ff6b6b; --violet: #b18cf5;
    --rest: #2a303a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 24px 16px 40px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main, header { max-width: 1080px; margin: 0 auto; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
p { margin: 0 0 10px; overflow-wrap: anywhere; }
.quiet, figcaption { color: var(--quiet); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; padding: 0;
  margin: 16px 0; list-style: none; }
.tiles li, section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.tiles li { padding: 10px 14px; }
.tiles b { display: block; font-size: 20px; line-height: 1.3; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
section { padding: 14px 16px; min-width: 0; }
section.wide { grid-column: 1 / -1; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11.5px; fill: var(--ink); }
svg .unit { fill: var(--quiet); }
.rule { stroke: var(--rule); } .axis { stroke: var(--axis); }
.area { fill: var(--area); } .line { fill: none; stroke: var(--blue); stroke-width: 2; stroke-linejoin: round; }
.limit { fill: none; stroke: var(--red); stroke-width: 1.5; stroke-dasharray: 5 4; }
.blue { fill: var(--blue); background: var(--blue); } .orange { fill: var(--orange); background: var(--orange); }
.green { fill: var(--green); background: var(--green); } .red { fill: var(--red); background: var(--red); }
.violet { fill: var(--violet); background: var(--violet); } .rest { fill: var(--rest); }
.dashed { background: repeating-linear-gradient(90deg, var(--red) 0 4px, transparent 4px 6px); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0; padding: 0; list-style: none; font-size: 13px; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 3px; vertical-align: -1px; }
.key.dashed, .key.line { height: 3px; border-radius: 0; vertical-align: 3px; } .key.line { background: var(--blue); }
.share { height: 8px; margin: 2px 0 10px; border-radius: 4px; }
table { width: 100%; border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--quiet); font-weight: 500; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.long { overflow-wrap: anywhere; } .whole { white-space: nowrap; }
.n + .t { padding-left: 12px; } figure + table { margin-top: 10px; } table + p { margin: 8px 0 0; }
th.n, td.n { text-align: right; white-space: nowrap; } th:last-child, td:last-child { padding-right: 0; }
code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.source { margin-bottom: 14px; } .source p { margin-bottom: 4px; }
@media (max-width: 760px) {
  main { grid-template-columns: minmax(0, 1fr); } body { padding: 14px 10px 30px; } section { padding: 12px; }
  svg text { font-size: 12.5px; } .tiles { grid-template-columns: 1fr 1fr; gap: 10px; } .tiles b { font-size: 18px; }
}
"""


# Also if a text should ever escape as markup: the browser then runs no script of it and sends
# nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(figures: Figures) -> str:
    """Return the whole page, as text in UTF-8."""
    title = f"cache {os.path.abspath(figures.stats['root'])}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    taken = time.strftime("%d %b %Y, %H:%M:%S", time.localtime(figures.taken_at))
    about = f"cachetool {version('cachetool')}, {taken}"
    if figures.dataset is not None:
        about += (
            f"; shards, sources and epochs of dataset {figures.dataset!r} only, charts over time of the whole cache"
        )
    body = element(
        "body",
        element("header", element("h1", title), element("p", about, class_="quiet"), _tiles(figures)),
        element("main", *sections.all_of(figures)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _tiles(figures: Figures) -> Markup:
    """Return the figures that readers look for first."""
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
        tiles.append((f"{100 * waited:.1f} %", "of the epochs' time was waiting"))
    return element(
        "ul", *(element("li", joined([element("b", number), what])) for number, what in tiles), class_="tiles"
    )
