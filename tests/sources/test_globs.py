"""Globs: the names that they match, the folder as the source, and Zarr folders that are never split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachetool.core.errors import UsageError
from cachetool.sources.globs import Selection, split_glob, with_glob
from cachetool.sources.options import SourceOptions
from cachetool.stores import Object

KEYS = (
    "a.jpg", "b.JPG", "labels.csv", "train/a.jpg", "train/x/b.jpg", "train/x/thumbs/b.jpg", "thumbs/c.jpg", "v[1].jpg",
    "new\nline.jpg", "\udcff.jpg", "d.zarr/zarr.json", "d.zarr/c/0", "train/e.zarr/0.0",
)  # fmt: skip


def chosen(keys: tuple[str, ...] = KEYS, **globs: Any) -> list[str]:
    selection = Selection(SourceOptions(**globs))
    return [item.key for page in selection.of([[Object(key, 1) for key in keys]]) for item in page]


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        ("*.jpg", {key for key in KEYS if key.endswith(".jpg")}),
        ("/*.jpg", {"a.jpg", "v[1].jpg", "new\nline.jpg", "\udcff.jpg"}),
        ("a.*", {"a.jpg", "train/a.jpg"}),
        ("train/*.jpg", {"train/a.jpg"}),
        ("train/**", {key for key in KEYS if key.startswith("train/")}),
        ("train/**/*.jpg", {"train/a.jpg", "train/x/b.jpg", "train/x/thumbs/b.jpg"}),
        ("**/b.jpg", {"train/x/b.jpg", "train/x/thumbs/b.jpg"}),
        ("thumbs/", {"train/x/thumbs/b.jpg", "thumbs/c.jpg"}),
        ("/thumbs/", {"thumbs/c.jpg"}),
        ("?.jpg", {"a.jpg", "\udcff.jpg", *(key for key in KEYS if key.endswith(("/a.jpg", "/b.jpg", "/c.jpg")))}),
        ("[!ac].jpg", {"\udcff.jpg", "train/x/b.jpg", "train/x/thumbs/b.jpg"}),
        ("v[[]1].jpg", {"v[1].jpg"}),
        ("*.zarr", {"d.zarr/zarr.json", "d.zarr/c/0", "train/e.zarr/0.0"}),
        ("d.zarr/", {"d.zarr/zarr.json", "d.zarr/c/0"}),
        ("zarr.json", set()),
        ("c/0", set()),
        ("**", set(KEYS)),
        ("*", set(KEYS)),
    ],
)
def test_a_glob_includes_or_excludes_its_matches(glob: str, matches: set[str]) -> None:
    assert set(chosen(include=[glob])) == matches
    assert set(chosen(exclude=(glob,))) == set(KEYS) - matches


def test_several_globs_are_combined_and_exclude_has_priority() -> None:
    assert chosen(include=["/*.jpg", "*.csv"], exclude=["v*"]) == ["a.jpg", "labels.csv", "new\nline.jpg", "\udcff.jpg"]
    assert chosen(include="*.csv") == ["labels.csv"]


@pytest.mark.parametrize("glob", ["", "/", "[b-a]", 3, "x\0", "\ud800"])
def test_an_invalid_glob_is_refused(glob: object) -> None:
    with pytest.raises(UsageError, match=r"include|glob"):
        SourceOptions(include=(glob,))  # type: ignore[arg-type]


def test_options_with_globs_cross_processes_and_number_draws_in_any_order() -> None:
    one, two = SourceOptions(include=["a", "b"], exclude="c"), SourceOptions(include=("b", "a"), exclude=["c"])
    assert SourceOptions.from_json(one.to_json()) == one
    assert one.numbering() == two.numbering() != SourceOptions(include=["a"]).numbering()
    assert SourceOptions().numbering() == {"stem": "first"}, "caches of earlier versions know their sources by it"


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/train/*.tar", ("s3://bucket/train/", "/*.tar")),
        ("s3://bucket/*/x-*.tar", ("s3://bucket/", "/*/x-*.tar")),
        ("s3://bucket/**/*.tar", ("s3://bucket/", "/**/*.tar")),
        ("https://h/d/*.tar?token=a*b", ("https://h/d/?token=a*b", "/*.tar")),
        ("https://h/d/a.tar?x=*", None),
        ("s3://bucket/v[1]/a?.tar", None),
        ("s3://buck*", None),
        ("s3://bucket/plain/", None),
        ("nowhere/d/[ab].tar", ("nowhere/d/", "/[ab].tar")),
        ("*.tar", (".", "/*.tar")),
        ("/*.nothing", ("/", "/*.nothing")),
    ],
)
def test_a_source_with_a_glob_is_its_folder_restricted_to_the_matches(url: str, parts: tuple[str, str] | None) -> None:
    assert split_glob(url) == parts


def test_an_existing_name_is_not_read_as_a_glob(tmp_path: Path) -> None:
    (tmp_path / "v[1]").mkdir()
    assert split_glob(str(tmp_path / "v[1]")) is None
    assert split_glob(f"{tmp_path}/v[2]") == (f"{tmp_path}/", "/v[2]")
    with pytest.raises(UsageError, match="leave --include out"):
        with_glob(f"{tmp_path}/*.x", SourceOptions(include="*.y"))
