"""What a user may not read or write: one error that names it and says what helps, and nothing taken for damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def moded(path: Path, mode: int) -> Iterator[None]:
    """Inside, ``path`` has that mode."""
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def _cachetool(folder: Path, line: str, before: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "cachetool", *line.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", [0o000, 0o644])
@pytest.mark.parametrize(
    "line",
    [
        "pull closed/remote --all --cache cache",
        "pull closed --all --cache cache",
        "pull file://{folder}/closed --all --cache cache",
        "pull closed/remote/scan000.volume.npy --all --cache cache",
        "convert closed/remote --to zarr --out out",
        "convert closed --to zarr --out out",
        "convert closed/remote/scan000.volume.npy --to zarr --out out",
    ],
)
def test_a_source_in_a_closed_folder(remote: Path, tmp_path: Path, prefix: list[str], mode: int, line: str) -> None:
    shutil.copytree(remote, tmp_path / "closed" / "remote")
    shutil.copy(remote / "scan000.volume.npy", tmp_path / "closed")
    with moded(tmp_path / "closed", mode):
        ran = _cachetool(tmp_path, line.format(folder=tmp_path), prefix)

    place = line.split()[1].removeprefix("file://").format(folder=tmp_path)
    assert ran.returncode == 3, ran
    assert len(ran.stderr.splitlines()) <= 2
    assert place in ran.stderr
    assert "permission denied" in ran.stderr
    assert not (tmp_path / "out").exists()
