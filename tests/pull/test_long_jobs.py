"""Pulls that outlive their keys, and slow stores: no pull gives up, and the fetched samples are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cachetool
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from cachetool.pull.options import PullOptions
from cachetool.sources.looked import LookedAt
from cachetool.stores import Object, open_store
from tests.servers import Scripted, folder_server, scripted_server, serve_file
from tests.temporary_keys import Keys, answer_s3, key_of, number_of


def until(holds: Callable[[], Any]) -> Any:
    """Wait until ``holds`` returns a true value, and return that value."""
    deadline = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come true in a minute"
        time.sleep(0.02)
    return found


class Bucket:
    """A bucket on its own server, whose keys expire."""

    def __init__(self, count: int, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.keys = count, keys
        self.valid = {"OLD"}
        self.asked: Counter[int] = Counter()
        """Number of requests for each object that were answered with it."""
        self.refused = 0
        self.at: dict[int, Callable[[], None]] = {}
        """Functions to call before the answer with this number, from 1."""
        self.gate = threading.Event()
        """An event that holds back the answers from :attr:`most` on."""
        self.most = sys.maxsize
        self._lock = threading.Lock()
        for name, value in keys.env.items():
            monkeypatch.setenv(name, value)

    def script(self, handler: Scripted) -> None:
        """Answer one request."""
        number = number_of(handler.path)
        with self._lock:
            if number is not None and (action := self.at.pop(self.asked.total() + 1, None)) is not None:
                action()
            good = key_of(handler.headers) in self.valid
            self.refused += not good
            if number is not None and good:
                self.asked[number] += 1
            held = number is not None and self.asked.total() > self.most
        if held and not self.gate.wait(60):
            handler.drop()
            return
        answer_s3(handler, self.count, accepts=lambda key: good)

    def expire(self, new: str = "NEW", *, write: bool = True) -> None:
        """Refuse the current keys from now on. Write other keys into the file if ``write``."""
        self.valid = {new}
        if write:
            self.keys.write(new)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return a bucket with 300 objects."""
    found = Bucket(300, Keys(tmp_path / "keys"), monkeypatch)
    with scripted_server(found.script) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield found
        found.gate.set()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cachetool.Cache]:
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as opened:
        yield opened


def held(cache: cachetool.Cache) -> list[str]:
    """Return the keys of all samples, each once, read by the formats' own libraries."""
    found: list[str] = []
    for shard in cache.shards():
        kind = get_format(shard.format)
        with open_shard(shard.path, kind, shard.schema, library=True, digest=shard.digest) as reader:
            block = reader.read(0, shard.samples)
        found += [block.sample(number)["__key__"] for number in range(shard.samples)]
    assert len(found) == len(set(found)), "a sample came twice"
    return sorted(found)


def test_a_pull_continues_with_new_keys_and_requests_each_object_once(bucket: Bucket, cache: cachetool.Cache) -> None:
    """Including the probed objects, which another process fetched."""
    bucket.at = {150: bucket.expire, 220: lambda: bucket.expire("NEWER")}
    result = cache.pull("s3://b/d/", all=True, workers=2, concurrency=4)

    assert result.samples == len(held(cache)) == 300
    assert bucket.refused
    assert set(bucket.asked.values()) == {1}
    assert len(bucket.asked) == 300


def test_a_pull_whose_keys_are_not_renewed_reports_it_and_keeps_all_fetched_samples(
    bucket: Bucket, cache: cachetool.Cache
) -> None:
    bucket.at = {200: lambda: bucket.expire(write=False)}
    with pytest.raises(cachetool.AccessDenied, match=r"expired.*; renew them") as caught:
        cache.pull("s3://b/d/", all=True, workers=1, concurrency=4)

    assert "\n" not in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("OLD", Keys.SECRET, Keys.TOKEN))
    assert len(held(cache)) == bucket.asked.total() == 199
    bucket.keys.write("NEW")
    assert cache.pull("s3://b/d/", all=True).samples == 300 - 199
    assert len(held(cache)) == 300
    assert cache.pull("s3://b/d/").reason == "source at its end"


def test_open_draws_between_finished_ones_are_known_after_a_rebuild(bucket: Bucket, tmp_path: Path) -> None:
    """Objects that arrive out of order are kept, so a shard may lack draws in its middle."""
    bucket.at = {200: lambda: bucket.expire(write=False)}
    root = tmp_path / "cache"
    with cachetool.open_cache(root, max_size="20MB") as cache:
        with pytest.raises(cachetool.AccessDenied):
            cache.pull("s3://b/d/", all=True, workers=1, concurrency=8)
        assert cache.catalog.rows("SELECT 1 FROM claims")
    (root / "catalog.sqlite3").unlink()
    repair = ["verify", "--repair", "--cache", str(root)]
    subprocess.run([sys.executable, "-m", "cachetool", *repair], check=True, capture_output=True)
    bucket.keys.write("NEW")
    with cachetool.open_cache(root) as cache:
        assert len(held(cache)) == 199
        assert cache.pull("s3://b/d/", all=True).samples == 300 - 199
        assert len(held(cache)) == 300


def test_a_background_pull_waits_for_new_keys_and_forgets_its_error(bucket: Bucket, cache: cachetool.Cache) -> None:
    bucket.at = {120: lambda: bucket.expire(write=False)}
    with cachetool.BackgroundPull(cache, "s3://b/d/", workers=1, concurrency=4) as pull:
        assert "ExpiredToken" in until(lambda: pull.error)
        assert pull.progress().phase == "retrying"
        assert pull.progress().alive
        until(lambda: cache.stats().samples == bucket.asked.total())
        (told,) = [event["text"] for event in cache.stats().errors]
        assert "ExpiredToken" in told
        bucket.keys.path.write_text("")  # a renewal may begin with an empty file
        bucket.keys.write("NEW")
        until(lambda: cache.stats().samples == 300)
        until(lambda: pull.error is None)
        pull.check()
    assert len(held(cache)) == 300


