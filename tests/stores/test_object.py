"""Object stores: refusal, absence and silence are distinguished, and no message contains a secret."""

from __future__ import annotations

import collections
import contextlib
import datetime
import gzip
import itertools
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
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
from cachetool.stores import Limits, Object, OrderedStore, open_store
from cachetool.stores.bounded import Watched
from cachetool.stores.login import Credentials, Login
from cachetool.stores.object import ObjectStore, _Clients
from cachetool.stores.redact import printable
from tests.servers import Moto, Scripted, certificates, free_port, rclone_s3, scripted_server

QUICK = Limits(retry=0.8, throttle=0.8)
SILENT = Limits(retry=0.8, silence=0.5, listing=0.5)
SECRET = "CANARYsecret"
NOW = "Fri, 21 Nov 2025 00:34:00 GMT"


def use(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], **more: str) -> None:
    for name, value in {**env, **more}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set keys for servers that do not check them."""
    use(
        monkeypatch,
        {"AWS_ACCESS_KEY_ID": "CANARYid", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "CANARYtok"},
    )
    return monkeypatch


def fail(url: str, limits: Limits = QUICK, item: Object | None = None) -> CacheToolError:
    """Return the error of listing, or of getting ``item``, after checking its message."""
    store = open_store(url, limits=limits)
    with pytest.raises(CacheToolError) as caught:
        list(store.list()) if item is None else store.get(item)
    text = str(caught.value)
    assert "CANARY" not in text
    assert text.count("\n") <= 1
    assert text.replace("\n", "").isprintable()
    assert caught.value.__suppress_context__  # a traceback would show the client's own message
    return caught.value


def test_real_objects_are_fetched_unchanged(
    s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, digits: Any
) -> None:
    use(monkeypatch, s3_env)
    store = open_store("s3://digits/train/")

    items = [item for page in store.list() for item in page]

    assert len(items) == 2 * 1797
    for item in items[:50]:
        assert bytes(store.get(item)) == (digits / item.key).read_bytes()


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_wrong_key_is_access_denied(s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use(monkeypatch, s3_env, **{name: "CANARYwrong"})

    assert isinstance(fail("s3://digits/train/"), AccessDenied)
    assert isinstance(fail("s3://digits/train/", item=Object("0000.npy", 640)), AccessDenied)


def test_an_unsigned_request_to_a_private_bucket_is_access_denied(
    s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, s3_env, AWS_SKIP_SIGNATURE="true")

    assert isinstance(fail("s3://digits/train/"), AccessDenied)


def test_a_missing_bucket_is_not_found(s3_env: dict[str, str], moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    for env in (s3_env, dict(moto.env)):
        use(monkeypatch, env)
        error = fail("s3://no-such-bucket/train/")
        assert isinstance(error, NotFound)
        assert "s3://no-such-bucket/train/: no such bucket" in str(error)


def test_a_folder_marker_is_left_out_and_an_empty_object_is_not(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dict(moto.env))
    moto.put("markers", {"p/": b"", "p/dir.v1/": b"", "p/dir.v1/a.npy": b"x", "p/empty.bin": b"", "p": b""})
    for url in ("s3://markers/p", "s3://markers/p/"):
        store = open_store(url)
        assert {item.key for page in store.list() for item in page} == {"dir.v1/a.npy", "empty.bin"}
        assert store.left_out == {"folder markers": 2}


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "aws-chunked,gzip", "zstd"])
@pytest.mark.parametrize("key", ["a.json", "a.bin", "a.npy", "a.jpg"])
def test_compressed_objects_are_refused_with_the_name_of_their_encoding(
    moto: Moto, monkeypatch: pytest.MonkeyPatch, encoding: str, key: str
) -> None:
    use(monkeypatch, dict(moto.env))
    moto.put("packed", {})
    moto.client.put_object(Bucket="packed", Key=key, Body=gzip.compress(b"x" * 999), ContentEncoding=encoding)
    store = open_store("s3://packed")
    item = store.find(key)

    for take in (lambda: store.get(item), lambda: store.get_range(item, 1, 5)):
        with pytest.raises(BadObject, match=rf"'{key}' .*Content-Encoding: (gzip|br|zstd)[,;] .*unpack them"):
            take()


@pytest.mark.parametrize("encoding", ["identity", "aws-chunked", ""])
def test_encodings_that_change_no_byte_are_accepted(moto: Moto, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    use(monkeypatch, dict(moto.env))
    moto.put("packed", {})
    moto.client.put_object(Bucket="packed", Key="a.bin", Body=b"hello", ContentEncoding=encoding)
    store = open_store("s3://packed")

    assert bytes(store.get(store.find("a.bin"))) == b"hello"


def test_checking_the_encoding_costs_no_request(made_up: pytest.MonkeyPatch) -> None:
    with scripted_server(lambda handler: handler.answer(200, b"hello", ETag='"1"', Last_Modified=NOW)) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        assert bytes(open_store("s3://b").get(Object("a.bin", 5, "1"))) == b"hello"
        assert len(server.requests) == 1


@pytest.mark.parametrize("key", ["p/a//b.npy", "p/../b.npy", "p/./b.npy", "p/ctl\x01.npy"])
def test_a_key_that_cannot_be_fetched_is_named(moto: Moto, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    use(monkeypatch, dict(moto.env))
    bucket = f"odd-{key.encode().hex()}"
    moto.put(bucket, {key: b"x"})

    error = fail(f"s3://{bucket}/p")

    assert isinstance(error, BadObject)
    assert repr(key) in str(error)
    assert "with --on-error skip" in str(error)
    with contextlib.closing(open_store(f"s3://{bucket}/p", skip_unusable=True)) as store:
        assert list(itertools.chain.from_iterable(store.list())) == []
        [(name, why)] = store.left_out.listed()  # type: ignore[attr-defined]
    assert name == printable(key.removeprefix("p/"))
    assert "cannot be requested" in why


ODD = ["p//c.npy", "p/a//", "p/x/./c.npy", "p/\t.npy", "p/d.npy/", "p/\x7f", "p/x/../c.npy"]
GOOD = ["p/a.npy", "p/\u00e9 +%.npy", "p/a\\b.npy", "p/x/b.npy", "p/" + "k" * 900 + ".npy", "p/...", "p/&<>.npy"]


@pytest.mark.parametrize("prefix", ["p", "p/", ""])
def test_keys_that_cannot_be_requested_are_skipped_and_named_and_the_others_fetched(
    moto: Moto, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    use(monkeypatch, dict(moto.env))
    moto.put("odd-keys", {key: key.encode() for key in [*ODD, *GOOD]} | {"p/marker/": b"", "/begins.npy": b"x"})
    with contextlib.closing(open_store(f"s3://odd-keys/{prefix}", skip_unusable=True)) as store:
        items = [item for page in store.list() for item in page]
        start = len(prefix.strip("/") + "/") if prefix else 0

        assert sorted(item.key for item in items) == sorted(key[start:] for key in GOOD)
        assert all(
            bytes(store.get(item)) == (f"{prefix.strip('/')}/{item.key}" if start else item.key).encode()
            for item in items
        )
        names = [name for name, _ in store.left_out.listed()]  # type: ignore[attr-defined]
        odd = [key[start:] for key in ODD] + ([] if prefix else ["/begins.npy"])
        assert sorted(names) == sorted(map(printable, odd))
        assert store.left_out["folder markers"] == 1


def test_pages_of_cachetools_own_list_request_are_followed_and_resumed(
    moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, dict(moto.env))
    keys = [f"{number:04}.bin" for number in range(1100)]
    moto.put("many", dict.fromkeys(keys, b"x") | {"0500//x": b"x"})
    store = open_store("s3://many", skip_unusable=True)

    assert [item.key for page in store.list() for item in page] == keys
    assert isinstance(store, OrderedStore)
    assert [item.key for page in store.list_after("1090.bin") for item in page] == keys[1091:]


def test_cachetools_own_list_request_is_signed_and_a_wrong_key_is_refused(
    s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server checks signatures."""
    use(monkeypatch, s3_env)
    expected = sorted(item.key for page in open_store("s3://digits/train").list() for item in page)

    assert (
        sorted(item.key for page in open_store("s3://digits/train", skip_unusable=True).list() for item in page)
        == expected
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(AccessDenied) as caught:
        list(open_store("s3://digits/train", skip_unusable=True).list())
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "CANARY/tok+en=="])
def test_the_signature_equals_botocores(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    import botocore.auth
    import botocore.awsrequest
    import botocore.credentials

    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "sec/ret+", "AWS_REGION": "eu-west-3"}
    use(monkeypatch, keys | ({"AWS_SESSION_TOKEN": token} if token else {}), AWS_REQUEST_PAYER="true")
    with scripted_server(lambda handler: handler.answer(200, b"<ListBucketResult/>")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        list(open_store("s3://bucket/a b+c/\u00e9", skip_unusable=True).list())
        path, _, query = server.requests[0][0].partition("?")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        signature, date = asked.pop("X-Amz-Signature"), asked["X-Amz-Date"]
        at = datetime.datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: at)
        plain = {name: value for name, value in asked.items() if not name.startswith("X-Amz")}
        request = botocore.awsrequest.AWSRequest(
            "GET", f"{server.url}{path}?{urllib.parse.urlencode(plain, quote_via=urllib.parse.quote)}"
        )
        credentials = botocore.credentials.Credentials("id", "sec/ret+", token or None)
        botocore.auth.S3SigV4QueryAuth(credentials, "s3", "eu-west-3", expires=900).add_auth(request)
        theirs = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(request.url).query, keep_blank_values=True))

    assert signature == theirs["X-Amz-Signature"]
    assert plain == {
        "list-type": "2",
        "encoding-type": "url",
        "prefix": "a b+c/\u00e9/",
        "x-amz-request-payer": "requester",
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "not the listing of a bucket"),
        (b'<!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>', "not the listing of a bucket"),
        (
            b"<r><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></r>",
            "repeats itself",
        ),
    ],
)
def test_an_invalid_answer_to_cachetools_own_list_request_is_an_error(
    made_up: pytest.MonkeyPatch, body: bytes, said: str
) -> None:
    with scripted_server(lambda handler: handler.answer(200, body)) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(SourceError, match=said) as caught:
            list(open_store("s3://b", skip_unusable=True).list())
    assert "CANARY" not in str(caught.value)


