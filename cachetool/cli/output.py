"""The output of a command: results on stdout, notes and progress on stderr, one JSON document with ``--json``.

::

                     stdout                        stderr
    text             tables and lines              notes, progress, ``error: ...`` (at most two lines)
    --json           one JSON document             the same
    --quiet          as without                    errors only

All shown text may come from a remote key or a foreign file. So characters that are not printable are escaped: no name
can move the cursor or change colours. JSON needs no such care, because its encoder escapes all of them, half surrogate
pairs too.

Progress is a bar on a terminal and a plain line every few seconds otherwise, always on stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import typer

from cachetool.core.errors import CacheToolError, CapacityError, to_json
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.text import count, plain
from cachetool.core.units import format_duration, format_size
from cachetool.proc.lines import keep_standard_streams

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = [
    "Bars",
    "Lines",
    "Output",
    "PIPE_CLOSED",
    "count",
    "fail",
    "fail_with",
    "left_out",
    "notes_on_source",
    "plain",
    "prepare_streams",
    "wants_json",
]


PIPE_CLOSED = 141
"""Exit code when the reader of stdout went away, the code of any program that dies of SIGPIPE."""


DESCRIBES = "describes other files"
"""Reason for leaving out a README.md, in the words of :mod:`cachetool.sources.grouping`."""
_SHOWN = 3
"""Most names in a line about objects that were left out."""


class Output:
    """The two streams of one command, with its ``--json`` and ``--quiet``."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def note(self, text: str) -> None:
        """Print one line on stderr, unless ``--quiet`` is given."""
        if not self.quiet:
            _talk(plain(text))

    def line(self, text: str = "") -> None:
        """Print one line of the result on stdout."""
        _write(plain(text) + "\n")

    def document(self, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
        """Print the one JSON document of a command on stdout."""
        _write(json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table on stdout, after a blank line. Columns whose name begins with ``>`` are right-aligned."""
        # Imported here: a command without a table starts faster without rich.
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # A pipe has no width. Each row gets its full line there, so that nothing is cut for grep and awk.
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 4096, highlight=False)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in columns:
            # On a narrow terminal words are broken but numbers never: half of a number looks like another number.
            number = name[0] == ">"
            head = Text(name.removeprefix(">"))
            table.add_column(head, justify="right" if number else "left", overflow="fold", no_wrap=number)
        for row in rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        # The end of the capture flushes stdout, so it can fail there.
        with _writing(), console.capture() as capture:
            console.print(table)
        _write("\n" + "\n".join(text.rstrip() for text in capture.get().splitlines()) + "\n")

    def progress(self) -> AbstractContextManager[Report]:
        """Return a context with the function to call with each ``Progress`` of a command."""
        if self.quiet:
            return nullcontext(silent)

        return Bars() if sys.stderr.isatty() else Lines(self.note)


def fail(kind: str, message: str, exit_code: int, *, as_json: bool) -> int:
    """Print an error and return ``exit_code``.

    The error has at most two lines on stderr. With ``as_json`` a document on stdout has it too.
    """
    lines = [plain(text.strip()) for text in message.splitlines() if text.strip()] or [plain(kind)]
    # At most two lines, because scripts and people look for them: all lines behind the first become the second one.
    _talk("\n".join(["error: " + lines[0], *([" ".join(lines[1:])] if lines[1:] else [])]))
    if as_json:
        # If even this cannot be written (a full disk behind stdout), stderr and the exit code report the error.
        with contextlib.suppress(CapacityError):
            _write(json.dumps({"error": kind, "message": "\n".join(lines), "exit_code": exit_code}, indent=2) + "\n")
    return exit_code


def fail_with(error: CacheToolError, *, as_json: bool) -> int:
    """Print an error of cachetool with :func:`fail` and return its exit code."""
    value = to_json(error)
    return fail(value["error"], value["message"], error.exit_code, as_json=as_json)


def left_out(skipped: Iterable[tuple[str, str]], more: str) -> str:
    """Return a line with names and reasons of objects that were left out although no option said so.

    With more than three names the line ends with ``more``. Empty if nothing was left out.
    """
    # The order of importance: files whose rows are lost first, files that nobody takes for samples last. Only three
    # names are shown.
    lost = sorted(skipped, key=lambda skip: (not skip[1].startswith("its first dimension"), skip[1] == DESCRIBES))
    if not lost:
        return ""
    remaining = f"; and {len(lost) - _SHOWN} more; {more}" if len(lost) > _SHOWN else ""
    return f"left out: {'; '.join(f'{name} ({why})' for name, why in lost[:_SHOWN])}{remaining}"


def notes_on_source(
    out: Output, notes: Iterable[str], skipped: Iterable[tuple[str, str]], counts: Mapping[str, int], *, more: str
) -> None:
    """Print how a source was read: decisions, names that were left out, and counts of objects without a name."""
    from cachetool.sources.kinds import IN_USE

    names = list(skipped)
    named = {why for _, why in names}.union(IN_USE)
    others = {why: number for why, number in counts.items() if why not in named}
    # Each of them was named with a reason of its own, so a count would report them twice.
    if sum(others.values()) <= sum(why not in counts for _, why in names):
        others.clear()
    unnamed = [f"{number} {why}" for why, number in others.items()]
    lost = left_out(names, more)
    for note in notes:
        out.note(f"note: {note}")
    if lost:
        out.note(lost)
    if unnamed:
        out.note(f"{'also ' if lost else ''}left out: {', '.join(unnamed)}")


def wants_json(args: Sequence[str]) -> bool:
    """Return True if a command line asks for JSON."""
    # Found without parsing, because the error may be that the line cannot be parsed.
    end = args.index("--") if "--" in args else len(args)
    return "--json" in args[:end]


def prepare_streams() -> None:
    """Make stdout and stderr safe to write to, even when they are closed or cannot encode a character."""
    keep_standard_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Python sets the stream to None if the caller closed the descriptor.
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
        elif hasattr(stream, "reconfigure"):
            # In the C locale a name with an umlaut would otherwise end the command with UnicodeEncodeError.
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Point stdout at ``/dev/null``."""
    # The interpreter flushes stdout at exit. On a closed pipe this would print a second error and change the exit code.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(value: Any) -> Any:
    """Return ``value`` with null for each number that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    # NaN is no JSON: many parsers refuse the whole document because of it.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(text: str) -> None:
    with _writing():
        sys.stdout.write(text)
        # Flushed at once: an error of the pipe or disk must appear here, where it can be reported, and not at exit.
        sys.stdout.flush()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turn an error of writing to stdout into one that says so, and not into one about the disk of the cache."""
    try:
        yield
    except BrokenPipeError:
        _drop_stdout()
        # `cachetool ls | head` is no error: nothing is printed.
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        _drop_stdout()
        raise CapacityError(f"cannot write the result to stdout: {error.strerror}") from error


def _talk(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (this is the one place that prints)
    except OSError:
        # The reader of stderr went away. The work continues, because notes and progress are not its result.
        return


_LINE_SECONDS = 3.0
"""Least seconds between two lines of one phase."""
_BAR = 12
"""Columns of a bar, without the spinner and spaces beside it."""

_WORDS = {
    "list": "listing",
    "fetch": "fetching",
    "schema": "looking at samples",
    "pull": "pulling",
    "convert": "converting",
    "verify": "verifying",
}
_LEAST_FIRST = ("flying", "shards", "bytes", "evicted", "retries", "cache", "left", "rate")
"""Parts of a line in the order in which they are left out of a narrow terminal."""


def describe(step: Progress, seconds: float, width: int | None = None) -> str:
    """Return one line about the progress, ``seconds`` after the phase began.

    Example: ``pulling: 120 of 500 samples, 7.9 MB, 2.1 MB/s, 12 s left, 32 in flight, 1 retry, cache 45 %, 2 shards
    evicted, 3 shards``. The least important parts are left out of a line that is longer than ``width`` columns.
    """
    unit = {"list": " objects", "fetch": ""}.get(step.phase, " samples")
    show = format_size if step.phase == "fetch" else str
    of = "" if step.total is None else f" of {show(step.total)}"
    parts = {"done": f"{show(step.done)}{of}{unit}"}
    if step.bytes:
        parts["bytes"] = format_size(step.bytes)
        if seconds >= 1:
            parts["rate"] = f"{format_size(int(step.bytes / seconds))}/s"
    # Rates of the first second are too uncertain to show.
    if step.done and step.total and seconds >= 1 and step.done < step.total:
        parts["left"] = f"{format_duration(seconds * (step.total - step.done) / step.done)} left"
    if step.flying:
        parts["flying"] = f"{step.flying} in flight"
    if step.retries:
        parts["retries"] = "1 retry" if step.retries == 1 else f"{step.retries} retries"
    if step.cap:
        parts["cache"] = f"cache {100 * step.used / step.cap:.0f} %"
    if step.evicted:
        parts["evicted"] = f"{count(step.evicted, 'shard')} evicted"
    if step.shards:
        parts["shards"] = count(step.shards, "shard")
    if step.note:
        parts["note"] = step.note
    for name in ("", *_LEAST_FIRST):
        parts.pop(name, None)
        line = f"{_WORDS.get(step.phase, step.phase)}: {', '.join(parts.values())}"
        if width is None or len(plain(line)) <= width:
            break
    return line


class _Phases:
    """The present phase and the time when it began."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._began = 0.0

    def enter(self, step: Progress) -> bool:
        """Return True if ``step`` begins a new phase."""
        changed = step.phase != self._phase
        if changed:
            self._phase, self._began = step.phase, time.monotonic()
        return changed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


class Lines(_Phases):
    """Plain lines of progress, at most one every 3 seconds. A shorter phase prints nothing."""

    def __init__(self, write: Callable[[str], None], *, every: float = _LINE_SECONDS) -> None:
        super().__init__()
        self._write = write
        self._every = every
        self._last = time.monotonic()

    def __enter__(self) -> Report:
        return self._step

    def __exit__(self, *_: object) -> None:
        return

    def _step(self, step: Progress) -> None:
        self.enter(step)
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self._write(describe(step, self.seconds))


class Bars(_Phases):
    """One live bar on a terminal for the present phase. It disappears at the end."""

    def __init__(self) -> None:
        super().__init__()
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=_BAR),
            progress.TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stderr, highlight=False),
            # The bar is removed at the end, so only the result stays on the terminal.
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Report:
        self._bar.start()
        return self._step

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _step(self, step: Progress) -> None:
        if self.enter(step) and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        text = plain(describe(step, self.seconds, self._bar.console.width - _BAR - 4))
        if self._task is None:
            self._task = self._bar.add_task(text, total=step.total)
        self._bar.update(self._task, completed=step.done, total=step.total, description=text)
