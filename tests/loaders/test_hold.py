"""The files that an idle training process holds: none, ``hold`` seconds after its last epoch."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir
from cachetool.core.errors import CapBlocked
from cachetool.loaders.numpy import Loader
from tests.loaders.numbered import leases, put
from tests.loaders.processes import children, until


def numbers(batches: Any) -> list[int]:
    """Return the numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


def mapped(shard: str) -> bool:
    """Return True if this process or a child has files of a shard mapped."""
    return any(shard in Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), *children()))


@pytest.mark.parametrize("fields", [["number"], pytest.param(["x", "words"], marks=pytest.mark.soak)])
@pytest.mark.parametrize("left", ["whole", "broken off"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_an_idle_loader_releases_its_snapshots_and_files(
    workers: int, left: str, fields: list[str], cache: CacheDir
) -> None:
    """A feeder that waits for a free slot must release the files too: otherwise deleted shards would still occupy the
    disk.
    """
    with Loader(cache, batch_size=4, fields=fields, workers=workers, prefetch=1, hold=0.2) as loader:
        for _ in loader:
            if left == "broken off":
                break
        del _
        until(lambda: leases(cache) == [])
        first = cache.shards()[0]
        cache.evict(cache.usage().total - first.bytes)
        until(lambda: not mapped(first.id))
        assert sum(len(batch[fields[0]]) for batch in loader) == 40


def test_an_epoch_whose_iterator_is_kept_keeps_its_snapshot(cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, fields=["number"], workers=2, hold=0.0) as loader:
        kept = iter(loader)
        next(kept)
        other = iter(loader)
        del other  # the previous iterator ended with it
        until(lambda: leases(cache) == [])
        again = iter(loader)
        del kept
        put(cache, range(60, 80))
        assert sorted(numbers(again)) == list(range(60))
        assert loader.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_of_a_left_loop_is_known_after_its_snapshot_was_released(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, fields=["number"], workers=workers, hold=0.2, seed=1) as loader:
        first: list[int] = []
        for batch in loader:
            first += batch["number"].tolist()
            if len(first) == 20:
                break
        until(lambda: leases(cache) == [])
        state = loader.state_dict()
    put(cache, range(60, 80))
    with Loader(cache, batch_size=4, fields=["number"], workers=workers, seed=1) as loader:
        loader.load_state_dict(state)
        assert sorted(first + numbers(loader)) == list(range(60))


def test_garbage_collection_of_an_iterator_does_not_end_a_wait_for_samples(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loader(cache, batch_size=4, fields=["number"], workers=2, min_samples=60) as loader:
        circle: list[Any] = [iter(loader)]
        numbers([next(circle[0])])
        circle.append(circle)
        with pytest.raises(CapBlocked):  # that epoch still reads the shard; it is in no new snapshot
            cache.evict(cache.usage().total - cache.shards()[0].bytes)
        feed = loader._feed
        assert feed is not None
        tell = feed._tell  # type: ignore[attr-defined]

        def collected(what: str, **values: Any) -> None:
            tell(what, **values)
            if circle:
                circle.clear()
                gc.collect()
                put(cache, range(60, 80))

        monkeypatch.setattr(feed, "_tell", collected)
        assert len(numbers(loader)) == 60
