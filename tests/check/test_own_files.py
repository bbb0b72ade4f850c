"""A cache whose own files were deleted, damaged or renamed: it refuses to guess, names the remedy, and can be
repaired.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.api import open_cache
from cachetool.cache.marker import settings
from cachetool.cache.rebuild import Found, without_doubles
from cachetool.check.doctor import examine
from cachetool.check.verify import verify
from cachetool.core.errors import CatalogError, UsageError
from tests.check.test_verify import damage, keys, run


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 samples."""
    folder = tmp_path_factory.mktemp("objects")
    for number in range(60):
        np.save(folder / f"{number:03d}.npy", np.random.default_rng(number).random(500))
    return folder


@pytest.fixture(scope="module")
def pulled(objects: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of 20 of these samples. Tests must not change it."""
    root = tmp_path_factory.mktemp("pulled") / "cache"
    with open_cache(root, max_size="20MB") as cache:
        cache.pull(str(objects), samples=20, to="hdf5", shard_size=41_000, workers=1)
    return root


@pytest.fixture
def root(pulled: Path, tmp_path: Path) -> Path:
    """Return a copy of that cache."""
    shutil.copytree(pulled, tmp_path / "cache")
    return tmp_path / "cache"


LOST = {
    "deleted": lambda root: (root / "cachetool.json").unlink(),
    "emptied": lambda root: (root / "cachetool.json").write_bytes(b""),
    "garbled": lambda root: (root / "cachetool.json").write_bytes(bytes(range(200))),
    "without its tag": lambda root: [(root / name).unlink() for name in ("cachetool.json", "CACHEDIR.TAG")],
    "with other things": lambda root: ((root / "cachetool.json").unlink(), (root / "notes.txt").touch()),
}


@pytest.mark.parametrize("how", LOST)
def test_a_cache_without_its_marker_is_refused_with_a_remedy_and_repaired_with_its_cap(
    root: Path, objects: Path, how: str
) -> None:
    before = keys(root)
    LOST[how](root)
    lines = [
        ("pull", objects, "--samples", 2),
        ("stats",),
        ("ls",),
        ("evict", "--max-size", "1MB"),
        ("convert", "--to", "lmdb"),
    ]
    for line in lines if how == "deleted" else lines[:1]:
        ran = run(*line, "--cache", root)
        assert ran.returncode == 6, ran
        assert f"cachetool verify --repair --cache {root}" in ran.stderr
    with pytest.raises(CatalogError, match="verify --repair"):
        open_cache(root, max_size="1GB")
    found = {finding.what: finding for finding in examine(root)}
    assert found["cachetool.json"].state == "bad"
    assert "verify --repair" in found["cachetool.json"].text
    assert found["catalog"].state == "ok"
    found_wrong = verify(root)
    assert (found_wrong.sound, found_wrong.shards) == (False, 2)
    assert "cachetool.json" in {problem.file for problem in found_wrong.problems}

    ran = run("verify", "--repair", "--cache", root)
    assert ran.returncode == 0, ran
    assert "with the cap of the catalog, 20.0 MB" in ran.stdout
    assert keys(root) == before
    with open_cache(root) as cache:
        assert cache.max_size == 20_000_000
        assert settings(cache.layout) == {"max_size": 20_000_000, "min_free": 0}
    assert verify(root, repair=True).problems == []


def test_without_marker_and_catalog_a_repair_needs_only_the_cap(root: Path, objects: Path) -> None:
    before = keys(root)
    (root / "cachetool.json").unlink()
    (root / "catalog.sqlite3").unlink()
    for line in (("pull", objects, "--samples", 2), ("verify", "--repair")):
        ran = run(*line, "--cache", root)
        assert ran.returncode == 6, ran
        assert "cachetool verify --repair" in ran.stderr
    assert f"cachetool verify --repair --max-size SIZE --cache {root}" in ran.stderr
    assert len(list((root / "shards").iterdir())) == 2

    small = run("verify", "--repair", "--max-size", "1kB", "--cache", root)
    assert (small.returncode, "choose a larger one" in small.stderr) == (4, True), small.stderr

    ran = run("verify", "--repair", "--max-size", "20MB", "--cache", root)
    assert ran.returncode == 0, ran
    assert keys(root) == before
    with open_cache(root) as cache:
        assert cache.max_size == 20_000_000
        assert {shard.format for shard in cache.shards("default")} == {"hdf5"}
        assert cache.pull(str(objects), samples=2, workers=1).format == "hdf5"
    assert verify(root, repair=True).problems == []


def test_the_cap_in_the_catalog_wins_over_the_one_in_the_marker(root: Path) -> None:
    (root / "cachetool.json").write_text(json.dumps({"layout": 1, "max_size": 123, "min_free": 0}))
    found = verify(root)
    assert [(p.file, p.action) for p in found.problems] == [("cachetool.json", None)]
    assert "max_size is 123, but 20000000 in the catalog" in found.problems[0].what
    assert {finding.what: finding.state for finding in examine(root)}["cachetool.json"] == "bad"
    assert verify(root, repair=True).sound
    with open_cache(root) as cache:
        assert cache.max_size == settings(cache.layout)["max_size"] == 20_000_000


def test_a_repair_does_not_change_a_known_cap(root: Path) -> None:
    found = verify(root, repair=True, max_size="1GB")
    assert found.notes == ["--max-size was ignored: the cache still has its cap of 20.0 MB"]
    with open_cache(root) as cache:
        assert cache.max_size == 20_000_000
    with pytest.raises(UsageError, match="--repair"):
        verify(root, max_size="1GB")


@pytest.mark.parametrize("name", ["cachetool.json", "catalog.sqlite3", "shards"])
def test_a_foreign_folder_is_never_taken_for_a_cache(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "shards").mkdir()
    (folder / "shards" / "model-00001").mkdir()
    (folder / name).mkdir() if name == "shards" and not (folder / name).exists() else (folder / "notes").touch()
    if name != "shards":
        (folder / name).write_text("mine")
    for use in (lambda: open_cache(folder), lambda: verify(folder, repair=True)):
        with pytest.raises(UsageError, match="is not a cache"):
            use()


def test_an_interrupted_creation_of_a_cache_continues_with_its_cap(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="7MB") as cache:
        _ = cache.catalog
    (tmp_path / "cache" / "cachetool.json").unlink()
    with open_cache(tmp_path / "cache") as cache:
        _ = cache.catalog
        assert cache.max_size == 7_000_000


def test_missing_shards_are_counted_as_missing_and_pulled_again(root: Path, objects: Path) -> None:
    before = keys(root)
    shutil.rmtree(root / "shards")
    for line in (("pull", objects, "--samples", 2), ("stats",)):
        ran = run(*line, "--cache", root)
        assert ran.returncode == 6, ran
        assert f"cachetool verify --repair --cache {root}" in ran.stderr
    found = {finding.what: finding for finding in examine(root)}
    assert found["folder"].state == "bad"
    assert run("verify", "--cache", root).returncode == 5
    ran = run("verify", "--repair", "--cache", root)
    assert ran.returncode == 0, ran
    assert "read 0 of 2 shards, 2 missing, 0 samples" in ran.stdout
    assert keys(root) == before
    assert verify(root, repair=True).problems == []


def test_deleted_shards_are_not_counted_as_read(root: Path) -> None:
    shutil.rmtree(next((root / "shards").iterdir()))
    found = verify(root)

    assert (found.shards, found.checked, found.gone, found.samples) == (2, 1, 1, 10)
    assert "read 1 of 2 shards, 1 missing, 10 samples" in run("verify", "--cache", root).stdout


@pytest.mark.parametrize("name", ["my-backup", "0123456789abcdef"])
@pytest.mark.parametrize("catalog", ["whole", "lost"])
def test_a_repair_restores_the_name_of_a_renamed_shard(root: Path, name: str, catalog: str) -> None:
    before = keys(root)
    shard = sorted((root / "shards").iterdir())[0]
    shard.rename(root / "shards" / name)
    if catalog == "lost":
        (root / "catalog.sqlite3").unlink()
    assert (shard.name, f"shards/{name}") in {(p.shard, p.file) for p in verify(root).problems}
    found = verify(root, repair=True)

    assert found.sound
    assert (shard.name, "renamed back") in {(p.shard, p.action) for p in found.problems}
    assert found.reopened == {}
    assert shard.is_dir()
    assert not (root / "shards" / name).exists()
    assert keys(root) == before
    assert verify(root, repair=True).problems == []


def test_a_renamed_shard_that_is_incomplete_is_not_adopted(root: Path) -> None:
    before = keys(root)
    name = damage(root)
    (root / "shards" / name).rename(root / "shards" / "my-backup")
    assert run("verify", "--repair", "--cache", root).returncode == 0

    assert not (root / "shards" / name).exists()
    assert (root / "shards" / "my-backup").is_dir(), "what has no name of ours is left alone"
    assert keys(root) == before


def test_a_rebuild_deletes_shards_that_cannot_be_adopted_and_their_draws_are_fetched_again(
    root: Path, objects: Path
) -> None:
    one, two = sorted((root / "shards").iterdir())
    with open_cache(root) as cache:
        used = cache.usage().total
        (draws,) = cache.catalog.rows("SELECT draws FROM shards WHERE id = ?", (two.name,))
    (one / "shard.json").write_text("{")
    data = bytearray((two / "data.h5").read_bytes())
    data[-100] ^= 1
    (two / "data.h5").write_bytes(data)
    (root / "catalog.sqlite3").unlink()
    ran = run("verify", "--repair", "--no-repull", "--cache", root)
    assert ran.returncode == 5
    assert "10 draws to be fetched again" in ran.stdout
    assert not one.exists()
    assert not two.exists()
    assert "10 damaged draws of" in run("stats", "--cache", root).stdout
    with open_cache(root) as cache:
        assert cache.usage().total < used - 40_000
        cache.pull(str(objects), samples=10)
        assert [row["draws"] for row in cache.catalog.rows("SELECT draws FROM shards")] == [draws["draws"]]
    assert run("verify", "--cache", root).returncode == 0


def test_missing_samples_are_still_counted_as_missing_after_the_catalog_is_rebuilt(root: Path) -> None:
    import sqlite3

    damage(root)
    assert verify(root, repair=True).missing[0].draws == 10
    with sqlite3.connect(root / "catalog.sqlite3") as raw:
        raw.execute("UPDATE cache SET version = 1")
    raw.close()
    found = verify(root, repair=True)
    assert found.problems[0].file == "catalog.sqlite3"
    assert [row.draws for row in found.missing] == [10]


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_a_link_or_file_in_place_of_a_shard_is_removed_and_its_target_is_not_touched(
    root: Path, objects: Path, tmp_path: Path, what: str
) -> None:
    before = keys(root)
    shard, away = next((root / "shards").iterdir()), tmp_path / "away"
    shutil.move(shard, away)
    if what == "a file":
        shard.write_text("not a shard")
    else:
        shard.symlink_to(away)
        (away / "data.h5").write_bytes(b"garbled")
    kept = {path: path.read_bytes() for path in away.iterdir()}

    mended = run("verify", "--repair", "--cache", str(root))

    assert (mended.returncode, "bug" in mended.stderr) == (0, False), mended.stderr
    assert not os.path.lexists(shard)
    assert {path: path.read_bytes() for path in away.iterdir()} == kept
    assert keys(root) == before


@pytest.mark.parametrize("name", ["shards", "holders", "listings"])
def test_a_file_in_place_of_a_cache_folder_is_named_in_an_error(root: Path, objects: Path, name: str) -> None:
    shutil.rmtree(root / name)
    (root / name).touch()
    for line in (("doctor",), ("pull", str(objects), "--samples", "1"), ("verify", "--repair")):
        ran = run(*line, "--cache", str(root), "--quiet")
        assert ran.returncode != 1, (line, ran.stderr)
        assert "bug" not in ran.stderr, (line, ran.stderr)
    assert (ran.returncode, f"its {name} is not a folder; remove it" in ran.stderr) == (2, True)


@pytest.mark.parametrize("last", [0, 1])
def test_of_two_shards_with_one_version_the_kept_one_decides_which_draws_are_done(last: int) -> None:
    """Two copies of a catalog committed them. The draws of the other shard must not count as done, because it is
    deleted.
    """
    shards: list[dict[str, Any]] = [
        {
            "since": 7,
            "created": 100.0 + (number == last),
            "progress": {"id": "a", "skipped": number},
            "id": f"{number:016}",
        }
        | {"source": "a", "part": 0, "pass_number": 0, "draws": [[5, 8 + number]], "lineage": str(number), "seq": 1}
        for number in (0, 1)
    ]
    found = Found(shards=shards)
    for value in shards:
        found.learn(value)

    (kept,), superseded = without_doubles(found.shards)

    assert (kept["id"], superseded) == (f"{last:016}", [f"{1 - last:016}"])
    assert found.progress["a"][1] is kept["progress"]


def test_a_copy_of_a_shard_without_a_catalog_row_is_deleted(root: Path) -> None:
    shard = next((root / "shards").iterdir())
    shutil.copytree(shard, root / "shards" / "0123456789abcdef")

    (problem,) = verify(root, repair=True).problems

    assert (problem.file, problem.action) == ("shards/0123456789abcdef", "deleted")
    assert not (root / "shards" / "0123456789abcdef").exists()
    assert verify(root).sound
