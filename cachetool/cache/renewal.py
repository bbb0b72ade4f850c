"""How a full cache keeps renewing although every snapshot leases all that is in it.

If room were made only when a writer asks, a trainer whose snapshot leases every shard would let one shard an epoch go.
So while a live pull wants room, whoever takes a snapshot first retires enough of the oldest shards that the free
and the retiring bytes together reach the share ``renew`` of the cap: they are in no new snapshot, and go when the old
ones end. A second snapshot finds the share reached and adds nothing.

A full cache is never full to the last byte: what is free and too little for the shard that waits counts as nothing.
With shards of a sixteenth of the cap, a tenth would otherwise come to one shard an epoch (6 %) instead of two. The
share is one of what shards may take: of a small cap, a third may be the catalog's.

What no snapshot contained yet stays: this one is to show it. Where nearly all is such, as in a cache that was filled
before anybody read from it, nothing can go, and the epoch after this one would see nothing new. Then the snapshot shows
an older version instead: the newest shards, up to the share, are left for the next one, before which this one has
shown what the next can let go.
"""

from __future__ import annotations

from cachetool.cache.catalog import Connection
from cachetool.cache.layout import Layout
from cachetool.cache.policies import choose
from cachetool.cache.removal import candidates, retire
from cachetool.cache.usage import measure

__all__ = ["top_up"]


def top_up(connection: Connection, layout: Layout, dataset: str, current: int) -> int:
    """The version that a new snapshot of ``dataset`` is to lease, inside the transaction that takes it; mostly the
    ``current`` one.

    Before, shards are retired for the hungriest live pull: at least one when none is leaving, never the last ready
    one. Where too few were shown for that, the version is an older one, without the newest shards.
    """
    job = connection.execute(
        "SELECT id, renew, policy, min_epochs, keep_own, hungry FROM jobs WHERE hungry > 0 ORDER BY renew DESC LIMIT 1"
    ).fetchone()
    if job is None:
        return current
    cap = int(connection.execute("SELECT value FROM meta WHERE key = 'max_size'").fetchone()[0])
    leaving = connection.execute("SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')")
    usage = measure(connection, layout)
    free = cap - usage.total
    usable = free if free >= job["hungry"] else 0
    lack = int(job["renew"] * (cap - usage.overhead - usage.listings)) - usable - int(leaving.fetchone()[0])
    if lack <= 0:
        return current
    shown = candidates(connection, seen=True)
    if sum(row.bytes for row in shown) < lack and (older := _holding_back(connection, dataset, lack)) is not None:
        return older
    ready = connection.execute("SELECT count(*) FROM shards WHERE state = 'ready'").fetchone()[0]
    victims = choose(
        shown,
        excess=lack,
        policy=job["policy"],
        min_epochs=job["min_epochs"],
        keep_job=job["id"] if job["keep_own"] else None,
    )
    chosen = [victim.id for victim in victims][: max(0, ready - 1)]
    return retire(connection, chosen, reason="renewal", policy=job["policy"], job=job["id"]) or current


def _holding_back(connection: Connection, dataset: str, share: int) -> int | None:
    """The newest version before the last ``share`` bytes of what no snapshot contained; None where there is none that
    still shows something, and shows nothing that was taken out of the cache since (it may have been corrupt)."""
    unseen = connection.execute(
        "SELECT since, bytes FROM shards WHERE state = 'ready' AND dataset = ?"
        " AND since > coalesce((SELECT value FROM meta WHERE key = 'seen'), 0) ORDER BY since DESC",
        (dataset,),
    )
    for since, nbytes in unseen:
        share -= nbytes
        if share <= 0:
            older = int(since) - 1
            break
    else:
        return None
    shown, gone = (
        connection.execute(f"SELECT 1 FROM shards WHERE dataset = ? AND {which} LIMIT 1", (dataset, older)).fetchone()
        for which in ("state = 'ready' AND since <= ?", "state = 'retiring' AND until > ?")
    )
    return older if shown and not gone else None
