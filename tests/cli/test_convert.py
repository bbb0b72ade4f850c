"""``cachetool convert`` on the command line."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import lmdb
import numpy as np
import pytest
import zarr

from tests.cli.folders import labels, tree

if TYPE_CHECKING:
    from tests.cli.conftest import Run

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")


def test_a_cache_is_converted_through_every_format_and_keeps_samples_and_digest(run: Run, filled: Path) -> None:
    before = sorted(labels(filled))
    digests = set()
    for name in ("hdf5", "zarr", "tfrecord", "lmdb"):
        ran = run("convert", "--to", name, "--verify", "--json")
        assert ran.code == 0, ran.stderr
        assert (ran.document["to"], ran.document["samples"], ran.document["verified"]) == (name, 30, True)
        assert {shard["format"] for shard in run("ls", "--json").document["shards"]} == {name}
        digests.add(ran.document["digest"])

    assert len(digests) == 1
    assert sorted(labels(filled)) == before


@pytest.mark.parametrize("name", FORMATS)
def test_convert_with_out_writes_plain_files_and_does_not_change_the_cache(
    run: Run, filled: Path, tmp_path: Path, name: str
) -> None:
    before = {shard["id"] for shard in run("ls", "--json").document["shards"]}
    ran = run("convert", "--to", name, "--out", tmp_path / "plain")

    assert ran.code == 0, ran.stderr
    assert "converted 30 samples" in ran.stdout
    assert json.loads((tmp_path / "plain" / "dataset.json").read_text())["samples"] == 30
    assert list((tmp_path / "plain").glob("part-00000.*"))
    assert {shard["id"] for shard in run("ls", "--json").document["shards"]} == before


def test_plain_hdf5_opens_without_cachetool(run: Run, filled: Path, tmp_path: Path) -> None:
    assert run("convert", "--to", "hdf5", "--out", tmp_path / "plain", "--quiet").code == 0
    with h5py.File(tmp_path / "plain" / "part-00000.h5") as file:
        volumes, numbers = file["volume"][:], file["label"][:]

    assert volumes.shape == (30, 4, 8, 8)
    assert np.array_equal(volumes[:, 0, 0, 0], numbers)
    assert sorted(numbers) == sorted(labels(filled))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Create a foreign HDF5 file: 20 rows of ``x`` and ``y``, and an array that is not part of these rows."""
    path = tmp_path / "foreign.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(60, dtype=np.float32).reshape(20, 3)
        file["y"] = np.arange(20)
        file["scale"] = np.arange(3)
    return path


def test_a_dry_run_shows_a_foreign_file_before_its_conversion(here: Run, foreign: Path, tmp_path: Path) -> None:
    ran = here("convert", foreign, "--to", "lmdb", "--dry-run")

    assert ran.code == 0, ran.stderr
    assert "20 samples" in ran.stdout
    assert "float32 (3,)" in ran.stdout
    assert "scale" in ran.stdout
    assert list(tmp_path.iterdir()) == [foreign]
    assert here("convert", foreign, "--to", "lmdb", "--dry-run", "--json").document["schema"]["y"] == "int64"


