"""The history: points of the cache's past and its newest epochs, in a bounded file that never blocks other work."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachetool.api import open_cache as open_whole
from cachetool.cache import CacheDir, Room, SourceRow, draws, history, open_cache
from cachetool.cache.history import Delivered, history_of
from cachetool.cache.layout import HISTORY_LIMIT
from cachetool.cache.rebuild import rebuild
from cachetool.core.names import Id

SOURCE = Id("5" * 16)

Put = Callable[..., str]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time that the history reads."""

    def put(seconds: float) -> None:
        monkeypatch.setattr(history.time, "time", lambda: seconds)

    return put


def epoch(cache: CacheDir, delivered: Delivered | None = None, **more: object) -> None:
    with cache.snapshot(**more) as snapshot:  # type: ignore[arg-type]
        snapshot.served(delivered)


def test_commits_evictions_and_epochs_add_points_with_the_current_totals(
    cache: CacheDir, put: Put, clock: Callable[[float], None], tmp_path: Path
) -> None:
    (tmp_path / "listing").mkdir()
    cache.add_source(SourceRow(SOURCE, "s3://bucket/", {}, "i", "default", 9, 9, 0, 0, 0), tmp_path / "listing")
    with cache.catalog.write() as connection:
        job, _ = draws.open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None)
        held = draws.claim(connection, job, holder=cache.holder.id, most=2)
        assert held is not None
        draws.finish(connection, job, held, held.stop, samples=2, skipped=0, fetched=50_000)
    used = []
    for number in range(3):
        clock(1e9 + 10 * number)
        put(200_000)
        used.append(cache.usage().total)
    clock(1e9 + 100)
    epoch(cache)
    clock(1e9 + 200)
    cache.evict(cache.usage().total - 1)

    points = history_of(cache.layout).points
    assert [point["at"] for point in points] == [1e9, 1e9 + 10, 1e9 + 20, 1e9 + 100, 1e9 + 200]
    assert [point["used"] for point in points] == [*used, used[-1], cache.usage().total]
    assert [point["shards"] for point in points] == [1, 2, 3, 3, 2]
    assert [point["samples"] for point in points] == [10, 20, 30, 30, 20]
    assert [point["served"] for point in points] == [0, 0, 0, 600_000, 600_000]
    assert {point["fetched"] for point in points} == {50_000}
    assert {point["max_size"] for point in points} == {4_000_000}
    evicted = cache.stats().evictions[0]["bytes"]
    assert [point["evicted"] for point in points] == [{}, {}, {}, {}, {"evict": evicted}]


def test_a_second_has_one_point_for_any_number_of_commits(
    cache: CacheDir, put: Put, clock: Callable[[float], None]
) -> None:
    for tenth in range(25):
        clock(1e9 + tenth / 10)
        put(4096)

    assert [point["at"] for point in history_of(cache.layout).points] == [1e9, 1e9 + 1, 1e9 + 2]


def test_a_life_of_years_keeps_some_hundred_points_with_the_last_hour_in_more_detail() -> None:
    """Two years with a commit every five hours, then an hour with a commit per second."""
    times = [1e9 + 5 * 3600 * number for number in range(3504)]
    times += [times[-1] + second for second in range(1, 3600)]
    rows: list[dict[str, Any]] = []
    for at in times:
        history._add_point(rows, {"at": at}, edge=False)
    points = [point["at"] for point in rows]
    assert len(points) == history.MOST_POINTS
    assert points == sorted(points)
    assert points[0] == times[0], "the beginning stays"
    assert times[-1] - points[-1] < (times[-1] - times[0]) / 1000, "and so does the end"
    gaps = [after - before for before, after in itertools.pairwise(points)]
    assert max(gaps) < (times[-1] - times[0]) / 25, "nowhere a hole"
    assert sum(at > times[-1] - 3600 for at in points) >= 4, "what is new is told in more detail"


def test_thinning_keeps_both_ends_and_drops_the_point_in_the_narrowest_gap() -> None:
    assert history.least_missed([0.0, 10.0, 11.0, 20.0], now=20.0) in (1, 2)
    assert history.least_missed([0.0, 1.0, 100.0, 101.0, 102.0], now=10**6) == 3
    assert history.least_missed([0.0, 1000.0, 2000.0, 1e6 - 2000, 1e6 - 1000, 1e6], now=1e6) == 1, "old ones go first"


