"""``missing="refetch"``: evicted shards of an epoch come back as they were, in a full cache too; what fails leaves the
cache and the state as they were."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool import Cache
from cachetool.cache import CacheDir
from cachetool.cache.again import Wanted, reserve
from cachetool.cache.removal import retire
from cachetool.check.own_files import contradiction
from cachetool.core.errors import BadObject, CacheToolError, UsageError
from cachetool.loaders.numpy import Loader
from cachetool.loaders.settings import Settings
from cachetool.loaders.snapshots import epochs
from cachetool.loaders.snapshots.resume import Resume
from cachetool.loaders.view import View
from cachetool.proc.boot import boot
from cachetool.pull.background import BackgroundPull
from cachetool.pull.claims import order_of_pass
from cachetool.sources import SourceOptions, open_source
from tests.loaders.numbered import KEYED, leases
from tests.loaders.processes import until

EACH = [0, 2]
OPTIONS: dict[str, Any] = {"batch_size": 4, "fields": ["npy"], "seed": 2}
SHARDS, EACH_SHARD = 8, 10
"""A cap of 4 MB holds nine such shards."""


def write(source: Path, number: int, of: int | None = None) -> None:
    np.save(source / f"{number:03d}.npy", np.random.default_rng(number if of is None else of).random(3000))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of 300 samples of 24 kB."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(300):
        write(folder, number)
    return folder


@pytest.fixture
def cache(tmp_path: Path, source: Path) -> Iterator[Cache]:
    with cachetool.open_cache(tmp_path / "cache", max_size="4MB") as opened:
        opened.pull(str(source), samples=SHARDS * EACH_SHARD)
        assert [shard.samples for shard in opened.shards()] == [EACH_SHARD] * SHARDS
        yield opened


def left(cache: CacheDir, workers: int = 0, **options: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The state of a loader after three batches of an epoch, and the others of it."""
    with Loader(cache.root, workers=workers, **{**OPTIONS, **options}) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        return state, [batch["npy"].tobytes() for batch in batches]


def resumed(cache: CacheDir, state: dict[str, Any], workers: int = 0, missing: str = "refetch") -> list[bytes]:
    with Loader(cache, workers=workers, missing=missing, **OPTIONS) as loader:
        loader.load_state_dict(state)
        return [batch["npy"].tobytes() for batch in loader]


def ids(cache: CacheDir) -> set[str]:
    return {shard.id for shard in cache.shards()}


def drawn(cache: Cache, shard: dict[str, Any]) -> int:
    """The number of the first sample of a shard."""
    row = cache.source(shard["source"])
    assert row is not None
    opened = open_source(row.url, cache.listing(row.id), SourceOptions.from_json(row.options), units=row.units)
    with contextlib.closing(opened):
        [[start, _]] = shard["draws"]
        return int(order_of_pass(opened, row, shard["turn"])[np.arange(start, start + 1)][0])


def origin(cache: Cache, shard: str) -> int:
    """The pass that drew a shard."""
    row = cache.catalog.one("SELECT turn FROM shards WHERE id = ?", (shard,))
    assert row is not None
    return int(row["turn"])


def sound(cache: Cache) -> None:
    """Nothing is left over: no claim, no lease; the files say what the catalog does."""
    assert leases(cache) == []
    assert not cache.catalog.rows("SELECT 1 FROM jobs")
    assert contradiction(cache.catalog, cache.layout) is None
    assert cache.usage().total <= cache.max_size


@pytest.mark.parametrize(
    ("workers", "others"),
    [(0, 50), (2, 80), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((0, 80), (2, 50)))],
)
def test_in_a_full_cache_shards_that_the_epoch_has_not_make_room(
    cache: Cache, source: Path, workers: int, others: int
) -> None:
    state, rest = left(cache, workers)
    before = ids(cache)
    cache.pull(str(source), samples=others)
    assert (kept := before & ids(cache)) != before

    assert resumed(cache, state, workers) == rest
    assert kept <= ids(cache)
    sound(cache)
    now = ids(cache)
    assert resumed(cache, state, workers) == rest  # nothing is pulled a second time
    assert ids(cache) == now
    assert cache.pull(str(source), samples=20).samples == 20  # and what was not drawn yet still comes


def test_all_shards_come_back_in_one_pull_at_any_place_of_the_pass(cache: Cache, source: Path) -> None:
    """Also once the pass is at its end, and a claim of its draws is open to any pull."""
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    for _ in range(3):
        cache.pull(str(source), samples=50)
    with cache.catalog.write() as connection:  # as an earlier version left it that was killed
        row = connection.execute("SELECT id FROM sources").fetchone()
        connection.execute("INSERT INTO claims (source, turn, start, stop) VALUES (?, 0, 5, 35)", (row["id"],))
    assert resumed(cache, state) == rest
    assert [tuple(row) for row in cache.catalog.rows("SELECT start, stop FROM claims")] == []
    sound(cache)