def test_images_in_files_are_resized(here: Run, photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for path in sorted(photos.glob("*.jpg")):
            tar.add(path, f"{path.stem}.image.jpg")
    size = ("--decode", "image", "--resize", "20x30")
    for place in (tmp_path / "photos.tar", photos):
        line = ("convert", place, "--to", "hdf5", "--rename", "jpg=image,png=image", "--fields", "image", *size)
        shown = here(*line, "--dry-run", "--json")
        assert shown.document["schema"]["image"] == "uint8 (20, 30, 3)", shown.stderr
        ran = here(*line, "--out", tmp_path / f"{place.name}-out", "--verify")
        assert ran.code == 0, ran.stderr
        with h5py.File(tmp_path / f"{place.name}-out" / "part-00000.h5") as file:
            assert file["image"].shape == (shown.document["samples"], 20, 30, 3)


def test_a_file_is_converted_to_plain_files_without_a_cache(run: Run, foreign: Path, tmp_path: Path) -> None:
    ran = run(
        "convert", foreign, "--to", "hdf5", "--out", "plain", "--rename", "x=image", "--fields", "image", "--verify"
    )
    assert ran.code == 0, ran.stderr
    assert "the files are in plain" in ran.stdout
    assert not (tmp_path / "cache").exists()
    with h5py.File(tmp_path / "plain" / "part-00000.h5") as file:
        assert np.array_equal(file["image"][:], np.arange(60, dtype=np.float32).reshape(20, 3))


@pytest.mark.parametrize("words", [[], ["--cache", "new"], ["--max-size", "8MB", "--dataset", "theirs"]])
def test_an_input_without_out_is_refused_with_two_alternatives(
    here: Run, foreign: Path, tmp_path: Path, words: list[str]
) -> None:
    ran = here("convert", foreign, "--to", "zarr", *words)

    assert (ran.code, ran.stdout) == (2, "")
    assert "--out DIR" in ran.stderr
    assert f"cachetool pull {foreign} --all" in ran.stderr
    assert list(tmp_path.iterdir()) == [foreign]
    assert here("pull", foreign, "--all", "--max-size", "8MB", "--json").document["samples"] == 20


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Create five rows of ``y``, and arrays that are not part of these rows."""
    others = {f"z{number}": np.int64(number) for number in range(3)}
    np.savez(tmp_path / "mixed.npz", x=np.zeros((4, 2)), y=np.zeros((5, 2)), **others)
    return tmp_path / "mixed.npz"


def test_arrays_left_out_of_an_input_are_reported(here: Run, mixed: Path) -> None:
    ran = here("convert", mixed, "--to", "hdf5", "--out", "plain", "--json")

    assert ran.code == 0, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("left out: ")]
    hint = "; z0 (a single value, without rows); z1 (a single value, without rows); and 1 more"
    assert line.startswith(
        "left out: x (its first dimension is 4, not 5, the length with the most bytes; to use the length 4 instead:"
    )
    assert hint in line
    assert line.endswith("; and 1 more; --dry-run lists them")
    assert {name for name, _ in ran.document["skipped"]} == {"x", "z0", "z1", "z2"}


def test_fields_excluded_by_the_fields_option_are_not_reported(here: Run, mixed: Path) -> None:
    assert "left out" not in here("convert", mixed, "--to", "hdf5", "--out", "a", "--fields", "y").stderr
    assert here("convert", mixed, "--to", "hdf5", "--out", "b", "--quiet").stderr == ""


def test_a_cache_is_no_input(here: Run, filled: Path, tmp_path: Path) -> None:
    ran = here("convert", filled, "--to", "lmdb", "--out", "plain")

    assert ran.code == 2
    assert ran.error.startswith(f"{filled} is a cache; name it with --cache")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("option", [["--dry-run"], ["--fields", "x"], ["--rename", "a=b"], ["--value-format", "npy"]])
def test_options_for_an_input_are_refused_without_one(here: Run, filled: Path, option: list[str]) -> None:
    ran = here("convert", "--to", "hdf5", *option)

    assert ran.code == 2
    assert option[0] in ran.error


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("convert --to parquet", 2, "'parquet'"),
        ("convert --to hdf5 --dataset nothing", 2, "'nothing'"),
        ("convert --to lmdb --compression gzip", 2, "gzip"),
        ("convert --to hdf5 --compression brotli", 2, "brotli"),
        ("convert --to hdf5 --out cache", 2, "cache"),
        ("convert nowhere.h5 --to hdf5", 2, "nowhere.h5"),
    ],
)
def test_a_failed_conversion_leaves_the_cache_unchanged(
    here: Run, filled: Path, line: str, code: int, says: str
) -> None:
    before = tree(filled)
    ran = here(*line.split())

    assert ran.code == code, ran.stderr
    assert says in ran.error
    assert tree(filled) == before


def test_convert_without_a_cache_creates_no_files(here: Run, tmp_path: Path) -> None:
    ran = here("convert", "--to", "hdf5")

    assert ran.code == 2
    assert "no cache" in ran.error
    assert not (tmp_path / "cache").exists()


def write_empty(folder: Path, name: str) -> Path:
    """Write an input of that name, valid for its kind, without any sample."""
    path = folder / name
    if name == "folder":
        path.mkdir()
    elif name == "rows.npy":
        np.save(path, np.zeros((0, 3)))
    elif name.endswith(".npz"):
        np.savez(path, **({"a": np.zeros((0, 3))} if name == "rows.npz" else {}))
    elif name.endswith(".h5"):
        with h5py.File(path, "w") as file:
            if name == "rows.h5":
                file["a"] = np.zeros((0, 3))
    elif name.endswith(".zarr"):
        group = zarr.open_group(path, mode="w")
        if name == "rows.zarr":
            group.create_array("a", shape=(0, 3), dtype="f4")
    elif name == "members.tar":
        tarfile.open(path, "w").close()
    elif name == "entries.lmdb":
        lmdb.open(str(path), subdir=False).close()
    else:
        path.touch()
    return path


EMPTY = (
    *("folder", "bytes.npy", "rows.npy", "arrays.npz", "rows.npz", "arrays.h5", "rows.h5", "arrays.zarr", "rows.zarr"),
    *("bytes.tar", "members.tar", "records.tfrecord", "bytes.lmdb", "entries.lmdb"),
)


@pytest.mark.parametrize("name", EMPTY)
def test_an_input_without_samples_is_an_error_of_the_source_in_one_line(here: Run, tmp_path: Path, name: str) -> None:
    """The rule holds for every kind of input and every target, and no file is created."""
    path = write_empty(tmp_path, name)
    before = sorted(tmp_path.iterdir())
    for words in (
        ["convert", path, "--to", "lmdb", "--out", "plain"],
        ["convert", path, "--to", "lmdb", "--dry-run"],
        ["pull", path, "--all", "--max-size", "8MB"],
    ):
        ran = here(*words)

        assert ran.code == 3, (words, ran.stdout, ran.stderr)
        assert path.name in ran.error
        # pull can skip a file, so it prints one line more
        assert len(ran.stderr.splitlines()) <= 1 + (words[0] == "pull")
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.h5", "a.zarr"])
@pytest.mark.parametrize("what", ["records", "a number"])
def test_an_input_without_usable_samples_is_a_source_error(here: Run, tmp_path: Path, name: str, what: str) -> None:
    """No option could make samples of these inputs, whatever file they are in."""
    array = np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]) if what == "records" else np.array(1.0)
    if name == "a.npy":
        np.save(tmp_path / name, array)
    elif name == "a.npz":
        np.savez(tmp_path / name, a=array)
    elif name == "a.h5":
        with h5py.File(tmp_path / name, "w") as file:
            file["a"] = array
    else:
        zarr.create_array(store=tmp_path / name / "a", data=array, zarr_format=2)
    ran = here("convert", name, "--to", "lmdb", "--out", "plain")

    assert ran.code == 3, ran.stderr
    assert name in ran.error
    assert not (tmp_path / "plain").exists()


def test_a_cap_for_a_conversion_in_place_is_kept(here: Run, filled: Path, tmp_path: Path) -> None:
    assert here("convert", "--to", "hdf5", "--max-size", "9MB").code == 0
    assert here("stats", "--json").document["max_size"] == 9_000_000
    refused = here("convert", "--to", "lmdb", "--max-size", "10MB", "--out", "plain")
    assert (refused.code, "--max-size" in refused.error) == (2, True)
    assert here("stats", "--json").document["max_size"] == 9_000_000


def test_a_dataset_without_samples_is_no_input_either(here: Run, filled: Path) -> None:
    assert here("evict", "--max-size", str(here("stats", "--json").document["used"] - 3 * 40960)).code == 0
    assert here("ls", "--json").document["shards"] == []

    ran = here("convert", "--to", "hdf5", "--out", "plain")
    assert (ran.code, "dataset 'default' of cache" in ran.error) == (3, True)


def damaged_part(folder: Path) -> tuple[Path, bytes]:
    """Create a folder of five Zarr arrays of 20 rows, with a damaged chunk in the last one. Return the chunk and its
    original bytes.
    """
    for number in range(5):
        zarr.create_array(folder / f"{number}.zarr", data=np.arange(200.0).reshape(20, 10), chunks=(20, 10), name="x")
    chunk = next(path for path in (folder / "4.zarr").rglob("0") if path.is_file())
    whole = chunk.read_bytes()
    chunk.write_bytes(bytes(len(whole)))
    return chunk, whole


def test_an_error_names_the_finished_parts_and_the_same_command_continues(here: Run, tmp_path: Path) -> None:
    chunk, whole = damaged_part(tmp_path / "many")
    line = ("convert", "many", "--to", "hdf5", "--out", "plain", "--shard-size", "1600", "--workers", "1", "--quiet")
    ran = here(*line)

    assert ran.code == 3
    (aside,) = tmp_path.glob(".plain.partial-*")
    assert f"{aside.name} keeps 4 of 5 files: the same command continues from there" in ran.error
    assert "delete the folder" in ran.error
    stamps = {part.name: part.stat().st_mtime_ns for part in (aside / "made").glob("part-*.h5")}
    assert len(stamps) == 4

    before = chunk.stat()
    chunk.write_bytes(whole)  # as if the disk read the chunk correctly this time
    os.utime(chunk, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert here(*line).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "plain"]
    assert {name: (tmp_path / "plain" / name).stat().st_mtime_ns for name in stamps} == stamps, "made once"


def test_an_error_before_the_first_complete_part_leaves_no_files(here: Run, tmp_path: Path) -> None:
    damaged_part(tmp_path / "many")
    ran = here("convert", "many", "--to", "hdf5", "--out", "plain", "--quiet")

    assert ran.code == 3
    assert "partial" not in ran.error
    assert [entry.name for entry in tmp_path.iterdir()] == ["many"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "plain", "--cache", "elsewhere"], "--cache"),
        (["--out", "plain", "--max-size", "8MB"], "--max-size"),
        (["--out", "plain", "--dataset", "mine"], "--dataset"),
        (["--out", ""], "--out"),
        (["--out", " "], "--out"),
    ],
)
def test_an_invalid_target_is_refused(here: Run, foreign: Path, tmp_path: Path, words: list[str], says: str) -> None:
    ran = here("convert", foreign, "--to", "hdf5", *words)

    assert ran.code == 2
    assert says in ran.error
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.parametrize("parent", ["taken.npy", "taken.npy/below"])
def test_an_output_that_cannot_be_created_is_named(run: Run, tmp_path: Path, parent: str) -> None:
    np.save(tmp_path / "taken.npy", np.arange(12.0).reshape(4, 3))

    ran = run("convert", tmp_path / "taken.npy", "--to", "hdf5", "--out", tmp_path / parent / "out")

    assert (ran.code, "cannot write into" in ran.error, "a bug" in ran.error) == (2, True, False)


@pytest.mark.parametrize("name", ["cache/out", "cache/shards/deep/out", "link/out", "cache/../cache/out"])
@pytest.mark.parametrize("given", [True, False], ids=["an input", "the cache"])
def test_an_output_in_the_folder_of_a_cache_is_refused(
    here: Run, filled: Path, foreign: Path, name: str, given: bool
) -> None:
    (foreign.parent / "link").symlink_to(filled / "listings")
    before = tree(filled)

    ran = here("convert", *([foreign] if given else []), "--to", "hdf5", "--out", name)

    assert ran.code == 2
    assert f"{name!r} lies in the cache {filled}" in ran.error
    assert "outside of the cache" in ran.error
    assert tree(filled) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "link"], "exists already"),
        (["--out", "new/.."], "'..'"),
        (["--out", ".."], "'..'"),
        (["--out", "new/" + "x" * 256], "shorter"),
        (["--out", "new/" + "é" * 130 + "/out"], "shorter"),
        (["--out", "new/" + "/".join(["x" * 100] * 42)], "shorter"),
    ],
)
def test_an_impossible_file_name_is_refused_before_any_work(
    here: Run, foreign: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "link").symlink_to("nowhere")

    ran = here("convert", foreign, "--to", "hdf5", *words)

    assert ran.code == 2
    assert says in ran.error
    assert sorted(path.name for path in tmp_path.iterdir()) == [foreign.name, "link"]


@pytest.mark.parametrize("command", ["stats", "verify", "doctor", "evict --max-size 1GB", "convert --to hdf5"])
def test_every_command_refuses_a_cache_path_that_is_too_long(here: Run, tmp_path: Path, command: str) -> None:
    ran = here(*command.split(), "--cache", "x" * 300)

    assert ran.code == 2
    assert "a shorter one with --cache" in ran.error
    assert list(tmp_path.iterdir()) == []
