"""Listings: the same objects get the same numbers in any order of arrival, and nothing is dropped silently."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.errors import BadObject, CorruptError, NotFound
from cachetool.sources import listing
from cachetool.sources.keys import Stem
from cachetool.sources.listing import Listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source
from cachetool.stores import Object

OBJECTS = [
    Object("b/2.json", 20, "e2"),
    Object("b/2.npy", 30),
    Object("a/1.npy", 10, "e1"),
    Object("b/2.x.npy", 5, "é"),
    Object("a/10.npy", 0, "e10"),
]


def written(folder: Path, objects: Iterable[Object], *, page: int = 2, stem: str = "first") -> Listing:
    items = list(objects)
    pages = [items[at : at + page] for at in range(0, len(items), page)]
    return listing.write_listing(folder, pages, stem=Stem(stem), url="s3://b")


def units(found: Listing) -> list[list[Object]]:
    return [found.unit(number) for number in range(found.units)]


def test_objects_with_the_same_key_are_one_unit_in_key_order(tmp_path: Path) -> None:
    found = written(tmp_path / "l", OBJECTS)

    assert units(found) == [
        [Object("a/1.npy", 10, "e1")],
        [Object("a/10.npy", 0, "e10")],
        [Object("b/2.json", 20, "e2"), Object("b/2.npy", 30), Object("b/2.x.npy", 5, "é")],
    ]
    assert (found.objects, found.units, found.bytes, found.largest) == (5, 3, 65, 55)
    assert found.unit_bytes(np.array([2, 0, 2])).tolist() == [55, 10, 55]
    assert found.unit_bytes(np.array([], dtype=np.int64)).tolist() == []


def test_a_written_listing_is_read_back_equal(tmp_path: Path) -> None:
    made = written(tmp_path / "l", OBJECTS)
    found = Listing.open(tmp_path / "l")

    assert units(found) == units(made)
    assert (found.identity, found.url, found.stem, found.left_out) == (made.identity, "s3://b", "first", {})
    with pytest.raises(IndexError):
        found.unit(3)
    with pytest.raises(IndexError):
        found.unit(-1)


KEYS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).map(lambda text: f"{text}.npy"),
    unique=True,
    max_size=40,
)


@settings(max_examples=40)
@given(KEYS, st.randoms(use_true_random=False), st.integers(1, 7), st.integers(1, 50))
def test_a_listing_does_not_depend_on_order_pages_and_runs(
    keys: list[str], shuffler: random.Random, page: int, run: int
) -> None:
    """Law: the listing is a function of the set of objects."""
    objects = [Object(key, len(key), str(at) if at % 2 else None) for at, key in enumerate(keys)]
    shuffled = shuffler.sample(objects, len(objects))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        plain = written(Path(folder) / "a", objects, page=1000)
        patch.setattr(listing, "RUN", run)
        merged = written(Path(folder) / "b", shuffled, page=page)

        assert units(plain) == units(merged)
        assert plain.identity == merged.identity
        flat = [item for unit in units(plain) for item in unit]
        assert {item.key for item in flat} <= set(keys)
        assert len(flat) + sum(plain.left_out.values()) == len(keys)
        assert not list(Path(folder).rglob("*.tmp"))


@pytest.mark.parametrize(
    "change",
    [{"key": "a/3.npy"}, {"size": 11}, {"etag": "other"}, {"etag": None}],
    ids=["key", "size", "etag", "no etag"],
)
def test_any_change_of_an_object_changes_the_identity(tmp_path: Path, change: dict[str, object]) -> None:
    before = written(tmp_path / "a", OBJECTS)
    old = OBJECTS[2]
    new = Object(**{"key": old.key, "size": old.size, "etag": old.etag, **change})  # type: ignore[arg-type]
    after = written(tmp_path / "b", [new if item is old else item for item in OBJECTS])

    assert before.identity != after.identity


def test_another_rule_of_grouping_changes_the_identity(tmp_path: Path) -> None:
    by_first, by_last = written(tmp_path / "a", OBJECTS), written(tmp_path / "b", OBJECTS, stem="last")

    assert by_first.digest != by_last.digest or by_first.identity != by_last.identity
    assert (by_first.units, by_last.units) == (3, 4)


def test_lengths_are_part_of_the_digest(tmp_path: Path) -> None:
    """Characters moved between neighbouring fields change the digest."""
    one = written(tmp_path / "a", [Object("a.n", 1, "pq"), Object("b.n", 1)])
    two = written(tmp_path / "b", [Object("a.npq", 1), Object("b.n", 1)])

    assert one.identity != two.identity


@pytest.mark.parametrize("run", [2, 1000])
def test_a_key_listed_twice_is_named(tmp_path: Path, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 74: the last one never silently wins."""
    monkeypatch.setattr(listing, "RUN", run)

    with pytest.raises(BadObject, match=r"'b/2\.npy' is listed twice"):
        written(tmp_path / "l", [*OBJECTS, Object("c.npy", 1), Object("b/2.npy", 30)])
    assert not (tmp_path / "l" / "listing.json").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        Object("a/2.npy", 2**70),
        Object("a/2.npy", 2**48),
        Object("a/2.npy", -2),
        Object("a/2\ud800.npy", 1),
        Object("a/2.npy", 1, "\ud800"),
        Object("a/" + 70_000 * "2" + ".npy", 1),
        Object("a/2.npy", 1, 70_000 * "e"),
    ],
)
def test_impossible_entries_are_refused_with_their_key_in_a_short_line(tmp_path: Path, wrong: Object) -> None:
    with pytest.raises(BadObject, match="the listed key 'a/2") as raised:
        written(tmp_path / "l", [*OBJECTS, wrong])
    assert len(str(raised.value)) < 300


