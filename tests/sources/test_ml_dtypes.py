"""bfloat16 and float8 of ml_dtypes, which NumPy saves as bytes without a meaning: named, with an alternative."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from cachetool.core.errors import BadObject, CacheToolError
from tests.sources.files import open_files, same, samples

ml_dtypes = pytest.importorskip("ml_dtypes")

NUMBERS = np.arange(8).reshape(4, 2)
TYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e8m0fnu": "uint8", "raw": "uint32"}


def values(name: str) -> Any:
    """Return numbers as an array of that type."""
    return NUMBERS.astype("f4").view("V4") if name == "raw" else NUMBERS.astype(getattr(ml_dtypes, name))


def save(path: Path, array: Any) -> Path:
    """Write a ``.npy``, or an ``.npz`` of one array. Return the source that contains it."""
    path.parent.mkdir(exist_ok=True)
    np.savez(path, a=array) if path.suffix == ".npz" else np.save(path, array)
    return path.parent if path.parent.name == "objects" else path


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("place", ["x.npy", "objects/0.npy", "objects/0.npz"])
def test_the_message_names_what_numpy_saved_and_its_advice_works(tmp_path: Path, name: str, place: str) -> None:
    """The advice stores the bits as numbers, and a view converts them back."""
    path, array = tmp_path / place, values(name)
    source = save(path, array)
    with pytest.raises(BadObject, match=r"dtype \|V\d has no meaning to NumPy") as error:
        samples(source)
    assert {"bfloat16": "for bfloat16", "raw": "V4"}.get(name, "for float8") in str(error.value)
    advised = re.search(r"array\.view\('(\w+)'\)", str(error.value))
    assert advised is not None
    assert advised[1] == TYPES[name]

    saved = np.load(path)
    save(path, (saved["a"] if path.suffix == ".npz" else saved).view(advised[1]))
    rows = [sample[field] for sample in samples(source, key=False) for field in sample]
    assert same(np.concatenate(rows).reshape(4, 2), array.view(TYPES[name]))


def test_float8_that_numpy_cannot_read_is_named_and_a_changed_header_makes_it_readable(tmp_path: Path) -> None:
    path, array = tmp_path / "x.npy", values("float8_e5m2")
    save(path, array)
    with pytest.raises(BadObject, match="ml_dtypes writes it for float8_e5m2") as error:
        samples(path)
    stored, advised = re.findall(r"'([<|]\w\d)'", str(error.value))
    path.write_bytes(path.read_bytes().replace(f"'{stored}'".encode(), f"'{advised}'".encode(), 1))
    assert same(np.stack([sample["x"] for sample in samples(path)]), array.view("u1"))


@pytest.mark.parametrize("name", ["x.h5", "x.npz", "x.zarr"])
def test_one_such_array_in_a_file_of_several_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    path, array = tmp_path / name, values("bfloat16")
    if name == "x.h5":
        with h5py.File(path, "w") as file:
            file["a"], file["b"] = array.view("V2"), NUMBERS
    elif name == "x.npz":
        np.savez(path, a=array, b=NUMBERS)
    else:
        group = zarr.open_group(path, mode="w")
        group.create_array("a", data=array.view("u2"))
        group.create_array("b", data=NUMBERS)
        about = json.loads((path / "a" / "zarr.json").read_text())
        (path / "a" / "zarr.json").write_text(json.dumps({**about, "data_type": "bfloat16", "fill_value": "0x0000"}))

    with open_files(path) as source:
        assert source.schema.names == ("b",)
        ((left, why),) = source.skipped
    assert left == "a"
    assert "bfloat16" in why
    assert "uint16" in why
    with pytest.raises(CacheToolError, match=r"'a' cannot be read: .*bfloat16"):
        samples(path, fields=("a",))

    if name == "x.h5":
        with h5py.File(path, "a") as file:
            bits = file["a"][:].view("uint16")
            del file["a"]
            file["a"] = bits
    elif name == "x.npz":
        np.savez(path, a=np.load(path)["a"].view("uint16"), b=NUMBERS)
    else:
        about = json.loads((path / "a" / "zarr.json").read_text())
        (path / "a" / "zarr.json").write_text(json.dumps({**about, "data_type": "uint16", "fill_value": 0}))
    assert same(samples(path)[1]["a"].view(array.dtype).astype("f4"), NUMBERS[1].astype("f4"))


def test_bytes_of_another_size_are_named_too(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2), "V3"))
    with pytest.raises(BadObject, match=r"dtype \|V3 has no meaning to NumPy and cannot be stored; .*'uint8'"):
        samples(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.load(tmp_path / "x.npy").view("uint8"))
    assert samples(tmp_path / "x.npy")[0]["x"].shape == (6,)
