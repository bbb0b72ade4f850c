"""What an idle training process keeps on the disk: nothing, ``hold`` seconds after its last epoch."""

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
    """The numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


def mapped(shard: str) -> bool:
    """Whether this process or a child of it has files of a shard mapped."""
    return any(shard in Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), *children()))


@pytest.mark.parametrize("fields", [["number"], pytest.param(["x", "words"], marks=pytest.mark.soak)])
@pytest.mark.parametrize("left", ["whole", "broken off"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_an_idle_loader_gives_its_snapshots_and_files_up(
    workers: int, left: str, fields: list[str], cache: CacheDir
) -> None:
    """A feeder that waits for room must let go of the files as well: those of deleted shards would fill the disk."""
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
        del other  # the one before it ended with it
        until(lambda: leases(cache) == [])
        again = iter(loader)
        del kept
        put(cache, range(60, 80))
        assert sorted(numbers(again)) == list(range(60))
        assert loader.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_where_a_loop_was_left_is_known_when_its_snapshot_is_given_up(workers: int, cache: CacheDir) -> None:
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


def test_an_iterator_that_is_collected_while_samples_are_waited_for_does_not_end_the_wait(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loader(cache, batch_size=4, fields=["number"], workers=2, min_samples=60) as loader:
        circle: list[Any] = [iter(loader)]
        numbers([next(circle[0])])
        circle.append(circle)
        with pytest.raises(CapBlocked):  # by that epoch; the shard is in no new one
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
