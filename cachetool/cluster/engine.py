"""Tasks on the nodes of a Ray cluster, which runs already or is started here for as long as it is needed.

::

    driver (the command)                     node (one Agent each)                child processes of the agent
    RayEngine.start(node, task)        ->    a thread for the task           ->   proc.child, as on one machine
    RayEngine.wait() <- messages, results -  gathered, five times a second   <-   messages, results

Ray carries small values and the pieces of a listing, never samples: those go from a store to the disk of a node, inside
of a child process that knows nothing of Ray. An agent, and with it its children, ends when its driver does.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachetool.cluster.agent import Agent, version_here
from cachetool.cluster.connect import listens, opened
from cachetool.core.errors import CacheToolError, Unreachable, UsageError, from_json
from cachetool.core.nodes import Node, namesakes, node_of
from cachetool.proc.disk import known_error
from cachetool.proc.parent import GRACE
from cachetool.proc.task import Message, Task

__all__ = ["NodeLost", "RayEngine", "Run", "connect"]

_PIECE = 8 * 2**20


class NodeLost(Unreachable):
    """A node went while it worked for us."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"node {node.name} was lost; run the same again when there are nodes to run it on")
        self.node = node


@dataclass(eq=False, slots=True)
class Run:
    """A task on a node."""

    node: Node
    task: Task
    number: int
    on_message: Callable[[Message], None] | None = None
    result: Message | None = None
    """What it gave, once it has ended without an error."""
    error: CacheToolError | None = None
    """What it raised, or :class:`NodeLost`."""

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.result is not None or self.error is not None


class _Line:
    """To one agent: what runs there, and the answer that is awaited from it."""

    def __init__(self, node: Node, agent: Any) -> None:
        self.node, self.agent = node, agent
        self.runs: dict[int, Run] = {}
        self.heard: Any = None


@contextlib.contextmanager
def connect(address: str | None = None, notify: Callable[[str], None] = lambda line: None) -> Iterator[RayEngine]:
    """The nodes of the cluster at ``address`` (``HOST:PORT``; None or ``auto``: the one of this user that runs here,
    else one that is started on this machine alone), until the end of the block. ``notify`` hears of one that is not
    used.

    Raises :class:`MissingExtra` without Ray, :class:`UsageError` for an address that is none, :class:`Unreachable`
    where no Ray answers within some seconds.
    """
    with opened(address, notify):
        engine = RayEngine()
        try:
            yield engine
        finally:
            engine.close()


