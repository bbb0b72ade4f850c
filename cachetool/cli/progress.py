"""How far a verb has come: bars on a terminal, a plain line every few seconds elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from cachetool.core.progress import Progress, Report
from cachetool.core.text import count, plain
from cachetool.core.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Bars", "Lines"]

LINE_SECONDS = 3.0
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
    """A plain line at most every :data:`LINE_SECONDS`; a phase shorter than that prints nothing."""

    def __init__(self, write: Callable[[str], None], *, every: float = LINE_SECONDS) -> None:
        super().__init__()
        self._write = write
        self._every = every
        self._last = time.monotonic()

    def __enter__(self) -> Report:
        return self._step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _step(self, step: Progress) -> None:
        if self.enter(step) and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        text = plain(describe(step, self.seconds, self._bar.console.width - _BAR - 4))
        if self._task is None:
            self._task = self._bar.add_task(text, total=step.total)
        self._bar.update(self._task, completed=step.done, total=step.total, description=text)
