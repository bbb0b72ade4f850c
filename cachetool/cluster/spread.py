"""Spread: tasks that any node can do, over the nodes of a Ray cluster. Each node gets the next task when it is done
with one.

::

    tasks   0 1 2 3 4 5 6 ...  ->  node a: 0 3 4     node b: 1 5     node c: 2 (lost) -> 2 goes to the next free node

A task writes its output to a place that every node sees. A task that is begun a second time must do no harm to the
files that a lost node wrote; each task takes care of that itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from cachetool.cluster.engine import NodeLost, RayEngine, Run
from cachetool.core.errors import CacheToolError, Interrupted, from_json, to_json
from cachetool.core.nodes import Node
from cachetool.proc.task import Message, Task

__all__ = ["Spread", "of_node"]

_PIECES = 4
"""Tasks for each process of a node. A slow node then gets fewer of them, and a lost node leaves little to do again."""


class Spread:
    """An :class:`~cachetool.proc.task.Engine` over several nodes, with ``per_node`` processes on a node at a time."""

    def __init__(self, engine: RayEngine, nodes: Sequence[Node], *, per_node: int) -> None:
        self._engine, self._nodes, self._per_node = engine, list(nodes), per_node

    def pieces(self, workers: int) -> int:
        """Return the best number of tasks into which work is cut."""
        return _PIECES * self._per_node * len(self._nodes)

    def run(
        self, tasks: Sequence[Task], on_message: Callable[[int, Message], None] | None = None
    ) -> list[Message]:  # fmt: skip
        """Return the results of all tasks, in their order.

        The first error of a task stops the others and is raised with the name of its node. :class:`NodeLost` is raised
        only when no node is left.
        """
        waiting = deque(range(len(tasks)))
        # One round over all nodes before a node gets its second task, so that few tasks use all
        # nodes.
        free = deque(node for _ in range(self._per_node) for node in self._nodes)
        running: dict[Run, int] = {}
        results: dict[int, Message] = {}
        try:
            while len(results) < len(tasks):
                while waiting and free:
                    number = waiting.popleft()
                    running[self._engine.start(free.popleft(), tasks[number], _heard(on_message, number))] = number
                for run in self._engine.wait():
                    if (ended := running.pop(run, None)) is None:
                        continue
                    if isinstance(run.error, NodeLost):
                        # In front, so that a task that must be done again is not begun last.
                        waiting.appendleft(ended)
                        free = deque(node for node in free if node.id != run.node.id)
                        if not free and not running:
                            raise run.error
                    elif run.error is not None:
                        raise of_node(run.node.name, run.error) from run.error
                    else:
                        results[ended] = run.result or {}
                        free.append(run.node)
        finally:
            self._engine.stop(list(running))
        return [results[number] for number in range(len(tasks))]


def of_node(name: str, error: CacheToolError) -> CacheToolError:
    """Return the same error with the name of its node in the message."""
    if isinstance(error, NodeLost | Interrupted) or str(error).startswith(("node ", "nodes ")):
        # The message already names the node, or the error has no node.
        return error
    error_json = to_json(error)
    return from_json(error_json | {"message": f"node {name}: {error_json['message']}"})


def _heard(on_message: Callable[[int, Message], None] | None, number: int) -> Callable[[Message], None] | None:
    return None if on_message is None else lambda message: on_message(number, message)
