"""Tasks on the nodes of a Ray cluster, which runs already or is started here for as long as it is needed.

::

    driver (the command)                     node (one Agent each)                child processes of the agent
    RayEngine.start(node, task)        ->    a thread for the task           ->   proc.child, as on one machine
    RayEngine.wait() <- messages, results -  gathered, five times a second   <-   messages, results

Ray carries small values and the pieces of a listing, never samples. Samples go from a store to the disk of a node,
inside a child process that knows nothing of Ray. When the driver ends, each agent ends, and with it its children.
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

# Bytes of a piece of a listing. One piece at a time lies in Ray's object store, so a large listing
# needs no more of it.
_PIECE = 8 * 2**20


class NodeLost(Unreachable):
    """A node was lost while it worked for this command."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"node {node.name} was lost; run the command again when nodes are available")
        self.node = node


@dataclass(eq=False, slots=True)
class Run:
    """A task on a node."""

    node: Node
    task: Task
    number: int
    on_message: Callable[[Message], None] | None = None
    result: Message | None = None
    """The result of the task, once it has ended without an error."""
    error: CacheToolError | None = None
    """The error of the task, or :class:`NodeLost`."""

    @property
    def ended(self) -> bool:
        """True if the task sends nothing more."""
        return self.result is not None or self.error is not None


class _Line:
    """The connection to one agent: the tasks that run there, and the answer that is awaited from it."""

    def __init__(self, node: Node, agent: Any) -> None:
        self.node, self.agent = node, agent
        self.runs: dict[int, Run] = {}
        self.heard: Any = None


@contextlib.contextmanager
def connect(address: str | None = None, notify: Callable[[str], None] = lambda line: None) -> Iterator[RayEngine]:
    """Connect to the nodes of the cluster at ``address`` until the end of the block.

    ``address`` is ``HOST:PORT``. None or ``auto`` means the cluster of this user that runs here, else one that is
    started on this machine alone. ``notify`` gets a line about a cluster that is not used.

    Raises :class:`MissingExtra` without Ray, :class:`UsageError` for a text that is no address, and
    :class:`Unreachable` where no Ray answers within some seconds.
    """
    with opened(address, notify):
        engine = RayEngine()
        try:
            yield engine
        finally:
            engine.close()


