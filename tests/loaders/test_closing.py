"""Ends of loaders at bad moments: closed by a signal handler in the middle of any call, interrupted twice, killed while
a transform holds the GIL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.formats import lmdb
from cachetool.formats.lmdb import open_environment
from cachetool.loaders.epoch import Epoch
from cachetool.loaders.feed import in_process, processes
from cachetool.loaders.feed.in_process import InProcess
from cachetool.loaders.feed.processes import Processes
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.numpy import Loader
from cachetool.loaders.ring import forks
from cachetool.loaders.snapshots.epochs import EpochSnapshots
from tests.loaders.numbered import leases, put
from tests.loaders.processes import alive, children, until

CLOSES = """
    import collections, json, random, signal, sys
    from cachetool.loaders.numpy import Loader

    found = collections.Counter()
    for _ in range(25):
        loader = Loader(sys.argv[1], batch_size=1, workers=int(sys.argv[2]), fields=["number"])
        signal.signal(signal.SIGALRM, lambda *_: loader.close())
        batches = iter(loader)
        first = batches.progress.feed
        next(batches)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.02))
        try:
            while batches.progress.feed is first:
                for _ in batches:
                    pass
                batches = iter(loader)
        except Exception as error:
            found[f"{type(error).__name__}: {error}"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        loader.close()
    print(json.dumps(found))
"""
CLOSED = (
    "the loader was closed while the program waited for a batch",
    "the feeders of this iterator ended; iterate the loader again",
    "this iterator ended because its loader was iterated again, closed or interrupted",
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_handler_may_close_a_loader_in_the_middle_of_any_call(workers: int, script: Any, cache: CacheDir) -> None:
    process = script(CLOSES, cache.root, workers)
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    for words in json.loads(out):
        assert any(each in words for each in CLOSED), words
    assert leases(cache) == []


PLACES = [
    *(
        (workers, function)
        for workers in (0, 1)
        for function in (BaseLoader._fed, BaseLoader._started, Epoch._fill, Epoch._fetch, Epoch._release, Epoch._taken)
    ),
    *((0, function) for function in (InProcess.begin, InProcess.take, InProcess.delivered, InProcess._using)),
    *((1, function) for function in (Processes.begin, Processes._ask, Processes._answer, Processes.take)),
]


@pytest.mark.parametrize("step", [pytest.param(3, id="short"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize(("workers", "function"), PLACES, ids=[f"{each.__name__}-{n}" for n, each in PLACES])
def test_a_handler_may_close_a_loader_before_any_line(workers: int, function: Any, cache: CacheDir, step: int) -> None:
    """The epoch is then complete, or ends with the error of a closed loader."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is function.__code__ and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at:
                sys.settrace(None)
                loader.close()
        return trace if frame.f_code is function.__code__ else None

    at, lines = 0, [0]
    while len(lines) >= at and at < 30:
        at += step
        lines = []
        loader = Loader(cache, batch_size=20, workers=workers, fields=["number"])
        told, samples = "", 0
        sys.settrace(trace)
        try:
            samples = sum(len(batch["number"]) for batch in loader)
        except CacheToolError as error:
            told = str(error)
        finally:
            sys.settrace(None)
        assert samples == 60 or any(each in told for each in CLOSED), told
        loader.close()
    assert at > 5
    assert children() == []
    assert leases(cache) == []


def test_a_handler_may_close_a_loader_during_a_catalog_query(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted call returns the lease."""
    told = EpochSnapshots.delivered

    def closing(self: EpochSnapshots, *arguments: Any) -> None:
        loader.close()
        told(self, *arguments)

    monkeypatch.setattr(EpochSnapshots, "delivered", closing)
    loader = Loader(cache, batch_size=60, workers=0, fields=["number"])
    with pytest.raises(UsageError, match="closed"):  # the close comes before the last batch
        next(iter(loader))
    until(lambda: not leases(cache))


@pytest.mark.parametrize("workers", [0, 1])
def test_closing_ends_a_wait_for_samples_without_a_new_snapshot(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        _ = cache.catalog
        loader = Loader(cache, batch_size=4, workers=workers, wait=100)
        if workers:
            timer = threading.Timer(0.3, loader.close)  # its feeder waits or has not started yet; both end alike
            timer.start()
        else:
            monkeypatch.setattr(in_process.Talk, "tell", lambda *_: (loader.close(), put(cache, range(8))))
        with pytest.raises(CacheToolError, match="closed"):
            iter(loader)
        assert leases(cache) == []
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_during_a_wait_for_samples_leaves_no_waiting_process(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        _ = cache.catalog
        loader = Loader(cache, batch_size=4, fields=["number"], workers=workers, wait=100)
        kind: Any = InProcess if workers == 0 else Processes
        begin = kind.begin

        def interrupted(*arguments: Any) -> Any:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            return begin(*arguments)

        def handler(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(kind, "begin", interrupted)
        before = signal.signal(signal.SIGALRM, handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        finally:
            signal.signal(signal.SIGALRM, before)
        monkeypatch.undo()
        until(lambda: children() == [])
        put(cache, range(8))
        until(lambda: leases(cache) == [])
        assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(8))
        loader.close()


def test_a_loader_closed_while_this_process_builds_a_batch_returns_its_lease(cache: CacheDir) -> None:
    def closing(sample: dict[str, Any]) -> dict[str, Any]:
        loader.close()
        held.append(len(leases(cache)))  # samples that are being read stay until the batch ends
        return sample

    held: list[int] = []
    loader = Loader(cache, batch_size=4, workers=0, transform=closing)
    with pytest.raises(CacheToolError, match="the loader was closed"):
        next(iter(loader))
    assert held[0] == 1
    assert leases(cache) == []
    loader.close()


def test_an_interrupt_in_a_transform_without_workers_ends_the_loop_and_the_epoch_continues(cache: CacheDir) -> None:
    def interrupted(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["number"]) == stop[0]:
            raise KeyboardInterrupt
        return {"number": sample["number"]}

    stop = [33]
    with Loader(cache, batch_size=4, workers=0, transform=interrupted, shuffle=False) as loader:
        before: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            before.extend(n for batch in loader for n in batch["number"].tolist())
        state, stop[0] = loader.state_dict(), -1
        loader.load_state_dict(state)
        assert before + [n for batch in loader for n in batch["number"].tolist()] == list(range(60))


def test_a_handler_may_save_the_state_while_this_process_builds_a_batch(cache: CacheDir) -> None:
    def saving(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["number"]) == 20:
            states.append(loader.state_dict())
        return {"number": sample["number"]}

    states: list[dict[str, Any]] = []
    with Loader(cache, batch_size=4, workers=0, transform=saving, shuffle=False) as loader:
        numbers = [n for batch in loader for n in batch["number"].tolist()]
        assert numbers == list(range(60))
        loader.load_state_dict(states[0])
        assert [n for batch in loader for n in batch["number"].tolist()] == list(range(20, 60))


HOLDS = """
    import glob, os, re, signal, sys, time
    from cachetool.loaders.numpy import Loader

    def holds(sample):
        while not os.path.exists(flag):  # the leader answers first, for which it needs the GIL
            time.sleep(0.01)
        open(f"{flag}-{os.getpid()}", "w").close()
        re.match("(a+)+$", "a" * 40 + "b")  # for hours, with the GIL
        return sample

    flag = sys.argv[1] + "-flag"
    loader = Loader(sys.argv[1], batch_size=2, workers=2, transform=holds)
    batches = iter(loader)
    open(flag, "w").close()
    while len(glob.glob(flag + "-*")) < 2:
        time.sleep(0.01)
    print(*loader._feed.pids, flush=True)
    if sys.argv[2] == "waits":
        next(batches)

    def interrupted(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupted)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        loader.close()
        print("closed")
    except KeyboardInterrupt:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        print(sum("cachetool-ring" in each for each in links), flush=True)
"""


def test_feeders_that_hold_the_gil_end_with_a_killed_trainer(script: Any, cache: CacheDir) -> None:
    process = script(HOLDS, cache.root, "waits")
    feeders = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not any(map(alive, feeders)), 1.0)
    assert leases(cache) == []
    process.stdout.close()
    process.stderr.close()


def test_a_second_interrupt_while_feeders_are_stopped_leaves_no_feeder(script: Any, cache: CacheDir) -> None:
    process = script(HOLDS, cache.root, "closes")
    feeders = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.read() == "0\n"
    assert not any(map(alive, feeders))
    process.wait()
    process.stdout.close()
    process.stderr.close()


def test_a_handler_that_closes_a_loader_closes_the_pipe_of_an_ended_child_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inherited = forks.Inherited(list)
    reading, writing = os.pipe()
    inherited.note(reading, frozenset({0}))
    os.close(writing)  # the child's end of the pipe: the child ended
    files: list[int] = []

    def interrupted(*_: int) -> set[int]:
        inherited.close()
        files.append(os.open(os.devnull, os.O_RDONLY))  # the file gets the descriptor number that is free now
        return {reading}

    monkeypatch.setattr(forks, "ready", interrupted)
    assert inherited.ended() == []
    assert files == [reading]
    os.close(files[0])  # the descriptor still belongs to this test


def test_a_handler_may_close_an_lmdb_file_while_its_thread_opens_another(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (shard.data for shard in cache.shards()[:2])
    opened = open_environment(first)
    really = lmdb.lmdb.open

    def interrupted(*arguments: Any, **more: Any) -> Any:
        opened.close()
        return really(*arguments, **more)

    monkeypatch.setattr(lmdb.lmdb, "open", interrupted)
    other = open_environment(second)
    assert other.env.stat()["entries"] > 0
    other.close()
    with pytest.raises(Exception, match="closed"):
        opened.env.stat()


def test_a_handler_may_close_a_loader_while_it_checks_its_feeders(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Popen.poll`` holds a lock at that moment, and ``wait`` without that lock would wait forever."""
    monkeypatch.setattr(processes, "_GRACE", 0.2)
    loader = Loader(cache, batch_size=4, workers=1, fields=["number"])
    batches = iter(loader)
    next(batches)
    process = loader._feed._keeper  # type: ignore[union-attr]
    with process._waitpid_lock:
        loader.close()
    assert process.wait(60) is not None
    with pytest.raises(CacheToolError):
        list(batches)
