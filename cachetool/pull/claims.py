"""Claims of one worker, taken from the catalog of the cache that it fills.

A further pass goes around what the cache still has of earlier passes, so that no snapshot has a sample twice.

::

    pass 1  | a b c | d e f | g h i |    the cache still holds g, h and i
    pass 2  | c g a   i f d | ...        one claim: c, a, f and d are fetched; g and i count as drawn without a fetch
                                         the shard of this claim lists the draws of c, a, f and d only

A draw whose sample is in a ready shard is done without a fetch, because every later snapshot has that shard. A draw
whose sample is in a retiring shard is fetched again, because no snapshot will have both shards. A unit that is evicted
after the pass went around it comes in the next pass.

A damaged draw is drawn again as a draw of its earlier pass. The present pass goes around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Claim, SourceRow, draws
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import copies, job_row, promised
from cachetool.core.ranges import Ranges, positions, total
from cachetool.sources.base import Source
from cachetool.sources.order import DrawOrder, PartOrder

__all__ = ["Cached", "Claims", "Done", "order_of_pass"]


# The ranges are kept with the claim's shard in the catalog; 512 of them take 10 KB.
MOST_RUNS = 512
"""Most ranges of positions in one claim."""

_Numbers = npt.NDArray[np.int64]


def order_of_pass(source: Source, row: SourceRow, pass_number: int, part: int = 0) -> PartOrder:
    """Return the order in which a part is drawn, in the present pass or in an earlier one."""
    units, segments = next((past[1:] for past in row.past if past[0] == pass_number), (row.units, row.segments))
    # Units that were listed after that pass are a segment of their own, so that the positions of the earlier units keep
    # their meaning.
    if units < row.units:
        segments = (*segments, units)
    return source.order(
        seed=row.seed, pass_number=pass_number, segments=segments, sequential=row.sequential, part=part, cut=row.cut
    )


class Cached:
    """The draws of a source that ready shards hold, as of the last :meth:`look`."""

    def __init__(self) -> None:
        self._by_shard: dict[str, _Numbers] = {}
        self._draws: _Numbers = np.zeros(0, dtype=np.int64)
        self._all_cached: tuple[int, bool] = 0, False
        """The catalog's version at the last call of :meth:`all_there`, and the answer."""

    def look(self, connection: Connection, source: Source, row: SourceRow) -> None:
        """Read from the catalog, inside a transaction, what earlier passes left. Keep 8 bytes a draw."""
        # Shards of the present pass are left out: their draws are below the frontier, or in claims, and no later claim
        # meets them. So a claim costs the same however many shards the pass has made.
        shard_copies = copies(connection, row.id, but=row.pass_number) + promised(connection, row.id)
        # Nearly always nothing changed since the last claim, and other workers wait for this transaction.
        if self._by_shard.keys() == {copy.shard for copy in shard_copies}:
            return
        # Only new shards are computed: to permute the draws of all shards again would hold up the other workers, which
        # wait for this transaction.
        self._by_shard = {
            copy.shard: self._by_shard[copy.shard]
            if copy.shard in self._by_shard
            else order_of_pass(source, row, copy.pass_number, copy.part)[positions(copy.ranges(row))]
            for copy in shard_copies
        }
        # Sorted once, so that among() can use a binary search. The empty array keeps the type when there is no shard.
        self._draws = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *self._by_shard.values()]))

    def among(self, draws: _Numbers) -> npt.NDArray[np.bool_]:
        """Return a mask of the ``draws`` that the cache has."""
        if not len(self._draws):
            return np.zeros(len(draws), dtype=np.bool_)
        # searchsorted() returns the length for draws above the last one; that index would be out of bounds.
        at = np.minimum(np.searchsorted(self._draws, draws), len(self._draws) - 1)
        return np.asarray(self._draws[at] == draws)

    def reach(self, order: DrawOrder, start: int, stop: int, *, end: int) -> int:
        """Return the end of a claim from ``start`` that brings ``stop - start`` draws which the cache does not have.

        The claim ends earlier at ``end``, before it has more than :data:`MOST_RUNS` ranges, and when it is 64 times as
        long as asked for.
        """
        if not len(self._draws):
            return order.unit_end(start, stop)
        # `last` is True, so that the beginning of a claim counts as the edge of a range if the cache does not have its
        # first draw.
        wanted, at, edges, last = stop - start, start, 0, True
        # The factor 64 bounds the work inside the transaction. Without it one claim could swallow a part whose draws
        # are all in the cache.
        end = min(end, start + 64 * wanted)
        while wanted > 0 and at < end:
            upto = min(end, at + wanted)
            cached = self.among(order[np.arange(at, upto)])
            changes = np.flatnonzero(np.diff(cached, prepend=last))
            if edges + len(changes) >= 2 * MOST_RUNS:
                # At least one position: the catalog refuses an empty claim (CHECK (start < stop)).
                return max(start + 1, at + int(changes[2 * MOST_RUNS - edges - 1]))
            edges, last = edges + len(changes), bool(cached[-1])
            wanted, at = wanted - int(np.count_nonzero(~cached)), upto
        return order.unit_end(start, at)

    def all_there(self, connection: Connection, source: Source, row: SourceRow) -> bool:
        """Return True if a further pass would bring nothing: all units of the parts here are in ready shards, or
        vanished."""
        version = int(connection.execute("SELECT version FROM cache").fetchone()[0])
        # The answer can change only with the version, and a waiting worker asks every two seconds.
        if self._all_cached[0] != version:
            shard_copies = copies(connection, row.id)
            # A cheap bound first: only if enough draws are in ready shards is each of them looked up.
            lots = sum(total(copy.ranges(row)) for copy in shard_copies) + len(source.vanished) >= row.size
            cached = [
                order_of_pass(source, row, copy.pass_number, copy.part)[positions(copy.ranges(row))]
                for copy in shard_copies
                if lots
            ]
            there = np.unique(np.concatenate([source.vanished, *cached]))
            # `source.vanished` counts for all parts of the source, and most vanished units are in parts of other nodes.
            if lots and row.cut > 1:
                orders = (order_of_pass(source, row, row.pass_number, part.number) for part in row.parts)
                own = [np.zeros(0, dtype=np.int64), *(order[np.arange(len(order))] for order in orders)]
                there = np.intersect1d(there, np.concatenate(own))
            self._all_cached = version, lots and len(there) >= row.size
        return self._all_cached[1]


