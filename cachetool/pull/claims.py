"""Claims of one worker, out of the catalog of the cache that it fills.

A further pass goes around what the cache still has of the earlier ones, so that no snapshot has a sample twice.

::

    pass 1  | a b c | d e f | g h i |        the cache holds: g h i
    pass 2    drawn  c g a | i f d |          c a, then f d are fetched; g and i are drawn: they are there
                     one claim: the draws of its shard are those of c, a, f, d alone

A draw whose sample lies in a ready shard is done without a fetch: it is in every snapshot to come. One that is retiring
is fetched again: no snapshot will have both. A unit that is evicted after it was passed over comes in the next pass.
One that was damaged is drawn again as what it was, a draw of an earlier pass; the present one goes around it.
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


MOST_RUNS = 512
"""Ranges of positions that one claim is cut into, at most: they are kept with its shard, 10 KB of the catalog."""

_Numbers = npt.NDArray[np.int64]


def order_of_pass(source: Source, row: SourceRow, pass_number: int, part: int = 0) -> PartOrder:
    """The draws at the positions of a part, in the present pass or in an earlier one."""
    units, segments = next((past[1:] for past in row.past if past[0] == pass_number), (row.units, row.segments))
    if units < row.units:
        segments = (*segments, units)  # units that came later were none of it
    return source.order(
        seed=row.seed, pass_number=pass_number, segments=segments, sequential=row.sequential, part=part, cut=row.cut
    )


class Cached:
    """The draws of a source that ready shards hold, as of the last :meth:`look`."""

    def __init__(self) -> None:
        self._by_shard: dict[str, _Numbers] = {}
        self._draws: _Numbers = np.zeros(0, dtype=np.int64)
        self._all_cached: tuple[int, bool] = 0, False
        """The answer of :meth:`all_there`, and the version that it is of."""

    def look(self, connection: Connection, source: Source, row: SourceRow) -> None:
        """Read the catalog, inside a transaction: what earlier passes left. 8 bytes a draw are kept."""
        shard_copies = copies(connection, row.id, but=row.pass_number) + promised(connection, row.id)
        if self._by_shard.keys() == {copy.shard for copy in shard_copies}:
            return
        self._by_shard = {
            copy.shard: self._by_shard[copy.shard]
            if copy.shard in self._by_shard
            else order_of_pass(source, row, copy.pass_number, copy.part)[positions(copy.ranges(row))]
            for copy in shard_copies
        }
        self._draws = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *self._by_shard.values()]))

    def among(self, draws: _Numbers) -> npt.NDArray[np.bool_]:
        """Which of ``draws`` the cache has."""
        if not len(self._draws):
            return np.zeros(len(draws), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self._draws, draws), len(self._draws) - 1)
        return np.asarray(self._draws[at] == draws)

    def reach(self, order: DrawOrder, start: int, stop: int, *, end: int) -> int:
        """Where a claim from ``start`` has to end to bring ``stop - start`` draws that are not in the cache; at
        ``end`` at the latest, and where it would come to more than :data:`MOST_RUNS` ranges or 64 times as long."""
        if not len(self._draws):
            return order.unit_end(start, stop)
        wanted, at, edges, last = stop - start, start, 0, True
        end = min(end, start + 64 * wanted)
        while wanted > 0 and at < end:
            upto = min(end, at + wanted)
            cached = self.among(order[np.arange(at, upto)])
            changes = np.flatnonzero(np.diff(cached, prepend=last))
            if edges + len(changes) >= 2 * MOST_RUNS:
                return max(start + 1, at + int(changes[2 * MOST_RUNS - edges - 1]))
            edges, last = edges + len(changes), bool(cached[-1])
            wanted, at = wanted - int(np.count_nonzero(~cached)), upto
        return order.unit_end(start, at)

    def all_there(self, connection: Connection, source: Source, row: SourceRow) -> bool:
        """Return True when a further pass would bring nothing: all units of the parts here are in ready shards, or
        vanished."""
        version = int(connection.execute("SELECT version FROM cache").fetchone()[0])
        if self._all_cached[0] != version:
            shard_copies = copies(connection, row.id)
            lots = sum(total(copy.ranges(row)) for copy in shard_copies) + len(source.vanished) >= row.size
            cached = [
                order_of_pass(source, row, copy.pass_number, copy.part)[positions(copy.ranges(row))]
                for copy in shard_copies
                if lots
            ]
            there = np.unique(np.concatenate([source.vanished, *cached]))
            if lots and row.cut > 1:  # of what vanished, most is in parts of others
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
    """Those whose samples were fetched or skipped, not there before."""
    draws: int
    """Of them, those that gave samples."""
    skipped: int
    vanished: int
    fetched: int
    """Bytes over the wire."""
    gaps: Ranges = ()
    """Those that are still open: what came behind them is done."""


class Claims:
    """Claims out of the catalog of ``cache``; ``open`` opens the source with as many units as it has by then. Used by
    one thread."""

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
        """The source as the newest claim needs it; None before the first."""
        self._cached = Cached()
        self._limits: dict[tuple[int, int, int, int], int] = {}
        self._row = cache.source(source)

    def _look(self) -> None:
        """Most of the work of a claim, before others must wait for it."""
        if self._row is None:
            return
        if self.samples is None or self.samples.units != self._row.units:
            if self.samples is not None:
                self.samples.close()  # it has grown
            self.samples = self._open(self._row)
        with self._cache.catalog.read() as connection:
            self._cached.look(connection, self.samples, self._row)

    def take(self) -> Claim | float | None:
        """Make the next claim; or say for how many seconds to wait before asking again; None at the end. With
        ``follow`` the next pass begins when this one is complete."""
        while self._row is not None:
            self._look()
            assert self.samples is not None
            with self._cache.catalog.write() as connection:
                self._cache.holder.register(connection)
                now, self._row = self._row, draws.source_row(connection, self._source)
                if self._row is None or self._row.units != now.units:
                    continue
                self._cached.look(connection, self.samples, self._row)
                claim = self._claim(connection)
                if claim is not None:
                    return claim
                is_idle = self._follow and (
                    self._cached.all_there(connection, self.samples, self._row) or draws.idle(connection, self._source)
                )
                if self._follow and not is_idle:
                    draws.begin_next_pass(connection, self._source)
                left = job_row(connection, self._job).left
            if self._follow or not (self._row.complete or left == 0 or self._reopened):
                # Other workers finish the pass, more of the listing comes, or there is no more to fetch.
                return 2.0 if is_idle else 0.2
            return None
        return None

    def ahead(self) -> Claim | None:
        """Make the next claim while this one is at its end; None where there is none now, or the source has changed."""
        assert self.samples is not None
        with self._cache.catalog.write() as connection:
            now = draws.source_row(connection, self._source)
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
        if pass_number != self._row.pass_number:
            return order.unit_end(start, stop)
        return self._cached.reach(order, start, stop, end=len(order))

    def _limit(self, part: int, upto: int) -> int:
        """Positions of a part that are among the first ``upto`` of the source."""
        assert self._row is not None
        assert self.samples is not None
        key = self._row.units, self._row.cut, part, upto
        if key not in self._limits:
            self._limits[key] = order_of_pass(self.samples, self._row, self._row.pass_number, part).limit(upto)
        return self._limits[key]

    def there(self, claim: Claim, units: npt.NDArray[np.int64]) -> _Flags:
        """Mark those of a claim's units that need no fetch: an earlier pass brought them, and they did not go since."""
        # Of an earlier pass: reopened draws. The present pass goes around them, so nobody else has them.
        return (
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
        """Count the draws of the pull that could not be used, and all of them."""
        with self._cache.catalog.read() as connection:
            job, row = job_row(connection, self._job), draws.source_row(connection, self._source)
            return job.skipped, job.skipped if row is None else max(job.skipped, draws.positions_done(connection, row))

    def give_back(self) -> None:
        """Open the claims that are not done; let go of the source."""
        if self.samples is not None:
            self.samples.close()
        with self._cache.catalog.write() as connection:
            draws.give_back(connection, self._cache.holder.id, self._job)
