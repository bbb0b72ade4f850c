"""The program ``cachetool``, also as ``python -m cachetool``: all that can be interrupted is inside :func:`main`."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process and exit; Ctrl-C while the program still loads ends it as any other."""
    try:
        from cachetool.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
