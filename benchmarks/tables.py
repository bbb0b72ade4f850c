"""What benchmarks print: tables of rows in Markdown, or everything as one JSON document, which is what
``python -m benchmarks`` keeps.

A row is a dict; rows of one table may have different columns, as a peer that failed has only ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def markdown(rows: Rows) -> str:
    """A Markdown table of rows, whatever they have."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names)] + [[_cell(row.get(name)) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def finish(tables: Mapping[str, Rows], *, as_json: bool, **settings: Any) -> None:
    """Print what was found: ``tables`` by their titles, and with ``as_json`` the settings they were made with."""
    if as_json:
        print(json.dumps({"settings": settings, "tables": tables}, indent=1))
        return
    print("\n\n".join(markdown(rows) for rows in tables.values() if rows))


def _cell(value: object) -> str:
    if value is None:
        return ""
    # Nothing that a peer says may end a cell or a line.
    return " ".join(str(value).replace("|", "\\|").split())
