"""Our HTTP client against servers that misbehave, and the three ways to list a server.

Rows are those of the fault catalogue in docs. Each test ends with the right bytes or with an error.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import itertools
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachetool.core.errors import (
    AccessDenied,
    BadObject,
    CacheToolError,
    NotFound,
    SourceError,
    Unreachable,
    UsageError,
)
from cachetool.sources.registry import list_source
from cachetool.stores import Limits, Object, Store, http, http_objects, open_store, origins
from cachetool.stores import http_pages as client
from tests.servers import Http, Scripted, folder_server, free_port, scripted_server

# Tests that succeed use the real limits, so a busy machine fails none of them.
PATIENT = Limits()
QUICK = Limits(retry=0.6, throttle=1.2)
SILENT = Limits(retry=0.6, silence=0.5)
BRIEF = Limits(retry=0.6, grace=0.6)
SLOW = Limits(retry=0.6, grace=0.6, min_rate=2000)
BODY = bytes(range(256)) * 400
ITEM = Object("a.npy", len(BODY))


def store_at(server: Http, limits: Limits = PATIENT) -> Store:
    return open_store(f"{server.url}/place/", limits=limits)


def get(script: Callable[[Scripted], None], item: Object = ITEM, limits: Limits = PATIENT) -> tuple[bytes, Http]:
    """Return the bytes that a store gets from a server that follows ``script``, and the requests of the store."""
    with scripted_server(script) as server:
        return bytes(store_at(server, limits).get(item)), server


def listing(script: Callable[[Scripted], None]) -> list[Object]:
    with scripted_server(script) as server:
        return [item for page in store_at(server).list() for item in page]


def raw(handler: Scripted, data: bytes) -> None:
    """Send raw bytes and end the connection."""
    handler.close_connection = True
    handler.wfile.write(data)


@pytest.fixture
def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make objects use the client that fetches everything obstore cannot."""
    monkeypatch.setattr(http_objects.ObjectClient, "_fast", lambda *_: None)


# --- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 1, 50_000, len(BODY) - 1])
def test_a_body_that_is_always_cut_short_is_never_accepted(sent: int) -> None:
    """Row 39."""

    def script(handler: Scripted) -> None:
        handler.answer(200, BODY[:sent], Content_Length=str(len(BODY)))
        handler.close_connection = True

    with pytest.raises(Unreachable, match=f"after {sent} of {len(BODY)} bytes"):
        get(script, limits=QUICK)


def test_bytes_after_a_body_belong_neither_to_it_nor_to_the_next_answer() -> None:
    """Row 40: junk, then bytes that look like an answer."""
    smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 102400\r\n\r\n" + bytes(102400)

    def script(handler: Scripted) -> None:
        handler.answer(200, BODY + b"junk" + smuggled, Content_Length=str(len(BODY)))

    with scripted_server(script) as server:
        store = store_at(server)
        for _ in range(3):
            assert bytes(store.get(ITEM)) == BODY


def test_an_unrequested_answer_is_not_taken_for_the_next_one() -> None:
    """Row 40: the answer arrives while the connection is idle."""
    idle, sent = threading.Event(), threading.Event()

    def script(handler: Scripted) -> None:
        handler.answer(200, BODY)
        if handler.number == 1:
            assert idle.wait(20)
            handler.answer(200, bytes(len(BODY)))
            sent.set()

    with scripted_server(script) as server:
        store = store_at(server)
        assert bytes(store.get(ITEM)) == BODY
        idle.set()
        assert sent.wait(20)
        assert bytes(store.get(ITEM)) == BODY


@pytest.mark.parametrize("cut", [0, 1])
def test_without_a_length_the_listed_size_decides_whether_a_body_is_complete(cut: int) -> None:
    """Row 41: the end of the connection is the end of the body."""

    def script(handler: Scripted) -> None:
        raw(handler, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY[: len(BODY) - cut])

    if cut:
        with pytest.raises(BadObject, match=r"a\.npy"):
            get(script)
    else:
        assert get(script)[0] == BODY
    with pytest.raises(BadObject, match="no length"):
        get(script, Object("a.npy", -1))


