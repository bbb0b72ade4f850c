"""``cachetool stats``: the fill, contents and users of the cache."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.core.errors import UsageError
from cachetool.core.options import Address, On
from cachetool.core.text import EVICTED_FOR
from cachetool.core.units import format_size
from cachetool.proc.disk import disk_error, parse_location
from cachetool.proc.folders import replacing, resolved

if TYPE_CHECKING:
    from cachetool.cache import CacheDir

__all__ = ["stats"]


def stats(
    dataset: DatasetOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it live until Ctrl-C; without a terminal, a line every 2 s.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page with charts instead: used space, pull rate, evictions, shards, sources, epochs.",
        ),
    ] = None,
    cache: CacheOption = None,
    on: On = "local",
    address: Address = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the size and the contents of the cache.

    The tables show the shards of each dataset by format, how much of each source was drawn, and the processes that read
    the cache now.

    With --on ray, there is one row for the cache of each node, and a row with their sum.

    \b
    Examples:
      cachetool stats
      cachetool stats --cache /data/cache --json
      cachetool stats --html report.html
    """
    # Imported here, so that `cachetool stats --help` does not load the catalog.
    from cachetool.api import open_cache, runs_on_cluster

    if watch and (as_json or html is not None):
        raise UsageError(
            f"--watch cannot be used with {'--json' if as_json else '--html'}, because it never ends; leave one of them"
            " out"
        )
    if html is not None and not html.strip():
        raise UsageError("the name of the file to write is empty; name one with --html")
    html = None if html is None else parse_location(html, what="--html")
    out = Output(as_json=as_json, quiet=quiet)
    if runs_on_cluster(on, cache, address=address):
        from cachetool.cli import nodes

        if watch or html is not None:
            raise UsageError(
                f"{'--watch' if watch else '--html'} looks at one cache; run it on the node, without --on ray"
            )
        nodes.stats(out, cache, dataset, address)
        return
    with open_cache(cache, create=False, notify=out.note) as opened:
        if watch:
            from cachetool.cli.watch import watch as watch_cache

            watch_cache(opened, dataset, out)
            return
        figures = opened.stats(dataset).as_dict() if html is None else _write_page(opened, dataset, Path(html))
    if as_json:
        out.document(figures)
    elif html is None:
        _print(out, figures)
    else:
        out.line(f"wrote {html}")


def _write_page(cache: CacheDir, dataset: str | None, path: Path) -> dict[str, Any]:
    """Write the page of ``--html``, complete or not at all. Return the figures of ``stats``."""
    from cachetool.cache.layout import refuse_in_cache
    from cachetool.report.numbers import figures
    from cachetool.report.page import page

    target = _plain_file(path)
    # A file in the cache would not be charged, and `verify` reports it as foreign.
    refuse_in_cache(target, "--html")
    page_figures = figures(cache, dataset)
    try:
        # A temporary file and a rename: a browser that reloads the page never sees half of it. Not durable, because the
        # page can be made again.
        with replacing(target, durable=False) as file:
            file.write(page(page_figures).encode())
    except OSError as error:
        # A full disk is reported as such by the program; everything else is a wrong --html.
        if disk_error(error) is not None:
            raise
        raise UsageError(f"cannot write --html {str(path)!r}: {error.strerror}") from error
    return {**page_figures.stats, "html": str(path)}


def _plain_file(path: Path) -> Path:
    """Return the file to replace: the target of a link, so that the link itself stays.

    Raises :class:`UsageError` for a device, pipe or socket, which would be replaced by a file.
    """
    if str(path) == "-":
        raise UsageError("--html - is not the name of a file; the page is written to a file only: name one")
    try:
        mode = path.stat().st_mode
    # A new file, or a link to a file that does not exist yet.
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"cannot write --html {str(path)!r}: {error.strerror}") from error
    else:
        # A folder is refused later, by the system, in better words.
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UsageError(f"cannot write --html {str(path)!r}: it is a device, a pipe or a socket; name a file")
    return resolved(path, "--html")


def _print(out: Output, figures: dict[str, Any]) -> None:
    """Print the tables of ``stats``, from its JSON form."""
    _print_fill(out, figures)
    _print_charged(out, figures["charged"])
    _print_datasets(out, figures["datasets"])
    _print_sources(out, figures["sources"])
    _print_pulls(out, figures["pulls"])
    _print_evictions(out, figures["evictions"])
    if figures["reuse"] is not None and figures["served"]:
        fetched, served = format_size(figures["fetched"]), format_size(figures["served"])
        out.line(f"{fetched} fetched, {served} served to epochs: each byte was used {figures['reuse']:.1f} times")
    _print_damage(out, figures)
    _print_processes(out, figures)


