"""Running the command line as a user does: in a process of its own, with the two streams apart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool.cli.app
from tests.commands import run_command


@dataclass(frozen=True)
class Ran:
    """One finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)

    @property
    def error(self) -> str:
        """The message of a failed command, after checking that it is at most two lines and no traceback."""
        lines = self.stderr.splitlines()
        assert lines, "no message on stderr"
        assert len(lines) <= 2, self.stderr
        assert lines[0].startswith("error: "), self.stderr
        assert "Traceback" not in self.stderr
        return self.stderr.removeprefix("error: ").strip()


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command: ``run("pull", "remote", cwd=...)``. Its ``CACHETOOL_CACHE`` is ``tmp_path/cache``."""

    def start(*args: str | Path, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> Ran:
        environment = {**os.environ, "CACHETOOL_CACHE": str(tmp_path / "cache"), "COLUMNS": "100", **(env or {})}
        if not any(name.startswith(("PYTHON", "LD_")) for name in env or {}):  # which say how an interpreter starts
            done = run_command(*args, folder=cwd, environment=environment)
            return Ran(done.returncode, done.stdout, done.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "cachetool", *map(str, args)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return start


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 samples: ``volume`` float32 (4, 8, 8) full of the sample's number, and its ``label``."""
    folder = tmp_path_factory.mktemp("remote")
    for number in range(60):
        np.save(folder / f"scan{number:03d}.volume.npy", np.full((4, 8, 8), number, dtype=np.float32))
        (folder / f"scan{number:03d}.json").write_text(json.dumps({"label": number}))
    return folder


@pytest.fixture(scope="session")
def pulled(remote: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with 30 of the samples of ``remote``, ten a shard, under a cap of 8 MB; not to be changed."""
    cache = tmp_path_factory.mktemp("pulled") / "cache"
    line = ["pull", str(remote), "--samples", "30", "--shard-size", "10400", "--workers", "1", "--max-size", "8MB"]
    run_command(*line, "--cache", cache, folder=cache.parent).check_returncode()
    return cache


@pytest.fixture
def filled(pulled: Path, tmp_path: Path) -> Path:
    """A copy of ``pulled``, as the cache that ``run`` uses."""
    shutil.copytree(pulled, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """As ``run``, but within this process: for command lines whose answer needs no process of its own."""

    def start(*args: str | Path) -> Ran:
        code = cachetool.cli.app.run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHETOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    before = signal.getsignal(signal.SIGTERM)
    yield start
    signal.signal(signal.SIGTERM, before)
