"""A disk that is full, fails or is read-only: a clear error, no loss, and the next run succeeds (27, 28, 30, 31, 33,
34).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachetool.cache import Shard, open_cache
from cachetool.core.block import Block
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from tests.commands import run_command
from tests.faults.conftest import Figures
from tests.faults.tracing import Children, Outcome, Point, needs_strace
from tests.faults.world import FORMATS, Oracle, make

WRITING = ("write", "writev", "pwrite64", "pwritev", "pwritev2", "fallocate", "ftruncate", "openat", "mkdir", "mkdirat")


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a separate tmpfs; skip the test if that is impossible."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def disturbed(
    tmp_path: Path, children: Children, format: str, calls: tuple[str, ...], inject: str, step: int
) -> list[tuple[Point, Outcome]]:
    """Make each ``step``-th of these calls of a commit fail. After each failure the cache must be sound, and a run
    without failures must succeed.
    """
    ready, root, ledger = tmp_path / "ready", tmp_path / "cache", tmp_path / "ledger"
    make(ready)
    assert children.run("pull", root=str(ready), format=format, ledger=str(tmp_path / "kept")).status == 0
    arguments = {"root": str(root), "format": format, "ledger": str(ledger)}
    shutil.copytree(ready, root)
    points = [
        point for point in children.points("pull", tmp_path / "log", within=root, **arguments) if point.call in calls
    ]
    outcomes = []
    for point in points[::step]:
        shutil.rmtree(root)
        shutil.copytree(ready, root)
        shutil.copy(tmp_path / "kept", ledger)
        outcome = children.run("pull", inject=f"{point.call}:{inject.format(point.nth)}", **arguments)
        try:
            assert outcome.status in (0, 3), outcome
            before = Oracle(root, ledger).check()
            assert children.run("pull", **arguments).status == 0
            assert Oracle(root, ledger).check() == before + 12
        except AssertionError as error:
            raise AssertionError(f"{inject} at {point}, {outcome}: {error}") from error
        outcomes.append((point, outcome))
    return outcomes


@needs_strace
@pytest.mark.parametrize(
    ("format", "how", "step"),
    [
        *((format, how, 25) for format, how in zip(FORMATS, itertools.cycle(["once", "for good"]), strict=False)),
        *(pytest.param(*each, 1, marks=pytest.mark.soak) for each in itertools.product(FORMATS, ["once", "for good"])),
    ],
)
def test_a_full_disk_at_any_write_of_a_commit_is_a_capacity_error(
    tmp_path: Path, children: Children, figures: Figures, format: str, how: str, step: int
) -> None:
    inject = "error=ENOSPC:when={}" + ("+" if how == "for good" else "")
    outcomes = disturbed(tmp_path, children, format, WRITING, inject, step)

    failed = [(point, outcome) for point, outcome in outcomes if outcome.status]
    figures(calls_failed=len(outcomes), errors_of_capacity=len(failed), went_on_without=len(outcomes) - len(failed))
    assert len(failed) > len(outcomes) // 2
    for point, outcome in failed:
        assert "CapacityError" in outcome.kinds, (point, outcome)


@needs_strace
@pytest.mark.parametrize("step", [pytest.param(20, id="short"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_failing_fsync_discards_the_shard_and_is_not_retried(
    tmp_path: Path, children: Children, figures: Figures, format: str, step: int
) -> None:
    outcomes = disturbed(tmp_path, children, format, ("fsync", "fdatasync", "msync"), "error=EIO:when={}", step)

    failed = [(point, outcome) for point, outcome in outcomes if outcome.status]
    figures(calls_failed=len(outcomes), errors_of_capacity=len(failed), went_on_without=len(outcomes) - len(failed))
    assert failed
    for point, outcome in failed:
        assert "CapacityError" in outcome.kinds, (point, outcome)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder of 400 small arrays."""
    folder = tmp_path_factory.mktemp("objects")
    for number in range(400):
        np.save(folder / f"{number:03d}.npy", np.random.default_rng(number).random(500))
    return folder


def cachetool(*words: object) -> subprocess.CompletedProcess[str]:
    return run_command(*words, folder=Path.cwd())


