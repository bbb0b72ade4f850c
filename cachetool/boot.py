"""How a process of ours begins: as ``python -c``, so that the user's program is not run again in it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from cachetool.errors import UsageError

__all__ = ["boot", "started"]


def boot(module: str, call: str = "main()", *, named: bool = True) -> str:
    """The program of a process that imports from where this one does and calls ``call`` of ``module``.

    A ``Path`` in ``sys.path``, which Python passes over, is left out. ``named``: it knows the first words of the
    command line, by which the cache calls who uses it; a process that reads files of others is told nothing.
    """
    path = [each for each in sys.path if isinstance(each, str)]
    words = sys.argv[:2] if named else ["-c"]
    name = call.partition("(")[0]
    return f"import sys; sys.path[:] = {path!r}; sys.argv[:] = {words!r}; from {module} import {name}; {call}"


def started(program: str, *flags: str, **options: Any) -> subprocess.Popen[bytes]:
    """A process that runs ``program``, which :func:`boot` made; a terminal's Ctrl-C reaches its starter alone.

    ``options`` are those of ``subprocess.Popen``. Raises :class:`UsageError` where the system starts none.
    """
    command = [sys.executable, *flags, "-c", program]
    try:
        try:
            return subprocess.Popen(command, start_new_session=True, **options)
        except PermissionError:  # some sandboxes forbid setsid(); a process group of its own does as well
            return subprocess.Popen(command, process_group=0, **options)
    except OSError as error:
        raise UsageError(
            f"a process cannot be started: {error.strerror}; raise the limit (ulimit -u), or allow fork, exec and"
            " setsid where this runs"
        ) from error