def test_behind_a_proxy_no_option_is_advised_that_would_not_help(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dict(moto.env), http_proxy=moto.env["AWS_ENDPOINT_URL"])
    moto.put("proxied", {"a//b": b"x"})

    for skip in (False, True):
        with pytest.raises(BadObject, match="cannot be fetched") as caught:
            list(open_store("s3://proxied", skip_unusable=skip).list())
        assert "--on-error" not in str(caught.value)
        assert "\nuse a longer prefix" in str(caught.value)
    moto.put("proxied", {"below/c": b"x"})
    assert [item.key for page in open_store("s3://proxied/below").list() for item in page] == ["c"]


def test_cachetools_own_list_request_trusts_the_authorities_of_the_bundle(
    made_up: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = b"<r><Contents><Key>a//b</Key><Size>1</Size></Contents><Contents><Key>c</Key><Size>1</Size></Contents></r>"
    authority, key = certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(key)
    with scripted_server(lambda handler: handler.answer(200, body), tls=tls) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(Unreachable):
            list(open_store("s3://b", limits=QUICK, skip_unusable=True).list())
        made_up.setenv("AWS_CA_BUNDLE", str(authority))
        assert [item.key for page in open_store("s3://b", skip_unusable=True).list() for item in page] == ["c"]


def test_a_list_continues_with_new_credentials(made_up: pytest.MonkeyPatch) -> None:
    """The credentials of a role may expire while a large bucket is listed."""
    pages = [b"<r><Contents><Key>a.bin</Key><Size>1</Size></Contents><IsTruncated>true</IsTruncated>"
             b"<NextContinuationToken>t</NextContinuationToken></r>",
             b"<r><Contents><Key>b.bin</Key><Size>1</Size></Contents></r>"]  # fmt: skip

    def script(handler: Scripted) -> None:
        if "CANARYid" in handler.path and "continuation-token" in handler.path:
            made_up.setenv("AWS_ACCESS_KEY_ID", "CANARYnew")
            handler.answer(403, b"<Error><Code>ExpiredToken</Code></Error>")
        else:
            handler.answer(200, pages["start-after=a.bin" in handler.path])

    with scripted_server(script) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        assert [item.key for page in open_store("s3://b", skip_unusable=True).list() for item in page] == [
            "a.bin",
            "b.bin",
        ]


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (301, "", SourceError, "AWS_REGION"),
        (400, "<Error><Code>InvalidToken</Code><Message>CANARY</Message></Error>", AccessDenied, "InvalidToken"),
        (400, "<Error><Code>BadDigest</Code><Message>CANARY</Message></Error>", SourceError, "BadDigest"),
        (401, "CANARY", AccessDenied, "401"),
        (
            403,
            "<Error><Code>SignatureDoesNotMatch</Code><StringToSign>CANARY</StringToSign></Error>",
            AccessDenied,
            "403",
        ),
        (403, "<Error><Code>RequestTimeTooSkewed</Code></Error>", AccessDenied, "clock"),
        (404, "<Error><Code>NoSuchBucket</Code></Error>", NotFound, "no such bucket"),
        (404, "<html>CANARY</html>", NotFound, "no such bucket"),
        (429, "", Unreachable, "slow down"),
        (500, "", Unreachable, "500"),
        (503, "<Error><Code>SlowDown</Code></Error>", Unreachable, "SlowDown"),
    ],
)
def test_each_refusal_of_a_server_has_its_own_error_class(
    made_up: pytest.MonkeyPatch, status: int, body: str, kind: type[CacheToolError], said: str
) -> None:
    with scripted_server(lambda handler: handler.answer(status, body.encode())) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        error = fail("s3://bucket/prefix")

    assert type(error) is kind
    assert said in str(error)
    assert "s3://bucket/prefix" in str(error)


