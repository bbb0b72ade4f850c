"""A bar chart of tables as an SVG file, with one bar per row. It follows the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cachetool.core.markup import Markup, element

WIDTH, ROW, LABEL = 760, 20, 300
_BAR = WIDTH - LABEL - 110
_STYLE = """
svg { background: #ffffff; font: 12px system-ui, sans-serif; } text { fill: #1c2128; } .quiet { fill: #5b6572; }
.bar { fill: #2563c9; } .other { fill: #9db7e2; } .error { fill: #c92a2a; }
.title { font-weight: 600; font-size: 14px; }
@media (prefers-color-scheme: dark) {
  svg { background: #171b22; } text { fill: #e3e7ec; } .quiet { fill: #9aa4b0; }
  .bar { fill: #5b9dff; } .other { fill: #34527f; } .error { fill: #ff6b6b; }
}
"""
_FIRST = ("MB/s", "ms", "mean wait, ms")
"""The columns to draw, by preference. A table without them shows its last column of numbers."""


def picture(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw all tables below each other."""
    drawn = [element("text", "strong: cachetool; pale: what it is measured beside", x=10, y=20, class_="quiet")]
    top = 30
    for title, rows in tables.items():
        column = drawn_column(rows)
        most = max((float(row[column]) for row in rows if column in row), default=0.0)
        drawn.append(element("text", f"{title}, {column}" if column else title, x=10, y=top + 16, class_="title"))
        top += 26
        for row in rows:
            drawn += _bar(row, column, most, top)
            top += ROW
        top += 14
    size = {"width": WIDTH, "height": top, "viewBox": f"0 0 {WIDTH} {top}"}
    whole = element("svg", element("style", Markup(_STYLE)), *drawn, xmlns="http://www.w3.org/2000/svg", **size)
    return f"{whole}\n"


def drawn_column(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the column to draw, or "" if there are no numbers."""
    numbers = [name for row in rows for name, value in row.items() if _number(value) and "target" not in name]
    return next((name for name in _FIRST if name in numbers), numbers[-1] if numbers else "")


def _bar(row: Mapping[str, Any], column: str, most: float, top: int) -> list[Markup]:
    words = " ".join(str(value) for name, value in row.items() if isinstance(value, str) and name != "error")
    label = element("text", _short(words, 44), x=LABEL - 8, y=top + 14, text_anchor="end")
    value = row.get(column)
    if not _number(value):
        error = str(row.get("error", "no figure"))
        return [label, element("text", _short(error, 60), x=LABEL, y=top + 14, class_="error")]
    length = _BAR * float(value) / most if most else 0.0
    return [
        label,
        element("rect", x=LABEL, y=top + 3, width=length, height=ROW - 6, class_="bar" if _ours(row) else "other"),
        element("text", f"{value:,}", x=LABEL + length + 6, y=top + 14, class_="quiet"),
    ]


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _ours(row: Mapping[str, Any]) -> bool:
    """Return True if a row is about cachetool. Rows of other tools have no target."""
    named = {"peer", "tool"} & row.keys()
    if named:
        return any(str(row[name]).startswith("cachetool") for name in named)
    return row.get("target", 0) is not None and row.get("format") != "np.take"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
