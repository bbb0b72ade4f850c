"""The figures of a cache as metrics in the text format of Prometheus, version 0.0.4.

::

    # HELP cachetool_used_bytes Bytes that count against the cap.
    # TYPE cachetool_used_bytes gauge
    cachetool_used_bytes{cache="/data/cache"} 538067968

Counters end in ``_total`` and begin again when the catalog was rebuilt. The waits of a training program are gauges,
because they are those of its present epoch, or of its last one between two epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cachetool.core.causes import CAUSES

__all__ = ["Metric", "metrics", "text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One metric with all its values."""

    name: str
    kind: str
    """``gauge`` or ``counter``."""
    help: str
    values: list[tuple[dict[str, str], float]]
    """Labels and value."""


def metrics(figures: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a cache, from the dict form of its :class:`~cachetool.cache.stats.Stats`."""
    found: list[Metric] = []

    def add(name: str, kind: str, text: str, values: Iterable[tuple[Mapping[str, object], float]]) -> None:
        labelled = [
            ({"cache": figures["root"], **{key: str(each) for key, each in labels.items()}}, value)
            for labels, value in values
        ]
        if labelled:
            found.append(Metric(f"cachetool_{name}", kind, text, labelled))

    add("cap_bytes", "gauge", "The cap of the cache.", [({}, figures["max_size"])])
    add("used_bytes", "gauge", "Bytes that count against the cap.", [({}, figures["used"])])
    add(
        "charged_bytes", "gauge", "Bytes that count against the cap, by what takes them.",
        [({"kind": kind}, size) for kind, size in figures["charged"].items()],
    )  # fmt: skip
    add("disk_free_bytes", "gauge", "Free bytes of the disk.", [({}, figures["free_disk"])])
    formats = [
        ({"dataset": row["name"], "format": name}, totals)
        for row in figures["datasets"]
        for name, totals in row["formats"].items()
    ]
    for name, what in {"shards": "Shards", "samples": "Samples", "retiring": "Retiring shards"}.items():
        add(name, "gauge", f"{what} in the cache.", [(labels, totals[name]) for labels, totals in formats])
    add("shard_bytes", "gauge", "Bytes of the shards.", [(labels, totals["bytes"]) for labels, totals in formats])
    add(
        "share_ratio", "gauge", "Part of the cap that a dataset has as its share.",
        [({"dataset": row["name"]}, row["share"]) for row in figures["datasets"] if row["share"] is not None],
    )  # fmt: skip
    evictions = [({name: row[name] for name in ("dataset", "reason", "policy")}, row) for row in figures["evictions"]]
    add("evicted_shards_total", "counter", "Evicted shards.", [(labels, row["shards"]) for labels, row in evictions])
    add(
        "evicted_bytes_total", "counter", "Bytes of evicted shards.",
        [(labels, row["bytes"]) for labels, row in evictions],
    )  # fmt: skip
    sources = [({"source": row["url"], "dataset": row["dataset"]}, row) for row in figures["sources"]]
    add(
        "fetched_bytes_total", "counter", "Bytes that were fetched for committed samples.",
        [(labels, row["fetched"]) for labels, row in sources],
    )  # fmt: skip
    add(
        "served_bytes_total", "counter", "Bytes of values that epochs read.",
        [(labels, row["served"]) for labels, row in sources],
    )  # fmt: skip
    add(
        "coverage_ratio", "gauge", "Part of the present pass of a source that was drawn.",
        [(labels, row["coverage"]) for labels, row in sources],
    )  # fmt: skip
    add(
        "background_pulls", "gauge", "Background pulls by state.",
        [({"state": state}, count) for state, count in _counts(row["phase"] for row in figures["pulls"]).items()],
    )  # fmt: skip
    pulling = [
        ({name: row[name] for name in ("pid", "source", "dataset")}, row)
        for row in ({**each, "source": each["url"]} for each in figures["pulling"])
    ]
    for name, field, what in (
        ("pull_bytes", "bytes", "Bytes that a running pull has received."),
        ("pull_samples", "samples", "Samples that a running pull has committed."),
        ("pull_retries", "retries", "Requests that a running pull sent again."),
    ):
        add(name, "gauge", what, [(labels, row[field]) for labels, row in pulling])
    add(
        "pull_step_seconds",
        "gauge",
        "Seconds that the workers of a running pull spent on a step.",
        [({**labels, "step": step}, seconds) for labels, row in pulling for step, seconds in row["causes"].items()],
    )
    add("readers", "gauge", "Snapshots that processes read.", [({}, len(figures["leases"]))])
    for name, kind, what, values in _trainers(figures["trainers"]):
        add(name, kind, what, values)
    return found


def _trainers(
    trainers: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[str, str, str, list[tuple[Mapping[str, object], float]]]]:
    rows = [({"pid": row["pid"], "program": row["what"], "dataset": row["dataset"]}, row) for row in trainers]
    for name, field, what in (
        ("epoch", "epoch", "Number of the epoch of a training program."),
        ("epoch_seconds", "seconds", "Duration of the epoch so far."),
        ("epoch_batches", "batches", "Batches that the epoch delivered so far."),
        ("epoch_waits", "waits", "Batches of the epoch that were not ready."),
    ):
        yield name, "gauge", what, [(labels, row[field]) for labels, row in rows if row[field] is not None]
    yield (
        "epoch_wait_seconds", "gauge", "Waits of the epoch by cause; the sum is all it waited.",
        [
            ({**labels, "cause": cause}, row["causes"].get(cause, 0.0))
            for labels, row in rows
            for cause in CAUSES
        ],
    )  # fmt: skip
    yield (
        "epoch_longest_wait_seconds", "gauge", "A wait that this part of the waits does not exceed.",
        [
            ({**labels, "quantile": quantile}, seconds)
            for labels, row in rows
            for quantile, seconds in zip(("0.5", "0.95", "0.99"), row["longest"] or (), strict=False)
        ],
    )  # fmt: skip


def _counts(states: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in states:
        counts[state] = counts.get(state, 0) + 1
    return counts


def text(found: Iterable[Metric]) -> str:
    """Return metrics in the text format of Prometheus."""
    lines = []
    for name, kind, about, values in found:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for labels, value in values:
            shown = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
            lines.append(f"{name}{{{shown}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
