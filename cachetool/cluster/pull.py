"""``pull`` into the caches of all nodes of a Ray cluster::

    look at every cache -> list and probe here -> deal parts to nodes -> a pull on each node -> result
        a node is lost, joins, or is full: look, deal again                 cachetool.cluster.node

Each node draws its own parts by itself. Nodes ask the driver for nothing, and the driver stores nothing. The parts of a
node are recorded in its cache. If a driver is killed, the next one reads from the caches how far they are.
"""

from __future__ import annotations

import base64
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cachetool.cache.draws import SourceRow
from cachetool.cache.layout import root_of
from cachetool.cluster.deal import Held, deal
from cachetool.cluster.engine import NodeLost, RayEngine, Run
from cachetool.cluster.spread import of_node
from cachetool.core.errors import CacheToolError, CapBlocked, UsageError
from cachetool.core.names import Name
from cachetool.core.nodes import Node, cache_of
from cachetool.core.permutation import part_size
from cachetool.core.progress import Progress, Report, silent
from cachetool.core.schema import Schema
from cachetool.core.text import count
from cachetool.proc.folders import make_folder, write_piece
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Message, Task
from cachetool.pull.job import PrepareArguments, Prepared, PullResult, why_ended
from cachetool.pull.options import MOST_PARTS, PullOptions
from cachetool.pull.prepare import drawn_as, pace, shard_bytes, source_id, with_classes
from cachetool.pull.run import fields_as_before
from cachetool.sources.listing import TABLE_FILE
from cachetool.sources.rate_limit import shared
from cachetool.sources.readers import notes_of
from cachetool.sources.registry import check_place

__all__ = ["PLACEMENTS", "pull_over", "reach_of"]

PLACEMENTS = ("split", "replicate")
_PARTS = 16
"""Parts for each node of a new source: when a node is lost, sixteen others share its parts."""
_SEEK = 2.0
"""Seconds between two looks for nodes that joined or left."""
_REPORTS = 50
"""Maximum reports in a second of all nodes together."""


def pull_over(
    cache: str | Path | None,
    url: str,
    options: PullOptions,
    *,
    address: str | None = None,
    placement: str = "split",
    max_size: int | str | None = None,
    min_free: int | str | None = None,
    report: Report = silent,
    notify: Callable[[str], None] = lambda line: None,
) -> PullResult:
    """Draw samples of ``url`` into the caches of all nodes of a Ray cluster.

    ``cache`` is a folder, with ``{node}`` as in :mod:`cachetool.core.nodes`; the cap is that of each cache.

    Raises the errors of :func:`cachetool.cluster.engine.connect` and :func:`cachetool.pull.run.pull`.
    """
    from cachetool.cluster.engine import connect

    if options.start_early:
        raise UsageError("--start-early cannot be used with --on ray; leave it out")
    check_place(url)
    if "://" not in url:
        # Tasks of other nodes have another working directory.
        url = str(Path(url).absolute())
    template, size = str(root_of(cache).absolute()), {"max_size": max_size, "min_free": min_free}
    with connect(address, notify) as engine, listing_scratch() as scratch:
        pull = _Pull(engine, template, url, options, size, scratch, report, notify, replicate=placement == "replicate")
        return pull.run()


def reach_of(cut: int, done: Mapping[int, int], units: int, draws: int) -> int:
    """Return how many first draws of a source must be done so that ``draws`` more are done, at most ``units``.

    The source is cut into ``cut`` parts, and ``done`` holds the finished draws of each part.
    """

    def more(upto: int) -> int:
        return sum(max(0, part_size(upto, part, cut) - done.get(part, 0)) for part in range(cut))

    # `more` never falls as `upto` grows, so a binary search over the range needs some 40 steps,
    # whatever the number of units.
    return min(units, bisect_left(range(units + 1), draws, key=more))