def test_the_newest_200_epochs_are_kept_with_the_loaders_figures(cache: CacheDir, put: Put) -> None:
    put(100_000)
    epoch(cache, Delivered(seconds=2.5, batches=7, waits=3, waited=0.5), run="job", epoch=4)
    epoch(cache)
    first, second = history_of(cache.layout).epochs
    about = {"dataset": "default", "shards": 1, "samples": 10, "bytes": 100_000}
    assert first.items() >= {**about, "run": "job", "epoch": 4}.items()
    assert first.items() >= {"seconds": 2.5, "batches": 7, "waits": 3, "waited": 0.5}.items()
    assert second.items() >= {**about, "run": None, "batches": None, "waits": None, "waited": None}.items()
    assert 0 <= second["seconds"] < 60, "the time since its snapshot"

    with cache.catalog.read() as connection:
        for number in range(3, 251):
            row = history.epoch_row(connection, None, None, dataset="default", shards=1, samples=number, bytes=1)
            history.write(cache.layout, epoch=row)
    found = history_of(cache.layout).epochs
    assert [row["samples"] for row in found] == list(range(51, 251))
    assert history_of(cache.layout, dataset="other").epochs == []


def test_the_history_file_stays_below_its_size_limit(cache: CacheDir, put: Put) -> None:
    put(100_000)
    for _ in range(200):
        epoch(cache, Delivered(1.0, 1, 1, 0.1), run="r" * 3000)
        assert cache.layout.history.stat().st_size <= HISTORY_LIMIT
    assert 20 < len(history_of(cache.layout).epochs) < 90, "the oldest went"
    assert cache.stats().charged["history"] == 2 * HISTORY_LIMIT


@pytest.mark.parametrize("bad", ["{", "[]", "[" * 100_000, '{"points": 3, "epochs": []}', "x" * (HISTORY_LIMIT + 1)])
def test_a_damaged_history_file_counts_as_empty_and_is_replaced(cache: CacheDir, put: Put, bad: str) -> None:
    put(50_000)
    cache.layout.history.write_text(bad)
    assert history_of(cache.layout) == history.History([], [])
    epoch(cache)
    assert len(history_of(cache.layout).epochs) == 1


def test_epochs_are_appended_and_a_line_that_a_full_disk_cut_off_is_left_out(cache: CacheDir, put: Put) -> None:
    put(50_000)
    before = cache.layout.history.stat()
    epoch(cache)
    with cache.layout.history.open("ab") as file:
        file.write(b'\n{"ended": 17')
    os.utime(cache.layout.history, ns=(before.st_atime_ns, before.st_mtime_ns))
    epoch(cache, run="job")
    after = cache.layout.history.stat()
    assert [row["run"] for row in history_of(cache.layout).epochs] == [None, "job"]
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "no new file, time of the point"


def test_an_epoch_that_ended_is_not_running_after_the_file_was_written_anew(cache: CacheDir, put: Put) -> None:
    put(50_000)
    told = Delivered(6.0, 7, 3, 0.5, None, {"disk": 0.5}, (0.1, 0.2, 0.3))
    history.write_running(cache.layout, told, dataset="default", pid=cache.holder.pid, epoch=0)
    assert [row["epoch"] for row in history_of(cache.layout).running] == [0]
    # A point is due, so the file is written anew.
    os.utime(cache.layout.history, (0, 0))
    assert len(history_of(cache.layout).running) == 1
    epoch(cache, told)
    assert history_of(cache.layout).running == []
    assert [row["causes"] for row in history_of(cache.layout).epochs] == [{"disk": 0.5}]


def test_invalid_rows_are_left_out(cache: CacheDir, put: Put) -> None:
    put(50_000)
    epoch(cache)
    sound = history_of(cache.layout)
    points = [*sound.points, {**sound.points[0], "at": "soon"}, {**sound.points[0], "evicted": [1]}, 3]
    epochs = [*sound.epochs, {**sound.epochs[0], "run": 3}, {**sound.epochs[0], "ended": None}, {"ended": 1}]
    cache.layout.history.write_bytes(history._bytes(history.History(points, epochs)))  # type: ignore[list-item]
    assert history_of(cache.layout) == sound


