"""Admission of a writer: the room for a complete shard is reserved before its first byte is written.

The loop of :func:`admit`; each round is one transaction::

    fits under the cap and leaves the floor of free disk?  -> the caller's row is inserted: admitted
    can never fit?                                         -> CapTooSmall
    victims allowed?                                       -> they retire; those without readers are deleted; next round
    no space can be made now                                -> wait for leases and writers to end, at most `wait`;
                                                              then CapBlocked

A reservation in steps would deadlock two writers that each hold half of the room they need.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachetool.cache.catalog import Catalog, Connection, allowance
from cachetool.cache.holders import Holder, is_alive
from cachetool.cache.layout import Layout, cache_option
from cachetool.cache.policies import Candidate, Room, choose, protected
from cachetool.cache.removal import candidates, delete_trash, leaseholders, recover, retire, sweep
from cachetool.cache.shares import Portion, divided, kept_free, portions
from cachetool.cache.usage import measure
from cachetool.core.errors import CapacityError, CapBlocked, CapTooSmall
from cachetool.core.names import Id
from cachetool.core.units import format_duration, format_size

__all__ = ["admit", "allow_growth", "asked", "folder_slack", "minimum", "refuse_full_disk"]

# Seconds between two rounds of a writer that waits. A writer that waits without end looks less
# often, and one that waits for another writer more often; see `admit`.
_POLL = 0.2
_RAISE = "raise --max-size or lower --shard-size"


def folder_slack(layout: Layout) -> int:
    """Return the bytes by which the cache's own folders may grow for one new shard or listing: one disk block for each
    of two folders."""
    return 2 * layout.disk_block


def asked(connection: Connection, layout: Layout, need: int) -> int:
    """Return ``need`` plus the bytes by which the cache's folders and its catalog may grow."""
    return need + _catalog_growth(connection) + folder_slack(layout)


def minimum(connection: Connection, layout: Layout, need: int) -> int:
    """Return the smallest cap in bytes under which ``need`` bytes fit into the cache when it holds no shard."""
    usage = measure(connection, layout)
    return usage.overhead + usage.listings + asked(connection, layout, need)


def refuse_full_disk(layout: Layout, need: int, floor: int) -> None:
    """Raise :class:`CapacityError` when ``need`` bytes would leave less than ``floor`` bytes of the disk free."""
    free = layout.free_disk()
    if need + floor > free:
        raise CapacityError(
            f"the disk of {layout.root} has {format_size(free)} free, but {format_size(need)} are needed"
            f"{f' besides the {format_size(floor)} of --min-free' if floor else ''};"
            f" free some space{' or lower --min-free' if floor else ''}"
        )


