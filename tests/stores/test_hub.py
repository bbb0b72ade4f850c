"""The Hugging Face hub, simulated by a loopback server: pages, tokens, hashes."""

from __future__ import annotations

import contextlib
import json
import logging
import urllib.parse
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, UsageError
from cachetool.sources.registry import list_source, open_source
from cachetool.stores import Object, open_store
from tests.servers import Http, Scripted, hub_server, scripted_server

URL = "hf://datasets/owner/name/train"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train" / "deep").mkdir(parents=True)
    for number in range(8):
        (tmp_path / "train" / "deep" / f"{number}.txt").write_text(str(number))
    (tmp_path / "train" / "large.bin").write_bytes(bytes(10_000))
    (tmp_path / "training.txt").write_text("not below train")
    return tmp_path


def listed(url: str) -> list[str]:
    with contextlib.closing(open_store(url)) as store:
        return sorted(item.key for page in store.list() for item in page)


def test_all_pages_are_followed_and_only_names_below_the_path_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(folder, page=2) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert listed(URL) == [*(f"deep/{number}.txt" for number in range(8)), "large.bin"]
        assert listed(URL.replace("name/", "name@main/")) == listed(URL)
        with pytest.raises(NotFound):
            listed(URL.replace("name/", "name@elsewhere/"))


@pytest.mark.parametrize(
    "revision",
    [
        "refs/pr/1",
        "refs/convert/parquet",
        "refs/convert/duckdb",
        "v1.0",
        "c0ffee",
        "feature%2Fnew",
        "refs%2Fpr%2F1",
        "3@2",
    ],
)
@pytest.mark.parametrize("path", ["", "/", "/train", "/train/deep/"])
def test_revisions_are_escaped_as_the_hub_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, revision: str, path: str
) -> None:
    with hub_server(folder, revisions=[urllib.parse.unquote(revision)]) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        url = f"hf://datasets/owner/name@{revision}{path}"
        below = path.strip("/")
        keys = [str(file.relative_to(folder / below)) for file in (folder / below).rglob("*") if file.is_file()]

        assert listed(url) == sorted(keys)
        with contextlib.closing(open_store(url)) as store:
            assert len(store.get(store.find(keys[0]))) == (folder / below / keys[0]).stat().st_size
        with pytest.raises(NotFound):
            listed("hf://datasets/owner/name/train")


@pytest.mark.parametrize("revision", ["refs/heads/main", "refs/pr/x", "refs", "refs/convert"])
def test_other_refs_are_split_into_a_revision_and_a_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    """The text after the first slash is the path, as in huggingface_hub."""
    with hub_server(folder, revisions=["refs/heads/main", "refs/pr/x"]) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(NotFound, match=revision):
            listed(f"hf://datasets/owner/name@{revision}")


@pytest.mark.parametrize(
    ("place", "samples"),
    [
        ("name@refs/convert/parquet", 6),
        ("name@refs/convert/parquet/default/train/0000.parquet", 3),
        ("name@refs/convert/parquet/default", 6),
        ("data.h5", 6),
    ],
)
def test_files_of_many_samples_at_a_revision_under_refs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, samples: int
) -> None:
    """The repository's name may look like a file name."""
    (tmp_path / "hub" / "default" / "train").mkdir(parents=True)
    for number in range(2):
        table = pyarrow.table({"x": [1, 2, 3]})
        pyarrow.parquet.write_table(table, tmp_path / "hub" / "default" / "train" / f"000{number}.parquet")
    with hub_server(
        tmp_path / "hub", revisions=["main", "refs/convert/parquet"], name="data.h5" if "h5" in place else "name"
    ) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        url = f"hf://datasets/owner/{place}"
        listing = list_source(url, tmp_path / "listing", survey="all")
        with contextlib.closing(open_source(url, listing.folder)) as source:
            assert source.samples == samples
            [piece] = source.read(np.arange(2), schema=source.probe(np.arange(2)).schema)
            assert piece.block.columns["x"].tolist() == [1, 2]


def test_the_token_is_sent_to_the_hub_and_never_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with hub_server(folder, token="hf_CANARY") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_wrongCANARY")
        with pytest.raises(AccessDenied, match="set HF_TOKEN") as caught:
            listed(URL)
        monkeypatch.setenv("HF_TOKEN", "hf_CANARY")
        assert "large.bin" in listed(URL)
        monkeypatch.delenv("HF_TOKEN")
        (tmp_path / "token").write_text("hf_CANARY\n")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        assert "large.bin" in listed(URL)
    assert "CANARY" not in f"{caught.value}{caplog.text}"