def test_a_folder_or_link_in_place_of_the_history_file_is_removed(cache: CacheDir, put: Put, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for make in (lambda: cache.layout.history.mkdir(), lambda: cache.layout.history.symlink_to(tmp_path / "mine")):
        put(50_000)
        cache.layout.history.unlink(missing_ok=True)
        make()
        epoch(cache)
        assert len(history_of(cache.layout).epochs) == 1
    assert (tmp_path / "mine").read_text() == "precious"


def test_temporary_files_of_dead_processes_are_removed_and_those_of_living_ones_stay(cache: CacheDir, put: Put) -> None:
    aside = cache.layout.history_aside
    put(50_000)
    aside.touch()
    epoch(cache)
    assert len(history_of(cache.layout).epochs) == 1
    assert not aside.exists()

    for left in (aside.touch, lambda: aside.symlink_to("nowhere"), aside.mkdir):
        left()
        cache.recover()
        assert not os.path.lexists(aside)

    with aside.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.recover()
        epoch(cache)
        assert aside.exists()
    assert len(history_of(cache.layout).epochs) == 1


def test_the_history_adds_no_transaction(cache: CacheDir, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the catalog: the same number of writes with and without the history."""

    def writes() -> int:
        begun: list[str] = []
        transaction = type(cache.catalog)._transaction

        def counted(self: object, begin: str, *more: float) -> object:
            begun.append(begin)
            return transaction(self, begin, *more)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(type(cache.catalog), "_transaction", counted)
            put(50_000)
            epoch(cache)
            cache.evict(cache.usage().total - 1)
        return begun.count("BEGIN IMMEDIATE")

    put(50_000)
    with_it = writes()
    monkeypatch.setattr(history, "write", lambda *_, **__: None)
    monkeypatch.setattr(history, "due_point", lambda *_, **__: None)
    assert with_it == writes() > 0


def test_a_rebuilt_catalog_starts_a_new_history(cache: CacheDir, put: Put) -> None:
    put(50_000)
    epoch(cache, Delivered(2.0, 5, 1, 0.25), run="job", epoch=0)
    cache.close()
    rebuild(cache.layout)

    with open_cache(cache.root) as again:
        assert history_of(again.layout) == history.History([], [])
        assert again.stats("default").served == 0


def test_reuse_is_reported_per_source(cache: CacheDir, put: Put, tmp_path: Path) -> None:
    (tmp_path / "listing").mkdir()
    from cachetool.cache import Origin

    for name, fetched in (("1" * 16, 50_000), ("2" * 16, 200_000)):
        row = SourceRow(Id(name), f"s3://{name}/", {}, "i", "default", 9, 9, 0, 0, 0)
        cache.add_source(row, tmp_path / "listing")
        with cache.catalog.write() as connection:
            job, _ = draws.open_job(connection, name, holder=cache.holder.id, wanted=None, seed=None)
            held = draws.claim(connection, job, holder=cache.holder.id, most=2)
            assert held is not None
            draws.finish(connection, job, held, held.stop, samples=2, skipped=0, fetched=fetched)
        put(100_000, origin=Origin(name, f"s3://{name}/", 0, ((0, 2),)), room=Room(wait=0))
    for _ in range(3):
        epoch(cache)

    found = {row["url"]: (row["served"], row["reuse"]) for row in cache.stats().sources}
    assert found == {f"s3://{'1' * 16}/": (300_000, 6.0), f"s3://{'2' * 16}/": (300_000, 1.5)}


def test_pauses_between_pulls_are_recorded(cache: CacheDir, put: Put, clock: Callable[[float], None]) -> None:
    """Each pull, however short, has a point at its begin and a point at its end, with the totals of these moments."""

    def pulled(began: float, seconds: float, shards: int) -> tuple[int, int]:
        clock(began)
        history.edged(cache.catalog, cache.layout, lambda connection: None)
        before = cache.usage().total
        for number in range(shards):
            clock(began + seconds * number / shards)
            put(50_000)
        clock(began + seconds)
        history.edged(cache.catalog, cache.layout, lambda connection: None)
        return before, cache.usage().total

    told = {began: pulled(began, seconds, 3) for began, seconds in ((1e9, 0.3), (1e9 + 1000, 30.0), (1e9 + 5000, 0.5))}
    points = {point["at"]: point["used"] for point in history_of(cache.layout).points}
    for (began, (before, after)), seconds in zip(told.items(), (0.3, 30.0, 0.5), strict=True):
        assert points[began] == before
        assert points[began + seconds] == after


def test_pulls_without_a_pause_between_them_share_points(cache: CacheDir, clock: Callable[[float], None]) -> None:
    for hundredth in range(1000):
        clock(1e9 + hundredth / 100)
        history.edged(cache.catalog, cache.layout, lambda connection: None)

    points = [point["at"] for point in history_of(cache.layout).points]
    assert len(points) < 14
    assert points[-1] == 1e9 + 9.99


def test_a_pull_a_conversion_and_an_eviction_end_with_a_point_of_the_current_totals(
    cache: CacheDir, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    for number in range(20):
        (tmp_path / "source" / f"{number:02d}.bin").write_bytes(bytes(1000))
    with open_whole(cache.root) as whole:
        whole.pull(str(tmp_path / "source"), samples=20, shard_size="5kB", workers=1, dataset="new")
        first, *_, pulled = history_of(whole.layout).points
        assert (first["samples"], first["fetched"]) == (0, 0)
        assert (pulled["samples"], pulled["used"]) == (20, whole.usage().total)
        whole.convert(to="tfrecord")
        assert history_of(whole.layout).points[-1]["used"] == whole.usage().total
        whole.evict(whole.usage().total - 1)
        assert history_of(whole.layout).points[-1]["used"] == whole.usage().total
