"""kill -9 before every system call that changes a file (faults 1, 3, 4, 10).

Killed are one commit in each format, an eviction, a conversion, a merge and a split of shards, a recovery, the creation
of a cache, the upgrade of its catalog to a new schema, and a rebuild. By default every few calls are tried; ``pytest -m
soak tests/faults`` tries all calls.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachetool.cache import open_cache
from cachetool.cache.draws import Part
from tests.faults.conftest import Figures
from tests.faults.tracing import Children, Point, needs_strace
from tests.faults.world import FORMATS, SOURCE, Oracle, make

pytestmark = needs_strace


def tried(short: int) -> pytest.MarkDecorator:
    """Parametrize a step: every ``short``-th call by default, every call in a soak."""
    return pytest.mark.parametrize(
        "step", [pytest.param(short, id="short"), pytest.param(1, id="all", marks=pytest.mark.soak)]
    )


class Stage:
    """A prepared cache that is copied for each try."""

    def __init__(self, tmp_path: Path, children: Children, figures: Figures) -> None:
        self.children = children
        self.figures = figures
        self._tmp = tmp_path
        self.ready, self.root = tmp_path / "ready", tmp_path / "cache"
        self.ledger = tmp_path / "ledger"
        self.kept = tmp_path / "ready.ledger"

    def do(self, action: str, **arguments: object) -> None:
        """Run an action to its end on the cache that is being prepared."""
        outcome = self.children.run(action, root=str(self.ready), **arguments)
        assert outcome.status == 0, outcome

    def fill(self, shards: int, **arguments: object) -> None:
        """Create the cache and commit some shards."""
        make(self.ready)
        self.do("pull", shards=shards, ledger=str(self.kept), **arguments)

    def copy(self) -> None:
        """Restore the prepared cache."""
        for path, source in ((self.root, self.ready), (self.ledger, self.kept)):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            if source.is_dir():
                shutil.copytree(source, path)
            elif source.exists():
                shutil.copy(source, path)

    def points(self, action: str, **arguments: object) -> list[Point]:
        """Return the calls of an undisturbed run."""
        self.copy()
        return self.children.points(action, self._tmp / "log", within=self.root, root=str(self.root), **arguments)

    def kill(self, action: str, point: Point, **arguments: object) -> int:
        """Run the action until this call. Return the exit status."""
        inject = f"{point.call}:signal=KILL:when={point.nth}"
        return self.children.run(action, inject=inject, root=str(self.root), **arguments).status

    def check(self, *, library: bool = False) -> int:
        """Run the post-check. Return the number of visible samples."""
        return Oracle(self.root, self.ledger).check(library=library)

    def kill_everywhere(
        self, action: str, step: int, check: Callable[[], object] | None = None, **arguments: object
    ) -> int:
        """Kill ``action`` before each ``step``-th of its calls, and check the cache after each kill. Return the number
        of calls.
        """
        points = self.points(action, **arguments)
        self.figures(system_calls=len(points), kills=len(points[::step]))
        self.check(library=True)
        for point in points[::step]:
            self.copy()
            try:
                assert self.kill(action, point, **arguments) == -9, "the call was not reached"
                (check or self.check)()
            except Exception as error:
                raise AssertionError(f"killed before {point}: {error}") from error
        return len(points)


@pytest.fixture
def stage(tmp_path: Path, children: Children, figures: Figures) -> Stage:
    return Stage(tmp_path, children, figures)


@tried(36)
@pytest.mark.parametrize("format", FORMATS)
def test_a_commit_killed_anywhere_leaves_the_complete_shard_or_nothing(stage: Stage, format: str, step: int) -> None:
    stage.fill(2, format=format)

    assert stage.kill_everywhere("pull", step, format=format, ledger=str(stage.ledger)) > 150


@tried(20)
def test_an_eviction_killed_anywhere_is_completed_by_the_next_open(stage: Stage, step: int) -> None:
    stage.fill(6, format="all")

    assert stage.kill_everywhere("evict", step, size=1_350_000) > 50


@tried(36)
def test_a_conversion_killed_anywhere_leaves_the_old_or_the_new_shard(stage: Stage, step: int) -> None:
    stage.fill(2, format="tfrecord")

    def both() -> None:
        assert stage.check() == 24

    assert stage.kill_everywhere("convert", step, both, to="hdf5") > 100


@tried(48)
@pytest.mark.parametrize(("shards", "most"), [(3, 10**9), (1, 3_000)], ids=["merging", "cutting"])
def test_a_change_of_shard_size_killed_anywhere_leaves_the_old_or_the_new_shards(
    stage: Stage, shards: int, most: int, step: int
) -> None:
    stage.fill(shards, format="lmdb")

    def all_once() -> None:
        assert stage.check() == 12 * shards

    assert stage.kill_everywhere("recut", step, all_once, to="tfrecord", most=most) > 100


@tried(16)
def test_a_recovery_killed_anywhere_is_recovered_by_the_next_open(stage: Stage, step: int) -> None:
    stage.fill(2)
    shutil.copytree(stage.ready, stage.root)
    points = stage.points("pull", format="zarr")
    late = next(point for point in points if "shard.json" in point.text and point.call == "fsync")
    stage.copy()
    assert stage.kill("pull", late, format="zarr") == -9
    shutil.rmtree(stage.ready)
    shutil.copytree(stage.root, stage.ready)

    assert stage.kill_everywhere("recover", step) > 40


@pytest.mark.parametrize("chains", [pytest.param(6, id="short"), pytest.param(200, id="all", marks=pytest.mark.soak)])
def test_repeated_crashes_during_recoveries_leave_a_sound_cache(stage: Stage, chains: int) -> None:
    stage.fill(3, format="all")
    arguments = {"format": "hdf5", "ledger": str(stage.ledger)}
    points = stage.points("pull", **arguments)
    rng = random.Random(4)
    kills = 0
    for chain in range(chains):
        stage.copy()
        first = rng.choice(points)
        assert stage.kill("pull", first, **arguments) == -9
        killed = [first]
        for _ in range(3):
            killed.append(Point("pwrite64" if rng.random() < 0.7 else "unlinkat", rng.randrange(1, 40), ""))
            status = stage.kill("recover", killed[-1])
            assert status in (0, -9)
            kills += status == -9
        try:
            stage.check()
        except AssertionError as error:
            raise AssertionError(f"chain {chain}, {killed}: {error}") from error
    stage.figures(chains=chains, recoveries_killed=kills)
    assert kills > chains // 2


@tried(16)
def test_a_cache_whose_creation_was_killed_anywhere_is_created_again(stage: Stage, step: int) -> None:
    points = stage.points("create")
    stage.figures(system_calls=len(points), kills=len(points[::step]))
    for point in points[::step]:
        stage.copy()
        assert stage.kill("create", point) == -9, point
        make(stage.root)
        assert stage.children.run("pull", root=str(stage.root), ledger=str(stage.ledger)).status == 0
        assert stage.check() == 12, point


@tried(24)
def test_a_part_released_and_taken_again_is_complete_or_absent_after_a_kill_anywhere(stage: Stage, step: int) -> None:
    stage.fill(2)

    def whole_or_gone() -> None:
        samples = stage.check()
        with open_cache(stage.root) as cache:
            row = cache.source(SOURCE.id)
            assert row is not None
            parts = row.parts
        assert (samples, parts) in [(24, (Part(0, 24, SOURCE.units),)), (0, ()), (0, (Part(0, 0, SOURCE.units),))]
        (stage.root / "catalog.sqlite3").unlink()
        assert stage.children.run("repair", root=str(stage.root)).status == 0
        with open_cache(stage.root) as cache:
            again = cache.source(SOURCE.id)
            assert again is not None
            assert (again.parts, cache.stats().samples) == (parts, samples)

    assert stage.kill_everywhere("move", step, whole_or_gone) > 30


@tried(16)
def test_a_rebuild_killed_anywhere_is_completed_by_the_next_one(stage: Stage, step: int) -> None:
    stage.fill(4, format="all")
    (stage.ready / "catalog.sqlite3").unlink()

    def repaired() -> None:
        assert stage.children.run("repair", root=str(stage.root)).status == 0
        assert stage.check() == 48

    assert stage.kill_everywhere("repair", step, repaired) > 30
