"""The hub of Hugging Face, played by a loopback server: pages, tokens, hashes."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest

from cachetool.errors import AccessDenied, BadObject, NotFound, UsageError
from cachetool.stores import Object, open_store
from tests.servers import hub_server

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


def test_all_pages_are_followed_and_nothing_beside_the_path_is_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(folder, page=2) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert listed(URL) == [*(f"deep/{number}.txt" for number in range(8)), "large.bin"]
        assert listed(URL.replace("name/", "name@main/")) == listed(URL)
        with pytest.raises(NotFound):
            listed(URL.replace("name/", "name@elsewhere/"))


def test_the_token_goes_to_the_hub_and_into_no_message(
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


@pytest.mark.parametrize("key", ["deep/1.txt", "large.bin"])
def test_bytes_that_are_not_those_of_the_hash_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Also when the hub's commit has not moved: a proxy or a mirror may give anything."""
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
def test_a_url_that_names_no_dataset_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="hf://datasets/OWNER/NAME"):
        open_store(url)
