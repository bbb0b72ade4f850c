"""Texts of servers that try to keep the parser busy: each is parsed to its end or refused, in linear time.

A quadratic parser takes hours for 10 MB. The timeout of the tests only ends that.
"""

from __future__ import annotations

import json
import tracemalloc

import pytest

from cachetool.core.errors import BadObject, CacheToolError, SourceError
from cachetool.stores import open_store
from cachetool.stores.failures import as_our_error
from cachetool.stores.http_listing import json_objects, read_index, read_manifest
from cachetool.stores.http_pages import told_size
from cachetool.stores.redact import redact, scrub
from tests.servers import Scripted, scripted_server

pytestmark = pytest.mark.timeout(120)

PAGE = "http://h/d/"
MB = 10**6
SHAPES: dict[str, tuple[bytes, int]] = {
    # the repeated text, and the number of further links after the link to k1
    "blanks": (b" ", 0),
    "marked sections": (b"<![", 0),
    "tags without an end": (b"<a ", 0),
    "tags inside of tags": (b"<a href=", 1),
    "ends of tags without an end": (b"</a ", 0),
    "comments without an end": (b"<!--", 0),
    "declarations": (b"<!a", 0),
    "instructions": (b"<?", 0),
    "signs of less": (b"<", 0),
    "ends of nothing": (b"</", 0),
    "ampersands": (b"&", 0),
    "references": (b"&#9", 0),
    "digits": (b"9", 0),
    "scripts": (b"<script>", 0),
    "quotes": (b'<a href="', 1),
    "quotes of two kinds": (b"<a x='\"", 0),
    "equal signs": (b"<a =", 0),
    "dates": (b"21-Nov-2025 00:34 ", 0),
    "lines of blanks": (b"\n ", 0),
    "bytes that are no text": (b"\xff", 0),
    "doctypes": (b"<!DOCTYPE [", 0),
}


def page_of(piece: bytes, size: int) -> memoryview:
    return memoryview(b'<html><a href="k1.npy">k1</a>' + piece * (size // len(piece)) + b"x</html>")


SLOWEST = ("tags without an end", "quotes of two kinds", "signs of less")
"""The shapes whose 10 MB take seconds; the default run reads only the first of them."""


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[pytest.mark.soak] * (shape in SLOWEST[1:])) for shape in SHAPES]
)
def test_an_index_page_of_10_mb_of_one_shape_is_parsed_to_its_end(shape: str) -> None:
    piece, more = SHAPES[shape]

    entries = list(read_index(page_of(piece, 10 * MB), "text/html", page=PAGE))

    assert entries[0].name == "k1.npy"
    assert len([entry for entry in entries if not entry.left_out]) == 1 + more


