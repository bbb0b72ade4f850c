"""Objects of a web server that obstore fetches, requests that obstore must not make, and the limits of its answers."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachetool.core.errors import AccessDenied, BadObject, SourceError, Unreachable
from cachetool.stores import Limits, Object, bounded, http_objects, http_pages, open_store
from cachetool.stores.failures import as_our_error
from tests.servers import HOST, Http, Scripted, certificates, hub_server, scripted_server

SMALL = bytes(range(256)) * 100
LARGE = bytes(range(256)) * 8000
QUICK = Limits(retry=0.6, throttle=1.2)


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything use obstore; otherwise the test fails."""

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("the other client was asked")

    monkeypatch.setattr(http_pages.PageClient, "fetch", fetch)


def paths(server: Http) -> list[str]:
    return [path for path, _ in server.requests]


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("body", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_obstore_fetches_objects_of_any_size(body: bytes, *, listed: bool) -> None:
    with scripted_server(lambda handler: handler.answer(200, body, ETag='"v1"')) as server:
        store = open_store(f"{server.url}/d/")
        for key in ("a b%2e#1?.npy", "é/c.npy"):
            got = store.get(Object(key, len(body) if listed else -1, "v1"))
            assert got.readonly
            assert bytes(got) == body
        with pytest.raises(BadObject, match="changed since it was listed"):
            store.get(Object("c.npy", len(body) if listed else -1, "v2"))
    assert paths(server)[0] == "/d/a%20b%252e%231%3F.npy"


@pytest.mark.usefixtures("no_pages")
def test_objects_of_unlisted_size_are_requested_once_except_the_first_large_one() -> None:
    bodies = {"small": SMALL, "large": LARGE}
    with scripted_server(lambda handler: handler.answer(200, bodies[handler.path[3:8]])) as server:
        store = open_store(f"{server.url}/d/")
        for key in ("small1", "large1", "large2", "large3", "small2", "small3"):
            assert bytes(store.get(Object(key, -1))) == bodies[key[:5]]
    assert [path[3:] for path in paths(server)] == [
        "small1",
        "large1",
        "large1",
        "large2",
        "large3",
        "small2",
        "small3",
    ]


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("length", [100, 2**20 + 5])
def test_obstore_fetches_ranges_and_later_ranges_are_of_the_same_version(length: int) -> None:
    version = "one"

    def script(handler: Scripted) -> None:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        said = f"bytes {first}-{last}/{len(LARGE)}"
        handler.answer(206, LARGE[first : last + 1], Content_Range=said, Last_Modified=times[version])

    times = {"one": "Fri, 21 Nov 2025 00:34:00 GMT", "two": "Fri, 21 Nov 2025 00:34:01 GMT"}
    with scripted_server(script) as server:
        store = open_store(f"{server.url}/d/")
        assert bytes(store.get_range(Object("a.npy", -1), 10, length)) == LARGE[10 : 10 + length]
        version = "two"
        with pytest.raises(BadObject, match="changed since it was listed"):
            store.get_range(Object("a.npy", -1), 10, length)


def test_both_clients_parse_a_modification_time_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers write the same time in several forms. obstore returns the time, not its text."""

    def script(handler: Scripted) -> None:
        handler.answer(206, b"x", Content_Range="bytes 0-0/9", Last_Modified="21 Nov 2025 01:34:00 +0100")

    item = Object("a.npy", 9, "modified:Fri, 21 Nov 2025 00:34:00 GMT")
    with scripted_server(script) as server:
        assert bytes(open_store(f"{server.url}/d/").get_range(item, 0, 1)) == b"x"
        monkeypatch.setattr(http_objects.ObjectClient, "_fast", lambda *_: None)
        assert bytes(open_store(f"{server.url}/d/").get_range(item, 0, 1)) == b"x"


@pytest.mark.parametrize(
    "about",
    [
        {"Content_Encoding": "identity"},
        {"Content_Length": "", "Transfer_Encoding": "chunked"},
        {"Last_Modified": "yesterday"},
    ],
    ids=["an encoding", "chunks", "an odd time"],
)
def test_answers_that_obstore_misreads_are_fetched_by_the_other_client(about: dict[str, str]) -> None:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMALL), SMALL) if "Transfer_Encoding" in about else SMALL
    with scripted_server(lambda handler: handler.answer(200, body, **about)) as server:
        assert bytes(open_store(f"{server.url}/d/").get(Object("a.npy", len(SMALL)))) == SMALL
        assert len(server.requests) == 2


def test_obstore_is_not_used_for_a_while_after_several_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(handler: Scripted) -> None:
        handler.answer(200, b"5\r\nalpha\r\n0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked")

    with scripted_server(script) as server:
        store = open_store(f"{server.url}/d/")
        for _ in range(20):
            assert bytes(store.get(Object("a.npy", 5))) == b"alpha"
        assert len(server.requests) == 20 + http_objects._FAILURES
        monkeypatch.setattr(store._client, "_rests_until", 0.0)  # type: ignore[attr-defined]
        store.get(Object("a.npy", 5))
        store.get(Object("a.npy", 5))
        assert len(server.requests) == 20 + http_objects._FAILURES + 3


# --- secrets ------------------------------------------------------------------------------------------------------


def test_a_redirect_to_another_port_gets_neither_credentials_nor_a_referer_with_secrets() -> None:
    """obstore follows a redirect without asking, and sends the requested URL as ``Referer``, without user info."""
    with (
        scripted_server(lambda handler: handler.answer(200, SMALL)) as other,
        scripted_server(lambda handler: handler.answer(302, Location=f"{other.url}/x")) as first,
    ):
        place = first.url.replace("://", "://user:CANARY@") + "/d/"
        assert bytes(open_store(place).get(Object("a.npy", len(SMALL)))) == SMALL
        with pytest.raises(SourceError, match="private address"):  # a URL with a query: not fetched by obstore
            open_store(f"{place}?sig=CANARY").get(Object("a.npy", len(SMALL)))
    assert first.requests[0][1]["Authorization"]
    assert "Authorization" not in other.requests[0][1]
    assert "CANARY" not in str(other.requests)
    assert len(other.requests) == 1


def test_a_redirect_to_another_host_is_checked_before_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        scripted_server(lambda handler: handler.answer(200, SMALL)) as other,
        scripted_server(lambda handler: handler.answer(302, Location=f"{away}/x")) as first,
    ):
        away = other.url.replace(HOST, "localhost")
        with pytest.raises(SourceError, match="private address"):
            open_store(first.url).get(Object("a.npy", len(SMALL)))
        assert not other.requests
        monkeypatch.setenv("CACHETOOL_ALLOW_HOSTS", "localhost")
        assert bytes(open_store(first.url).get(Object("a.npy", len(SMALL)))) == SMALL


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with scripted_server(lambda handler: handler.answer(200, SMALL)) as server:
        assert bytes(open_store(f"{server.url}/d/").get(Object("a.npy", len(SMALL)))) == SMALL
        assert len(server.requests) == 1


def test_new_credentials_are_used_after_the_old_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password old\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    asked: list[str] = []

    def script(handler: Scripted) -> None:
        asked.append(handler.headers["Authorization"])
        handler.answer(200 if handler.headers["Authorization"] != asked[0] else 401, SMALL)

    with scripted_server(script) as server:
        store = open_store(f"{server.url}/d/", limits=QUICK)
        with pytest.raises(AccessDenied):
            store.get(Object("a.npy", len(SMALL)))
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password new\n")
        for _ in range(2):
            assert bytes(store.get(Object("a.npy", len(SMALL)))) == SMALL
    assert asked[:4] == [asked[0]] * 4
    assert len(asked) == 6


def test_obstore_fetches_the_hubs_files_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(LARGE)
    with hub_server(tmp_path, token="hf_CANARY") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_CANARY")
        store = open_store("hf://datasets/owner/name")
        item = store.find("a.bin")
        fetch = http_pages.PageClient.fetch
        monkeypatch.setattr(http_pages.PageClient, "fetch", lambda *_, **__: pytest.fail("the other client was asked"))
        assert bytes(store.get(item)) == LARGE
        assert bytes(store.get_range(item, 5, 10)) == LARGE[5:15]
        monkeypatch.setattr(http_pages.PageClient, "fetch", fetch)


# --- certificates ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[Http, Path]]:
    """Start a server whose certificate is valid with the given file."""
    authority, server_pem = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)
    with scripted_server(lambda handler: handler.answer(200, SMALL), tls=context) as server:
        yield server, authority


def test_an_authority_of_ssl_cert_file_is_trusted_by_both_clients(
    tls_server: tuple[Http, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, authority = tls_server
    item = Object("a.npy", len(SMALL))
    with pytest.raises(Unreachable, match="certificate is not valid"):
        open_store(f"{server.url}/d/", limits=QUICK).get(item)
    assert not server.requests
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    assert bytes(open_store(f"{server.url}/d/").get(item)) == SMALL
    assert bytes(open_store(f"{server.url}/d/?k=1").get(item)) == SMALL
    assert len(server.requests) == 2


# --- bounds ---------------------------------------------------------------------------------------------------------


def endless(status: int, head: str) -> Callable[[Scripted], None]:
    def script(handler: Scripted) -> None:
        handler.close_connection = True
        handler.wfile.write(f"HTTP/1.1 {status} X\r\n{head}\r\n\r\n".encode())
        piece = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        while True:
            handler.wfile.write(piece)

    return script


GET = """
import json, resource, sys
from cachetool.stores import Limits, Object, open_store
store = open_store(sys.argv[1], limits=Limits(retry=0.5))
try:
    store.get(Object("a.npy", int(sys.argv[2])))
except Exception as error:
    print(json.dumps([type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10]))
"""


@pytest.mark.parametrize("size", [50, 2**21], ids=["small", "large"])
@pytest.mark.parametrize(
    ("status", "head", "raised"),
    [
        (404, "Transfer-Encoding: chunked", {"NotFound"}),
        (403, "Transfer-Encoding: chunked", {"AccessDenied"}),
        (200, "Transfer-Encoding: chunked\r\nContent-Length: {size}", {"BadObject", "Unreachable"}),
    ],
    ids=["no object", "a refusal", "a body with two ends"],
)
@pytest.mark.parametrize("place", ["http", "s3"])
def test_an_endless_answer_in_place_of_an_object_takes_bounded_memory(
    place: str, status: int, head: str, raised: set[str], size: int
) -> None:
    env = {**os.environ, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    with scripted_server(endless(status, head.format(size=size))) as server:
        url = "s3://bucket/d" if place == "s3" else f"{server.url}/d/"
        command = [sys.executable, "-c", GET, url, str(size)]
        env["AWS_ENDPOINT_URL"] = server.url
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    assert done.stdout, done.stderr
    name, most = json.loads(done.stdout)
    assert name in (raised if place == "http" else {*raised, "Unreachable", "SourceError"})
    assert most < 1700


def test_requests_that_take_too_long_or_too_much_memory_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(bounded.TooMuch) as late:
        bounded.awaited(work(), memory=2**30, seconds=0.1)
    assert ended.wait(20)
    ended.clear()
    sizes = iter([0, *[2**31] * 1000])
    monkeypatch.setattr(bounded, "_taken", lambda: next(sizes))
    with pytest.raises(bounded.TooMuch) as large:
        bounded.awaited(work(), memory=2**30, seconds=60)
    assert ended.wait(20)
    for caught, limit in ((late, "0.1 s"), (large, "1024 MiB of memory")):
        error = as_our_error(caught.value, place="s3://b/p", key="k")
        assert type(error) is SourceError
        assert str(error).startswith(f"s3://b/p: 'k': the answer takes more than {limit}")


def test_a_forked_child_gets_an_error_and_not_a_hang() -> None:
    script = """
import os, sys
from cachetool.core.errors import CacheToolError
from cachetool.stores import Object, open_store
store = open_store(sys.argv[1])
store.get(Object("a.npy", 1))
if os.fork() == 0:
    try:
        store.get(Object("a.npy", 1))
    except CacheToolError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    with scripted_server(lambda handler: handler.answer(200, b"x")) as server:
        done = subprocess.run([sys.executable, "-c", script, f"{server.url}/d/"], timeout=60)
    assert done.returncode == 7
