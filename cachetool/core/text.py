"""Words for people: one vocabulary for all messages, help texts and docs, and functions that put values into messages.

::

    say                                                     | not
    ------------------------------------------------------  | ------------------------------------------
    space                                                   | room
    is deleted, is evicted, is removed                      | goes, is gone, is taken away, is given up
    continues                                               | goes on
    does not exist, is missing                              | is not there, is nowhere, there is none
    needs, requires                                         | wants, asks for
    cannot                                                  | may not (for ability)
    on another machine, in another folder, at a remote URL  | elsewhere
    before, after                                           | in front of, behind
    use, choose                                             | take (for options)
    at the same time                                        | all at once
    unknown X; choose one of A, B                           | there is no X; known are A, B
    the cap (--max-size)                                    | limit, budget
    part of a source                                        | share, placement
    fraction                                                | share

Terms have one name each: sample, field, schema, block, shard, source, store, kind, format, unit, draw, pass, part, job,
reservation, commit, holder, lease, retiring, snapshot, node, exported folder.

A message says what happened, with which value, and what to do next, in one or two lines. It names things as the user
named them: an option, a path, a URL.

Values in messages may have been chosen by anybody: remote keys, foreign files, names of programs. :func:`plain` and
:func:`shown` make them harmless.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

__all__ = ["EVICTED_FOR", "count", "counted", "plain", "program", "shown"]

EVICTED_FOR: Mapping[str, str] = {
    "room": "space for a pull",
    "renewal": "renewal at an epoch",
    "evict": "cachetool evict",
    "moved": "part of another node",
    "corrupt": "damage",
}
"""The reasons of evictions in words, by their names in the catalog."""

_LONGEST = 80
"""Most characters of a value in a message."""


def plain(text: object) -> str:
    r"""Return ``text`` with each character that is not printable replaced by an escape such as ``\x1b``."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message: one line of at most 80 characters; never raises."""
    try:
        text = repr(value).replace("\n", " ")
    # The value may be any object of a user. Its __repr__ may raise any error, and Python refuses to convert an int of
    # 5,000 digits to text. The error that is being reported must not be replaced by such an error.
    except Exception:  # noqa: BLE001
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 shard``, ``2 shards``, ``20000 shards``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def counted(number: int, noun: str) -> str:
    """Return a number with separators and its noun: ``20,000 shards``. For text that nobody copies into a command."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def program() -> str:
    """Return the name of the program of this process, by which users recognise it: ``train.py``, ``cachetool pull``,
    ``python -c``."""
    first, *arguments = getattr(sys, "argv", [])[:2] or [""]
    folder, _, name = first.rpartition("/")
    # With python -m PACKAGE the first argument is the path of the package's __main__.py; users know the package's name.
    if name == "__main__.py":
        name = folder.rpartition("/")[2]
    elif name in ("", "-", "-c", "-m"):
        name = f"python {name}".strip()
    # Only the verb of cachetool is added, because arguments of other programs may be secrets, and this text is stored
    # in the catalog. Processes that cachetool starts have the arguments of their starter.
    return " ".join([name, *(arguments if name == "cachetool" else [])])[:80]
