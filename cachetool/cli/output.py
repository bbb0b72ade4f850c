"""What a command prints, and where: results on stdout, talk and progress on stderr, one JSON document with ``--json``.

::

                     stdout                        stderr
    text             tables and lines              notes, progress, ``error: ...`` (at most two lines)
    --json           one JSON document             the same
    --quiet          as without                    errors only

Everything shown may come from a remote key or a foreign file, so what is not printable is escaped: no name can move the
cursor or change colours. JSON needs no such care, its encoder escapes all of it, half of a surrogate pair as well.

How far a verb has come: bars on a terminal, a plain line every few seconds elsewhere. All of it on stderr.
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
"""Exit code when the reader of our output went away, as for any program that dies of SIGPIPE."""


DESCRIBES = "describes other files"
"""Why a README.md is left out, as :mod:`cachetool.sources.grouping` says it."""
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
        with _writing(), console.capture() as capture:  # its end flushes the stream
            console.print(table)
        _write("\n" + "\n".join(text.rstrip() for text in capture.get().splitlines()) + "\n")

    def progress(self) -> AbstractContextManager[Report]:
        """While it is entered: something to call with each ``Progress`` of a verb."""
        if self.quiet:
            return nullcontext(silent)

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
    # Rows that are lost before single values, and what nobody takes for samples at last.
    lost = sorted(skipped, key=lambda skip: (not skip[1].startswith("its first dimension"), skip[1] == DESCRIBES))
    if not lost:
        return ""
    remaining = f"; and {len(lost) - _SHOWN} more; {more}" if len(lost) > _SHOWN else ""
    return f"left out: {'; '.join(f'{name} ({why})' for name, why in lost[:_SHOWN])}{remaining}"


def notes_on_source(
    out: Output, notes: Iterable[str], skipped: Iterable[tuple[str, str]], counts: Mapping[str, int], *, more: str
) -> None:
    """Lines about how a source was read: what was decided, what was left out by name, and how much without one."""
    from cachetool.sources.kinds import IN_USE

    names = list(skipped)
    named = {why for _, why in names}.union(IN_USE)
    others = {why: number for why, number in counts.items() if why not in named}
    if sum(others.values()) <= sum(why not in counts for _, why in names):  # each is named, with a reason of its own
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


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's flush at exit does not fail on a pipe that is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(value: Any) -> Any:
    """``value`` with null for each number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
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
        _drop_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        _drop_stdout()
        raise CapacityError(f"cannot write the result to stdout: {error.strerror}") from error


def _talk(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (this is the one place that prints)
    except OSError:
        # Nobody reads our talk any more; the work goes on.
        return


_LINE_SECONDS = 3.0
"""At least this long between two lines of one phase."""
_BAR = 12
"""Columns of a bar; a spinner and spaces stand beside it."""

_WORDS = {
    "list": "listing",
    "fetch": "fetching",
    "schema": "looking at samples",
    "pull": "pulling",
    "convert": "converting",
    "verify": "verifying",
}
_LEAST_FIRST = ("flying", "shards", "bytes", "evicted", "retries", "cache", "left", "rate")
"""Parts of a line, in the order in which they are left out for want of room."""


def describe(step: Progress, seconds: float, width: int | None = None) -> str:
    """One line, ``seconds`` after the phase began: ``pulling: 120 of 500 samples, 7.9 MB, 2.1 MB/s, 12 s left, 32 in
    flight, 1 retry, cache 45 %, 2 shards evicted, 3 shards``. What matters least is left out of a line that would be
    longer than ``width``."""
    unit = {"list": " objects", "fetch": ""}.get(step.phase, " samples")
    show = format_size if step.phase == "fetch" else str
    of = "" if step.total is None else f" of {show(step.total)}"
    parts = {"done": f"{show(step.done)}{of}{unit}"}
    if step.bytes:
        parts["bytes"] = format_size(step.bytes)
        if seconds >= 1:
            parts["rate"] = f"{format_size(int(step.bytes / seconds))}/s"
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
    """Remembers when the present phase began."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._began = 0.0

    def enter(self, step: Progress) -> bool:
        """Whether ``step`` begins another phase than the one before."""
        changed = step.phase != self._phase
        if changed:
            self._phase, self._began = step.phase, time.monotonic()
        return changed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


class Lines(_Phases):
    """A plain line at most every :data:`_LINE_SECONDS`; a phase shorter than that prints nothing."""

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
    """One live bar on a terminal for the present phase; gone when the work is done."""

    def __init__(self) -> None:
        super().__init__()
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=_BAR),
            progress.TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stderr, highlight=False),
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
