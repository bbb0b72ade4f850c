"""The nodes that take part in a pull over several, as the command sees them: what is known of each cache, what runs
there, what came of it, and who was lost or came since."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachetool.cache import SourceRow
from cachetool.cluster.engine import NodeLost, RayEngine, Run
from cachetool.cluster.spread import of_node
from cachetool.core.errors import CacheToolError
from cachetool.core.names import Name
from cachetool.core.nodes import Node, cache_of
from cachetool.core.progress import Progress
from cachetool.proc.folders import write_piece
from cachetool.proc.task import Message, Task
from cachetool.pull.reports import WorkerReports

__all__ = ["Crew", "PullNode"]

_SEEK = 2.0
"""Seconds between two looks for nodes that came."""


@dataclass(eq=False, slots=True)
class PullNode:
    """A node that takes part."""

    host: Node
    root: str
    """Of its cache."""
    looked: Message
    """What :func:`cachetool.cluster.node.look` found."""
    late: bool = False
    """Whether it came while the pull ran."""
    attends: Run | None = None
    """:func:`cachetool.cluster.node.attend`, which runs as long as it takes part."""
    ready: Message | None = None
    """What that said, once samplers can be started."""
    samplers: list[Run] = field(default_factory=list)
    begun: bool = False
    """Whether there were any."""
    full: str = ""
    """Why it has no room any more."""
    tally: WorkerReports = field(default_factory=WorkerReports)
    fill: Message = field(default_factory=dict)
    """How full the cache is: used, cap, evicted."""

    @property
    def id(self) -> str:
        """Of the node in its cluster."""
        return self.host.id

    @property
    def name(self) -> str:
        """Of the node, for people."""
        return self.host.name

    def heard(self, message: Message) -> None:
        """Take in what the node says of itself."""
        if "ready" in message:
            self.ready = message["ready"]
            self.tally.samples += self.ready["samples"]
            self.tally.payload += self.ready["bytes"]
            self.tally.shards += self.ready["shards"]
        elif "fill" in message:
            self.fill = message["fill"]

    def row(self, state: str) -> dict[str, Any]:
        """What became of it, for a result."""
        return {
            "node": self.name,
            "cache": self.root,
            "samples": self.tally.samples,
            "shards": self.tally.shards,
            "bytes": self.tally.payload,
            "fetched": self.tally.fetched,
            "evicted_shards": self.fill.get("evicted", 0),
            "state": state,
        }


class Crew:
    """All nodes of a pull; made of the nodes that live now, whose caches are looked at. ``about``: arguments of
    :func:`cachetool.cluster.node.look`."""

    def __init__(
        self, engine: RayEngine, cache: str, about: Message, *, notify: Callable[[str], None] = lambda line: None
    ) -> None:
        self.engine, self.notify = engine, notify
        self._cache, self._about = cache, about
        self._by_id: dict[str, PullNode] = {}
        self.lost: list[PullNode] = []
        self._asked: list[Run] = []
        """Nodes that came, and are looked at."""
        self._seen: set[str] = set()
        """Those that came, by id; whoever could not take part is not asked again."""
        self._next = 0.0
        self._look(engine.nodes())

    @property
    def nodes(self) -> list[PullNode]:
        """Those that are here, by name."""
        return sorted(self._by_id.values(), key=lambda node: node.name)

    @property
    def all(self) -> list[PullNode]:
        """Those that are here, and those that were lost."""
        return [*self.nodes, *self.lost]

    @property
    def cap(self) -> int:
        """The least cap of a cache."""
        return min(int(node.looked["cap"]) for node in self.nodes)

    @property
    def format(self) -> str | None:
        """Of the newest shard of the first node that has one."""
        return next((node.looked["format"] for node in self.nodes if node.looked["format"]), None)

    def source_rows(self) -> list[tuple[SourceRow, int]]:
        """The source as the nodes know it that do, and how many draws of its pass are done there."""
        rows = [(node.looked["source"], node.looked["drawn"]) for node in self.nodes]
        return [(SourceRow.from_json(row), done) for row, done in rows if row is not None]

    def came(self) -> list[PullNode]:
        """Nodes that joined the cluster or came back since, every other second."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _SEEK
        names = {node.name for node in self.nodes}  # one that came back may not be missed yet
        ids = self._by_id.keys() | {node.id for node in self.lost} | self._seen
        new = [host for host in self.engine.nodes(strict=False) if host.id not in ids and host.name not in names]
        self._seen |= {host.id for host in new}
        self._asked += self._ask(new)
        return self._answered()

    def fetch_listing(self, node: PullNode, source: str, folder: Path) -> None:
        """Copy the listing of a source from the cache of a node into a folder here."""

        def heard(message: Message) -> None:
            names = [Name(name) for name in message["name"].split("/")]
            write_piece(folder, names, message["at"], memoryview(base64.b64decode(message["piece"])))

        task = Task("cachetool.cluster.node:listing", {"root": node.root, "source": source})
        run = self.engine.start(node.host, task, heard)
        while not run.ended:
            self.engine.wait()
        if run.error is not None:
            raise of_node(run.node.name, run.error)

    def leave_out(self, host: Node, error: CacheToolError) -> None:
        """Go on without a node that came, and cannot take part."""
        self.notify(f"{of_node(host.name, error)}; the pull goes on without node {host.name}")
        self._by_id.pop(host.id, None)

    def lose(self, node: PullNode) -> None:
        """Leave a node out from now on."""
        del self._by_id[node.id]
        self.lost.append(node)

    def _ask(self, hosts: Sequence[Node]) -> list[Run]:
        target = "cachetool.cluster.node:look"
        roots = [cache_of(self._cache, host) for host in hosts]
        tasks = [Task(target, {"root": root, **self._about}) for root in roots]
        return [self.engine.start(host, task) for host, task in zip(hosts, tasks, strict=True)]

    def _answered(self) -> list[PullNode]:
        """Those who came and were looked at since; nobody waits for them."""
        new = []
        for run in [run for run in self._asked if run.ended]:
            self._asked.remove(run)
            if run.result is not None:
                new.append(PullNode(run.node, cache_of(self._cache, run.node), run.result, late=True))
            elif isinstance(run.error, NodeLost):
                self._seen.discard(run.node.id)
            elif run.error is not None:
                self.leave_out(run.node, run.error)
        self._by_id |= {node.id: node for node in new}
        return new

    def _look(self, hosts: Sequence[Node]) -> None:
        runs = self._ask(hosts)
        while not all(run.ended for run in runs):
            self.engine.wait()
        errors = [of_node(run.node.name, run.error) for run in runs if run.error is not None]
        for error in errors:
            if not isinstance(error, NodeLost):
                raise error
        new = [
            PullNode(run.node, cache_of(self._cache, run.node), run.result) for run in runs if run.result is not None
        ]
        if errors and not new:
            raise errors[0]
        self._by_id = {node.id: node for node in new}
        self._next = time.monotonic() + _SEEK

    def stop(self) -> None:
        """End what runs: samplers first, so that what they give back is heard."""
        self.engine.stop([run for node in self.nodes for run in node.samplers])
        self.engine.stop([node.attends for node in self.nodes if node.attends is not None])

    def rows(self) -> tuple[dict[str, Any], ...]:
        """What became of each node, those that were lost among them."""
        rows = [node.row("full" if node.full else "") for node in self.nodes]
        rows += [node.row("lost") for node in self.lost]
        return tuple(sorted(rows, key=lambda row: str(row["node"])))

    def progress(self, target: int | None) -> Progress:
        """All nodes as one."""
        tallies = [node.tally for node in self.nodes]
        fills = [node.fill for node in self.nodes if node.fill]
        return Progress(
            "pull",
            sum(tally.arrived for tally in tallies),
            target,
            sum(tally.moved for tally in tallies),
            note=next((who for tally in tallies for who in tally.waiting.values()), ""),
            shards=sum(tally.shards for tally in tallies),
            flying=sum(flying for tally in tallies for flying, _ in tally.busy.values()),
            retries=sum(retries for tally in tallies for _, retries in tally.busy.values()),
            used=sum(fill["used"] for fill in fills),
            cap=sum(fill["cap"] for fill in fills),
            evicted=sum(fill["evicted"] for fill in fills),
        )
