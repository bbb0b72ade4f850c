"""``cachetool evict`` as typed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cachetool
from tests.cli.folders import tree

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def du(folder: Path, *options: str) -> int:
    """What ``du`` says a folder takes."""
    done = subprocess.run(["du", *options, str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_the_oldest_shards_go_until_the_folder_is_small_enough(here: Run, filled: Path) -> None:
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


def test_a_cache_that_is_small_enough_stays_as_it_is(here: Run, filled: Path) -> None:
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
        assert len(here("ls", "--json").document["shards"]) == 2  # the next epoch does without it
    assert here("evict", "--max-size", str(target)).code == 0
    assert len(list((filled / "shards").iterdir())) == 2


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("evict --max-size tiny", 2, "'tiny'"),
        ("evict --max-size 1GB --policy worst", 2, "'worst'"),
        ("evict --max-size 1GB --dataset nothing", 2, "'nothing'"),
        ("evict --max-size 1GB --wait soon", 2, "'soon'"),
        ("evict --max-size 1000", 4, "without any shard it takes"),
        ("evict --max-size 0 --dry-run", 4, "without any shard it takes"),
    ],
)
def test_what_cannot_be_evicted_leaves_the_cache_as_it_was(
    here: Run, filled: Path, line: str, code: int, says: str
) -> None:
    before = tree(filled)
    ran = here(*line.split())

    assert ran.code == code, ran.stderr
    assert says in ran.error
    assert tree(filled) == before
