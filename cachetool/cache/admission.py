"""Who may write: room for the whole of it is reserved before the first byte.

The loop of :func:`admit`, each turn one transaction::

    fits under the cap and over the free-disk floor?  -> the caller's row is inserted: admitted
    could never fit?                                  -> CapTooSmall
    victims allowed?                                  -> they retire; what nobody reads is deleted; again
    nothing to gain now                               -> wait for leases and writers to end, at most `wait`; CapBlocked

Reserving step by step instead would deadlock two writers that each hold half of what they need.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cachetool.cache.catalog import Catalog, Connection, allowance
from cachetool.cache.holders import Holder, is_alive
from cachetool.cache.layout import Layout, cache_option
from cachetool.cache.policies import Candidate, Room, choose, protected
from cachetool.cache.removal import candidates, delete_trash, leaseholders, recover, retire, sweep
from cachetool.cache.usage import measure
from cachetool.core.errors import CapacityError, CapBlocked, CapTooSmall
from cachetool.core.names import Id
from cachetool.core.units import format_duration, format_size

__all__ = ["admit", "allow_growth", "asked", "folder_slack", "minimum", "refuse_full_disk"]

_POLL = 0.2
_RAISE = "raise --max-size or lower --shard-size"


def folder_slack(layout: Layout) -> int:
    """Bytes by which the cache's own folders may grow when a shard or listing is added: one block in each of two."""
    return 2 * layout.disk_block


def asked(connection: Connection, layout: Layout, need: int) -> int:
    """What ``need`` bytes come to with what the cache's folders and its catalog may grow by."""
    return need + _catalog_growth(connection) + folder_slack(layout)


def minimum(connection: Connection, layout: Layout, need: int) -> int:
    """The smallest cap under which ``need`` bytes fit into the cache when it holds no shard at all."""
    usage = measure(connection, layout)
    return usage.overhead + usage.listings + asked(connection, layout, need)


def refuse_full_disk(layout: Layout, need: int, floor: int) -> None:
    """Raise :class:`CapacityError` when ``need`` bytes would leave less than ``floor`` of the disk free."""
    free = layout.free_disk()
    if need + floor > free:
        raise CapacityError(
            f"the disk of {layout.root} has {format_size(free)} free, {format_size(need)} more are needed above the"
            f" floor of {format_size(floor)}; free some space{' or lower --min-free' if floor else ''}"
        )


