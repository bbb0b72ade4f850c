"""When a loader looks for a newer snapshot than the one that it has ready."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator

import pytest

from cachetool.cache import CacheDir, Snapshot
from cachetool.cache.history import Delivered
from cachetool.core.errors import CapacityError, CapBlocked, CatalogError
from cachetool.loaders.numpy import Loader
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.snapshots import epochs as module
from cachetool.loaders.snapshots.epochs import EpochSnapshots
from cachetool.loaders.snapshots.follow import CacheSubscription
from cachetool.loaders.snapshots.waiting import NotYet
from tests.loaders.numbered import leases, put

DELIVERED = Delivered(1.0, 6, 0, 0.0)


@pytest.fixture
def snapshots(cache: CacheDir) -> Iterator[EpochSnapshots]:
    """At the end of its first epoch: all its batches are made and the next snapshot is taken."""
    published: list[EpochPlan] = []
    opened = EpochSnapshots(Settings(str(cache.root), batch_size=10), published.append)
    opened.exhausted(opened.begin(0).generation)
    yield opened
    opened.close()


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ONWARD", 1e9)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ONWARD", -1.0)
    monkeypatch.setattr(module, "_LONGEST", -1.0)
    monkeypatch.setattr(module, "_FRESH", -1.0)


def test_a_snapshot_that_was_just_the_newest_is_used_while_others_hold_the_catalog(
    long: None, cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    snapshots.exhausted(snapshots.begin(1, surely=True).generation)
    with sqlite3.connect(cache.layout.catalog, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        snapshots.delivered(2, DELIVERED)
        plan = snapshots.begin(2, surely=False)
        other.execute("ROLLBACK")

    assert (plan.epoch, plan.samples) == (2, 60)


def test_what_came_since_is_in_the_next_epoch_when_the_process_committed_it_itself(
    long: None, cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    put(cache, range(60, 80))
    assert snapshots.begin(1, surely=True).samples == 80


def test_what_came_since_is_in_an_epoch_that_begins_late(
    short: None, cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    snapshots.delivered(1, DELIVERED)
    put(cache, range(60, 80))

    assert snapshots.begin(1, surely=False).samples == 80


@pytest.mark.parametrize(("fresh", "samples"), [(10.0, 60), (-1.0, 80)])
def test_an_epoch_that_begins_at_once_has_what_was_there_when_its_batches_were_made_unless_that_was_long_ago(
    fresh: float, samples: int, long: None, cache: CacheDir, snapshots: EpochSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRESH", fresh)
    put(cache, range(60, 80))
    snapshots.delivered(1, DELIVERED)

    assert snapshots.begin(1, surely=False).samples == samples
    snapshots.exhausted(snapshots._generation)
    snapshots.delivered(snapshots._generation, DELIVERED)
    assert snapshots.begin(2, surely=False).samples == 80


def test_a_renewed_snapshot_has_one_lease_and_the_one_before_it_none(
    short: None, cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    before = leases(cache)
    put(cache, range(60, 80))
    snapshots.delivered(1, DELIVERED)

    assert len(before) == len(leases(cache)) == 2
    snapshots.finish_epochs()
    assert leases(cache) == [cache.version]


def test_a_snapshot_that_became_too_small_is_waited_for(
    short: None, cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    with pytest.raises(CapBlocked):  # by the snapshots; their shards are in no new one
        cache.evict(max_size=1_150_000)
    with pytest.raises(NotYet):
        snapshots.begin(1, surely=False)
    put(cache, range(60, 80))
    assert snapshots.begin(1, surely=False).samples == 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_begins_late_finds_the_snapshot_of_one_that_is_through_with_it(
    short: None, rank: int, cache: CacheDir
) -> None:
    ranks = [
        EpochSnapshots(Settings(str(cache.root), batch_size=5, run="run", rank=r, world_size=2), print) for r in (0, 1)
    ]
    for each in ranks:
        each.exhausted(each.begin(0).generation)
        each.delivered(1, DELIVERED)
    early, late = ranks[rank], ranks[1 - rank]
    plan = early.begin(1, surely=False)
    early.finish_epochs()
    early.exhausted(plan.generation)
    early.delivered(plan.generation, DELIVERED)
    assert not early.has_unfinished
    put(cache, range(60, 80))

    assert late.begin(1, surely=False).view == plan.view
    late.finish_epochs()
    late.delivered(late.begin(1).generation, DELIVERED)
    early.begin(2)
    early.finish_epochs()
    assert late.begin(2).samples == early._current.plan.samples  # type: ignore[union-attr]
    for each in ranks:
        each.close()
    assert not leases(cache)


def test_snapshots_of_several_ranks_that_nothing_follows_end_after_a_while(cache: CacheDir) -> None:
    snapshots = EpochSnapshots(
        Settings(str(cache.root), batch_size=5, run="run", world_size=2, epochs=1, hold=0.0), print
    )
    snapshots.delivered(snapshots.begin(0).generation, DELIVERED)
    assert len(leases(cache)) == 1

    assert snapshots.tick() is None
    assert not leases(cache)
    assert snapshots.tick() is None
    snapshots.close()


def test_batches_made_ahead_stay_while_another_process_of_the_run_has_their_snapshot(
    short: None, cache: CacheDir
) -> None:
    published: list[EpochPlan] = []
    snapshots = EpochSnapshots(Settings(str(cache.root), batch_size=10, run="run"), published.append)
    snapshots.exhausted(snapshots.begin(0).generation)
    other = CacheSubscription(cache, run="run")
    other.newest(epoch=1)
    put(cache, range(60, 80))
    snapshots.delivered(1, DELIVERED)

    assert snapshots.begin(1) == published[-1]
    assert len(published) == 2
    other.close()
    snapshots.close()


def test_an_epoch_that_a_full_disk_cannot_count_ends_all_the_same(
    cache: CacheDir, snapshots: EpochSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CapacityError("no room on the disk")

    snapshots.delivered(1, DELIVERED)
    monkeypatch.setattr(Snapshot, "served", full)
    snapshots.finish_epochs()

    assert not snapshots.has_unfinished
    assert leases(cache) == [cache.version]


NOT_COUNTED = "cachetool: an epoch was not counted: catalog"
KEPT = "cachetool: a snapshot is kept until this process ends: catalog"


def beginnings(said: str) -> list[str]:
    """Of each line, up to what is wrong with the catalog."""
    return [line.partition(" /")[0] for line in said.splitlines()]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_catalog_that_is_lost_in_an_epoch_ends_the_next_one(
    workers: int, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    with Loader(cache, batch_size=10, workers=workers, fields=["number"], epochs=1) as loader:  # none is made ahead
        batches = iter(loader)
        numbers = list(next(batches)["number"])
        cache.layout.catalog.write_bytes(b"no catalog")
        numbers += [number for batch in batches for number in batch["number"]]
        assert sorted(numbers) == list(range(60))
        with pytest.raises(CatalogError, match="file is not a database; run: cachetool verify --repair"):
            iter(loader)

    assert beginnings(capfd.readouterr().err) == [NOT_COUNTED]


def test_a_catalog_that_is_lost_once_the_next_epoch_is_made_ends_that_one(
    cache: CacheDir, snapshots: EpochSnapshots, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.layout.catalog.write_bytes(b"no catalog")
    snapshots.delivered(1, DELIVERED)
    snapshots.finish_epochs()
    with pytest.raises(CatalogError, match="file is not a database"):
        snapshots.begin(1, surely=True)
    snapshots.close()

    assert beginnings(capsys.readouterr().err) == [NOT_COUNTED, KEPT]


class Full:
    """A stream to a full disk."""

    def __init__(self) -> None:
        self.wanted = ""

    def write(self, text: str) -> int:
        self.wanted += text
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stream", [Full(), None])
def test_what_is_told_may_be_lost(
    stream: Full | None,
    cache: CacheDir,
    snapshots: EpochSnapshots,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache.layout.catalog.write_bytes(b"no catalog")
    snapshots.delivered(1, DELIVERED)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        snapshots.finish_epochs()

    assert not snapshots.has_unfinished
    assert stream is None or stream.wanted.startswith("cachetool: an epoch was not counted: ")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_this_process_commits_is_in_the_epoch_that_begins_at_once(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=10, workers=workers, fields=["number"]) as loader:
        for epoch in range(5):
            numbers = sorted(int(number) for batch in loader for number in batch["number"])
            assert numbers == list(range(60 + 20 * epoch))
            put(cache, range(60 + 20 * epoch, 80 + 20 * epoch))
