"""The ``--on ray`` part of ``stats``, ``evict``, ``verify`` and ``convert``: one row for each node, and their sum.

If a node fails, its row has the error. The command then ends with the error of the first such node, and with its exit
code.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from cachetool.cli.output import Output, count, fail
from cachetool.core.errors import CapacityError, CorruptError, UsageError
from cachetool.core.nodes import address_option
from cachetool.core.units import format_size

if TYPE_CHECKING:
    from cachetool.cluster.verbs import NodeResults
    from cachetool.conversion.options import ConvertCall
    from cachetool.conversion.run import ConvertResult

__all__ = ["convert_caches", "convert_files", "evict", "stats", "verify"]

Cells = Callable[[Mapping[str, Any]], Sequence[object]]


def stats(out: Output, cache: str | None, dataset: str | None, address: str | None) -> None:
    """Print how full the cache of each node is."""
    from cachetool.cache.stats import newest_pass
    from cachetool.cluster.verbs import on_nodes

    nodes = on_nodes("stats", cache, {"dataset": dataset}, address=address, notify=out.note)
    source_rows = nodes.sources()
    if out.as_json:
        value = nodes.as_dict()
        value["sum"]["sources"] = source_rows
        _end(out, nodes, value)
        return
    _table(
        out,
        nodes,
        [">shards", ">samples", ">bytes", ">used", ">of", ">retiring", ">evicted"],
        lambda row: (
            row["shards"],
            row["samples"],
            *(format_size(row[name]) for name in ("shard_bytes", "used", "max_size")),
            row["retiring"],
            row["evicted"],
        ),
    )
    if source_rows:
        rows = [(row["url"], row["dataset"], *_pass_cells(newest_pass(row)), row["units"]) for row in source_rows]
        out.table(["source", "dataset", ">drawn", ">coverage", ">pass", ">of units"], rows)
    _end(out, nodes)


def _pass_cells(newest: tuple[int, float, int]) -> tuple[int, str, int]:
    units, coverage, pass_number = newest
    return units, f"{100 * coverage:.1f} %", pass_number


def evict(out: Output, cache: str | None, arguments: Mapping[str, Any], address: str | None) -> None:
    """Make the cache of each node smaller."""
    from cachetool.cluster.verbs import on_nodes

    nodes = on_nodes("evict", cache, arguments, address=address, notify=out.note)
    planned = bool(arguments["dry_run"])

    def cells(row: Mapping[str, Any]) -> Sequence[object]:
        victims = row["plan"] if planned else []
        shards = len(victims) if planned else row["removed_shards"]
        samples = sum(victim["samples"] for victim in victims) if planned else row["removed_samples"]
        freed = sum(victim["bytes"] for victim in victims) if planned else row["freed"]
        return shards, samples, format_size(freed), format_size(row["used"]), row["retiring_shards"]

    # Collected before anything is printed, and raised last: a node that did not reach the size must not hide the
    # results of the others.
    unreached = [(node, result["unreached"]) for node, result in nodes.results.items() if result["unreached"]]
    if out.as_json:
        _end(out, nodes, nodes.as_dict())
    else:
        total = {"plan": [victim for result in nodes.results.values() for victim in result["plan"]]}
        evicted = ">would evict" if planned else ">evicted"
        _table(out, nodes, [evicted, ">samples", ">bytes", ">used", ">retiring"], cells, total)
        for outcome in nodes.outcomes:
            if outcome.done:
                out.line(f"node {outcome.node}: {outcome.done}")
        for node, result in nodes.results.items():
            for reader in result["blocked"]:
                out.line(f"  node {node}: {reader}")
        _end(out, nodes)
    if unreached:
        node, why = unreached[0]
        raise typer.Exit(fail("CapacityError", f"node {node}: {why}", CapacityError.exit_code, as_json=False))


def verify(out: Output, cache: str | None, arguments: Mapping[str, Any], address: str | None) -> None:
    """Check the cache of each node."""
    from cachetool.cluster.verbs import on_nodes

    with out.progress() as report:
        nodes = on_nodes("verify", cache, arguments, address=address, report=report, notify=out.note)

    def cells(row: Mapping[str, Any]) -> Sequence[object]:
        # The row of the sum has numbers where the row of a node has lists.
        problems, missing = row["problems"], row["missing"]
        if isinstance(problems, list):
            problems, missing = len(problems), sum(loss["draws"] for loss in missing)
        read = f"{row['checked']} of {row['shards']}"
        return read, row["samples"], format_size(row["bytes"]), problems, missing, "yes" if row["sound"] else "no"

    if not out.as_json:
        _table(out, nodes, [">read", ">samples", ">bytes", ">problems", ">missing", "sound"], cells)
        rows = [
            (node, problem["shard"] or "", problem["file"] or "", problem["what"], problem["action"] or "none")
            for node, result in nodes.results.items()
            for problem in result["problems"]
        ]
        if rows:
            out.table(["node", "shard", "file", "problem", "repair"], rows)
    _end(out, nodes, nodes.as_dict() if out.as_json else None)
    if not nodes.total()["sound"]:
        if not out.as_json and not arguments["repair"]:
            out.note(f"run: cachetool verify --repair --on ray{address_option(address)}{_cache_option(cache)}")
        raise typer.Exit(CorruptError.exit_code)


def convert_caches(
    out: Output, cache: str | None, options: ConvertCall, max_size: str | None, address: str | None
) -> None:
    """Convert the samples of each node's cache, in the cache or into files of the node."""
    from cachetool.cluster.verbs import on_nodes

    folder = None if options.out is None else str(options.out)
    if folder is not None and "{node}" not in folder:
        raise UsageError(
            f"every node writes files of its own, and {folder} is one folder;"
            f" name one for each node: --out {shlex.quote(folder)}/{{node}}"
        )
    given = {
        "options": options.to_json(),
        "max_size": max_size,
        # Absolute here, because the agents on the nodes have another working directory.
        "out": None if folder is None else os.path.abspath(os.path.expanduser(folder)),
    }
    with out.progress() as report:
        nodes = on_nodes("convert", cache, given, address=address, report=report, notify=out.note)
    if not out.as_json:
        _table(
            out,
            nodes,
            [">shards", ">samples", ">bytes", "content digest"],
            lambda row: (row["shards"], row["samples"], format_size(row["bytes"]), row.get("digest", "")[:16]),
        )
    _end(out, nodes, nodes.as_dict() if out.as_json else None)


