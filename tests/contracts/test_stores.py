"""The contract of every store: each test runs for a folder, an S3 bucket, web servers with three kinds of listing, and
fsspec.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachetool.core.errors import BadObject, NotFound, SourceError
from cachetool.stores import Object, Store, open_store
from tests.servers import folder_server, hub_server, sftp_server

CONTENT = {"a.npy": b"alpha", "b/c.json": bytes(range(256)) * 40, "b/d/e.txt": b"deep", "b/zero.bin": b""}
ODD_NAMES = [
    "sp ace.npy",
    "%2e.npy",
    "%zz.npy",
    "hash#1.npy",
    "hash#1",
    "question?x=1&y.npy",
    "plus+.npy",
    "-lead.npy",
    "[b]{c}~'\"<>|*.npy",
    "back\\slash.npy",
    "e\u0301.npy",
    "\u00e9.npy",
    "CASE.npy",
    "case.npy",
    "\U0001f600.npy",
    "\u202egpj.npy",
]


@dataclass
class Place:
    """A remote place, and the changes that tests make to it without the store."""

    url: str
    put: Callable[[str, bytes], None]
    delete: Callable[[str], None]
    missing_url: str
    """The URL of a neighbouring place that does not exist."""
    has_identity: bool = True
    """True if the listing reveals that an object was replaced by one of the same size."""
    env: dict[str, str] | None = None

    def open(self) -> Store:
        return open_store(self.url)

    def items(self) -> dict[str, Object]:
        """Return the listing, by key."""
        with contextlib.closing(self.open()) as store:
            return {item.key: item for page in store.list() for item in page}


def _folder_place(root: Path, url: str, **more: object) -> Place:
    root.mkdir()
    ticks = iter(range(1_700_000_000, 1_800_000_000))

    def put(key: str, body: bytes) -> None:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        tick = next(ticks)  # sets a distinct modification time, as on a store that is slower than this test
        os.utime(path, (tick, tick))

    return Place(url, put, lambda key: (root / key).unlink(), f"{url.rstrip('/')}-missing", **more)  # type: ignore[arg-type]


@pytest.fixture(params=["local", "s3", "http-json", "http-html", "manifest", "sftp", "hf", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return each kind of place in turn, empty."""
    root = tmp_path / "place"
    match request.param:
        case "local":
            yield _folder_place(root, str(root))
        case "s3":
            moto = request.getfixturevalue("moto")
            for name, value in moto.env.items():
                monkeypatch.setenv(name, value)
            bucket = f"bucket-{uuid.uuid4().hex}"
            moto.put(bucket, {})
            client = moto.client
            yield Place(
                f"s3://{bucket}/some/where/",
                lambda key, body: moto.put(bucket, {f"some/where/{key}": body}),
                lambda key: client.delete_object(Bucket=bucket, Key=f"some/where/{key}"),
                f"s3://{bucket}-missing/some/where/",
            )
        case "http-json" | "http-html":
            with folder_server(tmp_path, index=request.param.removeprefix("http-")) as server:
                # An HTML index shows the modification time of a file, but not in the form of the HTTP headers.
                yield _folder_place(root, f"{server.url}/place/", has_identity=request.param == "http-json")
        case "manifest":
            with folder_server(tmp_path, index="none") as server:
                inner = _folder_place(root, f"{server.url}/place/list.jsonl", has_identity=False)
                inner.missing_url = f"{server.url}/place-missing/list.jsonl"
                yield _with_manifest(inner, root)
        case "sftp":
            monkeypatch.setenv("HOME", str(tmp_path / "home"))
            with sftp_server(tmp_path, tmp_path / "home") as url:
                yield _folder_place(root, f"{url}/place")
        case "hf":
            with hub_server(tmp_path) as server:
                monkeypatch.setenv("HF_ENDPOINT", server.url)
                yield _folder_place(root, "hf://datasets/owner/name/place")
        case "fsspec":
            import fsspec

            system = fsspec.filesystem("memory")
            folder = f"/{uuid.uuid4().hex}"
            system.makedirs(folder)

            def put(key: str, body: bytes) -> None:
                system.pipe(f"{folder}/{key}", body)

            yield Place(
                f"memory:/{folder}",
                put,
                lambda key: system.rm(f"{folder}/{key}"),
                "memory://missing",
                has_identity=False,
            )
            system.rm(folder, recursive=True)


