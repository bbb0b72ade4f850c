"""Rare events in a loader: interrupts at the end of an epoch, ranks without samples, feeders that cannot start."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.loaders.numpy import Loader
from tests.loaders.numbered import put


def numbers(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch["number"]]


@pytest.mark.parametrize("when", ["before the catalog knows", "after the catalog knows"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_while_the_epoch_ends_leaves_its_last_batch_undelivered(
    workers: int, when: str, cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was not delivered, so the state says that it is still to come."""
    with Loader(cache, batch_size=8, workers=workers, fields=["number"]) as loader:
        iterator = iter(loader)
        got = [int(number) for _ in range(7) for number in next(iterator)["number"]]
        feed = loader._feed
        assert feed is not None
        ended = feed.delivered

        def interrupted(*arguments: Any) -> None:
            if when.startswith("after"):
                ended(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(feed, "delivered", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(cache, batch_size=8, workers=workers, fields=["number"]) as again:
        again.load_state_dict(state)
        got += numbers(again)

    assert state["epoch"] == 0
    assert sorted(got) == list(range(60))


def _as_given(given: dict[str, Any]) -> dict[str, Any]:
    assert np.size(given["number"])  # never called without samples
    return {"twice": given["number"] * 2, "text": given["words"]}


@pytest.mark.parametrize("each", ["sample", "batch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_samples_gets_empty_batches_with_the_transforms_fields(
    workers: int, each: str, tmp_path: Path
) -> None:
    """Five samples in batches of one for four ranks: all ranks take two steps, and for three of them the second batch
    is empty.
    """
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(5))
        found = []
        for rank in range(4):
            ranks = {"rank": rank, "world_size": 4, "run": f"{each}-{workers}"}
            more: dict[str, Any] = {"transform": _as_given, "transform_each": each}
            with Loader(cache, batch_size=1, workers=workers, fields=["number", "words"], **ranks, **more) as loader:
                batches = list(loader)
            assert [set(batch) for batch in batches] == [{"twice", "text"}] * 2
            assert all(len(batch["twice"]) == len(batch["text"]) for batch in batches)
            found += [int(value) for batch in batches for value in batch["twice"]]

    assert sorted(found) == [0, 2, 4, 6, 8]


def test_a_rank_that_resumes_after_its_last_sample_gets_an_empty_batch_first(cache: CacheDir) -> None:
    """The transform has returned no sample yet that would show the fields."""
    with Loader(cache, batch_size=8, workers=0, run="before") as loader:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        state = loader.state_dict()
    ranks: dict[str, Any] = {"rank": 7, "world_size": 8, "run": "after"}
    for each in ("sample", "batch"):
        more: dict[str, Any] = {"transform": lambda given: {"z": given["x"] + 1}, "transform_each": each}
        with Loader(cache, batch_size=8, workers=1, **ranks, **more) as loader:
            loader.load_state_dict(state)
            (batch,) = list(loader)
        assert set(batch) == {"z"}
        assert batch["z"].shape == (0, 4, 3)


def test_a_path_object_in_sys_path_does_not_break_a_feeder(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself ignores such an entry."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    with Loader(cache, batch_size=8, workers=1) as loader:
        assert sorted(numbers(loader)) == list(range(60))


def test_a_transform_that_feeders_cannot_import_raises_an_error_with_its_cause(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_here")
    exec("def same(sample):\n    return sample\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with (
        Loader(cache, batch_size=8, workers=1, transform=module.same) as loader,
        pytest.raises(UsageError, match="transform= raised ModuleNotFoundError: No module named 'only_here'"),
    ):
        next(iter(loader))


def test_an_iterator_with_dead_feeders_raises_again_after_state_dict_raised(cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, workers=2, prefetch=1) as loader:
        iterator = iter(loader)
        next(iterator)
        os.kill(loader._feed.pids[0], signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises(CacheToolError, match="was killed by signal 9"):
            loader.state_dict()
        with pytest.raises(CacheToolError, match="the feeders of this iterator ended; iterate the loader again"):
            for _ in iterator:
                pass
        assert sorted(numbers(loader)) == list(range(60))


@pytest.mark.parametrize("workers", [0, 1])
def test_closing_a_loader_in_a_handler_ends_the_wait_for_its_batch(workers: int, cache: CacheDir) -> None:
    """A program stopped by SIGTERM or SIGUSR1 does so; no exception comes from the handler."""
    trainer, closed = os.getpid(), threading.Event()

    def never(sample: dict[str, Any]) -> dict[str, Any]:
        os.kill(trainer, signal.SIGUSR1)
        closed.wait(60)
        raise ValueError

    loader = Loader(cache, batch_size=4, workers=workers, transform=never if workers == 0 else _pausing(trainer))

    def close(*_: object) -> None:
        closed.set()
        loader.close()

    before = signal.signal(signal.SIGUSR1, close)
    try:
        with pytest.raises(CacheToolError, match=r"closed|ended|raised ValueError"):
            next(iter(loader))
    finally:
        signal.signal(signal.SIGUSR1, before)
        loader.close()


def _pausing(trainer: int) -> Any:
    """A transform that triggers the handler and returns no sample."""

    def pausing(sample: dict[str, Any]) -> dict[str, Any]:
        os.kill(trainer, signal.SIGUSR1)
        signal.pause()
        return sample

    return pausing


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_that_start_at_the_same_moment_have_different_epochs(workers: int, cache: CacheDir) -> None:
    """The threads of a loader with ``concurrent=True`` do not get the same samples in the same order."""
    with Loader(cache, batch_size=8, workers=workers, concurrent=True, fields=["number"]) as loader:
        gate, got = threading.Barrier(3), dict[int, list[int]]()

        def run(number: int) -> None:
            gate.wait()
            got[number] = numbers(loader)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert all(sorted(each) == list(range(60)) for each in got.values())
    assert len({tuple(each) for each in got.values()}) == 3


TWO_FORKS = """
    import os, sys, threading
    import numpy as np

    meet, met = threading.Event(), threading.Event()

    def between():  # registered first, so it is called last of all that is called before a fork
        if threading.current_thread().name == "slow":
            meet.set()
            met.wait(30)

    os.register_at_fork(before=between)
    from cachetool.loaders.numpy import Loader

    with Loader(sys.argv[1], batch_size=2, fields=["x"], workers=1, prefetch=2) as loader:
        batches = iter(loader)
        batch = next(batches)
        copy = batch["x"].copy()
        waits, goes = os.pipe()
        pids = []

        def slow():
            pid = os.fork()
            if pid == 0:
                os.close(goes)
                os.read(waits, 1)
                os._exit(0 if np.array_equal(batch["x"], copy) else 1)
            pids.append(pid)

        thread = threading.Thread(target=slow, name="slow")
        thread.start()
        meet.wait(30)
        quick = os.fork()
        if quick == 0:
            os._exit(0)
        os.waitpid(quick, 0)
        met.set()
        thread.join()
        del batch
        for _ in range(25):
            next(batches)
        os.write(goes, b"0")
        assert os.waitpid(pids[0], 0)[1] == 0
        next(batches)
        assert loader._feed._rings[0].batches_in_use == 0
"""


def test_each_of_two_simultaneous_forks_keeps_its_batches(script: Any, cache: CacheDir) -> None:
    process = script(TWO_FORKS, cache.root)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
