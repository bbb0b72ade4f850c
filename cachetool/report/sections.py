"""The sections of the page, one function each: a heading, a chart or a table, and a line that explains it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cachetool.cache.history import MOST_EPOCHS
from cachetool.cache.stats import newest_pass
from cachetool.core.causes import main_cause, sentence
from cachetool.core.markup import Markup, element, joined
from cachetool.core.text import EVICTED_FOR, counted
from cachetool.core.units import format_duration, format_size
from cachetool.report import axes, charts
from cachetool.report.numbers import Bins, Figures

__all__ = ["all_of"]

_MOST = 20
"""Maximum of rows of a table."""
_EPOCH_ROWS = 12
_LONG = 14
"""Number of characters of a word that are too many for a column on a phone."""
_REASONS = {"room": "orange", "renewal": "blue", "evict": "violet", "corrupt": "red"}
_STATES = {"read by an epoch": "blue", "not read yet": "orange", "retiring": "violet"}
_NOTHING_YET = "No history yet: it is recorded while the cache is filled and read."


def all_of(figures: Figures) -> list[Markup]:
    """Return every section, in the order of the page."""
    return [
        _fill(figures),
        _rates(figures),
        _ages(figures),
        _sizes(figures),
        _evictions(figures),
        _epochs(figures),
        *([_causes(figures)] if any(row["causes"] for row in figures.history.epochs) else []),
        _epoch_samples(figures),
        _sources(figures),
        _datasets(figures),
        *([_epoch_table(figures)] if figures.history.epochs else []),
        _people(figures),
    ]


def _section(title: str, *children: object, wide: bool = False) -> Markup:
    return element("section", element("h2", title), *children, class_="wide" if wide else "half")


def _figure(chart: Markup, words: str, colours: Mapping[str, str] | None = None) -> Markup:
    key = charts.legend(colours) if colours else None
    return element("figure", chart, key, element("figcaption", words))


def _fill(figures: Figures) -> Markup:
    title = "Used space and cap"
    if not figures.drawable:
        return _section(title, element("p", _NOTHING_YET, class_="quiet"))
    points = figures.history.points
    used = [(point["at"], point["used"]) for point in points]
    caps = [(point["at"], point["max_size"]) for point in points]
    x = axes.time_axis(points[0]["at"], points[-1]["at"])
    y = axes.bytes_axis(max(value for _, value in (*used, *caps)))
    now = f"Now {format_size(int(used[-1][1]))} of {format_size(int(caps[-1][1]))}, reservations included."
    return _section(title, _figure(charts.steps(x, y, used, caps), now, {"used": "line", "cap": "dashed"}))


def _rates(figures: Figures) -> Markup:
    title = "Pull rate"
    if not figures.drawable:
        return _section(title, element("p", _NOTHING_YET, class_="quiet"))
    rates = figures.rates()
    names = [f"{_span(rates, n)}: {format_size(int(value))}/s" for n, value in enumerate(rates.series["fetched"])]
    x, y = axes.time_axis(float(rates.edges[0]), float(rates.edges[-1])), axes.bytes_axis(rates.most, per="/s")
    chart = charts.stacked(x, y, rates.edges.tolist(), {"fetched": ("blue", rates.series["fetched"].tolist())}, names)
    return _section(title, _figure(chart, "Bytes fetched a second, for committed samples."))


def _evictions(figures: Figures) -> Markup:
    title, totals = "Evictions", figures.stats["evictions"]
    if not totals:
        return _section(title, element("p", "Nothing was evicted so far.", class_="quiet"))
    rows = [
        (
            row["dataset"],
            EVICTED_FOR.get(row["reason"], row["reason"]),
            row["policy"],
            f"{row['shards']:,}",
            _bytes(row),
        )
        for row in totals[:_MOST]
    ]
    table = _table(["dataset", "for", "policy", ">shards", ">bytes"], rows)
    if not figures.drawable:
        return _section(title, table)
    evictions = figures.evictions()
    used = {reason: values for reason, values in evictions.series.items() if values.any()}
    if not used:
        return _section(title, table)
    colours = {reason: _REASONS.get(reason, "green") for reason in used}
    names = [
        f"{_span(evictions, n)}: "
        + ", ".join(
            f"{format_size(int(values[n]))} for {EVICTED_FOR.get(reason, reason)}" for reason, values in used.items()
        )
        for n in range(len(evictions.edges) - 1)
    ]
    x, y = axes.time_axis(float(evictions.edges[0]), float(evictions.edges[-1])), axes.bytes_axis(evictions.most)
    series = {reason: (colours[reason], values.tolist()) for reason, values in used.items()}
    key = {EVICTED_FOR.get(reason, reason): colour for reason, colour in colours.items()}
    length = format_duration(float(evictions.edges[1] - evictions.edges[0]))
    chart = charts.stacked(x, y, evictions.edges.tolist(), series, names)
    return _section(title, _figure(chart, f"Bytes of shards evicted in each {length}, by reason.", key), table)


def _ages(figures: Figures) -> Markup:
    title, ages = "Shards by age", figures.age
    if ages is None:
        return _section(title, element("p", "No shards yet.", class_="quiet"))
    used = {name: values for name, values in ages.series.items() if values.any()}
    x, y = axes.age_axis(float(ages.edges[-1])), axes.bytes_axis(ages.most)
    names = [
        f"{format_duration(float(ages.edges[n]))} to {format_duration(float(ages.edges[n + 1]))} old: "
        + ", ".join(f"{format_size(int(values[n]))} {name}" for name, values in used.items())
        for n in range(len(ages.edges) - 1)
    ]
    series = {name: (_STATES[name], values.tolist()) for name, values in used.items()}
    chart = charts.stacked(x, y, ages.edges.tolist(), series, names)
    return _section(title, _figure(chart, "Bytes on disk by the time since the commit.", {n: _STATES[n] for n in used}))


def _sizes(figures: Figures) -> Markup:
    title, sizes = "Shards by size", figures.size
    if sizes is None:
        return _section(title, element("p", "No shards yet.", class_="quiet"))
    edges = sizes.edges.tolist()
    values = sizes.series["shards"].tolist()
    names = [
        f"{format_size(int(10 ** edges[n]))} to {format_size(int(10 ** edges[n + 1]))}: {counted(int(value), 'shard')}"
        for n, value in enumerate(values)
    ]
    x, y = axes.log_bytes_axis(10 ** edges[0], 10 ** edges[-1]), axes.count_axis(sizes.most, "shards")
    mean = format_size(figures.stats["shard_bytes"] // max(1, figures.stats["shards"]))
    words = f"{counted(figures.stats['shards'], 'shard')}, {mean} on average."
    return _section(title, _figure(charts.stacked(x, y, edges, {"shards": ("green", values)}, names), words))


def _epochs(figures: Figures) -> Markup:
    title, epochs = "Epochs", [row for row in figures.history.epochs if row["seconds"] is not None]
    if not epochs:
        return _section(title, element("p", "No epoch is complete yet.", class_="quiet"))
    # Three series, because loaders of other libraries wait in foreign code and cannot tell their
    # waits. As training time they would be wrong.
    durations = {name: [0.0] * len(epochs) for name in ("training", "waiting for batches", "waits unknown")}
    for number, row in enumerate(epochs):
        waited = row["waited"]
        if waited is None:
            durations["waits unknown"][number] = row["seconds"]
        else:
            durations["waiting for batches"][number] = min(waited, row["seconds"])
            durations["training"][number] = row["seconds"] - min(waited, row["seconds"])
    colours = {"training": "green", "waiting for batches": "orange", "waits unknown": "violet"}
    used = {name: (colours[name], values) for name, values in durations.items() if any(values)}
    first = len(figures.history.epochs) - len(epochs)
    x = axes.Axis(0.0, float(len(epochs)), _numbered(len(epochs)), "epochs in the order in which they ended")
    y = axes.seconds_axis(max(row["seconds"] for row in epochs), "time")
    names = [f"{_who(row)}: {format_duration(row['seconds'])}, {_waits(row)}" for row in epochs]
    chart = charts.stacked(x, y, list(range(len(epochs) + 1)), used, names)
    words = f"{counted(len(epochs), 'epoch')}, each from its start to its last batch; at most the newest {MOST_EPOCHS}."
    words += f" The time of {first} more is unknown." if first else ""
    return _section(title, _figure(chart, words, {name: colours[name] for name in used}))


def _causes(figures: Figures) -> Markup:
    """Return the chart of the waits of epochs by cause: the causes of most seconds, and all others together."""
    epochs = [row for row in figures.history.epochs if row["causes"] is not None]
    sums: dict[str, float] = {}
    for row in epochs:
        for cause, seconds in row["causes"].items():
            sums[cause] = sums.get(cause, 0.0) + seconds
    largest = sorted(sums, key=lambda cause: -sums[cause])[: len(_CAUSE_COLOURS) - 1]
    used = {
        cause: (colour, [row["causes"].get(cause, 0.0) for row in epochs])
        for cause, colour in zip(largest, _CAUSE_COLOURS, strict=False)
    }
    if len(sums) > len(largest):
        others = [sum(each for cause, each in row["causes"].items() if cause not in largest) for row in epochs]
        used["other causes"] = _CAUSE_COLOURS[-1], others
    x = axes.Axis(0.0, float(len(epochs)), _numbered(len(epochs)), "epochs in the order in which they ended")
    y = axes.seconds_axis(max(sum(row["causes"].values()) for row in epochs), "waits")
    names = [f"{_who(row)}: {_waits(row)}" for row in epochs]
    chart = charts.stacked(x, y, list(range(len(epochs) + 1)), used, names)
    last = epochs[-1]
    words = f"Waits by cause. The last epoch: {sentence(last['causes'], last['seconds'] or 0.0)}."
    return _section("Waits by cause", _figure(chart, words, {name: colour for name, (colour, _) in used.items()}))


_CAUSE_COLOURS = ("orange", "blue", "violet", "green")


def _epoch_samples(figures: Figures) -> Markup:
    title, epochs = "Samples of each epoch", figures.history.epochs
    if not epochs:
        return _section(title, element("p", "No epoch is complete yet.", class_="quiet"))
    new = [min(row["new"] or 0, row["samples"]) for row in epochs]
    before = [row["samples"] - count for row, count in zip(epochs, new, strict=True)]
    series = {"read before": ("blue", before), "new": ("orange", new)}
    used = {name: pair for name, pair in series.items() if any(pair[1])}
    x = axes.Axis(0.0, float(len(epochs)), _numbered(len(epochs)), "epochs in the order in which they ended")
    y = axes.count_axis(max(1, *(row["samples"] for row in epochs)), "samples")
    names = [
        f"{_who(row)}: {counted(row['samples'], 'sample')}, {count:,} new"
        for row, count in zip(epochs, new, strict=True)
    ]
    chart = charts.stacked(x, y, list(range(len(epochs) + 1)), used, names)
    words = "Samples that each epoch read. New samples are in shards that no epoch read before."
    return _section(title, _figure(chart, words, {name: colour for name, (colour, _) in used.items()}))


def _numbered(epochs: int) -> tuple[tuple[float, str], ...]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, epochs) if step * 8 >= epochs)
    return tuple((number - 0.5, str(number)) for number in range(step, epochs + 1, step))


def _epoch_table(figures: Figures) -> Markup:
    rows = [
        (
            row["dataset"],
            ", ".join(str(part) for part in (row["run"], row["epoch"]) if part not in (None, "")),
            time.strftime("%d %b %H:%M", time.localtime(row["ended"])),
            f"{row['samples']:,}",
            "" if row["new"] is None else f"{row['new']:,}",
            "" if row["batches"] is None else f"{row['batches']:,}",
            joined([element("span", part, class_="whole") for part in _waits(row).split(", ")], ", "),
        )
        for row in reversed(figures.history.epochs[-_EPOCH_ROWS:])
    ]
    table = _table(["dataset", "epoch", "ended", ">samples", ">new", ">batches", "waits"], rows)
    words = (
        "Waits: batches that were not ready when training asked for them, and the total time it waited, also for the"
    )
    words += " start of the epoch."
    return _section("Newest epochs", table, element("p", words, class_="quiet"), wide=True)


def _who(row: Mapping[str, Any]) -> str:
    run = f"{row['run']}, " if row["run"] else ""
    return f"{run}{row['dataset']}{'' if row['epoch'] is None else ' ' + str(row['epoch'])}"


def _waits(row: Mapping[str, Any]) -> str:
    if row["waited"] is None or row["waits"] is None:
        return "waits unknown"
    share = f", {100 * min(1.0, row['waited'] / row['seconds']):.1f} %" if row["seconds"] else ""
    cause = main_cause(row["causes"] or {}, row["seconds"] or 0.0)
    named = "" if cause is None else f", {cause}"
    return f"{counted(row['waits'], 'wait')}, {format_duration(row['waited'])}{share}{named}"


def _sources(figures: Figures) -> Markup:
    sources = figures.stats["sources"]
    if not sources:
        return _section("Sources", element("p", "No source was pulled.", class_="quiet"), wide=True)
    most = max([1.0] + [row["reuse"] or 0.0 for row in sources])
    blocks = []
    for row in sources[:_MOST]:
        skipped = f", {row['skipped']:,} skipped" if row["skipped"] else ""
        units, coverage, pass_number = newest_pass(row)
        progress = f"{units:,} of {counted(row['units'], 'unit')} drawn ({100 * coverage:.1f} %)"
        if row["reuse"] is None:
            used = "Nothing was fetched."
        else:
            fetched, served = format_size(row["fetched"]), format_size(row["served"])
            used = f"{fetched} fetched, {served} served to epochs: each byte was used {row['reuse']:.1f} times"
        blocks.append(
            element(
                "div",
                element("p", element("code", row["url"]), f" into {row['dataset']}"),
                element("p", f"Coverage: {progress} in pass {pass_number}{skipped}", class_="quiet"),
                charts.share(coverage, "blue"),
                element("p", f"Reuse: {used}", class_="quiet"),
                charts.share((row["reuse"] or 0.0) / most, "green") if len(sources) > 1 else None,
                class_="source",
            )
        )
    return _section("Coverage and reuse of each source", *blocks, _more(sources), wide=True)


def _datasets(figures: Figures) -> Markup:
    datasets = figures.stats["datasets"]
    rows = [
        (row["name"], name, f"{totals['shards']:,}", f"{totals['samples']:,}", _bytes(totals))
        for row in datasets[:_MOST]
        for name, totals in (row["formats"] or {"": dict.fromkeys(("shards", "samples", "bytes"), 0)}).items()
    ]
    table = _table(["dataset", "format", ">shards", ">samples", ">bytes"], rows)
    return _section(
        "Datasets", table if rows else element("p", "No datasets yet.", class_="quiet"), _more(datasets), wide=True
    )


def _people(figures: Figures) -> Markup:
    """Return the section on who uses the cache, and what is wrong with it."""
    stats = figures.stats
    lines: list[str] = [f"background pull of {row['url']}: {row['phase']}" for row in stats["pulls"][:_MOST]]
    lines += [
        f"{row['what']} (pid {row['pid']}) reads {row['dataset']} at version {row['version']}"
        for row in stats["leases"][:_MOST]
    ]
    # A process that reads has the cache open as well, and shall be listed once.
    reading = {row["pid"] for row in stats["leases"]}
    others = [row for row in stats["holders"] if row["pid"] not in reading]
    lines += [f"{row['what']} (pid {row['pid']}) has the cache open" for row in others[:_MOST]]
    lines += [
        f"{counted(row['draws'], 'damaged draw')} of {row['url']} will be fetched again"
        for row in stats["missing"][:_MOST]
    ]
    lines += [
        f"{time.strftime('%d %b %H:%M:%S', time.localtime(row['at']))}, {row['subject']}: {row['text']}"
        for row in stats["errors"]
    ]
    nobody = element("p", "No process reads or fills the cache now, and no error is known.", class_="quiet")
    return _section("Readers, pulls and errors", *([element("p", line) for line in lines] or [nobody]), wide=True)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a table. Columns whose name begins with ``>`` are set flush right."""
    kinds = ["n" if name[0] == ">" else "t" for name in columns]
    head = [element("th", name.removeprefix(">"), class_=kind) for name, kind in zip(columns, kinds, strict=True)]
    body = [
        element("tr", *(element("td", cell, class_=_kind(cell, kind)) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return element("table", element("thead", element("tr", *head)), element("tbody", *body))


def _kind(cell: object, kind: str) -> str:
    """Return the class of a cell."""
    if isinstance(cell, Markup):
        return kind
    # Only words that are too long for a phone may be broken inside; other cells stay readable.
    return f"{kind} long" if max(map(len, str(cell).split()), default=0) > _LONG else kind


def _more(rows: Sequence[object]) -> Markup | None:
    return element("p", f"and {len(rows) - _MOST} more", class_="quiet") if len(rows) > _MOST else None


def _bytes(row: Mapping[str, Any]) -> str:
    return format_size(row["bytes"])


def _span(bins: Bins, number: int) -> str:
    """Return from when to when a bin lasts, as text."""
    begin, end = (time.localtime(float(bins.edges[edge])) for edge in (number, number + 1))
    form = "%H:%M:%S" if bins.edges[-1] - bins.edges[0] < 86400 else "%d %b %H:%M"
    return f"{time.strftime(form, begin)} to {time.strftime(form, end)}"
