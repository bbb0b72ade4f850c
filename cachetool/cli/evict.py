"""``cachetool evict``: make the cache smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count, fail
from cachetool.core.errors import CapacityError
from cachetool.core.options import Address, MinEpochs, On, Policy, RoomWait
from cachetool.core.units import format_size, parse_duration

if TYPE_CHECKING:
    from cachetool.cache import Removal

__all__ = ["evict"]


def evict(
    max_size: Annotated[
        str,
        typer.Option("--max-size", metavar="SIZE", help="Evict until the cache takes at most SIZE; the cap stays."),
    ],
    policy: Policy = "oldest",
    dataset: DatasetOption = None,
    min_epochs: MinEpochs = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which shards would be evicted.")] = False,
    wait: RoomWait = "0s",
    cache: CacheOption = None,
    on: On = "local",
    address: Address = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Evict shards until the cache takes at most --max-size.

    Shards that a training run still reads are not in its next epoch, and are deleted when its readers end. If the cache
    is still too large then, the command ends with exit code 4 and names the readers. --dry-run changes nothing and ends
    with the exit code that the eviction would have now.

    With --on ray, the command shrinks the cache of each node to --max-size.

    \b
    Examples:
      cachetool evict --max-size 20GB
      cachetool evict --max-size 20GB --policy most-used --dry-run
    """
    # Imported here, so that `cachetool evict --help` does not load the catalog.
    from cachetool.api import open_cache, runs_on_cluster

    out = Output(as_json=as_json, quiet=quiet)
    if runs_on_cluster(on, cache, address=address):
        from cachetool.cli import nodes

        arguments = {
            "max_size": max_size,
            "policy": policy,
            "dataset": dataset,
            "min_epochs": min_epochs,
            "dry_run": dry_run,
            "wait": parse_duration(wait),
        }
        nodes.evict(out, cache, arguments, address)
        return
    with open_cache(cache, create=False, notify=out.note) as opened:
        try:
            removal = opened.evict(
                max_size,
                policy=policy,
                dataset=dataset,
                min_epochs=min_epochs,
                dry_run=dry_run,
                wait=parse_duration(wait),
            )
        except CapacityError as error:
            # Shards were evicted before the command failed. The user must learn of them; as JSON they are in the
            # error's document.
            if error.done and not as_json:
                out.line(error.done)
            raise
    if as_json:
        out.document(removal.as_dict())
    else:
        _print(out, removal, dry_run=dry_run)
    # The result is printed first: it is valid although the size was not reached.
    if removal.unreached:
        raise typer.Exit(fail("CapacityError", removal.unreached, CapacityError.exit_code, as_json=False))


def _print(out: Output, removal: Removal, *, dry_run: bool) -> None:
    """Print the result as text: a table of the plan for ``--dry-run``, then one line."""
    if dry_run:
        out.table(
            ["shard", "dataset", ">samples", ">bytes", "reason"],
            [(v.id, v.dataset, v.samples, format_size(v.bytes), v.reason) for v in removal.plan],
        )
        shards = count(len(removal.plan), "shard")
        samples = count(sum(victim.samples for victim in removal.plan), "sample")
        size = sum(victim.bytes for victim in removal.plan)
    else:
        shards, samples = count(removal.removed_shards, "shard"), count(removal.removed_samples, "sample")
        size = removal.freed
    out.line(
        f"{'would evict' if dry_run else 'evicted'} {shards} with {samples}, {format_size(size)};"
        f" the cache takes {format_size(removal.used)} now"
    )
    if removal.retiring_shards:
        retiring = f"{count(removal.retiring_shards, 'shard')}, {format_size(removal.retiring_bytes)}"
        out.line(f"{retiring}, {'would be' if dry_run else 'are'} deleted when their readers end:")
        for reader in removal.blocked:
            out.line(f"  {reader}")
