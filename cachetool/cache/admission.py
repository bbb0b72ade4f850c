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

from cachetool.cache.catalog import Catalog, Connection, allowance
from cachetool.cache.holders import Holder
from cachetool.cache.layout import Layout
from cachetool.cache.policies import choose
from cachetool.cache.removal import candidates, delete_trash, leaseholders, recover, retire, sweep
from cachetool.cache.room import Room
from cachetool.cache.usage import measure
from cachetool.errors import CapacityError, CapBlocked, CapTooSmall
from cachetool.units import format_duration, format_size

__all__ = ["FOLDER_SLACK", "admit", "minimum"]

FOLDER_SLACK = 8192
"""Bytes by which the cache's own folders may grow when a shard or listing is added: one block in each of two."""
_POLL = 0.2


def minimum(connection: Connection, layout: Layout, need: int) -> int:
    """The smallest cap under which ``need`` bytes fit into the cache when it holds no shard at all."""
    usage = measure(connection, layout)
    return usage.overhead + usage.listings + need + FOLDER_SLACK


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
            more = _catalog_growth(connection)
            cap, floor = (_meta(connection, key) for key in ("max_size", "min_free"))
            least = minimum(connection, layout, need)
            if least > cap:
                raise CapTooSmall(
                    f"a cap of {format_size(cap)} ({cap} bytes) cannot hold one shard of up to {format_size(need)};"
                    f" the minimum is {least} bytes: raise --max-size or lower --shard-size"
                )
            usage = measure(connection, layout)
            excess = usage.total + need + more + FOLDER_SLACK - cap
            # Reservations of others are on the disk already: a writer allocates its whole file first.
            lack = need + floor - layout.free_disk()
            if excess <= 0 and lack <= 0:
                if more:
                    _double_page_limit(connection)
                holder.register(connection)
                insert(connection)
                return
            retiring = connection.execute(
                "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
            ).fetchone()[0]
            if room.evict:
                # From now on the snapshots that trainers take make room as well (cachetool.cache.renewal).
                connection.execute(
                    "UPDATE jobs SET hungry = :need WHERE id = :job AND hungry < :need",
                    {"need": need + FOLDER_SLACK, "job": room.job},
                )
                victims = choose(
                    candidates(connection, seen=room.wait == math.inf),
                    excess=max(excess, lack) - int(retiring),
                    policy=room.policy,
                    min_epochs=room.min_epochs,
                    keep_job=room.job if room.keep_own else None,
                )
                retire(connection, [victim.id for victim in victims], reason="room", policy=room.policy)
            trash = sweep(connection, holder)
            held = leaseholders(connection)
            writers = connection.execute("SELECT count(*) FROM shards WHERE state = 'staging'").fetchone()[0]
        delete_trash(catalog, layout, trash)
        if trash:
            continue
        endless = room.wait == math.inf
        gains = endless or bool(retiring) or bool(held and room.evict) or bool(writers)
        who = _who(room, held, writers)
        if time.monotonic() < deadline and gains:
            if waiting is not None:
                waiting(f"waiting for room for up to {format_size(need)}: {who}")
            # Room that a writer gives back is there for a moment only: its next shard takes it again.
            pause = _POLL / 4 if writers else 5 * _POLL if endless else _POLL
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            continue
        if lack > 0 >= excess:
            raise CapacityError(
                f"the disk of {layout.root} has {format_size(layout.free_disk())} free, {format_size(need)} more are"
                f" needed above the floor of {format_size(floor)}; free some space or lower --min-free"
            )
        waited = f" after {format_duration(room.wait)}" if gains else ""
        raise CapBlocked(
            f"cache is full: {format_size(usage.total)} of {format_size(cap)} are taken, up to {format_size(need)} more"
            f" are needed{waited}: {who};\nraise --max-size, or make room with: cachetool evict --max-size"
            f" {max(0, cap - need - FOLDER_SLACK)}"
        )


def _who(room: Room, held: list[str], writers: int) -> str:
    """Who has the room, or why nothing goes."""
    if held:
        return "; ".join(held[:3])
    if not room.evict:
        return "nothing is evicted for this"
    if writers:
        return f"{writers} {'shard is' if writers == 1 else 'shards are'} being written"
    if room.wait == math.inf:
        return "no training has read yet what is in it"
    return "a pull never evicts its own samples" if room.keep_own else "nothing in it may be evicted"


def _meta(connection: Connection, key: str) -> int:
    return int(connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])


def _catalog_growth(connection: Connection) -> int:
    """Bytes that the catalog's allowance must grow by, once three quarters of its page limit are in use; else 0."""
    limit = _meta(connection, "pages")
    # Another process may have raised it: the pragma is this connection's alone.
    connection.execute(f"PRAGMA max_page_count = {limit}")
    count = int(connection.execute("PRAGMA page_count").fetchone()[0])
    return allowance(2 * limit) - allowance(limit) if 4 * count > 3 * limit else 0


def _double_page_limit(connection: Connection) -> None:
    limit = 2 * _meta(connection, "pages")
    connection.execute("UPDATE meta SET value = ? WHERE key = 'pages'", (limit,))
    connection.execute(f"PRAGMA max_page_count = {limit}")
