"""Google Cloud Storage and Azure Blob: correct requests and parsed answers, against scripted servers."""

from __future__ import annotations

import base64
from urllib.parse import unquote

import pytest

from cachetool.core.errors import AccessDenied, BadObject, NotFound
from cachetool.stores import Object, open_store
from tests.servers import Scripted, scripted_server

GCS_LIST = b"""<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>
<Name>b</Name><Prefix>p/</Prefix><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated><Contents><Key>p/a b.npy</Key>
<LastModified>2025-11-21T00:34:00.000Z</LastModified><ETag>"abc"</ETag><Size>5</Size></Contents></ListBucketResult>"""

AZURE_LIST = b"""<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="c"><Prefix>p/</Prefix><Blobs>
<Blob><Name>p/a b.npy</Name><Properties><Last-Modified>Fri, 21 Nov 2025 00:34:00 GMT</Last-Modified><Etag>abc</Etag>
<Content-Length>5</Content-Length><Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType>
</Properties></Blob></Blobs><NextMarker /></EnumerationResults>"""

HEADERS = {"ETag": '"abc"', "Last_Modified": "Fri, 21 Nov 2025 00:34:00 GMT", "x_ms_version": "2023-11-03"}


def answers(listing: bytes) -> object:
    def script(handler: Scripted) -> None:
        if "missing" in handler.path:
            handler.answer(404, b"<Error><Code>ContainerNotFound</Code></Error>")
        elif "secret" in handler.path:
            handler.answer(403, b"<Error><Code>AuthenticationFailed</Code><Message>CANARY</Message></Error>")
        elif "?" in handler.path:
            handler.answer(200, listing, Content_Type="application/xml")
        else:
            handler.answer(200, b"hello", **HEADERS)

    return script


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
def test_google_is_listed_and_read(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with scripted_server(answers(GCS_LIST)) as server:  # type: ignore[arg-type]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url.removeprefix("http://"))
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        store = open_store(f"{scheme}://b/p")
        items = [item for page in store.list() for item in page]
        body = store.get(items[0])
        with pytest.raises(NotFound, match="no such bucket"):
            list(open_store(f"{scheme}://missing/p").list())

    assert items == [Object("a b.npy", 5, "abc")]
    assert bytes(body) == b"hello"
    assert unquote(server.requests[1][0]) == "/b/p/a b.npy"


def test_an_object_that_google_decompresses_in_transit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google then sends no length. The token client must not ask for compressed answers, which it cannot read."""

    def script(handler: Scripted) -> None:
        if "?" in handler.path:
            handler.answer(200, GCS_LIST, Content_Type="application/xml")
        else:
            body = b"8\r\nunpacked\r\n0\r\n\r\n"
            handler.answer(200, body, Content_Length="", Transfer_Encoding="chunked", **HEADERS)

    with scripted_server(script) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        store = open_store("gs://b/p")
        [[item]] = store.list()
        for take in (lambda: store.get(item), lambda: store.get_range(item, 1, 2)):
            with pytest.raises(
                BadObject, match=r"'a b\.npy': the store does not send its length.*Content-Encoding: gzip"
            ):
                take()
    assert not [headers for _, headers in server.requests if "gzip" in headers.get("Accept-Encoding", "")]


@pytest.mark.parametrize(
    ("url", "env"),
    [
        ("az://c/p", {"AZURE_STORAGE_ACCOUNT_NAME": "acc"}),
        ("abfs://c@acc.dfs.core.windows.net/p", {}),
        ("abfss://c@acc.dfs.core.windows.net/p", {}),
    ],
)
def test_azure_is_listed_and_read_with_a_key(monkeypatch: pytest.MonkeyPatch, url: str, env: dict[str, str]) -> None:
    with scripted_server(answers(AZURE_LIST)) as server:  # type: ignore[arg-type]
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.url}/acc")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"CANARY").decode())
        store = open_store(url)
        items = [item for page in store.list() for item in page]
        body = store.get(items[0])
        with pytest.raises(NotFound, match="no such bucket"):
            list(open_store(url.replace("//c", "//missing")).list())
        with pytest.raises(AccessDenied, match="AuthenticationFailed") as caught:
            list(open_store(url.replace("//c", "//secret")).list())

    assert "CANARY" not in str(caught.value)
    assert items == [Object("a b.npy", 5, "abc")]
    assert bytes(body) == b"hello"
    assert unquote(server.requests[1][0]) == "/acc/c/p/a b.npy"
    assert server.requests[1][1]["Authorization"].startswith("SharedKey acc:")