_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Done:
    """The first positions of a claim that are not done yet, from ``start`` up to but without ``upto``."""

    start: int
    upto: int
    ranges: Ranges
    """Positions whose samples were fetched or skipped now. Positions that the cache had before are not included."""
    draws: int
    """Number of draws in :attr:`ranges` that gave samples."""
    skipped: int
    vanished: int
    fetched: int
    """Bytes that came over the wire."""
    gaps: Ranges = ()
    """Positions that stay open although later positions are done."""


class Claims:
    """A series of claims from the catalog of ``cache``. Used by one thread.

    ``open`` opens the source with the number of units that it has at that moment. ``most`` is the number of positions
    in a claim.
    """

    def __init__(
        self,
        cache: CacheDir,
        open: Callable[[SourceRow], Source],
        *,
        job: str,
        source: str,
        most: int,
        follow: bool = False,
        reopened: bool = False,
    ) -> None:
        self._cache, self._open, self._job = cache, open, job
        self._most = most
        self._follow, self._reopened, self._source = follow, reopened, source
        self.samples: Source | None = None
        """The source as the newest claim needs it; None before the first claim."""
        self._cached = Cached()
        self._limits: dict[tuple[int, int, int, int], int] = {}
        self._row = cache.source(source)

    def _look(self) -> None:
        """Open the source and read the cached draws, before the transaction that claims."""
        # Another pull failed and took the source back.
        if self._row is None:
            return
        if self.samples is None or self.samples.units != self._row.units:
            if self.samples is not None:
                # The source has grown: its open files have the old number of units.
                self.samples.close()
            self.samples = self._open(self._row)
        # Most of the work is done in this read. The same look inside the write transaction then finds little to do,
        # while all other workers wait for it.
        with self._cache.catalog.read() as connection:
            self._cached.look(connection, self.samples, self._row)

    def take(self) -> Claim | float | None:
        """Return the next claim, or the seconds to wait before the next call, or None at the end.

        With ``follow`` the next pass begins when the present one is complete.
        """
        while self._row is not None:
            self._look()
            assert self.samples is not None
            with self._cache.catalog.write() as connection:
                # In the same transaction as the claim: a claim whose holder has no row would look like one of a dead
                # process.
                self._cache.holder.register(connection)
                now, self._row = self._row, draws.source_row(connection, self._source)
                # Another process added a segment (or removed the source) between the look and this transaction. The
                # claim's end would be computed from the wrong order, so the look is repeated.
                if self._row is None or self._row.units != now.units:
                    continue
                self._cached.look(connection, self.samples, self._row)
                claim = self._claim(connection)
                if claim is not None:
                    return claim
                # A following pull would otherwise begin pass after pass without a pause. Nothing can come if everything
                # is cached, or if the last pass moved nothing.
                is_idle = self._follow and (
                    self._cached.all_there(connection, self.samples, self._row) or draws.idle(connection, self._source)
                )
                if self._follow and not is_idle:
                    draws.begin_next_pass(connection, self._source)
                left = job_row(connection, self._job).left
            if self._follow or not (self._row.complete or left == 0 or self._reopened):
                # Other workers still finish the pass, or more of the listing is to come: soon. An idle pull waits for
                # an eviction or a refresh, which may take hours.
                return 2.0 if is_idle else 0.2
            return None
        return None

    def ahead(self) -> Claim | None:
        """Return the next claim while the present one is still being written; None if there is none now, or the source
        changed."""
        assert self.samples is not None
        with self._cache.catalog.write() as connection:
            now = draws.source_row(connection, self._source)
            # The open source has other units than the catalog. take() opens it anew once the present claim is done.
            if now is None or now.units != self.samples.units:
                return None
            self._row = now
            self._cached.look(connection, self.samples, now)
            return self._claim(connection)

    def _claim(self, connection: Connection) -> Claim | None:
        return draws.claim(
            connection, self._job, holder=self._cache.holder.id, most=self._most, stop_at=self._claim_end,
            limit=self._limit, reopened=self._reopened,
        )  # fmt: skip

    def _claim_end(self, pass_number: int, part: int, start: int, stop: int) -> int:
        assert self._row is not None
        assert self.samples is not None
        order = order_of_pass(self.samples, self._row, pass_number, part)
        # Reopened draws of an earlier pass are drawn as they were, whatever the cache holds of the present pass.
        if pass_number != self._row.pass_number:
            return order.unit_end(start, stop)
        return self._cached.reach(order, start, stop, end=len(order))

    def _limit(self, part: int, upto: int) -> int:
        """Return the number of positions of a part that are among the first ``upto`` of the source."""
        assert self._row is not None
        assert self.samples is not None
        # The number stays the same until the source grows, and this is called inside a transaction that other workers
        # wait for.
        key = self._row.units, self._row.cut, part, upto
        if key not in self._limits:
            self._limits[key] = order_of_pass(self.samples, self._row, self._row.pass_number, part).limit(upto)
        return self._limits[key]

    def there(self, claim: Claim, units: npt.NDArray[np.int64]) -> _Flags:
        """Return a mask of the claim's units that need no fetch, because a ready shard has them from an
        earlier pass."""
        return (
            # A claim of an earlier pass holds reopened draws. The present pass goes around these, so no ready shard has
            # them.
            self._cached.among(units)
            if claim.pass_number == claim.source.pass_number
            else np.zeros(len(units), dtype=np.bool_)
        )

    def finish(self, connection: Connection, claim: Claim, done: Done) -> None:
        """Count positions as done, inside the transaction that commits their samples."""
        draws.finish(
            connection, self._job, claim, done.upto,
            samples=done.draws, skipped=done.skipped, vanished=done.vanished, fetched=done.fetched, gaps=done.gaps,
        )  # fmt: skip

    def unused(self) -> tuple[int, int]:
        """Return the number of draws of the pull that could not be used, and the number of all its draws."""
        with self._cache.catalog.read() as connection:
            job, row = job_row(connection, self._job), draws.source_row(connection, self._source)
            # A removed source has no row. max(): open claims are subtracted from the done positions, so these may be
            # fewer than the skipped ones.
            return job.skipped, job.skipped if row is None else max(job.skipped, draws.positions_done(connection, row))

    def give_back(self) -> None:
        """Open the claims that are not done, so that other workers can take them, and close the source."""
        if self.samples is not None:
            self.samples.close()
        with self._cache.catalog.write() as connection:
            draws.give_back(connection, self._cache.holder.id, self._job)