@dataclass(eq=False, slots=True)
class _Member:
    """A node that takes part, with what is known of its cache and its pull."""

    host: Node
    root: str
    looked: Message
    """Result of :func:`cachetool.cluster.node.look`."""
    is_late: bool = False
    """True when the node joined while the pull ran."""
    parts: set[int] = field(default_factory=set)
    run: Run | None = None
    is_due: bool = True
    """True when a pull must be started there, once none runs."""
    full: str = ""
    """Reason why its cache has no space for more; empty while it has room."""
    results: list[Message] = field(default_factory=list)
    """Results of its pulls that ended."""
    progress: Progress | None = None
    """Progress of the running pull."""
    place: tuple[int, int] | None = None
    """Pass of a replica and the draws left of it, at the last check whether the replica is behind."""

    @property
    def name(self) -> str:
        """The name of the node, for people."""
        return self.host.name

    @property
    def is_starting(self) -> bool:
        """True while its pull does not draw yet."""
        return self.run is not None and (self.progress is None or self.progress.phase != "pull")

    @property
    def source(self) -> SourceRow | None:
        """The source as its cache knows it."""
        return None if self.looked["source"] is None else SourceRow.from_json(self.looked["source"])

    def held(self, cut: int) -> Held:
        """Return the parts of the source that its cache holds, if the source is cut into ``cut`` parts."""
        source = self.source
        if source is None or source.cut != cut:
            return Held(self.looked["cap"], is_full=bool(self.full))
        begun = {part.number for part in source.parts if part.frontier}
        parts = {part: samples for part, samples, _ in self.looked["parts"]}
        return Held(self.looked["cap"], parts, frozenset(parts.keys() - begun), is_full=bool(self.full))

    def sum(self, name: str) -> int:
        """Return the sum of a figure over its pulls that ended."""
        return sum(result[name] for result in self.results)

    def row(self, state: str) -> dict[str, Any]:
        """Return the row of the node in a result."""
        names = ("samples", "shards", "bytes", "fetched", "evicted_shards")
        return {"node": self.name, "cache": self.root, **{name: self.sum(name) for name in names}, "state": state}