@pytest.mark.usefixtures("without_obstore")
def test_a_broken_transfer_continues_if_the_server_proves_that_the_object_is_the_same() -> None:
    """Row 42: a reset every 20,000 bytes, with a strong ETag."""

    def script(handler: Scripted) -> None:
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        part = BODY[start : start + 20_000]
        headers = {"ETag": '"v1"', "Content_Length": str(len(BODY) - start)}
        if start:
            assert handler.headers["If-Range"] == '"v1"'
            headers["Content_Range"] = f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"
        handler.answer(206 if start else 200, part, **headers)
        handler.close_connection = True

    body, server = get(script)

    assert body == BODY
    assert len(server.requests) == -(-len(BODY) // 20_000)


@pytest.mark.usefixtures("without_obstore")
def test_a_broken_transfer_starts_again_when_the_object_has_changed_or_has_no_etag() -> None:
    """Rows 42 and 44: the server answers If-Range with the whole new object, and versions are never mixed."""

    def changing(handler: Scripted) -> None:
        if handler.number == 1:
            handler.answer(200, BODY[:5000], ETag='"v1"', Content_Length=str(len(BODY)))
            handler.drop()
        else:
            handler.answer(200, BODY[::-1], ETag='"v2"')

    def without(handler: Scripted) -> None:
        assert "Range" not in handler.headers
        handler.answer(200, BODY[:5000] if handler.number == 1 else BODY, Content_Length=str(len(BODY)))
        handler.close_connection = True

    assert get(changing)[0] == BODY[::-1]
    with pytest.raises(BadObject, match="another ETag"):
        get(changing, Object("a.npy", len(BODY), "v1"))
    assert get(without)[0] == BODY


@pytest.mark.usefixtures("without_obstore")
def test_a_long_broken_transfer_continues_regardless_of_its_duration(naps: list[float]) -> None:
    """Row 42: each part takes longer than ``retry``, which only limits the time without progress."""

    def script(handler: Scripted) -> None:
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        naps.append(20.0)
        headers = {"ETag": '"v1"', "Content_Length": str(len(BODY) - start)}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"
        handler.answer(206 if start else 200, BODY[start : start + 50_000], **headers)
        handler.close_connection = True

    assert get(script)[0] == BODY


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize(
    ("etag", "more"), [({"ETag": '"v2"'}, 0), ({}, 0), ({"ETag": '"v1"'}, 8)], ids=["other", "none", "longer"]
)
def test_a_range_of_another_version_is_not_appended(etag: dict[str, str], more: int) -> None:
    """Row 44: a server that knows Range but not If-Range, and an object that was replaced in between."""
    new = BODY[::-1] + bytes(more)

    def script(handler: Scripted) -> None:
        if handler.number == 1:
            handler.answer(200, BODY[:5000], ETag='"v1"', Content_Length=str(len(BODY)))
            handler.close_connection = True
        elif "Range" in handler.headers:
            assert handler.headers["Range"] == "bytes=5000-"
            handler.answer(206, new[5000:], Content_Range=f"bytes 5000-{len(new) - 1}/{len(new)}", **etag)
        else:
            handler.answer(200, new, **etag)

    body, server = get(script, Object("a.npy", -1))

    assert body == new
    assert len(server.requests) == 3


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize("size", [-1, len(BODY)], ids=["size unknown", "size listed"])
@pytest.mark.parametrize("rest", ["length", "chunked"])
def test_a_resumed_transfer_is_complete_when_all_bytes_have_arrived(rest: str, size: int) -> None:
    """Row 42: the rest of a body may arrive in several parts (RFC 9110, 14.2), and each answer may lack a length."""

    def script(handler: Scripted) -> None:
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        stop = min(start + 30_000, len(BODY))
        about = {"ETag": '"v1"'} | ({"Content_Range": f"bytes {start}-{stop - 1}/{len(BODY)}"} if start else {})
        part = BODY[start:stop]
        if start and rest == "chunked":
            part = b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part)
            handler.answer(206, part, Transfer_Encoding="chunked", Content_Length="", **about)
        else:
            handler.answer(
                206 if start else 200, part, Content_Length=str(stop - start if start else len(BODY)), **about
            )
        handler.close_connection = not start

    item = Object("a.npy", size)
    with scripted_server(script) as server:
        assert bytes(store_at(server).get(item)) == BODY
        asked = [headers.get("Range") for _, headers in server.requests]

    assert asked == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize(
    "said", [f"5000-5999/{2 * len(BODY)}", "5000-5999/*", "5000-4999/102400", "5000-102400/102400", "5000-102399", ""]
)
def test_a_part_that_contradicts_earlier_answers_is_not_appended(said: str) -> None:
    """Row 43: another total, no total although the first answer had none either, an impossible end."""

    def script(handler: Scripted) -> None:
        if "Range" in handler.headers:
            handler.answer(206, BODY[5000:6000], ETag='"v1"', Content_Range=f"bytes {said}" if said else "")
        elif handler.number == 1 and said == "5000-5999/*":
            part = b"%x\r\n%b\r\n" % (5000, BODY[:5000])
            handler.answer(200, part, ETag='"v1"', Transfer_Encoding="chunked", Content_Length="")
            handler.close_connection = True
        else:
            handler.answer(200, BODY[:5000], ETag='"v1"', Content_Length=str(len(BODY)))
            handler.close_connection = True

    with pytest.raises(Unreachable):
        get(script, Object("a.npy", -1), QUICK)


@pytest.mark.usefixtures("without_obstore")
def test_a_body_that_lacks_only_its_end_mark_is_fetched_again() -> None:
    """Row 41: the last, empty chunk is lost, and the server has no bytes left to resume with."""

    def script(handler: Scripted) -> None:
        if "Range" in handler.headers:
            handler.answer(416, Content_Range=f"bytes */{len(BODY)}")
        elif handler.number == 1:
            part = b"%x\r\n%b\r\n" % (len(BODY), BODY)
            handler.answer(200, part, ETag='"v1"', Transfer_Encoding="chunked", Content_Length="")
            handler.close_connection = True
        else:
            handler.answer(200, BODY, ETag='"v1"')

    assert get(script)[0] == BODY


@pytest.mark.usefixtures("without_obstore")
def test_a_part_from_another_offset_is_not_appended() -> None:
    """Row 43: a 206 with another offset."""

    def script(handler: Scripted) -> None:
        if "Range" in handler.headers:
            handler.answer(206, BODY, ETag='"v1"', Content_Range=f"bytes 0-{len(BODY) - 1}/{len(BODY)}")
        else:
            handler.answer(200, BODY[:5000], ETag='"v1"', Content_Length=str(len(BODY)))
            handler.close_connection = True

    with pytest.raises(Unreachable):
        get(script, limits=QUICK)


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [(200, "", SourceError), (206, "bytes 0-9/102400", BadObject), (206, "", BadObject), (416, "", BadObject)],
)
def test_a_range_is_the_requested_one_or_an_error(status: int, said: str, kind: type[CacheToolError]) -> None:
    """Row 43: the range is ignored, another range is sent, or none is named."""
    with scripted_server(lambda handler: handler.answer(status, BODY[:10], Content_Range=said)) as server:
        store = store_at(server)
        with pytest.raises(kind, match=r"a\.npy"):
            store.get_range(ITEM, 100, 10)


@pytest.mark.parametrize("length", [True, False])
def test_a_server_that_ignores_ranges_is_named_before_the_whole_body_has_arrived(*, length: bool) -> None:
    """Row 43: the whole object arrives instead of a part, with a length or in chunks. The client does not wait for its
    body.
    """
    done = threading.Event()

    def script(handler: Scripted) -> None:
        if length:
            handler.answer(200, BODY[:5000], Content_Length=str(2**40))
        else:
            handler.answer(200, b"1388\r\n%b\r\n" % BODY[:5000], Transfer_Encoding="chunked", Content_Length="")
        done.wait(60)

    with scripted_server(script) as server:
        store = store_at(server)
        with pytest.raises(SourceError, match=r"a\.npy.*ignores the Range header.*; copy "):
            store.get_range(ITEM, 0, 4096)
        done.set()
        assert len(server.requests) == 2  # once by each client


