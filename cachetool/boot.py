"""How a process of ours begins: as ``python -c``, so that the user's program is not run again in it."""

from __future__ import annotations

import sys

__all__ = ["boot"]


def boot(module: str, call: str = "main()") -> str:
    """The program of a process that imports from where this one does and calls ``call`` of ``module``.

    Search path and arguments are told as text: a ``Path`` in ``sys.path``, which Python passes over, is left out.
    """
    path = [each for each in sys.path if isinstance(each, str)]
    arguments = [each for each in sys.argv[:2] if isinstance(each, str)]
    name = call.partition("(")[0]
    return f"import sys; sys.path[:], sys.argv[:] = {path!r}, {arguments!r}; from {module} import {name}; {call}"