class _Pull:
    """One pull over nodes while it runs."""

    def __init__(
        self,
        engine: RayEngine,
        template: str,
        url: str,
        options: PullOptions,
        size: Message,
        scratch: Path,
        report: Report,
        notify: Callable[[str], None],
        *,
        replicate: bool,
    ) -> None:
        self._engine, self._template, self._url, self._options = engine, template, url, options
        self._size, self._scratch, self._report, self._notify = size, scratch, report, notify
        self._may_release = options.repart
        """True when samples of another cut may be lost (``--repart``)."""
        self._replicate, self._id, self._began = replicate, source_id(url, options), time.monotonic()
        self._members: dict[str, _Member] = {}
        """Members by the id of their node."""
        self._lost: list[_Member] = []
        self._seen: set[str] = set()
        """Ids of the nodes that joined. A node that cannot take part is not asked again."""
        self._asked: list[Run] = []
        self._next_look = 0.0
        self._is_changed = False
        """True when the parts must be dealt again."""
        self._listings: dict[str, str] = {}
        """Folder of the listing on each node, by the id of the node."""
        self._paces: dict[str, str] = {}
        """File with the share of --max-rate on each node, by the id of the node."""
        self._listing = scratch / "listings" / self._id
        self._cut, self._units, self._per_unit = 1, 0, 1
        self._upto, self._pass, self._next_pass = 0, 0, False
        """First draws of a pass that must be done; the number of that pass, which matters to replicas; True if no node
        has begun that pass."""
        self._target: int | None = None
        self._released = 0
        """Samples that were lost because another node draws their part."""

    def run(self) -> PullResult:
        """Run until no node has anything left to draw, and return the result."""
        runs = self._look(self._engine.nodes())
        self._take(runs)
        if not self._members:
            raise next(run.error for run in runs if run.error is not None)
        self._refuse_shared()
        prepared = self._prepare()
        self._settle(prepared)
        self._deal()
        self._target = self._aim()
        try:
            while True:
                self._seek()
                # A pull reports "pull" only after it has checked its own parts. If the parts
                # changed before, that check would take the old parts back.
                if self._is_changed and not any(member.is_starting for member in self._nodes):
                    self._take(self._look([member.host for member in self._nodes]))
                    self._deal()
                self._start()
                if self._paces:
                    # Nodes may have joined or left, so the shares are computed for those that are
                    # here now.
                    self._share_rate()
                if not any(member.run for member in self._nodes) and not self._asked and not self._more():
                    break
                self._step()
        finally:
            # Also after Ctrl-C and errors: the pulls on the nodes would otherwise continue until Ray
            # ends their agents.
            self._engine.stop([member.run for member in self._nodes if member.run is not None])
        return self._result(prepared)

    @property
    def _nodes(self) -> list[_Member]:
        """Members that are here, by name."""
        return sorted(self._members.values(), key=lambda member: member.name)

    # -- caches ------------------------------------------------------------------------------------------------------

    def _task(self, name: str, member: _Member, **arguments: Any) -> Task:
        return Task(f"cachetool.cluster.node:{name}", {"root": member.root, "source": self._id, **arguments})

    def _ask(self, hosts: Iterable[Node]) -> list[Run]:
        about = {**self._size, "source": self._id, "dataset": self._options.dataset}
        return [
            self._engine.start(
                host, Task("cachetool.cluster.node:look", {"root": cache_of(self._template, host), **about})
            )
            for host in hosts
        ]

    def _ended(self, runs: Sequence[Run]) -> None:
        while not all(run.ended for run in runs):
            self._engine.wait()

    def _look(self, hosts: Iterable[Node]) -> list[Run]:
        runs = self._ask(hosts)
        self._ended(runs)
        return runs

    def _take(self, runs: Iterable[Run], *, late: bool = False) -> None:
        """Take in the results of looks. A node that joined and cannot take part is left out; errors of other nodes are
        raised."""
        for run in runs:
            known = self._members.get(run.node.id)
            if isinstance(run.error, NodeLost):
                # Forgotten, so that the node is asked again when it comes back.
                self._seen.discard(run.node.id)
                if known is not None:
                    self._lose(known, run.error)
            elif run.error is not None:
                # A node that joined may fail without harm to the others, as long as it has drawn
                # nothing. A node of the first hour must not: its samples would be missing.
                if not (late or (known is not None and known.is_late and not known.results)):
                    raise of_node(run.node.name, run.error) from run.error
                self._leave_out(run.node, run.error)
            elif known is not None:
                known.looked = run.result or {}
            else:
                root = cache_of(self._template, run.node)
                self._members[run.node.id] = member = _Member(run.node, root, run.result or {}, is_late=late)
                self._seen.add(run.node.id)
                self._is_changed = True
                try:
                    if late:
                        self._refuse_shared()
                        self._refuse_cut(member)
                except UsageError as error:
                    self._leave_out(run.node, error)

    def _refuse_shared(self) -> None:
        """Raise :class:`UsageError` when two nodes have one cache."""
        seen: dict[str, str] = {}
        for member in self._nodes:
            # A new cache has no identity yet, so its place is compared. The place includes the host
            # name, so a folder that two machines share over a network is found by the identity in
            # its catalog.
            found = [member.looked["place"], *([] if (known := member.looked["identity"]) is None else [known])]
            for mark in map(repr, found):
                if mark in seen:
                    raise UsageError(
                        f"nodes {seen[mark]} and {member.name} share one cache folder, but each needs its own;"
                        " put {node} into --cache, as in --cache /data/{node}"
                    )
                seen[mark] = member.name

    def _seek(self) -> None:
        """Find nodes that joined the cluster or came back, and those that left while they had no pull."""
        if time.monotonic() >= self._next_look:
            # Less often with many nodes, since a look asks Ray for all of them.
            self._next_look = time.monotonic() + max(_SEEK, len(self._members) / 100)
            hosts = self._engine.nodes(strict=False)
            here = {host.id for host in hosts}
            for member in self._nodes:
                if member.run is None and member.host.id not in here:
                    self._lose(member, NodeLost(member.host))
            # A node that came back may not be missed yet under its old id. It is asked once the old
            # one is lost.
            names = {member.name for member in self._nodes}
            new = [host for host in hosts if host.id not in self._seen and host.name not in names]
            self._seen |= {host.id for host in new}
            self._asked += self._ask(new)
        answered = [run for run in self._asked if run.ended]
        self._asked = [run for run in self._asked if not run.ended]
        self._take(answered, late=True)

    def _lose(self, member: _Member, error: NodeLost) -> None:
        self._members.pop(member.host.id, None)
        self._lost.append(member)
        self._is_changed = True
        if not self._members:
            raise error
        self._notify(f"{str(error).partition(';')[0]}; the other nodes draw its samples again")

    def _leave_out(self, host: Node, error: CacheToolError) -> None:
        self._notify(f"{of_node(host.name, error)}; the pull continues without node {host.name}")
        if self._members.pop(host.id, None) is not None:
            self._is_changed = True

    # -- the source --------------------------------------------------------------------------------------------------

    def _prepare(self) -> Prepared:
        """Get the listing from a node that has it, or list here; then probe, and look for new objects with
        ``refresh``."""
        rows = [(row.units, row.pass_number, member) for member in self._nodes if (row := member.source) is not None]
        # The listing with the most units, because a listing only grows: nodes with fewer units get
        # its further segments.
        first = max(rows, key=lambda entry: entry[:2], default=(0, 0, None))[2]
        row = None if first is None else first.source
        seed, sequential = drawn_as(row, self._options)
        options = fields_as_before(self._options, row)
        make_folder(self._listing.parent)
        if first is not None:
            make_folder(self._listing)
            self._fetch(first)
            options = options.with_source(with_classes(options.source, Schema.from_json(first.looked["schema"])))
        order = {
            "seed": seed, "sequential": sequential, "pass_number": row.pass_number if row else 0,
            "segments": row.segments if row else (),
        }  # fmt: skip
        arguments = PrepareArguments(
            url=self._url,
            listing=str(self._listing),
            options=options.source.to_json(),
            order=order,
            units=row.units if row else None,
            skip_bad=options.on_error == "skip" or row is not None,
            skip_keys=options.on_error == "skip",
            refresh=str(self._scratch) if options.refresh and row is not None else None,
            early=None,
            pace=pace(options, self._scratch),
            looked=None,
            cut=1,
            parts=(),
            samples=None,
            shared=None,
            probed=None,
        )

        def heard(_: int, message: Message) -> None:
            self._report(
                Progress("list", message["listed"]) if "listed" in message
                else Progress("schema", 0, message["probing"])
            )  # fmt: skip

        with LocalEngine() as local:
            (message,) = local.run([Task("cachetool.pull.listing:prepare", asdict(arguments))], heard)
        prepared = Prepared.from_json(message)
        for name, units, identity in prepared.change.segments if prepared.change is not None else ():
            os.rename(self._scratch / name, self._listing / name)
            prepared = replace(prepared, units=units, identity=identity)
        self._options = replace(options, seed=seed, order="sequential" if sequential else "random")
        return prepared

    def _fetch(self, member: _Member) -> None:
        """Copy the listing of the source from the cache of a node."""

        def heard(message: Message) -> None:
            # The names come from another machine and become paths, so each part is checked.
            names = [Name(name) for name in message["name"].split("/")]
            write_piece(self._listing, names, message["at"], memoryview(base64.b64decode(message["piece"])))

        run = self._engine.start(member.host, self._task("listing", member), heard)
        self._ended([run])
        if run.error is not None:
            raise of_node(member.name, run.error) from run.error

    # -- parts -------------------------------------------------------------------------------------------------------

    def _settle(self, prepared: Prepared) -> None:
        """Decide the number of parts, the format and size of shards, and how many draws must be done."""
        rows = [row for member in self._nodes if (row := member.source) is not None]
        for member in self._nodes:
            row = member.source
            if row is not None and (row.seed, row.sequential) != (rows[0].seed, rows[0].sequential):
                raise UsageError(
                    f"node {member.name} draws {row.url} with another --seed or --order than the others; give it an"
                    " empty cache folder, or pull into another --dataset"
                )
        cuts = [row.cut for row in rows if row.cut > 1]
        if not self._replicate:
            # The cut of most caches, because each cache with another one would lose its samples.
            self._cut = max(cuts, key=cuts.count) if cuts else _PARTS * len(self._members)
        for member in self._nodes:
            self._refuse_cut(member)
        self._units = prepared.units
        self._per_unit, options = prepared.per_unit, self._options
        kinds = [member.looked["format"] for member in self._nodes if member.looked["format"]]
        changes: dict[str, Any] = {"to": options.to or (kinds[0] if kinds else None)}
        # Replicas must cut the same shards on every node, which makes equal digests. So all take
        # the size for the smallest cap, and no first shard closes early: that cut depends on time.
        if self._replicate:
            cap = min(member.looked["cap"] for member in self._nodes)
            changes |= {"shard_size": str(shard_bytes(cap, options)), "first_shard_after": "0s"}
        # `repart` and no `refresh` on the nodes: the driver has checked the loss of samples and
        # looked for new objects for all of them.
        self._options = replace(options, **changes, part="0/1", parts=None, repart=True, refresh=False)
        self._pass = max((row.pass_number for row in rows), default=0)
        if options.samples is None:
            self._upto = self._units
        else:
            grown = any(row.units != self._units for row in rows)
            self._next_pass = bool(rows) and not grown and all(self._left(member) == 0 for member in self._nodes)
            self._pass += self._next_pass
            self._upto = self._reach(-(-options.samples // self._per_unit))

    def _aim(self) -> int | None:
        """Return the samples that all nodes have to draw with their present parts; None for a pull without an end."""
        if self._options.follow:
            return None
        left = 0
        for member in self._nodes:
            source, done = member.source, dict[int, int]()
            if source is not None and source.cut == self._cut and not self._next_pass:
                done = {part: drawn for part, _, drawn in member.looked["parts"]}
            left += sum(max(0, part_size(self._upto, part, self._cut) - done.get(part, 0)) for part in member.parts)
        return left * self._per_unit

    def _refuse_cut(self, member: _Member) -> None:
        """Raise :class:`UsageError` for a cache that would lose samples by another cut."""
        source = member.source
        if source is None or source.cut == self._cut or self._may_release:
            return
        if not any(samples for _, samples, _ in member.looked["parts"]):
            return
        if self._replicate or source.cut == 1:
            drawn = "in parts, not as a whole" if self._replicate else "as a whole, not in parts"
            raise UsageError(
                f"the cache of node {member.name} has {source.url} {drawn}; continue with"
                f" --placement {PLACEMENTS[not self._replicate]},\n"
                "pull into another --dataset, or remove its samples with --repart"
            )
        raise UsageError(
            f"the cache of node {member.name} has {source.url} in {source.cut} parts, the other nodes in"
            f" {self._cut};\ngive it an empty cache folder, or remove its samples with --repart"
        )

    def _left(self, member: _Member) -> int:
        """Return the draws that are left of the present pass of a node; -1 for a node without the source in this
        cut."""
        source = member.source
        if source is None or source.cut != self._cut:
            return -1
        return source.size - int(sum(done for _, _, done in member.looked["parts"]))

    def _done(self) -> dict[int, int]:
        """Return the finished draws of each part, on any node; of replicas those of the one that is farthest."""
        done: dict[int, int] = {}
        for member in self._nodes:
            source = member.source
            if source is not None and source.cut == self._cut and not self._is_behind(member):
                for part, _, drawn in member.looked["parts"]:
                    done[part] = max(drawn, done.get(part, 0))
        return done

    def _is_behind(self, member: _Member) -> bool:
        """Return True when a replica is in an earlier pass than others."""
        return self._replicate and member.source is not None and member.source.pass_number < self._pass

    def _reach(self, draws: int) -> int:
        return reach_of(self._cut, {} if self._next_pass else self._done(), self._units, draws)

    def _deal(self) -> None:
        """Deal the parts. Nodes that lose parts give them up before other nodes get them."""
        self._is_changed = False
        members = {member.name: member for member in self._nodes}
        if self._replicate:
            for member in members.values():
                member.parts = {0}
            return
        held = {name: member.held(self._cut) for name, member in members.items()}
        dealt = deal(self._cut, held, most=MOST_PARTS)
        if lacking := self._cut - sum(map(len, dealt.values())):
            raise UsageError(
                f"{count(lacking, 'part')} of {self._cut} are left over: a cache draws at most {MOST_PARTS};"
                " add nodes, or pull into another --dataset"
            )
        before = {name: set(held[name].parts) for name in members}
        # First release, then take: if the driver is killed in between, a part has no owner, and the
        # next driver deals it. The other way round it would have two owners, who draw the same
        # samples.
        fewer = [member for name, member in members.items() if before[name] - dealt[name]]
        self._assign(fewer, {member.name: before[member.name] & dealt[member.name] for member in fewer})
        more = [member for name, member in members.items() if dealt[name] - before[name]]
        # Only caches with a running pull. A pull that is started later takes its parts by its own
        # option.
        self._assign([member for member in more if member.run is not None and before[member.name]], dealt)
        for member in members.values():
            # A full node is not started again for parts that it had already when it became full.
            gains = dealt[member.name] - before[member.name] - (member.parts if member.full else set())
            member.parts = dealt[member.name]
            member.is_due = member.is_due or bool(gains)

    def _assign(self, members: Iterable[_Member], dealt: Mapping[str, set[int]]) -> None:
        """Let caches draw other parts. The running pulls into them continue, and a further pull follows for new
        parts."""
        runs = []
        for member in members:
            task = self._task("assign", member, url=self._url, parts=sorted(dealt[member.name]))
            runs.append(self._engine.start(member.host, task))
        self._ended(runs)
        for run in runs:
            # The loss of a node is found by the pull that runs there, or by the next look.
            if run.error is not None and not isinstance(run.error, NodeLost):
                raise of_node(run.node.name, run.error) from run.error
            self._released += (run.result or {}).get("released", 0)

    # -- pulls on the nodes ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the pulls that are due."""
        if not any(member.is_due and member.run is None and member.parts for member in self._nodes):
            return
        self._share_rate()
        # Computed again, because sharing the rate may have left out a node that does not answer.
        due = [member for member in self._nodes if member.is_due and member.run is None and member.parts]
        lack = [member.host for member in due if member.host.id not in self._listings]
        if lack:
            self._listings |= self._engine.send(lack, self._listing.parent)
        # With more nodes each reports less often, so that the driver never gets more than 50
        # reports a second.
        seconds = max(0.2, len(self._members) / _REPORTS)
        for member in due:
            options = replace(
                self._options,
                part=f"{','.join(map(str, sorted(member.parts)))}/{self._cut}",
                listing=self._listings.get(member.host.id),
            )
            if options.samples is not None:
                # A replica that is behind first draws the rest of its own pass; a later pull brings
                # the pass of the others.
                first = self._is_behind(member) and self._left(member) > 0
                options = replace(options, samples=(self._units if first else self._upto) * self._per_unit)
            pace_file = self._paces.get(member.host.id)
            task = self._task(
                "draw", member, **self._size, url=self._url, options=options.to_json(),
                next_pass=self._next_pass or self._is_behind(member), pace=pace_file, seconds=seconds,
            )  # fmt: skip
            member.run, member.is_due = self._engine.start(member.host, task, self._heard(member)), False

    def _heard(self, member: _Member) -> Callable[[Message], None]:
        def heard(message: Message) -> None:
            if "line" in message:
                self._notify(f"node {member.name}: {message['line']}")
                return
            member.progress = Progress(**message)

        return heard

    def _tell(self) -> None:
        drawing = [member.progress for member in self._nodes if member.progress is not None]
        steps = [step for step in drawing if step.phase == "pull"]
        total = {name: sum(getattr(step, name) for step in steps) for name in _SUMMED}
        ended = sum(member.sum("samples") for member in self._nodes)
        note = next((step.note for step in steps if step.note), "")
        self._report(Progress("pull", ended + sum(step.done for step in steps), self._target, note=note, **total))

    def _share_rate(self) -> None:
        """Give each node an equal share of --max-rate, whenever their number has changed."""
        if self._options.max_rate is None or self._members.keys() == self._paces.keys():
            return
        at, share = shared(1 / len(self._members))
        self._paces = {}
        for member in self._nodes:
            try:
                self._paces[member.host.id] = self._engine.write(member.host, "pace", at, share)
            except CacheToolError as error:
                if not member.is_late or member.run is not None:
                    raise of_node(member.name, error) from error
                self._leave_out(member.host, error)
                self._paces = {}
                # The others get larger shares without the node that is left out.
                self._share_rate()
                return

    def _step(self) -> None:
        """Take in the messages of the nodes, and the ends of their pulls."""
        # With many nodes a short pause lets several answers arrive, so that one round handles them
        # all (0.2 s for a thousand nodes).
        time.sleep(len(self._members) / 5000)
        self._engine.wait()
        self._tell()
        for member in self._nodes:
            run = member.run
            if run is None or not run.ended:
                continue
            member.run, member.progress = None, None
            if isinstance(run.error, NodeLost):
                self._lose(member, run.error)
            elif run.error is not None and member.is_late and not member.results:
                self._leave_out(member.host, run.error)
            elif run.error is not None:
                # Two nodes with one cache may be the cause of this error, which a new look finds
                # and names better.
                self._take(self._look([member.host for member in self._nodes]))
                self._refuse_shared()
                raise of_node(member.name, run.error) from run.error
            else:
                answer = run.result or {}
                member.results.append(answer["result"])
                member.full = answer["full"]
                member.is_due = member.is_due and not member.full

    def _more(self) -> bool:
        """Return True when more must be drawn although no pull runs.

        Other nodes may draw the parts of full ones, and further draws may replace those that gave no sample.
        """
        self._take(self._look([member.host for member in self._nodes]))
        self._refuse_shared()
        if self._replicate and self._options.samples is not None:
            for member in self._nodes:
                if member.source is None:
                    continue
                place = member.source.pass_number, self._left(member)
                # A replica that made no progress since the last check is not started again, or the
                # loop would never end.
                member.is_due = self._is_behind(member) and place != member.place and not member.full
                member.place = place
        else:
            self._deal()
        if any(member.is_due and member.parts for member in self._nodes):
            return True
        samples, wanted = self._samples_so_far, self._options.samples
        # After the loss of a node its samples are missing in the sum, so the sum says nothing about
        # draws without a sample.
        if any(member.full for member in self._nodes) or wanted is None or samples >= wanted or self._lost:
            return False
        self._next_pass = False
        # As on one machine: the limit is raised until N samples came, because skipped draws gave
        # none. At least one draw, where an archive counts as several samples.
        upto = self._reach(max(1, (wanted - samples) // self._per_unit))
        if upto <= self._upto:
            return False
        self._upto = upto
        for member in self._nodes:
            member.is_due = True
        return True

    # -- what it came to ---------------------------------------------------------------------------------------------

    @property
    def _samples_so_far(self) -> int:
        counts = [member.sum("samples") for member in self._nodes]
        return min(counts) if self._replicate else sum(counts)

    def _result(self, prepared: Prepared) -> PullResult:
        options, nodes = self._options, self._nodes
        full = [member for member in nodes if member.full]
        samples = self._samples_so_far
        complete = all(self._left(member) == 0 for member in nodes if member.parts)
        if full and options.evicts and not complete and (options.samples is None or samples < options.samples):
            asked = prepared.samples if options.samples is None else options.samples
            raise CapBlocked(
                f"stopped at the cap with {samples} of {asked} samples: {count(len(full), 'node')} full;"
                f" {full[0].name}: {full[0].full};\nraise --max-size (the cap of each node), or add nodes"
            )
        results = [result for member in nodes for result in member.results]
        left_out, notes = notes_of(prepared.left_out)
        change = prepared.change
        rows = [member.row("full" if member.full else "") for member in nodes]
        rows += [member.row("lost") for member in self._lost]
        return PullResult(
            source=prepared.url,
            dataset=options.dataset,
            format=next((result["format"] for result in results), options.to or "lmdb"),
            seed=options.seed or 0,
            samples=samples,
            skipped=sum(result["skipped"] for result in results),
            skipped_examples=tuple(example for result in results for example in result["skipped_examples"])[:20],
            bytes=sum(result["bytes"] for result in results),
            fetched=sum(result["fetched"] for result in results),
            shards=sum(result["shards"] for result in results),
            evicted_shards=sum(result["evicted_shards"] for result in results),
            seconds=round(time.monotonic() - self._began, 3),
            pass_complete=complete,
            reason=why_ended(samples, options.samples, complete=complete, full=bool(full)),
            warning=next((result["warning"] for result in results if result["warning"]), ""),
            left_out=left_out,
            left_out_counts=dict(prepared.left_out_counts),
            notes=notes,
            of_objects=not (self._listing / TABLE_FILE).exists(),
            added=change.added if change else 0,
            vanished=change.vanished if change else 0,
            vanished_examples=change.names if change else (),
            listing=prepared.identity,
            cut=self._cut,
            released=sum(result["released"] for result in results) + self._released,
            parts=tuple(sorted(part for member in nodes for part in member.parts)) if not self._replicate else (0,),
            nodes=tuple(sorted(rows, key=lambda row: str(row["node"]))),
        )


_SUMMED = ("bytes", "flying", "retries", "used", "cap", "evicted", "shards")
