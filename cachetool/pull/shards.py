"""One claim on its way from a source into shards.

::

    units in drawn order -> fetch, decode -> blocks -> shard, reserved whole -> commit, draws done
                                                 ^                                |
                                                 +--- the rest of the claim, when a shard closed early

The claim is taken by :mod:`cachetool.pull.worker`, which asks for the next one as soon as all of this one was asked
for.
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
from cachetool.sources.base import ReadResult, Skipped
from cachetool.stores.redact import printable

__all__ = ["Drawing", "FirstShard", "WorkerJob"]


class FirstShard:
    """When a worker closes its first shard at the latest, with what it has: training begins with that."""

    def __init__(self, seconds: float | None) -> None:
        """In so many ``seconds`` from now; None: when it is full."""
        self._at = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds until then, as :data:`cachetool.sources.base.Hurry`; None once a shard was closed."""
        return None if self._at is None else self._at - time.monotonic()

    def closed(self) -> None:
        """A shard was committed."""
        self._at = None


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What stays the same for all shards of a worker."""

    job: str
    source: str
    dataset: str
    kind: Format
    schema: Schema
    shard_bytes: int
    room: Room
    skip_bad: bool
    per_unit: int
    """About how many samples one draw brings."""
    first: FirstShard


class Drawing:
    """One claim on its way into one shard, or into several when samples turn out larger than expected."""

    def __init__(self, cache: CacheDir, claims: Claims, plan: WorkerJob, claim: Claim, channel: Channel) -> None:
        source = claims.samples
        assert source is not None
        self._cache, self._claims, self._source, self._plan, self._claim = cache, claims, source, plan, claim
        order = order_of_pass(source, claim.source, claim.pass_number, claim.part)
        units = order[np.arange(claim.start, claim.stop)]
        self._cached = claims.there(claim, units)
        vanished = np.isin(units, source.vanished) & ~self._cached
        self._barren = vanished.copy()
        """Positions that give no sample, as far as is known."""
        self._gaps = np.zeros(len(units), dtype=np.bool_)
        """Positions that stay open although some behind them are done."""
        self._there = np.nonzero(~vanished & ~self._cached)[0]
        """Positions in the claim whose units are still in the source, and not in the cache."""
        self._units, self._vanished = units[self._there], np.cumsum(vanished)
        self._channel = channel
        self._from = self._upto = claim.start
        """Positions below the one are committed; of those below the other the samples are in the open shard."""
        self._even = True
        """Whether just these samples are in it: not while some are written."""
        self._skipped: list[Skipped] = []
        self._fetched = 0
        self._staging: Staging | None = None
        self._files: ShardFiles | None = None
        self._room = (0, 0)
        """Samples and bytes of values that the open shard still takes."""
        self._pieces = source.read(
            self._units,
            schema=plan.schema,
            skip_bad=plan.skip_bad,
            block_bytes=min(BLOCK_BYTES, plan.shard_bytes),
            hurry=plan.first.left,
        )

    def run(self, ahead: Callable[[], Drawing | None]) -> Drawing | None:
        """Fetch all positions of the claim and commit them, unless their part is drawn elsewhere by now. Gives what
        ``ahead`` did, which is called once all of them have been asked for."""
        coming, asked = None, False
        try:
            for piece in self._pieces:
                if self._pieces.begun and not asked:
                    coming, asked = ahead(), True
                self._take(piece)
            self._even = False
            self._commit(self._claim.stop)
        except ClaimGone:
            return coming
        except BaseException:
            if coming is not None:
                coming.close()
            self._keep()
            raise
        finally:
            self.close()
        return coming

    def _take(self, piece: ReadResult) -> None:
        """Write the samples of a piece, and commit what is full, or wanted by now."""
        if piece.gaps is not None and not self._may_leave(piece.gaps, piece.block.nbytes, len(piece.block)):
            return
        self._even = False
        skipped = [replace(skip, draw=int(self._there[skip.draw])) for skip in piece.skipped]
        self._barren[[skip.draw for skip in skipped]] = True
        self._skipped += skipped
        self._fetched += piece.fetched
        self._channel.send({"fetched": piece.fetched, "samples": len(piece.block), "bytes": piece.block.nbytes})
        block, at = piece.block.with_plain_bools(), self._there[piece.draws]
        while len(block):
            fit = self._fitting(block, at)
            if fit == 0:
                self._commit(self._claim.start + int(at[0]))
                least = int(np.searchsorted(at, at[0], side="right"))
                try:
                    self._open(block, least)
                except CapTooSmall as error:
                    self._leave_out(block.slice(0, least), int(at[0]), error)
                    block, at = block.slice(least, len(block)), at[least:]
                continue
            assert self._files is not None
            self._files.write(block.slice(0, fit))
            self._room = (self._room[0] - fit, self._room[1] - block.slice(0, fit).nbytes)
            block, at = block.slice(fit, len(block)), at[fit:]
        if piece.done:
            self._upto = self._claim.start + int(self._there[piece.done - 1]) + 1
        left = self._plan.first.left()
        if left is not None and left <= 0 and self._files is not None:
            self._commit(self._upto)
        self._even = True

    def _may_leave(self, gaps: npt.NDArray[np.int64], nbytes: int, samples: int) -> bool:
        """Mark positions that stay open, if what came behind them fits into the open shard, along with the ranges that
        its record has then. Reopened draws stay in one piece."""
        claim, at = self._claim, self._there[gaps]
        more = RANGE_BYTES * (1 + int(np.count_nonzero(np.diff(at) > 1)))
        fits = self._files is not None and samples <= self._room[0] and nbytes + more <= self._room[1]
        if not fits or claim.reopened:
            return False
        self._gaps[at] = True
        return True

    def _keep(self) -> None:
        """Commit what came before an error, rather than to fetch it again."""
        if self._even and self._files is not None:
            with contextlib.suppress(CacheToolError, OSError):  # the first error is the one that matters
                self._commit(self._upto)

    def close(self) -> None:
        """Cancel what is in flight, and give the open shard up."""
        self._pieces.close()
        self._abort()

    def _fitting(self, block: Block, at: npt.NDArray[np.int64]) -> int:
        """How many samples go into the open shard; those of one unit are in one shard, else it could be half drawn."""
        samples, nbytes = self._room
        upto = np.cumsum(block.sample_nbytes[:samples])
        fit = int(np.searchsorted(upto, nbytes, side="right"))
        return fit if fit in (0, len(block)) or at[fit] != at[fit - 1] else int(np.searchsorted(at, at[fit]))

    def _open(self, block: Block, least: int) -> None:
        """Reserve a shard for what is left of the claim, the first ``least`` samples of ``block`` in any case; they may
        be more than a shard."""
        plan = self._plan
        ahead = len(self._there) - int(np.searchsorted(self._there, self._from - self._claim.start))
        samples = max(least, ahead * plan.per_unit)
        nbytes = max(plan.shard_bytes, int(block.sample_nbytes[:least].sum()))
        if plan.schema.is_fixed:
            samples = min(samples, max(least, nbytes // max(1, plan.schema.fixed_nbytes)))
            nbytes = samples * plan.schema.fixed_nbytes
        bound = shard_bound(plan.kind, plan.schema, samples, nbytes, self._cache.layout.disk_block)
        self._staging = self._cache.stage(
            dataset=plan.dataset,
            schema=plan.schema,
            format=plan.kind.name,
            bound=bound + RANGE_BYTES * self._most_ranges(),
            job=plan.job,
            room=plan.room,
            waiting=WaitingFor(self._channel).tell,
        )
        self._files = ShardFiles(self._staging.path, plan.kind, plan.schema, samples=samples, nbytes=nbytes)
        self._room = (samples, nbytes)

    def _leave_out(self, block: Block, at: int, error: CapTooSmall) -> None:
        """One draw that no shard under this cap can hold: skipped, or refused by its name."""
        nbytes, keys = block.nbytes, block.columns.get(KEY)
        if nbytes <= self._plan.shard_bytes:
            raise error
        key = f"draw {self._claim.start + at}"
        if isinstance(keys, Ragged):
            key = keys[int(np.argmax(block.sample_nbytes))].tobytes().decode("utf-8", "surrogateescape")
        size = format_size(nbytes)
        if len(block) > 1:
            size += f" together with {len(block) - 1} others of its archive"
        if not self._plan.skip_bad:
            advice = str(error).replace("lower --shard-size", "leave it out with --on-error skip")
            raise CapTooSmall(f"sample {printable(key[:200])!r} has {size}: {advice}") from None
        self._barren[at] = True
        self._skipped.append(Skipped(at, key, f"it has {size}, more than a shard under this cap can hold"))

    def _commit(self, upto: int) -> None:
        """Make everything below position ``upto`` done: the open shard's samples, and what was skipped."""
        plan, skipped = self._plan, [s for s in self._skipped if self._claim.start + s.draw < upto]
        files, staging, start = self._files, self._staging, self._from
        left_out, vanished = len(skipped), self._gone(upto) - self._gone(start)
        ranges = self._ranges(upto)
        fresh = total(ranges)
        brought = fresh if self._claim.reopened else fresh - left_out - vanished
        gaps = runs(start, self._gaps[start - self._claim.start : upto - self._claim.start])
        done = Done(
            start, upto, ranges,
            draws=brought, skipped=left_out, vanished=vanished, fetched=self._fetched, gaps=gaps,
        )  # fmt: skip
        if files is None or staging is None:
            if upto == start:
                return
            with self._cache.catalog.write() as connection:
                self._mark_tried(connection, upto)
                self._claims.finish(connection, self._claim, done)
                if fresh < upto - start:  # done with no shard to tell of it
                    bump(connection)
                    write_source_record(connection, self._cache.layout, plan.source)
        else:
            facts = files.facts()
            self._files = None

            def close(connection: Connection) -> None:
                self._mark_tried(connection, upto)
                self._claims.finish(connection, self._claim, done)

            staging.commit(
                Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files),
                origin=Origin(plan.source, self._source.url, self._claim.pass_number, ranges, self._claim.part),
                close=close,
            )
            self._staging = None
            plan.first.closed()
            self._channel.send({"committed": facts.samples, "shard": staging.id, "payload": facts.payload})
        self._from, self._room, self._fetched = upto, (0, 0), 0
        self._skipped = [s for s in self._skipped if s not in skipped]
        if skipped:
            self._channel.send({"skipped": [{"key": s.key, "reason": s.reason} for s in skipped]})
            self._refuse_too_many(skipped[-1])

    def _mark_tried(self, connection: Connection, upto: int) -> None:
        """Keep reopened draws below ``upto`` open that gave nothing again."""
        if self._claim.reopened:
            barren = runs(self._from, self._barren[self._from - self._claim.start : upto - self._claim.start])
            mark_tried(connection, self._plan.job, self._claim, barren)

    def _ranges(self, upto: int) -> Ranges:
        """The positions below ``upto`` that are not done yet, but for those whose samples are in the cache. Of
        reopened draws, those that gave none are still open."""
        part = slice(self._from - self._claim.start, upto - self._claim.start)
        return runs(self._from, ~(self._cached | self._gaps | (self._barren & self._claim.reopened))[part])

    def _most_ranges(self) -> int:
        """How many :meth:`_ranges` there will be, whatever turns out to be barren."""
        count = len(self._ranges(self._claim.stop))
        return count + (self._claim.stop - self._from) // 2 if self._claim.reopened and self._plan.skip_bad else count

    def _gone(self, upto: int) -> int:
        """How many of the claim's positions below ``upto`` have vanished."""
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
            self._files.abort()
        if self._staging is not None:
            self._staging.abort()