class RayEngine:
    """Runs tasks on nodes by name. Made by :func:`connect`; used by one thread."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._count = 0

    # -- nodes -------------------------------------------------------------------------------------------------------

    def nodes(self, *, strict: bool = True) -> list[Node]:
        """The nodes that live now, by name. Raises :class:`UsageError` when two have one name, or one has none that
        can be used; with ``strict`` False those are left out. One that is dead is left out, though the cluster may miss
        it only after half a minute; with ``strict`` False only where it has come back, since that asks every node."""
        import ray

        with _cluster_errors():
            rows = [row for row in ray.nodes() if row["Alive"] and (strict or _nameable(row))]
        twice = namesakes(map(node_of, rows))
        asked = [row for row in rows if strict or node_of(row).name in twice]
        live = [node_of(row) for row in rows if row not in asked or listens(row)]
        if strict and (twice := namesakes(live)):
            name = min(twice)
            raise UsageError(
                f"{twice[name]} nodes are called {name!r}, so that nobody can tell their caches apart;"
                " start each with a name of its own: ray start --node-name"
            )
        return sorted((node for node in live if node.name not in namesakes(live)), key=lambda node: node.name)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def run(
        self, tasks: Sequence[tuple[Node, Task]], on_message: Callable[[int, Message], None] | None = None
    ) -> list[Message]:
        """The results of all tasks, in their order, as :meth:`cachetool.proc.LocalEngine.run` gives them: the first
        error stops the others and is raised, :class:`NodeLost` among them; Ctrl-C stops all."""

        def listener(number: int) -> Callable[[Message], None] | None:
            return None if on_message is None else lambda message: on_message(number, message)

        runs = [self.start(node, task, listener(number)) for number, (node, task) in enumerate(tasks)]
        try:
            while not all(run.ended for run in runs):
                for run in self.wait():
                    if run.error is not None and run in runs:
                        raise run.error
        except BaseException:
            self.stop(runs)
            raise
        return [run.result or {} for run in runs]

    def start(self, node: Node, task: Task, on_message: Callable[[Message], None] | None = None) -> Run:
        """Begin a task on a node. ``on_message`` is called by :meth:`wait`."""
        self._count += 1
        line, run = self._line(node), Run(node, task, self._count, on_message)
        line.runs[run.number] = run
        line.agent.begin.remote(run.number, task.target, dict(task.arguments), node.name)
        if line.heard is None:
            line.heard = line.agent.hear.remote()
        return run

    def wait(self, seconds: float = 0.5) -> list[Run]:
        """Take in what the nodes say, for up to so long when they say nothing; the runs that ended meanwhile."""
        import ray

        awaited = {line.heard: line for line in self._lines.values() if line.heard is not None}
        if not awaited:
            time.sleep(seconds)
            return []
        ended: list[Run] = []
        ready, pending = ray.wait(list(awaited), timeout=seconds)
        ready += ray.wait(pending, num_returns=len(pending), timeout=0)[0] if ready and pending else []
        for ref in ready:
            line = awaited[ref]
            line.heard = None
            try:
                said = ray.get(ref)
            except ray.exceptions.RayError as error:
                ended += self._lose(line, error)
                continue
            for number, value in said:
                if (run := line.runs.get(number)) is not None and _take(run, value):
                    del line.runs[number]
                    ended.append(run)
            if line.runs and line.heard is None:
                line.heard = line.agent.hear.remote()
        return ended

    def stop(self, runs: Sequence[Run]) -> None:
        """End runs that go on: they give back what they hold, and are killed when that takes too long."""
        left = [run for run in runs if not run.ended]
        for run in left:
            if (line := self._lines.get(run.node.id)) is not None:
                line.agent.end.remote(run.number)
        deadline = time.monotonic() + 2 * GRACE
        while any(not run.ended for run in left) and time.monotonic() < deadline:
            self.wait(0.1)

    # -- beside them -------------------------------------------------------------------------------------------------

    def send(self, nodes: Sequence[Node], folder: Path) -> dict[str, str]:
        """Copy the files of a folder to nodes; gives where they lie there, by the id of each node, until the engine
        closes. A node that is lost meanwhile is left out."""
        import ray

        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._count += 1
        lines, sent = [self._line(node) for node in nodes], f"sent-{self._count}"
        places = {line.node.id: line.agent.place.remote() for line in lines}
        for path in files:
            for at in range(0, max(1, path.stat().st_size), _PIECE):
                piece = ray.put(_piece(path, at))
                name = str(Path(sent, path.relative_to(folder)))
                done = [line.agent.write.remote(name, at, piece) for line in lines]
                for ref in done:  # one piece at a time in the object store
                    _written(ref)
        folders = {}
        for id, ref in places.items():
            with contextlib.suppress(ray.exceptions.RayError):
                folders[id] = str(Path(ray.get(ref), sent))
        return folders

    def write(self, node: Node, name: str, at: int, piece: bytes) -> str:
        """Write over the bytes from ``at`` on of a file on a node, which is made when it is not there. Gives its path,
        an empty one for a node that was lost, which is found by whoever waits for more of it."""
        import ray

        agent = self._line(node).agent
        folder = agent.place.remote()
        _written(agent.write.remote(name, at, piece))
        try:
            return str(Path(ray.get(folder), name))
        except ray.exceptions.RayError:
            return ""

    def close(self) -> None:
        """End whatever runs, and the agents."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            self.stop([run for line in self._lines.values() for run in line.runs.values()])
        agents = [line.agent for line in self._lines.values()]
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # none was needed
            ray.wait([agent.leave.remote() for agent in agents], num_returns=len(agents), timeout=GRACE)
        for agent in agents:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(agent)
        self._lines = {}

    def _line(self, node: Node) -> _Line:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node.id not in self._lines:
            actor: Any = ray.remote(Agent).options(
                num_cpus=0,  # it waits; how many of its children run is what the user says with --workers
                max_restarts=0,
                max_concurrency=8,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            self._lines[node.id] = _Line(node, actor.remote(sys.argv[:2], version_here()))
        return self._lines[node.id]

    def _lose(self, line: _Line, error: Exception) -> list[Run]:
        """What ran on a node that answers no more. An agent that is merely cut off is told to end when it can be."""
        import ray

        self._lines.pop(line.node.id, None)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(line.agent)
        lost: CacheToolError = NodeLost(line.node)
        if "No module named 'cachetool'" in str(error):
            lost = UsageError(f"node {line.node.name} has no cachetool; install the same version there as here")
        for run in line.runs.values():
            run.error = lost
        return list(line.runs.values())


def _nameable(row: Message) -> bool:
    try:
        node_of(row)
    except UsageError:
        return False
    return True


@contextlib.contextmanager
def _cluster_errors() -> Iterator[None]:
    """Errors of the cluster itself as ours."""
    import ray

    try:
        yield
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise Unreachable(f"the Ray cluster does not answer any more: {str(error).splitlines()[0]}") from error


def _take(run: Run, value: Message) -> bool:
    """Take in what an agent said of a run; whether it ended with that."""
    if "message" in value and "error" not in value:
        if run.on_message is not None:
            run.on_message(value["message"])
        return False
    if "result" in value:
        run.result = value["result"]
    else:
        run.error = from_json(value)
    return True


def _written(ref: Any) -> None:
    """Wait until a node has a piece; raise what its disk said. One that is lost is found by whoever waits for more."""
    import ray

    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise known_error(error.cause) or error from error
    except ray.exceptions.RayError:
        return


def _piece(path: Path, at: int) -> Any:
    import numpy as np

    return np.fromfile(path, dtype=np.uint8, count=_PIECE, offset=at) if path.stat().st_size else np.zeros(0, np.uint8)
