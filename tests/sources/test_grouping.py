"""The names of a place that form samples. Other names are left out, reported and counted, and nothing gets lost."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.sources import listing
from cachetool.sources.file_table import Table
from cachetool.sources.grouping import Grouping
from cachetool.sources.kinds import Census
from cachetool.sources.listing import TABLE_FILE, Listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source
from cachetool.stores import Object


def names(count: int, end: str, folder: str = "") -> list[str]:
    return [f"{folder}a{number:03d}.{end}" for number in range(count)]


def listed(keys: Iterable[str], folder: Path, *, page: int = 1000, **options: Any) -> Listing:
    items = [Object(key, 10) for key in keys]
    pages = [items[at : at + page] for at in range(0, len(items), page)]
    grouping = Grouping(SourceOptions(**options))
    return listing.write_listing(folder, pages, stem=grouping.stem, url="s3://b", grouping=grouping)


def keys_of(found: Listing) -> list[str]:
    return [found.object(number).key for number in range(found.objects)]


STRAYS = [
    "README.md", "labels.csv", "metadata.jsonl", "index.html", "desktop.ini", "Thumbs.db", "_SUCCESS", "_stats.json",
    "dataset_info.json", "LICENSE", "classes.txt", "sub/README", "CITATION.cff", "readme.txt", "00000_stats.json",
    "checksums.txt", "notes.docx", "weights.bin", "x.npz",
]  # fmt: skip


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("ends", [("jpg",), ("jpg", "json"), ("left.png", "right.png"), ("npy", "cls")])
def test_a_file_that_is_no_sample_is_left_out_and_named(stray: str, ends: tuple[str, ...], tmp_path: Path) -> None:
    samples = [key for end in ends for key in names(12, end, "train/")]
    found = listed([*samples, stray], tmp_path / "l")

    assert sorted(keys_of(found)) == sorted(samples)
    assert [name for name, _ in found.left_out.listed()] == [stray]
    assert sum(found.left_out.values()) == 1


def test_many_different_stray_files_are_left_out_and_hidden_ones_counted(tmp_path: Path) -> None:
    samples = names(60, "jpg")
    found = listed([*samples, *STRAYS, ".DS_Store", "x/.git/config"], tmp_path / "l")

    assert keys_of(found) == samples
    assert sorted(name for name, _ in found.left_out.listed()) == sorted(STRAYS)
    assert sum(found.left_out.values()) == len(STRAYS) + 2
    assert found.left_out["hidden"] == 2


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ([*names(3, "jpg"), "x.csv"], ["x.csv"]),
        ([*names(6, "jpg"), "x.csv", "y.csv"], ["x.csv", "y.csv"]),
        ([*names(1, "jpg"), "README.md"], ["README.md"]),
        ([*names(1, "jpg"), "x.csv"], []),  # it is unclear which one is the stray
        ([*names(2, "jpg"), "x.csv"], []),
        ([*names(1, "jpg"), "labels.csv"], ["labels.csv"]),  # a label list by its name
        ([*names(2, "npy"), "metadata.json", "README.md"], ["README.md", "metadata.json"]),
        (["train.npy", "test.npy", "val.npy"], []),
        (["images.npy", "labels.npy"], []),
        (["labels.csv"], []),
        ([*names(9, "jpg"), "README-zh.md", "LICENSE.MIT", "LICENCE"], ["LICENCE", "LICENSE.MIT", "README-zh.md"]),
        ([f"notice_{n:03d}.{end}" for n in range(9) for end in ("jpg", "txt")], []),
        ([*names(9, "txt"), "citation.graph.npy", "readme.jpg"], ["citation.graph.npy", "readme.jpg"]),
        # equally many: they may be parts of samples
        ([*names(9, "npy", "a/"), *(f"s{n}/labels.csv" for n in range(9))], []),
        ([*names(6, "jpg"), *(f"b{n}.png" for n in range(6))], []),
        ([*names(40, "jpg"), *(f"b{n}.png" for n in range(4))], []),  # images saved in another format
        ([*names(12, "jpg"), "cover.png"], ["cover.png"]),
        ([*names(50, "flac"), *(f"b{n}.mp3" for n in range(4))], []),
        ([*names(50, "flac"), *(f"b{n}.log" for n in range(4))], [f"b{n}.log" for n in range(4)]),
        ([*names(12, "jpg"), *(f"b{n}.csv" for n in range(5))], []),
        ([*names(12, "jpg"), *names(9, "txt")], []),  # some samples lack a field: all share another one
        ([*names(8, "jpg"), *names(8, "txt"), "classes.txt", "b/classes.txt"], ["b/classes.txt", "classes.txt"]),
        ([*names(8, "txt"), "classes.txt"], []),  # a sample like the others
        (["README.md", "index.html"], ["README.md"]),
        (["a/index.html", "b/index.html"], []),
        ([*names(9, "md"), "README.md"], ["README.md"]),
        ([*names(9, "npy"), *names(9, "json"), "stats.json"], ["stats.json"]),
    ],
)  # fmt: skip
def test_left_out_files_share_no_field_with_nearly_all_others(keys: list[str], left: list[str], tmp_path: Path) -> None:
    found = listed(keys, tmp_path / "l")

    assert (
        sorted(set(keys) - set(keys_of(found))) == sorted(left) == sorted(name for name, _ in found.left_out.listed())
    )


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"fields": ("jpg",)}, {"labels.csv", *names(12, "txt", "text/")}),
        ({"fields": ("jpg", "label"), "label_from_folder": True}, {"labels.csv", *names(12, "txt", "text/")}),
        ({"fields": ("x",), "rename": {"jpg": "x", "txt": "x"}}, {"labels.csv"}),
        ({"fields": ("nothing",)}, {"labels.csv"}),
        ({"rename": {"csv": "jpg", "txt": "jpg"}}, set()),
    ],
)
def test_files_without_any_requested_field_are_left_out(
    options: dict[str, Any], left: set[str], tmp_path: Path
) -> None:
    keys = [*names(12, "jpg", "image/"), *names(12, "txt", "text/"), "labels.csv"]
    assert set(keys) - set(keys_of(listed(keys, tmp_path / "l", **options))) == left


DAYS = [f"2024.{month:02d}.{day:02d}.npy" for month in range(1, 13) for day in range(1, 11)]


@pytest.mark.parametrize(
    "keys",
    [
        DAYS,
        DAYS[:2],
        [*DAYS, "labels.csv", "README.md"],
        [f"t={number * 0.5:.1f}.npy" for number in range(40)],
        [f"t={number * 0.5:g}.npy" for number in range(40)],  # t=1.npy beside t=1.5.npy
        [f"train/frame.{number:04d}.png" for number in range(30)],
        [*(f"r{run}/t={time * 0.25:.2f}.npy" for run in range(2) for time in range(8)), "params.toml", "run.log"],
        [f"run/v{number // 10}.{number % 10}.jpg" for number in range(30)],
        [f"log.2024-01-{day:02d}T12:00:00.bin" for day in range(1, 20)],
        [f"First{number}.Last{number}.jpg" for number in range(30)],
        [f"{number}.5e-{number}.dat" for number in range(1, 9)],
    ],
)
def test_names_with_numbers_between_dots_are_one_sample_each_and_a_note_says_so(
    keys: list[str], tmp_path: Path
) -> None:
    samples = [key for key in keys if key not in ("labels.csv", "README.md", "params.toml", "run.log")]
    found = listed(keys, tmp_path / "l")

    assert (found.units, found.stem) == (len(samples), "last")
    assert "--stem first" in found.notes[0]
    assert sum(found.left_out.values()) == len(keys) - len(samples)
    first = listed(keys, tmp_path / "first", stem="first")
    assert (first.stem, first.notes) == ("first", ())


@pytest.mark.parametrize(
    "keys",
    [
        ["a.jpg", "a.seg.png"],
        [key for number in range(30) for key in (f"{number:04d}.left.png", f"{number:04d}.right.png")],
        ["0001.left.png", "0001.right.png"],
        [key for number in range(30) for key in (f"{number}.jpg", f"{number}.seg.png", f"{number}.json")],
        [f"{number}.nii.gz" for number in range(30)],
        [f"clip{clip}.{frame}.jpg" for clip in range(2) for frame in range(25)] + ["clip0.json", "clip1.json"],
        [f"{number}.000.npy" for number in range(30)],
        ["scan.volume.npy", "scan.label.npy", "scan.mask.npy"],
        names(30, "npy"),
    ],
)
def test_webdataset_names_are_split_at_the_first_dot(keys: list[str], tmp_path: Path) -> None:
    found = listed(keys, tmp_path / "l")

    assert (found.stem, found.notes, found.objects) == ("first", (), len(keys))
    assert found.units == len({key.partition(".")[0] for key in keys})


@pytest.mark.parametrize(
    ("keys", "stem"),
    [
        ([*DAYS, *(key.replace(".npy", ".json") for key in DAYS)], "last"),
        ([f"frame.{number:04d}" for number in range(120)], "(?P<key>.*?(?P<field>[^/.]+)[.][^/]*)"),
        ([f"sub/frame.{number:04d}" for number in range(120)], "(?P<key>.*?(?P<field>[^/.]+)[.][^/]*)"),
    ],
)
def test_ambiguous_names_are_refused_and_the_option_in_the_error_reads_them(
    keys: list[str], stem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        listed(keys, tmp_path / "l")
    assert f"--stem {stem}" in str(raised.value).replace("'", "")
    assert listed(keys, tmp_path / "m", stem=stem).units == 120


PARTS = st.sampled_from(
    ["a", "b1", "2024.01", "x.y", "README", "labels", "t=0.5", "classes", "index", ".hid", "_SUCCESS"]
)
ENDS = st.sampled_from(["jpg", "png", "npy", "json", "txt", "csv", "tar", "tfrecord", "idx", "md", "bin", ""])
KEYS = st.builds(
    lambda folder, stem, number, end: folder + stem + number + (f".{end}" if end else ""),
    st.sampled_from(["", "sub/", "sub/deep/", "other/"]), PARTS, st.integers(0, 30).map(str) | st.just(""), ENDS,
)  # fmt: skip
SAMPLES = st.builds(
    lambda count, ends: [f"s{number}.{end}" for number in range(count) for end in ends],
    st.integers(0, 12), st.sets(ENDS.filter(bool), min_size=1, max_size=2),
)  # fmt: skip


@settings(max_examples=60)
@given(
    SAMPLES,
    st.sets(KEYS, max_size=12),
    st.sampled_from([(), ("*.jpg", "*.tar"), ("sub/**",)]),
    st.sampled_from([None, "jpg"]),
)
def test_every_file_belongs_to_a_sample_or_is_reported_with_a_reason(
    samples: list[str], strays: set[str], include: tuple[str, ...], field: str | None
) -> None:
    """Law: files = files of samples + files left out, for any kind of place."""
    keys = {*samples, *strays}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as out:
        for key in keys:
            path = Path(place, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 10)
        options = SourceOptions(include=include, fields=None if field is None else (field,))
        try:
            found = list_source(place, Path(out, "l"), options)
        # a place that cannot be read at all is an error, never silently empty
        except (NotFound, UsageError, BadObject):
            return
        named = found.left_out.listed()
        if (Path(out, "l") / TABLE_FILE).exists():
            named = Table.open(Path(out, "l")).skipped

    assert found.objects + sum(found.left_out.values()) == len(keys)
    by_reason = Counter(why for _, why in named)
    silent = {"hidden", "not chosen by --include and --exclude", "indexes and locks"}
    assert {why: count for why, count in found.left_out.items() if why not in silent} == by_reason
    assert {name for name, _ in named} <= keys


@settings(max_examples=40)
@given(SAMPLES, st.sets(KEYS, max_size=12), st.randoms(use_true_random=False), st.integers(1, 7), st.integers(1, 50))
def test_the_left_out_files_do_not_depend_on_the_order_of_arrival(
    samples: list[str], strays: set[str], shuffler: random.Random, page: int, run: int
) -> None:
    keys = sorted({*samples, *strays})
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        try:
            plain = listed(keys, Path(folder, "a"))
        except UsageError:
            return
        patch.setattr(listing, "RUN", run)
        shuffled = listed(shuffler.sample(keys, len(keys)), Path(folder, "b"), page=page)

        assert plain.identity == shuffled.identity
        assert (plain.left_out, sorted(plain.left_out.listed())) == (
            shuffled.left_out,
            sorted(shuffled.left_out.listed()),
        )
        assert (plain.notes, plain.kept) == (shuffled.notes, shuffled.kept)
        assert not list(Path(folder).rglob("*.tmp"))


def census(*items: tuple[str, int], read_as: str | None = None) -> str | None:
    counted = Census("s3://b/")
    list(counted.count([[Object(key, size) for key, size in items]]))
    kind = counted.kind(read_as)
    return None if kind is None else kind.name


SHARDS = [(f"{number:05d}.tar", 10_240) for number in range(4)]


@pytest.mark.parametrize(
    "beside",
    [
        # img2dataset: its tables are larger than its archives
        [(f"{number:05d}.parquet", 90_000) for number in range(4)],
        [(f"{number:05d}.{end}", 900) for number in range(4) for end in ("parquet", "json")],
        [(f"{number:05d}_stats.json", 90_000) for number in range(4)],
        [(f"tables/{number:05d}.parquet", 90_000) for number in range(4)],
        [("metadata.parquet", 900_000)],
        [("shardindex.json", 900_000)],  # wids
        [("dataset_info.json", 90_000), ("features.json", 90_000), ("labels.txt", 10), ("README.md", 900_000)],
        [(f"{number:05d}.idx", 90_000) for number in range(4)],
        [("all.h5", 900_000)],
    ],
)
def test_archives_with_side_files_are_a_set_of_archives_regardless_of_sizes(beside: list[tuple[str, int]]) -> None:
    assert census(*SHARDS, *beside) == "tar"
    records = [(f"d-train.tfrecord-0000{number}-of-00004", 100) for number in range(4)]
    if not any(name.endswith("parquet") for name, _ in beside[:1]) or len(beside) == 1:
        assert census(*records, *beside) == "tfrecord"


def test_a_requested_kind_is_read_and_a_missing_kind_is_refused_with_the_existing_ones() -> None:
    tables = [(f"{number:05d}.parquet", 10) for number in range(4)]
    assert census(*SHARDS, *tables, read_as="parquet") == "parquet"
    assert census(*SHARDS, ("metadata.parquet", 10), read_as="parquet") == "parquet"
    assert census(("metadata.parquet", 10)) == "parquet"
    assert census(*((key, 10) for key in names(12, "jpg")), ("metadata.parquet", 9000)) is None
    assert census(*((key, 10) for key in names(3, "npy")), read_as="npy") == "npy"
    with pytest.raises(UsageError, match=r"--read-as hdf5: s3://b/ has no such file; it has 4 tar, 1 other files"):
        census(*SHARDS, ("a.txt", 1), read_as="hdf5")
