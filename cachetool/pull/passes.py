"""A further pass goes around what the cache still has of the earlier ones, so that no snapshot has a sample twice.

::

    pass 1  | a b c | d e f | g h i |        the cache holds: g h i
    pass 2    drawn  c g a | i f d |          c a, then f d are fetched; g and i are drawn: they are there
                     one claim: the draws of its shard are those of c, a, f, d alone

A draw whose sample lies in a ready shard is done without a fetch: it is in every snapshot to come. One that is retiring
is fetched again: no snapshot will have both. A unit that is evicted after it was passed over comes in the next pass.
One that was damaged is drawn again as what it was, a draw of an earlier pass; the present one goes around it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cachetool.cache import SourceRow
from cachetool.cache.catalog import Connection
from cachetool.cache.copies import copies, promised
from cachetool.sources import Source
from cachetool.sources.order import Order

__all__ = ["Cached", "order_of_turn", "positions", "runs"]

MOST_RUNS = 512
"""Ranges of positions that one claim is cut into, at most: they are kept with its shard, 10 KB of the catalog."""

_Numbers = npt.NDArray[np.int64]


def order_of_turn(source: Source, row: SourceRow, turn: int) -> Order:
    """What the positions of a pass mean, the present one or an earlier one."""
    units, cuts = next((each[1:] for each in row.past if each[0] == turn), (row.units, row.cuts))
    if units < row.units:
        cuts = (*cuts, units)  # units that came later were none of it
    return source.order(seed=row.seed, turn=turn, cuts=cuts, sequential=row.sequential)


class Cached:
    """The draws of a source that ready shards hold, as of the last :meth:`look`."""

    def __init__(self) -> None:
        self._by_shard: dict[str, _Numbers] = {}
        self._draws: _Numbers = np.zeros(0, dtype=np.int64)
        self._whole: tuple[int, bool] = 0, False
        """What :meth:`all_there` found at which version."""

    def look(self, connection: Connection, source: Source, row: SourceRow) -> None:
        """Read the catalog, inside a transaction: what earlier passes left. 8 bytes a draw are kept."""
        found = copies(connection, row.id, but=row.turn) + promised(connection, row.id)
        if self._by_shard.keys() == {copy.shard for copy in found}:
            return
        self._by_shard = {
            copy.shard: self._by_shard[copy.shard]
            if copy.shard in self._by_shard
            else order_of_turn(source, row, copy.turn)[positions(copy.ranges)]
            for copy in found
        }
        self._draws = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *self._by_shard.values()]))

    def among(self, draws: _Numbers) -> npt.NDArray[np.bool_]:
        """Which of ``draws`` the cache has."""
        if not len(self._draws):
            return np.zeros(len(draws), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self._draws, draws), len(self._draws) - 1)
        return np.asarray(self._draws[at] == draws)

    def reach(self, order: Order, start: int, stop: int, *, end: int) -> int:
        """Where a claim from ``start`` has to end to bring ``stop - start`` draws that are not in the cache; at
        ``end`` at the latest, and where it would come to more than :data:`MOST_RUNS` ranges or 64 times as long."""
        if not len(self._draws):
            return order.whole(start, stop)
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
        return order.whole(start, at)

    def all_there(self, connection: Connection, source: Source, row: SourceRow) -> bool:
        """Whether a further pass would bring nothing: every unit is in a ready shard, or has vanished."""
        version = int(connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()[0])
        if self._whole[0] != version:
            found = copies(connection, row.id)
            lots = sum(b - a for copy in found for a, b in copy.ranges) + len(source.vanished) >= row.units
            held = [order_of_turn(source, row, copy.turn)[positions(copy.ranges)] for copy in found if lots]
            self._whole = version, lots and len(np.unique(np.concatenate([source.vanished, *held]))) >= row.units
        return self._whole[1]


def positions(ranges: tuple[tuple[int, int], ...]) -> _Numbers:
    """All numbers in these ranges."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(a, b) for a, b in ranges)])


def runs(start: int, flags: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """The ranges of positions from ``start`` on whose flag is set."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)) + start
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
