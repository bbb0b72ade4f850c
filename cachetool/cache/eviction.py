"""Shrinking a cache on request: plan, retire, delete, and an honest word when the target was not reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cachetool.cache.catalog import Catalog, Connection
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.policies import Victim, choose
from cachetool.cache.removal import Removal, candidates, delete_trash, leaseholders, recover, retire, sweep
from cachetool.cache.usage import measure
from cachetool.errors import CapBlocked, CapTooSmall
from cachetool.units import format_size

__all__ = ["evict_to"]

_DELETING = 30.0
"""Seconds to wait at most for what other processes are unlinking."""


def evict_to(
    catalog: Catalog,
    layout: Layout,
    holder: Callable[[], Holder],
    target: int,
    *,
    policy: str,
    dataset: str | None,
    min_epochs: int,
    dry_run: bool,
    wait: float,
) -> Removal:
    """Delete shards until at most ``target`` bytes are charged; see :meth:`CacheDir.evict`."""
    wanted = {"policy": policy, "dataset": dataset, "min_epochs": min_epochs}
    with catalog.read() as connection:  # refused before anything is touched
        plan = _plan(connection, layout, target, **wanted)
        if dry_run:
            used = measure(connection, layout).total
            return Removal(tuple(plan), 0, 0, 0, used, target, tuple(leaseholders(connection)))
    own = holder()
    recover(catalog, layout, lambda: own)
    with catalog.write() as connection:
        plan = _plan(connection, layout, target, **wanted)
        retire(connection, [victim.id for victim in plan], reason="evict", policy=policy)
        trash = sweep(connection, own)
    shards, samples, freed = _delete_until(catalog, layout, own, trash, target, wait)
    with catalog.read() as connection:
        result = Removal(tuple(plan), shards, samples, freed, measure(connection, layout).total, target)
    if result.used > target:
        raise _not_reached(catalog, result)
    return result


def _plan(connection: Connection, layout: Layout, target: int, **wanted: Any) -> Sequence[Victim]:
    usage = measure(connection, layout)
    least = usage.overhead + usage.listings
    if least > target:
        raise CapTooSmall(
            f"cannot shrink the cache to {format_size(target)}: without any shard it takes {least} bytes;"
            f" ask for {least} or more"
        )
    leaving = connection.execute(
        "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
    ).fetchone()[0]
    return choose(candidates(connection), excess=usage.total - int(leaving) - target, **wanted)


def _delete_until(
    catalog: Catalog, layout: Layout, holder: Holder, trash: list[str], target: int, wait: float
) -> tuple[int, int, int]:
    """Delete ``trash``, and for ``wait`` seconds whatever else readers let go of, until the target is reached."""
    began = time.monotonic()
    shards = samples = freed = 0
    while True:
        done = delete_trash(catalog, layout, trash)
        shards, samples, freed = shards + done[0], samples + done[1], freed + done[2]
        with catalog.read() as connection:
            used = measure(connection, layout).total
            deleting = connection.execute("SELECT 1 FROM shards WHERE state = 'trash' LIMIT 1").fetchone() is not None
        # What another process is unlinking at this moment is as good as gone; if that one dies, it is recovered here.
        if used <= target or time.monotonic() - began >= (max(wait, _DELETING) if deleting else wait):
            return shards, samples, freed
        time.sleep(0.05 if deleting else 0.2)
        recover(catalog, layout, lambda: holder)
        with catalog.write() as connection:
            trash = sweep(connection, holder)


def _not_reached(catalog: Catalog, result: Removal) -> CapBlocked | CapTooSmall:
    with catalog.read() as connection:
        held = leaseholders(connection)
        count = dict(tuple(row) for row in connection.execute("SELECT state, count(*) FROM shards GROUP BY state"))
    sizes = f"{result.used} bytes are charged, {result.max_size} were asked for"
    if count.get("retiring") and held:
        return CapBlocked(f"{count['retiring']} shards go when their readers end ({sizes}): {'; '.join(held[:3])}")
    if count.get("staging"):
        return CapBlocked(f"{count['staging']} shards are being written ({sizes}); stop the pull, or try again")
    return CapTooSmall(
        f"cannot shrink the cache to {format_size(result.max_size)}: nothing more may be evicted ({sizes})"
    )
