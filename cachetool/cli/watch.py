"""``cachetool stats --watch``: the figures of ``stats``, live on a terminal, a line every few seconds elsewhere.

Each look is one reading transaction of the catalog: nothing is written, and nobody waits for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cachetool.cli.output import Output
from cachetool.core.text import count, plain
from cachetool.core.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from cachetool.cache import CacheDir

__all__ = ["Look", "Rates", "drawn", "look", "told", "watch"]

_EVERY = 1.0
_EVERY_LINE = 2.0
_WINDOW = 30.0
"""Seconds over which rates are taken: shards are committed whole, so a shorter time would show bursts."""
_MOST = 5
"""Rows of a table."""
_BLOCKS = " ▁▂▃▄▅▆▇█"

Look = Mapping[str, Any]
"""The fields of ``Stats``, and ``epochs``: the newest of the history."""


class Rates:
    """How fast counters grow, from one look to the next."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self.history: deque[float] = deque(maxlen=240)
        """Bytes fetched a second at each look."""
        self.fetched = self.samples = 0.0

    def add(self, found: Look, now: float) -> None:
        """Take a look in."""
        came = found["samples"] + sum(row["samples"] for row in found["evictions"])
        self._seen.append((now, found["fetched"], came))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()
        began, fetched, samples = self._seen[0]
        passed = now - began
        self.fetched = max(0.0, (found["fetched"] - fetched) / passed) if passed else 0.0
        self.samples = max(0.0, (came - samples) / passed) if passed else 0.0
        self.history.append(self.fetched)


def look(cache: CacheDir, dataset: str | None) -> Look:
    """What there is now."""
    from cachetool.cache.history import history_of

    epochs = history_of(cache.catalog, dataset=dataset).epochs
    return {**cache.stats(dataset).as_dict(), "epochs": epochs}


def watch(cache: CacheDir, dataset: str | None, out: Output) -> None:
    """Look until Ctrl-C, which is how it ends."""
    rates = Rates()
    try:
        if not sys.stdout.isatty():
            while True:
                found = look(cache, dataset)
                rates.add(found, time.monotonic())
                out.line(told(found, rates))
                time.sleep(_EVERY_LINE)
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stdout, highlight=False)
        with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            while True:
                found = look(cache, dataset)
                rates.add(found, time.monotonic())
                live.update(drawn(found, rates, console.width), refresh=True)
                time.sleep(_EVERY)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            out.line(told(look(cache, dataset), rates))


def told(found: Look, rates: Rates) -> str:
    """A look as one line."""
    parts = [
        time.strftime("%H:%M:%S"),
        f"{format_size(found['used'])} of {format_size(found['max_size'])} used ({_percent(found):.0f} %)",
        f"{count(found['samples'], 'sample')} in {count(found['shards'], 'shard')}",
        f"pulling {format_size(int(rates.fetched))}/s",
        f"{count(found['evicted'], 'shard')} evicted",
        count(len(found["leases"]), "reader"),
    ]
    if found["epochs"]:
        parts.append(f"last epoch {_epoch(found['epochs'][-1])}")
    return ", ".join(parts)


