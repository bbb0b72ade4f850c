"""One claim on its way from a source into shards.

::

    units in drawn order -> fetch, decode -> blocks -> shard, reserved whole -> commit, draws done
                                                 ^                                |
                                                 +--- the rest of the claim, when a shard closed early

:mod:`cachetool.pull.worker` takes the claim. It asks for the next claim as soon as all of this one was requested.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Claim, Facts, Origin, Room, Staging
from cachetool.cache.catalog import Connection, bump
from cachetool.cache.draws import ClaimGone, mark_tried
from cachetool.cache.records import RANGE_BYTES, write_source_record
from cachetool.core.block import BLOCK_BYTES, Block, Ragged
from cachetool.core.errors import BadObject, CacheToolError, CapTooSmall
from cachetool.core.ranges import Ranges, runs, total
from cachetool.core.schema import KEY, Schema
from cachetool.core.units import format_size
from cachetool.formats.base import Format
from cachetool.formats.shard import ShardFiles, shard_bound
from cachetool.proc.task import Channel
from cachetool.pull.claims import Claims, Done, order_of_pass
from cachetool.pull.job import too_many
from cachetool.pull.reports import WaitingFor
from cachetool.pull.step_times import StepTimes
from cachetool.sources.base import ReadResult, Skipped
from cachetool.stores.redact import printable

__all__ = ["Drawing", "FirstShard", "WorkerJob"]


class FirstShard:
    """The time at which a worker closes its first shard at the latest, so that training can begin.

    The time is ``seconds`` from now; None: when the shard is full.
    """

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds until then, as :data:`cachetool.sources.base.Hurry`; None once a shard was committed."""
        return None if self._at is None else self._at - time.monotonic()

    def closed(self) -> None:
        """Note that a shard was committed, so that the later ones close when they are full."""
        self._at = None


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The parameters that are the same for all shards of a worker."""

    job: str
    source: str
    dataset: str
    kind: Format
    schema: Schema
    shard_bytes: int
    room: Room
    skip_bad: bool
    per_unit: int
    """Samples that one draw brings, on average."""
    first: FirstShard
    times: StepTimes


class Drawing:
    """One claim that is drawn into one shard, or into several if samples are larger than expected."""

    def __init__(self, cache: CacheDir, claims: Claims, plan: WorkerJob, claim: Claim, channel: Channel) -> None:
        source = claims.samples
        assert source is not None
        self._cache, self._claims, self._source, self._plan, self._claim = cache, claims, source, plan, claim
        order = order_of_pass(source, claim.source, claim.pass_number, claim.part)
        units = order[np.arange(claim.start, claim.stop)]
        self._cached = claims.there(claim, units)
        # Units that a refresh did not find are not requested: each would be a 404, and count as a bad object.
        vanished = np.isin(units, source.vanished) & ~self._cached
        self._barren = vanished.copy()
        """Mask of the positions that give no sample, as far as is known."""
        self._gaps = np.zeros(len(units), dtype=np.bool_)
        """Mask of the positions that stay open although later positions are done."""
        self._there = np.nonzero(~vanished & ~self._cached)[0]
        """Positions in the claim whose units are still in the source and not in the cache."""
        self._units, self._vanished = units[self._there], np.cumsum(vanished)
        self._channel = channel
        self._from = self._upto = claim.start
        """Positions below ``_from`` are committed. Samples of the positions from ``_from`` to ``_upto`` are in the open
        shard."""
        self._even = True
        """True if the open shard holds exactly the samples below ``_upto``. False while samples are being written."""
        self._skipped: list[Skipped] = []
        self._fetched = 0
        self._staging: Staging | None = None
        self._files: ShardFiles | None = None
        self._room = (0, 0)
        """Samples and bytes of values that still fit into the open shard."""
        self._pieces = source.read(
            self._units,
            schema=plan.schema,
            skip_bad=plan.skip_bad,
            block_bytes=min(BLOCK_BYTES, plan.shard_bytes),
            hurry=plan.first.left,
        )

    def run(self, ahead: Callable[[], Drawing | None]) -> Drawing | None:
        """Fetch and commit all positions of the claim. Return the result of ``ahead``.

        ``ahead`` is called once all positions have been requested. If the claim was removed, only its uncommitted
        rest is dropped.
        """
        coming, asked = None, False
        pieces, times = iter(self._pieces), self._plan.times
        try:
            while (piece := times.fetched(pieces)) is not None:
                # Once only: `ahead` takes a claim in the catalog, and each worker may hold one claim ahead, not more.
                if self._pieces.begun and not asked:
                    coming, asked = ahead(), True
                self._take(piece)
            self._even = False
            # `_even` is False from here on, so that _keep() does not try a failed commit a second time.
            self._commit(self._claim.stop)
        # The part is drawn by another node now, or the claim was removed. What this drawing committed stays; the
        # rest belongs to somebody else, and `coming` may still be valid.
        except ClaimGone:
            return coming
        except BaseException:
            # `run` raises, so the caller never learns of `coming`, whose requests are in flight already.
            if coming is not None:
                coming.close()
            # Samples that are complete cost a download. They are committed before the error ends this worker.
            self._keep()
            raise
        finally:
            self.close()
        return coming

    def _take(self, piece: ReadResult) -> None:
        """Write the samples of a piece. Commit the shard if it is full, or if the time of the first shard has come."""
        # Only the last piece before an error has gaps. If its samples do not fit into the open shard, they are dropped
        # and fetched again by a later claim.
        if piece.gaps is not None and not self._may_leave(piece.gaps, piece.block.nbytes, len(piece.block)):
            return
        self._even = False
        # The source counts in the array of units that it was given. The catalog counts positions of the claim.
        skipped = [replace(skip, draw=int(self._there[skip.draw])) for skip in piece.skipped]
        self._barren[[skip.draw for skip in skipped]] = True
        self._skipped += skipped
        self._fetched += piece.fetched
        # Sent before the samples are written: the progress shows what arrives, although a shard may wait for room.
        self._channel.send({"fetched": piece.fetched, "samples": len(piece.block), "bytes": piece.block.nbytes})
        block, at = piece.block.with_plain_bools(), self._there[piece.draws]
        while len(block):
            fit = self._fitting(block, at)
            if fit == 0:
                self._commit(self._claim.start + int(at[0]))
                # All samples of one unit go into one shard. With half of them committed, a killed pull could not say
                # whether the draw is done.
                least = int(np.searchsorted(at, at[0], side="right"))
                try:
                    self._open(block, least)
                # No shard under this cap holds the unit, however much is evicted. Only this draw is left out.
                except CapTooSmall as error:
                    self._leave_out(block.slice(0, least), int(at[0]), error)
                    block, at = block.slice(least, len(block)), at[least:]
                continue
            assert self._files is not None
            with self._plan.times.at("write"):
                self._files.write(block.slice(0, fit))
            self._room = (self._room[0] - fit, self._room[1] - block.slice(0, fit).nbytes)
            block, at = block.slice(fit, len(block)), at[fit:]
        if piece.done:
            self._upto = self._claim.start + int(self._there[piece.done - 1]) + 1
        left = self._plan.first.left()
        # Training waits for the first shard, so it is closed with the samples that it has.
        if left is not None and left <= 0 and self._files is not None:
            self._commit(self._upto)
        self._even = True

    def _may_leave(self, gaps: npt.NDArray[np.int64], nbytes: int, samples: int) -> bool:
        """Mark positions that stay open, and return True, if the piece behind them fits into the open shard.

        The space for further ranges in the shard's record is counted. Reopened draws stay in one piece.
        """
        claim, at = self._claim, self._there[gaps]
        # Each run of gaps adds a range to the shard's record, whose size was reserved before anybody knew of gaps.
        more = RANGE_BYTES * (1 + int(np.count_nonzero(np.diff(at) > 1)))
        fits = self._files is not None and samples <= self._room[0] and nbytes + more <= self._room[1]
        # finish() opens gaps as ordinary claims. Reopened draws would lose their mark there, and no longer be fetched
        # before all others.
        if not fits or claim.reopened:
            return False
        self._gaps[at] = True
        return True

    def _keep(self) -> None:
        """Commit the samples that came before an error, so that they are not fetched again."""
        if self._even and self._files is not None:
            # The first error is the one that matters to the user. The draws stay open and are fetched again.
            with contextlib.suppress(CacheToolError, OSError):
                self._commit(self._upto)

    def close(self) -> None:
        """Cancel the requests in flight, and give up the open shard."""
        self._pieces.close()
        self._abort()

    def _fitting(self, block: Block, at: npt.NDArray[np.int64]) -> int:
        """Return the number of samples of ``block`` that go into the open shard."""
        samples, nbytes = self._room
        upto = np.cumsum(block.sample_nbytes[:samples])
        fit = int(np.searchsorted(upto, nbytes, side="right"))
        # Cut at a unit's end: with half of a unit in a shard, the draw would be neither done nor open.
        return fit if fit in (0, len(block)) or at[fit] != at[fit - 1] else int(np.searchsorted(at, at[fit]))

    def _open(self, block: Block, least: int) -> None:
        """Reserve a shard for the rest of the claim.

        The first ``least`` samples of ``block`` fit in any case, even if they are more than a shard should hold.
        """
        plan = self._plan
        # The reservation covers only the draws that are still to come: reserving a whole shard for a short rest would
        # evict too much.
        ahead = len(self._there) - int(np.searchsorted(self._there, self._from - self._claim.start))
        samples = max(least, ahead * plan.per_unit)
        nbytes = max(plan.shard_bytes, int(block.sample_nbytes[:least].sum()))
        # The size is exact for a fixed schema. Otherwise the shard has the bytes of a full one, and closes when they
        # are used up.
        if plan.schema.is_fixed:
            samples = min(samples, max(least, nbytes // max(1, plan.schema.fixed_nbytes)))
            nbytes = samples * plan.schema.fixed_nbytes
        bound = shard_bound(plan.kind, plan.schema, samples, nbytes, self._cache.layout.disk_block)
        with plan.times.at("room"):
            self._staging = self._cache.stage(
                dataset=plan.dataset,
                schema=plan.schema,
                format=plan.kind.name,
                # The record lists the ranges of draws. They are reserved as well, so that used bytes never pass the
                # cap.
                bound=bound + RANGE_BYTES * self._most_ranges(),
                job=plan.job,
                room=plan.room,
                waiting=WaitingFor(self._channel).tell,
            )
        self._files = ShardFiles(self._staging.path, plan.kind, plan.schema, samples=samples, nbytes=nbytes)
        self._room = (samples, nbytes)

    def _leave_out(self, block: Block, at: int, error: CapTooSmall) -> None:
        """Skip one draw that no shard under this cap can hold, or raise an error that names it."""
        nbytes, keys = block.nbytes, block.columns.get(KEY)
        # The draw is no larger than a normal shard, so the cap itself is too small, and skipping draws would not help.
        if nbytes <= self._plan.shard_bytes:
            raise error
        key = f"draw {self._claim.start + at}"
        if isinstance(keys, Ragged):
            # A unit may have many samples. The largest one tells the user most.
            key = keys[int(np.argmax(block.sample_nbytes))].tobytes().decode("utf-8", "surrogateescape")
        size = format_size(nbytes)
        if len(block) > 1:
            size += f" together with {len(block) - 1} other samples of its archive"
        if not self._plan.skip_bad:
            advice = str(error).replace("lower --shard-size", "leave the sample out with --on-error skip")
            raise CapTooSmall(f"sample {printable(key[:200])!r} has {size}: {advice}") from None
        self._barren[at] = True
        self._skipped.append(Skipped(at, key, f"it has {size}, more than a shard under this cap can hold"))

    def _commit(self, upto: int) -> None:
        """Make all positions below ``upto`` done: commit the samples of the open shard, and count the skipped ones."""
        with self._plan.times.at("commit"):
            self._finish(upto)

    def _finish(self, upto: int) -> None:
        plan, skipped = self._plan, [s for s in self._skipped if self._claim.start + s.draw < upto]
        files, staging, start = self._files, self._staging, self._from
        left_out, vanished = len(skipped), self._gone(upto) - self._gone(start)
        ranges = self._ranges(upto)
        # The job counts draws that gave samples. Draws that the cache had before are done but are not counted, because
        # `--samples N` asks for new ones.
        fresh = total(ranges)
        brought = fresh if self._claim.reopened else fresh - left_out - vanished
        gaps = runs(start, self._gaps[start - self._claim.start : upto - self._claim.start])
        done = Done(
            start, upto, ranges,
            draws=brought, skipped=left_out, vanished=vanished, fetched=self._fetched, gaps=gaps,
        )  # fmt: skip
        if files is None or staging is None:
            # Nothing to finish, and a transaction would cost an fsync.
            if upto == start:
                return
            with self._cache.catalog.write() as connection:
                self._mark_tried(connection, upto)
                self._claims.finish(connection, self._claim, done)
                # Some draws are done because the cache had them, and no shard tells of that. The source's record must,
                # or a rebuilt catalog would draw them again.
                if fresh < upto - start:
                    bump(connection)
                    write_source_record(connection, self._cache.layout, plan.source)
        else:
            facts = files.facts()
            # facts() has finished and closed the files. After an error below only the staging shard is left to give up.
            self._files = None

            # Runs inside the transaction that makes the shard visible. Killed before it, the draws are open and the
            # shard is removed; killed after it, both are final.
            def close(connection: Connection) -> None:
                self._mark_tried(connection, upto)
                self._claims.finish(connection, self._claim, done)

            staging.commit(
                Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files),
                origin=Origin(plan.source, self._source.url, self._claim.pass_number, ranges, self._claim.part),
                close=close,
            )
            self._staging = None
            # Only after the commit, because before it no trainer can read the shard.
            plan.first.closed()
            self._channel.send({"committed": facts.samples, "shard": staging.id, "payload": facts.payload})
        # `_fetched` begins anew, because these bytes were counted in the transaction that was just committed.
        self._from, self._room, self._fetched = upto, (0, 0), 0
        self._skipped = [s for s in self._skipped if s not in skipped]
        if skipped:
            self._channel.send({"skipped": [{"key": s.key, "reason": s.reason} for s in skipped]})
            # Checked after the commit, so that the samples that did come are kept when the pull stops.
            self._refuse_too_many(skipped[-1])

    def _mark_tried(self, connection: Connection, upto: int) -> None:
        """Keep the reopened draws below ``upto`` open that gave no sample again."""
        if self._claim.reopened:
            # Another pull may find the object again, so these draws stay open; but this job does not try them a second
            # time.
            barren = runs(self._from, self._barren[self._from - self._claim.start : upto - self._claim.start])
            mark_tried(connection, self._plan.job, self._claim, barren)

    def _ranges(self, upto: int) -> Ranges:
        """Return the positions below ``upto`` that are new in the open shard.

        Positions whose samples the cache has are left out, and gaps. Of reopened draws, those without a sample are
        still open.
        """
        part = slice(self._from - self._claim.start, upto - self._claim.start)
        return runs(self._from, ~(self._cached | self._gaps | (self._barren & self._claim.reopened))[part])

    def _most_ranges(self) -> int:
        """Return the most :meth:`_ranges` that there can be, whatever gives no sample."""
        count = len(self._ranges(self._claim.stop))
        # In the worst case every other reopened draw gives no sample, and each sample is a range of its own.
        return count + (self._claim.stop - self._from) // 2 if self._claim.reopened and self._plan.skip_bad else count

    def _gone(self, upto: int) -> int:
        """Return the number of the claim's positions below ``upto`` that have vanished."""
        return int(self._vanished[upto - self._claim.start - 1]) if upto > self._claim.start else 0

    def _refuse_too_many(self, last: Skipped) -> None:
        unused, draw_count = self._claims.unused()
        if too_many(unused, draw_count):
            raise BadObject(
                f"{unused} of {draw_count} draws could not be used, more than 1 %;"
                f" the last was {last.key}: {last.reason}"
            )

    def _abort(self) -> None:
        if self._files is not None:
            # First, so that no file is open when staging.abort() deletes the folder.
            self._files.abort()
        if self._staging is not None:
            self._staging.abort()
