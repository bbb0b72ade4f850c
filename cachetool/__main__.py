"""The program ``cachetool``, also as ``python -m cachetool``: all that can be interrupted is inside :func:`main`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process and exit; Ctrl-C while the program still loads ends it as any other."""
    arguments = sys.argv[1:]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads would wait for work by spinning
    try:
        with _first_worker(arguments):
            from cachetool.cli.app import run

            code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _first_worker(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """The process that lists the source of a pull, loading what it needs while Typer is loaded here: a quarter of a
    second."""
    if arguments[:1] != ["pull"] or {"-h", "--help"} & {*arguments} or sys.platform == "win32":
        return nullcontext()
    from cachetool.proc.parent import begun_early

    return begun_early("cachetool.pull.worker")


if __name__ == "__main__":
    main()
