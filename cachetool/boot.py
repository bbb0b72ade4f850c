"""How a process of ours begins: as ``python -c``, so that the user's program is not run again in it."""

from __future__ import annotations

import sys

__all__ = ["boot"]


def boot(module: str, call: str = "main()", *, named: bool = True) -> str:
    """The program of a process that imports from where this one does and calls ``call`` of ``module``.

    A ``Path`` in ``sys.path``, which Python passes over, is left out. ``named``: it knows the first words of the
    command line, by which the cache calls who uses it; a process that reads files of others is told nothing.
    """
    path = [each for each in sys.path if isinstance(each, str)]
    words = sys.argv[:2] if named else ["-c"]
    name = call.partition("(")[0]
    return f"import sys; sys.path[:] = {path!r}; sys.argv[:] = {words!r}; from {module} import {name}; {call}"
