"""Runs the command line as a user does: in a separate process, with separate stdout and stderr."""

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

_PROGRESS = ("listing: ", "looking at samples: ", "pulling: ")


@dataclass(frozen=True)
class Ran:
    """The result of one command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """Return the single JSON document on stdout."""
        return json.loads(self.stdout)

    @property
    def error(self) -> str:
        """Return the message of a failed command. Check that it has at most two lines and no traceback."""
        # A command that takes seconds, as on a busy machine, prints its progress before the error.
        lines = [line for line in self.stderr.splitlines() if not line.startswith(_PROGRESS)]
        assert lines, "no message on stderr"
        assert len(lines) <= 2, self.stderr
        assert lines[0].startswith("error: "), self.stderr
        assert "Traceback" not in self.stderr
        return "\n".join(lines).removeprefix("error: ").strip()


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command: ``run("pull", "remote", cwd=...)``. Its ``CACHETOOL_CACHE`` is ``tmp_path/cache``."""

    def start(*args: str | Path, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> Ran:
        environment = {**os.environ, "CACHETOOL_CACHE": str(tmp_path / "cache"), "COLUMNS": "100", **(env or {})}
        # these variables change how an interpreter starts
        if not any(name.startswith(("PYTHON", "LD_")) for name in env or {}):
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
    """Create a folder of 60 samples: ``volume`` float32 (4, 8, 8), filled with the sample's number, and its
    ``label``.
    """
    folder = tmp_path_factory.mktemp("remote")
    for number in range(60):
        np.save(folder / f"scan{number:03d}.volume.npy", np.full((4, 8, 8), number, dtype=np.float32))
        (folder / f"scan{number:03d}.json").write_text(json.dumps({"label": number}))
    return folder


@pytest.fixture(scope="session")
def pulled(remote: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache with 30 samples of ``remote``, ten per shard, under a cap of 8 MB. Tests must not change it."""
    cache = tmp_path_factory.mktemp("pulled") / "cache"
    line = ["pull", str(remote), "--samples", "30", "--shard-size", "10400", "--workers", "1", "--max-size", "8MB"]
    run_command(*line, "--cache", cache, folder=cache.parent).check_returncode()
    return cache


@pytest.fixture
def filled(pulled: Path, tmp_path: Path) -> Path:
    """Copy ``pulled`` to the cache that ``run`` uses."""
    shutil.copytree(pulled, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a command as ``run`` does, but in this process, for commands whose answer needs no separate process."""

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