@pytest.mark.parametrize("token", ["hf_CAN\nARY", "hf_CAN ARY", "hf_CAN\u2013ARY", "hf_CAN\xe9ARY", "hf_CAN\udcffARY"])
def test_a_token_that_is_invalid_in_a_header_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match="HF_TOKEN holds no token") as caught:
        open_store(URL)
    assert "ARY" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text(token.encode("utf-8", "replace").decode().replace("?", "\n"), encoding="utf-8")
    with pytest.raises(UsageError, match="holds no token") as caught:
        open_store(URL)
    assert "ARY" not in str(caught.value)


@pytest.mark.parametrize("key", ["deep/1.txt", "large.bin"])
def test_bytes_that_do_not_match_the_hash_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """The hub's commit may be unchanged: a proxy or a mirror may send anything."""
    with hub_server(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with contextlib.closing(open_store(URL)) as store:
            item = store.find(key)
            assert len(store.get(item)) == item.size
            path = folder / "train" / key
            path.write_bytes(b"x" * item.size)
            with pytest.raises(BadObject, match="changed since it was listed"):
                store.get(item)
            other = Object(item.key, item.size, "0" * 64)
            with pytest.raises(BadObject, match="changed since it was listed"):
                store.get_range(other, 0, 1)


@pytest.mark.parametrize("url", ["hf://", "hf://models/a/b", "hf://datasets/owner", "hf://datasets//name"])
def test_a_url_without_a_dataset_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="hf://datasets/OWNER/NAME"):
        open_store(url)


def paged(pages: dict[str, tuple[list[str], str]], base: str = "http://{}") -> contextlib.AbstractContextManager[Http]:
    """Start a hub with pages of names. A page is requested by its cursor, the first one by "". Each page names the
    cursor of the next one, or "", below ``base``.
    """

    def script(handler: Scripted) -> None:
        path, _, query = handler.path.partition("?")
        if "/revision/" in path:
            handler.answer(200, b'{"sha": "c0ffee"}', Content_Type="application/json")
            return
        cursor = urllib.parse.parse_qs(query).get("cursor", [""])[0]
        names, more = pages[cursor]
        body = json.dumps([{"type": "file", "path": f"train/{name}", "size": 1, "oid": "0" * 40} for name in names])
        link = (
            f'<{base.format(handler.headers["Host"])}{path}?recursive=true&cursor={more}>; rel="next"' if more else ""
        )
        handler.answer(200, body.encode(), Content_Type="application/json", Link=link)

    return scripted_server(script)


@pytest.mark.parametrize(
    ("pages", "asked"),
    [({"": (["a.x"], "1"), "1": (["b.x"], "1")}, 2), ({"": (["a.x"], "1"), "1": (["b.x"], "2"), "2": ([], "1")}, 3)],
    ids=["the same token", "a circle"],
)
def test_cyclic_pages_are_an_error(
    pages: dict[str, tuple[list[str], str]], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 52: no page is requested twice."""
    with paged(pages) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(SourceError, match="repeats itself"):
            listed(URL)
    assert len(server.requests) == 1 + asked


def test_empty_and_unordered_pages_are_followed_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 52: the listing does not depend on the division into pages."""
    found = []
    for number, pages in enumerate(
        (
            {"": ([], "1"), "1": (["c.x", "a.x"], "2"), "2": ([], "3"), "3": (["b.x"], "")},
            {"": (["a.x", "b.x", "c.x"], "")},
        )
    ):
        with paged(pages) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            found.append(list_source(URL, tmp_path / str(number)))
    assert [item.key for unit in range(3) for item in found[0].unit(unit)] == ["a.x", "b.x", "c.x"]
    assert found[0].identity == found[1].identity


def test_a_name_on_two_pages_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 52: a list that changed while it was read, or a hub that repeats itself, is refused."""
    with paged({"": (["a.x", "b.x"], "1"), "1": (["b.x", "c.x"], "")}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(BadObject, match=r"'b\.x' is listed twice"):
            list_source(URL, tmp_path / "listing")


def test_a_next_page_may_be_named_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with paged({"": (["a.x"], "1"), "1": (["b.x"], "")}, base="") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert listed(URL) == ["a.x", "b.x"]


@pytest.mark.parametrize("base", ["http://h:99999", "http://[h", "ftp://h", "http://a..b"])
def test_an_invalid_url_of_the_next_page_is_an_error_of_the_hub(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    with paged({"": (["a.x"], "1")}, base=base) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(SourceError, match="next page of its list is not a URL"):
            listed(URL)


def test_an_endpoint_with_an_impossible_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://a..b")
    with pytest.raises(UsageError, match="HF_ENDPOINT cannot be used"):
        open_store(URL)
