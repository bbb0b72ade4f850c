"""When a loader looks for its next snapshot, told by a clock that the tests set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cachetool.cache import CacheDir
from cachetool.cache.history import Delivered
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.snapshots import epochs as module
from cachetool.loaders.snapshots.epochs import EpochSnapshots, Timing
from tests.loaders.numbered import put

PACE = Delivered(seconds=25.0, batches=40, waits=1, waited=5.0)
"""Steps of half a second."""
SLOW = Delivered(seconds=30.0, batches=6, waits=0, waited=0.0)


class Clock:
    """``time``, as far as the module uses it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def published() -> list[EpochPlan]:
    return []


@pytest.fixture
def snapshots(
    clock: Clock, cache: CacheDir, published: list[EpochPlan], monkeypatch: pytest.MonkeyPatch
) -> Iterator[EpochSnapshots]:
    monkeypatch.setattr("cachetool.loaders.snapshots.epochs.time", clock)
    made = EpochSnapshots(Settings(str(cache.root), batch_size=10), published.append)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("steps", "passed", "spare"),
    [
        (40, 0.0, 10.0),
        (40, 10.0, 5.0),
        (40, 18.5, 0.5),
        (40, 19.5, 0.0),
        (40, 100.0, 0.0),
        (4, 0.0, 1.0),
        (2, 0.0, 0.0),
    ],
)
def test_the_look_ahead_waits_for_half_of_what_is_left_but_a_second_before_the_end(
    steps: int, passed: float, spare: float, clock: Clock
) -> None:
    timing = Timing()
    timing.delivered(PACE)
    timing.begun()
    clock.now += passed

    assert timing.spare(steps) == spare


def test_of_a_first_epoch_nobody_knows_how_long_it_lasts(clock: Clock) -> None:
    timing = Timing()
    timing.begun()

    assert timing.spare(1000) == 0


@pytest.mark.parametrize(
    ("step", "passed", "at_once"),
    [(0.01, 0.4, True), (0.01, 0.6, False), (1.0, 1.4, True), (1.0, 1.6, False), (60.0, 2.9, True), (60.0, 3.1, False)],
)
def test_an_epoch_begins_at_once_within_half_a_second_or_one_step_and_a_half(
    step: float, passed: float, at_once: bool, clock: Clock
) -> None:
    timing = Timing()
    timing.delivered(Delivered(seconds=10 * step + 7, batches=10, waits=1, waited=7.0))
    clock.now += passed

    assert timing.at_once == at_once


@pytest.mark.parametrize(("passed", "old"), [(9.9, False), (10.1, True)])
def test_a_look_is_old_after_ten_seconds(passed: float, old: bool, clock: Clock) -> None:
    timing = Timing()
    timing.looked()
    clock.now += passed

    assert timing.old == old


def test_the_next_snapshot_has_what_came_while_the_batches_that_were_there_lasted(
    clock: Clock, cache: CacheDir, snapshots: EpochSnapshots, published: list[EpochPlan]
) -> None:
    generation = snapshots.begin(0).generation
    snapshots.exhausted(generation)
    snapshots.delivered(generation, SLOW)
    assert [plan.epoch for plan in published] == [0, 1]

    generation = snapshots.begin(1, surely=False).generation
    snapshots.exhausted(generation)  # six steps of five seconds: all of it is still to be delivered
    assert snapshots.tick() == 15.0
    assert len(published) == 2
    put(cache, range(60, 80))
    clock.now += 15.0
    snapshots.tick()
    assert [(plan.epoch, plan.samples) for plan in published[2:]] == [(2, 80)]


def test_an_epoch_that_is_faster_than_the_one_before_is_followed_all_the_same(
    snapshots: EpochSnapshots, published: list[EpochPlan]
) -> None:
    for epoch in range(3):
        generation = snapshots.begin(epoch, surely=False).generation
        snapshots.exhausted(generation)
        snapshots.delivered(generation, SLOW)

    assert [plan.epoch for plan in published] == [0, 1, 2, 3]
    assert snapshots.tick() == 60.0  # seconds for which the last one is kept
