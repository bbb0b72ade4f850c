"""The choice of the next epoch's snapshot: when it is taken, discarded and released."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, Snapshot, open_cache
from cachetool.cache.history import Delivered
from cachetool.core.errors import CapacityError, CapBlocked, CatalogError
from cachetool.loaders.numpy import Loader
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.snapshots import epochs as module
from cachetool.loaders.snapshots.epochs import EpochSnapshots
from cachetool.loaders.snapshots.waiting import NotYet
from tests.loaders.numbered import KEYED, leases, put

DELIVERED = Delivered(1.0, 6, 0, 0.0)


@pytest.fixture
def published() -> list[EpochPlan]:
    """Return the list of plans that were sent to feeders."""
    return []


@pytest.fixture
def snapshots(cache: CacheDir, published: list[EpochPlan]) -> Iterator[EpochSnapshots]:
    """Return the snapshots of a loader that begins its first epoch."""
    opened = EpochSnapshots(Settings(str(cache.root), batch_size=10), published.append)
    opened.begin(0)
    yield opened
    opened.close()


def follow(snapshots: EpochSnapshots) -> None:
    """Report that all batches of the present epoch were built and half of them delivered."""
    snapshots.made(snapshots._generation)
    snapshots.half_delivered(snapshots._generation)


def leased(snapshots: EpochSnapshots) -> str:
    """Return the state in the terms of the module's table."""
    parts = {"reading": snapshots._reading, "ahead": snapshots._ahead}
    return ", ".join(name for name, part in parts.items() if part is not None) or "nothing"


def in_state(cache: CacheDir, state: str) -> tuple[EpochSnapshots, int]:
    """Return snapshots in a state of the table, and the generation of the epoch that they read or read last."""
    snapshots = EpochSnapshots(Settings(str(cache.root), batch_size=10, hold=0.0), print)
    generation = snapshots.begin(0).generation
    if state in ("reading, ahead", "ahead"):
        follow(snapshots)
    if state in ("nothing", "ahead"):
        snapshots.delivered(generation, DELIVERED)
        snapshots.finish_epochs()
    if state.startswith("reading"):
        snapshots.left(generation)  # no iterator exists, so hold= releases it
    assert leased(snapshots) == state
    return snapshots, generation


