"""The program ``cachetool``: its commands, and the one place where an exception becomes an exit code.

Typer's own error pages are longer than two lines, so the app runs with ``standalone_mode=False`` and :func:`run` prints
whatever comes out of it. Command modules import Typer and plain values only; what does the work is imported when the
command runs, which keeps ``--help`` as fast as a bare Typer app. A line that names its command loads that one alone.
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

VERBS = ("pull", "convert", "evict", "stats", "ls", "show", "verify", "doctor", "bench", "demo")
"""In the order of ``--help``; the command ``x`` is the function ``x`` of ``cachetool.cli.x``."""


def program(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The program with these of its commands."""
    app = typer.Typer(
        name="cachetool",
        help="A size-capped local cache of training samples, fed from remote stores while training runs.",
        epilog="To begin: cachetool demo. Exit codes: 0 done, 2 usage, 3 source or store, 4 no room, 5 corrupt data,"
        " 6 catalog, 130 interrupted.",
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
        raise typer.Exit(2)


def run(args: Sequence[str]) -> int:
    """Run one command line and give its exit code; every error is printed, none is raised."""
    prepare_streams()
    as_json = wants_json(args)
    if sys.platform == "win32":
        return fail("UsageError", "cachetool runs on Linux and macOS; on Windows use it inside WSL", 2, as_json=as_json)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            named = [verb for verb in VERBS if verb in args[:1]]
            code = program(named or VERBS)(args=with_label_kind(args), prog_name="cachetool", standalone_mode=False)
        except CacheToolError as error:
            _trace()
            return fail_with(known_error(error) or error, as_json=as_json)
        except typer.TyperException as error:
            return _usage(error, args, as_json=as_json)
        except Exception as error:  # noqa: BLE001 (the last stop: what is no disk's fault is a bug, and said to be one)
            _trace()
            cachetool_error = known_error(error) or _foreign(error)
            if cachetool_error is None:
                return _bug(error, as_json=as_json)
            return fail_with(cachetool_error, as_json=as_json)
        if code == Interrupted.exit_code:  # Typer turns KeyboardInterrupt into this
            return fail_with(
                Interrupted("interrupted: what was committed stays, and the same command goes on"), as_json=as_json
            )
        return int(code or 0)
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being reported
        return Interrupted.exit_code
    except typer.Exit as gone:  # the reader of our output left while an error was printed
        return gone.exit_code


def _usage(error: typer.TyperException, args: Sequence[str], *, as_json: bool) -> int:
    """An error of the command line itself, in the form of all others: what, then where to read more."""
    context = getattr(error, "ctx", None)
    if context is not None:
        where = context.command_path
    else:  # an option without its value
        where = " ".join(["cachetool", *(verb for verb in VERBS if verb in args[:1])])
    what = " ".join(error.format_message().split())
    refused = getattr(error.__cause__, "errors", None)  # of pydantic, which Typer checks values with
    if refused is not None:
        what += f" (got {refused()[0]['input']!r})"
    return fail("UsageError", f"{what}\ntry '{where} --help'", error.exit_code, as_json=as_json)


def _trace() -> None:
    """Where the error happened that is being handled, for whoever asks for it."""
    if os.environ.get("CACHETOOL_DEBUG"):
        import traceback

        traceback.print_exc()


def _foreign(error: Exception) -> CacheToolError | None:
    """What else ``error`` may come of: values in a catalog that cachetool never writes."""
    if "cachetool.cache.catalog" not in sys.modules:
        return None
    from cachetool.cache.catalog import foreign

    return foreign(error)


def _bug(error: Exception, *, as_json: bool) -> int:
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return fail(
        "Bug", f"{what}\nthis is a bug in cachetool; CACHETOOL_DEBUG=1 shows where it happened", 1, as_json=as_json
    )


def _terminate(signum: int, frame: FrameType | None) -> None:
    # SIGTERM ends a command as Ctrl-C does: what is committed stays, what is half written is given up.
    raise KeyboardInterrupt
