"""Endless lists of servers: each is ended within bounds of memory and time, and its connection is closed."""

from __future__ import annotations

import collections
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachetool.core.errors import BadObject, SourceError
from cachetool.stores import Limits, open_store
from tests.servers import Http, Scripted, scripted_server

pytestmark = pytest.mark.timeout(120)

MIB = 2**20
HASTY = Limits(page=1.0)
KEY = b"<Contents><Key>a/%08d.npy</Key><Size>1</Size><LastModified>2025-11-21T00:00:00.000Z</LastModified></Contents>"
PIECES = {
    "keys": b"".join(KEY % number for number in range(9000)),
    "comments": b"<!-- -->" * (MIB // 8),
    "one text": b"x" * MIB,
}


class Endless:
    """A server whose answers never end."""

    def __init__(self, piece: bytes, status: int = 200, kind: str = "xml") -> None:
        self._piece, self._status = piece, status
        self._begin, self._kind = (b"<ListBucketResult>", b"<html>")[kind == "html"], f"text/{kind}"
        self.closed = threading.Event()
        """An event that is set when a client has closed the connection of such an answer."""

    def __call__(self, handler: Scripted) -> None:
        handler.send_response(self._status)
        handler.send_header("Content-Type", self._kind)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.close_connection = True
        begin, piece = (b"%x\r\n%b\r\n" % (len(data), data) for data in (self._begin, self._piece))
        try:
            handler.wfile.write(begin)
            while True:
                handler.wfile.write(piece)
        except OSError:
            self.closed.set()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set keys for servers that do not check them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "CANARY")
    return monkeypatch


PULL = """
import json, os, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "cachetool", "pull", *sys.argv[1:]], capture_output=True, text=True)
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([done.returncode, done.stderr, most >> 10]))
"""


