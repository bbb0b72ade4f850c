"""How a full cache keeps renewing although every snapshot leases all that is in it.

If room were made only when a writer asks, a trainer whose snapshot leases every shard would let one shard an epoch go.
So while a live pull wants room, whoever takes a snapshot first retires enough of the oldest shards that the free
and the retiring bytes together reach the share ``renew`` of the cap: they are in no new snapshot, and go when the old
ones end. A second snapshot finds the share reached and adds nothing.

A full cache is never full to the last byte: what is free and too little for the shard that waits counts as nothing.
With shards of a sixteenth of the cap, a tenth would otherwise come to one shard an epoch (6 %) instead of two. The
share is one of what shards may take: of a small cap, a third may be the catalog's.

What no snapshot contained yet stays: this one is to show it. Where nearly all is such, as in a cache that was filled
before anybody read from it, nothing can go, and the epoch after this one would see nothing new. Then an epoch that can
do with less (``sparing``) is of an older version: the newest shards, up to the share, are left for the next one, before
which this one has shown what the next can let go.
"""

from __future__ import annotations

from cachetool.cache.catalog import Connection
from cachetool.cache.layout import Layout
from cachetool.cache.policies import choose
from cachetool.cache.removal import candidates, retire
from cachetool.cache.usage import measure

__all__ = ["top_up"]


def top_up(connection: Connection, layout: Layout, current: int, *, sparing: str | None) -> int:
    """The version that a new snapshot is to lease, inside the transaction that takes it; mostly the ``current`` one.

    Before, shards are retired for the hungriest live pull: at least one when none is leaving, never the last ready
    one. Where too few were shown for that, the version is an older one, without the newest shards of the dataset
    ``sparing``.
    """
    job = connection.execute(
        "SELECT id, renew, policy, min_epochs, keep_own, bytes_wanted FROM jobs"
        " WHERE bytes_wanted > 0 ORDER BY renew DESC LIMIT 1"
    ).fetchone()
    if job is None:
        return current
    cap = int(connection.execute("SELECT max_size FROM cache").fetchone()[0])
    leaving = connection.execute("SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')")
    usage = measure(connection, layout)
    free = cap - usage.total
    usable = free if free >= job["bytes_wanted"] else 0
    lack = int(job["renew"] * (cap - usage.overhead - usage.listings)) - usable - int(leaving.fetchone()[0])
    if lack <= 0:
        return current
    shown = candidates(connection, seen=True)
    if sparing is not None and not job["keep_own"] and sum(row.bytes for row in shown) < lack:
        older = _holding_back(connection, sparing, job["renew"], lack)
        if older is not None:
            return older
    ready = connection.execute("SELECT count(*) FROM shards WHERE state = 'ready'").fetchone()[0]
    victims = choose(
        shown,
        excess=lack,
        policy=job["policy"],
        min_epochs=job["min_epochs"],
        keep_job=job["id"] if job["keep_own"] else None,
    )
    return (
        retire(connection, victims[: max(0, ready - 1)], reason="renewal", policy=job["policy"], job=job["id"])
        or current
    )


def _holding_back(connection: Connection, dataset: str, renew: float, lack: int) -> int | None:
    """The newest version before the last of what no snapshot contained, up to the dataset's part of the share.

    None where there is none that shows something new, shows most of the dataset, and shows nothing that was taken out
    of the cache since: it may have been corrupt.
    """
    rows = connection.execute(
        "SELECT since, bytes, since > (SELECT seen FROM cache) FROM shards"
        " WHERE state = 'ready' AND dataset = ? ORDER BY since DESC",
        (dataset,),
    ).fetchall()
    total = sum(nbytes for _, nbytes, _ in rows)
    share, left, older = min(lack, int(renew * total)), 0, None
    for since, nbytes, unseen in rows:
        if not unseen:
            return None  # nothing new would be left to show
        if older is not None and since <= older:
            break
        left += nbytes
        older = int(since) - 1 if left >= share else None
    else:
        return None
    largest = max(nbytes for _, nbytes, _ in rows)
    gone = connection.execute(
        "SELECT 1 FROM shards WHERE dataset = ? AND state = 'retiring' AND until > ? LIMIT 1", (dataset, older)
    ).fetchone()
    return older if left < share + largest and not gone else None
