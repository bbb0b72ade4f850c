"""Files and folders without permission: one error names them and the remedy, and nothing is taken for damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.folders import labels
from tests.commands import run_command

WITHOUT = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""A command prefix that removes root's access to all files."""


@pytest.fixture
def prefix(tmp_path: Path) -> list[str]:
    """Return the command prefix that makes the kernel enforce file modes."""
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
def test_a_file_without_permission_is_named_with_the_remedy(
    filled: Path, remote: Path, tmp_path: Path, prefix: list[str], mode: int, what: str, line: str
) -> None:
    def run(*args: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        return _cachetool(tmp_path, [*args, "--cache", str(filled)], before or [])

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
    """Change the mode of ``path`` inside the block."""
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def _cachetool(folder: Path, line: str | list[str], before: list[str]) -> subprocess.CompletedProcess[str]:
    words = line.split() if isinstance(line, str) else line
    return run_command(*words, folder=folder, powerless=bool(before))


@pytest.mark.parametrize(
    ("mode", "what", "line"),
    [
        (0o400, "catalog.sqlite3", "pull {remote} --samples 50"),
        (0o400, "catalog.sqlite3", "evict --max-size 1.25MB"),
        (0o000, "catalog.sqlite3", "pull {remote} --samples 50"),
        (0o000, "catalog.sqlite3", "stats"),
        (0o000, "catalog.sqlite3-journal", "stats"),
        (0o000, "cachetool.json", "stats"),
        (0o500, "holders", "pull {remote} --samples 50"),
        (0o000, ".", "stats"),
        (0o444, ".", "pull {remote} --samples 50"),
    ],
)
def test_a_file_without_permission_is_named_once(
    filled: Path, remote: Path, tmp_path: Path, prefix: list[str], mode: int, what: str, line: str
) -> None:
    with moded(filled / what, mode):
        ran = _cachetool(tmp_path, f"{line.format(remote=remote)} --cache {filled}", prefix)

    said = f"error: permission denied: {filled / what}; give this user access with: chmod -R u+rwX {filled}\n"
    assert (ran.returncode, ran.stderr) == (6, said)


@pytest.mark.parametrize(("mode", "what"), [(0o400, "catalog.sqlite3"), (0o500, "holders")])
def test_a_read_only_cache_is_still_shown(
    filled: Path, tmp_path: Path, prefix: list[str], mode: int, what: str
) -> None:
    _leave_a_dead_holder(filled)
    with moded(filled / what, mode):
        ran = _cachetool(tmp_path, f"stats --cache {filled}", prefix)

    assert (ran.returncode, "30 samples" in ran.stdout) == (0, True), ran
    assert ran.stderr.startswith(f"warning: permission denied: {filled / what}")


def _leave_a_dead_holder(cache: Path) -> None:
    """Leave a dead holder, which the next command would recover and therefore write."""
    script = "import os, sys, cachetool; c = cachetool.open_cache(sys.argv[1]); s = c.snapshot(); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, cache], check=True)


@pytest.mark.parametrize(
    ("mode", "what"),
    [(0o400, "catalog.sqlite3"), (0o000, "catalog.sqlite3-journal"), (0o500, "shards"), (0o500, "holders")],
)
def test_doctor_names_files_without_permission(
    filled: Path, tmp_path: Path, prefix: list[str], mode: int, what: str
) -> None:
    assert "permission" not in _cachetool(tmp_path, f"doctor --cache {filled}", prefix).stdout

    with moded(filled / what, mode):
        ran = _cachetool(tmp_path, f"doctor --cache {filled} --json", prefix)

    found = [each for each in json.loads(ran.stdout)["findings"] if each["what"] == "permission"]
    says = f"permission denied: {filled / what}; give this user access with: chmod -R u+rwX {filled}"
    assert (ran.returncode, ran.stderr, found) == (6, "", [{"what": "permission", "state": "bad", "text": says}])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_cache_of_another_user_is_named_as_such(filled: Path, tmp_path: Path, prefix: list[str]) -> None:
    for path in (filled, *filled.rglob("*")):
        os.chown(path, 4711, -1)
        path.chmod(0o755 if path.is_dir() else 0o644)

    for line in ("evict --max-size 1.25MB", "doctor"):
        ran = _cachetool(tmp_path, f"{line} --cache {filled}", prefix)
        assert ran.returncode == 6
        assert "the cache belongs to another user (4711); run this as that user" in ran.stderr + ran.stdout


@pytest.mark.parametrize("made", ["numpy import Loader", "torch import CacheDataset"])
def test_a_loader_names_a_cache_folder_without_permission(
    filled: Path, tmp_path: Path, prefix: list[str], made: str
) -> None:
    batches = ", batch_size=1" if "numpy" in made else ""
    code = f"from cachetool.loaders.{made} as Made\nMade({str(filled)!r}{batches})"
    with moded(filled, 0o000):
        ran = subprocess.run([*prefix, sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1
    last = ran.stderr.rstrip().splitlines()[-1]
    assert last.startswith("cachetool.core.errors.")
    assert f"permission denied: {filled}; give this user access" in last


@pytest.mark.parametrize("mode", [0o000, 0o644])
@pytest.mark.parametrize("line", ["stats", "doctor", "pull {remote} --samples 1", "bench", "ls", "verify"])
def test_a_cache_in_a_folder_without_permission_is_named(
    filled: Path, remote: Path, tmp_path: Path, prefix: list[str], mode: int, line: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    cache = filled.rename(closed / "cache")
    with moded(closed, mode):
        ran = _cachetool(tmp_path, f"{line.format(remote=remote)} --cache {cache}", prefix)

    said = f"error: permission denied: {cache}; {closed} cannot be entered; run: chmod u+x {closed}\n"
    assert (ran.returncode, ran.stderr) == (6, said)


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
def test_a_source_in_a_folder_without_permission_is_named(
    remote: Path, tmp_path: Path, prefix: list[str], mode: int, line: str
) -> None:
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


def test_listed_files_without_permission_do_not_count_as_vanished(
    remote: Path, tmp_path: Path, prefix: list[str]
) -> None:
    listed = shutil.copytree(remote, tmp_path / "listed")
    with moded(listed, 0o644):
        ran = _cachetool(tmp_path, f"pull file://{listed} --all --cache cache", prefix)

    assert (ran.returncode, "permission denied" in ran.stderr, str(listed) in ran.stderr) == (3, True, True), ran
