"""The output of benchmarks: tables in Markdown, or all figures as one JSON document, which ``python -m benchmarks``
saves.

A row is a dict. Rows of one table may have different columns: a peer that failed has only ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def markdown(rows: Rows) -> str:
    """Return a Markdown table with the columns of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names)] + [[_cell(row.get(name)) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def finish(tables: Mapping[str, Rows], *, as_json: bool, **settings: Any) -> None:
    """Print ``tables`` under their titles, or with ``as_json`` one document that also has the settings."""
    if as_json:
        print(json.dumps({"settings": settings, "tables": tables}, indent=1))
        return
    print("\n\n".join(markdown(rows) for rows in tables.values() if rows))


def _cell(value: object) -> str:
    if value is None:
        return ""
    # The text of a peer must not end a cell or a line.
    return " ".join(str(value).replace("|", "\\|").split())
