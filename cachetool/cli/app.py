"""The program ``cachetool``: its commands, and the one place where an exception becomes an exit code.

Typer's own error pages have more than two lines, so the app runs with ``standalone_mode=False`` and :func:`run` prints
every error. Command modules import only Typer and plain values. Modules that do the work are imported when the command
runs, which keeps ``--help`` as fast as a bare Typer app. A command line that names its command loads that command
alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated

import typer

import cachetool
from cachetool.cli.options import command, with_label_kind
from cachetool.cli.output import fail, fail_with, prepare_streams, wants_json
from cachetool.core.errors import CacheToolError, Interrupted
from cachetool.proc.disk import known_error

__all__ = ["VERBS", "program", "run"]

VERBS = ("pull", "convert", "evict", "stats", "ls", "show", "verify", "doctor", "metrics", "bench", "demo")
"""The commands in the order of ``--help``. The command ``x`` is the function ``x`` of ``cachetool.cli.x``."""


def program(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """Return the Typer program with these commands."""
    app = typer.Typer(
        name="cachetool",
        help="A size-capped local cache of training samples, fed from remote stores while training runs.",
        epilog="To begin: cachetool demo. Exit codes: 0 done, 2 usage, 3 source or store, 4 out of space, 5 corrupt"
        " data, 6 catalog, 130 interrupted.",
        # Plain help pages: `pull --help` takes 66 lines instead of 101, and the program starts faster without rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for verb in verbs:
        app.command()(command(getattr(import_module(f"cachetool.cli.{verb}"), verb)))
    return app


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"cachetool {cachetool.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        # Exit code 2: nothing was done, which a script must notice.
        raise typer.Exit(2)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Every error is printed, none is raised."""
    # Before the first word is printed: stdout or stderr may be closed.
    prepare_streams()
    # Known before the line is parsed, because the error may be that it cannot be parsed.
    as_json = wants_json(args)
    if sys.platform == "win32":
        return fail("UsageError", "cachetool runs on Linux and macOS; on Windows use it inside WSL", 2, as_json=as_json)
    # Batch systems and containers end a program by SIGTERM.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            # Only the named command's module is imported; all of them take longer than most commands.
            named = [verb for verb in VERBS if verb in args[:1]]
            code = program(named or VERBS)(args=with_label_kind(args), prog_name="cachetool", standalone_mode=False)
        except CacheToolError as error:
            _trace()
            return fail_with(known_error(error) or error, as_json=as_json)
        except typer.TyperException as error:
            return _usage(error, args, as_json=as_json)
        # The last stop. An error of a disk or of a foreign catalog is reported as such; everything else is a bug of
        # cachetool.
        except Exception as error:  # noqa: BLE001 (the last stop: what is no disk's fault is a bug, and said to be one)
            _trace()
            cachetool_error = known_error(error) or _foreign(error)
            if cachetool_error is None:
                return _bug(error, as_json=as_json)
            return fail_with(cachetool_error, as_json=as_json)
        # Typer turns KeyboardInterrupt into this exit code when it is not in standalone mode.
        if code == Interrupted.exit_code:
            return fail_with(
                Interrupted("interrupted: committed samples are kept; run the same command again to continue"),
                as_json=as_json,
            )
        return int(code or 0)
    # A second Ctrl-C can arrive while the first one is reported. Without this clause it would print a traceback.
    except KeyboardInterrupt:
        return Interrupted.exit_code
    # The reader of stdout went away while an error was printed.
    except typer.Exit as gone:
        return gone.exit_code


def _usage(error: typer.TyperException, args: Sequence[str], *, as_json: bool) -> int:
    """Print an error of the command line itself in the form of all others: the error, then the help page to read."""
    context = getattr(error, "ctx", None)
    if context is not None:
        where = context.command_path
    else:
        # The error of an option without its value has no context.
        where = " ".join(["cachetool", *(verb for verb in VERBS if verb in args[:1])])
    what = " ".join(error.format_message().split())
    # Typer checks some values with pydantic and leaves the value out of its message.
    refused = getattr(error.__cause__, "errors", None)
    if refused is not None:
        what += f" (got {refused()[0]['input']!r})"
    return fail("UsageError", f"{what}\ntry '{where} --help'", error.exit_code, as_json=as_json)


def _trace() -> None:
    """Print the traceback of the current error if ``CACHETOOL_DEBUG`` is set."""
    if os.environ.get("CACHETOOL_DEBUG"):
        import traceback

        traceback.print_exc()


def _foreign(error: Exception) -> CacheToolError | None:
    """Return the error to print if ``error`` comes from values in a catalog that cachetool never writes, else None."""
    # Without the module no catalog was opened, and importing it now would cost time for nothing.
    if "cachetool.cache.catalog" not in sys.modules:
        return None
    from cachetool.cache.catalog import foreign

    return foreign(error)


def _bug(error: Exception, *, as_json: bool) -> int:
    """Print an error that nobody expected, as a bug of cachetool, and return exit code 1."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return fail(
        "Bug", f"{what}\nthis is a bug in cachetool; CACHETOOL_DEBUG=1 shows where it happened", 1, as_json=as_json
    )


def _terminate(signum: int, frame: FrameType | None) -> None:
    # SIGTERM ends a command as Ctrl-C does: committed shards stay, half-written ones are removed.
    raise KeyboardInterrupt
