"""Requests in the progress: the number in flight, and the number that were repeated."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cachetool.pull import reports
from cachetool.pull.reports import WorkerReports
from cachetool.pull.step_times import StepTimes
from cachetool.sources.fetch import Fetcher
from cachetool.stores import Object, open_store, traffic
from tests.servers import Scripted, scripted_server


def test_requests_count_as_in_flight_until_they_are_answered() -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def work(task: int, stop: threading.Event) -> int:
        begun.release()
        gate.wait()
        return task

    fetcher: Fetcher[int, int] = Fetcher(work, 3)
    results = fetcher.run(range(5), ahead=100, size=lambda _: 1)
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(results))
    reader.start()
    for _ in range(3):
        begun.acquire()

    assert traffic.in_flight() == 3
    gate.set()
    reader.join()
    fetcher.close()
    assert got == [0, 1, 2, 3, 4]
    assert traffic.in_flight() == 0


def test_a_repeated_request_is_counted() -> None:
    def script(handler: Scripted) -> None:
        handler.answer(500 if handler.number <= 2 else 200, b"x" * 10)

    before = traffic.retries()
    with scripted_server(script) as server:
        assert bytes(open_store(f"{server.url}/place/").get(Object("a.npy", 10))) == b"x" * 10

    assert traffic.retries() - before == 2


def test_a_worker_reports_changes_while_no_samples_arrive_and_is_silent_without_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pull that waits for hours for space must not write a line per second."""
    told: list[dict[str, Any]] = []
    first, last = threading.Event(), threading.Event()

    class Channel:
        def send(self, message: dict[str, Any]) -> None:
            # Times of steps are told now and then, and shown nowhere at once.
            if "flying" in message:
                told.append(message)
                (first if message["flying"] else last).set()

    monkeypatch.setattr(reports, "_PULSE", 0.001)
    pulse = reports.Heartbeat(Channel(), StepTimes())
    with traffic.flying():
        assert first.wait(60)
    assert last.wait(60)
    assert [message["flying"] for message in told] == [1, 0]
    pulse.stop()
    assert [message["flying"] for message in told] == [1, 0, 0]


def test_received_bytes_are_reported_before_their_samples_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes a minute on a slow line: its received bytes are shown meanwhile, without those of the probe."""
    told: list[dict[str, Any]] = []
    all_there = threading.Event()

    class Channel:
        def send(self, message: dict[str, Any]) -> None:
            told.append(message)
            if message.get("arrived") == 700:
                all_there.set()

    monkeypatch.setattr(reports, "_PULSE", 0.001)
    traffic.arrived(1_000_000)
    pulse, tally = reports.Heartbeat(Channel(), StepTimes()), WorkerReports()
    traffic.arrived(500)
    traffic.arrived(200)
    assert all_there.wait(60)
    pulse.stop()

    for message in told:
        tally.add(0, message)
    tally.add(1, {"flying": 1, "retries": 0, "arrived": 300, "times": {}})
    assert (tally.moved, tally.fetched, tally.came) == (1000, 0, {0: 700, 1: 300})
    tally.add(1, {"fetched": 5000, "samples": 1})
    assert tally.moved == 5000
