"""Loaders over a full, unread cache, beside a pull that waits for space: the newest shards may be left for a later
epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, Room, SourceRow, draws, open_cache
from cachetool.core.names import Id
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader
from tests.loaders.numbered import put

SOURCE = Id("5" * 16)

LARGE = Schema((Field("x", "<f8", (12_500,)), Field("number", "<i8")))
COUNT = 20


@pytest.fixture
def full(tmp_path: Path) -> Iterator[CacheDir]:
    with open_cache(tmp_path / "cache", max_size="4MB") as cache:
        for number in range(COUNT):
            put(cache, [number], schema=LARGE)
        (tmp_path / "listing").mkdir()
        cache.add_source(SourceRow(SOURCE, "s3://bucket/", {}, "i", "default", 99, 99, 0, 0, 0), tmp_path / "listing")
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            room = Room(evict=True, renew=0.25)
            job = draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None, room=room)[0]
            connection.execute("UPDATE jobs SET bytes_wanted = ? WHERE id = ?", (cache.max_size, job))
        yield cache


def numbers(batches: Iterable[dict[str, Any]]) -> list[int]:
    return sorted(int(number) for batch in batches for number in batch["number"])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_epoch_leaves_some_samples_for_the_second(workers: int, full: CacheDir) -> None:
    with Loader(full, batch_size=2, fields=["number"], workers=workers) as loader:
        first, second = numbers(loader), numbers(loader)

    assert COUNT / 2 < len(first) < COUNT
    assert first == list(range(len(first)))
    assert second[-1] == COUNT - 1
    assert sorted({*first, *second}) == list(range(COUNT))


def test_min_samples_of_the_whole_cache_gets_all_samples_at_once(full: CacheDir) -> None:
    with Loader(full, batch_size=2, fields=["number"], workers=0, min_samples=COUNT, wait=5) as loader:
        assert numbers(loader) == list(range(COUNT))


def left_in_the_middle(full: CacheDir) -> tuple[list[int], dict[str, Any]]:
    """Return the samples of two batches of an epoch, beside a pull that does not wait for space, and the state after
    them.
    """
    with full.catalog.write() as connection:
        connection.execute("UPDATE jobs SET bytes_wanted = 0")
    with Loader(full, batch_size=2, fields=["number"], workers=0) as loader:
        epoch = iter(loader)
        return numbers([next(epoch), next(epoch)]), loader.state_dict()


@pytest.mark.parametrize("looked", [False, True])
def test_a_resumed_epoch_releases_none_of_its_remaining_samples(looked: bool, full: CacheDir) -> None:
    before, state = left_in_the_middle(full)
    with Loader(full, batch_size=2, fields=["number"], workers=0) as loader:
        loader.load_state_dict(state)
        if looked:
            assert len(loader) == COUNT // 2
        with full.catalog.write() as connection:  # the pull begins to wait for space
            connection.execute("UPDATE jobs SET bytes_wanted = ?", (full.max_size,))
        assert sorted(before + numbers(loader)) == list(range(COUNT))
        assert len(numbers(loader)) < COUNT  # the next epoch frees space again


def test_an_epoch_is_resumed_from_all_shards_of_the_cache(full: CacheDir) -> None:
    before, state = left_in_the_middle(full)
    with full.catalog.write() as connection:  # as after a repair, which does not know which shards were read
        connection.execute("UPDATE cache SET seen = 0")
        connection.execute("UPDATE jobs SET bytes_wanted = ?", (full.max_size,))
    with Loader(full, batch_size=2, fields=["number"], workers=0) as loader:
        loader.load_state_dict(state)
        assert sorted(before + numbers(loader)) == list(range(COUNT))
