"""``stats``, ``evict``, ``verify`` and ``convert`` for the caches of many nodes: each node does the command locally.

::

    driver                                     every living node
    one task a node   ->  command(cache of the node)  ->  its result, or its error      one row a node, and their sum

Only figures come back. A node that fails does not stop the others: its error is its row, and the command ends with the
exit code of that error. Nodes without a cache have no row, unless no node has one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachetool.cache.layout import Layout, cache_option, root_of
from cachetool.cluster.spread import of_node
from cachetool.core.errors import CacheToolError, Interrupted, UsageError, from_json, to_json
from cachetool.core.nodes import address_option, cache_of
from cachetool.core.progress import Progress, Report, silent
from cachetool.proc.task import Channel, Message, Task

__all__ = ["NodeResults", "Outcome", "on_nodes", "reporting", "run_here"]

_REPORT_SECONDS = 0.2
"""Seconds between two messages of progress from a node."""
_SUMMED = {
    "stats": (
        *("max_size", "used", "reserved", "listings", "overhead", "shards", "samples", "shard_bytes"),
        *("retiring", "retiring_bytes", "gone", "evicted", "fetched", "served"),
    ),
    "evict": ("removed_shards", "removed_samples", "freed", "used", "max_size", "retiring_shards", "retiring_bytes"),
    "verify": ("shards", "checked", "gone", "samples", "bytes", "repulled"),
    "convert": ("shards", "samples", "bytes"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command on one node, or its error."""

    node: str
    result: Mapping[str, Any] | None = None
    """The value that ``--json`` prints on one machine."""
    error: CacheToolError | None = None
    """The error, without the name of the node."""
    done: str = ""
    """One line about what was done before the error."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        if self.error is None:
            return dict(self.result or {})
        error_json = to_json(self.error)
        return error_json | {"exit_code": self.error.exit_code} | ({"done": self.done} if self.done else {})


@dataclass(frozen=True, slots=True)
class NodeResults:
    """The results of a command on all nodes that have a cache."""

    verb: str
    outcomes: tuple[Outcome, ...]
    """Outcomes in the order of the nodes' names."""

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """Results of the nodes where the command succeeded, by node."""
        return {outcome.node: outcome.result for outcome in self.outcomes if outcome.result is not None}

    @property
    def error(self) -> CacheToolError | None:
        """The error of the first node that failed, with the node's name; None when all succeeded."""
        return next(
            (of_node(outcome.node, outcome.error) for outcome in self.outcomes if outcome.error is not None), None
        )

    def total(self) -> dict[str, Any]:
        """Return the sums over the nodes."""
        results = self.results.values()
        total = {"nodes": len(results)} | {name: sum(result[name] for result in results) for name in _SUMMED[self.verb]}
        if self.verb == "stats":
            # A ratio cannot be summed, so it is computed from the sums.
            total["reuse"] = total["served"] / total["fetched"] if total["fetched"] else None
        if self.verb == "verify":
            total["sound"] = all(result["sound"] for result in results) and self.error is None
            total["problems"] = sum(len(result["problems"]) for result in results)
            total["missing"] = sum(row["draws"] for result in results for row in result["missing"])
        return total

    def sources(self) -> list[dict[str, Any]]:
        """Return the sources of all nodes, in the form of :attr:`cachetool.cache.stats.Stats.sources`.

        A source that is cut into parts lies on several nodes, so its figures are summed. Of other sources the node with
        the least progress is shown.
        """
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in (row for result in self.results.values() for row in result["sources"]):
            key = row["url"], row["dataset"], row["listing"], row["seed"], row["cut"]
            if (known := merged.get(key)) is None:
                # A copy, because the figures of the node itself must stay as they are.
                merged[key] = dict(row)
                continue
            if row["cut"] == 1:
                # Replicas: each node should have everything, so the one that is farthest behind
                # says how far the pull is.
                known |= min(known, row, key=lambda row: (row["pass"], row["drawn"]))
                continue
            known |= {name: known[name] + row[name] for name in ("units", "drawn", "skipped", "fetched", "served")}
            known |= {"pass": min(known["pass"], row["pass"]), "parts": sorted({*known["parts"], *row["parts"]})}
        for row in merged.values():
            row["coverage"] = row["drawn"] / row["units"] if row["units"] else 0.0
            row["reuse"] = row["served"] / row["fetched"] if row["fetched"] else None
        return list(merged.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: ``nodes`` by their names, and ``sum``."""
        return {"nodes": {outcome.node: outcome.as_dict() for outcome in self.outcomes}, "sum": self.total()}


def on_nodes(
    verb: str,
    cache: str | None,
    arguments: Mapping[str, Any],
    *,
    address: str | None = None,
    report: Report = silent,
    notify: Callable[[str], None] = lambda line: None,
) -> NodeResults:
    """Do ``stats``, ``evict``, ``verify`` or ``convert`` with the cache of every living node.

    ``cache`` is the cache folder, in which ``{node}`` stands for the name of the node; None means the default folder of
    this machine. The ``arguments`` are those of the command in Python. Raises :class:`MissingExtra` without Ray,
    :class:`Unreachable` when no Ray answers at ``address``, and :class:`UsageError` when no node has a cache there.
    """
    # Imported here: nodes import this module for its tasks, and their child processes know nothing
    # of Ray.
    from cachetool.cluster.engine import connect

    # Absolute, because the tasks of a node have another working directory.
    place = str(root_of(cache).absolute())
    with connect(address, notify) as engine:
        nodes, heard = engine.nodes(), _Heard(report)
        runs, outcomes = [], {}
        try:
            for node in nodes:
                given = dict(arguments)
                if given.get("out") is not None:
                    given["out"] = cache_of(given["out"], node)
                here = {"verb": verb, "cache": cache_of(place, node), "arguments": given}
                runs.append(engine.start(node, Task("cachetool.cluster.verbs:run_here", here), heard.of(node.name)))
            while not all(run.ended for run in runs):
                engine.wait()
        finally:
            engine.stop(runs)
    _refuse_shared(place, {run.node.name: run.result["place"] for run in runs if run.result})
    for run in runs:
        name, answer = run.node.name, run.result or {}
        outcomes[name] = Outcome(name, error=run.error) if run.error is not None else _outcome(name, answer)
    there = tuple(outcomes[node.name] for node in nodes if outcomes[node.name] != Outcome(node.name))
    if not there:
        names = ", ".join(node.name for node in nodes)
        raise UsageError(
            f"no node has a cache at {place} (nodes: {names}); fill their caches with:"
            f" cachetool pull SOURCE --on ray{address_option(address)}{cache_option(Path(place))}"
        )
    return NodeResults(verb, there)


def _refuse_shared(cache: str, places: Mapping[str, Sequence[object]]) -> None:
    """Raise :class:`UsageError` when two nodes have one folder, whose figures would be counted twice."""
    for name, place in places.items():
        if same := [other for other, where in places.items() if other > name and where == place]:
            raise UsageError(
                f"nodes {name} and {same[0]} share the folder {cache}; if each node has its own, put {{node}} into"
                " --cache"
            )


def _outcome(node: str, answer: Message) -> Outcome:
    if "result" in answer:
        return Outcome(node, answer["result"])
    return (
        Outcome(node, error=from_json(answer["failed"]), done=answer["done"]) if "failed" in answer else Outcome(node)
    )


class _Heard:
    """The progress of all nodes as one."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last: dict[str, Message] = {}

    def of(self, node: str) -> Callable[[Message], None]:
        """Return a function that receives the messages of one node."""

        def hear(message: Message) -> None:
            self._last[node] = message
            latest = list(self._last.values())
            totals = [progress["total"] for progress in latest]
            stated = [count for count in totals if count is not None]
            # A sum without the nodes that do not know their total yet would show a progress above
            # 100 %.
            total = sum(stated) if len(stated) == len(totals) else None
            done, moved = (sum(progress[name] for progress in latest) for name in ("done", "bytes"))
            self._report(Progress(message["phase"], done, total, moved))

        return hear


# -- on the node ------------------------------------------------------------------------------------------------------


def run_here(channel: Channel, *, verb: str, cache: str, arguments: Message) -> Message:
    """Do a command with the cache of this node, as a task.

    Returns ``place``, which identifies the folder, and ``result`` or ``failed``; an empty dict where no cache is.
    """
    layout = Layout(Path(cache))
    # Checked before opening, because a node without a cache is no error unless all nodes are such.
    if not (layout.marker.exists() or layout.catalog.exists()):
        return {}
    status = os.stat(cache)
    place = {"place": [socket.gethostname(), status.st_dev, status.st_ino]}
    try:
        return place | {"result": _VERBS[verb](cache, arguments, reporting(channel))}
    except Interrupted:
        # The command itself was stopped; this is no row of a node.
        raise
    except CacheToolError as error:
        return place | {"failed": to_json(error), "done": getattr(error, "done", "")}


def reporting(channel: Channel, *, seconds: float = _REPORT_SECONDS) -> Report:
    """Return a function that sends progress through ``channel``: each new phase, and at most one message in ``seconds``
    seconds."""
    last, phase = 0.0, ""

    def tell(progress: Progress) -> None:
        nonlocal last, phase
        now = time.monotonic()
        if now - last >= seconds or progress.done == progress.total or progress.phase != phase:
            last, phase = now, progress.phase
            channel.send(asdict(progress))

    return tell


def _stats(cache: str, arguments: Message, report: Report) -> Message:
    from cachetool.cache import open_cache

    with open_cache(cache, create=False) as opened:
        return opened.stats(**arguments).as_dict()


def _evict(cache: str, arguments: Message, report: Report) -> Message:
    from cachetool.cache import open_cache

    with open_cache(cache, create=False) as opened:
        return opened.evict(**arguments).as_dict()


def _verify(cache: str, arguments: Message, report: Report) -> Message:
    from cachetool.check.verify import verify

    return verify(cache, **arguments, report=report).as_dict()


def _convert(cache: str, arguments: Message, report: Report) -> Message:
    from cachetool.cache import open_cache
    from cachetool.conversion.options import ConvertCall
    from cachetool.conversion.run import convert

    options = ConvertCall.from_json({**arguments["options"], "out": arguments["out"]})
    with open_cache(cache, max_size=arguments["max_size"], create=False) as opened:
        return convert(options, cache=opened, out=options.folder, report=report).as_dict()


_VERBS: dict[str, Callable[[str, Message, Report], Message]] = {
    "stats": _stats,
    "evict": _evict,
    "verify": _verify,
    "convert": _convert,
}
