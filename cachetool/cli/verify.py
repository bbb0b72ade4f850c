"""``cachetool verify``: is every byte still what was written, and does the catalog agree with the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.errors import CorruptError
from cachetool.units import format_size, parse_fraction

__all__ = ["verify"]


def verify(
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend it: remove or set aside what is bad, rebuild a lost catalog, pull again."),
    ] = False,
    repull: Annotated[
        bool, typer.Option("--repull/--no-repull", help="Whether --repair fetches again what had to be removed.")
    ] = True,
    sample: Annotated[
        str,
        typer.Option("--sample", metavar="SHARE", help="Read the bytes of this share of the shards only, such as 5%."),
    ] = "100%",
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check every byte of every shard, and the catalog.

    Exit code 5 when something is wrong and not repaired. With --repair a bad shard that can be pulled again is removed
    and exactly its samples are pulled again (with --no-repull by the next pull); one that exists nowhere else is kept
    in quarantine, where no training reads it. A second repair changes nothing.

    \b
    Examples:
      cachetool verify
      cachetool verify --sample 5%
      cachetool verify --repair
    """
    from cachetool.cache.layout import cache_option
    from cachetool.verify import verify as check

    out = Output(as_json=as_json, quiet=quiet)
    share = parse_fraction(sample, what="--sample")
    with out.progress() as report:
        found = check(cache, repair=repair, repull=repair and repull, sample=share, report=report)
    if as_json:
        out.document(found.as_dict())
    else:
        if found.problems:
            out.table(
                ["shard", "file", "what is wrong", "what was done"],
                [(p.shard or "", p.file or "", p.what, p.action or "nothing") for p in found.problems],
            )
        if found.quarantine:
            out.table(
                ["in quarantine", "dataset", ">samples", ">bytes", "why"],
                [(q["id"], q["dataset"], q["samples"], format_size(q["bytes"]), q["why"]) for q in found.quarantine],
            )
        for url, count in found.reopened.items():
            out.line(f"{count} draws of {url} are open again" + (f", {found.repulled} pulled" if repull else ""))
        for text in (*(f"not of cachetool, left alone: {name}" for name in found.foreign), *found.notes):
            out.line(text)
        out.line(
            f"read {found.checked} of {found.shards} shards, {found.samples} samples, {format_size(found.bytes)}:"
            f" {_verdict(len(found.problems), sound=found.sound)}"
        )
    if not found.sound:
        if not as_json:
            option = "" if cache is None else cache_option(Path(cache))
            out.note(f"run: cachetool verify --repair{option}")
        raise typer.Exit(CorruptError.exit_code)


def _verdict(problems: int, *, sound: bool) -> str:
    if not problems:
        return "all as it was written"
    things = "1 thing" if problems == 1 else f"{problems} things"
    return f"{things} repaired" if sound else f"{things} wrong"