def test_a_range_of_an_object_that_changed_is_refused() -> None:
    """Row 44."""

    def script(handler: Scripted) -> None:
        handler.answer(206, BODY[100:110], ETag='W/"v2"', Content_Range="bytes 100-109/102400")

    with scripted_server(script) as server:
        store = store_at(server)
        assert bytes(store.get_range(Object("a.npy", 102400, "v2"), 100, 10)) == BODY[100:110]
        with pytest.raises(BadObject, match="another ETag"):
            store.get_range(Object("a.npy", 102400, "v1"), 100, 10)
        with pytest.raises(BadObject, match="instead of 5"):
            store.get_range(Object("a.npy", 5), 100, 10)


@pytest.mark.parametrize("told", ["ETag", "Last_Modified"])
@pytest.mark.parametrize("listed", [None, f"sha256:{'0' * 64}"], ids=["without an ETag", "with a checksum"])
def test_ranges_of_two_versions_of_an_object_without_a_listed_etag_are_never_combined(
    told: str, listed: str | None
) -> None:
    """An nginx index has only sizes: all later answers must belong to the version of the first one, until the next
    listing.
    """
    item = Object("a.npy", len(BODY), listed)
    version = "one"

    def script(handler: Scripted) -> None:
        if handler.path.endswith("/"):
            handler.answer(200, b"<html></html>", Content_Type="text/html")
            return
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        about = {told: version, "Content_Range": f"bytes {first}-{last}/{len(BODY)}"}
        handler.answer(206, BODY[first : last + 1], **about)

    with scripted_server(script) as server:
        store = store_at(server)
        assert bytes(store.get_range(item, 0, 10)) == BODY[:10]
        assert bytes(store.get_range(item, 10, 10)) == BODY[10:20]
        version = "two"
        with pytest.raises(BadObject, match="changed since it was listed"):
            store.get_range(item, 20, 10)
        assert bytes(store.get_range(Object("b.npy", len(BODY)), 20, 10)) == BODY[20:30]
        list(store.list())
        assert bytes(store.get_range(item, 20, 10)) == BODY[20:30]


def test_the_number_of_remembered_identities_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST", 3)
    seen = http.Identities()
    answer = client.Answer(memoryview(b""), 0, 'W/"x"', None, "")

    for number in range(10):
        assert seen.first(f"{number}.npy", answer) == "x"
        assert seen.first("0.npy", answer) == "x"

    assert seen.all() == dict.fromkeys(["8.npy", "0.npy", "9.npy"], "x")


def test_a_checksum_in_the_manifest_detects_a_false_etag() -> None:
    """Row 45: the same ETag and size, but other bytes."""
    import hashlib

    good = Object("a.npy", len(BODY), f"sha256:{hashlib.sha256(BODY).hexdigest()}")

    assert get(lambda handler: handler.answer(200, BODY, ETag='"x"'), good)[0] == BODY
    with pytest.raises(BadObject, match="changed since"):
        get(lambda handler: handler.answer(200, BODY[::-1], ETag='"x"'), good)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, AccessDenied), (403, AccessDenied), (404, NotFound), (410, NotFound)]
)
def test_a_refused_request_is_not_repeated(status: int, kind: type[CacheToolError]) -> None:
    """Row 46."""
    with scripted_server(lambda handler: handler.answer(status, b"no")) as server:
        with pytest.raises(kind, match=r"a\.npy"):
            store_at(server).get(ITEM)
        assert len(server.requests) == 2  # once by each client


@pytest.mark.parametrize("kind", ["text/html", "application/xhtml+xml; charset=utf-8"])
def test_an_html_page_in_place_of_an_object_is_refused(kind: str) -> None:
    """Row 53: detected by its size, or by its type if the size is unknown."""

    def script(handler: Scripted) -> None:
        handler.answer(200, b"<html>log in</html>", Content_Type=kind)

    with pytest.raises(BadObject):
        get(script)
    with pytest.raises(BadObject, match="HTML page"):
        get(script, Object("a.npy", -1))
    assert get(script, Object("a.xhtml", -1))[0] == b"<html>log in</html>"


def test_an_encoded_body_is_refused() -> None:
    """Row 54: the client requests identity and accepts nothing else."""
    with scripted_server(lambda handler: handler.answer(200, BODY, Content_Encoding="gzip")) as server:
        with pytest.raises(BadObject, match="Content-Encoding: gzip"):
            store_at(server).get(ITEM)
        assert server.requests[0][1]["Accept-Encoding"] == "identity"


def test_chunks_are_joined_and_bad_ones_refused() -> None:
    """Row 50: invalid chunk sizes, and a body without its last chunk."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (BODY[:7], BODY[7:]))

    assert get(lambda h: raw(h, head + chunks + b"0\r\n\r\n"), Object("a.npy", -1))[0] == BODY
    with pytest.raises(Unreachable):
        get(lambda h: raw(h, head + chunks), limits=QUICK)
    with pytest.raises(Unreachable):
        get(lambda h: raw(h, head + b"zz\r\n" + BODY), limits=QUICK)
    with pytest.raises(BadObject, match="more than 102400 bytes"):
        get(lambda h: raw(h, head + chunks + b"3\r\nabc\r\n0\r\n\r\n"))


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds that the client would have slept."""
    taken: list[float] = []

    class Clock:
        """A clock that runs while the client sleeps."""

        monotonic = staticmethod(lambda: time.monotonic() + sum(taken))
        time = staticmethod(time.time)
        sleep = staticmethod(taken.append)

    monkeypatch.setattr(client, "time", Clock)
    return taken


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_of_a_throttling_server_is_obeyed(naps: list[float], status: int) -> None:
    """Row 47."""

    def script(handler: Scripted) -> None:
        if handler.number <= 3:  # obstore gets the first answer and hides its Retry-After
            handler.answer(status, Retry_After="7")
        else:
            handler.answer(200, BODY)

    body, server = get(script)

    assert body == BODY
    assert len(server.requests) == 4
    assert [round(nap) for nap in naps] == [7, 7]


def test_a_retry_after_of_zero_does_not_cause_endless_requests(naps: list[float]) -> None:
    with (
        scripted_server(lambda handler: handler.answer(429, Retry_After="0")) as server,
        pytest.raises(Unreachable, match="the server answers 429"),
    ):
        store_at(server).get(ITEM)

    assert len(server.requests) < 100


