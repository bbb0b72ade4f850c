"""``cachetool verify`` and ``doctor`` as commands, on caches filled by real pulls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cachetool.api import open_cache
from cachetool.check.doctor import examine
from cachetool.check.verify import verify
from cachetool.core.errors import CatalogError, CorruptError, UsageError
from cachetool.formats.tfrecord_package import PackageReader
from tests.commands import run_command

READER = """
import sys, time, cachetool
cache = cachetool.open_cache(sys.argv[1])
snapshot = cache.snapshot()
print("ready", flush=True)
time.sleep(600)
"""
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/vfs.h>
int statfs(const char *path, struct statfs *found) {
    int (*real)(const char *, struct statfs *) = dlsym(RTLD_NEXT, "statfs");
    int result = real(path, found);
    if (result == 0) found->f_type = strtoul(getenv("FAKE_F_TYPE"), 0, 16);
    return result;
}
"""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    for number in range(60):
        np.save(folder / f"{number:03d}.npy", np.random.default_rng(number).random(500))
    return folder


@pytest.fixture
def root(tmp_path: Path, objects: Path) -> Path:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(objects), samples=50, to="hdf5", shard_size=41_000, workers=1)
    return tmp_path / "cache"


def run(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    if not env:  # otherwise the environment may decide what the interpreter loads first
        return run_command(*words, folder=Path.cwd())
    return subprocess.run(
        [sys.executable, "-m", "cachetool", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def keys(root: Path) -> list[str]:
    """Return the keys of all samples, sorted."""
    from cachetool.formats import get_format
    from cachetool.formats.shard import open_shard

    found: list[str] = []
    with open_cache(root) as cache:
        for shard in cache.shards():
            with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
                block = reader.read(0, reader.samples)
                found += [block.sample(index)["__key__"] for index in range(len(block))]
    return sorted(found)


def damage(root: Path) -> str:
    shard = next(path for path in sorted((root / "shards").iterdir()))
    data = bytearray((shard / "data.h5").read_bytes())
    data[-100] ^= 4
    (shard / "data.h5").write_bytes(data)
    return shard.name


def test_verify_reads_a_sound_cache_completely_and_exits_with_0(root: Path) -> None:
    ran = run("verify", "--cache", root)

    assert ran.returncode == 0, ran
    assert ran.stdout.splitlines()[-1].startswith("read 5 of 5 shards, 50 samples, ")
    assert ran.stdout.rstrip().endswith("no problems")


def test_a_flipped_bit_is_named_with_exit_code_5_and_repaired_with_0(root: Path, objects: Path) -> None:
    shard, before = damage(root), keys(root)
    ran = run("verify", "--cache", root)
    assert ran.returncode == 5
    assert shard in ran.stdout
    assert "data.h5" in ran.stdout
    assert "run: cachetool verify --repair" in ran.stderr
    document = json.loads(run("verify", "--cache", root, "--json").stdout)
    assert document["sound"] is False
    assert [(p["shard"], p["file"], p["action"]) for p in document["problems"]] == [(shard, "data.h5", None)]

    ran = run("verify", "--cache", root, "--repair", "--no-repull")
    assert ran.returncode == 5, "10 draws are still to be fetched"
    assert "10 draws of" in ran.stdout
    assert f"10 damaged draws of {objects} will be fetched again by the next pull" in ran.stdout
    assert "pulled" not in ran.stdout
    assert len(keys(root)) == 40
    with open_cache(root) as cache:
        cache.pull(str(objects), samples=10, workers=1)
    assert keys(root) == before

    shard = damage(root)
    ran = run("verify", "--cache", root, "--repair")
    assert ran.returncode == 0, ran
    assert shard in ran.stdout
    assert "10 draws of" in ran.stdout
    assert "10 samples fetched again" in ran.stdout
    assert keys(root) == before
    assert run("verify", "--cache", root).returncode == 0


def test_draws_that_cannot_be_pulled_again_now_stay_open(root: Path, objects: Path, tmp_path: Path) -> None:
    before = keys(root)
    damage(root)
    gone = shutil.move(objects, tmp_path / "gone")
    try:
        ran = run("verify", "--cache", root, "--repair")
        assert ran.returncode == 5
        why = f"there is no file or folder '{objects}'"
        waiting = f"10 damaged draws of {objects} will be fetched again by the next pull"
        assert f"{waiting}; fetching failed now: {why}" in ran.stdout
        assert ran.stdout.rstrip().endswith("1 problem repaired, 10 draws to be fetched again")
        assert "--repair" in ran.stderr

        ran = run("verify", "--cache", root)
        assert ran.returncode == 5
        assert f"{waiting}; the last error of that source: {why}" in ran.stdout
        assert "run: cachetool verify --repair" in ran.stderr
        assert waiting in run("stats", "--cache", root).stdout
        assert by_name(root)["missing"].state == "bad"
        ran = run("verify", "--cache", root, "--repair", "--json")
        assert ran.returncode == 5
        assert [(m["source"], m["draws"]) for m in json.loads(ran.stdout)["missing"]] == [(str(objects), 10)]
        with open_cache(root) as cache:
            assert cache.stats().sources[0]["drawn"] == 40
            assert cache.stats().errors[0]["kind"] in ("error", "corrupt")
    finally:
        shutil.move(gone, objects)
    ran = run("verify", "--cache", root, "--repair")
    assert ran.returncode == 0, ran
    assert "10 samples fetched again" in ran.stdout
    assert keys(root) == before
    assert run("verify", "--cache", root).returncode == 0
    with open_cache(root) as cache:
        assert cache.stats().missing == []
        cache.pull(str(objects), all=True, workers=1)
    assert len(keys(root)) == len(set(keys(root))) == 60


def test_verify_with_a_sample_reads_some_shards_and_checks_the_sizes_of_all(root: Path) -> None:
    found = verify(root, sample=0.4)
    assert (found.shards, found.checked, found.samples) == (5, 2, 20)
    for shard in (root / "shards").iterdir():
        with open(shard / "data.h5", "r+b") as file:
            file.truncate(1000)
    assert {problem.file for problem in verify(root, sample=0.01).problems} == {"data.h5"}
    assert len(verify(root, sample=0.01).problems) == 5


def test_tfrecord_shards_are_read_by_the_tfrecord_package_too(
    tmp_path: Path, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        cache.pull(str(objects), samples=50, to="tfrecord", shard_size=41_000, workers=1)
    checked: list[Path] = []
    check = PackageReader.check

    def counted(self: PackageReader, path: Path, *arguments: Any) -> None:
        check(self, path, *arguments)
        checked.append(path)

    monkeypatch.setattr(PackageReader, "check", counted)
    assert verify(tmp_path / "cache").sound
    assert sorted(checked) == sorted((tmp_path / "cache" / "shards").glob("*/data.tfrecord"))

    def refused(_: PackageReader, path: Path, *arguments: Any) -> None:
        if path == checked[0]:
            raise CorruptError(f"{path}: the tfrecord package cannot read it")

    monkeypatch.setattr(PackageReader, "check", refused)
    (problem,) = verify(tmp_path / "cache", repair=True).problems
    assert (problem.shard, problem.file) == (checked[0].parent.name, "data.tfrecord")
    assert "the tfrecord package cannot read it" in problem.what
    assert "draws must be repeated" in str(problem.action)


def test_a_lost_catalog_is_an_error_that_names_the_remedy(root: Path) -> None:
    before = keys(root)
    (root / "catalog.sqlite3").unlink()
    ran = run("ls", "--cache", root)
    assert ran.returncode == 6
    assert "run: cachetool verify --repair" in ran.stderr
    assert run("verify", "--cache", root).returncode == 5
    ran = run("verify", "--cache", root, "--repair")
    assert ran.returncode == 0, ran
    assert "rebuilt from 5 shards with 50 samples" in ran.stdout
    assert keys(root) == before
    with open_cache(root) as cache:
        assert cache.max_size == 20_000_000
        cache.pull(next(iter(cache.stats().sources))["url"], all=True, workers=1)
        assert cache.stats().sources[0]["drawn"] == 60
    assert len(set(keys(root))) == 60


def test_verify_without_a_cache_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no cache"):
        verify(tmp_path / "none")
    assert run("verify", "--cache", tmp_path / "none").returncode == 2
    assert not (tmp_path / "none").exists()


def test_a_catalog_of_a_newer_version_is_not_replaced_by_a_repair(root: Path) -> None:
    with sqlite3.connect(root / "catalog.sqlite3") as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(CatalogError, match="newer cachetool"):
        verify(root, repair=True)


# -- doctor ----------------------------------------------------------------------------------------------------------


def by_name(root: Path) -> dict[str, Any]:
    return {finding.what: finding for finding in examine(root)}


def test_doctor_of_a_sound_cache_reports_no_problem_and_changes_nothing(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = by_name(root)

    assert {finding.state for finding in found.values()} == {"ok"}
    charged = [finding.text.partition(": ")[2] for finding in examine(root) if finding.what == "charged"]
    assert charged[0] == "shards"
    assert "catalog, at its largest size" in charged
    assert found["on disk"].text.endswith(" in all files and folders")
    assert "journal mode persist" in found["SQLite"].text
    assert "locks between processes work" in found["locks"].text
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_doctor_names_readers_dead_holders_leftovers_and_damage(root: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", READER, str(root)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = by_name(root)
    assert found["holder"].state == "ok"
    assert f"pid {child.pid}" in found["holder"].text
    assert f"pid {child.pid}" in found["lease"].text
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    found = by_name(root)
    assert found["holder"].state == "note"
    assert "dead" in found["holder"].text

    (root / "shards" / "0123456789abcdef").mkdir()
    ran = run("doctor", "--cache", root, "--json")
    assert ran.returncode == 6
    document = json.loads(ran.stdout)
    assert document["well"] is False
    assert [f["what"] for f in document["findings"] if f["state"] == "bad"] == ["left over"]

    (root / "catalog.sqlite3").write_bytes(b"x" * 5000)
    assert by_name(root)["catalog"].state == "bad"
    assert run("doctor", "--cache", root).returncode == 6


def test_doctor_checks_a_folder_without_a_cache(tmp_path: Path) -> None:
    found = by_name(tmp_path / "a" / "b")

    assert found["cache"].state == "note"
    assert found["file system"].state == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: apt-get install gcc")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c"], check=True)
    return folder / "shim.so"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("6969", "NFS"),
        ("fe534d42", "SMB2"),
        ("1021997", "9p"),
        ("65735546", "FUSE"),
        ("c36400", "Ceph"),
        ("bd00bd0", "Lustre"),
    ],
)
def test_a_network_file_system_is_refused_unless_it_is_explicitly_allowed(
    tmp_path: Path, objects: Path, shim: Path, kind: str, name: str
) -> None:
    env = {"LD_PRELOAD": str(shim), "FAKE_F_TYPE": kind}
    words = ("pull", objects, "--cache", tmp_path / "cache", "--max-size", "20MB", "--samples", 3)
    ran = run(*words, **env)
    assert ran.returncode == 2
    assert f"network file system ({name})" in ran.stderr
    assert not (tmp_path / "cache").exists()
    ran = run("doctor", "--cache", tmp_path / "cache", **env)
    assert ran.returncode == 6
    assert "put the cache on a local disk" in ran.stdout

    ran = run(*words, **env, CACHETOOL_ALLOW_NETWORK="1")
    assert ran.returncode == 0, ran
    assert f"warning: {tmp_path / 'cache'} lies on a network file system ({name})" in ran.stderr


def test_an_unknown_file_system_is_allowed(tmp_path: Path, objects: Path, shim: Path) -> None:
    words = ("pull", objects, "--cache", tmp_path / "cache", "--max-size", "20MB", "--samples", 3)
    assert run(*words, LD_PRELOAD=str(shim), FAKE_F_TYPE="abcdef").returncode == 0


def test_rows_are_pulled_again_from_their_file_even_if_the_repair_runs_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.full((60, 5), value))
    monkeypatch.chdir(tmp_path / "a")
    with open_cache(tmp_path / "c", max_size="8MB") as cache:
        cache.pull("x.npy", all=True, workers=1, to="hdf5", shard_size=2000)
        shard = cache.shards()[0]
        with open(shard.path / "data.h5", "r+b") as file:
            file.truncate(1000)

    monkeypatch.chdir(tmp_path / "b")
    assert run("verify", "--cache", tmp_path / "c", "--repair").returncode == 0

    with open_cache(tmp_path / "c") as cache:
        assert [source["url"] for source in cache.stats().sources] == [str(tmp_path / "a" / "x.npy")]
        assert cache.stats().samples == 60
        for shard in cache.shards():
            with h5py.File(shard.path / "data.h5") as file:
                assert (file["x"][:] == 1.0).all()
