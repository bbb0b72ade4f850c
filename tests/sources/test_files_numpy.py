"""``.npy`` and ``.npz`` files that NumPy wrote, read as samples."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.sources.options import SourceOptions
from tests.sources.files import damaged, open_files, outcome, read, same, samples

ARRAYS = {
    "scalars": np.arange(40, dtype=np.int16),
    "floats": np.linspace(-1, 1, 40 * 6, dtype=np.float32).reshape(40, 2, 3),
    "big_endian": np.arange(80, dtype=">f8").reshape(40, 2),
    "half": np.arange(40, dtype=np.float16),
    "flags": np.arange(40) % 3 == 0,
    "complex": (np.arange(40) + 1j).astype(np.complex64),
    "times": np.arange(40).astype("datetime64[ms]"),
    "empty_rows": np.empty((40, 0, 3), dtype=np.uint8),
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ARRAYS)
def test_rows_of_an_npy_file_are_samples(tmp_path: Path, name: str, order: Any) -> None:
    """One field named after the file, every value as it was saved, for any memory order and byte order."""
    array = np.asarray(ARRAYS[name], order=order)
    np.save(tmp_path / f"{name}.npy", array)

    found = samples(tmp_path / f"{name}.npy")

    assert len(found) == 40
    assert all(list(sample) == [name] and same(sample[name], row) for sample, row in zip(found, array, strict=True))


def test_rows_are_read_from_any_position_and_again_after_close(tmp_path: Path) -> None:
    array = np.arange(1000).reshape(100, 10)
    np.save(tmp_path / "x.npy", array)
    source = open_files(tmp_path / "x.npy")

    assert same(read(source, 70, 90).columns["x"], array[70:90])
    source.close()
    source.close()
    assert same(read(source, 5, 5).columns["x"], array[5:5])
    assert same(read(source, 0, 100).columns["x"], array)


def test_a_field_can_be_renamed(tmp_path: Path) -> None:
    np.save(tmp_path / "x (1).npy", np.arange(3))

    assert samples(tmp_path / "x (1).npy", rename={"x (1)": "x"})[2] == {"x": 2}
    with pytest.raises(UsageError, match="field name 'x \\(1\\)' cannot be used"):
        open_files(tmp_path / "x (1).npy")
    with pytest.raises(UsageError, match=r"--rename y: unknown field; the file has 'x \(1\)'"):
        open_files(tmp_path / "x (1).npy", SourceOptions(rename={"y": "z"}))


class Canary:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    """Return an object array that would create a folder if it were read. The folder must not exist afterwards."""
    place = tmp_path / "unpickled"
    yield np.array([Canary(place), Canary(place)], dtype=object)
    assert not place.exists()
    pickle.loads(pickle.dumps(Canary(place)))  # the canary does work
    assert place.exists()
    place.rmdir()


def test_pickled_arrays_are_refused_and_never_executed(tmp_path: Path, canary: Any) -> None:
    np.save(tmp_path / "x.npy", canary, allow_pickle=True)
    np.savez(tmp_path / "y.npz", x=canary, good=np.arange(2))
    (tmp_path / "z.npy").write_bytes(pickle.dumps(canary))

    with pytest.raises(BadObject, match=r"x\.npy: dtype object cannot be stored"):
        open_files(tmp_path / "x.npy")
    with open_files(tmp_path / "y.npz") as source:
        assert source.schema.names == ("good",)
        assert source.skipped[0][1].startswith("dtype object cannot be stored")
    with pytest.raises(UsageError, match="field 'x' cannot be read: dtype object"):
        open_files(tmp_path / "y.npz", SourceOptions(fields=("x",)))
    with pytest.raises(BadObject, match=r"z\.npy: not a \.npy file"):
        open_files(tmp_path / "z.npy")
    assert samples(tmp_path / "y.npz") == [{"good": 0}, {"good": 1}]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros(3, dtype=[("a", "i4"), ("b", "f4")]),
            r"x\.npy: dtype \[\('a', '<i4'\), \('b', '<f4'\)\] is a compound type; save each of its fields \(a, b\)",
        ),
        (np.array([["a", "b"]]), "texts in 2 dimensions"),
        (np.zeros(()), "single number"),
        (np.zeros(3, dtype=np.longdouble), "cannot be stored"),
    ],
)
def test_arrays_that_are_no_samples_are_refused(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "x.npy", array)

    with pytest.raises((BadObject, UsageError), match=message):
        open_files(tmp_path / "x.npy")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_npz_file_are_fields(tmp_path: Path, save: Any) -> None:
    arrays = {**ARRAYS, "columns": np.asfortranarray(np.arange(120).reshape(40, 3))}
    save(tmp_path / "x.npz", **arrays)

    found = samples(tmp_path / "x.npz")

    assert list(found[0]) == list(arrays)
    assert all(same(found[i][name], array[i]) for name, array in arrays.items() for i in range(40))


def test_arrays_of_another_length_are_left_out_and_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros((5, 2)), b=np.zeros(5), mean=np.zeros(3), scale=np.float32(2))

    with open_files(tmp_path / "x.npz") as source:
        assert source.schema.names == ("a", "b")
        assert source.skipped == (
            ("scale", "a single value, without rows"),
            ("mean", "its first dimension is 3, not 5"),
        )
    assert len(samples(tmp_path / "x.npz", rows=3)) == 3
    with pytest.raises(UsageError, match="no array has 4 rows; the arrays have 3, 5"):
        open_files(tmp_path / "x.npz", SourceOptions(rows=4))
    with pytest.raises(UsageError, match="unknown field 'c'; the file has 'a', 'b', 'mean', 'scale'"):
        open_files(tmp_path / "x.npz", SourceOptions(fields=("a", "c")))
    with pytest.raises(UsageError, match="field 'scale' cannot be read: a single value"):
        open_files(tmp_path / "x.npz", SourceOptions(fields=("scale",)))


def test_fields_have_the_requested_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(5), b=np.arange(5) * 2, c=np.arange(5) * 3)

    assert list(samples(tmp_path / "x.npz", fields=("z", "a"), rename={"c": "z"})[1].items()) == [("z", 3), ("a", 1)]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_is_read_from_any_position_forwards_and_backwards(tmp_path: Path, save: Any) -> None:
    array = np.random.default_rng(0).integers(0, 9, (200, 50))
    save(tmp_path / "x.npz", x=array, y=array[:, 0])

    with open_files(tmp_path / "x.npz") as source:
        for start, stop in [(100, 110), (110, 120), (150, 200), (3, 5), (0, 200)]:
            block = read(source, start, stop)
            assert same(block.columns["x"], array[start:stop])
            assert same(block.columns["y"], array[start:stop, 0])
        source.close()
        assert same(read(source, 120, 130).columns["x"], array[120:130])


def test_a_damaged_npy_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Every truncation is detected. A flipped bit is an error or a value, because ``.npy`` has no checksum."""
    np.save(tmp_path / "x.npy", np.arange(300, dtype=np.int32).reshape(100, 3))

    outcomes = {how: outcome(path) for how, path in damaged(tmp_path / "x.npy", cuts=200, flips=300)}

    assert all(isinstance(found, str) for how, found in outcomes.items() if how.startswith("cut"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_npz_never_returns_a_wrong_sample(tmp_path: Path, save: Any) -> None:
    array = np.arange(300, dtype=np.int32).reshape(100, 3)
    save(tmp_path / "x.npz", x=array, y=array[:, 0])

    for how, path in damaged(tmp_path / "x.npz", cuts=100, flips=400):
        found = outcome(path)
        if isinstance(found, str):
            continue
        assert not how.startswith("cut"), how
        for name in set(found[0]) & {"x", "y"}:
            wanted = array if name == "x" else array[:, 0]
            assert all(same(sample[name], row) for sample, row in zip(found, wanted, strict=True)), how


def test_a_shape_that_the_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    """No memory is allocated for a declared size."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 1000), }"
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"12345678"
    (tmp_path / "x.npy").write_bytes(raw)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", raw)

    with pytest.raises(BadObject, match=r"x\.npy: its 92 bytes do not fit its header, a float64 array"):
        open_files(tmp_path / "x.npy")
    with pytest.raises(BadObject, match=r"x\.npz: 'x': its .* bytes do not fit its header, a float64 array"):
        open_files(tmp_path / "x.npz")


def test_a_value_far_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1, 100_000_000), dtype=np.uint8))

    with pytest.raises(BadObject, match=r"a row of 'x' claims 100\.0 MB in one piece, .* at most 76"):
        open_files(tmp_path / "x.npz")


def test_texts_of_an_npz_become_str_and_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", name=np.array(["a", "bü", ""]), raw=np.array([b"a", b"", b"c\0d"]), x=np.arange(3))

    assert samples(tmp_path / "x.npz") == [
        {"name": "a", "raw": b"a", "x": 0},
        {"name": "bü", "raw": b"", "x": 1},
        {"name": "", "raw": b"c\0d", "x": 2},
    ]


@pytest.mark.parametrize("dtype", ["<U3", ">U3", "S3"])
def test_texts_of_an_npy_become_str_or_bytes(tmp_path: Path, dtype: str) -> None:
    array = np.array(["a", "bc", "", "def"], dtype=dtype)
    np.save(tmp_path / "x.npy", array)

    assert samples(tmp_path / "x.npy") == [{"x": text} for text in array.tolist()]


def test_npz_members_that_are_no_arrays_are_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
        archive.writestr("y.npy", "1", zipfile.ZIP_BZIP2)

    with open_files(tmp_path / "x.npz") as source:
        assert dict(source.skipped) == {
            "notes.txt": "not an array",
            "y": "compressed in a way that NumPy never writes",
        }


def test_an_empty_file_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").touch()
    (tmp_path / "x.npz").touch()

    with pytest.raises(BadObject, match=r"x\.npy"):
        open_files(tmp_path / "x.npy")
    with pytest.raises(BadObject, match=r"x\.npz is not a whole \.npz file"):
        open_files(tmp_path / "x.npz")
    with pytest.raises(NotFound, match=r"y\.npy"):
        open_files(tmp_path / "y.npy")
