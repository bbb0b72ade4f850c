"""Who hands out the draws of a pull over several nodes, and writes down what became of them.

All that it knows is in the catalog of the whole (:mod:`cachetool.cache.placing`): it may die at any moment and be made
again from the same arguments. So each question may come twice, and has the same answer then.

::

    enter    which cache a node has                         ->  {}, or an error
    tell     all shards of the source that a node has       ->  which of them have to go, the source as it is now
    claim    by a word that is used once                    ->  positions, or how long to wait, or nothing more
    finish   what of a claim was committed, in which shard  ->  how many draws could not be used so far
    back     claims that were not done                      ->  {}
    gone     shards that were evicted                       ->  {}
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Claim, SourceRow, draws, placing
from cachetool.cache import parts as share
from cachetool.cache.catalog import Connection
from cachetool.cache.placing import Placed
from cachetool.core.errors import Interrupted, UsageError
from cachetool.core.ranges import Ranges, positions, runs
from cachetool.proc.task import Message
from cachetool.pull.claims import Own, claim_json, order_of_pass
from cachetool.sources.base import Source
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import open_source

__all__ = ["Coordinator", "placed_of"]


_SAID = {"identity": "listing", "sequential": "--order"}


class Coordinator:
    """Answers the tasks of one pull; in one thread. ``root`` is the folder of the catalog of the whole, ``holder`` the
    command as that knows it: it holds the claims, so that they outlive this process."""

    def __init__(
        self, *, root: str, url: str, options: Message, job: str, source: str, holder: str, most: int, follow: bool
    ) -> None:
        self._cache = CacheDir(Path(root))
        self._url, self._options = url, SourceOptions.from_json(options)
        self._job, self._source, self._asking = job, source, ("", "")
        self._claims = Own(
            self._cache, self._open, job=job, source=source, most=most, follow=follow, holder=holder, note=self._note
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around the answers to several questions: they are written down at once, before any of them is given."""
        self._claims.look()
        with self._cache.catalog.together():
            yield

    def answer(self, node: str, message: Message) -> Message:
        """The answer to what a task on ``node`` asks. Raises what the verbs of the catalog raise."""
        asked = {
            "enter": self._enter,
            "tell": self._tell,
            "claim": self._claim,
            "finish": self._finish,
            "back": self._back,
            "gone": self._gone,
        }
        return asked[message["what"]](node, message)

    def _open(self, row: SourceRow) -> Source:
        return open_source(self._url, self._cache.listing(self._source), self._options, units=row.units)

    def _note(self, connection: Connection, claim: Claim) -> None:
        placing.note_claim(connection, claim, *self._asking)

    def _row(self, connection: Connection) -> SourceRow:
        row = draws.source_row(connection, self._source)
        if row is None:
            raise Interrupted("the pull has ended")
        return row

    def _enter(self, node: str, message: Message) -> Message:
        with self._cache.catalog.write() as connection:
            placing.enter(connection, node, message["cache"], self._job, self._source, message["word"])
        return {}

    def _tell(self, node: str, message: Message) -> Message:
        shards = [placed_of(value) for value in message["shards"]]
        there = SourceRow.from_json(message["source"])
        with self._cache.catalog.write() as connection:
            row = self._row(connection)
            for name, here in (("seed", row.seed), ("sequential", row.sequential), ("identity", row.identity)):
                if getattr(there, name) != here:
                    raise UsageError(
                        f"the cache of node {node} has {row.url} with another {_SAID.get(name, name)} than the others;"
                        " give it an empty folder, or draw into another --dataset"
                    )
            if there.pass_number > row.pass_number:  # this catalog is younger than the caches
                row = _catch_up(connection, row, there)
            others = _Others(lambda: self._open(row), row, placing.placed_elsewhere(connection, row.id, node))
            gone = placing.take_in(connection, row, node, shards, job=self._job, doubled=others.have)
            row = self._row(connection)
        left = {shard.shard for shard in shards}.difference(gone)
        own = [shard for shard in shards if shard.job == self._job and shard.shard in left]
        return {
            "gone": gone,
            "source": row.to_json(),
            "samples": sum(shard.samples for shard in own),
            "bytes": sum(shard.payload for shard in own),
            "shards": len(own),
        }

    def _claim(self, node: str, message: Message) -> Message:
        self._asking = node, message["token"]
        self._claims.most = message.get("most", self._claims.most)
        with self._cache.catalog.read() as connection:
            claim: Claim | float | None = placing.held_by(connection, *self._asking, self._job, message["word"])
            if isinstance(claim, Claim):  # of before this process was made
                self._claims.samples = self._claims.samples or self._open(claim.source)
                self._claims.cached.look(connection, self._claims.samples, claim.source)
        if claim is None:
            claim = self._claims.take()
        if not isinstance(claim, Claim):
            return {"wait": claim}
        source = self._claims.samples
        assert source is not None
        units = order_of_pass(source, claim.source, claim.pass_number)[np.arange(claim.start, claim.stop)]
        return {"claim": claim_json(claim), "there": runs(claim.start, self._claims.there(claim, units))}

    def _finish(self, node: str, message: Message) -> Message:
        value = message["claim"]
        claim = Claim(**{**value, "source": SourceRow.from_json(value["source"])})
        ranges = tuple((start, stop) for start, stop in message["ranges"])
        placed = None
        if message["shard"] is not None:
            placed = Placed(message["shard"], claim.pass_number, ranges, message["samples"], 0, self._job)
        counts = {name: message[name] for name in ("skipped", "vanished", "fetched")}
        with self._cache.catalog.write() as connection:
            placing.place(
                connection, self._job, node, message["token"], claim, message["upto"], placed,
                brought=message["draws"], **counts,
            )  # fmt: skip
        skipped, draws_done = self._claims.unused()
        return {"skipped": skipped, "drawn": draws_done}

    def _back(self, node: str, message: Message) -> Message:
        with self._cache.catalog.write() as connection:
            placing.give_back(connection, node, message["claims"])
        return {}

    def _gone(self, node: str, message: Message) -> Message:
        with self._cache.catalog.write() as connection:
            placing.forget_shards(connection, message["shards"])
        return {}


