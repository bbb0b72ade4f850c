"""The results of a command on several nodes."""

from __future__ import annotations

from typing import Any

from cachetool.cluster.verbs import NodeResults, Outcome


def row(**figures: Any) -> dict[str, Any]:
    about = {"url": "s3://b/p", "dataset": "default", "listing": "l", "seed": 0, "cut": 32, "pass": 0}
    return about | {"units": 10, "drawn": 5, "skipped": 0, "fetched": 50, "served": 100} | figures


def test_the_sum_over_nodes_counts_equal_rows_twice_and_leaves_the_rows_of_the_nodes_unchanged() -> None:
    nodes = {"a": row(parts=[0]), "b": row(parts=[1])}
    before = {name: dict(figures) for name, figures in nodes.items()}
    results = NodeResults("stats", tuple(Outcome(name, {"sources": [figures]}) for name, figures in nodes.items()))

    (summed,) = results.sources()

    assert (summed["units"], summed["drawn"], summed["parts"], summed["coverage"]) == (20, 10, [0, 1], 0.5)
    assert nodes == before