def test_running_out_of_inodes_is_reported_as_such(tmp_path: Path, objects: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64m,nr_inodes=60") as disk:
        words = (
            "pull",
            objects,
            "--cache",
            disk / "cache",
            "--max-size",
            "30MB",
            "--shard-size",
            "40kB",
            "--to",
            "zarr",
        )
        ran = cachetool(*words, "--workers", 1)
        assert ran.returncode == 4, ran
        assert "out of inodes" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert len(ran.stderr.strip().splitlines()) <= 3
        assert cachetool("verify", "--cache", disk / "cache").returncode == 0
        subprocess.run(["mount", "-o", "remount,nr_inodes=100000", disk], check=True)
        assert cachetool(*words, "--all").returncode == 0
        ran = cachetool("stats", "--cache", disk / "cache", "--json")
        assert json.loads(ran.stdout)["samples"] == 400


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_smaller_than_the_cap_ends_the_pull_and_loses_nothing(
    tmp_path: Path, objects: Path, format: str
) -> None:
    with small_disk(tmp_path / "disk", "size=3200k") as disk:
        words = (
            "pull",
            objects,
            "--cache",
            disk / "cache",
            "--max-size",
            "1GB",
            "--shard-size",
            "100kB",
            "--to",
            format,
        )
        (disk / "ballast").write_bytes(bytes(1_500_000))
        ran = cachetool(*words, "--all")
        assert ran.returncode == 4, ran
        assert "free" in ran.stderr
        assert "Traceback" not in ran.stderr
        ran = cachetool("verify", "--cache", disk / "cache", "--json")
        assert ran.returncode == 0, ran
        assert json.loads(ran.stdout)["problems"] == []
        assert 0 < json.loads(ran.stdout)["samples"] < 400
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert cachetool(*words, "--all").returncode == 0
        ran = cachetool("verify", "--cache", disk / "cache", "--json")
        assert json.loads(ran.stdout)["samples"] == 400


@needs_strace
@pytest.mark.parametrize(
    "inject",
    [
        "fallocate:error=ENOSPC:when=1+",
        "pwrite64:error=ENOSPC:when=40+",
        pytest.param("mkdir:error=ENOSPC:when=6+", marks=pytest.mark.soak),
        "fsync:error=EIO:when=12",
        pytest.param("fsync:error=EIO:when=12+", marks=pytest.mark.soak),
    ],
)
def test_the_command_ends_with_4_and_two_lines_when_its_disk_fails(tmp_path: Path, objects: Path, inject: str) -> None:
    """The whole command and its workers run under strace. The next run, without failures, draws all remaining
    samples.
    """
    words = (
        "pull",
        objects,
        "--cache",
        tmp_path / "cache",
        "--max-size",
        "20MB",
        "--shard-size",
        "40kB",
        "--all",
        "-q",
    )
    plain = [sys.executable, "-m", "cachetool", *map(str, words)]
    log = tmp_path / "log"
    ran = subprocess.run(
        ["strace", "-qq", "-f", "-o", log, "-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}", *plain],
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in ran.stderr:
        pytest.skip(f"this process may not be traced: {ran.stderr}")
    assert ran.returncode == 4, (ran, log.read_text()[-2000:])
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()) <= 2, ran.stderr
    assert "INJECTED" in log.read_text()
    if (tmp_path / "cache" / "cachetool.json").exists():
        assert cachetool("verify", "--cache", tmp_path / "cache").returncode == 0
    assert cachetool(*words).returncode == 0
    document = json.loads(cachetool("verify", "--cache", tmp_path / "cache", "--json").stdout)
    assert (document["problems"], document["samples"]) == ([], 400)


NEW_READERS = [
    f"""
import sys, warnings
from cachetool.core.errors import CacheToolError
try:
    {use}
except CacheToolError as error:
    print(type(error).__name__, error.exit_code, error)
"""
    for use in (
        "import cachetool; cachetool.open_cache(sys.argv[1]).snapshot()",
        "from cachetool.loaders.torch import CacheDataset; len(CacheDataset(sys.argv[1]))",
        "from cachetool.loaders.numpy import Loader; next(iter(Loader(sys.argv[1], batch_size=4, workers=1)))",
    )
]


def test_a_disk_that_becomes_read_only_still_serves_its_readers(tmp_path: Path, objects: Path) -> None:
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 * 2**20)
    mounted = shutil.which("mkfs.ext4") and (
        subprocess.run(["mkfs.ext4", "-q", "-e", "remount-ro", image], capture_output=True).returncode == 0
        and subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True).returncode == 0
    )
    if not mounted:
        pytest.skip("an ext4 image cannot be made and mounted here")
    try:
        words = ("pull", objects, "--cache", disk / "cache", "--max-size", "20MB", "--shard-size", "100kB")
        assert cachetool(*words, "--samples", 100).returncode == 0
        with open_cache(disk / "cache") as cache, cache.snapshot() as snapshot:
            # ext4 does this by itself when its disk fails, even with files open for writing.
            subprocess.run(["mount", "-o", "remount,abort", disk], check=True, capture_output=True)
            with pytest.raises(OSError, match="Read-only"):
                (disk / "new").touch()
            assert sum(len(read(shard)) for shard in snapshot.shards) == 100
            ran = cachetool(*words, "--all")
            assert ran.returncode == 4, ran
            assert "read-only" in ran.stderr
            assert "Traceback" not in ran.stderr
            ran = cachetool("stats", "--cache", disk / "cache", "--json")
            assert json.loads(ran.stdout).get("samples") == 100, ran
            ran = cachetool("doctor", "--cache", disk / "cache")
            assert ran.returncode == 6, ran
            assert "nothing can be written: the disk is mounted read-only" in ran.stdout
            assert "catalog" in ran.stdout, "the rest of the table is there too"
            for reader in NEW_READERS:
                ran = subprocess.run(
                    [sys.executable, "-c", reader, disk / "cache"], capture_output=True, text=True, check=False
                )
                assert ran.stdout.startswith("CapacityError 4 "), ran
                assert str(disk / "cache") in ran.stdout
                assert "read-only" in ran.stdout
                assert "remount,rw" in ran.stdout
        subprocess.run(["umount", disk], check=True)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
        assert cachetool(*words, "--all").returncode == 0
        assert json.loads(cachetool("verify", "--cache", disk / "cache", "--json").stdout)["samples"] == 400
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_error_about_a_read_only_output_names_the_output_and_not_the_cache(tmp_path: Path, objects: Path) -> None:
    cache = tmp_path / "cache"
    assert cachetool("pull", objects, "--cache", cache, "--max-size", "20MB", "--samples", 10).returncode == 0
    with small_disk(tmp_path / "disk", "size=1m,ro") as disk:
        for words in (("convert", "--to", "hdf5", "--out", disk / "out"), ("stats", "--html", disk / "page.html")):
            ran = cachetool(*words, "--cache", cache)

            assert ran.returncode == 4, ran
            assert ran.stderr.endswith("the disk is mounted read-only; choose a place on another disk\n"), ran


def read(shard: Shard) -> Block:
    with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
        return reader.read(0, reader.samples)


@pytest.mark.parametrize(
    "step", [pytest.param(40_960, id="short"), pytest.param(4096, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("format", FORMATS)
def test_a_limit_on_file_sizes_is_handled_like_a_full_disk(
    tmp_path: Path, children: Children, figures: Figures, format: str, step: int
) -> None:
    root, ledger = tmp_path / "cache", tmp_path / "ledger"
    make(root)
    done = 0
    for limit in range(0, 180_000, step):
        outcome = children.run("pull", root=str(root), format=format, ledger=str(ledger), largest_file=limit)
        assert outcome.status == 0 or "CapacityError" in outcome.kinds, (limit, outcome)
        done += 12 * (outcome.status == 0)
        assert Oracle(root, ledger).check() == done
    figures(limits=len(range(0, 180_000, step)), refused=len(range(0, 180_000, step)) - done // 12)
    assert 0 < done < 12 * 180_000 // step