def test_sizes_whose_sum_overflows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadObject, match=r"4\.6e\+18 bytes"):
        written(tmp_path / "l", [Object(f"{n}.npy", 2**48 - 1) for n in range(2**14 + 1)], page=2**15)


def test_objects_that_are_no_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    found = written(
        tmp_path / "l", [Object(key, 1) for key in ("a.npy", ".hidden.npy", "README", "x/.git/y.npy", "LICENSE")]
    )

    assert [item.key for unit in units(found) for item in unit] == ["a.npy"]
    assert found.left_out == {"hidden": 2, "names without an extension": 2}


def test_keys_that_are_not_utf8_and_similar_keys_stay_distinct(tmp_path: Path) -> None:
    keys = [
        "\udcff.npy",
        "e\u0301.npy",
        "\u00e9.npy",
        "A.npy",
        "a.npy",
        "new\nline.npy",
        "../up.npy",
        "/abs.npy",
        "a//b.npy",
    ]
    found = written(tmp_path / "l", [Object(key, 1) for key in keys])

    assert sorted(item.key for unit in units(found) for item in unit) == sorted(set(keys) - {"../up.npy"})
    assert found.units == len(keys) - 1
    assert found.left_out == {"hidden": 1}
    assert {path.name for path in (tmp_path / "l").iterdir()} == {
        "objects.npy",
        "blocks.npy",
        "sizes.npy",
        "listing.json",
    }


def test_unknown_sizes_are_estimated_and_excluded_from_the_sum(tmp_path: Path) -> None:
    found = written(tmp_path / "l", [Object("a.npy", -1), Object("a.json", 10), Object("b.npy", 5)])

    assert (found.bytes, found.largest) == (15, 10)
    assert found.unit_bytes(np.arange(2), unknown=100).tolist() == [110, 5]
    assert found.unit(0)[1].size == -1


def damage(folder: Path, how: str) -> None:
    match how:
        case "no facts":
            (folder / "listing.json").unlink()
        case "half facts":
            (folder / "listing.json").write_text('{"version": 1')
        case "newer":
            facts = json.loads((folder / "listing.json").read_text())
            (folder / "listing.json").write_text(json.dumps({**facts, "version": 99}))
        case "short keys":
            path = folder / "objects.npy"
            path.write_bytes(path.read_bytes()[:-3])
        case "other sizes":
            np.save(folder / "sizes.npy", np.zeros(2, dtype=np.int64))
        case "other offsets":
            np.save(folder / "blocks.npy", np.zeros(6, dtype=np.int64))
        case "missing column":
            (folder / "units.npy").unlink()


@pytest.mark.parametrize(
    "how", ["no facts", "half facts", "newer", "short keys", "other sizes", "other offsets", "missing column"]
)
def test_a_damaged_listing_is_an_error_that_names_it(tmp_path: Path, how: str) -> None:
    written(tmp_path / "l", OBJECTS)
    damage(tmp_path / "l", how)

    with pytest.raises(CorruptError, match="/l'"):
        Listing.open(tmp_path / "l")


def test_a_place_without_samples_is_an_error_that_names_its_contents(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(NotFound, match=f"no samples under {place}$"):
        list_source(str(place), tmp_path / "a")
    (place / "README").write_text("x")
    (place / ".hidden").write_text("x")
    with pytest.raises(NotFound, match="left out: 1 hidden, 1 names without an extension"):
        list_source(str(place), tmp_path / "b")


def test_progress_counts_the_listed_objects(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    for number in range(1500):
        (tmp_path / "place" / f"{number}.bin").touch()
    told: list[int] = []

    found = list_source(str(tmp_path / "place"), tmp_path / "l", SourceOptions(), progress=told.append)

    assert told == [1000, 1500]
    assert found.units == 1500


def test_a_million_keys_take_little_memory_and_little_disk(tmp_path: Path) -> None:
    """Row 75: at most 500 MiB including the interpreter and NumPy; about 100 bytes per key in addition to the key."""
    code = f"""
from pathlib import Path
from cachetool.sources.keys import Stem
from cachetool.sources.listing import write_listing
from cachetool.stores import Object

def pages():
    for at in range(0, 1_000_000, 1000):
        # scattered, so that every run spans the whole range
        keys = [(number * 7919) % 1_000_000 for number in range(at, at + 1000)]
        yield [Object(f"train/part-{{key % 97:03d}}/{{key:012d}}.image.npy", 3000, f"{{key:032x}}") for key in keys]

found = write_listing(Path({str(tmp_path / "l")!r}), pages(), stem=Stem("first"), url="s3://b")
assert found.units == 1_000_000
assert found.unit(123)[0].etag
# Not ru_maxrss: that also counts what the process that started this one had before exec.
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 500 * 2**20
    size = sum(path.stat().st_size for path in (tmp_path / "l").iterdir())
    assert size / 1e6 < 100 + len("train/part-000/000000000000.image.npy")