def test_throttling_without_a_time_makes_requests_increasingly_rare(naps: list[float]) -> None:
    """Row 47: full jitter up to half a minute, in total at most ``throttle``."""
    with scripted_server(lambda handler: handler.answer(503)) as server:
        with pytest.raises(Unreachable, match="the server answers 503"):
            store_at(server).get(ITEM)
        asked = len(server.requests)

    assert all(0 <= nap <= min(30, 0.1 * 2.0**attempt) for attempt, nap in enumerate(naps, start=1))
    assert sum(naps) <= 600
    assert sum(1 for upto in range(len(naps)) if sum(naps[:upto]) < 10) < asked  # most come after the first 10 s


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize("asks", ["", "4"], ids=["without a time", "with a time"])
def test_64_workers_that_are_throttled_together_slow_down_and_all_finish(
    monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """Row 47: a server refuses everyone for 20 s. Each worker has a clock that runs while it sleeps."""
    now: collections.Counter[int] = collections.Counter()
    mine = threading.local()
    asked: dict[int, list[float]] = {worker: [] for worker in range(64)}

    class Clock:
        time = staticmethod(time.time)

        @staticmethod
        def monotonic() -> float:
            return now[mine.worker]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[mine.worker] += seconds  # type: ignore[assignment]

    def script(handler: Scripted) -> None:
        worker = int(handler.path.rpartition("/")[2].partition(".")[0])
        asked[worker].append(now[worker])
        if now[worker] < 20:
            handler.answer((429, 503)[worker % 2], Retry_After=asks)
        else:
            handler.answer(200, BODY)

    monkeypatch.setattr(client, "time", Clock)
    with scripted_server(script) as server, contextlib.closing(store_at(server)) as store:

        def work(worker: int) -> bytes:
            mine.worker = worker
            return bytes(store.get(Object(f"{worker}.npy", len(BODY))))

        with ThreadPoolExecutor(64) as pool:
            bodies = list(pool.map(work, range(64)))
    every = [at for times in asked.values() for at in times]

    assert all(body == BODY for body in bodies)
    assert sum(at < 1 for at in every) >= 5 * sum(10 <= at < 11 for at in every)
    assert len({round(at, 6) for at in every if at > 0}) > 64, "they do not ask in step"
    if asks:
        pauses = [after - before for times in asked.values() for before, after in itertools.pairwise(times)]
        assert 4 <= min(pauses) <= max(pauses) < 5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3),
        ("0", 0),
        ("-5", 0),
        ("1e9", 300),
        ("inf", 300),
        ("nan", None),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300),
        ("Fri, 99 Foo 9999 23:59:59 GMT", None),
    ],
)
def test_retry_after_is_clamped(header: str | None, seconds: float | None) -> None:
    """Row 48."""
    assert client.retry_after(header, now=1000.0) == seconds


def test_requests_to_a_failing_server_are_retried_for_a_while(naps: list[float]) -> None:
    def script(handler: Scripted) -> None:
        if handler.number <= 4:
            handler.answer(500)
        else:
            handler.answer(200, BODY)

    assert get(script)[0] == BODY
    assert len(naps) == 3


def drip(handler: Scripted, data: bytes) -> None:
    """Send one byte now and then, forever."""
    handler.close_connection = True
    while True:
        for at in range(len(data)):
            handler.wfile.write(data[at : at + 1])
            time.sleep(0.05)  # this is the fault itself: a rate of 20 bytes per second


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 102400\r\n\r\n"], ids=["headers", "body"])
def test_a_server_that_sends_too_slowly_is_abandoned(head: bytes) -> None:
    """Row 49: never silent for long, never fast enough."""

    def script(handler: Scripted) -> None:
        handler.wfile.write(head)
        drip(handler, b"HTTP/1.1 200 OK\r\nX: y\r\n" if not head else b"x")

    with pytest.raises(Unreachable, match="too slow"):
        get(script, limits=SLOW)


def test_a_silent_server_is_abandoned_and_does_not_slow_others() -> None:
    """Row 49: it accepts and never answers, while another thread's downloads continue."""
    quiet = threading.Event()

    def script(handler: Scripted) -> None:
        if "quiet" in handler.path:
            quiet.wait(30)
        else:
            handler.answer(200, BODY)

    with scripted_server(script) as server:
        store, impatient = store_at(server), store_at(server, SILENT)
        failed: list[CacheToolError] = []

        def wait() -> None:
            try:
                impatient.get(Object("quiet.npy", 5))
            except Unreachable as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        good = sum(bytes(store.get(ITEM)) == BODY for _ in range(50))
        thread.join()
        quiet.set()

    assert good == 50
    assert len(failed) == 1


@pytest.mark.parametrize(
    "endless",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"junk",
    ],
    ids=["interim", "headers", "long header", "junk"],
)
def test_endless_headers_are_abandoned(endless: bytes) -> None:
    """Row 50."""

    def script(handler: Scripted) -> None:
        handler.close_connection = True
        while True:
            handler.wfile.write(endless * 10)

    with pytest.raises(Unreachable):
        get(script, limits=BRIEF)