def test_throttling_is_tolerated_longer_than_failures(made_up: pytest.MonkeyPatch) -> None:
    """Row 47: refused at the listing, at a page in the middle, and at each object, for longer than obstore retries."""
    refused: collections.Counter[str] = collections.Counter()
    pages = {"": [f"{number}.npy" for number in range(3)], "2.npy": ["3.npy", "4.npy"]}

    def script(handler: Scripted) -> None:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(handler.path).query))
        what = query.get("continuation-token", query.get("start-after", "")) if query else handler.path
        if query or "range" not in handler.headers:
            refused[what] += 1
            if refused[what] <= 10:
                handler.answer((429, 503)[refused[what] % 2])
                return
        if not query:
            handler.answer(200, b"x", ETag='"e"', Last_Modified="Thu, 01 Jan 1970 00:16:50 GMT")
            return
        more = what == ""
        keys = pages["2.npy" if what in ("next", "2.npy") else ""]
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>1</Size><ETag>e</ETag>"
            "<LastModified>1970-01-01T00:16:50.000Z</LastModified></Contents>"
            for key in keys
        )
        rest = "<NextContinuationToken>next</NextContinuationToken>" if more else ""
        handler.answer(200, f"<ListBucketResult>{rest}{found}</ListBucketResult>".encode())

    made_up.setattr("cachetool.stores.failures.time.sleep", lambda seconds: None)
    with scripted_server(script) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        store = open_store("s3://bucket", limits=Limits(retry=0.2))
        items = [item for page in store.list() for item in page]
        assert [item.key for item in items] == ["0.npy", "1.npy", "2.npy", "3.npy", "4.npy"]
        assert [bytes(store.get(item)) for item in items] == [b"x"] * 5
        assert store.find("1.npy").size == 1  # type: ignore[attr-defined]