def _print_fill(out: Output, figures: dict[str, Any]) -> None:
    """Print how full the cache and its disk are."""
    share = 100 * figures["used"] / figures["max_size"] if figures["max_size"] else 0.0
    used, max_size = format_size(figures["used"]), format_size(figures["max_size"])
    out.line(f"cache {os.path.abspath(figures['root'])}")
    out.line(f"{used} of {max_size} used ({share:.0f} %){_reserved(figures)}")
    out.line(f"{count(figures['samples'], 'sample')} in {count(figures['shards'], 'shard')}{_retiring(figures)}")
    floor = f", {format_size(figures['min_free'])} kept free (--min-free)" if figures["min_free"] else ""
    out.line(
        f"{count(figures['evicted'], 'shard')} evicted so far, {format_size(figures['free_disk'])} of disk free{floor}"
    )
    values, nbytes = (sum(dataset[name] for dataset in figures["datasets"]) for name in ("payload", "bytes"))
    # Below, no shard is compressed, or it does not pay.
    if nbytes and values >= 1.05 * nbytes:
        ratio = values / nbytes
        # Listings and the catalog take a part of the cap that is not compressed.
        held = format_size(int(ratio * max(0, figures["max_size"] - figures["overhead"] - figures["listings"])))
        out.line(f"{format_size(values)} of values, {ratio:.1f} times what they take; the cap holds about {held}")


def _print_charged(out: Output, charged: Mapping[str, int]) -> None:
    """Print the parts of the used bytes, for a comparison with ``du``."""
    from cachetool.cache.usage import WORDS

    out.table(["space used by", ">bytes"], [(WORDS[name], format_size(size)) for name, size in charged.items() if size])


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:g} %"


def _print_datasets(out: Output, datasets: Sequence[Mapping[str, Any]]) -> None:
    shared = any(row["share"] is not None for row in datasets)
    out.table(
        ["dataset", *([">share"] * shared), "format", ">shards", ">samples", ">bytes", ">retiring", ">epochs"],
        [
            (
                row["name"],
                *([_share(row["share"])] * shared),
                name,
                totals["shards"],
                totals["samples"],
                format_size(totals["bytes"]),
                totals["retiring"],
                _epochs(row["epochs"]),
            )
            for row in datasets
            for name, totals in (
                row["formats"] or {"": dict.fromkeys(("shards", "retiring", "samples", "bytes"), 0)}
            ).items()
        ],
    )


def _print_sources(out: Output, sources: Sequence[Mapping[str, Any]]) -> None:
    from cachetool.cache.stats import newest_pass

    if not sources:
        return
    out.table(
        ["source", "dataset", ">drawn", ">of units", ">coverage", ">skipped", ">pass", ">seed"],
        [
            (
                row["url"],
                row["dataset"],
                units_drawn,
                row["units"],
                f"{100 * coverage:.1f} %",
                row["skipped"],
                pass_number,
                row["seed"],
            )
            for row in sources
            for units_drawn, coverage, pass_number in (newest_pass(row),)
        ],
    )
    for row in sources:
        if row["cut"] > 1:
            parts = ",".join(map(str, row["parts"]))
            out.line(f"{row['url']}: parts {parts} of {row['cut']}, listing {row['listing'][:16]}")


def _print_pulls(out: Output, pulls: Sequence[Mapping[str, Any]]) -> None:
    if not pulls:
        return
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
            for row in pulls
        ],
    )


def _print_evictions(out: Output, evictions: Sequence[Mapping[str, Any]]) -> None:
    if not evictions:
        return
    out.table(
        ["dataset", "evicted for", "policy", ">shards", ">samples", ">bytes"],
        [
            (
                row["dataset"],
                EVICTED_FOR.get(row["reason"], row["reason"]),
                row["policy"],
                row["shards"],
                row["samples"],
                format_size(row["bytes"]),
            )
            for row in evictions
        ],
    )


def _print_damage(out: Output, figures: dict[str, Any]) -> None:
    """Print missing shards, draws to fetch again, and the last error."""
    from cachetool.cache.layout import cache_option

    if figures["gone"]:
        repair = f"cachetool verify --repair{cache_option(Path(figures['root']))}"
        out.line(f"{count(figures['gone'], 'shard')} missing on disk; run: {repair}")
    for row in figures["missing"]:
        out.line(f"{count(row['draws'], 'damaged draw')} of {row['url']} will be fetched again by the next pull")
    for row in figures["errors"][:1]:
        out.line(f"last error, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['at']))}: {row['text']}")


def _print_processes(out: Output, figures: Mapping[str, Any]) -> None:
    """Print the processes that read and fill the cache, what they wait for, and the others that have it open."""
    leases, trainers, pulling, holders = (figures[name] for name in ("leases", "trainers", "pulling", "holders"))
    if leases:
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
                for row in leases
            ],
        )
    for row in pulling:
        out.line(f"pid {row['pid']} pulls {row['url']}: {row['sentence']}")
    for row in trainers:
        when = "this epoch" if row["running"] else "last epoch"
        out.line(f"pid {row['pid']} ({row['what']}), {when}: {row['sentence']}")
    # A reader has the cache open too; it is named once.
    reading = {row["pid"] for row in leases}
    others = [f"pid {row['pid']} ({row['what']})" for row in holders if row["pid"] not in reading]
    if others:
        out.line(f"other processes: {', '.join(others)}")


def _reserved(figures: dict[str, Any]) -> str:
    return (
        f", {format_size(figures['reserved'])} of it reserved for shards being written" if figures["reserved"] else ""
    )


def _retiring(figures: dict[str, Any]) -> str:
    size = format_size(figures["retiring_bytes"])
    return (
        f" ({figures['retiring']} of them, {size}, are deleted when their readers end)" if figures["retiring"] else ""
    )


def _epochs(served: list[int]) -> str:
    """Return how many epochs the shards of a dataset served: ``3``, or ``0-3``."""
    least, most = served
    return str(most) if least == most else f"{least}-{most}"
