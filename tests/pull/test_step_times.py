"""What a pull spends its time on: a store that answers late or asks to slow down, decoding, a full cache."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import cachetool
from cachetool.cache.history import history_of
from cachetool.core.causes import PULL_CAUSES, pull_sentence
from cachetool.pull.step_times import StepTimes
from cachetool.stores.traffic import paused
from tests.servers import Scripted, scripted_server

COUNT = 100
"""More than the files that are looked at for their fields, and then not fetched again."""


def body() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(1000, np.float32))
    return file.getvalue()


def store(get: Callable[[Scripted, int], bool]) -> Callable[[Scripted], None]:
    """Return the script of a web server with an index and COUNT files. ``get`` may answer the n-th request of a file
    itself and return True."""
    asked: dict[str, int] = {}

    def script(handler: Scripted) -> None:
        if handler.path == "/":
            links = "".join(f'<a href="s{number:03d}.x.npy">s</a>' for number in range(COUNT))
            handler.answer(200, links.encode(), Content_Type="text/html")
            return
        number = asked[handler.path] = asked.get(handler.path, 0) + 1
        if not get(handler, number):
            handler.answer(200, body(), ETag='"1"')

    return script


def pulled(url: str, root: Path) -> dict[str, float]:
    """Return the seconds by step of a pull from ``url``."""
    with cachetool.open_cache(root, max_size="20MB") as cache:
        result = cache.pull(url, samples=COUNT, workers=1)
        assert result.samples == COUNT
        (row,) = history_of(cache.layout).pulls
        assert row["samples"] == COUNT
        causes: dict[str, float] = row["causes"]
        return causes


def test_a_slow_store_is_named(tmp_path: Path) -> None:
    def late(handler: Scripted, number: int) -> bool:
        time.sleep(0.5)
        return False

    with scripted_server(store(late)) as server:
        causes = pulled(f"{server.url}/", tmp_path / "cache")
    assert max(causes, key=lambda step: causes[step]) == "store"


def test_a_store_that_asks_to_slow_down_is_named(tmp_path: Path) -> None:
    def busy(handler: Scripted, number: int) -> bool:
        # Two refusals: the first one may be hidden by the client.
        if number <= 3:
            handler.answer(429, Retry_After="1")
        return number <= 3

    with scripted_server(store(busy)) as server:
        causes = pulled(f"{server.url}/", tmp_path / "cache")
    assert causes["throttling"] > causes["store"]


def test_waiting_for_samples_is_divided_into_store_throttling_and_decoding() -> None:
    def pieces() -> Iterator[int]:
        time.sleep(0.2)
        yield 1
        began = time.process_time()
        while time.process_time() - began < 0.2:
            pass
        yield 2
        time.sleep(0.2)
        paused(0.2)
        yield 3

    times, found = StepTimes(), pieces()
    assert [times.fetched(found) for _ in range(4)] == [1, 2, 3, None]
    spent = times.sums()
    for step in ("store", "decode", "throttling"):
        # Later on a busy machine.
        assert spent[step] >= 0.15
    with times.at("write"):
        assert times.sums()["write"] > 0


def test_every_step_has_a_sentence() -> None:
    for step, about in PULL_CAUSES.items():
        assert about.helps in pull_sentence({step: 1.0}, 10**6, 2.0)
    assert pull_sentence({}, 0, 0.0) == "nothing yet"
