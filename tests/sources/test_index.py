"""Index files beside tar and TFRecord files, valid and invalid ones."""

from __future__ import annotations

import tracemalloc

import pytest

from cachetool.core.errors import BadObject
from cachetool.sources.index import index_facts
from cachetool.sources.kinds import kind_named
from cachetool.stores import Object


def facts(kind: str, body: bytes, size: int = 4096) -> tuple[int, list[int] | None]:
    found = index_facts(kind_named(kind), Object("x", size), Object("x.idx", len(body)), lambda _: memoryview(body))
    return found.rows, found.cuts


def test_the_lines_of_an_index_are_its_records() -> None:
    assert facts("tfrecord", b"0 20\n20 100\n\n120 16") == (3, [3])
    assert facts("tfrecord", b"") == (0, [])
    assert facts("tar", b"v1.1 2\nnpy 512 100\ncls 1536 2\r\n") == (2, [2])
    assert facts("tar", b"v1.2 1\nnpy 512 100 name.npy\nmore") == (1, [1])


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("tar", b"v9 3\n"),
        ("tar", b"v1.1 2\nnpy 512 100\n"),
        ("tar", b"v1.1 99999999999999999999\n"),
        ("tar", b""),
        ("tar", b"v1.1 1\nnpy " + b"9" * 5000 + b" 1\n"),
        ("tfrecord", b"0 99999999999999999999\n"),
        ("tfrecord", b"0 " + b"9" * 5000),
        ("tfrecord", b"0 20 5"),
        ("tfrecord", b"\xff"),
        ("tfrecord", b"1 " * 10**6),
        ("tfrecord", b"0 20\n" * 300),
    ],
    ids=range(11),
)
def test_an_invalid_index_is_refused_with_its_name(kind: str, body: bytes) -> None:
    with pytest.raises(BadObject, match=r"^'x\.idx' "):
        facts(kind, body)


def test_an_index_of_more_records_than_the_file_can_hold_takes_no_memory() -> None:
    body = b"0 9\n" * 10**6
    tracemalloc.start()
    with pytest.raises(BadObject, match=r"'x\.idx' is not the index of a tfrecord file"):
        facts("tfrecord", body)
    assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    tracemalloc.stop()
