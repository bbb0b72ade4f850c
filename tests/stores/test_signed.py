"""Large objects by signed URLs, and what is left to the store's own client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.core.errors import BadObject
from cachetool.stores import Object, open_store
from cachetool.stores.object import ObjectStore
from tests.servers import free_port, rclone_s3

KEY = "a b+c%25/ä & =.bin"
BODY = np.random.default_rng(3).integers(0, 256, 3 * 2**20 + 17, dtype=np.uint8).tobytes()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    path = tmp_path / "large" / "some" / "prefix" / KEY
    path.parent.mkdir(parents=True)
    path.write_bytes(BODY)
    path.with_name("small.bin").write_bytes(BODY[:1000])
    with rclone_s3(tmp_path) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with contextlib.closing(open_store("s3://large/some/prefix")) as opened:
            assert isinstance(opened, ObjectStore)
            yield opened


@pytest.fixture
def item(store: ObjectStore) -> Object:
    return next(each for page in store.list() for each in page if each.size > 2**20)


def used(store: ObjectStore) -> Any:
    assert store._signed is not None
    return store._signed


def test_a_large_object_comes_without_the_other_client(
    store: ObjectStore, item: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = store._get, []
    monkeypatch.setattr(store, "_get", lambda item, *more: asked.append(item.key) or own(item, *more))
    for _ in range(2):
        body = store.get(item)
        assert bytes(body) == BODY
        assert body.readonly
    small = next(each for page in store.list() for each in page if each.size == 1000)
    assert bytes(store.get(small)) == BODY[:1000]
    assert asked == [small.key]


def test_an_object_that_changed_is_refused(store: ObjectStore, item: Object) -> None:
    with pytest.raises(BadObject, match="changed"):
        store.get(Object(item.key, item.size, "another"))
    with pytest.raises(BadObject):
        store.get(Object(item.key, item.size - 1, item.etag))


@pytest.mark.parametrize(
    ("spoil", "usable"),
    [
        (lambda url: url.replace("Signature=", "Signature=0"), False),
        (lambda url: f"http://127.0.0.1:{free_port()}/{url.rpartition('/')[2]}", True),
    ],
)
def test_what_does_not_come_that_way_is_left_to_the_other_client(
    store: ObjectStore, item: Object, spoil: Any, usable: bool
) -> None:
    signed = used(store)
    sign = signed._sign
    signed._sign = lambda key: spoil(sign(key))
    assert bytes(store.get(item)) == BODY
    assert signed._usable is usable
    for _ in range(7):
        assert bytes(store.get(item)) == BODY
    assert not signed._usable


def test_behind_a_proxy_and_with_tls_it_is_left_to_the_other_client(
    store: ObjectStore, item: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    proxied = open_store("s3://large/some/prefix")
    assert isinstance(proxied, ObjectStore)
    assert bytes(proxied.get(item)) == BODY
    assert used(proxied)._client is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    encrypted = open_store("s3://large/some/prefix")
    assert isinstance(encrypted, ObjectStore)
    assert encrypted._signed is None
