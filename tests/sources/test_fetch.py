"""Fetching many units together, in order, and never more than fit into memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cachetool.sources.fetch import Fetcher


@pytest.fixture
def doubling() -> Iterator[Fetcher[int, int]]:
    fetcher: Fetcher[int, int] = Fetcher(lambda task, stop: 2 * task, 4)
    yield fetcher
    fetcher.close()


def test_results_are_delivered_in_the_order_of_the_tasks(doubling: Fetcher[int, int]) -> None:
    assert list(doubling.run(range(1000), ahead=10, size=lambda task: 1)) == list(range(0, 2000, 2))
    assert list(doubling.run([], ahead=10, size=lambda task: 1)) == []


def test_a_later_task_that_finishes_first_waits_for_its_turn() -> None:
    release = threading.Event()

    def work(task: int, stop: threading.Event) -> int:
        if task == 0:
            assert release.wait(20)
        if task == 2:
            release.set()
        return task

    fetcher: Fetcher[int, int] = Fetcher(work, 2)

    assert list(fetcher.run(range(3), ahead=100, size=lambda task: 1)) == [0, 1, 2]
    fetcher.close()


@pytest.mark.parametrize(("ahead", "most"), [(1, 2), (10, 4), (30, 10)])
def test_no_more_tasks_are_started_than_fit(ahead: int, most: int) -> None:
    """Each task weighs 3. Started tasks that were not taken stay within ``ahead``, or 4 tasks within eight times
    that.
    """
    begun, taken, seen = [0], [0], []
    lock = threading.Lock()

    def work(task: int, stop: threading.Event) -> int:
        with lock:
            begun[0] += 1
            seen.append(begun[0] - taken[0])
        return task

    fetcher: Fetcher[int, int] = Fetcher(work, 8)
    for _ in fetcher.run(range(100), ahead=ahead, size=lambda task: 3):
        with lock:
            taken[0] += 1

    assert max(seen) <= most + 1  # the task just delivered counts until the consumer returns
    assert begun[0] == 100
    fetcher.close()


def test_a_thread_is_started_if_all_others_are_busy() -> None:
    """Sequential tasks use one thread, and simultaneous tasks get one thread each."""
    together = threading.Barrier(5)

    def work(task: int, stop: threading.Event) -> str:
        if task >= 20:
            together.wait(20)
        return threading.current_thread().name

    fetcher: Fetcher[int, str] = Fetcher(work, 8)
    assert {next(iter(fetcher.run([task], ahead=1, size=lambda task: 1))) for task in range(20)} == {"fetch-0"}
    assert len(set(fetcher.run(range(20, 25), ahead=5, size=lambda task: 1))) == 5
    fetcher.close()


def test_the_first_error_in_order_is_raised_and_later_results_are_dropped() -> None:
    started: list[int] = []

    def work(task: int, stop: threading.Event) -> int:
        started.append(task)
        if task in (5, 7):
            raise KeyError(task)
        return task

    fetcher: Fetcher[int, int] = Fetcher(work, 2)
    got: list[int] = []
    with pytest.raises(KeyError, match="5"):
        got.extend(iter(fetcher.run(range(10_000), ahead=10, size=lambda task: 1)))

    assert len(started) < 100
    fetcher.close()


def test_closing_the_iterator_stops_running_tasks() -> None:
    stopped = threading.Event()

    def work(task: int, stop: threading.Event) -> int:
        if task:
            stopped.set() if stop.wait(20) else None
        return task

    fetcher: Fetcher[int, int] = Fetcher(work, 2)
    results = fetcher.run(range(5), ahead=100, size=lambda task: 1)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]

    assert stopped.wait(20)
    fetcher.close()
    fetcher.close()