class RayEngine:
    """An engine that runs tasks on nodes by name. Made by :func:`connect`; used by one thread."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._count = 0

    # -- nodes -------------------------------------------------------------------------------------------------------

    def nodes(self, *, strict: bool = True) -> list[Node]:
        """Return the living nodes, by name.

        Raises :class:`UsageError` when two nodes have one name, or a node has no usable name. With ``strict`` False
        such nodes are left out.
        """
        import ray

        with _cluster_errors():
            rows = [row for row in ray.nodes() if row["Alive"] and (strict or _nameable(row))]
        twice = namesakes(map(node_of, rows))
        # The cluster may list a dead node as living for half a minute. So every node is asked for a
        # connection; with `strict` False only nodes whose name appears twice, since a node that
        # came back is listed beside its dead self.
        asked = [row for row in rows if strict or node_of(row).name in twice]
        live = [node_of(row) for row in rows if row not in asked or listens(row)]
        if strict and (twice := namesakes(live)):
            name = min(twice)
            raise UsageError(
                f"{twice[name]} nodes are called {name!r}, so their caches cannot be told apart;"
                " start each node with its own name: ray start --node-name"
            )
        return sorted((node for node in live if node.name not in namesakes(live)), key=lambda node: node.name)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def run(
        self, tasks: Sequence[tuple[Node, Task]], on_message: Callable[[int, Message], None] | None = None
    ) -> list[Message]:
        """Return the results of all tasks, in their order, like :meth:`cachetool.proc.LocalEngine.run`.

        The first error stops the other tasks and is raised, also :class:`NodeLost`. Ctrl-C stops all tasks.
        """

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
        """Begin a task on a node. :meth:`wait` calls ``on_message``."""
        self._count += 1
        line, run = self._line(node), Run(node, task, self._count, on_message)
        line.runs[run.number] = run
        line.agent.begin.remote(run.number, task.target, dict(task.arguments), node.name)
        # One call for answers is open per agent. It returns when any task on that node says
        # something, so thousands of tasks need no call each.
        if line.heard is None:
            line.heard = line.agent.hear.remote()
        return run

    def wait(self, seconds: float = 0.5) -> list[Run]:
        """Receive the messages of the nodes, for up to ``seconds`` when none comes; return the runs that ended
        meanwhile."""
        import ray

        awaited = {line.heard: line for line in self._lines.values() if line.heard is not None}
        if not awaited:
            time.sleep(seconds)
            return []
        ended: list[Run] = []
        ready, pending = ray.wait(list(awaited), timeout=seconds)
        # Everything else that is ready at this moment, so that one slow node does not hold up the
        # answers of the others.
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
            # Not without tasks: a call that waits in vain would keep a thread of the agent busy.
            if line.runs and line.heard is None:
                line.heard = line.agent.hear.remote()
        return ended

    def stop(self, runs: Sequence[Run]) -> None:
        """End the runs that are still going. They return what they hold, and are killed when that takes too long."""
        left = [run for run in runs if not run.ended]
        for run in left:
            if (line := self._lines.get(run.node.id)) is not None:
                line.agent.end.remote(run.number)
        # Twice the time after which an agent kills its child, so the answer of the agent still
        # arrives.
        deadline = time.monotonic() + 2 * GRACE
        while any(not run.ended for run in left) and time.monotonic() < deadline:
            self.wait(0.1)

    # -- beside them -------------------------------------------------------------------------------------------------

    def send(self, nodes: Sequence[Node], folder: Path) -> dict[str, str]:
        """Copy the files of a folder to nodes. Return the path on each node, by the node's id.

        The copies exist until the engine closes. A node that is lost meanwhile is left out.
        """
        import ray

        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._count += 1
        lines, sent = [self._line(node) for node in nodes], f"sent-{self._count}"
        places = {line.node.id: line.agent.place.remote() for line in lines}
        for path in files:
            for at in range(0, max(1, path.stat().st_size), _PIECE):
                # Put once for all nodes: Ray moves an object between nodes itself, so the driver
                # sends a large listing only once.
                piece = ray.put(_piece(path, at))
                name = str(Path(sent, path.relative_to(folder)))
                done = [line.agent.write.remote(name, at, piece) for line in lines]
                for ref in done:
                    # Waits for all nodes before the next piece, so that only one piece lies in the
                    # object store.
                    _written(ref)
        folders = {}
        for id, ref in places.items():
            with contextlib.suppress(ray.exceptions.RayError):
                folders[id] = str(Path(ray.get(ref), sent))
        return folders

    def write(self, node: Node, name: str, at: int, piece: bytes) -> str:
        """Write ``piece`` over the bytes from ``at`` on in a file on a node, which is made when it is missing. Return
        its path.

        The path is empty for a node that was lost; code that waits for the node's tasks finds the loss.
        """
        import ray

        agent = self._line(node).agent
        folder = agent.place.remote()
        _written(agent.write.remote(name, at, piece))
        try:
            return str(Path(ray.get(folder), name))
        except ray.exceptions.RayError:
            return ""

    def close(self) -> None:
        """End all tasks and all agents."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            self.stop([run for line in self._lines.values() for run in line.runs.values()])
        agents = [line.agent for line in self._lines.values()]
        # Without any agent `ray.wait` raises ValueError for an empty list. The agents delete their
        # folders first, because Ray kills them without cleanup.
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
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
                # The agent only waits. The user decides with --workers how many of its children
                # run.
                num_cpus=0,
                max_restarts=0,
                # Several calls run at once: `hear` waits up to a minute, and `begin` and `end` must
                # not wait for it.
                max_concurrency=8,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            self._lines[node.id] = _Line(node, actor.remote(sys.argv[:2], version_here()))
        return self._lines[node.id]

    def _lose(self, line: _Line, error: Exception) -> list[Run]:
        """Return the runs of a node that does not answer any more, with their error."""
        import ray

        self._lines.pop(line.node.id, None)
        # An agent that is only cut off still runs its children. It is told to end as soon as it can
        # be reached.
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
    """Turn errors of the cluster itself into :class:`Unreachable`."""
    import ray

    try:
        yield
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise Unreachable(f"the Ray cluster does not answer any more: {str(error).splitlines()[0]}") from error


def _take(run: Run, value: Message) -> bool:
    """Take in a message of an agent for a run; return True if the run ended with it."""
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
    """Wait until a node has a piece. Raise the error of its disk, if there was one."""
    import ray

    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise known_error(error.cause) or error from error
    except ray.exceptions.RayError:
        # The node was lost. Code that waits for its tasks finds and reports the loss.
        return


def _piece(path: Path, at: int) -> Any:
    import numpy as np

    # An array and not `bytes`: `ray.get` of a 50 MB array is a view (0.4 ms), of bytes a copy (27
    # ms). An empty file cannot be read from an offset, hence the empty array.
    return np.fromfile(path, dtype=np.uint8, count=_PIECE, offset=at) if path.stat().st_size else np.zeros(0, np.uint8)