def table() -> list[tuple[str, str, str]]:
    """Return state, event and next state from the table in the module's docstring."""
    lines = [line for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
    events = ("made", "delivered", "refresh", "prepare", "begin", "held")
    starts = [lines[0].index(event) for event in events]
    cuts = [0, *starts, len(lines[0]) + 20]
    rows = [[line[a:b].strip() for a, b in pairwise(cuts)] for line in lines[2:]]
    return [
        (state, event, state if cell == "-" else cell)
        for state, *cells in rows
        for event, cell in zip(events, cells, strict=True)
    ]


@pytest.mark.parametrize(("state", "event", "then"), table())
def test_each_event_leads_to_the_documented_state(state: str, event: str, then: str, cache: CacheDir) -> None:
    snapshots, generation = in_state(cache, state)
    do: dict[str, Callable[[], object]] = {
        "made": lambda: (snapshots.made(generation), snapshots.half_delivered(generation)),
        "delivered": lambda: snapshots.delivered(generation, DELIVERED),
        "refresh": snapshots.refresh,
        "prepare": lambda: snapshots.prepare(1),
        "begin": lambda: snapshots.begin(1),
        "held": snapshots.tick,
    }
    do[event]()

    assert leased(snapshots) == then
    snapshots.finish_epochs()
    assert len(leases(cache)) == (0 if then == "nothing" else then.count(",") + 1)
    snapshots.close()
    assert leases(cache) == []


@pytest.mark.parametrize("first", ["made", "half_delivered"])
def test_the_next_snapshot_is_taken_after_all_batches_are_built_and_half_are_delivered_in_any_order(
    first: str, cache: CacheDir, snapshots: EpochSnapshots, published: list[EpochPlan]
) -> None:
    second = {"made": "half_delivered", "half_delivered": "made"}[first]
    getattr(snapshots, first)(1)
    getattr(snapshots, first)(1)
    assert len(published) == 1
    put(cache, range(60, 80))
    getattr(snapshots, second)(1)
    put(cache, range(80, 100))
    getattr(snapshots, second)(1)

    assert [(plan.epoch, plan.samples) for plan in published] == [(0, 60), (1, 80)]


def test_the_next_epoch_uses_its_prepared_snapshot_while_the_catalog_is_locked(
    cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    follow(snapshots)
    put(cache, range(60, 80))
    with sqlite3.connect(cache.layout.catalog, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        snapshots.delivered(1, DELIVERED)
        length = snapshots.prepare(1).samples
        plan = snapshots.begin(1)
        other.execute("ROLLBACK")

    assert (plan.epoch, plan.samples, length) == (1, 60, 60)


def test_a_failed_preparation_of_a_snapshot_ends_neither_the_present_nor_the_next_epoch(
    cache: CacheDir, snapshots: EpochSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(EpochSnapshots, "_take", fail)
        follow(snapshots)
        snapshots.delivered(1, DELIVERED)
    assert snapshots.begin(1).samples == 60


@pytest.mark.parametrize("ended", [False, True])
def test_after_a_refresh_the_next_epoch_reads_samples_that_arrived_since(
    ended: bool, cache: CacheDir, snapshots: EpochSnapshots
) -> None:
    follow(snapshots)
    put(cache, range(60, 80))
    if ended:
        snapshots.delivered(1, DELIVERED)
    snapshots.refresh()
    put(cache, range(80, 100))
    if not ended:
        follow(snapshots)  # it is taken only once
        snapshots.delivered(1, DELIVERED)

    assert snapshots.prepare(1).samples == 100
    assert snapshots.begin(1).samples == 100


def test_an_announced_length_is_that_of_the_next_epoch(cache: CacheDir) -> None:
    snapshots = EpochSnapshots(Settings(str(cache.root), batch_size=10), print)
    assert snapshots.prepare(0).samples == 60
    put(cache, range(60, 80))
    assert snapshots.prepare(0).samples == snapshots.begin(0).samples == 60
    snapshots.close()


def test_a_loader_waits_if_its_snapshot_became_too_small(cache: CacheDir, snapshots: EpochSnapshots) -> None:
    follow(snapshots)
    with pytest.raises(CapBlocked):  # the snapshots still keep the shards, which are in no new snapshot
        cache.evict(max_size=1_150_000)
    snapshots.refresh()
    with pytest.raises(NotYet):
        snapshots.begin(1)
    put(cache, range(60, 80))
    assert snapshots.begin(1).samples == 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_late_rank_gets_the_snapshot_that_another_rank_has_finished(rank: int, cache: CacheDir) -> None:
    ranks = [
        EpochSnapshots(Settings(str(cache.root), batch_size=5, run="run", rank=r, world_size=2), print) for r in (0, 1)
    ]
    for each in ranks:
        each.delivered(each.begin(0).generation, DELIVERED)
    early, late = ranks[rank], ranks[1 - rank]
    plan = early.begin(1)
    early.finish_epochs()
    early.delivered(plan.generation, DELIVERED)
    assert not early.has_unfinished
    put(cache, range(60, 80))

    assert late.begin(1).view == plan.view
    late.finish_epochs()
    late.delivered(late._generation, DELIVERED)
    early.begin(2)
    early.finish_epochs()
    assert late.begin(2).samples == early._begun.plan.samples == 80  # type: ignore[union-attr]
    for each in ranks:
        each.close()
    assert not leases(cache)


@pytest.mark.parametrize("begins", ["all refresh first", "one begins before the other refreshes"])
def test_ranks_read_one_snapshot_after_a_refresh(begins: str, cache: CacheDir) -> None:
    ranks = [
        EpochSnapshots(Settings(str(cache.root), batch_size=5, run="run", rank=r, world_size=2), print) for r in (0, 1)
    ]
    for each in ranks:
        each.begin(0)
        follow(each)
        each.delivered(1, DELIVERED)
    put(cache, range(60, 80))
    ranks[0].refresh()
    if begins == "all refresh first":
        ranks[1].refresh()
    plans = [ranks[0].begin(1)]
    ranks[1].refresh()
    plans.append(ranks[1].begin(1))

    assert plans[0].view == plans[1].view
    assert plans[0].samples == (80 if begins == "all refresh first" else 60)
    for each in ranks:
        each.close()


def test_snapshots_of_several_ranks_without_a_next_epoch_are_released_after_a_while(cache: CacheDir) -> None:
    snapshots = EpochSnapshots(
        Settings(str(cache.root), batch_size=5, run="run", world_size=2, epochs=1, hold=0.0), print
    )
    generation = snapshots.begin(0).generation
    follow(snapshots)
    snapshots.delivered(generation, DELIVERED)
    assert len(leases(cache)) == 1

    assert snapshots.tick() is None
    assert not leases(cache)
    assert snapshots.tick() is None
    snapshots.close()


def test_an_epoch_ends_although_a_full_disk_prevents_counting_it(
    cache: CacheDir, snapshots: EpochSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CapacityError("no room on the disk")

    snapshots.delivered(1, DELIVERED)
    monkeypatch.setattr(Snapshot, "served", full)
    snapshots.finish_epochs()

    assert not snapshots.has_unfinished
    assert leases(cache) == []


NOT_COUNTED = "cachetool: a finished epoch could not be counted in the cache: catalog"
KEPT = "cachetool: a snapshot could not be released and stays leased until this process ends: catalog"


def beginnings(said: str) -> list[str]:
    """Return the beginning of each line, up to the description of the catalog's damage."""
    return [line.partition(" /")[0] for line in said.splitlines()]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_catalog_lost_during_an_epoch_is_an_error_of_the_next_epoch(
    workers: int, cache: CacheDir, capfd: pytest.CaptureFixture[str]
) -> None:
    # no batch is built ahead
    with Loader(cache, batch_size=10, workers=workers, fields=["number"], epochs=1) as loader:
        batches = iter(loader)
        numbers = list(next(batches)["number"])
        cache.layout.catalog.write_bytes(b"no catalog")
        numbers += [number for batch in batches for number in batch["number"]]
        assert sorted(numbers) == list(range(60))
        with pytest.raises(CatalogError, match="file is not a database; run: cachetool verify --repair"):
            iter(loader)

    assert beginnings(capfd.readouterr().err) == [NOT_COUNTED]


def test_a_catalog_lost_after_the_next_epoch_was_built_is_an_error_of_that_epoch(
    cache: CacheDir, snapshots: EpochSnapshots, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(snapshots)
    cache.layout.catalog.write_bytes(b"no catalog")
    snapshots.delivered(1, DELIVERED)
    snapshots.finish_epochs()
    snapshots.refresh()
    with pytest.raises(CatalogError, match="file is not a database"):
        snapshots.begin(1)
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
def test_finishing_an_epoch_survives_a_lost_catalog_and_a_failing_stderr(
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
    assert stream is None or stream.wanted.startswith("cachetool: a finished epoch could not be counted in the cache: ")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_committed_between_epochs_are_in_the_next_epoch_after_a_refresh(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=10, workers=workers, fields=["number"]) as loader:
        for epoch in range(5):
            assert len(loader) == 6 + 2 * epoch
            numbers = sorted(int(number) for batch in loader for number in batch["number"])
            assert numbers == list(range(60 + 20 * epoch))
            put(cache, range(60 + 20 * epoch, 80 + 20 * epoch))
            loader.refresh()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_that_arrive_before_half_of_an_epoch_are_in_the_next_epoch(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=10, workers=workers, fields=["number"]) as loader:
        for epoch in range(5):
            numbers: list[int] = []
            for batch in loader:
                if not numbers:
                    put(cache, range(60 + 20 * epoch, 80 + 20 * epoch))
                numbers += batch["number"].tolist()
            assert sorted(numbers) == list(range(60 + 20 * epoch))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_validation_reads_samples_that_arrived_since_the_previous_one(workers: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": workers, "fields": ["number"], "split": "validation", "validation": 0.5}
    sides: list[list[int]] = []
    with open_cache(tmp_path / "keyed", max_size="20MB") as keyed:
        put(keyed, range(60), schema=KEYED)
        with Loader(keyed, batch_size=10, **options) as loader:
            for epoch in range(4):
                numbers = [int(number) for batch in loader for number in batch["number"]]
                sides.append(sorted(numbers))
                put(keyed, range(60 + 20 * epoch, 80 + 20 * epoch), schema=KEYED)

    assert [len(side) for side in sides] == sorted({len(side) for side in sides})
    assert all(side == [number for number in sides[-1] if number < 60 + 20 * at] for at, side in enumerate(sides))
