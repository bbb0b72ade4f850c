"""Renewal of a full cache, although every snapshot leases everything in it.

If room were made only when a writer asks, a trainer whose snapshot leases every shard would let one shard an epoch be
replaced. So while a running pull waits for room, each process that takes a snapshot first retires shards. It retires so
many that the free and the retiring bytes together reach the share ``renew`` of the cap. Retired shards are in no new
snapshot, and are deleted when the old snapshots end. A second snapshot finds the share reached and retires nothing.

A full cache is never full to the last byte. Free bytes that are too few for the waiting shard count as none. With
shards of a sixteenth of the cap, a tenth would otherwise mean one shard an epoch (6 %) instead of two. The share is one
of the bytes that shards may take, because of a small cap a third may be the catalog's.

Shards that no snapshot contained yet stay, because the next snapshot must show them. In a cache that was filled before
anybody read it, nearly all shards are such. Then nothing can retire, and the epoch after this one would see nothing
new. So an epoch that accepts fewer shards (``sparing``) gets an older version: the newest shards, up to the share, are
left for the next epoch. Until then this epoch has shown the shards that can retire.
"""

from __future__ import annotations

from cachetool.cache.catalog import Connection, Row
from cachetool.cache.layout import Layout
from cachetool.cache.policies import choose
from cachetool.cache.removal import candidates, retire
from cachetool.cache.shares import divided, kept_free, portions
from cachetool.cache.usage import measure

__all__ = ["top_up"]


def top_up(
    connection: Connection, layout: Layout, current: int, *, dataset: str, sparing: bool, reads: float = 1.0
) -> int:
    """Return the version that a new snapshot of ``dataset`` must lease, usually ``current``. Call this inside the
    transaction that takes the snapshot.

    Shards are retired first for the running pull with the largest ``renew``: at least one when no shard is leaving, and
    never the last ready one. If too few shards were shown for that, and with ``sparing``, the version is an older one,
    without the newest shards of the dataset. ``reads`` is the fraction of the dataset that an epoch reads: a mixture
    that reads a quarter replaces a quarter as much. A dataset with a share of the cap is renewed by its own snapshots
    alone.
    """
    jobs = connection.execute(
        "SELECT j.id, j.renew, j.policy, j.min_epochs, j.keep_own, j.bytes_wanted, s.dataset"
        " FROM jobs j JOIN sources s ON s.id = j.source"
        " WHERE j.bytes_wanted > 0 ORDER BY j.renew DESC"
    ).fetchall()
    if not jobs:
        return current
    shared = portions(connection)
    portion = shared.get(dataset)

    def waits(job: Row) -> bool:
        """Return True if shards of ``dataset`` may leave for this pull."""
        if portion is not None:
            return bool(job["dataset"] == dataset)
        # A dataset that has not filled its share waits for datasets without one, which filled the cache before.
        of = shared.get(job["dataset"])
        return of is None or of.limit - of.used >= job["bytes_wanted"]

    job = next(filter(waits, jobs), None)
    if job is None:
        return current
    cap = int(connection.execute("SELECT max_size FROM cache").fetchone()[0])
    usage = measure(connection, layout)
    if portion is not None:
        free, leaving, of = min(portion.limit - portion.used, cap - usage.total), portion.leaving, portion.limit
    else:
        # A share of the bytes that shards may take and not of the whole cap: of a small cap a third may be the
        # catalog's.
        free, leaving = cap - usage.total - kept_free(shared), usage.retiring + usage.trash
        of = cap - usage.overhead - usage.listings - sum(each.limit for each in shared.values())
    # Free bytes that are too few for the waiting shard help nobody, so they count as none.
    usable = free if free >= job["bytes_wanted"] else 0
    # Retiring shards count as made room, so a second rank that takes a snapshot retires nothing more.
    lack = int(job["renew"] * min(1.0, reads) * of) - usable - leaving
    if lack <= 0:
        return current
    # An epoch must show everything that was there before it began, so only shards that an earlier
    # snapshot contained may retire.
    own, others = divided(candidates(connection, seen=True), shared, dataset)
    shown = others if portion is None else own
    # With `keep_own` the shards that this epoch shows could not retire at the next snapshot either.
    if sparing and not job["keep_own"] and sum(row.bytes for row in shown) < lack:
        older = _holding_back(connection, dataset, job["renew"], lack)
        if older is not None:
            return older
    # Of a dataset with a share its own shards are counted, otherwise those of the datasets without one.
    ready = sum(
        row["count"]
        for row in connection.execute(
            "SELECT dataset, count(*) AS count FROM shards WHERE state = 'ready' GROUP BY dataset"
        )
        if (row["dataset"] == dataset if portion is not None else row["dataset"] not in shared)
    )
    victims = choose(
        shown,
        excess=lack,
        policy=job["policy"],
        min_epochs=job["min_epochs"],
        keep_job=job["id"] if job["keep_own"] else None,
    )
    return (
        # Never the last ready shard: a snapshot without any shard is no epoch.
        retire(connection, victims[: max(0, ready - 1)], reason="renewal", policy=job["policy"], job=job["id"])
        or current
    )


def _holding_back(connection: Connection, dataset: str, renew: float, lack: int) -> int | None:
    """Return the newest version that leaves out the newest unseen shards, up to the dataset's part of the share.

    Return None if no such version shows something new, shows most of the dataset, and shows nothing that was evicted
    since.
    """
    rows = connection.execute(
        "SELECT since, bytes, since > (SELECT seen FROM cache) FROM shards"
        " WHERE state = 'ready' AND dataset = ? ORDER BY since DESC",
        (dataset,),
    ).fetchall()
    total = sum(nbytes for _, nbytes, _ in rows)
    share, left, older = min(lack, int(renew * total)), 0, None
    for since, nbytes, unseen in rows:
        # All unseen shards are left out by then, so the snapshot would show nothing new.
        if not unseen:
            return None
        # A version ends between two commits: shards of one commit are shown or left out together.
        if older is not None and since <= older:
            break
        left += nbytes
        older = int(since) - 1 if left >= share else None
    else:
        return None
    largest = max(nbytes for _, nbytes, _ in rows)
    # A shard that retired after that version would be in the snapshot again. It may have been
    # retired because it is corrupt.
    gone = connection.execute(
        "SELECT 1 FROM shards WHERE dataset = ? AND state = 'retiring' AND until > ? LIMIT 1", (dataset, older)
    ).fetchone()
    # At most one shard more than the share: a large group of shards in one commit would leave out
    # most of the dataset.
    return older if left < share + largest and not gone else None
