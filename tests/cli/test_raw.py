"""Files of raw numbers: ``--value-format raw:DTYPE,SHAPE`` describes them for ``pull`` and ``convert``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.loaders.numpy import Loader
from tests.cli.conftest import Run
from tests.servers import folder_server

RAW = "raw:float32,4x3"


def sample(number: int) -> np.ndarray[Any, Any]:
    return np.arange(12, dtype="<f4").reshape(4, 3) + 100 * number


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Write six objects of raw numbers, each with its label beside it."""
    (tmp_path / "scans").mkdir()
    for number in range(6):
        (tmp_path / "scans" / f"{number}.volume").write_bytes(sample(number).tobytes())
        (tmp_path / "scans" / f"{number}.json").write_text(json.dumps({"label": number}))
    return tmp_path / "scans"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Write three files of two, four and six samples."""
    (tmp_path / "runs").mkdir()
    at = 0
    for count in (2, 4, 6):
        rows = np.stack([sample(number) for number in range(at, at + count)])
        (tmp_path / "runs" / f"run{count}.dat").write_bytes(rows.tobytes())
        at += count
    return tmp_path / "runs"


def values(place: Path, name: str = "value", **options: Any) -> list[np.ndarray[Any, Any]]:
    with Loader(place, batch_size=2, workers=0, shuffle=False, **options) as loader:
        rows = [row for batch in loader for row in batch[name]]
    return sorted(rows, key=lambda row: float(row.flat[0]))


def into(verb: str, name: str) -> list[str]:
    """Return options that bring all samples into a dataset or folder of this name."""
    more = ["--all", "--max-size", "50MB", "--dataset", name]
    return more if verb == "pull" else ["--to", "hdf5", "--out", name]


def check(seen: list[np.ndarray[Any, Any]], count: int) -> None:
    assert len(seen) == count
    for number, row in enumerate(seen):
        np.testing.assert_array_equal(row, sample(number))


@pytest.mark.parametrize("verb", ["pull", "convert"])
def test_objects_of_numbers_are_arrays_beside_their_labels(verb: str, run: Run, scans: Path, tmp_path: Path) -> None:
    words = ["--all", "--max-size", "50MB"] if verb == "pull" else ["--to", "hdf5", "--out", "out"]
    ran = run(verb, scans, "--value-format", RAW, *words)
    assert ran.code == 0, ran.stderr
    place = tmp_path / ("cache" if verb == "pull" else "out")
    check(values(place, "volume"), 6)
    with Loader(place, batch_size=6) as loader:
        for batch in loader:
            assert (batch["volume"][:, 0, 0] == 100 * batch["label"]).all()


@pytest.mark.parametrize("verb", ["pull", "convert"])
@pytest.mark.parametrize("place", ["here", "http"])
def test_files_of_many_samples_are_read_row_by_row(verb: str, place: str, run: Run, runs: Path, tmp_path: Path) -> None:
    def seen(name: str) -> list[np.ndarray[Any, Any]]:
        return values(tmp_path / "cache", dataset=name) if verb == "pull" else values(tmp_path / name)

    with folder_server(runs) as server:
        where = str(runs) if place == "here" else server.url
        ran = run(verb, where, "--value-format", RAW, "--read-as", "files", *into(verb, "all"))
        assert ran.code == 0, ran.stderr
        ran = run(verb, f"{where}/run2.dat", "--value-format", RAW, *into(verb, "one"))
        assert ran.code == 0, ran.stderr
    check(seen("all"), 12)
    check(seen("one"), 2)


def test_a_file_named_without_a_folder_is_read(run: Run, runs: Path, tmp_path: Path) -> None:
    ran = run(
        "pull", "run2.dat", "--value-format", RAW, "--all", "--cache", tmp_path / "c", "--max-size", "9MB", cwd=runs
    )
    assert ran.code == 0, ran.stderr
    check(values(tmp_path / "c"), 2)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [("raw:>f4,4x3", ">f4"), ("raw:uint16,4,3", "<u2"), ("raw:int8,4x3", "i1"), ("raw:float64,12", "<f8")],
)
def test_numbers_of_any_kind_and_byte_order_are_read(format: str, dtype: str, run: Run, tmp_path: Path) -> None:
    numbers = np.arange(12).astype(dtype)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.bin").write_bytes(numbers.tobytes())
    for words in ([], ["--read-as", "files"]):
        ran = run("convert", "x", "--value-format", format, *words, "--to", "lmdb", "--out", f"out{len(words)}")
        assert ran.code == 0, ran.stderr
        (row,) = values(tmp_path / f"out{len(words)}", "value" if words else "bin")
        assert row.reshape(-1).tolist() == numbers.tolist()
        assert row.dtype == np.dtype(dtype).newbyteorder("=")


def test_a_scalar_is_a_sample_of_one_number(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(np.arange(5, dtype="<i4").tobytes())
    ran = run("convert", "x.bin", "--value-format", "raw:int32", "--to", "lmdb", "--out", "out")
    assert ran.code == 0, ran.stderr
    assert [int(value) for value in values(tmp_path / "out")] == list(range(5))


@pytest.mark.parametrize("verb", ["pull", "convert"])
def test_a_wrong_size_is_named_and_the_advice_works(verb: str, run: Run, runs: Path, scans: Path) -> None:
    ran = run(verb, runs, "--value-format", RAW, *into(verb, "a"))
    assert ran.code == 3
    assert "run2.dat': it has 96 bytes, but raw:float32,4x3 needs 48" in ran.error
    advice = re.findall(r"--read-as files", ran.error)
    assert run(verb, runs, "--value-format", RAW, *advice[0].split(), *into(verb, "a")).code == 0
    (scans / "3.volume").write_bytes(bytes(50))
    ran = run(verb, scans, "--value-format", RAW, *into(verb, "b"))
    assert (ran.code, "3.volume': it has 50 bytes, but raw:float32,4x3 needs 48" in ran.error) == (3, True)
    (runs / "run4.dat").write_bytes(bytes(97))
    ran = run(verb, runs, "--value-format", RAW, "--read-as", "files", *into(verb, "c"))
    assert ran.code != 0
    assert "run4.dat: its 97 bytes are not a multiple of 48" in ran.error


def test_large_objects_are_checked_by_their_size_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    for number in range(3):
        numbers = np.full((300, 300), number, dtype="<f8")
        (tmp_path / "large" / f"{number}.bin").write_bytes(numbers.tobytes())
    ran = run("pull", "large", "--value-format", "raw:float64,300x300", "--all", "--max-size", "50MB")
    assert ran.code == 0, ran.stderr
    assert [float(row[7, 7]) for row in values(tmp_path / "cache", "bin")] == [0, 1, 2]
    ran = run("pull", "large", "--value-format", "raw:float64,300x299", "--all", "--dataset", "b")
    assert (ran.code, "it has 720000 bytes, but raw:float64,300x299 needs 717600" in ran.error) == (3, True)


def test_other_value_formats_apply_to_objects_of_bytes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with (tmp_path / "x" / "a.bin").open("wb") as file:
        np.save(file, sample(0))
    assert run("convert", "x", "--value-format", "npy", "--to", "lmdb", "--out", "npy").code == 0
    check(values(tmp_path / "npy", "bin"), 1)
    assert run("convert", "x", "--value-format", "bytes", "--to", "lmdb", "--out", "bytes").code == 0
    ran = run("convert", "x", "--value-format", "image", "--to", "lmdb", "--out", "image")
    assert (ran.code, "a.bin" in ran.error) == (3, True)


@pytest.mark.parametrize(
    ("format", "says"),
    [
        ("float32", "unknown --value-format 'float32'; choose one of bytes, npy, image, raw:DTYPE,SHAPE"),
        ("raw:", "unknown --value-format"),
        ("raw:object,3", "dtype object cannot be stored"),
        ("raw:float32,0x3", "describes samples of 0 bytes"),
    ],
)
def test_an_invalid_value_format_is_refused_for_any_source(format: str, says: str, run: Run, scans: Path) -> None:
    for words in (["pull"], ["convert", "--to", "lmdb", "--out", "out"]):
        ran = run(*words, scans, "--value-format", format)
        assert (ran.code, says in ran.error) == (2, True), ran.stderr


def test_a_value_format_that_matches_no_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x" / "a.npy", sample(0))
    for words in (["pull"], ["convert", "--to", "lmdb", "--out", "out"]):
        ran = run(*words, "x", "--value-format", RAW)
        assert (ran.code, "--value-format is for objects of bytes, but" in ran.error) == (2, True)


def test_fields_of_objects_can_be_renamed(run: Run, scans: Path, tmp_path: Path) -> None:
    words = ["--value-format", RAW, "--rename", "volume=image", "--fields", "image"]
    assert run("pull", scans, *words, "--all", "--max-size", "50MB").code == 0
    check(values(tmp_path / "cache", "image"), 6)
    assert run("convert", scans, *words, "--to", "lmdb", "--out", "out").code == 0
    check(values(tmp_path / "out", "image"), 6)
    ran = run("convert", scans, "--rename", "nothing=image", "--to", "lmdb", "--out", "no")
    assert (ran.code, "unknown field 'nothing'" in ran.error) == (2, True)
