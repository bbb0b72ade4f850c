"""``cachetool evict``: make the cache smaller, oldest shards first."""

from __future__ import annotations

from typing import Annotated

import typer

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, MinEpochsOption, PolicyOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.units import format_size, parse_duration

__all__ = ["evict"]


def evict(
    max_size: Annotated[
        str,
        typer.Option("--max-size", metavar="SIZE", help="Evict until the cache takes at most this; its cap stays."),
    ],
    policy: PolicyOption = "oldest",
    dataset: DatasetOption = None,
    min_epochs: MinEpochsOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go and how much it frees.")] = False,
    wait: Annotated[
        str, typer.Option("--wait", metavar="TIME", help="How long to wait for shards that readers still hold.")
    ] = "0s",
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Evict shards until the cache takes at most --max-size.

    Shards that a training run still reads are left out of its next epoch and go when it is done with them; the command
    then ends with exit code 4 and says who holds them.

    \b
    Examples:
      cachetool evict --max-size 20GB
      cachetool evict --max-size 20GB --policy most-used --dry-run
    """
    from cachetool.api import open_cache

    out = Output(as_json=as_json, quiet=quiet)
    with open_cache(cache, create=False, notify=out.note) as opened:
        removal = opened.evict(
            max_size,
            policy=policy,
            dataset=dataset,
            min_epochs=min_epochs,
            dry_run=dry_run,
            wait=parse_duration(wait, what="--wait"),
        )
    if as_json:
        out.document(removal.as_dict())
        return
    if dry_run:
        out.table(
            ["shard", "dataset", ">samples", ">bytes", "why this one"],
            [(v.id, v.dataset, v.samples, format_size(v.bytes), v.reason) for v in removal.plan],
        )
        samples = count(sum(victim.samples for victim in removal.plan), "sample")
        total = format_size(sum(victim.bytes for victim in removal.plan))
        out.line(
            f"would evict {count(len(removal.plan), 'shard')} with {samples}, {total};"
            f" the cache takes {format_size(removal.used)} now"
        )
        for reader in removal.blocked:
            out.line(f"they stay until their reader ends: {reader}")
        return
    out.line(
        f"evicted {count(removal.removed_shards, 'shard')} with {count(removal.removed_samples, 'sample')},"
        f" {format_size(removal.freed)}; the cache takes {format_size(removal.used)} now"
    )
