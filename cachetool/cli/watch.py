"""``cachetool stats --watch``: the figures of ``stats``, live on a terminal, otherwise one line every 2 seconds.

Each look is one reading transaction of the catalog: nothing is written, and no process waits for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cachetool.cli.output import Output
from cachetool.core.causes import main_cause
from cachetool.core.text import EVICTED_FOR, count, plain
from cachetool.core.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from cachetool.cache import CacheDir

__all__ = ["Look", "Rates", "look", "one_line", "rendered", "watch"]

_EVERY = 1.0
_EVERY_LINE = 2.0
# Seconds over which rates are measured. Shards are committed whole, so a shorter time would show bursts.
_WINDOW = 30.0
_GAP = 2
_MOST = 5
"""Most rows of a table."""
_BLOCKS = " ▁▂▃▄▅▆▇█"

Look = Mapping[str, Any]
"""The fields of ``Stats``, and ``epochs``: the newest epochs of the history."""


class Rates:
    """The growth of counters between looks."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self.history: deque[float] = deque(maxlen=240)
        """Bytes fetched per second, at each look."""
        self.fetched = self.samples = 0.0

    def add(self, figures: Look, now: float) -> None:
        """Add a look, made at the monotonic time ``now``."""
        # Evicted samples count too: a full cache has a constant number of samples although the pull continues.
        came = figures["samples"] + sum(row["samples"] for row in figures["evictions"])
        self._seen.append((now, figures["fetched"], came))
        # One look older than the window is kept, so the rate covers the whole window.
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()
        began, fetched, samples = self._seen[0]
        passed = now - began
        # Never negative: a catalog that was rebuilt begins its counters again.
        self.fetched = max(0.0, (figures["fetched"] - fetched) / passed) if passed else 0.0
        self.samples = max(0.0, (came - samples) / passed) if passed else 0.0
        self.history.append(self.fetched)


def look(cache: CacheDir, dataset: str | None) -> Look:
    """Return the present figures."""
    from cachetool.cache.history import history_of

    epochs = history_of(cache.layout, dataset=dataset).epochs
    return {**cache.stats(dataset).as_dict(), "epochs": epochs}


def watch(cache: CacheDir, dataset: str | None, out: Output) -> None:
    """Print looks until Ctrl-C."""
    rates = Rates()
    try:
        # A log file or a pipe has no screen to draw on.
        if not sys.stdout.isatty():
            while True:
                figures = look(cache, dataset)
                rates.add(figures, time.monotonic())
                out.line(one_line(figures, rates))
                time.sleep(_EVERY_LINE)
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stdout, highlight=False)
        # Without auto_refresh, rich starts no thread of its own. The other screen is left at the end, so the terminal
        # looks as before.
        with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            while True:
                figures = look(cache, dataset)
                rates.add(figures, time.monotonic())
                live.update(rendered(figures, rates, console.width), refresh=True)
                time.sleep(_EVERY)
    # Ctrl-C is the way to end this command, so it is no error. The last figures stay on the terminal.
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            out.line(one_line(look(cache, dataset), rates))


def one_line(figures: Look, rates: Rates) -> str:
    """Return a look as one line."""
    parts = [
        time.strftime("%H:%M:%S"),
        f"{format_size(figures['used'])} of {format_size(figures['max_size'])} used ({_percent(figures):.0f} %)",
        f"{count(figures['samples'], 'sample')} in {count(figures['shards'], 'shard')}",
        f"pulling {format_size(int(rates.fetched))}/s",
        f"{count(figures['evicted'], 'shard')} evicted",
        count(len(figures["leases"]), "reader"),
    ]
    if figures["epochs"]:
        parts.append(f"last epoch {_epoch(figures['epochs'][-1])}")
    parts += [f"pid {row['pid']} waits for {row['cause']}" for row in figures["trainers"] if row["cause"] is not None]
    return ", ".join(parts)


def rendered(figures: Look, rates: Rates, width: int) -> Group:
    """Return a look as tables, ``width`` columns wide."""
    from rich.console import Group
    from rich.text import Text

    cells: list[Any] = _head(figures, rates, width)
    for table in _tables(figures, width):
        cells += [Text(""), table] if table is not None else []
    for row in [*figures["pulling"], *figures["trainers"]][:_MOST]:
        cells += [Text(""), _text(f"pid {row['pid']}: {row['sentence']}")]
    for row in figures["errors"][:1]:
        at = time.strftime("%H:%M:%S", time.localtime(row["at"]))
        cells += [Text(""), _text(f"last error, {at}: {row['text']}")]
    return Group(*cells)


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(text), style=style, overflow="ellipsis", no_wrap=True)


