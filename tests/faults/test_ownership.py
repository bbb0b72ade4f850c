"""Ownership of a cache (rows 83 and 84): folders that others may write to, and links that they plant."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cachetool
from cachetool.core.errors import UsageError
from tests.commands import run_command
from tests.faults.conftest import Figures

PLANT = Path(__file__).parent / "scripts" / "plant_links.py"
NOBODY = "65534"


def command(*args: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}
    return run_command(*args, folder=cwd, environment=environment)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(60):
        np.save(folder / f"{number:02d}.x.npy", np.full(100, number))
    return folder


def test_a_folder_that_any_user_may_write_to_is_refused_as_a_cache(tmp_path: Path, source: Path) -> None:
    """Row 84: for a new or existing cache and every command. The advice works, and a user can allow such a folder."""
    root = tmp_path / "my cache"
    root.mkdir(mode=0o700)
    os.chmod(root, 0o777)
    pull = ("pull", str(source), "--cache", str(root), "--samples", "5", "--max-size", "4MB")

    refused = command(*pull, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"any user may write to it; run: chmod o-w '{root}'" in refused.stderr
    assert refused.stderr.count("\n") == 2
    assert list(root.iterdir()) == []
    os.chmod(root, 0o775)
    assert command(*pull, cwd=tmp_path).returncode == 0
    os.chmod(root, 0o1777)
    for words in (pull, ("stats",), ("ls",), ("evict", "--max-size", "3MB"), ("verify",)):
        found = command(*words, "--cache", str(root), cwd=tmp_path)
        assert (found.returncode, "any user may write to it" in found.stderr) == (2, True), words
    assert command(*pull, cwd=tmp_path, CACHETOOL_ALLOW_SHARED="1").returncode == 0
    told = json.loads(command("doctor", "--cache", str(root), "--json", cwd=tmp_path).stdout)
    assert [each["state"] for each in told["findings"] if each["what"] == "owner"] == ["bad"]


def test_a_cache_of_another_user_is_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 84. Caches of root are accepted, and root accepts all caches: in a container a mounted folder has another
    user.
    """
    root = tmp_path / "cache"
    with cachetool.open_cache(root, max_size="4MB") as cache:
        cache.pull(str(source), samples=5)
    if os.geteuid() == 0:
        with cachetool.open_cache(root) as cache:
            assert len(cache.shards()) == 1
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with cachetool.open_cache(root) as cache:
            assert len(cache.shards()) == 1
        os.chown(root, 4710, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(UsageError, match="belongs to another user"):
        cachetool.open_cache(root)
    monkeypatch.setenv("CACHETOOL_ALLOW_SHARED", "1")
    with cachetool.open_cache(root) as cache:
        assert len(cache.shards()) == 1


@contextlib.contextmanager
def planter(roots: Path, target: Path, count: int, *user: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that plants links to ``target`` in all caches below ``roots``, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLANT.read_text(), str(roots), str(target), str(count), *user],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "count", [pytest.param(5_000, id="short"), pytest.param(100_000, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", ["file", "nothing", "folder"])
def test_links_planted_at_paths_that_a_command_writes_are_not_followed(
    tmp_path: Path, source: Path, figures: Figures, count: int, what: str
) -> None:
    """Row 83: at locks, the catalog and its journal, listings, shards and the cache's own folders. The attacker has the
    rights of the cache's user. Commands may fail, but the targets of the links are not touched.
    """
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (outside / "victim").write_bytes(b"precious")
    os.utime(outside / "victim", (1, 1))
    target = {"file": outside / "victim", "nothing": outside / "made", "folder": outside / "kept"}[what]
    roots = tmp_path / "caches"
    roots.mkdir()
    codes = []
    with planter(roots, target, count) as process:
        while process.poll() is None:
            root = roots / str(len(codes))
            for to in ("lmdb", "tfrecord", "hdf5"):
                found = command(
                    *("pull", str(source), "--cache", str(root), "--to", to, "--samples", "20", "--max-size", "4MB"),
                    *("--shard-size", "4kB"),
                    cwd=tmp_path,
                )
                codes.append(found.returncode)
                # Exit code 1 is allowed: files that others create or delete in between may look like a bug, at many
                # places.
                assert found.returncode in range(7), found.stderr
                assert "Traceback" not in found.stderr
        assert process.stdout is not None
        planted, _ = map(int, process.stdout.read().split())
    figures(links_planted=planted, commands=len(codes), of_which_failed=sum(map(bool, codes)))

    assert planted > count // 2
    assert (outside / "victim").read_bytes() == b"precious"
    assert (outside / "victim").stat().st_mtime == 1
    assert {str(path.relative_to(outside)) for path in outside.rglob("*")} == {"kept", "victim"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, which only root can become")
@pytest.mark.parametrize(
    "count", [pytest.param(5_000, id="short"), pytest.param(100_000, id="all", marks=pytest.mark.soak)]
)
def test_another_user_cannot_plant_links_for_any_umask(source: Path, figures: Figures, count: int) -> None:
    """Rows 83 and 84."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        roots, target = Path(place, "caches"), Path(place, "victim")
        roots.mkdir(mode=0o755)
        target.write_bytes(b"precious")
        before = os.umask(0)
        try:
            with cachetool.open_cache(roots / "cache", max_size="4MB") as cache:
                cache.pull(str(source), samples=5)
            with planter(roots, target, count, NOBODY) as process:
                with cachetool.open_cache(roots / "cache") as cache:
                    cache.pull(str(source), samples=20, shard_size="4kB")
                assert process.wait(60) == 0
                assert process.stdout is not None
                planted, refused = map(int, process.stdout.read().split())
        finally:
            os.umask(before)
        figures(links_refused=refused, planted=planted)
        assert (planted, target.read_bytes()) == (0, b"precious")
        assert refused >= count
