"""Pulling what ``cachetool convert --out`` wrote, wherever it lies: fields, values and keys come back as they were."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.core.errors import BadObject, UsageError
from cachetool.sources import Source, SourceOptions, list_source, open_source
from cachetool.sources.file_table import Table
from tests.servers import folder_server, rclone_s3

COUNT = 30


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """Samples with a field of every kind."""
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
    """By key; drawn backwards."""
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


@pytest.mark.parametrize("to", ["lmdb", "tfrecord"])
@pytest.mark.parametrize("place", ["folder", "http", "s3"])
def test_all_fields_come_back_as_they_were(
    to: str, place: str, objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_records_that_are_packed_come_back_too(objects: Path, tmp_path: Path) -> None:
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
def test_a_damaged_file_is_named_and_can_be_left_out(to: str, objects: Path, tmp_path: Path) -> None:
    out = written(objects, to, shard_size=2**16)
    parts = sorted(out.glob("part-*"))
    parts[0].write_bytes(parts[0].read_bytes()[: -3000 if to == "lmdb" else -7])
    with pulled(out, tmp_path / "listing") as source:
        with pytest.raises(BadObject, match=parts[0].name):
            samples(source)
        found = samples(source, skip_bad=True)

    assert 0 < len(found) < COUNT
    check(found, of=range(COUNT - len(found), COUNT))


@pytest.mark.parametrize("about", [b"", b"[]", b"{}", b'{"format": "tfrecord", "parts": [1]}', None])
def test_records_beside_which_nothing_tells_what_they_hold_are_those_of_others(
    about: bytes | None, objects: Path, tmp_path: Path
) -> None:
    out = written(objects, "tfrecord")
    if about is None:
        (out / "dataset.json").unlink()
    else:
        (out / "dataset.json").write_bytes(about)
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


@pytest.mark.parametrize("to", ["hdf5", "zarr"])
def test_rows_of_arrays_are_pulled_and_fields_that_differ_in_length_refused(
    to: str, objects: Path, tmp_path: Path
) -> None:
    out = written(objects, to)
    with pytest.raises(UsageError, match=f"'[a-z]+' differs in length, so that rows of these {to} files cannot"):
        pulled(out, tmp_path / "refused").__enter__()
    with pulled(out, tmp_path / "listing", SourceOptions(fields=("x", "label"))) as source:
        found = samples(source)

    assert sorted(int(sample["label"]) for sample in found.values()) == list(range(COUNT))
    assert all((sample["x"] == sample["label"]).all() for sample in found.values())


@pytest.mark.parametrize("alone", [True, False], ids=["one file", "a folder"])
@pytest.mark.parametrize("to", ["hdf5", "zarr"])
def test_arrays_that_hold_fields_of_any_length_are_no_rows(to: str, alone: bool, tmp_path: Path) -> None:
    """Also where one has by chance as many values as there are samples, and most arrays one row more."""
    (tmp_path / "objects").mkdir()
    for number in range(COUNT):
        np.save(tmp_path / "objects" / f"s{number:02d}.lab.npy", np.full(2 * (number % 2), number, dtype="<i2"))
        (tmp_path / "objects" / f"s{number:02d}.json").write_text(json.dumps({"label": number, "text": "a"}))
    out = written(tmp_path / "objects", to)
    (out / "dataset.json").unlink()
    url = next(out.glob("part-*.h5" if to == "hdf5" else "part-*.zarr")) if alone else out
    with pulled(url, tmp_path / "listing") as source:
        found = samples(source)

    assert [sorted(sample) for sample in found.values()] == [["__key__", "label"]] * COUNT
    assert sorted(int(sample["label"]) for sample in found.values()) == list(range(COUNT))
    why = dict(Table.open(tmp_path / "listing").skipped)
    assert why["lab"].startswith("its samples differ in length")
    assert why["lab.shapes"] == "says where the samples of 'lab' lie"
    with pytest.raises(UsageError, match="field 'lab' cannot be taken: its samples differ in length"):
        pulled(url, tmp_path / "refused", SourceOptions(fields=("lab",))).__enter__()
