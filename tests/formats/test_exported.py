"""The parser of ``dataset.json``, which sources and loaders share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cachetool.core.errors import CorruptError
from cachetool.formats.exported import DataFile, parse_dataset

ABOUT: dict[str, Any] = {
    "layout": 1,
    "format": "lmdb",
    "schema": [{"name": "x", "dtype": "<f4", "shape": [2]}],
    "parts": [{"file": "a.lmdb", "samples": 3, "content": "c"}, {"file": "b.lmdb", "samples": 2}],
}


def test_a_description_has_the_format_the_fields_and_the_files_in_order() -> None:
    dataset = parse_dataset(json.dumps(ABOUT).encode())

    assert (dataset.format, dataset.schema.names) == ("lmdb", ("x",))
    assert dataset.files == (DataFile("a.lmdb", 3, "c"), DataFile("b.lmdb", 2, ""))


def test_a_later_layout_is_corrupt_with_both_versions() -> None:
    with pytest.raises(CorruptError, match="has layout 2, this cachetool reads layout 1; update cachetool"):
        parse_dataset(json.dumps({**ABOUT, "layout": 2, "parts": "in another form"}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "x"},
        {"layout": float("inf")},
        {"schema": 3},
        {"schema": [{"name": "x"}]},
        {"parts": 5},
        {"parts": [1]},
        {"parts": [{"file": "a.lmdb"}]},
        {"parts": [{"file": "../a.lmdb", "samples": 3}]},
        {"parts": [{"file": 5, "samples": 3}]},
    ],
    ids=str,
)
def test_values_that_convert_never_writes_are_a_value_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_dataset(json.dumps({**ABOUT, **change}).encode())


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000], ids=["empty", "list", "bare", "text", "deep"]
)
def test_json_that_is_no_description_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_dataset(raw)
