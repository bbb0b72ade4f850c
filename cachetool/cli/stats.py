"""``cachetool stats``: how full the cache is, what it holds, who uses it."""

from __future__ import annotations

import os
import time
from typing import Any

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.units import format_size

__all__ = ["stats"]


def stats(
    dataset: DatasetOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show how full the cache is, and with what.

    For each dataset its shards by format; for each source how much of it was drawn; and who reads the cache now.

    \b
    Examples:
      cachetool stats
      cachetool stats --cache /data/cache --json
    """
    from cachetool.api import open_cache

    out = Output(as_json=as_json, quiet=quiet)
    with open_cache(cache, create=False, notify=out.note) as opened:
        found = opened.stats(dataset).as_dict()
    if as_json:
        out.document(found)
        return
    _print(out, found)


def _print(out: Output, found: dict[str, Any]) -> None:
    """The tables of ``stats``, from its JSON form."""
    share = 100 * found["used"] / found["max_size"] if found["max_size"] else 0.0
    out.line(f"cache {os.path.abspath(found['root'])}")
    out.line(
        f"{format_size(found['used'])} of {format_size(found['max_size'])} used ({share:.0f} %){_reserved(found)},"
        f" {count(found['samples'], 'sample')} in {count(found['shards'], 'shard')}{_retiring(found)},"
        f" {found['evicted']} evicted so far,"
        f" {format_size(found['free_disk'])} of disk free"
    )
    out.table(
        ["dataset", "format", ">shards", ">samples", ">bytes", ">retiring", ">epochs"],
        [
            (
                row["name"],
                name,
                each["shards"],
                each["samples"],
                format_size(each["bytes"]),
                each["retiring"],
                _epochs(row["epochs"]),
            )
            for row in found["datasets"]
            for name, each in (
                row["formats"] or {"": dict.fromkeys(("shards", "retiring", "samples", "bytes"), 0)}
            ).items()
        ],
    )
    if found["sources"]:
        out.table(
            ["source", "dataset", ">drawn", ">of", ">coverage", ">skipped", ">pass", ">seed"],
            [
                (
                    row["url"],
                    row["dataset"],
                    row["drawn"],
                    row["units"],
                    f"{100 * row['coverage']:.1f} %",
                    row["skipped"],
                    row["pass"],
                    row["seed"],
                )
                for row in found["sources"]
            ],
        )
    if found["pulls"]:
        out.table(
            ["background pull", "dataset", "by", "state", ">samples", "since"],
            [
                (
                    row["url"],
                    row["dataset"],
                    f"pid {row['pid']}",
                    row["phase"],
                    row["samples"],
                    time.strftime("%H:%M:%S", time.localtime(time.time() - row["seconds"])),
                )
                for row in found["pulls"]
            ],
        )
    if found["evictions"]:
        out.table(
            ["dataset", "evicted for", "policy", ">shards", ">samples", ">bytes"],
            [
                (row["dataset"], row["reason"], row["policy"], row["shards"], row["samples"], format_size(row["bytes"]))
                for row in found["evictions"]
            ],
        )
    if found["reuse"] is not None and found["served"]:
        fetched, served = format_size(found["fetched"]), format_size(found["served"])
        out.line(f"{fetched} fetched, {served} served to epochs: each byte {found['reuse']:.1f} times")
    for row in found["quarantine"]:
        size = format_size(row["bytes"])
        out.line(f"in quarantine: shard {row['id']}, {count(row['samples'], 'sample')}, {size}: {row['why']}")
    if found["quarantine"]:
        size = format_size(sum(row["bytes"] for row in found["quarantine"]))
        out.line(f"what is in quarantine takes {size}; cachetool verify --repair --purge deletes it")
    for row in found["missing"]:
        out.line(f"{count(row['samples'], 'sample')} of {row['url']} are missing; cachetool verify --repair pulls them")
    for row in found["errors"][:1]:
        out.line(f"last error, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['at']))}: {row['text']}")
    if found["leases"]:
        out.table(
            ["reader", "program", "dataset", ">version", "since"],
            [
                (
                    f"pid {row['pid']}",
                    row["what"],
                    row["dataset"],
                    row["version"],
                    time.strftime("%H:%M:%S", time.localtime(row["taken"])),
                )
                for row in found["leases"]
            ],
        )
    reading = {row["pid"] for row in found["leases"]}
    others = [f"pid {row['pid']} ({row['what']})" for row in found["holders"] if row["pid"] not in reading]
    if others:
        out.line(f"other processes: {', '.join(others)}")


def _reserved(found: dict[str, Any]) -> str:
    return f", {format_size(found['reserved'])} of it reserved for shards being written" if found["reserved"] else ""


def _retiring(found: dict[str, Any]) -> str:
    size = format_size(found["retiring_bytes"])
    return f" ({found['retiring']} of them, {size}, go when their readers end)" if found["retiring"] else ""


def _epochs(served: list[int]) -> str:
    """How many epochs the shards of a dataset served: ``3``, or ``0-3``."""
    least, most = served
    return str(most) if least == most else f"{least}-{most}"
