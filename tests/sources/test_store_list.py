"""Listing a store by several threads, and listings that were killed: the listing is the same, and no page is requested
twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachetool.core.errors import SourceError, Unreachable
from cachetool.sources import store_list
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source
from cachetool.sources.store_list import StoreList
from cachetool.stores import Object, open_store
from cachetool.stores.base import LeftOut, Pages
from tests.servers import Http, key_server

KEYS = [
    f"{split}/n{folder:03d}/{at:05d}.bin" for split in ("train", "val") for folder in range(40) for at in range(200)
]
KEYS += ["train.bin", "train/n007.bin", "train/n007-x.bin", "train/n007/", "zz.bin", "train/é/ü.bin", "train/~/x.bin"]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use ``scratch`` as the folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def server(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Http]:
    with key_server(KEYS) as (env, state):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield state


def lists(server: Http) -> list[str]:
    return [path for path, _ in server.requests if "list-type" in path]


@pytest.mark.parametrize("workers", [2, 7])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_many_threads_create_the_same_listing_as_one(
    server: Http, tmp_path: Path, workers: int, skip_bad: bool
) -> None:
    one = list_source("s3://b", tmp_path / "one", skip_bad=skip_bad)
    serial = len(lists(server))
    many = list_source("s3://b", tmp_path / "many", SourceOptions(list_workers=workers), skip_bad=skip_bad)

    assert many.identity == one.identity
    assert dict(many.left_out) == dict(one.left_out) == {"folder markers": 1}
    assert one.objects == len(KEYS) - 1
    asked = lists(server)[serial:]
    assert sum("delimiter" in path for path in asked) == 3  # the place, train, val
    assert len(asked) <= serial + 3 + 8 * workers


def test_a_place_without_folders_is_listed_by_one_thread(server: Http, tmp_path: Path) -> None:
    one = list_source("s3://b/train/n001", tmp_path / "one", SourceOptions(list_workers=8))

    assert one.objects == 200
    assert len(lists(server)) == 2


CHILD = """
import sys
from pathlib import Path
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source

options = SourceOptions(list_workers=int(sys.argv[2]))
list_source("s3://b", Path(sys.argv[1]), options, progress=lambda number: print(number, flush=True))
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_listing_continues_where_it_stopped(scratch: Path, tmp_path: Path, workers: int) -> None:
    keys = [f"{folder:02d}/{at:06d}.bin" for folder in range(10) for at in range(10_000)]
    with key_server(keys, delay=0.01) as (env, server), pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        command = [sys.executable, "-c", CHILD, str(tmp_path / "killed"), str(workers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            while int(child.stdout.readline()) < 60_000:
                pass
            child.send_signal(signal.SIGKILL)
        (left,) = scratch.glob("cachetool-listed-*")
        before = len(lists(server))
        there = list_source("s3://b", tmp_path / "there", SourceOptions(list_workers=workers))
        asked = len(lists(server)) - before
        assert not list(scratch.glob("cachetool-listed-*"))
        before = len(lists(server))
        anew = list_source("s3://b", tmp_path / "anew", SourceOptions(list_workers=workers))

        assert left.name.startswith("cachetool-listed-")
        assert there.identity == anew.identity
        assert asked < 50 < 100 <= len(lists(server)) - before


class Ordered:
    """A store whose list breaks once, or is not in order."""

    url, concurrency = "s3://b", 4
    left_out = LeftOut({"folder markers": 2})

    def __init__(self, pages: int, breaks: int = 0, *, order: int = 1, error: type[SourceError] = Unreachable) -> None:
        self.keys = [[Object(f"{page:05d}.bin", 1, None)] for page in range(pages)][::order]
        self.where = "here"
        self.breaks, self.asked, self.error = breaks, [0], error

    def list_after(self, key: str | None, upto: str | None = None) -> Pages:
        for page in self.keys:
            if key is not None and page[0].key <= key:
                continue
            self.asked[0] += 1
            if self.asked[0] == self.breaks:
                raise self.error("it is away")
            yield page

    def place(self) -> str:
        return self.where

    list = find = get = get_range = close = list_after

    def folders(self, folder: str) -> tuple[str, ...]:
        return () if folder else ("00010", "00020")


def keys_of(store: Ordered, workers: int = 1, purpose: str = "") -> list[str]:
    with StoreList(store, workers=workers, purpose=purpose) as of_store:  # type: ignore[arg-type]
        first = [item.key for page in of_store.pages() for item in page]
        asked = store.asked[0]
        again = [item.key for page in of_store.pages() for item in page]
        if store.keys == sorted(store.keys, key=lambda page: page[0].key):
            assert store.asked[0] == asked
        assert sorted(again) == sorted(first)
        assert of_store.left_out["folder markers"] >= 2
        return first


@pytest.mark.parametrize("pages", [5, 32, 33, 100])
def test_kept_pages_are_returned_without_a_request(scratch: Path, pages: int) -> None:
    assert keys_of(Ordered(pages)) == [f"{page:05d}.bin" for page in range(pages)]
    assert not list(scratch.iterdir())


def test_pages_received_before_an_outage_are_not_requested_again(scratch: Path) -> None:
    with pytest.raises(Unreachable):
        keys_of(Ordered(100, breaks=60))
    later = Ordered(100)

    assert keys_of(later) == [f"{page:05d}.bin" for page in range(100)]
    assert later.asked[0] == 41
    assert not list(scratch.iterdir())


def test_an_error_other_than_an_outage_keeps_no_pages(scratch: Path) -> None:
    with pytest.raises(SourceError):
        keys_of(Ordered(100, breaks=60, error=SourceError))

    assert not list(scratch.iterdir())


@pytest.mark.parametrize("other", ["place", "purpose", "old"])
def test_a_listing_of_another_place_or_time_is_not_continued(scratch: Path, other: str) -> None:
    with pytest.raises(Unreachable):
        keys_of(Ordered(100, breaks=60))
    later = Ordered(100)
    if other == "place":
        later.where = "there"
    elif other == "old":
        (log,) = scratch.glob("*/pages.log")
        os.utime(log, (time.time() - 1e6,) * 2)
    keys_of(later, purpose="refresh" if other == "purpose" else "")

    assert later.asked[0] == 100
    assert len(list(scratch.iterdir())) == (other != "old")


@pytest.mark.parametrize("damage", ["cut", "flip", "head"])
def test_pages_lost_from_the_log_are_requested_again(scratch: Path, damage: str) -> None:
    with pytest.raises(Unreachable):
        keys_of(Ordered(100, breaks=60))
    (log,) = scratch.glob("*/pages.log")
    raw = bytearray(log.read_bytes())
    if damage == "cut":
        del raw[-3:]
    else:
        raw[12 if damage == "head" else len(raw) // 2] ^= 1
    log.write_bytes(raw)
    later = Ordered(100)

    assert keys_of(later) == [f"{page:05d}.bin" for page in range(100)]
    assert 41 < later.asked[0] <= 100


def test_an_unordered_store_is_listed_without_kept_pages_and_segments(scratch: Path) -> None:
    assert len(keys_of(Ordered(50, order=-1))) == 50
    with pytest.raises(SourceError, match="--list-workers needs; leave it out"):
        keys_of(Ordered(50, order=-1), workers=2)
    assert not list(scratch.iterdir())
    assert store_list._SHORT < 50


def test_the_store_of_a_bucket_includes_its_server_in_its_name(server: Http) -> None:
    assert server.url in open_store("s3://b").place()  # type: ignore[attr-defined]
