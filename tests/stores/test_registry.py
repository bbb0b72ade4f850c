"""The store that serves a URL, and the refusal of URLs without a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachetool.core.errors import AccessDenied, NotFound, UsageError
from cachetool.stores import open_store
from cachetool.stores.http import HttpStore
from cachetool.stores.local import LocalStore


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_a_path_and_a_file_url_open_a_folder(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "sp ace"
    folder.mkdir()
    text = str(folder).replace(" ", "%20") if "file" in form else str(folder)

    store = open_store(form.format(text))

    assert isinstance(store, LocalStore)
    assert store.url == str(folder.resolve())


def test_a_web_url_is_shown_without_its_secrets() -> None:
    store = open_store("https://user:CANARY@host/folder?token=CANARY")

    assert isinstance(store, HttpStore)
    assert store.url == "https://host/folder"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://KEY:CAN/ARY@bucket/x", "credentials come from the environment"),
        ("http://user:CAN/ARY@host/x", "/ as %2F"),
        ("http://user:CAN#ARY@host/x", "/ as %2F"),
        ("http://user:12?CANARY@host/x", "/ as %2F"),
        ("sftp://user:CAN/ARY@host/x", "/ as %2F"),
    ],
)
def test_a_possible_password_is_neither_looked_up_nor_shown(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        open_store(url)

    assert "CAN" not in str(caught.value)
    assert "ARY" not in str(caught.value)


@pytest.mark.parametrize("url", ["nope://host/a", "S3X://b", "reference://x", "simplecache::s3://x", "shell://x"])
def test_an_unknown_scheme_names_the_known_ones(url: str) -> None:
    with pytest.raises(UsageError, match=r"a path or one of file, s3, s3a, gs") as caught:
        open_store(url)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///key", "s3://KEY:CANARY@bucket/x", "s3://bucket/x?versionId=CANARY", "az://", "gs://:CANARY@b"],
)
def test_an_object_store_url_is_a_bucket_and_a_prefix(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)

    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://[::1", "https://host:port/"])
def test_a_web_url_needs_a_host(url: str) -> None:
    with pytest.raises(UsageError, match="URL"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "gcs://bucket/x", "abfss://c@account.host/x"])
def test_missing_credentials_are_an_error_before_any_request(url: str) -> None:
    with pytest.raises(AccessDenied, match="no credentials for"):
        open_store(url)


def test_a_file_url_with_a_host_is_refused() -> None:
    with pytest.raises(UsageError, match="file:///absolute/path"):
        open_store("file://server/share")


def test_a_missing_folder_is_not_found_and_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")

    with pytest.raises(NotFound, match="no file or folder"):
        open_store(str(tmp_path / "missing"))
    with pytest.raises(NotFound, match="no file or folder"):
        open_store(str(tmp_path / "nul\0"))
    with pytest.raises(UsageError, match="is a file"):
        open_store(str(tmp_path / "file.txt"))
