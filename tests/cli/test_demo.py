"""``cachetool demo``: the first thing a new user runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def test_the_demo_runs_shows_its_commands_and_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ran = run("demo", env={"TMPDIR": str(temporary)})

    assert ran.code == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    for command in ("pull", "convert", "evict", "stats"):
        assert f"$ cachetool {command} " in ran.stdout
    for epoch in (1, 2, 3):
        assert f"epoch {epoch}: " in ran.stdout
    assert "coverage" in ran.stdout
    assert os.listdir(temporary) == []
    assert not (tmp_path / "cache").exists()


def test_the_cache_grows_from_epoch_to_epoch_and_a_folder_that_is_named_is_kept(run: Run, tmp_path: Path) -> None:
    ran = run("demo", "--json", "--dir", tmp_path / "kept")

    assert ran.code == 0, ran.stderr
    epochs = ran.document["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert epochs[0]["samples"] < epochs[1]["samples"]
    assert len({epoch["version"] for epoch in epochs}) == 3
    assert all(epoch["right"] == epoch["samples"] for epoch in epochs)
    stats = ran.document["steps"][-1]["result"]
    assert stats["used"] <= stats["max_size"]
    assert stats["evicted"] > 0
    assert stats["served"] == sum(epoch["bytes"] for epoch in epochs)
    assert stats["sources"][0]["coverage"] == 1.0

    assert run("stats", "--cache", "cache", cwd=tmp_path / "kept").code == 0
    again = run("demo", "--dir", tmp_path / "kept")
    assert again.code == 2
    assert "exists already" in again.error
