"""``stats``, ``evict``, ``verify`` and ``convert`` of the caches of many nodes: on each node what is done locally.

::

    driver                                     every living node
    one task a node   ->  verb(cache of the node)  ->  its result, or its error      rows of a node, and their sum

Only figures come back. A node that fails does not stop the others: its error is its row, and the command ends with its
exit code. Nodes without a cache have no row, unless none has one.
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
"""Seconds between two messages of progress of a node."""
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
    """What a verb came to on one node: its result, or why there is none."""

    node: str
    result: Mapping[str, Any] | None = None
    """What ``--json`` prints of the verb on one machine."""
    error: CacheToolError | None = None
    """Without the name of the node."""
    done: str = ""
    """With an error: what was done all the same, in a line."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        if self.error is None:
            return dict(self.result or {})
        error_json = to_json(self.error)
        return error_json | {"exit_code": self.error.exit_code} | ({"done": self.done} if self.done else {})


@dataclass(frozen=True, slots=True)
class NodeResults:
    """What a verb came to on all nodes that have a cache."""

    verb: str
    outcomes: tuple[Outcome, ...]
    """By the names of the nodes."""

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """Those of the nodes where it succeeded."""
        return {outcome.node: outcome.result for outcome in self.outcomes if outcome.result is not None}

    @property
    def error(self) -> CacheToolError | None:
        """The error of the first node that failed, with its name; None when all is well."""
        return next(
            (of_node(outcome.node, outcome.error) for outcome in self.outcomes if outcome.error is not None), None
        )

    def total(self) -> dict[str, Any]:
        """The sums over the nodes."""
        results = self.results.values()
        total = {"nodes": len(results)} | {name: sum(result[name] for result in results) for name in _SUMMED[self.verb]}
        if self.verb == "stats":
            total["reuse"] = total["served"] / total["fetched"] if total["fetched"] else None
        if self.verb == "verify":
            total["sound"] = all(result["sound"] for result in results) and self.error is None
            total["problems"] = sum(len(result["problems"]) for result in results)
            total["missing"] = sum(row["draws"] for result in results for row in result["missing"])
        return total

    def sources(self) -> list[dict[str, Any]]:
        """Sources of all nodes, as :attr:`cachetool.cache.stats.Stats.sources`; of one that is cut into parts, which
        are on several nodes, their sum, of others what the node has that has least."""
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in (row for result in self.results.values() for row in result["sources"]):
            known = merged.setdefault((row["url"], row["dataset"], row["listing"], row["seed"], row["cut"]), row)
            if known is row:
                continue
            if row["cut"] == 1:
                known |= min(known, row, key=lambda row: (row["pass"], row["drawn"]))
                continue
            known |= {name: known[name] + row[name] for name in ("units", "drawn", "skipped", "fetched", "served")}
            known |= {"pass": min(known["pass"], row["pass"]), "parts": sorted({*known["parts"], *row["parts"]})}
        for row in merged.values():
            row["coverage"] = row["drawn"] / row["units"] if row["units"] else 0.0
            row["reuse"] = row["served"] / row["fetched"] if row["fetched"] else None
        return list(merged.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``nodes`` by their names, and ``sum``."""
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

    ``cache`` is its folder, in which ``{node}`` stands for the name of the node; None: the one that is the default
    here. The ``arguments`` are those of the verb in Python. Raises :class:`MissingExtra` without Ray,
    :class:`Unreachable` when there is none at ``address``, and :class:`UsageError` when no node has a cache there.
    """
    from cachetool.cluster.engine import connect

    place = str(root_of(cache).absolute())  # a node's tasks have another working directory
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
            f"no node has a cache at {place} (nodes: {names});"
            f" fill them with: cachetool pull SOURCE --on ray{address_option(address)}{cache_option(Path(place))}"
        )
    return NodeResults(verb, there)


def _refuse_shared(cache: str, places: Mapping[str, Sequence[object]]) -> None:
    """Raise :class:`UsageError` when two nodes have one folder, which would be counted twice."""
    for name, place in places.items():
        if same := [other for other, where in places.items() if other > name and where == place]:
            raise UsageError(
                f"nodes {name} and {same[0]} share the folder {cache}; put {{node}} into --cache where each has its own"
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
        """Hears one node."""

        def hear(message: Message) -> None:
            self._last[node] = message
            latest = list(self._last.values())
            totals = [progress["total"] for progress in latest]
            stated = [count for count in totals if count is not None]
            total = sum(stated) if len(stated) == len(totals) else None
            done, moved = (sum(progress[name] for progress in latest) for name in ("done", "bytes"))
            self._report(Progress(message["phase"], done, total, moved))

        return hear


# -- on the node ------------------------------------------------------------------------------------------------------


def run_here(channel: Channel, *, verb: str, cache: str, arguments: Message) -> Message:
    """The task: do it with the cache of this node. Gives ``place``, by which the folder is known, and ``result`` or
    ``failed``; nothing where no cache is."""
    layout = Layout(Path(cache))
    if not (layout.marker.exists() or layout.catalog.exists()):
        return {}
    status = os.stat(cache)
    place = {"place": [socket.gethostname(), status.st_dev, status.st_ino]}
    try:
        return place | {"result": _VERBS[verb](cache, arguments, reporting(channel))}
    except Interrupted:
        raise
    except CacheToolError as error:
        return place | {"failed": to_json(error), "done": getattr(error, "done", "")}


def reporting(channel: Channel, *, seconds: float = _REPORT_SECONDS) -> Report:
    """A function that sends progress through ``channel``: each new phase, and at most once in so many seconds."""
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
