"""The program ``cachetool``, also as ``python -m cachetool``. Everything that Ctrl-C may interrupt is inside
:func:`main`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process and exit. Ctrl-C ends it with exit code 130, also while
    modules still load."""
    arguments = sys.argv[1:]
    # Before NumPy is imported: the threads of its OpenBLAS wait for work by spinning, which takes a processor from the
    # workers. Child processes inherit the variable.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with _first_worker(arguments):
            # Imported inside of the try, so that Ctrl-C during the import ends the program without a traceback.
            from cachetool.cli.app import run

            code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _first_worker(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context that starts the process which lists the source of a pull, while Typer loads in this process."""
    # Only pull needs that process in any case. It saves a quarter of a second; a help page must not start it.
    if arguments[:1] != ["pull"] or {"-h", "--help"} & {*arguments} or sys.platform == "win32":
        return nullcontext()
    # Imported here: all other commands start without it.
    from cachetool.proc.parent import begun_early

    return begun_early("cachetool.pull.worker")


if __name__ == "__main__":
    main()
