"""Real folders with files that are no samples. ``pull`` and ``convert`` behave alike, on this machine and at URLs, and
every option that an error or a note names is tried.
"""

from __future__ import annotations

import datetime
import io
import json
import re
import shlex
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import cachetool
from cachetool import api
from cachetool.api import read_sample
from cachetool.pull import prepare as planning
from cachetool.pull import run as pulling
from tests.servers import Moto, folder_server, scripted_server

if TYPE_CHECKING:
    from tests.cli.conftest import Ran, Run

Files = Mapping[str, bytes]
JPG = b"\xff\xd8" + bytes(600)
IMAGES = {f"a{number:02d}.jpg": JPG for number in range(12)}
BESIDE = (
    "README.md", "labels.csv", "metadata.jsonl", "index.html", "desktop.ini", "Thumbs.db", "_SUCCESS", "_stats.json",
    "dataset_info.json", "LICENSE", ".DS_Store", "classes.txt",
)  # fmt: skip


def npy(value: object = 0.0) -> bytes:
    out = io.BytesIO()
    np.save(out, np.full(3, value))
    return out.getvalue()


def tar(first: int, count: int = 3) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(first, first + count):
            member = tarfile.TarInfo(f"{number:05d}.txt")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    return out.getvalue()


def table(rows: int = 3, padding: int = 0) -> bytes:
    out = io.BytesIO()
    text = [f"{number:07d}" * padding for number in range(rows)]
    parquet.write_table(pyarrow.table({"key": list("abc") * (rows // 3), "url": text}), out, compression="none")
    return out.getvalue()


def write(folder: Path, files: Files) -> Path:
    for name, body in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return folder


Both = Callable[..., list["Ran"]]


@pytest.fixture
def both(run: Run, tmp_path: Path) -> Both:
    """Run ``pull --all`` and ``convert --out`` of a source, each into new places, with ``--json``."""
    count = iter(range(100))

    def start(source: object, *options: str) -> list[Ran]:
        number = next(count)
        cap = ("--cache", tmp_path / f"c{number}", "--max-size", "20MB")
        return [
            run("pull", str(source), "--all", *cap, *options, "--json"),
            run("convert", str(source), "--to", "lmdb", "--out", tmp_path / f"o{number}", *options, "--json"),
        ]

    return start


def left_out(ran: Ran) -> dict[str, str]:
    document = ran.document
    return dict(document["left_out"] if "left_out" in document else document["skipped"])


def samples(ran: list[Ran]) -> list[int]:
    assert [one.code for one in ran] == [0, 0], [one.stderr for one in ran]
    return [one.document["samples"] for one in ran]


@pytest.mark.parametrize("stray", BESIDE)
def test_one_file_that_is_no_sample_is_skipped_and_named_by_pull_and_convert(
    stray: str, both: Both, tmp_path: Path
) -> None:
    ran = both(write(tmp_path / "s", {**IMAGES, stray: b"a,b\n1,2\n"}))

    assert samples(ran) == [12, 12]
    for one in ran:
        assert list(left_out(one)) == ([] if stray == ".DS_Store" else [stray])
        assert sum(one.document["left_out_counts"].values()) == 1
        assert re.search(f"left out: ({re.escape(stray)}|1 hidden)", one.stderr)


def test_json_lists_all_skipped_files_by_name_and_count(both: Both, tmp_path: Path) -> None:
    ran = both(write(tmp_path / "s", {**IMAGES, **dict.fromkeys(BESIDE, b"{}")}))

    assert samples(ran) == [12, 12]
    for one in ran:
        assert sorted(left_out(one)) == sorted(set(BESIDE) - {".DS_Store"})
        assert sum(one.document["left_out_counts"].values()) == len(BESIDE)


def test_chosen_fields_exclude_objects_without_any_of_them(both: Both, tmp_path: Path) -> None:
    texts = {name.replace("jpg", "txt"): b"text" for name in IMAGES}
    place = write(tmp_path / "s", {**IMAGES, **texts, "labels.csv": b"a,b", "only/b.txt": b"text"})
    ran = both(place, "--fields", "jpg")
    assert samples(ran) == [12, 12]
    assert [sorted(left_out(one)) for one in ran] == [["labels.csv", "only/b.txt"]] * 2


def test_a_second_pull_and_a_refresh_name_the_skipped_files_again(run: Run, tmp_path: Path) -> None:
    place = write(tmp_path / "s", {**IMAGES, "labels.csv": b"a,b"})
    assert run("pull", place, "--samples", "5", "--max-size", "20MB").code == 0
    again = run("pull", place, "--all", "--json")
    assert (again.document["samples"], list(left_out(again))) == (7, ["labels.csv"])

    write(place, {f"t{number}.csv": b"a" for number in range(200)} | {"b.jpg": JPG})
    fresh = run("pull", place, "--all", "--refresh", "--json")
    assert fresh.code == 0, fresh.stderr
    assert (fresh.document["samples"], fresh.document["added"], fresh.document["vanished"]) == (1, 1, 0)
    assert sum(fresh.document["left_out_counts"].values()) == 201
    assert run("pull", place, "--all", "--json").document["left_out_counts"] == fresh.document["left_out_counts"]


def advised(error: str) -> list[list[str]]:
    """Return the options of each alternative that an error names."""
    ways = []
    for way in re.split(r"; or |;\n", error):
        for part in re.split(r" or (?=--)| to (?=cut)|, (?=or)", way):
            words = shlex.split(part)
            start = next((at for at, word in enumerate(words) if word.startswith("--")), None)
            if start is not None:
                options = words[start:]
                stop = next((at for at in range(0, len(options), 2) if not options[at].startswith("--")), len(options))
                ways.append(options[:stop])
    return [way for way in ways if way != ["--stem"]]


ENDS = {"npy": npy(), "json": b"{}"}
CASES: dict[str, tuple[Files, list[list[int]]]] = {
    "an image and a table": ({"a.jpg": JPG, "x.csv": b"a"}, [[1, 1], [1, 1]]),
    "two kinds of images": (
        {**IMAGES, **{f"b{number}.png": JPG for number in range(6)}}, [[18, 18], [12, 12], [6, 6]],
    ),
    "two folders of one sample": (
        {**{f"images/t/{name}": JPG for name in IMAGES}, **{f"labels/t/{name[:3]}.txt": b"t" for name in IMAGES}},
        [[12, 12]] * 3,
    ),
    "some lack a field": ({**IMAGES, **{f"a{number:02d}.txt": b"t" for number in range(6)}}, [[12, 12]]),
    "arrays of days in two files": (
        {f"2024.01.{day:02d}.{end}": ENDS[end] for day in range(1, 31) for end in ENDS},
        [[30, 30]],
    ),
    "files that end in numbers": ({f"frame.{number:04d}": b"raw" for number in range(40)}, [[40, 40]]),
    "an archive of days": (
        {"a.tar": b""}, [[120, 120]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_options_that_work(case: str, both: Both, tmp_path: Path) -> None:
    files, wanted = CASES[case]
    place = write(tmp_path / "s", files)
    if case == "an archive of days":
        with tarfile.open(place / "a.tar", "w") as archive:
            for day in range(120):
                name = f"{datetime.date(2024, 1, 1) + datetime.timedelta(day):%Y.%m.%d}.npy"
                member = tarfile.TarInfo(name)
                member.size = len(npy())
                archive.addfile(member, io.BytesIO(npy()))
    error, other = both(place)
    assert error.code == other.code in (2, 3)
    assert len(error.stderr.strip().splitlines()) <= 2
    ways = advised(error.document["message"])
    results = {tuple(way): samples(both(place, *way)) for way in ways}
    assert sorted(results.values(), reverse=True) == sorted(wanted, reverse=True), (error.stderr, results)


def shards(*ends: str, padding: int = 0) -> Files:
    """Write archives of 3 samples each, with files of other extensions beside them."""
    files = {}
    for number in range(3):
        files[f"{number:05d}.tar"] = tar(10 * number)
        for end in ends:
            files[f"{number:05d}{end}"] = table(padding=padding) if end == ".parquet" else b'{"count": 3}'
    return files


@pytest.mark.parametrize(
    "files",
    [
        shards(".parquet"),
        shards(".parquet", padding=2**12),
        shards(".parquet", "_stats.json"),
        shards(".json", ".parquet", "_stats.json"),
        {**shards(), "dataset_info.json": bytes(90_000), "features.json": b"{}", "README.md": b"x"},
        {**shards(), "shardindex.json": bytes(90_000)},
        {**shards(), "metadata.parquet": table(padding=2**12)},
    ],
)
def test_a_folder_of_archives_with_side_files_is_a_set_of_archives(files: Files, both: Both, tmp_path: Path) -> None:
    place = write(tmp_path / "s", files)
    for options in ([], ["--read-as", "files"], ["--read-as", "tar"]):
        ran = both(place, *options)
        assert samples(ran) == [9, 9]
        beside = sorted(name for name in files if not name.endswith(".tar"))
        assert [sorted(left_out(one)) for one in ran] == [beside] * 2
    for glob in (f"{place}/*.tar", f"{place}/0*.tar"):
        ran = both(glob)
        assert samples(ran) == [9, 9]
        assert [one.document["left_out_counts"] for one in ran] == [
            {"not chosen by --include and --exclude": len(beside)}
        ] * 2
    assert samples(both(place, "--include", "0000[01].tar")) == [6, 6]


def test_the_option_that_a_note_names_reads_the_skipped_files(both: Both, tmp_path: Path) -> None:
    place = write(tmp_path / "s", shards(".parquet"))
    (option,) = {why.partition("; ")[2].removesuffix(" reads it") for why in left_out(both(place)[0]).values()}
    ran = both(place, *option.split())
    assert option == "--read-as parquet"
    assert samples(ran) == [9, 9]
    assert set(left_out(ran[0])) == {f"{number:05d}.tar" for number in range(3)}


def test_read_as_overrides_the_extension_of_a_file(both: Both, tmp_path: Path) -> None:
    place = write(tmp_path / "s", {"shard.bin": tar(0), "other.txt": b"x"})
    assert samples(both(place / "shard.bin", "--read-as", "tar")) == [3, 3]
    with folder_server(place) as server:
        assert samples(both(f"{server.url}/shard.bin", "--read-as", "tar")) == [3, 3]
    for one in both(place, "--read-as", "parquet"):
        assert (one.code, "has no such file; it has" in one.stderr) == (2, True)
    for one in both(place, "--read-as", "nothing"):
        assert (one.code, "tfrecord" in one.stderr) == (2, True)


def test_names_with_dates_are_one_sample_each_and_a_note_says_so(both: Both, run: Run, tmp_path: Path) -> None:
    days = {f"{datetime.date(2024, 1, 1) + datetime.timedelta(day):%Y.%m.%d}.npy": npy(day) for day in range(120)}
    times = {f"t={number * 0.5:.1f}.npy": npy(number) for number in range(40)}
    for name, files in (("d", days), ("t", times)):
        ran = both(write(tmp_path / name, files))
        assert samples(ran) == [len(files)] * 2
        for one in ran:
            assert "--stem first" in one.document["notes"][0]
            assert one.document["notes"][0] in one.stderr
    assert samples(both(tmp_path / "t", "--stem", "first")) == [20, 20]  # the choice from the note


def test_a_source_with_a_decided_stem_continues_and_no_sample_is_drawn_twice(run: Run, tmp_path: Path) -> None:
    place = write(tmp_path / "s", {f"t={number * 0.5:.1f}.npy": npy(number) for number in range(40)})
    assert run("pull", place, "--samples", "10", "--max-size", "20MB").code == 0
    assert "leave --stem out" in run("pull", place, "--samples", "10", "--stem", "last").error
    assert "another --dataset" in run("pull", place, "--samples", "10", "--stem", "first").error
    write(place, {"t=99.0.npy": npy(99), "README.md": b"x"})
    assert run("pull", place, "--all", "--refresh", "--json").document["samples"] == 31
    with cachetool.open_cache(tmp_path / "cache") as cache:
        keys = [read_sample(cache, shard.id, at)["__key__"] for shard in cache.shards() for at in range(shard.samples)]
    assert sorted(keys) == sorted(path.name.removesuffix(".npy") for path in place.glob("*.npy"))


def test_globs_belong_to_a_source_and_other_globs_need_another_dataset(run: Run, tmp_path: Path) -> None:
    place = write(tmp_path / "s", {**{f"train/{name}": JPG for name in IMAGES}, "val/x.jpg": JPG, "val/y.jpg": JPG})
    first = run("pull", place, "--include", "train/**", "--samples", "5", "--max-size", "20MB", "--json")
    assert first.document["left_out_counts"] == {"not chosen by --include and --exclude": 2}
    assert run("pull", place, "--include", "train/**", "--all", "--json").document["samples"] == 7
    for options in ([], ["--include", "**"], ["--include", "train/**", "--exclude", "val/"]):
        ran = run("pull", place, "--all", *options)
        assert "--include 'train/**'" in ran.error
        assert ran.code == 2
    ran = run("pull", place, "--all", "--dataset", "val", "--exclude", "train/", "--json")
    assert ran.document["samples"] == 2
    with cachetool.open_cache(tmp_path / "cache") as cache:
        assert cache.pull(f"{place}/train/a0*.jpg", all=True, dataset="glob").samples == 10
        with cachetool.BackgroundPull(cache, f"{place}/train/a1*.jpg", dataset="background") as background:
            assert background.url == f"{place}/train/"


def test_globs_without_a_match_are_reported_with_the_number_of_names(both: Both, tmp_path: Path) -> None:
    place = write(tmp_path / "s", {f"sub/{name}": JPG for name in IMAGES})
    for source, *options in ((place, "--include", "*.tiff", "--exclude", "*.md"), (f"{place}/*.jpg",)):
        for ran in both(source, *options):
            assert ran.code == 2
            assert "12 names" in ran.stderr
            assert "sub/a" in ran.stderr
            assert ("*.tiff" if options else "/*.jpg") in ran.stderr
    for ran in both(tmp_path / "nowhere" / "*.jpg"):
        assert ran.code in (2, 3)
        assert "nowhere" in ran.stderr


def test_a_glob_on_a_server_without_a_listing_is_an_error_with_advice(both: Both) -> None:
    with scripted_server(lambda handler: handler.answer(404)) as server:
        for ran in both(f"{server.url}/shards/*.tar"):
            assert ran.code == 3
            assert "manifest" in ran.stderr


def test_a_glob_selects_a_zarr_folder_completely_or_not_at_all(both: Both, tmp_path: Path) -> None:
    import zarr

    for name in ("a", "b"):
        group = zarr.open_group(str(tmp_path / "s" / f"{name}.zarr"), mode="w")
        group.create_array("x", data=np.ones((4, 2), dtype=np.float32))
    write(tmp_path / "s", {"README.md": b"x", "notes.csv": b"x"})
    assert samples(both(tmp_path / "s", "--include", "*.zarr")) == [8, 8]
    assert samples(both(tmp_path / "s", "--exclude", "b.zarr", "--exclude", "*.json")) == [4, 4]
    ran = both(tmp_path / "s")
    assert samples(ran) == [8, 8]
    assert [sorted(left_out(one)) for one in ran] == [["README.md", "notes.csv"]] * 2
    for one in both(tmp_path / "s" / "a.zarr", "--exclude", "*.json"):
        assert (one.code, "is a Zarr" in one.stderr) == (2, True)


@pytest.mark.parametrize("where", ["s3", pytest.param("http", marks=pytest.mark.soak)])
def test_mixed_folders_at_urls_behave_alike(
    where: str, both: Both, tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "images": {**IMAGES, "README.md": b"x", "labels.csv": b"a,b"},
        "shards": shards(".parquet", "_stats.json", padding=2**12),
        "days": {f"2024.01.{day:02d}.npy": npy(day) for day in range(1, 31)},
    }
    files = {f"{place}/{name}": body for place, bodies in places.items() for name, body in bodies.items()}
    if where == "s3":
        for name, value in moto.env.items():
            monkeypatch.setenv(name, value)
        moto.put("mixed", files)
    with folder_server(write(tmp_path / "served", files)) as server:
        root = "s3://mixed" if where == "s3" else server.url
        ran = both(f"{root}/images/")
        assert samples(ran) == [12, 12]
        assert [sorted(left_out(one)) for one in ran] == [["README.md", "labels.csv"]] * 2
        assert samples(both(f"{root}/shards/")) == [9, 9]
        assert samples(both(f"{root}/shards/*.tar")) == [9, 9]
        assert samples(both(f"{root}/shards/", "--read-as", "parquet")) == [9, 9]
        assert samples(both(f"{root}/days/")) == [30, 30]
        assert samples(both(f"{root}/", "--include", "days/*.npy", "--exclude", "*.0?.npy")) == [21, 21]


def test_a_listing_that_starts_early_keeps_the_fields_of_its_first_part(
    moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SEGMENT", 25)
    monkeypatch.setattr(pulling, "SEGMENT", 25)
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    arrays = {f"{number:04d}.x.npy": npy(number) for number in range(90)}
    moto.put("early-strays", {**arrays, "0000-README.md": b"x", "0030-notes.csv": b"x", "zz.csv": b"x"})
    with api.open_cache(tmp_path / "a", max_size="20MB") as cache:
        result = cache.pull("s3://early-strays/", start_early=True, all=True)
        assert (result.samples, result.pass_complete) == (90, True)
        assert {name for name, _ in result.left_out} == {"0000-README.md", "0030-notes.csv", "zz.csv"}
        assert sum(result.left_out_counts.values()) == 3
    moto.put("early-halves", {**arrays, **{f"z{number:04d}.txt": b"x" for number in range(90)}})
    with (
        api.open_cache(tmp_path / "b", max_size="20MB") as cache,
        pytest.raises(cachetool.BadObject, match=r"none of the fields of the objects listed before \(x\)"),
    ):
        cache.pull("s3://early-halves/", start_early=True, all=True)
    with api.open_cache(tmp_path / "c", max_size="20MB") as cache:
        result = cache.pull("s3://early-halves/", start_early=True, all=True, exclude=["z*"])
        assert (result.samples, result.left_out_counts) == (90, {"not chosen by --include and --exclude": 90})
    moto.put("early-days", {f"2024.01.{day:02d}.npy": npy(day) for day in range(1, 31)})
    with (
        api.open_cache(tmp_path / "d", max_size="20MB") as cache,
        pytest.raises(cachetool.UsageError, match="leave --start-early out"),
    ):
        cache.pull("s3://early-days/", start_early=True)
    assert json.dumps(result.as_dict())
