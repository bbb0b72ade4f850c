"""Names that are looked at a page at a time: the same decisions as for each name alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.errors import CacheToolError
from cachetool.sources import listing
from cachetool.sources.grouping import Grouping
from cachetool.sources.keys import Stem
from cachetool.sources.kinds import Census
from cachetool.sources.names import NamedPage
from cachetool.sources.options import SourceOptions
from cachetool.stores import Object
from cachetool.stores.base import Page

STEMS = st.sampled_from(
    ["a", "b", "a-b", "n01", ".h", "README", "labels", "label", "shard", "dataset", "x_stats", "2024.01", "é", "\udcff"]
)
ENDS = st.sampled_from(
    ["jpg", "JPG", "png", "json", "x.npy", "npy", "tar", "tar.gz", "md", "", "xyz", "xyz.gz", "h5", "mdb", "a-of-b"]
)
FOLDERS = st.sampled_from(["", "t/", "t/u/", ".git/", "a.zarr/", "t-2/", "extents/", "dataset.json/"])
KEYS = st.builds(lambda folder, stem, end: f"{folder}{stem}{'.' if end else ''}{end}", FOLDERS, STEMS, ENDS)
PAGES = st.lists(st.dictionaries(KEYS, st.integers(-1, 9), max_size=12).map(lambda keys: [*keys.items()]), max_size=5)


def facts(folder: Path, pages: Iterable[list[tuple[str, int]]], stem: str | None) -> dict[str, Any]:
    """Return everything that a listing and a census say about names."""
    census, grouping = Census("s3://b/"), Grouping(SourceOptions(stem=stem))
    seen: set[str] = set()
    objects = [
        [Object(key, size, f"e{size}") for key, size in page if not (key in seen or seen.add(key))] for page in pages
    ]
    facts: dict[str, Any] = {}
    try:
        written = listing.write_listing(
            folder, census.count(objects), stem=grouping.stem, url="s3://b", grouping=grouping
        )
        facts = json.loads((folder / "listing.json").read_text()) | {"keys": [*written.records(Stem(written.stem))]}
        facts["named"] = sorted(facts["named"])
        kind = census.kind(None)
        facts["kind"] = kind and kind.name
        census.look_inside(lambda item: b"\x89HDF\r\n\x1a\n" if "xyz" in item.key else b"", None)
        facts["learned"] = sorted(census.learned)
        facts["exported"] = census.exported
    except CacheToolError as error:
        facts["error"] = str(error)
    return facts


@settings(max_examples=60)
@given(pages=PAGES, stem=st.sampled_from([None, "first", "last", r"(?P<key>[^.]*)"]))
def test_a_page_of_names_is_decided_as_each_name_alone(pages: list[list[tuple[str, int]]], stem: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        together = facts(Path(folder, "together"), pages, stem)
        patch.setattr(Stem, "suffixes", lambda *_: None)
        patch.setattr(Census, "_count_plain", lambda _, page: range(len(page)))
        alone = facts(Path(folder, "alone"), pages, stem)
    assert together == alone


@given(pages=PAGES, run=st.integers(1, 9))
def test_runs_on_disk_give_the_same_listing_as_one_run_in_memory(pages: list[list[tuple[str, int]]], run: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        whole = facts(Path(folder, "whole"), pages, None)
        patch.setattr(listing, "RUN", run)
        assert facts(Path(folder, "runs"), pages, None) == whole


def test_a_page_reads_as_its_objects() -> None:
    objects = [Object("a", 1, "x"), Object("b", -1), Object("c", 3)]
    page = NamedPage.of(objects)
    assert list(page) == objects
    assert (page[1], len(page), NamedPage.of(page) is page) == (objects[1], 3, True)
    assert (list(page[1:]), list(Page.of(objects).at([2, 0]))) == (objects[1:], [objects[2], objects[0]])