def placed_of(value: Message) -> Placed:
    """A shard that a task told of, by its fields."""
    return Placed(**{**value, "draws": tuple((start, stop) for start, stop in value["draws"])})


def _catch_up(connection: Connection, row: SourceRow, there: SourceRow) -> SourceRow:
    share.follow(connection, there)
    return draws.source_row(connection, row.id) or row


class _Others:
    """What all other nodes have of a source, to be compared with the shards of one."""

    def __init__(self, open: Callable[[], Source], row: SourceRow, placed_ranges: Sequence[tuple[int, Ranges]]) -> None:
        self._open, self._row = open, row
        self._ranges: dict[int, npt.NDArray[np.int64]] = {}
        self._ends: dict[int, npt.NDArray[np.int64]] = {}
        """How far each range of a pass, or one before it, reaches."""
        for pass_number in {pass_number for pass_number, _ in placed_ranges}:
            bounds = sorted(part for other, ranges in placed_ranges if other == pass_number for part in ranges)
            self._ranges[pass_number] = np.array(bounds, dtype=np.int64).reshape(-1, 2)
            self._ends[pass_number] = np.maximum.accumulate(self._ranges[pass_number][:, 1])
        self._units: dict[int, npt.NDArray[np.int64]] = {}
        self._source: Source | None = None

    def have(self, placed: Placed) -> bool:
        """Whether any of a shard's samples is elsewhere as well."""
        if (ranges := self._ranges.get(placed.pass_number)) is not None:
            ends = self._ends[placed.pass_number]
            for start, stop in placed.draws:
                before = int(np.searchsorted(ranges[:, 0], stop))
                if before and ends[before - 1] > start:
                    return True
        units = None
        for pass_number in self._ranges.keys() - {placed.pass_number}:  # one unit is a draw of every pass
            if units is None:
                units = self._units_of(placed.pass_number, np.array(placed.draws, dtype=np.int64))
            if pass_number not in self._units:
                self._units[pass_number] = np.sort(self._units_of(pass_number, self._ranges[pass_number]))
            at = np.minimum(np.searchsorted(self._units[pass_number], units), len(self._units[pass_number]) - 1)
            if (self._units[pass_number][at] == units).any():
                return True
        return False

    def _units_of(self, pass_number: int, ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._source is None:
            self._source = self._open()
        parts = tuple((start, stop) for start, stop in ranges.tolist())
        return np.asarray(order_of_pass(self._source, self._row, pass_number)[positions(parts)])