def test_a_refused_connection_is_unreachable(made_up: pytest.MonkeyPatch) -> None:
    port = free_port()
    made_up.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")

    error = fail("s3://bucket/prefix")

    assert isinstance(error, Unreachable)
    assert f"127.0.0.1:{port}" in str(error)


def test_a_refused_connection_is_retried_for_the_configured_time(made_up: pytest.MonkeyPatch) -> None:
    """A server needs some time to restart, so the retries end by time and not after eight attempts within a second."""
    made_up.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()

    fail("s3://bucket/prefix", Limits(connect=2, silence=2, listing=2, retry=4))

    assert time.monotonic() - began > 3


def test_a_name_that_does_not_resolve_is_unreachable(made_up: pytest.MonkeyPatch) -> None:
    made_up.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid")

    assert isinstance(fail("s3://bucket/prefix"), Unreachable)


@pytest.fixture
def silent() -> Iterator[str]:
    """Start a server that accepts connections and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_silent_server_is_an_error(made_up: pytest.MonkeyPatch, silent: str) -> None:
    made_up.setenv("AWS_ENDPOINT_URL", silent)
    assert isinstance(fail("s3://bucket/prefix", SILENT), Unreachable)
    assert isinstance(fail("s3://bucket/prefix", SILENT, Object("a.npy", 5)), Unreachable)


def test_the_default_limits_end_within_half_a_minute() -> None:
    """An attempt may begin just before ``retry`` ends, and then lasts ``connect`` or ``silence``."""
    limits = Limits()

    assert limits.retry + 2 * limits.connect <= 30
    assert limits.retry + limits.silence <= 30
    assert limits.retry < limits.listing <= 30  # a silent listing is not requested again


def test_a_truncated_body_is_resumed_or_refused(made_up: pytest.MonkeyPatch) -> None:
    """The client requests the rest. A server that sends the rest of another version is detected."""
    body = os.urandom(100_000)

    def script(handler: Any) -> None:
        if "Range" in handler.headers:
            start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
            handler.answer(206, body[start:], ETag='"one"', Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            handler.answer(200, body[:5000], ETag='"one"', Content_Length=str(len(body)))
            handler.close_connection = True

    with scripted_server(script) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        store = open_store("s3://bucket")
        assert bytes(store.get(Object("a.npy", len(body), "one"))) == body
        with pytest.raises(BadObject, match="another ETag"):
            store.get(Object("a.npy", len(body), "two"))


def page_of(names: list[str], more: str) -> bytes:
    """Return a page of an S3 listing; ``more`` is the token of the next page, empty for the last."""
    contents = "".join(
        f"<Contents><Key>{name}</Key><Size>1</Size><ETag>x</ETag><LastModified>2025-11-21T00:00:00.000Z</LastModified>"
        "</Contents>"
        for name in names
    )
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    truncated = "true" if more else "false"
    return (
        f"<ListBucketResult><Name>bucket</Name><IsTruncated>{truncated}</IsTruncated>{token}{contents}"
        "</ListBucketResult>"
    ).encode()


def s3_pages(pages: dict[str, tuple[list[str], str]]) -> Any:
    """Start an S3 server with these pages. A page is requested by its token, the first one by ""."""

    def script(handler: Any) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
        names, more = pages[query.get("continuation-token", [""])[0]]
        handler.answer(200, page_of(names, more), Content_Type="application/xml")

    return scripted_server(script)


@pytest.mark.parametrize(
    "pages",
    [
        {"": (["a.x"], "t"), "t": (["b.x"], "t")},
        {"": (["a.x"], "t"), "t": (["b.x", "c.x"], "u"), "u": (["d.x"], "t")},
    ],
    ids=["the same token", "a circle"],
)
def test_cyclic_pages_are_an_error(made_up: pytest.MonkeyPatch, pages: dict[str, tuple[list[str], str]]) -> None:
    """Row 52: the client would follow them forever, so repeated keys end the listing."""
    with s3_pages(pages) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        error = fail("s3://bucket")
    assert isinstance(error, SourceError)
    assert "repeats itself" in str(error)


def test_the_error_names_two_keys_that_differ_only_by_a_slash_at_an_end(made_up: pytest.MonkeyPatch) -> None:
    """Rows 52 and 71: the client treats them as one key."""
    with s3_pages({"": (["/abs.x.npy", "abs.x.npy"], "")}) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        error = fail("s3://bucket")
    assert isinstance(error, SourceError)
    line, advice = str(error).splitlines()
    assert line.startswith("s3://bucket: the listing repeats itself")
    assert "'abs.x.npy'" in line
    assert "rename one" in advice


def test_empty_and_unordered_pages_are_followed_to_the_end(made_up: pytest.MonkeyPatch) -> None:
    """Row 52."""
    with s3_pages({"": ([], "1"), "1": (["c.x", "a.x"], "2"), "2": ([], "3"), "3": (["b.x"], "")}) as server:
        made_up.setenv("AWS_ENDPOINT_URL", server.url)
        found = [item.key for page in open_store("s3://bucket").list() for item in page]
    assert sorted(found) == ["a.x", "b.x", "c.x"]


def test_from_a_server_without_ranges_only_the_first_bytes_are_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = os.urandom(2**24)
    (tmp_path / "bucket").mkdir()
    for name in ("a.npy", "b.npy"):
        (tmp_path / "bucket" / name).write_bytes(body)
    with rclone_s3(tmp_path) as env:
        use(monkeypatch, env)
        store = open_store("s3://bucket")
        for item in (item for page in store.list() for item in page):
            assert bytes(store.get_range(item, 0, 5000)) == body[:5000]
            assert bytes(store.get_range(item, 0, len(body))) == body
            with pytest.raises(SourceError, match="ignores the Range header"):
                store.get_range(item, 5, 10)


def test_a_forked_child_gets_an_error_and_not_a_hang(moto: Moto) -> None:
    code = """
