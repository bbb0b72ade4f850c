"""What the nodes of a pull are to draw, and what is done when one of them is lost or comes.

::

    each node: the listing if it lacks it, `attend` (cachetool.cluster.node) -> once all are ready: samplers
      -> a node is lost: its draws are open again; one that comes is looked at, attends, gets samplers
      -> no draw is open, no sampler runs -> result

:class:`Split`: one sequence of draws, handed out by the coordinator (:mod:`cachetool.cluster.coordinator`), each on one
node. :class:`Replicate`: the same draws on every node; each claims them out of its own catalog, up to the same
position.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachetool.cache import CacheDir, SourceRow, draws, placing
from cachetool.cache import parts as share
from cachetool.cache.draws import job_row
from cachetool.cache.listings import segments
from cachetool.cluster.crew import Crew, PullNode
from cachetool.cluster.engine import NodeLost
from cachetool.cluster.node import NodePart
from cachetool.cluster.spread import of_node
from cachetool.core.errors import CacheToolError, CapBlocked
from cachetool.core.progress import Report
from cachetool.core.text import count
from cachetool.proc.task import Message, Task
from cachetool.pull.job import PullJob, PullResult, why_ended
from cachetool.pull.run import ask_for_more
from cachetool.sources.rate_limit import shared

__all__ = ["Replicate", "Split", "Work"]


_CLAIMS = 4
"""Claims that a node gets at least, of a small pull: the first to begin takes two before the last has one."""


class Work(ABC):
    """A pull over nodes while it runs."""

    replicate: bool

    def __init__(
        self,
        crew: Crew,
        cache: CacheDir,
        pull_job: PullJob,
        job: str,
        source: SourceRow,
        size: Message,
        report: Report,
    ) -> None:
        self._crew, self._cache, self._pull_job, self._size, self._report = crew, cache, pull_job, size, report
        self._job, self._source = job, source
        self._upto: int | None = None
        """Where every node has to come to."""
        self._target: int | None = None
        """How many samples that is."""
        self._answers: Any = None
        self._paces: dict[str, str] = {}
        """Where on each node lies what its samplers keep to of --max-rate, by the node's id."""

    def run(self) -> PullResult:
        """Until no draw is open and no sampler runs."""
        self.plan()
        pull_job = self._pull_job
        arguments = {
            "root": str(self._cache.root.resolve()),
            "url": pull_job.url,
            "options": pull_job.options.source.to_json(),
            "job": self._job,
            "source": pull_job.id,
            "holder": self._cache.holder.id,
            "most": pull_job.per_shard,
            "follow": pull_job.options.follow,
        }
        self._answers = self._crew.engine.serve("cachetool.cluster.coordinator:Coordinator", arguments)
        self._attend(self._crew.nodes)
        while any(node.ready is None for node in self._crew.nodes):
            self._step()
        self.begin()
        while True:
            self._attend(self._crew.came())
            started = self._start()
            if not started and not any(node.samplers for node in self._crew.nodes) and not self.more():
                return self._result()
            self._step()

    # -- what split and replicate do each in their own way -------------------------------------------------------------

    def plan(self) -> None:  # noqa: B027
        """Before the nodes begin."""

    def begin(self) -> None:  # noqa: B027
        """All nodes have told what they have."""

    @abstractmethod
    def idle(self) -> list[PullNode]:
        """Of the nodes without samplers, those for whom there is work."""

    def size(self) -> int:
        """How many draws a claim has."""
        return self._pull_job.per_shard

    @abstractmethod
    def left(self, node: PullNode) -> int:
        """About how many draws are left for one of them."""

    @abstractmethod
    def more(self) -> bool:
        """Whether there is more to do although nothing is open."""

    @abstractmethod
    def outcome(self) -> tuple[int, bool]:
        """How many samples came, and whether the pass is complete."""

    # -- the nodes -----------------------------------------------------------------------------------------------------

    def _attend(self, nodes: Sequence[PullNode]) -> None:
        """Have nodes take part: with the listing where they lack it."""
        if not nodes:
            return
        pull_job, engine = self._pull_job, self._crew.engine
        row = self._cache.source(pull_job.id) or self._source
        parts = segments(self._cache.listing(row.id))
        lack = [
            node.host
            for node in nodes
            if (there := node.looked["source"]) is None
            or (there["units"], node.looked["segments"]) != (row.units, parts)
        ]
        places = engine.send(lack, self._cache.listing(row.id)) if lack else {}
        for node in nodes:
            folder = places.get(node.id)
            part = NodePart(
                job=self._job,
                url=pull_job.url,
                source=row,
                options=pull_job.options,
                kind=pull_job.kind,
                prepared=pull_job.prepared,
                listing=None if folder is None else Path(folder),
                replicate=self.replicate,
                upto=self._upto,
            )
            arguments = {"root": node.root, **self._size, "part": part.to_json()}
            node.attends = engine.start(
                node.host,
                Task("cachetool.cluster.node:attend", arguments),
                self._heard(node),
                answers=self._answers,
            )

    def _start(self) -> bool:
        """Start samplers on nodes that have none, where there is something to draw; whether on any."""
        pull_job, started = self._pull_job, False
        self._share_rate()
        idle = self.idle()
        most = self.size() if idle else 0  # of what is left now: a node that is lost may have left a lot
        for node in idle:
            assert node.ready is not None
            # Replicas are cut alike, whenever their samples come; and a node has one first shard.
            soon = {"first_shard_in": None} if self.replicate or node.begun else {}
            node.begun = True
            workers = pull_job.options.workers
            if not pull_job.options.follow:
                workers = min(workers, -(-self.left(node) // most))
            pace = pull_job.pace
            if pace is not None:
                pace = {"path": self._paces[node.id], "rate": pace["rate"]}
            task = pull_job.task(
                node.root,
                node.ready["job"],
                handed=not self.replicate,
                units_per_shard=most,
                pace=pace,
                **soon,
            )
            for number in range(workers):
                heard = self._heard(node, number)
                run = self._crew.engine.start(node.host, task, heard, answers=self._answers)
                node.samplers.append(run)
                started = True
        return started

    def _share_rate(self) -> None:
        """Give each node an equal part of --max-rate, anew whenever there are more or fewer of them."""
        here = self._crew.nodes
        if self._pull_job.pace is None or {node.id for node in here} == self._paces.keys():
            return
        at, share = shared(1 / len(here))
        self._paces = {}
        for node in here:
            try:
                self._paces[node.id] = self._crew.engine.write(node.host, "pace", at, share)
            except CacheToolError as error:
                if not node.late or node.begun:
                    raise of_node(node.name, error) from error
                self._leave_out(node, error)
                self._paces = {}
                self._share_rate()  # among those who are left
                return

    def _heard(self, node: PullNode, sampler: int | None = None) -> Callable[[Message], None]:
        def heard(message: Message) -> None:
            if "note" in message:
                self._crew.notify(f"node {node.name}: {message['note']}")
            elif sampler is None:
                node.heard(message)
            else:
                node.tally.add(sampler, message)
            self._report(self._crew.progress(self._target))

        return heard

    def _step(self) -> None:
        """Take in what the nodes say, and what became of their tasks."""
        self._crew.engine.wait()
        for node in self._crew.nodes:
            runs = [*node.samplers, *([node.attends] if node.attends is not None else [])]
            errors = [of_node(run.node.name, run.error) for run in runs if run.error is not None]
            lost = next((error for error in errors if isinstance(error, NodeLost)), None)
            if lost is not None:
                self._lose(node, lost)
                continue
            if errors and node.late and node.ready is None:
                self._leave_out(node, errors[0])
                continue
            if errors:
                raise errors[0]
            for run in [run for run in node.samplers if run.ended]:
                node.samplers.remove(run)
                node.full = node.full or (run.result or {}).get("full") or ""

    def _leave_out(self, node: PullNode, error: CacheToolError) -> None:
        self._crew.leave_out(node.host, error)
        self._crew.engine.stop([node.attends] if node.attends is not None else [])
        with self._cache.catalog.write() as connection:  # what it may have told of already
            placing.lose(connection, node.name, self._pull_job.id)

    def _lose(self, node: PullNode, error: NodeLost) -> None:
        self._crew.lose(node)
        with self._cache.catalog.write() as connection:
            placing.lose(connection, node.name, self._pull_job.id)
        if not self._crew.nodes:
            raise error
        self._crew.notify(f"{str(error).partition(';')[0]}; what it had is drawn again by the others")

    # -- what it came to -----------------------------------------------------------------------------------------------

    def _result(self) -> PullResult:
        self._crew.stop()
        pull_job, options, crew = self._pull_job, self._pull_job.options, self._crew
        full = [node for node in crew.nodes if node.full]
        samples, complete = self.outcome()
        source = self._cache.source(pull_job.id) or self._source
        if full and options.evicts and not complete and (options.samples is None or samples < options.samples):
            asked = source.samples if options.samples is None else options.samples
            raise CapBlocked(
                f"stopped at the cap with {samples} of {asked} samples: {count(len(full), 'node')} full;"
                f" {full[0].name}: {full[0].full};\nraise --max-size, the cap of each node, or add nodes"
            )
        tallies = [node.tally for node in crew.nodes]
        return PullResult(
            source=source.url,
            dataset=options.dataset,
            format=pull_job.kind.name,
            seed=source.seed,
            samples=samples,
            skipped=sum(tally.skipped for tally in tallies),
            skipped_examples=tuple(example for tally in tallies for example in tally.examples)[:20],
            bytes=sum(tally.payload for tally in tallies),
            fetched=sum(tally.fetched for tally in tallies),
            shards=sum(tally.shards for tally in tallies),
            evicted_shards=sum(node.fill.get("evicted", 0) for node in crew.nodes),
            seconds=round(time.monotonic() - pull_job.began, 3),
            pass_complete=complete,
            reason=why_ended(samples, options.samples, complete=complete, full=bool(full)),
            nodes=crew.rows(),
        )


class Split(Work):
    """Each draw on one node."""

    replicate = False

    def begin(self) -> None:
        """A complete pass is followed by a new one when samples are asked for by number, as in one cache."""
        if self._pull_job.wanted is not None:
            with self._cache.catalog.write() as connection:
                draws.begin_next_pass(connection, self._pull_job.id)
        self._target = None if self._pull_job.options.follow else self._count() * self._pull_job.per_unit

    def size(self) -> int:
        """Claims so small that every node gets some, and that none is long at its last one."""
        units = self._source.units if self._pull_job.options.follow else self._count()
        return max(1, min(self._pull_job.per_shard, -(-units // (_CLAIMS * len(self._crew.nodes)))))

    def _count(self) -> int:
        """Draws that are left of the pass, or of what was asked for."""
        with self._cache.catalog.read() as connection:
            most = job_row(connection, self._job).left
        return self._left() if most is None else min(self._left(), most)

    def _left(self) -> int:
        """Draws that are left of the pass."""
        with self._cache.catalog.read() as connection:
            source = draws.source_row(connection, self._pull_job.id) or self._source
            return source.units - draws.positions_done(connection, source)

    def idle(self) -> list[PullNode]:
        """Those who have room, while draws wait for somebody to take them."""
        idle = [node for node in self._crew.nodes if node.ready is not None and not node.samplers and not node.full]
        return idle if idle and self._open() else []

    def _open(self) -> bool:
        with self._cache.catalog.read() as connection:
            job, source = job_row(connection, self._job), draws.source_row(connection, self._pull_job.id)
            assert source is not None
            claimed = connection.execute(
                "SELECT coalesce(sum(stop - start), 0) FROM claims WHERE job = ? AND holder IS NOT NULL", (self._job,)
            ).fetchone()[0]
            given = connection.execute(
                "SELECT 1 FROM claims WHERE source = ? AND holder IS NULL LIMIT 1", (source.id,)
            ).fetchone()
        if job.left is not None and job.left <= claimed:
            return False
        return given is not None or source.frontier < source.units or self._pull_job.options.follow

    def left(self, node: PullNode) -> int:
        """Its share of what the pass, or the pull, has left."""
        return max(1, -(-self._count() // len(self._crew.nodes)))

    def more(self) -> bool:
        """Whether archives had fewer samples than was thought, so that more of them are drawn."""
        if any(node.full for node in self._crew.nodes):
            return False
        samples, _ = self.outcome()
        return ask_for_more(self._cache, self._job, samples, self._pull_job.options.samples)

    def outcome(self) -> tuple[int, bool]:
        """What all nodes have together."""
        return sum(node.tally.samples for node in self._crew.nodes), self._left() <= 0


class Replicate(Work):
    """The same draws on every node."""

    replicate = True
    _added = 0
    """Positions beyond those that were to be drawn at first."""

    def plan(self) -> None:
        """As far as the farthest node came, and the samples that are asked for: all come to there."""
        source, rows = self._source, self._crew.source_rows()
        far = max((row for row, _ in rows), key=lambda row: row.pass_number, default=source)
        if far.pass_number > source.pass_number:
            source = replace(source, pass_number=far.pass_number, segments=far.segments, past=far.past)
        done = [reached if row.pass_number == source.pass_number else 0 for row, reached in rows]
        done += [0] * (len(self._crew.nodes) - len(rows))
        wanted = self._pull_job.wanted
        if wanted is not None and min(done) >= source.units:
            past = (*source.past, (source.pass_number, source.units, source.segments))
            source, done = replace(source, pass_number=source.pass_number + 1, segments=(), past=past), [0]
        if wanted is not None:
            self._upto = min(source.units, max(done) + wanted)
        with self._cache.catalog.write() as connection:
            share.follow(connection, source)
        self._source = source
        left = sum((self._upto or source.units) - reached for reached in done)
        self._target = None if self._pull_job.options.follow else left * self._pull_job.per_unit

    def idle(self) -> list[PullNode]:
        """Those who did not begin yet."""
        return [node for node in self._crew.nodes if node.ready is not None and not node.begun]

    def left(self, node: PullNode) -> int:
        """What it lacks."""
        return int((node.ready or {})["left"])

    def more(self) -> bool:
        """Whether a node that came is still about to begin, or archives had fewer samples than was thought."""
        nodes, wanted = self._crew.nodes, self._pull_job.options.samples
        if any(node.ready is None for node in nodes):
            return True
        if wanted is None or self._upto is None or any(node.full for node in nodes):
            return False
        # To who was farthest all that came is what was asked for; others caught up as well.
        first = min((node for node in nodes if not node.late), key=self.left, default=nodes[0])
        by = (wanted - first.tally.samples) * (self.left(first) + self._added) // max(1, first.tally.samples)
        by = min(max(1, by), self._source.units - self._upto)
        if first.tally.samples >= wanted or by == 0:
            return False
        self._upto, self._added = self._upto + by, self._added + by
        engine = self._crew.engine
        arguments = {node.id: {"root": node.root, "job": (node.ready or {})["job"]} for node in nodes}
        runs = [
            engine.start(node.host, Task("cachetool.cluster.node:extend", {**arguments[node.id], "by": by}))
            for node in nodes
        ]
        while not all(run.ended for run in runs):
            engine.wait()
        for error in [run.error for run in runs if run.error is not None]:
            if not isinstance(error, NodeLost):  # that is found by what else runs there
                raise error
        for node in nodes:
            node.begun = False
        return True

    def outcome(self) -> tuple[int, bool]:
        """What came to each node, at least."""
        full = any(node.full for node in self._crew.nodes)
        complete = not full and (self._upto is None or self._upto >= self._source.units)
        return min(node.tally.samples for node in self._crew.nodes), complete
