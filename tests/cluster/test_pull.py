"""Draws of a pull over several nodes. The nodes are threads of this process, each with a cache of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import itertools
import json
import os
import shutil
import struct
import tarfile
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir
from cachetool.cluster import engine as engines
from cachetool.cluster import pull as cluster
from cachetool.cluster.engine import NodeLost, Run
from cachetool.cluster.pull import pull_over
from cachetool.core.errors import CacheToolError, Interrupted, from_json
from cachetool.core.nodes import Node
from cachetool.loaders.numpy import Loader
from cachetool.proc.child import outcome_of
from cachetool.proc.task import Message, Task
from cachetool.pull.job import PullResult
from cachetool.pull.options import PullOptions


class Line:
    """The channel of a task that is a thread."""

    def __init__(self, engine: Threads, run: Run) -> None:
        self._engine, self._run = engine, run

    def send(self, message: Message) -> None:
        self._engine.said.put((self._run, json.loads(json.dumps(message))))


class Threads:
    """An engine like :class:`cachetool.cluster.engine.RayEngine`, whose nodes are threads."""

    def __init__(self, names: str) -> None:
        self.named = [Node(f"id-{name}", name, "127.0.0.1") for name in names]
        self.said: SimpleQueue[tuple[Run, Message | None]] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._outcomes: dict[int, Message | CacheToolError] = {}
        self._numbers = itertools.count()
        self.started: Callable[[Run], None] = lambda run: None
        self.places = tempfile.TemporaryDirectory()

    def nodes(self, *, strict: bool = True) -> list[Node]:
        return list(self.named)

    def start(self, node: Node, task: Task, on_message: Callable[[Message], None] | None = None) -> Run:
        run = Run(node, task, next(self._numbers), on_message)
        self.started(run)
        if run.ended:
            return run
        thread = self._threads[run.number] = threading.Thread(target=self._run, args=(run,), daemon=True)
        thread.start()
        return run

    def _run(self, run: Run) -> None:
        name, _, function = run.task.target.partition(":")
        outcome: Message | CacheToolError
        try:
            outcome = getattr(importlib.import_module(name), function)(Line(self, run), **run.task.arguments)
        except CacheToolError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - as in a child process
            outcome = from_json(outcome_of(error))
        self._outcomes[run.number] = outcome
        self.said.put((run, None))  # the run has ended once all its messages were received

    def write(self, node: Node, name: str, at: int, piece: bytes) -> str:
        path = Path(self.places.name, node.name, name)
        path.parent.mkdir(exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.seek(at)
            file.write(piece)
        return str(path)

    def wait(self, seconds: float = 0.05) -> list[Run]:
        ended = []
        with contextlib.suppress(Empty):
            while True:
                run, message = self.said.get(timeout=seconds)
                if message is None:
                    outcome = self._outcomes.get(run.number, run.error)
                    if isinstance(outcome, CacheToolError):
                        run.error = outcome
                    else:
                        run.result = outcome
                    ended.append(run)
                elif run.on_message is not None:
                    run.on_message(message)
                seconds = 0
        return ended

    def stop(self, runs: Sequence[Run]) -> None:
        for run in [run for run in runs if not run.ended]:
            thread = self._threads[run.number]
            while thread.is_alive() and not run.ended:
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupted))
                thread.join(0.5)
            thread.join()
            self.wait(0)

    def lose(self, run: Run) -> None:
        """Lose a node while it is at ``run``."""
        self.named.remove(run.node)
        self.stop([run])
        run.result, run.error = None, NodeLost(run.node)

    def send(self, nodes: Sequence[Node], folder: Path) -> dict[str, str]:
        return {node.id: str(folder) for node in nodes}


class World:
    """The nodes, their caches, and a source of numbers."""

    def __init__(self, folder: Path, engine: Threads) -> None:
        self.folder, self.engine, self.source = folder, engine, folder / "numbers"
        self.notes: list[str] = []
        self.source.mkdir()

    def write(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            np.save(self.source / f"{number:03d}.x.npy", np.full(4, number))

    def pull(self, *, placement: str = "split", max_size: str | None = "20MB", **options: Any) -> PullResult:
        said = PullOptions(**{"workers": 1, "shard_size": "1kB", **options})
        return pull_over(
            self.folder / "{node}", str(self.source), said, placement=placement, max_size=max_size,
            notify=self.notes.append,
        )  # fmt: skip

    def samples(self, node: str) -> list[int]:
        """Return the samples in each shard of a node."""
        with CacheDir(self.folder / node) as cache:
            return [shard.samples for shard in cache.shards()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    engine = Threads("ab")
    monkeypatch.setattr(engines, "connect", lambda address, notify=None: contextlib.nullcontext(engine))
    return World(tmp_path, engine)


def keys(world: World, *names: str) -> list[int]:
    """Return the number in every sample of these nodes."""
    found: list[int] = []
    for name in names:
        with Loader(world.folder / name, batch_size=8, workers=0, rank=0, world_size=1) as loader:
            found += [int(x) for batch in loader for x in batch["x"][:, 0]]
    return sorted(found)


@pytest.mark.parametrize("placement", ["replicate", "split"])
def test_caches_that_were_filled_with_parts_cannot_be_filled_with_replicas_or_vice_versa(
    world: World, placement: str
) -> None:
    world.write(0, 20)
    world.pull(all=True, placement=placement)
    before = {node: world.samples(node) for node in "ab"}
    other = "split" if placement == "replicate" else "replicate"
    with pytest.raises(cachetool.UsageError, match=rf"(?s)the cache of node a .*--placement {placement}.*--repart"):
        world.pull(all=True, placement=other)
    assert {node: world.samples(node) for node in "ab"} == before

    result = world.pull(all=True, placement=other, repart=True)
    assert result.pass_complete
    assert keys(world, "a", "b") == sorted([*range(20)] * (2 if other == "replicate" else 1))


def test_the_samples_of_a_lost_cache_are_drawn_again_and_no_sample_twice(world: World) -> None:
    world.write(0, 60)
    world.pull(all=True)
    shutil.rmtree(world.folder / "b")
    kept = world.samples("a")
    world.pull(all=True)

    assert world.samples("a")[: len(kept)] == kept, "what a has stays"
    assert keys(world, "a", "b") == [*range(60)]


def test_the_parts_of_a_lost_node_are_drawn_by_the_other_node_during_the_pull(world: World) -> None:
    world.write(0, 60)

    def lose(run: Run) -> None:
        if run.task.target.endswith(":draw") and run.node.name == "b":
            run.error = NodeLost(run.node)
            world.engine.named = world.engine.named[:1]
            world.engine.said.put((run, None))

    world.engine.started = lose
    result = world.pull(all=True)

    assert [row["state"] for row in result.nodes] == ["", "lost"]
    assert result.pass_complete
    assert keys(world, "a") == [*range(60)]
    assert world.notes[0] == "node b was lost; the other nodes draw its samples again"


def test_nodes_draw_the_same_samples_as_one_machine_in_two_pulls(world: World) -> None:
    world.write(0, 60)
    with cachetool.open_cache(world.folder / "local", max_size="20MB") as cache:
        cache.pull(str(world.source), samples=37, seed=3, workers=1)
    for samples in (20, 17):
        assert world.pull(samples=samples, seed=3).samples == samples

    assert keys(world, "a", "b") == keys(world, "local")


def test_more_samples_after_the_end_of_a_source_come_from_a_further_pass(world: World) -> None:
    world.write(0, 40)
    assert world.pull(all=True).reason == "source at its end"
    with cachetool.open_cache(world.folder / "b", create=False) as evicted:
        evicted.evict(evicted.usage().total - 1)
    lacking = 40 - len(keys(world, "a", "b"))
    assert lacking > 0
    assert world.pull(samples=40).samples == lacking
    assert keys(world, "a", "b") == [*range(40)]


def test_the_undrawn_parts_of_a_full_node_are_drawn_by_a_node_with_space(world: World) -> None:
    world.write(0, 60)
    (world.folder / "large").mkdir()
    for number in range(20):
        np.save(world.folder / "large" / f"{number}.x.npy", np.zeros(100_000, dtype=np.uint8))
    with cachetool.open_cache(world.folder / "a", max_size="20MB") as roomy:
        roomy.stats()
    with cachetool.open_cache(world.folder / "b", max_size="2MB") as small:
        small.pull(str(world.folder / "large"), dataset="other", workers=1, shard_size="1kB")
    result = world.pull(max_size=None)

    assert result.samples == 60
    assert len(keys(world, "a")) > 40


def test_a_refresh_that_finds_only_vanished_objects_reaches_the_nodes(world: World) -> None:
    world.write(0, 40)
    world.pull(samples=16)
    for number in range(0, 40, 5):
        (world.source / f"{number:03d}.x.npy").unlink()
    result = world.pull(all=True, refresh=True)

    assert result.vanished == 8
    assert result.pass_complete


def test_a_source_that_is_replicated_can_grow(world: World) -> None:
    world.write(0, 20)
    world.pull(samples=10, placement="replicate")
    world.write(20, 30)
    world.pull(all=True, placement="replicate", refresh=True)

    assert {node: sum(world.samples(node)) for node in "ab"} == {"a": 30, "b": 30}


def test_after_a_failed_first_pull_parts_or_replicas_can_still_be_chosen(world: World) -> None:
    world.write(0, 20)

    def fail(run: Run) -> None:
        if run.task.target.endswith(":draw"):
            run.error = cachetool.SourceError("it fails")
            world.engine.said.put((run, None))

    world.engine.started = fail
    with pytest.raises(cachetool.SourceError, match="it fails"):
        world.pull(all=True, placement="replicate")
    world.engine.started = lambda run: None

    assert world.pull(all=True).samples == 20


@pytest.mark.parametrize("target", ["cachetool.cluster.node:look", "cachetool.cluster.node:draw"])
def test_a_joining_node_that_cannot_take_part_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    world.write(0, 20)
    monkeypatch.setattr(cluster, "_SEEK", 0.0)
    first, second = world.engine.named
    world.engine.named = [first]

    def come(run: Run) -> None:
        if run.task.target.endswith(":draw") and run.node == first:
            world.engine.named = [first, second]
        elif run.node == second and run.task.target == target:
            run.error = cachetool.UsageError("its folder cannot be written")
            world.engine.said.put((run, None))

    world.engine.started = come

    result = world.pull(all=True, max_rate="2kB")
    assert result.samples - result.released == 20
    assert [note for note in world.notes if "node b" in note] == [
        "node b: its folder cannot be written; the pull continues without node b"
    ]


def test_a_joining_node_gets_its_share_of_the_rate_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, list[float]] = {"a": [], "b": []}

    def written(node: Node, path: str) -> None:
        parts[node.name].append(struct.unpack("<dd", Path(path).read_bytes())[1])

    tasks = pulled_with_a_rate_while_b_comes(world, monkeypatch, written)
    assert parts == {"a": [1.0, 0.5], "b": [0.5]}
    for run in tasks:
        assert run.task.arguments["options"]["max_rate"] == 3000
        assert run.task.arguments["pace"].endswith(f"/{run.node.name}/pace")


def test_a_joining_node_without_space_for_its_share_of_the_rate_limit_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []

    def full(node: Node, path: str) -> None:
        if node.name == "b":
            raise cachetool.CapacityError("/tmp: the disk is full")
        parts.append(struct.unpack("<dd", Path(path).read_bytes())[1])

    pulled_with_a_rate_while_b_comes(world, monkeypatch, full)
    assert "node b: /tmp: the disk is full; the pull continues without node b" in world.notes
    assert parts == [1.0, 0.5, 1.0]


def pulled_with_a_rate_while_b_comes(
    world: World, monkeypatch: pytest.MonkeyPatch, written: Callable[[Node, str], None]
) -> list[Run]:
    """Pull with a rate limit while node b joins at the first draw of node a. ``written`` receives the files written on
    the nodes. Return the tasks that drew.
    """
    world.write(0, 30)
    monkeypatch.setattr(cluster, "_SEEK", 0.0)
    first, second = world.engine.named
    world.engine.named = [first]
    write, drew = world.engine.write, []

    def writes(node: Node, name: str, at: int, piece: bytes) -> str:
        path = write(node, name, at, piece)
        written(node, path)
        return path

    def come(run: Run) -> None:
        if run.task.target.endswith(":draw"):
            world.engine.named = [first, second]
            drew.append(run)

    monkeypatch.setattr(world.engine, "write", writes)
    world.engine.started = come
    result = world.pull(all=True, max_rate="3kB")
    assert result.samples - result.released == 30
    return drew


def test_replicas_of_archives_draw_the_requested_samples_like_one_cache(world: World) -> None:
    for number in range(60):
        with tarfile.open(world.source / f"{number:03d}.tar", "w") as archive:
            for each in range(30 if number % 20 == 7 else 1):
                buffer = io.BytesIO()
                np.save(buffer, np.full(4, each))
                entry = tarfile.TarInfo(f"{number:03d}_{each:03d}.x.npy")
                entry.size = buffer.tell()
                archive.addfile(entry, io.BytesIO(buffer.getvalue()))
    with cachetool.open_cache(world.folder / "local", max_size="20MB") as cache:
        alone = cache.pull(str(world.source), samples=40, seed=6, workers=1, shard_size="1kB").samples
    result = world.pull(samples=40, seed=6, placement="replicate")

    assert alone >= 40
    assert result.samples == alone
    assert {node: sum(world.samples(node)) for node in "ab"} == {"a": alone, "b": alone}


def test_a_pull_continues_with_a_source_that_has_grown(world: World) -> None:
    world.write(20, 40)
    world.pull(samples=10)
    world.write(0, 20)
    world.pull(samples=10, refresh=True)
    before = {node: world.samples(node) for node in "ab"}
    result = world.pull(all=True)

    assert result.pass_complete
    assert sum(world.samples("a")) + sum(world.samples("b")) == 40
    assert all(world.samples(node)[: len(before[node])] == before[node] for node in "ab"), "nothing is drawn twice"


def test_a_joining_node_whose_samples_come_from_another_division_is_left_out_and_keeps_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write(0, 20)
    monkeypatch.setattr(cluster, "_SEEK", 0.0)
    with cachetool.open_cache(world.folder / "b", max_size="20MB") as cache:
        cache.pull(str(world.source), all=True, workers=1, shard_size="1kB")
    first, second = world.engine.named
    world.engine.named = [first]

    def come(run: Run) -> None:
        if run.task.target.endswith(":draw"):
            world.engine.named = [first, second]

    world.engine.started = come
    assert world.pull(all=True).released == 0
    assert sum(world.samples("b")) == 20
    assert any("the pull continues without node b" in note for note in world.notes)


def test_the_pull_ends_if_no_node_has_space(world: World) -> None:
    world.write(0, 30)
    (world.folder / "large").mkdir()
    for number in range(20):
        np.save(world.folder / "large" / f"{number}.x.npy", np.zeros(100_000, dtype=np.uint8))
    for name in "ab":
        with cachetool.open_cache(world.folder / name, max_size="2MB") as small:
            small.pull(str(world.folder / "large"), dataset="other", workers=1, shard_size="1kB")
    assert world.pull(max_size=None).reason == "cache full"


def test_replicas_of_a_grown_source_draw_only_the_requested_samples(world: World) -> None:
    world.write(0, 20)
    world.pull(all=True, placement="replicate")
    world.write(20, 40)
    assert world.pull(samples=5, placement="replicate", refresh=True).samples == 5
    assert {node: sum(world.samples(node)) for node in "ab"} == {"a": 25, "b": 25}


def test_a_returning_node_gets_the_parts_that_it_has(world: World) -> None:
    world.write(0, 60)
    world.pull(all=True)
    first, second = world.engine.named
    world.engine.named = [first]
    world.pull(all=True)
    world.engine.named = [first, second]
    result = world.pull(all=True)

    assert result.fetched == 0
    assert keys(world, "a", "b") == [*range(60)]
    assert all(sum(world.samples(name)) > 20 for name in "ab")


def test_nodes_with_different_seeds_are_both_named(world: World) -> None:
    world.write(0, 20)
    for name, seed in (("a", 1), ("b", 5)):
        with cachetool.open_cache(world.folder / name, max_size="20MB") as cache:
            cache.pull(str(world.source), samples=5, seed=seed, workers=1)
    with pytest.raises(cachetool.UsageError, match=r"node b draws .* with another --seed or --order than the others"):
        world.pull(all=True, placement="replicate")
