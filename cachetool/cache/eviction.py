"""The ``evict`` command: plan, retire and delete shards, and an error that says why a target was not reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cachetool.cache.catalog import Catalog, Connection
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.policies import Victim, check_policy, choose, protected, shards_of
from cachetool.cache.removal import (
    LeasedShards,
    Removal,
    candidates,
    delete_trash,
    held_back,
    recover,
    retire,
    sweep_all,
)
from cachetool.cache.usage import measure
from cachetool.core.errors import CapBlocked, CapTooSmall
from cachetool.core.names import Id
from cachetool.core.text import count
from cachetool.core.units import format_size

__all__ = ["evict_to"]

_DELETING = 30.0
"""Maximum seconds to wait for files that other processes are deleting."""


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
    check_policy(policy)
    limits: dict[str, Any] = {"dataset": dataset, "min_epochs": min_epochs}
    # A bad policy or an impossible target is refused before anything is touched.
    with catalog.read() as connection:
        plan = _plan(connection, layout, target, policy=policy, **limits)
        if dry_run:
            return _foreseen(connection, layout, plan, target, **limits)
    own = holder()
    # First recovery, because leases and trash of dead processes hold bytes that need no victim.
    recover(catalog, layout, lambda: own)
    with catalog.write() as connection:
        plan = _plan(connection, layout, target, policy=policy, **limits)
        retire(connection, plan, reason="evict", policy=policy)
        trash = sweep_all(connection, own)
    shards, samples, freed = _delete_until(catalog, layout, own, trash, target, wait)
    with catalog.read() as connection:
        used, leased = measure(connection, layout).total, held_back(connection)
        if used > target:
            stuck = [row["bytes"] for row in connection.execute("SELECT bytes FROM shards WHERE state = 'trash'")]
            error = _not_reached(connection, used, target, leased, stuck=stuck, **limits)
            if shards:
                gone = f"{count(shards, 'shard')} with {count(samples, 'sample')}, {format_size(freed)}"
                # The error alone would hide that shards are already deleted.
                error.done = f"evicted {gone}; the cache takes {format_size(used)} now"
            raise error
    return Removal(
        tuple(plan),
        removed_shards=shards,
        removed_samples=samples,
        freed=freed,
        used=used,
        max_size=target,
        retiring_shards=len(leased.sizes),
        retiring_bytes=sum(leased.sizes),
        blocked=leased.who,
    )


def _foreseen(connection: Connection, layout: Layout, plan: Sequence[Victim], target: int, **limits: Any) -> Removal:
    """Return the result that an eviction would have if no reader or writer ended meanwhile."""
    used, chosen = measure(connection, layout).total, {victim.id for victim in plan}
    leased = held_back(connection, also=chosen)
    going = connection.execute("SELECT id, bytes FROM shards WHERE state IN ('retiring', 'trash')").fetchall()
    freed = sum(victim.bytes for victim in plan) + sum(row["bytes"] for row in going) - sum(leased.sizes)
    short = ""
    if used - freed > target:
        short = str(_not_reached(connection, used - freed, target, leased, chosen=chosen, **limits))
    return Removal(
        tuple(plan),
        removed_shards=0,
        removed_samples=0,
        freed=0,
        used=used,
        max_size=target,
        retiring_shards=len(leased.sizes),
        retiring_bytes=sum(leased.sizes),
        blocked=leased.who,
        unreached=short,
    )


def _plan(connection: Connection, layout: Layout, target: int, *, policy: str, **limits: Any) -> Sequence[Victim]:
    usage = measure(connection, layout)
    least = usage.overhead + usage.listings
    if least > target:
        raise CapTooSmall(
            f"cannot shrink the cache to {format_size(target)}: it needs {format_size(least)} even without shards;"
            f" the minimum is --max-size {least}"
        )
    leaving = connection.execute(
        "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
    ).fetchone()[0]
    # The bytes of shards that already leave need no further victims.
    excess = usage.total - int(leaving) - target
    return choose(candidates(connection), excess=excess, policy=policy, **limits)


def _delete_until(
    catalog: Catalog, layout: Layout, holder: Holder, trash: list[Id], target: int, wait: float
) -> tuple[int, int, int]:
    """Delete ``trash`` until the target is reached. For ``wait`` seconds also delete shards whose readers end."""
    began = time.monotonic()
    shards = samples = freed = 0
    while True:
        done = delete_trash(catalog, layout, trash, edge=True)
        shards, samples, freed = shards + done[0], samples + done[1], freed + done[2]
        with catalog.read() as connection:
            used = measure(connection, layout).total
            others = "SELECT 1 FROM shards WHERE state = 'trash' AND holder IS NOT ? LIMIT 1"
            deleting = connection.execute(others, (holder.id,)).fetchone() is not None
        # Files that another process is deleting at this moment will be gone soon. If that process
        # dies, `recover` below takes over its trash.
        if used <= target or time.monotonic() - began >= (max(wait, _DELETING) if deleting else wait):
            return shards, samples, freed
        time.sleep(0.05 if deleting else 0.2)
        recover(catalog, layout, lambda: holder)
        with catalog.write() as connection:
            trash = sweep_all(connection, holder)


def _not_reached(
    connection: Connection,
    used: int,
    target: int,
    leased: LeasedShards,
    *,
    chosen: Collection[str] = (),
    stuck: Sequence[int] = (),
    **limits: Any,
) -> CapBlocked | CapTooSmall:
    """Return the error that names all shards that stay, and the reason for each.

    ``chosen`` are the victims that did not retire yet. ``stuck`` are the sizes of evicted shards whose files still
    exist.
    """
    writing = [row["bytes"] for row in connection.execute("SELECT bytes FROM shards WHERE state = 'staging'")]
    why = []
    if leased.sizes:
        why.append(f"{shards_of(leased.sizes)} that stay until their readers end: {'; '.join(leased.who[:3])}")
    if writing:
        why.append(f"{shards_of(writing)} being written; try again later")
    if stuck:
        why.append(f"{shards_of(stuck)} already evicted, but not yet deleted")
    why += protected((row for row in candidates(connection) if row.id not in chosen), **limits)
    text = f"cannot shrink the cache to {format_size(target)}, {format_size(used)} remain"
    # The caller may try again later in these cases, so the class of the error differs.
    if leased.sizes or writing or stuck:
        return CapBlocked(f"{text}:\n{'; '.join(why)}")
    return CapTooSmall(f"{text}: no other shard can be evicted;\n{'; '.join(why)}")
