"""``shard.json`` and the records beside listings, with values that an attacker could have written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache.rebuild import without_doubles
from cachetool.cache.records import seal, unseal
from cachetool.check.verify import verify


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of two shards."""
    folder = tmp_path_factory.mktemp("pulled")
    (folder / "source").mkdir()
    for number in range(24):
        np.save(folder / "source" / f"{number}.npy", np.full(1000, number, "f8"))
    with cachetool.open_cache(folder / "cache", max_size="8MB") as made:
        made.pull(folder / "source", all=True, shard_size="100kB", workers=1)
    return folder / "cache"


@pytest.fixture
def cache(pulled: Path, tmp_path: Path) -> Path:
    """Return a copy of that cache without its catalog."""
    shutil.copytree(pulled, tmp_path / "cache")
    (tmp_path / "cache" / "catalog.sqlite3").unlink()
    return tmp_path / "cache"


_ODD: list[tuple[str, Any]] = [
    *(("draws", value) for value in ([[1]], [["a", "b"]], [[0, None]], [[5, 3]], [[-1, 3]], [[0, 2**63]], [1])),
    *(("ancestors", value) for value in (5, [[]], ["x"], [None])),
    *(("together", value) for value in (5, [{}], ["../x"])),
    *((name, value) for name in ("since", "seq", "samples", "epochs", "payload") for value in (2**63, -5, 10**400)),
    *((name, value) for name in ("seq", "created", "used", "declared") for value in (float("nan"), float("inf"))),
    *((name, "\ud800") for name in ("dataset", "content", "digest", "lineage", "format")),
    *((name, "x" * 2_000_000) for name in ("dataset", "digest")),
    *(("progress.pending", value) for value in ([[1]], None, [[3, 2]], [["a", 1]])),
    *(("progress.reopened", value) for value in (5, [[1]], [[1, 2]], [[None, 1, 2]])),
    *((f"progress.{name}", value) for name in ("units", "cut", "seed") for value in (2**63, 10**400)),
    *(("progress.segments", value) for value in ("[" * 100_000, "{}", '[["a"]]', "[1] x", "[-1]", "null")),
    *(("progress.past", value) for value in ("[5]", "x")),
    ("progress.cut", -5),
    *(("progress.parts", value) for value in ("5", "[[0, 1]]", "[[0, -1, 3]]", '[[0, "a", 3]]', [[0, 0, 9]])),
    ("progress.url", "\udfff"),
    ("progress.created", float("nan")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), _ODD, ids=lambda value: repr(value)[:30])
def test_a_rebuild_leaves_out_a_shard_whose_record_has_invalid_values(cache: Path, name: str, value: Any) -> None:
    path = sorted((cache / "shards").glob("*/shard.json"))[0]
    record = unseal(path)
    of = record["progress"] if name.startswith("progress.") else record
    of[name.removeprefix("progress.")] = value
    path.write_bytes(seal(record))

    repaired = verify(cache, repair=True)
    assert repaired.problems
    again = verify(cache)
    assert again.problems == []
    assert again.shards == 1
    with cachetool.open_cache(cache) as used:
        assert sum(shard.samples for shard in used.shards()) == 12


def test_a_rebuild_leaves_out_a_shard_with_more_ranges_of_draws_than_samples(cache: Path) -> None:
    path = sorted((cache / "shards").glob("*/shard.json"))[0]
    record = unseal(path)
    record["draws"] = [[2 * number, 2 * number + 1] for number in range(60_000)]
    path.write_bytes(seal(record))
    assert verify(cache, repair=True).shards == 1
    assert verify(cache).problems == []


def test_a_rebuild_keeps_the_newest_of_shards_with_the_same_draws_in_any_number_of_ranges() -> None:
    """Each shard has 30,000 ranges. Comparing every pair of ranges would take hours."""

    def shard(number: int, since: int, first: int) -> dict[str, Any]:
        draws = [[4 * k + first, 4 * k + first + 1] for k in range(30_000)]
        id = f"{number:016x}"
        return {
            "id": id, "lineage": id, "since": since, "seq": since, "created": 1.0, "source": "s", "part": 0,
            "pass_number": 0, "draws": draws,
        }  # fmt: skip

    old, beside, new = shard(1, 5, 0), shard(2, 6, 2), shard(3, 7, 0)
    kept, superseded = without_doubles([old, beside, new])
    assert [record["since"] for record in kept] == [6, 7]
    assert superseded == [old["id"]]