def pull(url: str, cache: Path) -> tuple[int, str, int]:
    """Return exit code and stderr of a pull, and the peak MiB of any of its processes."""
    command = [sys.executable, "-c", PULL, url, "--cache", str(cache), "--max-size", "20MB"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
    code, said, most = json.loads(done.stdout)
    return code, said, most


@pytest.mark.parametrize(("what", "status"), [("keys", 200), ("comments", 200), ("one text", 200), ("comments", 403)])
def test_a_pull_of_an_endless_list_page_fails_in_two_lines_with_bounded_memory(
    keys: pytest.MonkeyPatch, tmp_path: Path, what: str, status: int
) -> None:
    endless = Endless(PIECES[what], status)
    with scripted_server(endless) as server:
        keys.setenv("AWS_ENDPOINT_URL", server.url)
        code, said, most = pull("s3://bucket/p/", tmp_path / "cache")

    assert code == SourceError.exit_code
    assert [line for line in said.splitlines() if "list" in line] == [
        "error: s3://bucket/p/: one page of the listing takes more than 512 MiB of memory;",
        "check the endpoint, or list fewer objects by a longer prefix",
    ]
    assert 200 < most < 700  # allocated memory counts, only part of which is touched: 320 to 350
    assert endless.closed.wait(60)


def test_an_abandoned_list_is_no_longer_received(keys: pytest.MonkeyPatch) -> None:
    endless = Endless(PIECES["keys"])
    keys.setattr("cachetool.stores.bounded.PAGE_MEMORY", 64 * MIB)
    with scripted_server(endless) as server:
        keys.setenv("AWS_ENDPOINT_URL", server.url)
        store = open_store("s3://bucket")
        with pytest.raises(SourceError, match=r"takes more than 64 MiB of memory"):
            list(store.list())
        assert endless.closed.wait(60)  # while this process and the store still live


TOKENS = ["the same token", "new tokens"]


def empty_page(token: str) -> bytes:
    more = f"<NextContinuationToken>{token}</NextContinuationToken>"
    return f"<ListBucketResult><IsTruncated>true</IsTruncated>{more}</ListBucketResult>".encode()


def marked(token: str) -> bytes:
    return f"<EnumerationResults><Blobs/><NextMarker>{token}</NextMarker></EnumerationResults>".encode()


def s3(server: Http, keys: pytest.MonkeyPatch) -> str:
    keys.setenv("AWS_ENDPOINT_URL", server.url)
    return "s3://bucket"


def gcs(server: Http, keys: pytest.MonkeyPatch) -> str:
    keys.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    keys.setenv("GOOGLE_BASE_URL", server.url)
    return "gs://bucket"


def azure(server: Http, keys: pytest.MonkeyPatch) -> str:
    keys.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    keys.setenv("AZURE_SKIP_SIGNATURE", "true")
    keys.setenv("AZURE_STORAGE_ENDPOINT", server.url)
    return "az://bucket"


@pytest.mark.parametrize(
    ("cloud", "page"), [(s3, empty_page), (gcs, empty_page), (azure, marked)], ids=["s3", "gcs", "azure"]
)
@pytest.mark.parametrize(
    "tokens", [lambda: itertools.repeat("t"), lambda: map(str, itertools.count())], ids=["one", "new"]
)
def test_endless_empty_pages_are_an_error(
    keys: pytest.MonkeyPatch,
    cloud: Callable[[Http, pytest.MonkeyPatch], str],
    page: Callable[[str], bytes],
    tokens: Callable[[], Iterator[str]],
) -> None:
    named = tokens()
    with scripted_server(lambda handler: handler.answer(200, page(next(named)))) as server:
        url = cloud(server, keys)
        with pytest.raises(SourceError) as caught:
            list(open_store(url, limits=HASTY).list())
        assert len(server.requests) > 10

    line, advice = str(caught.value).splitlines()
    assert line.startswith(f"{url}: ")
    assert "fewer than 1000 keys in 1 s" in line
    assert "a longer prefix" in advice


def test_a_signal_ends_a_list_that_hangs(keys: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    def script(handler: Scripted) -> None:
        if handler.number == 20:
            os.kill(os.getpid(), signal.SIGUSR1)
        handler.answer(200, empty_page("t"))

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with scripted_server(script) as server:
            pages = open_store(s3(server, keys)).list()
            with pytest.raises(Stopped):
                next(pages)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_repeated_pages_with_keys_are_detected_before_any_limit(keys: pytest.MonkeyPatch) -> None:
    page = b"<ListBucketResult><NextContinuationToken>t</NextContinuationToken>" + KEY % 1 + b"</ListBucketResult>"
    with scripted_server(lambda handler: handler.answer(200, page)) as server:
        url = s3(server, keys)
        with pytest.raises(SourceError, match="repeats itself"):
            list(open_store(url).list())


def test_a_server_that_lists_all_keys_in_one_answer_is_supported(keys: pytest.MonkeyPatch) -> None:
    page = b"<ListBucketResult>" + b"".join(KEY % number for number in range(50_000)) + b"</ListBucketResult>"
    with scripted_server(lambda handler: handler.answer(200, page)) as server:
        store = open_store(s3(server, keys), limits=Limits(page=60.0))
        pages = list(store.list())

    assert [len(each) for each in pages] == [1000] * 50
    assert len({item.key for each in pages for item in each}) == 50_000


def test_a_list_left_in_the_middle_leaves_no_thread_and_no_descriptor(keys: pytest.MonkeyPatch) -> None:
    page = b"<ListBucketResult>" + PIECES["keys"] + b"</ListBucketResult>"

    def take_one(store: Any) -> None:
        pages = store.list()
        next(pages)
        pages.close()

    def held() -> tuple[int, int]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        kinds = [os.readlink(link) for link in links if os.path.lexists(link)]
        named = [thread for thread in threading.enumerate() if "(_turn)" in thread.name]
        return len(named), sum("eventpoll" in kind for kind in kinds)

    with scripted_server(lambda handler: handler.answer(200, page, Connection="close")) as server:
        store = open_store(s3(server, keys))
        take_one(store)
        before = held()
        assert before[0] == 0
        for _ in range(5):
            take_one(store)
        assert held() == before


# -- our own clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [b"<a href=k1.npy>", b"x" * MIB])
def test_an_index_page_that_never_ends_is_refused(piece: bytes) -> None:
    endless = Endless(piece * (MIB // len(piece)), kind="html")
    with scripted_server(endless) as server:
        with pytest.raises(BadObject, match="more than 134217728 bytes"):
            list(open_store(f"{server.url}/d/").list())
        assert endless.closed.wait(60)


def hub(pages: Callable[[int], list[dict[str, Any]]]) -> Callable[[Scripted], None]:
    """Start a hub whose every page names a new next page."""
    count = itertools.count(1)

    def script(handler: Scripted) -> None:
        if "/revision/" in handler.path:
            handler.answer(200, b'{"sha": "c0ffee"}', Content_Type="application/json")
            return
        number = next(count)
        link = f'<http://{handler.headers["Host"]}/api/datasets/o/n/tree/c0ffee?cursor={number}>; rel="next"'
        handler.answer(200, json.dumps(pages(number)).encode(), Content_Type="application/json", Link=link)

    return script


@pytest.mark.parametrize("entries", [[], [{"path": "d", "type": "directory", "size": 0, "oid": "0" * 40}]])
def test_endless_pages_of_the_hub_without_files_are_an_error(
    monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]]
) -> None:
    with scripted_server(hub(lambda number: entries)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(SourceError) as caught:
            list(open_store("hf://datasets/o/n").list())

    assert str(caught.value) == (
        "hf://datasets/o/n: the hub's list has 1000 pages in a row without a file;\n"
        "check HF_ENDPOINT, or give a folder of the dataset"
    )


def test_files_between_empty_pages_of_the_hub_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetool.stores.hub.EMPTY_PAGES", 5)
    file = {"type": "file", "size": 1, "oid": "0" * 40}
    script = hub(lambda number: [{"path": f"{number}.npy", **file}] if number % 4 == 0 and number <= 40 else [])
    found: collections.Counter[str] = collections.Counter()
    with scripted_server(script) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        pages = open_store("hf://datasets/o/n").list()
        for page in itertools.islice(pages, 44):
            found.update(item.key for item in page)
        with pytest.raises(SourceError, match="5 pages in a row"):
            list(pages)

    assert found == {f"{number}.npy": 1 for number in range(4, 41, 4)}


def test_endless_folders_of_a_web_server_without_files_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetool.stores.http.EMPTY_FOLDERS", 50)
    page = b"".join(b"<a href='%d/'>f</a>" % number for number in range(20))
    with scripted_server(lambda handler: handler.answer(200, page, Content_Type="text/html")) as server:
        with pytest.raises(SourceError, match=r"50 folders in a row .*;\n.* a manifest"):
            list(open_store(f"{server.url}/d/").list())
        assert len(server.requests) == 50
