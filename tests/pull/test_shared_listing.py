"""One listing for all nodes: the first node lists, all others wait for its listing and copy it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachetool.core.errors import UsageError
from cachetool.pull import shared_listing
from cachetool.pull.options import PullOptions
from cachetool.pull.shared_listing import Turn, agree, fetch, fetch_newer, publish
from cachetool.sources.keys import Stem
from cachetool.sources.listing import Listing, write_listing
from cachetool.sources.segments import SegmentedListing, segment_name, write_changes
from cachetool.stores import Object
from tests.servers import Http, key_server
from tests.test_parts import keys_in, pulled, write

REPOSITORY = Path(__file__).parents[2]
PAGES = 6


def lists(server: Http) -> int:
    return sum("list-type" in path for path, _ in server.requests)


@pytest.fixture
def server() -> Iterator[tuple[dict[str, str], Http]]:
    with key_server([f"{at:06d}.bin" for at in range(1000 * PAGES)], delay=0.5) as pair:
        yield pair


def test_one_of_several_simultaneous_nodes_lists_the_source(
    tmp_path: Path, server: tuple[dict[str, str], Http]
) -> None:
    env, state = server
    shared = tmp_path / "shared"
    shared.mkdir()

    def run(*more: str) -> None:
        commands = [
            [
                *(sys.executable, "-m", "cachetool", "pull", "s3://b", "--cache", str(tmp_path / str(node)), "--quiet"),
                *("--part", f"{node}/3", "--samples", "30", "--listing", str(shared), "--workers", "1", *more),
                *("--max-size", "200MB"),
            ]
            for node in range(3)
        ]
        environment = {**os.environ, **env, "PYTHONPATH": str(REPOSITORY)}
        nodes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for command in commands]
        assert [(node.communicate()[1], node.returncode) for node in nodes] == [(b"", 0)] * 3

    run()
    assert lists(state) == PAGES
    assert sum(keys_in(*(tmp_path / str(node) for node in range(3))).values()) == 30
    assert {path.name for path in shared.iterdir()} == {(name := next(shared.glob("*.lock")).stem), f"{name}.lock"}
    run("--refresh")
    assert lists(state) == 2 * PAGES


def test_a_refresh_copies_all_newer_listings_without_listing_itself(tmp_path: Path) -> None:
    source, shared = tmp_path / "source", tmp_path / "shared"
    shared.mkdir()
    options = {"listing": shared, "all": True}
    write(source, range(10))
    for node in (0, 1):
        pulled(tmp_path / str(node), source, part=f"{node}/2", **options)
    for more in (20, 30, 40):
        write(source, range(more - 10, more))
        first = pulled(tmp_path / "0", source, part="0/2", refresh=True, **options)
        assert first.added == 10
    write(source, range(40, 50))  # no node has listed these yet
    (source / "0003.npy").unlink()
    second = pulled(tmp_path / "1", source, part="1/2", refresh=True, **options)
    assert (second.added, second.vanished) == (30, 0)
    assert second.listing == first.listing
    third = pulled(tmp_path / "1", source, part="1/2", refresh=True, **options)
    assert (third.added, third.vanished) == (10, 1)
    again = pulled(tmp_path / "0", source, part="0/2", refresh=True, **options)
    assert (again.added, again.vanished, again.listing) == (10, 1, third.listing)
    assert sorted(keys_in(tmp_path / "0", tmp_path / "1")) == [f"{number:04d}" for number in range(50)]
    assert pulled(tmp_path / "0", source, part="0/2", refresh=True, **options).added == 0


def listing(folder: Path, count: int) -> Listing:
    return write_listing(folder, [[Object(f"{at}.bin", 1) for at in range(count)]], stem=Stem("first"), url="u")


def test_a_segment_that_no_catalog_has_is_not_shared(tmp_path: Path) -> None:
    """A segment of an unfinished transaction lies in the folder and is not part of the listing."""
    listing(tmp_path / "own", 10)
    old = SegmentedListing.open(tmp_path / "own")
    write_changes(tmp_path / "own" / segment_name(1), old, listing(tmp_path / "fresh", 15))
    assert publish(listing(tmp_path / "first", 10).folder, tmp_path / "shared")

    agree(SegmentedListing.open(tmp_path / "own", units=10).parts, tmp_path / "shared")

    assert fetch_newer(tmp_path / "shared", tmp_path / "own", 1) == []


def test_copies_of_killed_processes_are_deleted_after_a_day(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    names = ("source.0123456789ab", "source.abcdefabcdef", "source.lock", "other.0123456789ab")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text("x")
        os.utime(tmp_path / name, (time.time() - 86_000 * (1 + (name[7] != "a")),) * 2)
    listing(shared / "own", 5)

    publish(shared / "own", tmp_path / "source")

    assert {path.name for path in tmp_path.iterdir()} == {"shared", "source", *names} - {"source.0123456789ab"}
    assert fetch(tmp_path / "source", tmp_path / "copy")


def test_a_waiting_node_learns_whether_another_node_listed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_listing, "_POLL", (0.01, 0.02))
    waiting = threading.Event()
    answers = []

    def wait() -> None:
        with Turn(tmp_path / "s", waiting.set) as turn:
            answers.append(turn.others_looked)

    for has_looked in (True, False):
        waiting.clear()
        with Turn(tmp_path / "s", lambda: None) as turn:
            assert not turn.others_looked
            thread = threading.Thread(target=wait)
            thread.start()
            assert waiting.wait(30)
            if has_looked:
                turn.looked()
        thread.join(30)
    assert answers == [True, False]


def test_no_node_waits_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with Turn(tmp_path / "s", lambda: None), Turn(tmp_path / "s", lambda: None) as turn:
        assert not turn.others_looked


def test_a_url_is_refused_as_the_folder_of_listings() -> None:
    with pytest.raises(UsageError, match=r"--listing 's3://b/l' is a URL; name a folder that all nodes see$"):
        PullOptions(listing="s3://b/l")
