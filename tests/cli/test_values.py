"""Special values of users' tables on the command line: the messages on both streams, and their advice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Run

CAP = ("--max-size", "20MB")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write four rows of ``a`` and ``b``. Row 1 has no ``b``."""
    pyarrow = pytest.importorskip("pyarrow")
    columns = {"a": [1, 2, 3, 4], "b": [1.5, None, 3.0, 4.0]}
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["t2m"], file["plain"] = np.arange(24, dtype="i2").reshape(12, 2), np.arange(12)
        file["t2m"].attrs.update(scale_factor=0.01, add_offset=273.15, _FillValue=np.int16(-9999))
    return tmp_path / "t.h5"


@pytest.mark.parametrize("words", [["--fields", "-b"], ["--fields=-b"], ["--fields", " -b"]])
def test_a_minus_leaves_out_a_field_in_every_way_to_type_it(here: Run, table: Path, words: list[str]) -> None:
    ran = here("pull", table, "--all", *CAP, *words)
    assert ran.code == 0, ran.stderr
    assert "pulled 4 samples" in ran.stdout
    assert "left out" not in ran.stderr


def test_several_fields_are_left_out_after_commas(here: Run, packed: Path) -> None:
    with h5py.File(packed, "a") as file:
        file["more"] = np.arange(12)
    for words in (
        ["--fields", "-plain,-more"],
        ["--fields=-plain, -more"],
        ["--fields", "-plain", "--fields", "-more"],
    ):
        ran = here("convert", packed, "--to", "hdf5", "--dry-run", "--json", *words)
        assert list(ran.document["schema"]) == ["t2m"]


@pytest.mark.parametrize("command", [["pull", "{}", "--all"], ["convert", "{}", "--to", "hdf5", "--out", "plain"]])
@pytest.mark.parametrize(
    ("fields", "says"), [("a,-b", "'a', '-b'"), ("-b,a", "'a', '-b'"), ("-", "minus"), ("-c", "'c'")]
)
def test_invalid_choices_of_fields_are_usage_errors(
    here: Run, table: Path, command: list[str], fields: str, says: str
) -> None:
    ran = here(*(word.format(table) for word in command), "--fields", fields)
    assert ran.code == 2
    assert says in ran.error


def test_the_advice_about_a_null_works(here: Run, table: Path) -> None:
    """Both alternatives of a pull, and the one of a conversion."""
    ran = here("pull", table, "--all", *CAP)
    assert ran.code == 3
    assert re.search(r"row 1: 'b' is null", ran.error)
    for advice, samples in ((r"--fields \S+?(?=,)", 4), ("--on-error skip", 3)):
        advised = re.search(advice, ran.error)
        assert advised is not None
        followed = here("pull", table, "--all", "--dataset", f"of {samples}", *advised[0].split())
        assert followed.code == 0, followed.stderr
        assert f"pulled {samples} samples" in followed.stdout
    assert "t.parquet#1: 'b' is null" in followed.stdout

    ran = here("convert", table, "--to", "hdf5", "--out", "plain")
    assert ran.code == 3
    advised = re.search(r"--fields \S+?(?=,)", ran.error)
    assert advised is not None
    assert here("convert", table, "--to", "hdf5", "--out", "plain", *advised[0].split()).code == 0


def test_packed_values_are_named_in_text_and_json_and_the_advised_option_unpacks_them(here: Run, packed: Path) -> None:
    ran = here("pull", packed, "--all", *CAP, "--json")
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("note: CF")]
    assert line.startswith("note: CF attributes of t2m (_FillValue, scale_factor, add_offset): ")
    assert [f"note: {note}" for note in ran.document["notes"]] == [line]
    advised = re.search(r"--decode \w+", line)
    assert advised is not None

    preview = here("convert", packed, "--to", "hdf5", "--dry-run")
    assert "CF attributes of t2m" in preview.stdout
    ran = here("convert", packed, "--to", "hdf5", "--out", "plain", *advised[0].split())
    assert ran.code == 0, ran.stderr
    assert "CF" not in ran.stderr
    with h5py.File("plain/part-00000.h5") as file:
        assert file["t2m"].dtype == np.float32
        np.testing.assert_allclose(file["t2m"][3], [273.21, 273.22], rtol=1e-6)


def test_encoded_values_are_named_before_skipped_arrays(here: Run, packed: Path) -> None:
    with h5py.File(packed, "a") as file:
        for at in range(5):
            file[f"other{at}"] = np.arange(3 + at)
    ran = here("pull", packed, "--all", *CAP)
    assert "note: CF attributes of t2m" in ran.stderr


@pytest.mark.parametrize("decode", ["image", "mask", "cf"])
def test_decoding_without_encoded_values_is_a_usage_error(here: Run, table: Path, decode: str) -> None:
    for line in (("pull", table, "--all", *CAP), ("convert", table, "--to", "hdf5", "--out", "plain")):
        ran = here(*line, "--decode", decode, "--fields", "a")
        assert ran.code == 2
        assert f"--decode {decode} finds no" in ran.error