def drawn(found: Look, rates: Rates, width: int) -> Group:
    """A look as tables, ``width`` columns wide."""
    from rich.console import Group
    from rich.text import Text

    from cachetool.cache.stats import newest_pass

    def row(text: str, style: str = "") -> Text:
        return Text(plain(text), style=style, overflow="ellipsis", no_wrap=True)

    size = f"{format_size(found['used'])} of {format_size(found['max_size'])} ({_percent(found):.0f} %)"
    bar = max(10, width - len(size) - 12)
    filled = round(bar * min(100.0, _percent(found)) / 100)
    rate = f"{format_size(int(rates.fetched))}/s, {rates.samples:.1f} samples/s"
    cells: list[Any] = [
        row(f"{time.strftime('%H:%M:%S')}  cache {os.path.abspath(found['root'])}, until Ctrl-C", "bold"),
        row(f"{'fill':9} {'█' * filled}{'░' * (bar - filled)}  {size}"),
        row(f"{'pull':9} {_spark(list(rates.history), max(10, width - len(rate) - 12))}  {rate}"),
        row(
            f"{'held':9} {count(found['samples'], 'sample')} in {count(found['shards'], 'shard')},"
            f" {found['retiring']} retiring, {count(found['evicted'], 'shard')} evicted so far"
        ),
        row(
            f"{'room':9} {format_size(found['reserved'])} reserved for shards being written,"
            f" {format_size(found['free_disk'])} of disk free"
        ),
    ]
    reading = {each["pid"] for each in found["leases"]}
    others = [f"pid {each['pid']} ({each['what']})" for each in found["holders"] if each["pid"] not in reading]
    cells += [row(f"{'others':9} {', '.join(others)}")] if others else []
    tables = [
        _table(
            ["dataset", "format", ">shards", ">samples", ">bytes"],
            [
                (each["name"], name, kind["shards"], kind["samples"], format_size(kind["bytes"]))
                for each in found["datasets"]
                for name, kind in each["formats"].items()
            ],
        ),
        _table(
            ["source", ">coverage", ">pass", ">fetched", ">reuse"],
            [
                (
                    each["url"],
                    f"{100 * coverage:.1f} %",
                    turn,
                    format_size(each["fetched"]),
                    "" if each["reuse"] is None else f"{each['reuse']:.1f} x",
                )
                for each in found["sources"]
                for _, coverage, turn in (newest_pass(each),)
            ],
        ),
        _table(
            ["pull", "state", ">samples"], [(each["url"], each["phase"], each["samples"]) for each in found["pulls"]]
        ),
        _table(
            ["epoch", ">samples", ">batches", ">took", "waited"],
            [
                (
                    each["dataset"] if each["epoch"] is None else f"{each['dataset']} {each['epoch']}",
                    each["samples"],
                    "" if each["batches"] is None else each["batches"],
                    "" if each["seconds"] is None else format_duration(each["seconds"]),
                    _waited(each),
                )
                for each in reversed(found["epochs"][-_MOST:])
            ],
        ),
        _table(
            ["evicted for", "policy", "dataset", ">shards", ">bytes"],
            [
                (each["reason"], each["policy"], each["dataset"], each["shards"], format_size(each["bytes"]))
                for each in found["evictions"]
            ],
        ),
        _table(
            ["reader", "program", "dataset", ">version"],
            [(f"pid {each['pid']}", each["what"], each["dataset"], each["version"]) for each in found["leases"]],
        ),
    ]
    for table in tables:
        cells += [Text(""), table] if table is not None else []
    for each in found["errors"][:1]:
        cells += [Text(""), row(f"last error, {time.strftime('%H:%M:%S', time.localtime(each['at']))}: {each['text']}")]
    return Group(*cells)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table | None:
    """The first rows, the first column giving way when there is too little room; None without any."""
    if not rows:
        return None
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0), header_style="bold underline")
    for number, name in enumerate(columns):
        table.add_column(
            Text(name.removeprefix(">")),
            justify="right" if name[0] == ">" else "left",
            overflow="ellipsis",
            no_wrap=True,
            ratio=1 if number == 0 else None,
            min_width=12 if number == 0 else None,
        )
    for cells in rows[:_MOST]:
        table.add_row(*(Text(plain(cell)) for cell in cells))
    if len(rows) > _MOST:
        table.add_row(Text(f"and {len(rows) - _MOST} more"))
    return table


def _spark(values: Sequence[float], width: int) -> str:
    """The newest values as blocks of eight heights."""
    newest = values[-width:]
    most = max(newest, default=0.0)
    heights = [0 if not most else max(1, round(8 * value / most)) if value else 0 for value in newest]
    return "".join(_BLOCKS[height] for height in heights).ljust(width)


def _percent(found: Look) -> float:
    return 100 * found["used"] / found["max_size"] if found["max_size"] else 0.0


def _waited(row: Mapping[str, Any]) -> str:
    if row["waited"] is None:
        return "not told"
    share = f" ({100 * min(1.0, row['waited'] / row['seconds']):.0f} %)" if row["seconds"] else ""
    return f"{row['waits']} x, {format_duration(row['waited'])}{share}"


def _epoch(row: Mapping[str, Any]) -> str:
    took = "" if row["seconds"] is None else f" in {format_duration(row['seconds'])}"
    waited = "" if row["waited"] is None else f", waited {format_duration(row['waited'])}"
    return f"{count(row['samples'], 'sample')}{took}{waited}"
