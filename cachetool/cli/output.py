"""What a command prints, and where: results on stdout, talk and progress on stderr, one JSON document with ``--json``.

::

                     stdout                        stderr
    text             tables and lines              notes, progress, ``error: ...`` (at most two lines)
    --json           one JSON document             the same
    --quiet          as without                    errors only

Everything shown may come from a remote key or a foreign file, so what is not printable is escaped: no name can move the
cursor or change colours. JSON needs no such care, its encoder escapes all of it, half of a surrogate pair as well.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import typer

from cachetool.core.errors import CacheToolError, CapacityError, to_json
from cachetool.core.progress import Report, silent
from cachetool.core.text import count, plain
from cachetool.proc.streams import keep_standard_streams

__all__ = ["PIPE_CLOSED", "Output", "count", "fail", "fail_with", "left_out", "plain", "prepare_streams", "wants_json"]

PIPE_CLOSED = 141
"""Exit code when the reader of our output went away, as for any program that dies of SIGPIPE."""


_SHOWN = 3
"""Names in a line about what was left out."""


class Output:
    """The two streams of one command, as its ``--json`` and ``--quiet`` want them."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def note(self, text: str) -> None:
        """One line of talk on stderr; none with ``--quiet``."""
        if not self.quiet:
            _talk(plain(text))

    def line(self, text: str = "") -> None:
        """One line of the result on stdout."""
        _write(plain(text) + "\n")

    def document(self, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
        """The one JSON document of a command, on stdout."""
        _write(json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table on stdout, after a blank line. Columns whose name begins with ``>`` are set flush right."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # A pipe has no width: give each row its full line there, so that nothing is cut for grep and awk.
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 4096, highlight=False)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in columns:
            # On a narrow terminal words are broken, numbers never.
            number = name[0] == ">"
            head = Text(name.removeprefix(">"))
            table.add_column(head, justify="right" if number else "left", overflow="fold", no_wrap=number)
        for row in rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        with _writing(), console.capture() as drawn:  # its end flushes the stream
            console.print(table)
        _write("\n" + "\n".join(text.rstrip() for text in drawn.get().splitlines()) + "\n")

    def progress(self) -> AbstractContextManager[Report]:
        """While it is entered: something to call with each ``Progress`` of a verb."""
        if self.quiet:
            return nullcontext(silent)
        from cachetool.cli.progress import Bars, Lines

        return Bars() if sys.stderr.isatty() else Lines(self.note)


def fail(kind: str, message: str, exit_code: int, *, as_json: bool) -> int:
    """Print an error, at most two lines on stderr and with ``as_json`` a document on stdout; gives the exit code."""
    lines = [plain(text.strip()) for text in message.splitlines() if text.strip()] or [plain(kind)]
    # A message of more lines keeps all its words: what follows the first line becomes the second.
    _talk("\n".join(["error: " + lines[0], *([" ".join(lines[1:])] if lines[1:] else [])]))
    if as_json:
        with contextlib.suppress(CapacityError):  # where even this cannot be written, stderr and the code say it
            _write(json.dumps({"error": kind, "message": "\n".join(lines), "exit_code": exit_code}, indent=2) + "\n")
    return exit_code


def fail_with(error: CacheToolError, *, as_json: bool) -> int:
    """:func:`fail` with an error of cachetool."""
    value = to_json(error)
    return fail(value["error"], value["message"], error.exit_code, as_json=as_json)


def left_out(skipped: Iterable[tuple[str, str]], more: str) -> str:
    """What was not taken although nobody said so, names and reasons, in a line that ends with ``more`` where there are
    too many; empty for nothing."""
    # Rows that are lost before single values.
    lost = sorted(skipped, key=lambda each: not each[1].startswith("its first dimension"))
    if not lost:
        return ""
    rest = f"; and {len(lost) - _SHOWN} more; {more}" if len(lost) > _SHOWN else ""
    return f"left out: {'; '.join(f'{name} ({why})' for name, why in lost[:_SHOWN])}{rest}"


def wants_json(args: Sequence[str]) -> bool:
    """Whether a command line asks for JSON; found without parsing it, since its error may be that it does not parse."""
    end = args.index("--") if "--" in args else len(args)
    return "--json" in args[:end]


def prepare_streams() -> None:
    """Make stdout and stderr safe to write to: there even when closed, and never failing on a character."""
    keep_standard_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller closed the descriptor
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's flush at exit does not fail on a pipe that is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(value: Any) -> Any:
    """``value`` with null for each number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(text: str) -> None:
    with _writing():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Around what touches stdout: its failure is said to be that, not a disk of the cache that is full."""
    try:
        yield
    except BrokenPipeError:
        drop_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        drop_stdout()
        raise CapacityError(f"cannot write the result to stdout: {error.strerror}") from error


def _talk(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (this is the one place that prints)
    except OSError:
        # Nobody reads our talk any more; the work goes on.
        return
