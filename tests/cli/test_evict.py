"""``cachetool evict`` on the command line."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cachetool
from cachetool.core.units import format_size
from tests.cli.folders import tree

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def du(folder: Path, *options: str) -> int:
    """Return the bytes that ``du`` counts for a folder."""
    done = subprocess.run(["du", *options, str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_the_oldest_shards_are_evicted_until_the_folder_is_small_enough(here: Run, filled: Path) -> None:
    before = [shard["id"] for shard in here("ls", "--json").document["shards"]]
    used = here("stats", "--json").document["used"]
    target = used - 20_000

    ran = here("evict", "--max-size", str(target), "--json")

    assert ran.code == 0, ran.stderr
    after = [shard["id"] for shard in here("ls", "--json").document["shards"]]
    assert 0 < len(after) < len(before)
    assert after == before[-len(after) :]
    assert ran.document["removed_shards"] == len(before) - len(after)
    assert du(filled, "-sB1") <= target
    assert du(filled, "-sb") <= target
    assert {path.name for path in (filled / "shards").iterdir()} == set(after)


def test_a_dry_run_shows_the_victims_and_touches_nothing(here: Run, filled: Path) -> None:
    before = tree(filled)
    oldest = here("ls", "--json").document["shards"][0]["id"]
    target = here("stats", "--json").document["used"] - 1000

    ran = here("evict", "--max-size", str(target), "--dry-run")

    assert ran.code == 0, ran.stderr
    assert oldest in ran.stdout
    assert "would evict 1 shard with 10 samples" in ran.stdout
    assert tree(filled) == before


def test_a_cache_that_is_small_enough_is_not_changed(here: Run, filled: Path) -> None:
    ran = here("evict", "--max-size", "1TB", "--json")

    assert ran.code == 0
    assert (ran.document["removed_shards"], ran.document["plan"]) == (0, [])


def test_shards_under_a_reader_stay_and_the_reader_is_named(here: Run, filled: Path) -> None:
    with cachetool.open_cache(filled, create=False) as cache, cache.snapshot() as snapshot:
        target = cache.stats().used - 1000
        ran = here("evict", "--max-size", str(target), "--json")

        assert ran.code == 4
        assert "reads default" in ran.error
        assert ran.document["error"] == "CapBlocked"
        assert all(shard.data.exists() for shard in snapshot.shards)
        states = [shard["state"] for shard in here("ls", "--json").document["shards"]]
        assert states == ["retiring", "ready", "ready"], "the next epoch does without it"
    assert here("evict", "--max-size", str(target)).code == 0
    assert len(list((filled / "shards").iterdir())) == 2


def test_ls_stats_and_evict_agree_about_retiring_shards(here: Run, filled: Path) -> None:
    with cachetool.open_cache(filled, create=False) as cache, cache.snapshot():
        used = cache.stats().used
        assert here("evict", "--max-size", str(used - 1000)).code == 4
        listed = here("ls", "--json").document["shards"]
        stats = here("stats", "--json").document
        again = here("evict", "--max-size", str(used))
        told = here("evict", "--max-size", str(used), "--json").document

        gone = [shard for shard in listed if shard["state"] == "retiring"]
        assert (stats["shards"], stats["retiring"]) == (len(listed), len(gone)) == (3, 1)
        assert stats["retiring_bytes"] == told["retiring_bytes"] == sum(shard["bytes"] for shard in gone) > 0
        assert f"(1 of them, {format_size(stats['retiring_bytes'])}, are deleted when" in here("stats").stdout
        assert sum("retiring" in line.split() for line in here("ls").stdout.splitlines()) == 1
        assert again.code == 0
        assert f"1 shard, {format_size(stats['retiring_bytes'])}, are deleted when their readers end:" in again.stdout
        assert re.search(rf"^  pid {os.getpid()} on .* reads default at version", again.stdout, flags=re.MULTILINE)
        assert told["retiring_shards"] == len(told["blocked"]) == 1
    assert {shard["state"] for shard in here("ls", "--json").document["shards"]} == {"ready"}


def pull_another(here: Run, tmp_path: Path) -> None:
    """Pull a shard of another dataset."""
    np.save(tmp_path / "x.npy", np.zeros((20, 100)))
    assert here("pull", "x.npy", "--all", "--dataset", "mine").code == 0


@pytest.mark.parametrize(
    ("why", "options", "says"),
    [
        ("reader", [], r"2 shards \([0-9.]+ kB\) that stay until their readers end: pid \d+ on .* reads default"),
        ("writer", [], r"1 shard \([0-9.]+ kB\) being written; try again"),
        ("epochs", ["--min-epochs", "2"], r"3 shards \([0-9.]+ kB\) used by fewer than 2 epochs \(--min-epochs\)"),
        ("dataset", ["--dataset", "default"], r"1 shard \([0-9.]+ kB\) of other datasets"),
    ],
)
def test_a_dry_run_and_the_eviction_have_the_same_reasons_and_exit_code(
    here: Run, filled: Path, tmp_path: Path, why: str, options: list[str], says: str
) -> None:
    """Shards that stay are reported with counts and bytes, both those of a reader and those that nothing may evict."""
    if why == "dataset":
        pull_another(here, tmp_path)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(cachetool.open_cache(filled, create=False))
        if why == "writer":
            staging = cache.stage(dataset="default", schema=cache.schema("default"), format="lmdb", bound=50_000)
            stack.enter_context(staging)
        if why == "reader":
            stack.enter_context(cache.snapshot())
            target = cache.usage().total - cache.shards()[0].bytes - 1
        else:
            target = cache.usage().overhead + cache.usage().listings
        line = ("evict", "--max-size", str(target), *options)
        foreseen, before = here(*line, "--dry-run"), tree(filled / "shards")
        document = here(*line, "--dry-run", "--json")
        assert tree(filled / "shards") == before
        done = here(*line)

    assert (foreseen.code, document.code, done.code) == (4, 4, 4)
    assert "would evict" in foreseen.stdout
    assert re.search(says, foreseen.error)
    assert foreseen.error == done.error
    assert done.stdout.startswith("evicted ") == (why in ("writer", "dataset"))
    assert document.document["unreached"].splitlines()[0] in document.error


def test_a_dry_run_that_reaches_its_target_succeeds_as_the_eviction_does(here: Run, filled: Path) -> None:
    target = str(here("stats", "--json").document["used"] - 1000)

    foreseen = here("evict", "--max-size", target, "--dry-run", "--json")
    assert (foreseen.code, foreseen.document["unreached"]) == (0, "")
    assert here("evict", "--max-size", target).code == 0


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("evict --max-size tiny", 2, "'tiny'"),
        ("evict --max-size 1GB --policy worst", 2, "'worst'"),
        ("evict --max-size 1000 --policy worst", 2, "'worst'"),
        ("evict --max-size 1GB --dataset nothing", 2, "'nothing'"),
        ("evict --max-size 1GB --wait soon", 2, "'soon'"),
        ("evict --max-size 1000", 4, "the minimum is --max-size "),
        ("evict --max-size 0 --dry-run", 4, "the minimum is --max-size "),
    ],
)
def test_an_impossible_eviction_leaves_the_cache_unchanged(
    here: Run, filled: Path, line: str, code: int, says: str
) -> None:
    before = tree(filled)
    ran = here(*line.split())

    assert ran.code == code, ran.stderr
    assert says in ran.error
    assert tree(filled) == before