def _head(figures: Look, rates: Rates, width: int) -> list[Text]:
    """Return the lines above the tables: fill, pull rate, and processes that have the cache open without reading it."""
    size = f"{format_size(figures['used'])} of {format_size(figures['max_size'])} ({_percent(figures):.0f} %)"
    bar = max(10, width - len(size) - 12)
    filled = round(bar * min(100.0, _percent(figures)) / 100)
    rate = f"{format_size(int(rates.fetched))}/s, {rates.samples:.1f} samples/s"
    lines = [
        _text(f"{time.strftime('%H:%M:%S')}  cache {os.path.abspath(figures['root'])}, Ctrl-C ends", "bold"),
        _text(f"{'fill':9} {'█' * filled}{'░' * (bar - filled)}  {size}"),
        _text(f"{'pull':9} {_spark(list(rates.history), max(10, width - len(rate) - 12))}  {rate}"),
        _text(
            f"{'held':9} {count(figures['samples'], 'sample')} in {count(figures['shards'], 'shard')},"
            f" {figures['retiring']} retiring, {count(figures['evicted'], 'shard')} evicted so far"
        ),
        _text(
            f"{'space':9} {format_size(figures['reserved'])} reserved for shards being written,"
            f" {format_size(figures['free_disk'])} of disk free"
        ),
    ]
    reading = {row["pid"] for row in figures["leases"]}
    others = [f"pid {row['pid']} ({row['what']})" for row in figures["holders"] if row["pid"] not in reading]
    if others:
        lines.append(_text(f"{'others':9} {', '.join(others)}"))
    return lines


def _tables(figures: Look, width: int) -> list[Table | None]:
    """Return one table for each kind of row, None for a kind without rows."""
    return [
        _table(
            width,
            ["dataset", "format", ">shards", ">samples", ">bytes"],
            [
                (row["name"], name, totals["shards"], totals["samples"], format_size(totals["bytes"]))
                for row in figures["datasets"]
                for name, totals in row["formats"].items()
            ],
        ),
        _table(
            width,
            ["source", ">coverage", ">pass", ">fetched", ">reuse"],
            [_source_cells(row) for row in figures["sources"]],
        ),
        _table(
            width,
            ["pull", "state", ">samples"],
            [(row["url"], row["phase"], row["samples"]) for row in figures["pulls"]],
        ),
        _table(
            width,
            ["dataset and epoch", ">samples", ">batches", ">took", "waited"],
            [_epoch_cells(row) for row in reversed(figures["epochs"][-_MOST:])],
        ),
        _table(
            width,
            ["evicted for", "policy", "dataset", ">shards", ">bytes"],
            [
                (
                    EVICTED_FOR.get(row["reason"], row["reason"]),
                    row["policy"],
                    row["dataset"],
                    row["shards"],
                    format_size(row["bytes"]),
                )
                for row in figures["evictions"]
            ],
        ),
        _table(
            width,
            ["reader", "program", "dataset", ">version"],
            [(f"pid {row['pid']}", row["what"], row["dataset"], row["version"]) for row in figures["leases"]],
        ),
    ]


def _source_cells(row: Mapping[str, Any]) -> Sequence[object]:
    from cachetool.cache.stats import newest_pass

    _, coverage, pass_number = newest_pass(row)
    reuse = "" if row["reuse"] is None else f"{row['reuse']:.1f} x"
    return row["url"], f"{100 * coverage:.1f} %", pass_number, format_size(row["fetched"]), reuse


def _epoch_cells(row: Mapping[str, Any]) -> Sequence[object]:
    return (
        row["dataset"] if row["epoch"] is None else f"{row['dataset']} {row['epoch']}",
        row["samples"],
        "" if row["batches"] is None else row["batches"],
        "" if row["seconds"] is None else format_duration(row["seconds"]),
        _waited(row),
    )


def _table(width: int, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table | None:
    """Return a table of the first rows, or None without rows. The widest column is cut when the terminal
    is too narrow."""
    if not rows:
        return None
    from rich.table import Table
    from rich.text import Text

    shown = [[plain(cell) for cell in cells] for cells in rows[:_MOST]]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    widest = widths.index(max(widths))
    expand = sum(widths) + _GAP * len(widths) > width
    table = Table(box=None, pad_edge=False, expand=expand, padding=(0, _GAP, 0, 0), header_style="bold underline")
    for number, name in enumerate(columns):
        table.add_column(
            Text(name.removeprefix(">")),
            justify="right" if name[0] == ">" else "left",
            overflow="ellipsis",
            no_wrap=True,
            ratio=1 if expand and number == widest else None,
            min_width=12 if expand and number == widest else None,
        )
    for cells in shown:
        table.add_row(*map(Text, cells))
    if len(rows) > _MOST:
        table.add_row(Text(f"and {len(rows) - _MOST} more"))
    return table


def _spark(values: Sequence[float], width: int) -> str:
    """Return the newest values as blocks of eight heights."""
    newest = values[-width:]
    most = max(newest, default=0.0)
    heights = [0 if not most else max(1, round(8 * value / most)) if value else 0 for value in newest]
    return "".join(_BLOCKS[height] for height in heights).ljust(width)


def _percent(figures: Look) -> float:
    return 100 * figures["used"] / figures["max_size"] if figures["max_size"] else 0.0


def _waited(row: Mapping[str, Any]) -> str:
    if row["waited"] is None:
        return "unknown"
    share = f" ({100 * min(1.0, row['waited'] / row['seconds']):.0f} %)" if row["seconds"] else ""
    cause = main_cause(row["causes"] or {}, row["seconds"] or 0.0)
    return f"{row['waits']} x, {format_duration(row['waited'])}{share}{'' if cause is None else f', {cause}'}"


def _epoch(row: Mapping[str, Any]) -> str:
    took = "" if row["seconds"] is None else f" in {format_duration(row['seconds'])}"
    waited = "" if row["waited"] is None else f", waited {format_duration(row['waited'])}"
    return f"{count(row['samples'], 'sample')}{took}{waited}"