def admit(
    catalog: Catalog,
    layout: Layout,
    holder: Holder,
    need: int,
    insert: Callable[[Connection], None],
    *,
    room: Room,
    waiting: Callable[[str], None] | None = None,
) -> None:
    """Reserve ``need`` bytes: ``insert`` runs inside the transaction that found them free.

    ``waiting`` is told again and again, while this waits, for what and for whom.
    Raises :class:`CapTooSmall`, :class:`CapBlocked`, or :class:`CapacityError` when the disk itself is full.
    """
    deadline = time.monotonic() + room.wait
    while True:
        recover(catalog, layout, lambda: holder)
        with catalog.write() as connection:
            shortage = _reserve(connection, layout, holder, need, insert, room=room)
        if shortage is None:
            return
        delete_trash(catalog, layout, shortage.trash)
        if shortage.trash:
            continue
        who = _who(catalog, room, shortage)
        if time.monotonic() < deadline and shortage.may_pass:
            if waiting is not None:
                waiting(f"waiting for room for up to {format_size(need)}: {who}")
            # Room that a writer gives back is there for a moment only: its next shard takes it again.
            pause = _POLL / 4 if shortage.writers else 5 * _POLL if room.wait == math.inf else _POLL
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            continue
        if shortage.disk_is_full:
            refuse_full_disk(layout, need, shortage.floor)
            continue  # somebody freed some just now
        raise _blocked(catalog, layout, room, shortage, who)


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Why a reservation did not fit, and what its transaction did about it."""

    cap: int
    floor: int
    used: int
    """Bytes charged."""
    wanted: int
    """Bytes asked for, with what the folders and the catalog may grow by."""
    disk_is_full: bool
    """True when the disk is full and the cap is not, or when no eviction would free enough."""
    may_pass: bool
    """True when room may become free because readers or writers go on."""
    readers: list[str]
    """One line for each holder of a lease."""
    writers: int
    """Shards being written."""
    trash: list[Id]
    """Shards whose files are to be deleted now."""


def _reserve(
    connection: Connection,
    layout: Layout,
    holder: Holder,
    need: int,
    insert: Callable[[Connection], None],
    *,
    room: Room,
) -> _Shortage | None:
    """One round of :func:`admit`, inside its transaction: ``insert`` where the bytes fit, and None; else retire what
    may go, and say what is short."""
    more = _catalog_growth(connection)
    cap, floor = (_meta(connection, key) for key in ("max_size", "min_free"))
    _refuse_small_cap(connection, layout, need, cap, advise=room.advise)
    usage = measure(connection, layout)
    wanted = asked(connection, layout, need)
    excess = usage.total + wanted - cap
    # Reservations of others are on the disk already: a writer allocates its whole file first.
    lack = need + floor - layout.free_disk()
    if excess <= 0 and lack <= 0:
        if more:
            _double_page_limit(connection)
        holder.register(connection)
        insert(connection)
        return None
    retiring = connection.execute(
        "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
    ).fetchone()[0]
    endless, readers = room.wait == math.inf, leaseholders(connection)
    hopeless = lack > _evictable(connection)  # nothing goes for a disk that would be too full all the same
    # A trainer that was killed has no lease any more, and its pull may take seconds to end: in this transaction, since
    # that lease is given back in another one, after its death.
    evict = room.evict and not hopeless and (room.trainer is None or is_alive(connection, layout.holders, room.trainer))
    if evict:
        # From now on the snapshots that trainers take make room as well (cachetool.cache.renewal).
        connection.execute(
            "UPDATE jobs SET bytes_wanted = :need WHERE id = :job AND bytes_wanted < :need",
            {"need": wanted, "job": room.job},
        )
    # Those who read let go of the share that was asked for.
    if evict and not (endless and readers):
        victims = choose(
            candidates(connection, seen=endless),
            excess=max(excess, lack) - int(retiring),
            policy=room.policy,
            min_epochs=room.min_epochs,
            keep_job=room.job if room.keep_own else None,
        )
        retire(connection, victims, reason="room", policy=room.policy, job=room.job)
    trash = sweep(connection, holder)
    writers = connection.execute("SELECT count(*) FROM shards WHERE state = 'staging'").fetchone()[0]
    return _Shortage(
        cap=cap,
        floor=floor,
        used=usage.total,
        wanted=wanted,
        disk_is_full=excess <= 0 or hopeless,
        may_pass=endless or bool(retiring) or bool(readers and evict) or bool(writers),
        readers=readers,
        writers=writers,
        trash=trash,
    )


def _refuse_small_cap(connection: Connection, layout: Layout, need: int, cap: int, *, advise: bool) -> None:
    """Raise :class:`CapTooSmall` when ``need`` bytes could never fit under the cap."""
    least = minimum(connection, layout, need)
    if least > cap:
        raise CapTooSmall(
            f"a cap of {format_size(cap)} cannot hold what is to be written, up to {format_size(need)} beside"
            f" {format_size(least - need)}" + (f";\nthe minimum is {least} bytes: {_RAISE}" if advise else "")
        )


def _blocked(catalog: Catalog, layout: Layout, room: Room, shortage: _Shortage, who: str) -> CapBlocked:
    """The error for a cache that is full."""
    waited = f" after {format_duration(room.wait)}" if shortage.may_pass else ""
    advice = f";\nraise --max-size{_evict_hint(catalog, layout, shortage.used, shortage.cap - shortage.wanted)}"
    taken = f"{format_size(shortage.used)} of {format_size(shortage.cap)} are taken"
    return CapBlocked(
        f"cache is full: {taken}, up to {format_size(shortage.wanted)} more are needed{waited}: {who}"
        + (advice if room.advise and not room.keep_own else "")
    )


def _evictable(connection: Connection) -> int:
    """Bytes that evictions and the ends of other writers could free at most."""
    return int(connection.execute("SELECT coalesce(sum(bytes), 0) FROM shards").fetchone()[0])


def _evict_hint(catalog: Catalog, layout: Layout, used: int, target: int) -> str:
    """The command that makes room; nothing where it could not, since what is left may not go."""
    if used - sum(row.bytes for row in _ready(catalog)) > target:
        return ""
    return f", or make room with: cachetool evict --max-size {target}{cache_option(layout.root)}"


def _ready(catalog: Catalog) -> list[Candidate]:
    with catalog.read() as connection:
        return candidates(connection)


def _who(catalog: Catalog, room: Room, shortage: _Shortage) -> str:
    """Who has the room, or why nothing goes."""
    if shortage.readers:
        return "; ".join(shortage.readers[:3])
    if not room.evict:
        return "nothing is evicted for this"
    if shortage.writers:
        return f"{shortage.writers} {'shard is' if shortage.writers == 1 else 'shards are'} being written"
    if room.wait == math.inf:
        return "no training has read yet what is in it"
    own = room.job if room.keep_own else None
    kept = protected(_ready(catalog), min_epochs=room.min_epochs, keep_job=own)
    return f"nothing may go of {', '.join(kept)}" if kept else "there is nothing to evict"


def _meta(connection: Connection, key: str) -> int:
    return int(connection.execute(f"SELECT {key} FROM cache").fetchone()[0])


def _catalog_growth(connection: Connection) -> int:
    """Bytes that the catalog's allowance must grow by, once three quarters of its page limit are in use; else 0."""
    limit = _meta(connection, "pages")
    count = int(connection.execute("PRAGMA page_count").fetchone()[0])
    return allowance(2 * limit) - allowance(limit) if 4 * count > 3 * limit else 0


def allow_growth(connection: Connection) -> None:
    """Raise the catalog's limit where it is nearly reached, for what is written into it without being admitted."""
    if _catalog_growth(connection):
        _double_page_limit(connection)


def _double_page_limit(connection: Connection) -> None:
    limit = 2 * _meta(connection, "pages")
    connection.execute("UPDATE cache SET pages = ?", (limit,))
    connection.execute(f"PRAGMA max_page_count = {limit}")