def test_endless_trailers_are_abandoned() -> None:
    """Row 50."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def script(handler: Scripted) -> None:
        handler.close_connection = True
        handler.wfile.write(head + b"5\r\nalpha\r\n0\r\n")
        while True:
            handler.wfile.write(b"X-Trailer: y\r\n" * 100)

    with pytest.raises(Unreachable):
        get(script, Object("a.npy", 5), BRIEF)


def test_a_port_without_a_listener_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="no connection"):
        open_store(f"http://127.0.0.1:{free_port()}/", limits=QUICK).get(ITEM)


# --- redirects ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_obstore")
def test_redirects_are_followed_up_to_five() -> None:
    """Row 51."""

    def script(handler: Scripted) -> None:
        hops = int(handler.path.rpartition("-")[2] or 0) if "-" in handler.path else 0
        wanted = 5 if "good" in handler.path else 6
        if hops == wanted:
            handler.answer(200, BODY)
        else:
            handler.answer(302, Location=f"/{'good' if 'good' in handler.path else 'bad'}-{hops + 1}")

    assert get(script, Object("good.npy", len(BODY)))[0] == BODY
    with pytest.raises(SourceError, match="more than 5 redirects"):
        get(script, Object("bad.npy", len(BODY)))


def test_a_redirect_loop_ends() -> None:
    """Row 51."""
    with pytest.raises(SourceError, match="redirects"):
        get(lambda handler: handler.answer(301, Location=handler.path))


@pytest.mark.parametrize("target", ["ftp://host/x", "file:///etc/passwd", "gopher://host/", "javascript:1"])
def test_redirects_to_other_schemes_than_http_are_refused(target: str) -> None:
    """Row 87."""
    with pytest.raises(SourceError, match="not followed"):
        get(lambda handler: handler.answer(302, Location=target))


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize(
    ("target", "asked"),
    [
        ("/other place/a b.npy?k=1 2", "/other%20place/a%20b.npy?k=1%202"),
        ("/\xe9/a%20b.npy", "/%E9/a%20b.npy"),
        ("\xc3\xbc.npy?x=\xc3\xbc", "/place/%C3%BC.npy?x=%C3%BC"),
    ],
    ids=["blanks", "Latin-1", "UTF-8"],
)
def test_a_redirect_with_an_unescaped_target_is_followed(target: str, asked: str) -> None:
    """Browsers do so too."""

    def script(handler: Scripted) -> None:
        if handler.number == 1:
            handler.answer(302, Location=target)
        else:
            handler.answer(200, BODY)

    body, server = get(script)

    assert body == BODY
    assert [path for path, _ in server.requests] == ["/place/a.npy", asked]


@pytest.mark.parametrize("folder", ["d d", "d\u00fc", "d\udcff"])
def test_a_url_may_be_typed_without_escapes(folder: str) -> None:
    def script(handler: Scripted) -> None:
        if handler.path.endswith("/?k=1%202"):
            handler.answer(200, b'<a href="a%20b.npy">x</a>', Content_Type="text/html")
        else:
            handler.answer(200, BODY)

    with scripted_server(script) as server:
        store = open_store(f"{server.url}/{folder}/?k=1 2")
        assert [item.key for page in store.list() for item in page] == ["a b.npy"]
        assert bytes(store.get(Object("a b.npy", len(BODY)))) == BODY
        place = urllib.parse.quote(folder, errors="surrogateescape")
        assert [path for path, _ in server.requests] == [f"/{place}/?k=1%202", f"/{place}/a%20b.npy?k=1%202"]


@pytest.mark.parametrize(
    "target",
    [
        "http://[::1/x",
        "http://ho st/x",
        "http://h:99999/x",
        "http://a..b/x",
        f"http://{'a' * 80}/x",
        "//\xfc/",
    ],
)
def test_a_redirect_to_an_invalid_url_is_an_error_at_once(target: str) -> None:
    asked = 0

    def script(handler: Scripted) -> None:
        nonlocal asked
        asked += 1
        handler.answer(302, Location=target)

    with pytest.raises(SourceError, match="URL"):
        get(script)
    assert asked == 2  # once by each client


def test_a_redirect_to_an_invalid_port_is_an_error_that_names_the_requested_object() -> None:
    with pytest.raises(SourceError, match=r"/place/a\.npy: redirected to 'http://h:99999/x'"):
        get(lambda handler: handler.answer(302, Location="http://h:99999/x"))


@pytest.mark.parametrize("host", ["a..b.invalid", "a" * 70, "\xe9" * 70, "h:99999"])
def test_an_impossible_host_name_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match="its host or its port cannot be read"):
        open_store(f"http://{host}/d/")


def test_user_and_password_are_sent_as_typed() -> None:
    for user, password in (("us\udcff", "p\udcffw"), ("us%ff", "p%FFw")):
        with scripted_server(lambda handler: handler.answer(200, BODY)) as server:
            store = open_store(server.url.replace("://", f"://{user}:{password}@") + "/place/")
            assert bytes(store.get(ITEM)) == BODY
        assert base64.b64decode(server.requests[0][1]["Authorization"].split()[1]) == b"us\xff:p\xffw"
    with pytest.raises(UsageError, match="cannot be sent") as caught:
        open_store("http://user:CAN\ud800ARY@host/")
    assert "ARY" not in str(caught.value)


def test_a_netrc_that_is_not_utf8_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_bytes(b"machine h login u password CAN\xffARY\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    with pytest.raises(UsageError, match="netrc' cannot be used: not UTF-8") as caught:
        open_store("http://h/")

    assert "CAN" not in str(caught.value)


def test_a_redirect_from_https_to_http_is_refused() -> None:
    """Row 51."""
    with pytest.raises(SourceError, match="from https to http"):
        client._next_hop("https://host/a", "http://host/a")
    assert client._next_hop("https://host/a", "//user:CANARY@other/b#c") == "https://other/b"


PRIVATE = [
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]:{port}/x",
    "http://[::ffff:127.0.0.1]:{port}/x",
    "http://2130706433:{port}/x",
    "http://0x7f000001:{port}/x",
    "http://localhost:{port}/x",
    "http://10.0.0.1/x",
    "http://0.0.0.0:{port}/x",
]


def refuse_private(target: str) -> None:
    with scripted_server(lambda handler: handler.answer(200, BODY)) as inner:
        url = target.format(port=inner.url.rpartition(":")[2])
        with pytest.raises(SourceError, match=r"private address|no connection") as caught:
            get(lambda handler: handler.answer(302, Location=url))
        with pytest.raises(SourceError, match="another server"):
            get(lambda handler: handler.answer(404), Object(url, len(BODY)))

    assert inner.requests == []
    assert "CACHETOOL_ALLOW_HOSTS" in str(caught.value) or "::1" in target


@pytest.mark.parametrize("target", PRIVATE)
def test_a_redirect_or_manifest_never_reaches_a_private_address(target: str) -> None:
    """Row 87: the check uses the address that would be connected to."""
    refuse_private(target)


@pytest.mark.usefixtures("without_obstore")
def test_a_redirect_to_a_private_address_is_not_followed_to_another_port_either() -> None:
    refuse_private("http://127.0.0.1:{port}/x")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
    ],
)
def test_only_global_addresses_count_as_public(address: str, public: bool) -> None:
    assert origins.is_public(address) is public


def test_an_allowed_host_is_reached_without_the_credentials_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 51: credentials stay with their origin; another port is another origin."""
    monkeypatch.setenv("CACHETOOL_ALLOW_HOSTS", "elsewhere, 127.0.0.1")
    with (
        scripted_server(lambda handler: handler.answer(200, BODY)) as other,
        scripted_server(lambda handler: handler.answer(307, Location=f"{other.url}/x")) as first,
    ):
        store = open_store(first.url.replace("http://", "http://user:p%40ss@"))
        assert bytes(store.get(ITEM)) == BODY

    assert first.requests[0][1]["Authorization"] == "Basic dXNlcjpwQHNz"
    assert "Authorization" not in other.requests[0][1]