def admit(
    catalog: Catalog,
    layout: Layout,
    holder: Holder,
    need: int,
    insert: Callable[[Connection], None],
    *,
    room: Room,
    dataset: str | None = None,
    waiting: Callable[[str], None] | None = None,
) -> None:
    """Reserve ``need`` bytes. ``insert`` runs inside the transaction that finds these bytes free.

    ``dataset`` is that of the shards to be written: if it has a share of the cap, they must fit into it.

    While the writer waits, ``waiting`` is called in each round with a line that names what and whom it waits for.

    Raises :class:`CapTooSmall`, :class:`CapBlocked`, or :class:`CapacityError` when the disk itself is full.
    """
    deadline = time.monotonic() + room.wait
    while True:
        # In each round, because a process that died while this writer waited may have left a
        # reservation, a lease or trash. Its bytes become free here.
        recover(catalog, layout, lambda: holder)
        with catalog.write() as connection:
            shortage = _reserve(connection, layout, holder, need, insert, room=room, dataset=dataset)
        if shortage is None:
            return
        # Outside of the transaction, because unlinking a large shard is slow and would keep every
        # trainer from its snapshot. The bytes count as free only afterwards, so the loop asks
        # again.
        delete_trash(catalog, layout, shortage.trash)
        if shortage.trash:
            continue
        who = _who(catalog, room, shortage)
        if time.monotonic() < deadline and shortage.may_pass:
            if waiting is not None:
                waiting(f"waiting for up to {format_size(need)} of free space: {who}")
            # Room that another writer gives back is free only for a moment, because that writer's
            # next shard takes it again. So this writer looks four times as often.
            pause = _POLL / 4 if shortage.writers else 5 * _POLL if room.wait == math.inf else _POLL
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            continue
        if shortage.disk_is_full:
            refuse_full_disk(layout, need, shortage.floor)
            # No error: another process freed disk space after the transaction measured it, so try
            # again.
            continue
        raise _blocked(catalog, layout, room, shortage, who)


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A reservation that did not fit: the reason, and what its transaction did about it."""

    cap: int
    """The cap in bytes."""
    floor: int
    """Bytes of the disk that must stay free."""
    used: int
    """Bytes charged against the cap."""
    wanted: int
    """Bytes that the writer needs, including growth of the folders and the catalog."""
    disk_is_full: bool
    """True when the disk is full although the cap has room, or when no eviction would free enough of the disk."""
    may_pass: bool
    """True when room may become free because readers or writers finish."""
    readers: list[str]
    """One line for each holder of a lease."""
    writers: int
    """Number of shards being written."""
    trash: list[Id]
    """Shards whose files must be deleted now."""
    portion: Portion | None = None
    """The portion of the dataset, if it is full."""


def _reserve(
    connection: Connection,
    layout: Layout,
    holder: Holder,
    need: int,
    insert: Callable[[Connection], None],
    *,
    room: Room,
    dataset: str | None,
) -> _Shortage | None:
    """Try once to reserve the bytes, inside a transaction.

    Call ``insert`` and return None if the bytes fit. Otherwise retire the shards that may be evicted and return the
    shortage.
    """
    # The growth of the catalog is charged before the first row that needs it. A catalog that reached its page limit
    # inside a commit would fail a shard that is already written.
    more = _catalog_growth(connection)
    cap, floor = (_meta(connection, key) for key in ("max_size", "min_free"))
    usage = measure(connection, layout)
    wanted = asked(connection, layout, need)
    _refuse_small_cap(usage.overhead + usage.listings + wanted, need, cap, advise=room.advise)
    excess = usage.total + wanted - cap
    shared = portions(connection)
    portion = None if dataset is None else shared.get(dataset)
    over = 0
    if portion is not None:
        _refuse_small_share(portion, need, advise=room.advise)
        over = portion.used + need - portion.limit
    elif dataset is not None:
        # Shares are kept free. A dataset without one would otherwise fill the cache, and those with one could not grow.
        limits = sum(each.limit for each in shared.values())
        _refuse_small_rest(usage.overhead + usage.listings + wanted, need, cap, limits, advise=room.advise)
        excess += kept_free(shared)
    # Only this writer's own bytes are added here. Reservations of other writers already take space on the disk, because
    # a writer allocates its complete file first.
    lack = need + floor - layout.free_disk()
    if excess <= 0 and lack <= 0 and over <= 0:
        if more:
            _double_page_limit(connection)
        # In the same transaction as the row: recovery deletes a staging row whose holder is not in the catalog, and
        # without this line the row of a living writer would look orphaned.
        holder.register(connection)
        insert(connection)
        return None
    retiring = connection.execute(
        "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
    ).fetchone()[0]
    # An infinite wait marks a pull without an end (`--follow`). Such a pull has special rules below.
    endless, readers = room.wait == math.inf, leaseholders(connection)
    # Do not evict anything if the disk stays too full even after the eviction of every shard. The user would lose the
    # cache and gain nothing.
    hopeless = lack > _evictable(connection)
    # A background pull lives up to 5 s longer than its killed trainer, and the trainer's leases end at once. Without
    # this check the pull evicted up to 4 of 13 shards of the epoch that the user wants to resume. The check must be in
    # this transaction, because the leases end in another transaction after the trainer's death.
    evict = room.evict and not hopeless and (room.trainer is None or is_alive(connection, layout.holders, room.trainer))
    if evict:
        # From now on the snapshots that trainers take also free space for this pull (cachetool.cache.renewal), because
        # a snapshot of everything would otherwise keep the cache full.
        connection.execute(
            "UPDATE jobs SET bytes_wanted = :need WHERE id = :job AND bytes_wanted < :need",
            {"need": wanted, "job": room.job},
        )
    # While somebody reads, only snapshots release shards for a following pull. Workers that also retired shards here
    # replaced 33 % of the cache in an epoch instead of the 10 % of `--renew`.
    if evict and not (endless and readers):
        # The bytes of retiring shards become free when their readers end, so they need no further victims.
        missing = max(excess, lack) - int(retiring)
        # A pull without an end evicts only shards that a snapshot contained. Otherwise it downloads for ever and evicts
        # samples that no epoch saw (5.7 GB in nine minutes from 300 samples).
        own, others = divided(candidates(connection, seen=endless), shared, dataset)
        keep = room.job if room.keep_own else None
        how: dict[str, Any] = {"policy": room.policy, "min_epochs": room.min_epochs, "keep_job": keep}
        victims = list(choose(own, excess=0 if portion is None else over - portion.leaving, **how))
        # What the cap lacks beside is taken from datasets without a share, which may have filled the cache before.
        for rows in (others, [row for row in own if row.id not in {victim.id for victim in victims}]):
            victims += choose(rows, excess=missing - sum(victim.bytes for victim in victims), **how)
        # In this transaction, so that no other writer counts the same room as its own, and no new snapshot leases a
        # victim between the choice and the retirement.
        retire(connection, victims, reason="room", policy=room.policy, job=room.job)
    trash = sweep(connection, holder)
    writers = connection.execute("SELECT count(*) FROM shards WHERE state = 'staging'").fetchone()[0]
    return _Shortage(
        cap=cap,
        floor=floor,
        used=usage.total,
        wanted=wanted,
        disk_is_full=(excess <= 0 and over <= 0) or hopeless,
        may_pass=endless or bool(retiring) or bool(readers and evict) or bool(writers),
        readers=readers,
        writers=writers,
        trash=trash,
        portion=portion if over > 0 else None,
    )


def _refuse_small_rest(least: int, need: int, cap: int, shared: int, *, advise: bool) -> None:
    """Raise :class:`CapTooSmall` when ``need`` bytes can never fit beside the shares of other datasets."""
    if shared and least > cap - shared:
        raise CapTooSmall(
            f"the shares of other datasets leave {format_size(max(0, cap - shared))} of the cap, which is too small:"
            f" this write needs up to {format_size(need)}, the other files of the cache {format_size(least - need)}"
            + (f";\nlower --share of another dataset, {_RAISE}" if advise else "")
        )


def _refuse_small_share(portion: Portion, need: int, *, advise: bool) -> None:
    """Raise :class:`CapTooSmall` when ``need`` bytes can never fit into the share of a dataset."""
    if need > portion.limit:
        raise CapTooSmall(
            f"the share of dataset {portion.dataset!r}, {format_size(portion.limit)} of the cap, is too small: this"
            f" write needs up to {format_size(need)}" + (f";\nraise --share, {_RAISE}" if advise else "")
        )


def _refuse_small_cap(least: int, need: int, cap: int, *, advise: bool) -> None:
    """Raise :class:`CapTooSmall` when ``need`` bytes can never fit under the cap, because ``least`` are the minimum."""
    if least > cap:
        raise CapTooSmall(
            f"a cap of {format_size(cap)} is too small: this write needs up to {format_size(need)}, the other files of"
            f" the cache {format_size(least - need)}" + (f";\nthe minimum is {least} bytes: {_RAISE}" if advise else "")
        )


def _blocked(catalog: Catalog, layout: Layout, room: Room, shortage: _Shortage, who: str) -> CapBlocked:
    """Return the error for a full cache."""
    waited = f" (waited {format_duration(room.wait)})" if shortage.may_pass else ""
    if (portion := shortage.portion) is not None:
        return CapBlocked(
            f"dataset {portion.dataset!r} has taken its share of the cap: {format_size(portion.used)} of"
            f" {format_size(portion.limit)} are used, up to {format_size(shortage.wanted)} more are needed{waited}:"
            f" {who}"
            + (";\nraise --share or --max-size" if (room.advise and not room.keep_own) or not room.evict else "")
        )
    advice = f";\nraise --max-size{_evict_hint(catalog, layout, shortage.used, shortage.cap - shortage.wanted)}"
    used = f"{format_size(shortage.used)} of {format_size(shortage.cap)} are used"
    return CapBlocked(
        f"cache is full: {used}, up to {format_size(shortage.wanted)} more are needed{waited}: {who}"
        + (advice if room.advise and not room.keep_own else "")
    )


def _evictable(connection: Connection) -> int:
    """Return the bytes that evictions and the ends of other writers can free at most."""
    return int(connection.execute("SELECT coalesce(sum(bytes), 0) FROM shards").fetchone()[0])


def _evict_hint(catalog: Catalog, layout: Layout, used: int, target: int) -> str:
    """Return the command that frees space, or an empty string when eviction cannot make enough."""
    if used - sum(row.bytes for row in _ready(catalog)) > target:
        return ""
    return f", or free space with: cachetool evict --max-size {target}{cache_option(layout.root)}"


def _ready(catalog: Catalog) -> list[Candidate]:
    """Return the ready shards."""
    with catalog.read() as connection:
        return candidates(connection)


def _who(catalog: Catalog, room: Room, shortage: _Shortage) -> str:
    """Return who holds the room, or the reason why no shard may be evicted."""
    if shortage.readers:
        return "; ".join(shortage.readers[:3])
    if not room.evict:
        return "no shard is evicted for this write"
    if shortage.writers:
        return f"{shortage.writers} {'shard is' if shortage.writers == 1 else 'shards are'} being written"
    if room.wait == math.inf:
        return "no training has read the cached samples yet"
    own = room.job if room.keep_own else None
    kept = protected(_ready(catalog), min_epochs=room.min_epochs, keep_job=own)
    return f"{', '.join(kept)} cannot be evicted" if kept else "there is nothing to evict"


def _meta(connection: Connection, key: str) -> int:
    return int(connection.execute(f"SELECT {key} FROM cache").fetchone()[0])


def _catalog_growth(connection: Connection) -> int:
    """Return the bytes by which the catalog's allowance must grow, or 0 while at most three quarters of its page limit
    are in use."""
    limit = _meta(connection, "pages")
    count = int(connection.execute("PRAGMA page_count").fetchone()[0])
    # One quarter of the limit stays free for transactions that are not admitted: leases, claims,
    # events. These must not fail because the catalog is full.
    return allowance(2 * limit) - allowance(limit) if 4 * count > 3 * limit else 0


def allow_growth(connection: Connection) -> None:
    """Raise the catalog's page limit when it is nearly reached, for rows that are written without admission."""
    if _catalog_growth(connection):
        _double_page_limit(connection)


def _double_page_limit(connection: Connection) -> None:
    """Double the catalog's page limit, in its row and in this connection."""
    limit = 2 * _meta(connection, "pages")
    connection.execute("UPDATE cache SET pages = ?", (limit,))
    # SQLite keeps this limit in the connection, not in the file. Other processes read the row when
    # they begin a writing transaction.
    connection.execute(f"PRAGMA max_page_count = {limit}")
