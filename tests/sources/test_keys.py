"""Splitting a key into sample and field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import UsageError
from cachetool.sources.keys import Part, Stem

FIRST, LAST = Stem("first"), Stem("last")


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("0001.npy", Part("0001", "npy", "npy")),
        ("0001.image.npy", Part("0001", "image", "npy")),
        ("a/b/0001.image.npy", Part("a/b/0001", "image", "npy")),
        ("0001.json", Part("0001", "", "json")),
        ("0001.meta.json", Part("0001", "meta/", "json")),
        ("0001.npz", Part("0001", "", "npz")),
        ("0001.views.npz", Part("0001", "views/", "npz")),
        ("0001.cls", Part("0001", "cls", "int")),
        ("0001.label.cls", Part("0001", "label", "int")),
        ("0001.id", Part("0001", "id", "int")),
        ("0001.txt", Part("0001", "txt", "str")),
        ("0001.caption.txt", Part("0001", "caption", "str")),
        ("0001.jpg", Part("0001", "jpg", "image")),
        ("0001.JPG", Part("0001", "jpg", "image")),
        ("0001.left.png", Part("0001", "left", "image")),
        ("0001.bin", Part("0001", "bin", "bytes")),
        ("0001.tar.gz", Part("0001", "tar.gz", "bytes")),
        ("a.b/0001.npy", Part("a.b/0001", "npy", "npy")),
        ("0001..npy", Part("0001", "npy", "npy")),
        ("sp ace.npy", Part("sp ace", "npy", "npy")),
    ],
)
def test_a_name_is_split_at_its_first_dot(key: str, part: Part) -> None:
    assert FIRST.split(key) == part


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("scan.v1.2.npy", Part("scan.v1.2", "npy", "npy")),
        ("a.b/c.d.json", Part("a.b/c.d", "", "json")),
        ("x.tar.gz", Part("x.tar", "gz", "bytes")),
    ],
)
def test_a_name_can_be_split_at_its_last_dot(key: str, part: Part) -> None:
    assert LAST.split(key) == part


@pytest.mark.parametrize(
    ("rule", "key", "part"),
    [
        (r"(.*)_(?:image|mask)", "p/7_mask.png", Part("p/7", "mask", "image")),
        (r"(?P<key>.*)_(?P<field>image|mask)\.png", "p/7_mask.png", Part("p/7", "mask", "image")),
        (r"(?P<key>\d+)", "12-meta.json", Part("12", "meta/", "json")),
        (r"[^.]*", "a.npy", Part("a", "npy", "npy")),
        (r"[^.]*", "a.seg.bin", Part("a", "seg.bin", "bytes")),
        (r"[^/]+", "patient1/scan.npy", Part("patient1", "scan", "npy")),
        (r"[^/]+", "patient1/age.txt", Part("patient1", "age", "str")),
        (r"[^/]+", "patient1/.x.npy", "hidden"),
        (r"scan\d", "other.npy", "names that --stem does not match"),
        (r"(x)?", "a.npy", "names that --stem does not match"),
        (r".*", "noextension", "names without an extension"),
    ],
)
def test_a_name_can_be_split_by_a_regular_expression(rule: str, key: str, part: Part | str) -> None:
    assert Stem(rule).split(key) == part


@pytest.mark.parametrize("key", [".DS_Store", "a/.hidden.npy", ".git/config.txt", "a/.x/b.npy"])
def test_hidden_names_are_no_samples(key: str) -> None:
    assert FIRST.split(key) == LAST.split(key) == "hidden"


@pytest.mark.parametrize("key", ["README", "a/LICENSE", "a.b/name", "name."])
def test_names_without_an_extension_are_no_samples(key: str) -> None:
    assert FIRST.split(key) == LAST.split(key) == "names without an extension"


@pytest.mark.parametrize("rule", ["(", "*", "[a", "(?P<key>"])
def test_an_invalid_regular_expression_is_refused(rule: str) -> None:
    with pytest.raises(UsageError, match="--stem must be first, last or a regular expression"):
        Stem(rule)


NAMES = st.text(st.characters(exclude_characters="/.\0", exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(folders=st.lists(NAMES, max_size=3), stem=NAMES, field=st.one_of(st.just(""), NAMES))
def test_objects_with_the_same_stem_are_one_sample_for_any_names(folders: list[str], stem: str, field: str) -> None:
    """Law: the sample's key is the folder and the stem, and an extension with a known type is never part of the field's
    name.
    """
    base = "/".join([*folders, stem])
    middle = f".{field}" if field else ""

    for extension, kind in [("npy", "npy"), ("png", "image"), ("txt", "str"), ("cls", "int")]:
        assert FIRST.split(f"{base}{middle}.{extension}") == Part(base, field or extension, kind)
    assert FIRST.split(f"{base}{middle}.json") == Part(base, f"{field}/" if field else "", "json")


@given(st.text(max_size=30), st.sampled_from(["first", "last", r"([^.]*)", r"(?P<key>[^/]*)"]))
def test_any_key_is_split_or_refused_with_a_reason(key: str, rule: str) -> None:
    part = Stem(rule).split(key)

    assert isinstance(part, str) or (
        part.sample and key.startswith(part.sample) and (part.field or part.kind == "json" or part.kind == "npz")
    )