@pytest.mark.parametrize("workers", EACH)
def test_what_fails_leaves_state_and_cache_as_they_were(cache: Cache, source: Path, workers: int) -> None:
    state, rest = left(cache, workers)
    cache.pull(str(source), samples=80)
    there = ids(cache)
    aside = source.rename(source.with_name("aside"))
    with pytest.raises(CacheToolError, match="source"):
        resumed(cache, state, workers)
    assert ids(cache) == there
    sound(cache)
    aside.rename(source)
    assert cache.pull(str(source), samples=20).samples == 20  # does not draw what the epoch had
    assert resumed(cache, state, workers) == rest
    sound(cache)


def test_one_that_fails_in_the_middle_keeps_what_came(cache: Cache, source: Path) -> None:
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    before = ids(cache)
    gone = [shard for shard in state["resume"]["origins"] if shard["id"] not in before]
    bad = source / f"{drawn(cache, gone[-1]):03d}.npy"
    aside = bad.rename(bad.with_suffix(".aside"))
    with pytest.raises(CacheToolError, match=bad.name):
        resumed(cache, state)
    assert len(ids(cache) - before) < SHARDS
    sound(cache)
    cache.pull(str(source), samples=10)
    aside.rename(bad)
    assert resumed(cache, state) == rest
    sound(cache)


def test_a_pull_without_an_end_takes_none_of_it_meanwhile(cache: Cache, source: Path) -> None:
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    with BackgroundPull(cache, str(source)):
        for _ in range(3):
            assert resumed(cache, state) == rest


