"""The advice of messages of commands on several nodes is followed, and works."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cachetool.cli.app
from tests.advice.conftest import ADVISED
from tests.cli.conftest import Ran

pytestmark = pytest.mark.soak  # one test of a pull and one of a loader run on a real cluster by default

Command = Callable[..., Ran]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    for number in range(30):
        np.save(folder / f"{number:02d}.npy", np.full(10, number))
    return folder


@pytest.fixture
def advised(command: Command, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Return a function that runs the advice of a message, word by word, with values for names such as SOURCE."""

    def run(said: str, **values: object) -> None:
        line = ADVISED.findall(said)[-1]
        for name, value in values.items():
            line = line.replace(name, str(value))
        code = cachetool.cli.app.run(shlex.split(line))
        assert code == 0, (line, capfd.readouterr())

    return run


def test_missing_caches_are_filled(command: Command, advised: Callable[..., None], source: Path) -> None:
    cache = source.parent / "caches/{node}"
    none = command("stats", "--cache", cache)
    advised(none.error, SOURCE=source)
    assert command("stats", "--cache", cache, "--json").document["sum"]["samples"] == 30

    (folder := next(source.parent.glob("caches/a/shards/*"))).joinpath("shard.json").write_text("{}")
    damaged = command("verify", "--cache", cache)
    assert damaged.code == 5, folder
    advised(damaged.stderr)
    assert command("verify", "--cache", cache).code == 0

    one = command("convert", "--to", "hdf5", "--cache", cache, "--out", source.parent / "one")
    out = one.error.rpartition("--out ")[2].strip()
    assert command("convert", "--to", "hdf5", "--cache", cache, "--out", out).code == 0
    shared = command("stats", "--cache", source.parent / "caches/a")
    assert "put {node} into --cache" in shared.error


def test_files_are_pulled_into_the_caches_of_the_nodes(
    command: Command, advised: Callable[..., None], source: Path
) -> None:
    cache = source.parent / "caches/{node}"
    refused = command("convert", source, "--to", "hdf5", "--cache", cache)
    assert "--out" in refused.error
    advised(refused.stderr)
    assert command("stats", "--cache", cache, "--json").document["sum"]["samples"] == 30
