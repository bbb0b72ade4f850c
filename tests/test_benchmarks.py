"""The common entry to the benchmarks: runs a suite, saves JSON, tables and a chart; a failure is a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import SUITES, main
from benchmarks.awake import awake
from benchmarks.plot import drawn_column, picture
from benchmarks.scale import World, pulling
from benchmarks.tables import markdown

ROOT = Path(__file__).parent.parent


def benchmarks(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


TINY = {
    "feed": ["--cases", "3KiB", "--formats", "lmdb", "--scale", "0.01", "--rounds", "1", "--workers", "1"],
    "convert": ["--cases", "3KiB", "--formats", "lmdb", "--pairs", "none", "--scale", "0.01", "--rounds", "1"],
    "pull": ["--cases", "small", "--scale", "0.001", "--rounds", "1", "--workers", "1"],
    "gather": ["--cases", "3KiB", "--formats", "lmdb", "--scale", "0.01", "--rounds", "1"],
    "scale": ["--shards", "20"],
    "nodes": ["--nodes", "2,100"],
    "other": ["--cases", "ragged", "--rounds", "1"],
}
PEERS = {"convert": ("nobody", "what"), "pull": ("nobody", "tool")}
"""The peer that does not exist, and the column with its name, for each suite with peers."""


SLOWER = {"feed", "pull", "scale", "other"}
"""Suites that take some seconds each for a server, feeders or eight holders: they run with the long tests."""


@pytest.mark.parametrize(
    "suite", [pytest.param(name, marks=[pytest.mark.soak] if name in SLOWER else []) for name in SUITES]
)
def test_a_suite_is_run_and_saved_with_its_machine_and_versions(
    tmp_path: Path, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, column = PEERS.get(suite, ("", ""))
    asked = ["--peers", peer] if peer else []
    done = benchmarks(
        "run", "--suite", suite, "--folder", tmp_path / "data", "--out", tmp_path / "out", *asked, *TINY[suite]
    )

    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "out" / f"{suite}.json").read_text())
    assert kept["suite"] == suite
    assert kept["versions"].keys() >= {"Python", "numpy", "lmdb"}
    assert kept["machine"].keys() >= {"processor", "cores", "memory GiB", "disk", "system"}
    assert kept["options"] == [*asked, *TINY[suite]]
    rows = [row for table in kept["tables"].values() for row in table]
    assert any("error" not in row for row in rows)
    assert [row[column] for row in rows if "error" in row] == ([peer] if peer else [])
    written = (tmp_path / "out" / f"{suite}.md").read_text()
    assert written in done.stdout
    assert written.count("\n|") == 2 * len(kept["tables"]) + len(rows)
    ElementTree.parse(tmp_path / "out" / f"{suite}.svg")
    assert list((tmp_path / "data").iterdir()) == [], "what was written is deleted again"

    assert main(["show", str(tmp_path / "out" / f"{suite}.json")]) == 0
    assert capsys.readouterr().out == done.stdout


def test_a_suite_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    done = benchmarks("run", "--suite", "scale", "--folder", tmp_path, "--out", tmp_path / "out", "--shards", "some")

    assert done.returncode == 1
    (row,) = json.loads((tmp_path / "out" / "scale.json").read_text())["tables"]["scale"]
    assert "'some'" in row["error"]
    with pytest.raises(SystemExit, match="no peers"):
        main(["run", "--suite", "gather", "--folder", str(tmp_path), "--peers", "all"])


@pytest.mark.parametrize("nodes", [5, 40, 2000])
def test_nodes_of_the_model_are_limited_by_the_tightest_bound(nodes: int) -> None:
    (row,) = pulling(World(nodes=nodes), [nodes])
    world = World(nodes=nodes)
    each = world.per_claim * world.sample_bytes / (max(world.bounds().values()) + world.commit)
    assert row["GB/s"] == pytest.approx(each * nodes * world.workers / 1e9, rel=0.01, abs=0.01)
    assert row["bound by"] == ("store" if nodes == 2000 else "CPU")


def test_a_table_accepts_rows_of_different_columns_and_any_text() -> None:
    assert markdown([{"a": 1, "b": None}, {"a": "x|y\nz", "error": "no"}]).splitlines() == [
        "| a | b | error |",
        "| --- | --- | --- |",
        "| 1 |  |  |",
        "| x\\|y z |  | no |",
    ]


def test_a_chart_has_a_bar_for_each_row_and_the_error_of_a_failed_one() -> None:
    rows = [{"case": "1MiB", "target": 9, "MB/s": 100}, {"peer": "<b>&", "MB/s": 50}, {"peer": "p", "error": "<no>"}]
    root = ElementTree.fromstring(picture({"feed": rows}))
    bars = [float(each.get("width", 0)) for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    said = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]

    assert bars[0] == pytest.approx(2 * bars[1], abs=0.2)
    assert len(bars) == 2
    assert "<no>" in said
    kinds = [each.get("class") for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds == ["bar", "other"]
    assert drawn_column(rows) == "MB/s"
    assert drawn_column([{"what": "open", "20 shards": 1.5, "200 shards": 2.5}]) == "200 shards"


def test_processors_are_kept_awake_for_the_length_of_the_block() -> None:
    def wanted() -> int:
        return int.from_bytes(Path("/dev/cpu_dma_latency").read_bytes()[:4], sys.byteorder)

    with awake() as there:
        pass
    if not there or (before := wanted()) == 0:
        pytest.skip("this machine has no idle state that polls, or only root may ask for it, or somebody asks already")
    with awake():
        assert wanted() == 0
    assert wanted() == before
