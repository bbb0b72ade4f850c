"""Words for people, out of what may come from anywhere: a remote key, a foreign file, the name of a program."""

from __future__ import annotations

import sys

__all__ = ["count", "counted", "plain", "program", "shown"]

_LONGEST = 80
"""Characters of a value in a message."""


def plain(text: object) -> str:
    r"""``text`` with every character that is not printable written as an escape such as ``\x1b``."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def shown(value: object) -> str:
    """``repr(value)`` for a message: one line, cut when it is long, whatever a stranger's object does."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:  # noqa: BLE001 - a number of 5,000 digits has no text, and objects may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def count(number: int, noun: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def counted(number: int, noun: str) -> str:
    """``1 shard``, ``20,000 shards``: for reading, where :func:`count` is for copying too."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def program() -> str:
    """What this process runs, for others to recognise: ``train.py``, ``cachetool pull``, ``python -c``. Processes that
    cachetool starts have the arguments of their starter. Those of other programs may be secrets, and this is kept."""
    first, *arguments = getattr(sys, "argv", [])[:2] or [""]
    folder, _, name = first.rpartition("/")
    if name == "__main__.py":  # python -m
        name = folder.rpartition("/")[2]
    elif name in ("", "-", "-c", "-m"):
        name = f"python {name}".strip()
    return " ".join([name, *(arguments if name == "cachetool" else [])])[:80]