import os, sys
from cachetool.stores import open_store
from cachetool.core.errors import CacheToolError
store = open_store("s3://fork")
list(store.list())
if os.fork() == 0:
    failed = 0
    for attempt in (lambda: list(store.list()), lambda: open_store("s3://fork")):
        try:
            attempt()
        except CacheToolError as error:
            failed += "forked" in str(error)
    os._exit(failed)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    moto.put("fork", {"a.npy": b"x"})

    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **moto.env}, timeout=60, check=False)

    assert done.returncode == 2


@pytest.mark.parametrize("key", ["p/", "/p"])
def test_the_error_names_a_key_with_a_slash_at_an_end(moto: Moto, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    use(monkeypatch, dict(moto.env))
    moto.put(bucket := "slashes-" + ("begin" if key[0] == "/" else "end"), {key: b"content"})
    with contextlib.closing(open_store(f"s3://{bucket}/")) as store:
        items = [item for page in store.list() for item in page]
        assert [item.key for item in items] == ["p"]
        with pytest.raises(NotFound, match="key that begins or ends with '/'"):
            store.get(items[0])


def test_a_prefix_with_a_number_sign_is_a_separate_place(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown URL is complete, because a repair uses it again."""
    use(monkeypatch, dict(moto.env))
    moto.put("signs", {"run#1/a.npy": b"one", "run#2/a.npy": b"two"})
    for name, body in (("run#1", b"one"), ("run#2", b"two")):
        shown = open_store(f"s3://signs/{name}/").url
        store = open_store(shown)
        [[item]] = store.list()
        assert bytes(store.get(item)) == body


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("AWS_ENDPOINT_URL", "http://CAN ARY/", "AWS_ENDPOINT_URL is not a URL"),
        ("AWS_ENDPOINT_URL", "http://CAN..ARY/", "AWS_ENDPOINT_URL is not a URL"),
        ("AWS_ENDPOINT_URL", "http://CANARY:99999/", "AWS_ENDPOINT_URL is not a URL"),
        ("AWS_ACCESS_KEY_ID", "CAN\nARY", "access_key_id for s3://b/"),
        ("AWS_SESSION_TOKEN", "CAN\udcffARY", "session_token for s3://b/"),
        ("AWS_REGION", "CAN\nARY", "region for s3://b/"),
    ],
)
def test_urls_that_would_crash_the_client_are_a_usage_error(
    made_up: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    made_up.setenv(name, value)
    with pytest.raises(UsageError, match=told) as caught:
        open_store("s3://b/p/")
    assert "ARY" not in str(caught.value)


def test_a_client_for_lists_that_cannot_be_made_names_the_place_once() -> None:
    def listing() -> Any:
        raise UsageError("s3://bucket: no such option")

    clients = _Clients(None, listing, Watched(443), None, "")
    store = ObjectStore(Login(lambda: Credentials(clients, 1)), "s3://bucket", Limits(), skip_unusable=False)
    with pytest.raises(UsageError) as caught:
        list(store.list())
    assert str(caught.value) == "s3://bucket: no such option"