INSIDE = {
    "a link of 10 MB": b'<a href="' + b"x" * 10 * MB + b'">',
    "a link of slashes": b"<a href='" + b"/" * 10 * MB + b"'>",
    "a link of dots": b"<a href='" + b"../" * (10 * MB // 3) + b"'>",
    "a reference of 10 MB": b'<a href="&#' + b"9" * 10 * MB + b';">',
    "a reference of 5,000 digits": b'<a href="&#' + b"9" * 5000 + b';">',
    "an attribute's name of 10 MB": b"<a " + b"a" * 10 * MB + b">",
    "attributes": b"<a " + b"a=b " * (MB // 4) + b">",
    "attributes without values": b"<a" + b" a" * (MB // 2) + b">",
    "a base of 10 MB": b'<base href="' + b"/a" * 5 * MB + b'">',
}


@pytest.mark.parametrize("what", INSIDE)
def test_a_tag_of_10_mb_hides_no_link_after_it(what: str) -> None:
    body = INSIDE[what] + b"</a><a href=/d/k2.npy>"

    entries = list(read_index(memoryview(body), "text/html", page=PAGE))

    assert [entry.name for entry in entries if not entry.left_out and entry.name.startswith("k")] == ["k2.npy"]


@pytest.mark.parametrize("size", [MB, pytest.param(10 * MB, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "piece", [b"<a href=k1.npy>", b"y<b>", b"<a href=k1.npy>text</a> ", b"<a href=?k1>", b"<style></style>"]
)
def test_a_page_of_only_links_and_tags_is_parsed_to_its_end(piece: bytes, size: int) -> None:
    entries = list(read_index(page_of(piece, size), "text/html", page=PAGE))

    assert [entry.name for entry in entries if not entry.left_out] == ["k1.npy"]


@pytest.mark.parametrize("href", ["../x", "a:b", "//h/x", "x?y"])
def test_a_million_links_are_not_joined_to_a_base_of_a_thousand_folders(href: str) -> None:
    body = b'<base href="' + b"a/" * 4000 + b'">' + f"<a href={href}>".encode() * (MB // 12)

    with pytest.raises(SourceError, match=r"http://h/d/: its links take too long to be followed; give a manifest"):
        list(read_index(memoryview(body), "text/html", page=PAGE))


JSON = {
    "brackets": b"[" * 10 * MB,
    "objects inside of objects": b'[{"a":' + b'{"a":' * (2 * MB),
    "an entry without end": b'[{"name": "' + b"x" * 10 * MB,
    "blanks": b" " * 10 * MB,
    "a number of 10 MB": b'[{"size":' + b"9" * 10 * MB + b"}]",
    "numbers": b"[" + b"1," * (5 * MB) + b"1]",
    "lists": b"[" + b"[]," * (3 * MB) + b"[]]",
    "text": b'["' + b"x" * 10 * MB + b'"]',
    "commas": b"[" + b"," * 10 * MB,
    "backslashes": b'[{"name": "' + b"\\\\" * 5 * MB,
    "no end": b'[{"name": "a", "type": "file"}' + b',{"name": "a", "type": "file"}' * 1000,
    "two lists": b'[{"name": "a", "type": "file"}] []',
}


@pytest.mark.parametrize("what", JSON)
def test_10_mb_of_json_without_an_index_are_refused_in_one_line(what: str) -> None:
    with pytest.raises(SourceError, match=r"^http://h/d/: the JSON is not an nginx autoindex"):
        list(read_index(memoryview(JSON[what]), "application/json", page=PAGE))


def test_a_list_of_objects_is_decoded_one_after_another() -> None:
    """Decoded together they would take 30 times the memory of their text."""
    body = memoryview(b"[" + b'{"":[{},{},{},{},{},{},{},{}]}, ' * 40_000 + b"{}\n]\n")
    tracemalloc.start()

    assert sum(1 for _ in json_objects(body)) == 40_001
    assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    tracemalloc.stop()


@pytest.mark.parametrize("size", [2**20 - 40, 2**20, 2**20 + 7, 3 * 2**20])
def test_objects_are_complete_for_any_split_of_the_text(size: int) -> None:
    entries = [{"name": f'ä{number}\\"{{[', "size": number} for number in range(size // 60)]
    body = ("\ufeff" + json.dumps(entries, ensure_ascii=False)).encode()

    assert list(json_objects(memoryview(body))) == entries
    assert list(json_objects(memoryview(b" [ ] "))) == []


@pytest.mark.parametrize(
    "line",
    [
        b"x" * 10 * MB,
        b"[" * 10 * MB,
        b'{"key": "' + b"x" * 10 * MB + b'"}',
        b"http://" + b"a." * 5 * MB,
        b"a/" * 5 * MB,
    ],
    ids=["name", "brackets", "key", "host", "parts"],
)
def test_a_line_of_10_mb_in_a_manifest_is_refused_with_its_number(line: bytes) -> None:
    with pytest.raises(BadObject, match=r"^http://h/m\.jsonl, line 2: .* 1\d+ bytes.* 65536"):
        list(read_manifest(memoryview(b'{"key": "a.npy"}\n' + line), place="http://h/m.jsonl"))


@pytest.mark.parametrize("line", [b"http://" + b"a." * 30_000 + b"/x", b"http://" + b"a" * 60_000 + b"/x"])
def test_an_endless_host_name_is_refused(line: bytes) -> None:
    with pytest.raises(BadObject, match=r"line 1: .* not a URL"):
        list(read_manifest(memoryview(line), place="http://h/m.txt"))


TIMES = MB // 10
MESSAGES = [
    "a" * MB, "a1." * TIMES, "token" * TIMES, "token-" * TIMES, "token " * TIMES, "token" + " " * MB, 'token="' * TIMES,
    "authorization" + "\n" * MB, "authorization " * TIMES, "http://" * TIMES, "://" * TIMES, "http://" + "@" * MB,
    "http://a:" + "/?" * TIMES, "bearer " * TIMES, "sig=" * TIMES,
]  # fmt: skip


@pytest.mark.parametrize("text", MESSAGES, ids=lambda text: repr(text[:14]))
def test_secrets_are_removed_from_a_message_of_megabytes_in_linear_time(text: str) -> None:
    assert "\n" not in scrub(text)
    assert "\n" not in redact(text)


def test_secrets_are_found_at_every_start_of_a_word() -> None:
    text = "GET 1http://u:pw@h/x?a +token=t1 a-sig = t2 X-Amz-Security-Token:t3 design=kept sig=t4"

    assert scrub(text) == "GET 1http://h/x +token=*** a-sig = *** X-Amz-Security-Token:*** design=kept sig=***"


def test_an_error_of_a_store_that_quotes_a_megabyte_is_one_line() -> None:
    class InvalidPathError(Exception):
        pass

    for text in ('Path "' * MB, "<Code>" * MB, 'Path "a" contained' + 'Path "' * MB, "https://" * MB):
        said = str(as_our_error(InvalidPathError(text), place="s3://b", key="k"))
        assert said.count("\n") == 1
    assert "'a'" in str(as_our_error(InvalidPathError('Path "a" contained it'), place="s3://b", key="k"))


@pytest.mark.parametrize("said", ["²", "9" * 5000, "", "-1", "1_0", "٣", "9" * 19])
def test_an_invalid_size_in_a_header_is_ignored(said: str) -> None:
    assert told_size(said) == -1
    assert told_size("192") == 192


def test_an_index_page_beyond_the_limit_is_refused_before_it_has_arrived() -> None:
    def page(handler: Scripted) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", str(2**27 + 1))
        handler.end_headers()

    with scripted_server(page) as server:
        store = open_store(f"{server.url}/d/")
        with pytest.raises(CacheToolError, match=f"/d/: .*more than {2**27} bytes"):
            list(store.list())
        store.close()
