"""Files of a cache that its user may not read or write: one error that says so, and nothing taken for damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.folders import labels

WITHOUT = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Runs a command of root without what lets root into any file."""


@pytest.fixture
def prefix(tmp_path: Path) -> list[str]:
    """What to put before a command whose user the kernel keeps to the modes of files."""
    if os.geteuid() != 0:
        return []
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    tried = shutil.which("setpriv") and subprocess.run([*WITHOUT, "ls", closed], capture_output=True, check=False)
    closed.rmdir()
    if not tried or not tried.returncode or b"ermission denied" not in tried.stderr:
        pytest.skip("root's powers cannot be dropped here (setpriv)")
    return WITHOUT


@pytest.mark.parametrize(
    ("mode", "what", "line"),
    [
        (0o555, "shards", "convert --to tfrecord"),
        (0o555, "shards", "pull {remote} --samples 50 --shard-size 10400"),
        (0o555, "shards/*", "evict --max-size 1.25MB"),
        (0o555, "shards/*/data.zarr", "evict --max-size 1.25MB"),
        (0o000, "shards/*", "verify --repair"),
        (0o000, "shards/*", "convert --to hdf5 --out out"),
        (0o000, "shards/*/data.zarr/*", "verify --repair"),
        (0o000, "shards/*/extents.bin", "convert --to tfrecord"),
        (0o000, "shards", "stats"),
    ],
)
def test_what_may_not_be_used_is_named_with_what_to_do(
    filled: Path, remote: Path, tmp_path: Path, prefix: list[str], mode: int, what: str, line: str
) -> None:
    def run(*args: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [*(before or []), sys.executable, "-m", "cachetool", *args, "--cache", str(filled)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run("convert", "--to", "zarr").returncode == 0
    closed = list(filled.glob(what))
    modes = [path.stat().st_mode for path in closed]
    assert closed
    for path in closed:
        path.chmod(mode)
    try:
        ran = run(*line.format(remote=remote).split(), before=prefix)
    finally:
        for path, each in zip(closed, modes, strict=True):
            path.chmod(each)

    assert (ran.returncode, len(ran.stderr.splitlines())) == (6, 1), ran.stderr
    assert ran.stderr.startswith(f"error: permission denied: {filled / 'shards'}")
    assert ran.stderr.endswith(f"chmod -R u+rwX {filled}\n")
    assert run("verify", "--repair").returncode == 0, "and then all goes on"
    assert line.startswith("evict") or len(labels(filled)) >= 30
    assert not (tmp_path / "out").exists()
