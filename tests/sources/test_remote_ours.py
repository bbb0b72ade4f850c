"""Pulling folders that ``cachetool convert --out`` wrote, from any store: fields, values and keys are the original
ones.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import BadObject, CorruptError
from cachetool.sources.base import Source
from cachetool.sources.file_listing import Survey
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from tests.servers import folder_server, rclone_s3

COUNT = 30


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """Create samples with a field of every kind."""
    folder = tmp_path / "objects"
    folder.mkdir()
    for number in range(COUNT):
        np.save(folder / f"s{number:02d}.x.npy", np.full((3, 400), number, dtype="<f4"))
        np.save(folder / f"s{number:02d}.wave.npy", np.arange(number, dtype="<i2"))
        (folder / f"s{number:02d}.json").write_text(json.dumps({"label": number, "caption": f"number {number}"}))
        (folder / f"s{number:02d}.raw").write_bytes(bytes([0, number, 255]))
    return folder


def written(objects: Path, to: str, *, fields: list[str] | None = None, **options: Any) -> Path:
    out = objects.parent / f"{to}-out"
    cachetool.convert(objects, to=to, out=out, fields=fields, **options)
    return out


@contextlib.contextmanager
def pulled(url: str | Path, folder: Path, options: SourceOptions | None = None) -> Iterator[Source]:
    given = options or SourceOptions()
    folder.mkdir()
    list_source(str(url), folder, given)
    with contextlib.closing(open_source(str(url), folder, given)) as source:
        yield source


def samples(source: Source, *, skip_bad: bool = False) -> dict[str, dict[str, Any]]:
    """Return the samples by key, drawn in reverse order."""
    units = np.arange(source.units)[::-1]
    schema = source.probe(units, skip_bad=skip_bad).schema
    blocks = [piece.block for piece in source.read(units, schema=schema, skip_bad=skip_bad)]
    found = [block.sample(number) for block in blocks for number in range(len(block))]
    assert len({sample["__key__"] for sample in found}) == len(found)
    return {sample["__key__"]: sample for sample in found}


def check(found: dict[str, dict[str, Any]], *, of: range = range(COUNT)) -> None:
    assert sorted(found) == [f"s{number:02d}" for number in of]
    for number in of:
        sample = found[f"s{number:02d}"]
        assert sorted(sample) == ["__key__", "caption", "label", "raw", "wave", "x"]
        assert sample["x"].dtype == np.float32
        assert (sample["x"] == np.full((3, 400), number)).all()
        assert (sample["wave"] == np.arange(number)).all()
        assert (sample["label"], sample["caption"]) == (number, f"number {number}")
        assert sample["raw"] == bytes([0, number, 255])


@pytest.mark.parametrize("to", ["lmdb", "tfrecord", "hdf5", "zarr"])
@pytest.mark.parametrize("place", ["folder", "http", "s3"])
def test_all_fields_are_read_back_unchanged(
    to: str, place: str, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "s3" and to in ("hdf5", "zarr"):
        pytest.skip("rclone does not know all ranges; moto does: tests/interop/test_every_kind.py")
    out = written(objects, to, shard_size=2**16)
    assert len(list(out.glob("part-*"))) > 1
    with contextlib.ExitStack() as stack:
        url = str(out)
        if place == "http":
            url = stack.enter_context(folder_server(out, index="json")).url
        if place == "s3":
            for name, value in stack.enter_context(rclone_s3(out.parent)).items():
                monkeypatch.setenv(name, value)
            url = f"s3://{out.name}/"
        with pulled(url, tmp_path / "listing") as source:
            check(samples(source))


def test_compressed_records_are_read_back_too(objects: Path, tmp_path: Path) -> None:
    with pulled(written(objects, "tfrecord", compression="gzip"), tmp_path / "listing") as source:
        check(samples(source))


@pytest.mark.parametrize("to", ["lmdb", "tfrecord"])
def test_fields_can_be_chosen_and_renamed_and_the_key_left_out(to: str, objects: Path, tmp_path: Path) -> None:
    options = SourceOptions(fields=("target", "x"), rename={"label": "target"}, key=False)
    with pulled(written(objects, to), tmp_path / "listing", options) as source:
        schema = source.probe(np.arange(1)).schema
        block = next(iter(source.read(np.arange(1), schema=schema))).block

    assert block.schema.names == ("target", "x")
    assert (block.columns["x"][:, 0, 0] == block.columns["target"]).all()  # type: ignore[call-overload, index]


@pytest.mark.parametrize("to", ["lmdb", "tfrecord"])
def test_a_damaged_file_is_named_and_can_be_skipped(to: str, objects: Path, tmp_path: Path) -> None:
    out = written(objects, to, shard_size=2**16)
    parts = sorted(out.glob("part-*"))
    parts[0].write_bytes(parts[0].read_bytes()[: -3000 if to == "lmdb" else -7])
    with pulled(out, tmp_path / "listing") as source:
        with pytest.raises(BadObject, match=parts[0].name):
            samples(source)
        found = samples(source, skip_bad=True)

    assert 0 < len(found) < COUNT
    check(found, of=range(COUNT - len(found), COUNT))


@pytest.mark.parametrize("survey", ["probe", "all"])
def test_a_file_with_other_fields_than_written_is_refused(survey: Survey, objects: Path, tmp_path: Path) -> None:
    """No checksum covers the names of fields."""
    out = written(objects, "hdf5")
    (part,) = out.glob("part-*")
    with h5py.File(part, "r+") as file:
        file.move("label", "labem")
        file.attrs["cachetool"] = file.attrs["cachetool"].replace("label", "labem")
    with pytest.raises(CorruptError, match=f"{part.name}: its fields differ from those in dataset.json"):
        list_source(str(out), tmp_path / "listing", survey=survey)


@pytest.mark.parametrize("about", [b"", b"[]", b"{}", b'{"format": "tfrecord", "parts": [1]}'])
@pytest.mark.parametrize("to", ["tfrecord", "lmdb", "hdf5", "zarr"])
def test_an_exported_folder_with_an_emptied_description_is_refused(
    to: str, about: bytes, objects: Path, tmp_path: Path
) -> None:
    out = written(objects, to)
    (out / "dataset.json").write_bytes(about)
    with pytest.raises(CorruptError, match=r"dataset\.json does not fit the files"):
        list_source(str(out), tmp_path / "listing")


def test_records_without_a_description_are_read_as_foreign_records(objects: Path, tmp_path: Path) -> None:
    out = written(objects, "tfrecord")
    (out / "dataset.json").unlink()
    with pulled(out, tmp_path / "listing") as source:
        schema = source.probe(np.arange(1)).schema

    assert schema["x"].dtype == "bytes"
    assert schema["label"].dtype == "<i8"


def test_a_schema_that_the_records_do_not_have_is_a_bad_object(objects: Path, tmp_path: Path) -> None:
    out = written(objects, "tfrecord")
    about = json.loads((out / "dataset.json").read_text())
    about["schema"][0]["shape"] = [5, 5]
    (out / "dataset.json").write_text(json.dumps(about))
    with pulled(out, tmp_path / "listing") as source, pytest.raises(BadObject, match=r"part-00000\.tfrecord"):
        source.probe(np.arange(1))


@pytest.mark.parametrize("alone", [True, False], ids=["one file", "a folder"])
@pytest.mark.parametrize("to", ["hdf5", "zarr"])
def test_arrays_of_variable_length_fields_are_read_sample_by_sample(to: str, alone: bool, tmp_path: Path) -> None:
    """One array may have by chance as many values as there are samples, while most arrays have one row more. The file's
    own description decides, without that of its folder.
    """
    (tmp_path / "objects").mkdir()
    for number in range(COUNT):
        np.save(tmp_path / "objects" / f"s{number:02d}.lab.npy", np.full(2 * (number % 2), number, dtype="<i2"))
        (tmp_path / "objects" / f"s{number:02d}.json").write_text(json.dumps({"label": number, "text": "a" * number}))
    out = written(tmp_path / "objects", to)
    (out / "dataset.json").unlink()
    url = next(out.glob("part-*.h5" if to == "hdf5" else "part-*.zarr")) if alone else out
    with pulled(url, tmp_path / "listing") as source:
        found = samples(source)

    assert sorted(found) == [f"s{number:02d}" for number in range(COUNT)]
    for number in range(COUNT):
        sample = found[f"s{number:02d}"]
        assert (sample["lab"] == np.full(2 * (number % 2), number)).all()
        assert (sample["label"], sample["text"]) == (number, "a" * number)
    with pulled(url, tmp_path / "some", SourceOptions(fields=("lab",), key=False)) as source:
        assert source.probe(np.arange(1)).schema.names == ("lab",)


@pytest.mark.parametrize("to", ["hdf5", "zarr"])
@pytest.mark.parametrize("change", ["lead out", "fall", "shapes", "missing"])
def test_false_offsets_are_a_bad_object(to: str, change: str, objects: Path, tmp_path: Path) -> None:
    """The author of a file could have written anything into it."""
    out = written(objects, to)
    (part,) = out.glob("part-*")
    opened: Any = h5py.File(part, "r+") if to == "hdf5" else zarr.open_group(part, mode="r+")
    if change == "missing":
        del opened["wave.offsets"]
    elif change == "shapes":
        opened["wave.shapes"][3] = [10**6]
    else:
        opened["wave.offsets"][3] = 10**6 if change == "lead out" else 10
        opened["wave.offsets"][4] = 2
    if to == "hdf5":
        opened.close()
    with pytest.raises(BadObject, match=part.name), pulled(out, tmp_path / "listing") as source:
        samples(source)