def test_user_and_password_may_come_from_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password p@ss\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    _, server = get(lambda handler: handler.answer(200, BODY))

    assert server.requests[0][1]["Authorization"] == "Basic dXNlcjpwQHNz"


def test_a_query_is_sent_to_its_own_server_only() -> None:
    """Rows 85 and 86."""

    def script(handler: Scripted) -> None:
        handler.answer(404 if "missing" in handler.path else 200, BODY)

    with scripted_server(script) as server:
        store = open_store(f"{server.url}/place?sig=CANARY")
        assert bytes(store.get(ITEM)) == BODY
        with pytest.raises(NotFound) as caught:
            store.get(Object("missing.npy", 5))

    assert server.requests[0][0] == "/place/a.npy?sig=CANARY"
    assert "CANARY" not in str(caught.value)
    assert "CANARY" not in store.url


@pytest.mark.parametrize("text", ["machine h login u password CANARY extra CANARY\n", "CANARY CANARY\n"])
def test_a_damaged_netrc_is_named_but_not_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "netrc").write_text(text)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    with pytest.raises(CacheToolError, match="netrc") as caught:
        open_store("http://host/")

    assert "CANARY" not in str(caught.value)


# --- listings -------------------------------------------------------------------------------------------------------


def test_an_html_index_lists_only_names_below_its_folder() -> None:
    page = """<html><a href="?C=N;O=D">Name</a> <a href="/">root</a> <a href="../">up</a>
    <a href="a.npy">a</a>  21-Nov-2025 00:34   12
    <a href="a.npy">again</a>
    <a href="b%20c.npy#part">b</a>  2025-11-21 00:34  1.2K
    <a href="http://other.host/place/evil.npy">x</a> <a href="mailto:me@host">m</a> <a href="javascript:x()">j</a>
    <a href="/place/sub/">sub</a> <a href="deep/er.npy">skipped: its folder is not linked</a> <a href=".hidden">h</a>
    <a href="%2e%2e/up.npy">u</a><a>none</a><a href="http://[bad">bad</a></html>"""

    def script(handler: Scripted) -> None:
        sub = handler.path.endswith("/sub/")
        body = b'<A HREF=c.npy>c</A>\n<A HREF="../">up</A>' if sub else page.encode()
        handler.answer(200, body, Content_Type="text/html; charset=utf-8")

    assert sorted(listing(script), key=lambda item: item.key) == [
        Object("a.npy", 12),
        Object("b c.npy", -1),
        Object("sub/c.npy", -1),
    ]


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        ("/place/", {"a.npy"}),
        ("sub/", set()),
        ("/other/", set()),
        ("http://other.host/place/", set()),
        ("http://[bad", {"a.npy"}),
        ("", {"a.npy"}),
    ],
)
def test_links_of_an_index_are_resolved_by_its_base(base: str, keys: set[str]) -> None:
    """Names below another folder are not below this one, even if this folder has the same name."""
    page = f'<html><head><base href="{base}"><base href="/late/"></head><a href=" a.npy\n">a</a></html>'
    if not base:
        page = page.replace('<base href="/late/">', "")
    assert {item.key for item in listing(lambda h: h.answer(200, page.encode(), Content_Type="text/html"))} == keys


def test_links_to_unusable_names_are_counted() -> None:
    """Row 71: a name with a slash in it, and one that reads as a URL. Links to other places do not count."""
    page = """<a href="fine.npy">fine</a> <a href="./1:2.npy">1</a> <a href="./e:f.npy">e</a> <a href="sub%2F">s</a>
    <a href="a%2Fb.npy">1</a> <a href="a%2Fb.npy">again</a> <a href="c:d.npy">2</a> <a href="c:d.npy">again</a>
    <a href="%2Fabs.npy">3</a> <a href="..%2Fup.npy">4</a> <a href="/place/f%2fg/">5</a> <a href="e:f.npy">6</a>
    <a href="/">root</a> <a href="%2F">root</a> <a href="../">up</a> <a href="?C=N;O=D">Name</a>
    <a href="http://other.host/place/evil.npy">x</a> <a href="mailto:me@host">m</a> <a href="javascript:x()">j</a>
    <a href="deep/er.npy">d</a> <a href="deep/e%2Fr.npy">d</a> <a href="%2e%2e/up.npy">u</a> <a href="x:?y=z">q</a>"""

    def script(handler: Scripted) -> None:
        body = "" if handler.path.endswith("/sub/") else page
        handler.answer(200, body.encode(), Content_Type="text/html; charset=utf-8")

    with scripted_server(script) as server:
        store = store_at(server)
        found = sorted(item.key for listed in store.list() for item in listed)

    assert found == ["1:2.npy", "e:f.npy", "fine.npy"]
    assert store.left_out == {"invalid names in an index": 6}


def test_links_are_resolved_by_the_url_of_the_received_page() -> None:
    """The folder is requested with an empty path segment or with another spelling of its host, or was redirected."""
    page = b"""<a href="a.npy">a</a> <a href="http://LOCALHOST:%d/place/b.npy">b</a> <a href="/else/c.npy">c</a>
    <a href="/place/d.npy">d</a> <a href="/place/sub/e.npy">e</a> <a href="/other/f.npy">f</a>"""

    def script(handler: Scripted) -> None:
        if handler.path == "/moved/":
            handler.answer(302, Location="/else/")
        else:
            handler.answer(200, page % handler.server.server_address[1], Content_Type="text/html")

    def keys(url: str) -> list[str]:
        return sorted(item.key for page in open_store(url).list() for item in page)

    with scripted_server(script) as server:
        local = server.url.replace("127.0.0.1", "localhost")
        assert keys(f"{server.url}//place//") == ["a.npy", "d.npy"]
        assert keys(f"{local}/place/") == ["a.npy", "b.npy", "d.npy"]
        assert keys(f"{server.url}/moved/") == ["a.npy", "c.npy"]