def test_a_pull_with_follow_waits_for_new_keys_and_reports_it_once(bucket: Bucket, tmp_path: Path) -> None:
    bucket.at = {120: lambda: bucket.expire(write=False)}
    command = ["pull", "s3://b/d/", "--follow", "--cache", tmp_path / "c", "--max-size", "20MB", "--workers", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "cachetool", *map(str, command)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            said = next(line for line in process.stderr if "warning" in line)
            assert "ExpiredToken" in said
            bucket.keys.write("NEW")
            until(lambda: len(bucket.asked) == 300)
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
    assert process.returncode == 130
    assert "warning" not in rest


def test_a_stopped_pull_keeps_the_fetched_samples(bucket: Bucket, tmp_path: Path) -> None:
    bucket.most = 150
    command = ["pull", "s3://b/d/", "--all", "--cache", tmp_path / "c", "--max-size", "20MB", "--workers", "1"]
    with subprocess.Popen([sys.executable, "-m", "cachetool", *map(str, command)], stderr=subprocess.PIPE) as process:
        until(lambda: bucket.asked.total() == 150 + 32)  # each of its threads waits for the answer to another request
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    with cachetool.open_cache(tmp_path / "c") as cache:
        assert len(held(cache)) == 150
        bucket.gate.set()
        cache.pull("s3://b/d/", all=True)
        assert len(held(cache)) == 300


@pytest.mark.parametrize("to", ["lmdb", "zarr"])
def test_the_first_shard_of_a_slow_store_is_committed_before_it_is_full(
    bucket: Bucket, cache: cachetool.Cache, to: str
) -> None:
    bucket.most = 100
    with cachetool.BackgroundPull(cache, "s3://b/d/", workers=1, to=to, first_shard_after=0.1) as pull:
        until(lambda: cache.stats().samples >= 64)  # while the store holds back the other objects
        first = cache.shards()[0].samples
        assert not bucket.gate.is_set()
        bucket.gate.set()
        until(lambda: cache.stats().samples == 300)
        pull.check()
    assert [shard.samples for shard in cache.shards()] == [first, 300 - first], "only the first is cut"
    assert len(held(cache)) == 300


def test_without_the_option_a_shard_closes_when_it_is_full(bucket: Bucket, cache: cachetool.Cache) -> None:
    cache.pull("s3://b/d/", all=True, workers=1, first_shard_after=None)
    assert [shard.samples for shard in cache.shards()] == [300]
    for value in (0, "0", "none", "None", None):
        assert PullOptions(first_shard_after=value).first_shard_seconds is None
    assert PullOptions(first_shard_after="1min").first_shard_seconds == 60
    with pytest.raises(cachetool.UsageError, match=r"--first-shard-after.*'soon'"):
        PullOptions(first_shard_after="soon")


def test_files_of_many_samples_also_have_an_early_first_shard(tmp_path: Path, cache: cachetool.Cache) -> None:
    import h5py
    import numpy as np

    (tmp_path / "files").mkdir()
    with h5py.File(tmp_path / "files" / "a.h5", "w") as file:
        file["x"] = np.arange(500 * 2000, dtype=np.int64).reshape(500, 2000)
    gate, large = threading.Event(), threading.Semaphore(20)

    def slow(handler: Scripted) -> None:
        """Hold back all answers except the first parts."""
        first, _, last = handler.headers.get("Range", "bytes=0-0").removeprefix("bytes=").partition("-")
        rows = (int(last) - int(first) + 1) % 16_000 == 0
        if rows and not large.acquire(blocking=False) and not gate.wait(60):
            handler.drop()
            return
        serve_file(handler, tmp_path / "files", "html")

    with scripted_server(slow) as http:
        url = f"{http.url}/a.h5"
        with cachetool.BackgroundPull(
            cache, url, workers=1, first_shard_after=0.1, concurrency=4, shard_size="10MB"
        ) as pull:
            until(lambda: cache.stats().samples)
            assert not gate.is_set()
            gate.set()
            until(lambda: cache.stats().samples == 500)
            pull.check()
    assert len(held(cache)) == 500


def test_probed_objects_are_kept_once_and_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetool.sources.looked.MOST", 25)
    files = tmp_path / "files"
    files.mkdir()
    for name in "abc":
        (files / name).write_bytes(name.encode() * 10)
    with folder_server(files) as http:
        looked = LookedAt(tmp_path / "looked")
        items = {name: open_store(f"{http.url}/").find(name) for name in "abc"}
        first = looked.kept_of(open_store(f"{http.url}/"))
        for item in items.values():
            first.get(item)
        first.close()
        assert (tmp_path / "looked" / "bodies").stat().st_size == 20, "there is no room for the third"
        http.requests.clear()

        second = looked.over(open_store(f"{http.url}/"))
        assert [bytes(second.get(items[name])) for name in "abc"] == [b"a" * 10, b"b" * 10, b"c" * 10]
        assert [path for path, _ in http.requests] == ["/c"]
        assert bytes(second.get(items["a"])) == b"a" * 10
        assert [path for path, _ in http.requests] == ["/c", "/a"], "later passes see what the store has then"

        third = looked.over(open_store(f"{http.url}/"))
        assert bytes(third.get_range(items["b"], 2, 3)) == b"bbb"
        http.requests.clear()
        other = Object("a", 10, "another version")
        with pytest.raises(cachetool.BadObject, match="changed"):
            third.get(other)
        assert os.listdir(tmp_path / "looked")