def _with_manifest(place: Place, root: Path) -> Place:
    """Update the manifest after each change, as its author would."""
    put_file = place.put
    (root / "list.jsonl").write_bytes(b"")

    def put(key: str, body: bytes) -> None:
        put_file(key, body)
        names = sorted(p for p in root.rglob("*") if p.is_file() and p.name != "list.jsonl")
        lines = [{"key": str(p.relative_to(root)), "size": p.stat().st_size} for p in names]
        (root / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    place.put = put
    return place


@pytest.fixture
def filled(place: Place) -> Place:
    """Return the place with :data:`CONTENT` in it."""
    for key, body in CONTENT.items():
        place.put(key, body)
    return place


def test_the_listing_names_every_object_once_with_its_size(filled: Place) -> None:
    with contextlib.closing(filled.open()) as store:
        found = [item for page in store.list() for item in page]

    assert sorted((item.key, item.size) for item in found) == sorted((k, len(v)) for k, v in CONTENT.items())


def test_an_unchanged_place_is_listed_equally_again(filled: Place) -> None:
    assert filled.items() == filled.items()


def test_an_empty_place_lists_nothing(place: Place) -> None:
    assert place.items() == {}


def test_a_missing_place_raises_not_found(filled: Place) -> None:
    with pytest.raises(NotFound), contextlib.closing(open_store(filled.missing_url)) as store:
        list(store.list())


def test_get_returns_read_only_bytes(filled: Place) -> None:
    items = filled.items()
    with contextlib.closing(filled.open()) as store:
        bodies = {key: store.get(item) for key, item in items.items()}

    assert {key: bytes(body) for key, body in bodies.items()} == CONTENT
    assert all(body.readonly for body in bodies.values())


@pytest.mark.parametrize(("start", "length"), [(0, 10), (100, 1000), (10239, 1), (0, 10240), (5, 0)])
def test_get_range_returns_that_range(filled: Place, start: int, length: int) -> None:
    item = filled.items()["b/c.json"]
    with contextlib.closing(filled.open()) as store:
        assert bytes(store.get_range(item, start, length)) == CONTENT["b/c.json"][start : start + length]


@pytest.mark.parametrize(("start", "length"), [(10000, 1000), (10240, 1), (20000, 5)])
def test_a_range_past_the_end_is_an_error_that_names_the_object(filled: Place, start: int, length: int) -> None:
    item = filled.items()["b/c.json"]
    with contextlib.closing(filled.open()) as store, pytest.raises(BadObject, match=r"b/c\.json"):
        store.get_range(item, start, length)


@pytest.mark.parametrize("key", sorted(CONTENT))
def test_find_returns_the_object_that_get_fetches(filled: Place, key: str) -> None:
    with contextlib.closing(filled.open()) as store:
        item = store.find(key)
        body = bytes(store.get(item))

    assert (item.key, item.size, body) == (key, len(CONTENT[key]), CONTENT[key])
    assert item.etag is not None or not (filled.has_identity and item.size)


def test_an_object_replaced_after_find_is_refused(filled: Place) -> None:
    with contextlib.closing(filled.open()) as store:
        item = store.find("a.npy")
        filled.put("a.npy", b"ALPHA")
        if item.etag is not None and not item.etag.replace(".", "").isdigit():
            with pytest.raises(BadObject, match=r"'a\.npy' changed since it was listed"):
                store.get(item)


@pytest.mark.parametrize("key", ["nothing.npy", "b", "b/nothing", "a.npy/x"])
def test_a_missing_key_raises_not_found_with_its_name(filled: Place, key: str) -> None:
    with contextlib.closing(filled.open()) as store, pytest.raises(NotFound, match=key):
        store.find(key)


def test_a_deleted_object_raises_not_found_with_its_name(filled: Place) -> None:
    items = filled.items()
    filled.delete("b/c.json")
    with contextlib.closing(filled.open()) as store:
        with pytest.raises(NotFound, match=r"b/c\.json"):
            store.get(items["b/c.json"])
        with pytest.raises(NotFound, match=r"b/c\.json"):
            store.get_range(items["b/c.json"], 0, 5)
        assert bytes(store.get(items["a.npy"])) == b"alpha"


def test_an_object_of_another_size_is_refused_by_name(filled: Place) -> None:
    items = filled.items()
    filled.put("a.npy", b"longer than before")
    filled.put("b/c.json", b"short")
    with contextlib.closing(filled.open()) as store:
        for key in ("a.npy", "b/c.json"):
            with pytest.raises(BadObject, match=key):
                store.get(items[key])


def test_an_object_replaced_by_one_of_the_same_size_is_refused(filled: Place) -> None:
    item = filled.items()["a.npy"]
    filled.put("a.npy", b"ALPHA")
    with contextlib.closing(filled.open()) as store:
        if not filled.has_identity:  # this kind of listing has only sizes
            assert bytes(store.get(item)) == b"ALPHA"
            return
        with pytest.raises(BadObject, match=r"'a\.npy' changed since it was listed"):
            store.get(item)
        with pytest.raises(BadObject, match=r"'a\.npy' changed since it was listed"):
            store.get_range(item, 1, 2)


def test_odd_names_are_listed_exactly_and_similar_names_stay_distinct(place: Place) -> None:
    for number, name in enumerate(ODD_NAMES):
        place.put(name, str(number).encode())

    items = place.items()
    with contextlib.closing(place.open()) as store:
        bodies = {key: bytes(store.get(item)) for key, item in items.items()}

    assert bodies == {name: str(number).encode() for number, name in enumerate(ODD_NAMES)}


def test_many_threads_may_use_one_store(filled: Place) -> None:
    items = list(filled.items().values())
    wrong: list[object] = []

    def work(store: Store) -> None:
        for item in items * 5:
            try:
                if bytes(store.get(item)) != CONTENT[item.key]:
                    wrong.append(item)
            except SourceError as error:
                wrong.append(error)

    with contextlib.closing(filled.open()) as store:
        threads = [threading.Thread(target=work, args=(store,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert wrong == []


def test_closing_twice_is_allowed(filled: Place) -> None:
    store = filled.open()
    store.close()
    store.close()

    assert store.url