def test_an_object_and_a_folder_of_one_name_are_both_listed() -> None:
    def script(handler: Scripted) -> None:
        body = b'<a href="a.npy">a</a>' + (b"" if handler.path.endswith("/a.npy/") else b'<a href="a.npy/">a</a>')
        handler.answer(200, body, Content_Type="text/html")

    assert sorted(item.key for item in listing(script)) == ["a.npy", "a.npy/a.npy"]


def test_links_with_a_query_are_counted_except_those_of_the_page_itself() -> None:
    page = b"""<a href="a.npy?sig=1">a</a> <a href="b.npy">b</a> <a href="b.npy?download">b</a> <a href="?C=N;O=D">n</a>
    <a href="sub/?C=N">s</a> <a href="/place/?x">p</a> <a href="/login?x">l</a> <a href="x:?y=z">q</a>"""
    with scripted_server(lambda handler: handler.answer(200, page, Content_Type="text/html")) as server:
        store = store_at(server)
        assert [item.key for page in store.list() for item in page] == ["b.npy"]
        assert store.left_out == {"links with a query": 1}


def test_an_object_of_unknown_size_is_accepted_if_it_is_complete() -> None:
    assert get(lambda handler: handler.answer(200, BODY), Object("a.npy", -1))[0] == BODY
    with pytest.raises(Unreachable):
        get(lambda handler: handler.answer(200, BODY, Content_Length="102401"), Object("a.npy", -1), SILENT)


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        "[1]",
        "nope",
        '[{"name": "a"}]',
        '[{"name":"a","type":"file","size":"x"}]',
        "[" * 99999,
        '[{"name":"a","type":"file","size":Infinity}]',
        '[{"name":"a","type":"file","size":' + "9" * 5000 + "}]",
    ],
)
def test_json_without_an_index_is_an_error(body: str) -> None:
    with pytest.raises(SourceError, match="autoindex"):
        listing(lambda handler: handler.answer(200, body.encode(), Content_Type="application/json"))


def test_the_json_of_caddy_is_read_as_an_index() -> None:
    """Folders in this JSON end with a slash, and its times differ in form from Last-Modified."""
    files = [("a.npy", 12, False), ("sub/", 4096, True)]
    time = "2025-11-21T01:34:05.123456789+01:00"

    def script(handler: Scripted) -> None:
        shown = files[:1] if handler.path.endswith("/sub/") else files
        page = [
            {"name": n, "size": s, "url": f"./{n}", "mod_time": time, "mode": 420, "is_dir": d, "is_symlink": False}
            for n, s, d in shown
        ]
        handler.answer(200, json.dumps(page).encode(), Content_Type="application/json; charset=utf-8")

    etag = "modified:Fri, 21 Nov 2025 00:34:05 GMT"
    assert listing(script) == [Object("a.npy", 12, etag), Object("sub/a.npy", 12, etag)]


def test_a_server_with_unknown_json_is_asked_for_its_html_page() -> None:
    def script(handler: Scripted) -> None:
        if "json" in handler.headers["Accept"]:
            handler.answer(200, b'{"files": [{"base": "a.npy", "size": "12 B"}]}', Content_Type="application/json")
        else:
            handler.answer(200, b'<a href="/place/a.npy">a.npy</a>', Content_Type="text/html")

    assert listing(script) == [Object("a.npy", -1)]


def test_hostile_names_in_an_index_are_left_out() -> None:
    """Row 71."""
    names = ["..", ".", "", "a/b.npy", "../up.npy", ".hidden", "fine.npy"]
    body = json.dumps([{"name": name, "type": "file", "size": 1} for name in names]).encode()
    with scripted_server(lambda handler: handler.answer(200, body, Content_Type="application/json")) as server:
        store = store_at(server)
        found = [item.key for page in store.list() for item in page]

    assert found == ["fine.npy"]
    assert store.left_out == {"invalid names in an index": 5, "hidden": 1}


def test_endless_folders_are_an_error_and_not_a_loop() -> None:
    """Row 52."""
    body = json.dumps([{"name": "x", "type": "directory"}]).encode()

    with pytest.raises(SourceError, match="64 deep"):
        listing(lambda handler: handler.answer(200, body, Content_Type="application/json"))


@pytest.mark.parametrize("kind", ["json", "html"])
def test_an_index_with_duplicate_or_unordered_names_lists_each_once_or_is_an_error(tmp_path: Path, kind: str) -> None:
    """Row 52: the listing on disk is sorted for any order of the server. A duplicate is an error in JSON; in a page it
    is a second link to the same object.
    """
    names = ["b.npy", "a.npy", "c.npy", "a.npy"]

    def script(handler: Scripted) -> None:
        if kind == "json":
            page = json.dumps([{"name": name, "type": "file", "size": 1} for name in names]).encode()
            handler.answer(200, page, Content_Type="application/json")
        else:
            page = "".join(f'<a href="{name}">{name}</a> 21-Nov-2025 00:34 1\n' for name in names).encode()
            handler.answer(200, page, Content_Type="text/html")

    with scripted_server(script) as server:
        if kind == "json":
            with pytest.raises(BadObject, match=r"'a\.npy' is listed twice"):
                list_source(f"{server.url}/", tmp_path / "twice")
            names.pop()
        found = list_source(f"{server.url}/", tmp_path / "listing")
    assert [item.key for unit in range(found.units) for item in found.unit(unit)] == ["a.npy", "b.npy", "c.npy"]


def test_a_place_without_an_index_is_an_error_with_advice() -> None:
    with pytest.raises(SourceError, match="manifest"):
        listing(lambda handler: handler.answer(200, b"hello", Content_Type="text/plain"))
    with pytest.raises(AccessDenied):
        listing(lambda handler: handler.answer(403, b"Directory listing denied", Content_Type="text/html"))


def manifest(text: str | bytes, name: str = "list.txt") -> list[Object]:
    body = text.encode() if isinstance(text, str) else text
    with scripted_server(lambda handler: handler.answer(200, body)) as server:
        return [item for page in open_store(f"{server.url}/a/{name}").list() for item in page]


