"""The limit on bytes per second, measured on a simulated clock: no test waits for a real one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.sources.rate_limit import RateLimit, grant, shared

RATE = 1000.0


class Clock:
    """A time that passes only while its own worker sleeps."""

    def __init__(self, now: float = 50.0) -> None:
        self.now = now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@given(steps=st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10)), min_size=1))
def test_no_period_of_time_exceeds_the_rate_by_more_than_one_request(steps: list[tuple[int, float]]) -> None:
    due, now, begun = 0.0, 0.0, []
    for nbytes, pause in steps:
        begin, due = grant(due, now, nbytes, RATE)
        begun.append((begin, nbytes))
        now = begin + pause  # the worker continues after its wait
    largest = max(nbytes for _, nbytes in begun)
    for at, (start, _) in enumerate(begun):
        for end, _ in begun[at:]:
            granted = sum(nbytes for begin, nbytes in begun if start <= begin <= end)
            assert granted <= RATE * (end - start) + largest + 1e-6


@given(st.lists(st.integers(1, 5000), min_size=2))
def test_a_busy_worker_gets_the_whole_rate(sizes: list[int]) -> None:
    due, now = 0.0, 0.0
    for nbytes in sizes:
        now, due = grant(due, now, nbytes, RATE)
    assert due == pytest.approx(sum(sizes) / RATE)


def test_a_share_of_the_rate_applies_as_soon_as_it_is_written(tmp_path: Path) -> None:
    clock = Clock()
    pace = RateLimit(tmp_path / "due", RATE, clock=lambda: clock.now, sleep=clock.sleep)
    for share in (1.0, 0.25, 0.5):
        at, piece = shared(share)
        with open(tmp_path / "due", "r+b") as file:
            file.seek(at)
            file.write(piece)
        pace(0)
        began = clock.now
        for _ in range(10):
            pace(100)
        pace(0)  # after they have passed
        assert clock.now - began == pytest.approx(1000 / (RATE * share))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_unequal_workers_share_one_rate_in_each_second(tmp_path: Path, workers: int) -> None:
    """The worker whose clock is furthest behind asks next, as real workers would. Ten seconds, each within 10 % of the
    rate.
    """
    clocks = [Clock() for _ in range(workers)]
    paces = [RateLimit(tmp_path / "due", RATE, clock=lambda c=c: c.now, sleep=c.sleep) for c in clocks]  # type: ignore[misc]
    rng = np.random.default_rng(workers)
    begun: list[tuple[float, int]] = []
    while min(clock.now for clock in clocks) < 60:
        at = min(range(workers), key=lambda worker: clocks[worker].now)
        nbytes = int(rng.integers(1, 20))
        paces[at](nbytes)
        begun.append((clocks[at].now, nbytes))
        clocks[at].now += nbytes / RATE / 4 * (at + 1)  # the transfer itself; the last worker is the slowest
    for second in range(50, 60):
        assert sum(n for at, n in begun if second <= at < second + 1) == pytest.approx(RATE, rel=0.1)


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    waits: list[float] = []
    pace = RateLimit(tmp_path / "due", RATE, clock=lambda: 7.0, sleep=waits.append)
    threads = [threading.Thread(target=lambda: [pace(10) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == pytest.approx([10 * number / RATE for number in range(1, 400)])