def test_whoever_waits_for_another_reader_says_so(
    cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    monkeypatch.setattr(epochs, "FIRST", 0.0)
    reader = cache.snapshot()
    said: list[str] = []
    wrong: list[str | None] = []

    def waits() -> bool:
        said.append(capsys.readouterr().err)
        return "waiting for room" in said[-1]

    def let_go() -> None:
        until(waits)
        wrong.append(contradiction(cache.catalog, cache.layout))
        reader.release()

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        monkeypatch.setattr(epochs, "AGAIN", 0.0)
        assert resumed(cache, state) == rest
    finally:
        reader.release()
        thread.join()
    assert f"pid {os.getpid()}" in said[-1]
    assert "cachetool: pulling evicted shards of the epoch to resume again: " in said[-1]
    assert "version 0" not in said[-1], "itself"
    assert wrong == [None], "what is drawn again is done all the while"


def test_killed_in_the_middle_it_can_be_tried_again(cache: Cache, source: Path) -> None:
    """Whatever is pulled between the two attempts."""
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    reader = cache.snapshot()  # it waits for this one
    shards = state["resume"]["origins"]
    task = {
        "target": "cachetool.pull.refetch:refetch",
        "arguments": {"root": str(cache.root), "shards": shards, "keep": []},
        "starter": os.getpid(),
    }
    with subprocess.Popen(
        [sys.executable, "-c", boot("cachetool.proc.child")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    ) as helper:  # fmt: skip
        assert helper.stdin is not None
        helper.stdin.write(json.dumps(task).encode() + b"\n")
        helper.stdin.flush()
        until(lambda: bool(cache.catalog.rows("SELECT 1 FROM claims WHERE job LIKE 'again-%'")))
        os.killpg(helper.pid, signal.SIGKILL)
    reader.release()
    cache.recover()
    assert not cache.catalog.rows("SELECT 1 FROM claims WHERE job LIKE 'again-%' OR start < 80")
    cache.pull(str(source), samples=20)
    assert resumed(cache, state) == rest
    sound(cache)


def test_two_that_resume_at_once_pull_each_shard_once(cache: Cache, source: Path) -> None:
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    found: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(resumed(cache, state))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [rest, rest]
    contents = [shard.content for shard in cache.shards()]
    assert len(contents) == len(set(contents))
    sound(cache)


def test_a_source_that_is_another_now_is_said_to_be(cache: Cache, source: Path) -> None:
    state, _ = left(cache)
    cache.evict(cache.usage().total - cache.shards()[0].bytes)
    for number in range(300):
        write(source, number, of=number + 1000)
    with pytest.raises(CacheToolError, match=r"changed|not what it was"):
        resumed(cache, state)
    assert leases(cache) == []


def test_what_the_source_has_now_does_not_take_the_place_of_what_it_had(cache: Cache, source: Path) -> None:
    """Also where neither size nor time of a file tells: the content does."""
    state, rest = left(cache)
    cache.pull(str(source), samples=80)
    there = ids(cache)
    times = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    for number in range(300):
        write(source, number, of=number + 1000)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    with pytest.raises(BadObject, match=r"(?s)8 shards of the epoch.*not give the same samples.*missing='skip'"):
        resumed(cache, state)
    assert ids(cache) <= there
    sound(cache)
    for number in range(300):
        write(source, number)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    assert resumed(cache, state) == rest


def test_archives_that_differ_in_size_come_again_as_they_were(tmp_path: Path) -> None:
    source = tmp_path / "tars"
    source.mkdir()
    for number in range(60):
        with tarfile.open(source / f"{number:03d}.tar", "w") as archive:
            for each in range(1 + 11 * (number % 7 == 0)):
                file = io.BytesIO()
                np.save(file, np.random.default_rng(100 * number + each).random(500))
                info = tarfile.TarInfo(f"{number:03d}-{each:02d}.npy")
                info.size = len(file.getvalue())
                archive.addfile(info, io.BytesIO(file.getvalue()))
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        cache.pull(str(source), read_as="files", samples=90, shard_size="80kB")
        sizes = {shard.samples for shard in cache.shards()}
        assert len(sizes) > 1
        state, rest = left(cache)
        cache.evict(cache.usage().total - sum(shard.bytes for shard in cache.shards()))
        assert cache.shards() == []
        assert resumed(cache, state) == rest
        sound(cache)


def test_draws_that_gave_nothing_give_nothing_again_and_count_once(cache: Cache, source: Path) -> None:
    for number in range(0, 300, 50):
        (source / f"{number:03d}.npy").write_bytes(b"no array")
    with cachetool.open_cache(cache.root.with_name("other"), max_size="12MB") as other:
        pulled = other.pull(str(source), samples=290, on_error="skip")
        assert pulled.skipped == 6
        state, rest = left(other)
        other.evict(other.usage().total - sum(shard.bytes for shard in other.shards()))
        before = other.catalog.rows("SELECT skipped, frontier FROM sources")
        assert resumed(other, state) == rest
        assert other.catalog.rows("SELECT skipped, frontier FROM sources") == before
        sound(other)


@pytest.mark.parametrize("workers", EACH)
def test_asking_for_the_length_does_not_wait_for_the_epoch_that_was_left(
    cache: Cache, source: Path, workers: int
) -> None:
    with Loader(cache, workers=workers, missing="refetch", **OPTIONS) as loader:
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch["npy"].tobytes() for batch in batches]
    cache.pull(str(source), samples=80)
    with Loader(cache, workers=workers, missing="refetch", **OPTIONS) as loader:
        next(iter(loader))  # and leaves it there
        loader.load_state_dict(state)
        assert len(loader) == 1 + len(rest)
        assert [batch["npy"].tobytes() for batch in loader] == rest


def test_draws_of_another_pass_or_cache_are_refused(cache: Cache, source: Path, tmp_path: Path) -> None:
    state, _ = left(cache)
    with cachetool.open_cache(tmp_path / "new", max_size="4MB") as new:
        new.pull(str(source), samples=20)
        there = ids(new)
        with pytest.raises(UsageError, match="has not drawn its samples yet"):
            resumed(new, state)
        assert ids(new) == there
        sound(new)
    for _ in range(5):  # a pass goes by
        cache.pull(str(source), samples=60)
    row = cache.source(state["resume"]["origins"][0]["source"])
    assert row is not None
    assert row.pass_number == 1
    with pytest.raises(UsageError, match=r"its pass over .* is over"):
        resumed(cache, state)
    shards = [Wanted("a", 0, ((0, 10),), 10, "")]
    with cache.catalog.write() as connection, pytest.raises(UsageError, match="is over"):
        reserve(connection, cache.layout, "again-1", row, shards, holder="me")
    sound(cache)


def test_shards_that_go_around_what_was_cached_come_again(cache: Cache, source: Path) -> None:
    """As those of a further pass do."""
    for _ in range(6):
        cache.pull(str(source), samples=60)
    state, rest = left(cache)
    ranges = [len(shard["draws"]) for shard in state["resume"]["origins"] if shard["turn"] == 1]
    assert max(ranges) > 1
    cache.evict(cache.usage().total - sum(shard.bytes for shard in cache.shards() if origin(cache, shard.id) == 1))
    gone = [shard for shard in state["resume"]["origins"] if shard["id"] not in ids(cache)]
    assert [shard["turn"] for shard in gone if shard["turn"] == 0] == []
    cache.pull(str(source), samples=20)
    assert resumed(cache, state) == rest
    sound(cache)


def test_archives_with_a_bad_member_come_again_without_it(tmp_path: Path) -> None:
    source = tmp_path / "tars"
    source.mkdir()
    for number in range(40):
        with tarfile.open(source / f"{number:03d}.tar", "w") as archive:
            for each in range(3):
                file = io.BytesIO()
                np.save(file, np.random.default_rng(100 * number + each).random(500))
                body = b"no array" if (number, each) == (7, 1) else file.getvalue()
                info = tarfile.TarInfo(f"{number:03d}-{each:02d}.npy")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    with cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache:
        cache.pull(str(source), read_as="files", everything=True, shard_size="80kB", on_error="skip")
        assert sum(shard.samples for shard in cache.shards()) in (117, 119)
        state, rest = left(cache)
        cache.evict(cache.usage().total - sum(shard.bytes for shard in cache.shards()))
        assert resumed(cache, state) == rest
        sound(cache)


def test_nothing_is_pulled_when_one_of_several_sources_cannot_bring_its_shards(
    cache: Cache, source: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for number in range(20):
        write(small, number)
    cache.evict(cache.usage().total - sum(shard.bytes for shard in cache.shards()[:4]))
    cache.pull(str(small), samples=20)
    state, _ = left(cache)
    cache.evict(cache.usage().total - sum(shard.bytes for shard in cache.shards()))
    cache.pull(str(small), samples=10)  # another pass
    there = ids(cache)
    with pytest.raises(UsageError, match=r"its pass over .*small is over"):
        resumed(cache, state)
    assert ids(cache) == there


def test_a_pass_waits_for_shards_that_come_back(cache: Cache, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its draws are done all the while."""
    for _ in range(3):
        cache.pull(str(source), samples=60)
    state, rest = left(cache)
    cache.pull(str(source), samples=40)
    assert cache.stats().sources[0]["drawn"] == 300
    reader = cache.snapshot()
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(resumed(cache, state)))
    thread.start()
    try:
        until(lambda: bool(cache.catalog.rows("SELECT 1 FROM claims WHERE job LIKE 'again-%'")))
        assert cache.stats().sources[0]["drawn"] == 300
        with pytest.raises(UsageError, match="come back at this moment, for an epoch that goes on; run this again"):
            cache.pull(str(source), samples=20)
    finally:
        reader.release()
        thread.join()
    assert found == [rest]
    assert cache.pull(str(source), samples=20).samples == 20


@pytest.mark.parametrize("workers", EACH)
def test_ranks_share_the_snapshot_of_the_first_of_them(cache: Cache, source: Path, workers: int) -> None:
    """Also when some of it is on its way out: the first one looked ahead to the next epoch, which is to have others."""
    state, rest = left(cache)
    cache.pull(str(source), samples=60)
    options = {**OPTIONS, "workers": workers, "missing": "refetch", "world_size": 2, "run": "shared"}
    with Loader(cache, rank=0, **options) as first, Loader(cache, rank=1, **options) as second:
        for loader in (first, second):
            loader.load_state_dict(state)
        mine = [batch["npy"] for batch in first]
        oldest = cache.shards()[0].id
        with cache.catalog.write() as connection:  # as the snapshot of the next epoch does, for a pull
            retire(connection, [oldest], reason="renewal", policy="oldest")
        there = ids(cache)
        yours = [batch["npy"] for batch in second]
        assert ids(cache) == there
    found = {sample.tobytes() for batch in [*mine, *yours] for sample in batch}
    assert found == {rest_of[at : at + 24_000] for rest_of in rest for at in range(0, len(rest_of), 24_000)}


def test_a_state_without_its_parts_is_none(cache: Cache) -> None:
    state, _ = left(cache)
    state["resume"]["parts"] = []
    with Loader(cache, workers=0, **OPTIONS) as loader, pytest.raises(UsageError, match="its 'resume' is"):
        loader.load_state_dict(state)


def test_snapshots_that_others_take_let_nothing_go_meanwhile(cache: Cache, source: Path) -> None:
    """While a pull without an end wants room and evicted shards come back, which are to be read."""
    cache.snapshot().release()
    with BackgroundPull(cache, str(source)):
        until(lambda: bool(cache.catalog.rows("SELECT 1 FROM jobs WHERE hungry > 0")))
        with cache.snapshot(empty=True):
            now = ids(cache)
            for _ in range(3):
                cache.snapshot().release()
            assert now <= ids(cache)


def test_an_epoch_of_which_nothing_is_left_says_that_it_ends(
    cache: Cache, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, _ = left(cache)
    cache.pull(str(source), samples=80)
    cache.pull(str(source), samples=10)
    assert resumed(cache, state, missing="skip") == []
    said = "cachetool: none of the 8 shards of epoch 0 is left, which was to be resumed: it ends at once\n"
    assert said in capsys.readouterr().err


def test_shards_of_which_nothing_is_known_cannot_come_again(cache: Cache) -> None:
    resume = Resume(0, 8, [["a", 1, 8, "content"]])
    with pytest.raises(UsageError, match="shard a of the epoch to resume was not pulled"):
        epochs.refetch_missing(Settings(str(cache.root)), View(1, "default", KEYED, ()), resume)