def test_a_manifest_may_name_another_server_only_if_that_is_allowed() -> None:
    with pytest.raises(
        SourceError, match=r"'https://host/x/c\.npy' is on another server.*\n.*CACHETOOL_ALLOW_HOSTS=host"
    ):
        manifest("a.npy\nhttps://host/x/c.npy\n")
    with scripted_server(
        lambda handler: handler.answer(200, f"http://{handler.headers['Host']}/b/c.npy".encode())
    ) as one:
        assert [item.key for page in open_store(f"{one.url}/a/list.txt").list() for item in page] == [
            f"{one.url}/b/c.npy"
        ]
        item = Object(f"{one.url}/b/c.npy", -1)
        assert bytes(open_store(f"{one.url}/a/list.txt").get(item)) == item.key.encode()


def test_a_manifest_of_names_and_urls_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHETOOL_ALLOW_HOSTS", "host")
    found = manifest("# mine\n\na.npy\r\n./sub/b c.npy\n  https://host/x/c.npy  \n")

    assert found == [Object("a.npy", -1), Object("sub/b c.npy", -1), Object("https://host/x/c.npy", -1)]


def test_a_manifest_of_json_lines_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHETOOL_ALLOW_HOSTS", "host")
    lines = [
        {"key": "a.npy", "size": 5, "etag": "x"},
        {"url": "http://host/b.npy", "size": 0},
        {"path": "c.npy", "sha256": "ABC"},
    ]

    assert manifest("\n".join(map(json.dumps, lines)), "list.jsonl") == [
        Object("a.npy", 5, "x"),
        Object("http://host/b.npy", 0),
        Object("c.npy", -1, "sha256:abc"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "http://a..b/x.npy",
        "../up.npy",
        "/etc/passwd",
        "a//b.npy",
        "file:///etc/passwd",
        "gopher://host/x",
        "https://host/x?X-Amz-Signature=CANARY",
        "https://user:CANARY@host/x",
        '{"key": 5}',
        '{"size": 5}',
        '{"key": "a", "size": -1}',
        '{"key": "a", "size": "5"}',
        '{"key": "a", "size": true}',
        '{"key": "a", "etag": 5}',
        "{" * 50_000,
        "{broken",
        '{"key": "a", "size": Infinity}',
        "https://[::1/x.npy",
        "https://host:99999/x.npy",
        "https://host/a b.npy",
        "https://host/é.npy",
        "https:///x.npy",
    ],
)
def test_an_unusable_line_is_named_by_its_number(line: str) -> None:
    """Rows 71, 86, 87."""
    with pytest.raises(BadObject, match="line 2") as caught:
        manifest(f"fine.npy\n{line}\n")

    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize("line", ["[1]", '"c.bin"', "null", "5", "a.npy"])
def test_a_line_of_a_jsonl_manifest_that_is_not_an_object_is_refused(line: str) -> None:
    with pytest.raises(BadObject, match=r"line 2: .*\{"):
        manifest(f'{{"key": "fine.npy"}}\n{line}\n', "list.jsonl")


def test_a_byte_order_mark_is_not_part_of_the_first_key() -> None:
    assert manifest("\ufeffa.npy\nb.npy\n") == [Object("a.npy", -1), Object("b.npy", -1)]


def test_a_real_folder_is_read_through_both_kinds_of_index(tmp_path: Path) -> None:
    files = {"a b/c#d.npy": b"1", "a b/e/f.json": b"22", "g.txt": b"333"}
    for name, body in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(body)
    (tmp_path / "g.txt").chmod(0o644)
    os.utime(tmp_path / "g.txt", (1_000_000_000, 1_000_000_000))

    found: dict[str, Any] = {}
    for index in ("html", "json"):
        with folder_server(tmp_path, index=index) as server:
            store = open_store(server.url)
            items = [item for page in store.list() for item in page]
            found[index] = {item.key: bytes(store.get(item)) for item in items}

    assert found == {"html": files, "json": files}


# --- where a body ends ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 20\r\nContent-Length: 50",
        "Content-Length: 50\r\nContent-Length: 20",
        "Transfer-Encoding: gzip, chunked\r\nContent-Length: 50",
        "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\nContent-Length: 50",
        "Transfer-Encoding: chunked, chunked\r\nContent-Length: 50",
        "Transfer-Encoding:\r\nTransfer-Encoding: chunked\r\nContent-Length: 50",
    ],
)
@pytest.mark.parametrize("size", [-1, 50])
def test_an_answer_with_contradictory_lengths_is_refused(head: str, size: int) -> None:
    answer = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n32\r\n".encode() + BODY[:50] + b"\r\n0\r\n\r\n"
    with pytest.raises(BadObject, match="Content-Length and Transfer-Encoding"):
        get(lambda handler: raw(handler, answer), Object("a.npy", size), limits=QUICK)


def test_a_second_content_encoding_header_is_respected() -> None:
    head = "Content-Encoding: identity\r\nContent-Encoding: gzip\r\nContent-Length: 50"
    answer = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + BODY[:50]
    with pytest.raises(BadObject, match="Content-Encoding: gzip"):
        get(lambda handler: raw(handler, answer), Object("a.npy", -1), limits=QUICK)


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 50\r\nContent-Length: 050\r\nTransfer-Encoding: identity",
        "Content-Length: 50\r\nTransfer-Encoding:\r\nContent-Encoding:",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: Chunked",
    ],
)
def test_identical_duplicate_headers_are_accepted(head: str) -> None:
    body = b"32\r\n" + BODY[:50] + b"\r\n0\r\n\r\n" if "chunked" in head else BODY[:50]
    answer = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + body
    assert get(lambda handler: raw(handler, answer), Object("a.npy", -1))[0] == BODY[:50]


def test_interim_answers_are_ignored() -> None:
    interim = b"".join(
        f"HTTP/1.1 {code} Wait\r\nLink: </a.css>\r\nContent-Length: 7\r\n\r\n".encode() for code in (100, 103, 102, 103)
    )
    answer = interim + b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n" + BODY[:50]
    assert get(lambda handler: raw(handler, answer), Object("a.npy", 50))[0] == BODY[:50]


def test_endless_interim_answers_are_an_error() -> None:
    def script(handler: Scripted) -> None:
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b"HTTP/1.1 103 Wait\r\nLink: </a.css>\r\n\r\n" * 1000)

    with pytest.raises(SourceError, match=r"answers 103|too slow"):
        get(script, Object("a.npy", 50), limits=BRIEF)