def needs_out(source: str, cache: str | None, address: str | None) -> UsageError:
    """Return the error of an input that all nodes see, given without a folder for its files."""
    from cachetool.stores import redact

    return UsageError(
        "convert INPUT --on ray writes files: name a folder that all nodes see with --out;"
        f"\nto fill the caches of the nodes, run: cachetool pull {shlex.quote(redact(source))} --all"
        f" --on ray{address_option(address)}{_cache_option(cache)}"
    )


def convert_files(out: Output, source: str, options: ConvertCall, address: str | None) -> ConvertResult:
    """Write an input that all nodes see as plain files, into a folder that all nodes see.

    All nodes write parts of it.
    """
    from cachetool.cluster.engine import connect
    from cachetool.cluster.spread import Spread
    from cachetool.conversion.run import convert

    # On a cluster there is no cache that could take the samples: each node has its own.
    if options.folder is None:
        raise needs_out(source, None, address)
    with connect(address, out.note) as engine, out.progress() as report:
        spread = Spread(engine, engine.nodes(), per_node=options.workers)
        return convert(options, source=source, out=options.folder, report=report, engine=spread)


def _cache_option(cache: str | None) -> str:
    return "" if cache is None else f" --cache {shlex.quote(cache)}"


def _table(
    out: Output, nodes: NodeResults, columns: Sequence[str], cells: Cells, more: Mapping[str, Any] | None = None
) -> None:
    """Print one row for each node and a row with the sum. The last column has the errors, if there are any."""
    failed = nodes.error is not None
    rows: list[list[object]] = []
    for outcome in nodes.outcomes:
        if outcome.result is not None:
            rows.append([outcome.node, *cells(outcome.result), *([""] if failed else [])])
        else:
            rows.append([outcome.node, *([""] * len(columns)), " ".join(str(outcome.error).split())])
    results = nodes.results
    if results:
        total = nodes.total() | dict(more or {})
        rows.append([count(len(results), "node"), *cells(total), *([""] if failed else [])])
    out.table(["node", *columns, *(["error"] if failed else [])], rows)


def _end(out: Output, nodes: NodeResults, value: Mapping[str, Any] | None = None) -> None:
    """Print the document, if there is one, and end with the first error, if there is one."""
    if value is not None:
        out.document(value)
    if (error := nodes.error) is not None:
        raise typer.Exit(fail(type(error).__name__, str(error), error.exit_code, as_json=False))
