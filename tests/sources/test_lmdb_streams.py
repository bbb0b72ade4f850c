"""LMDB files whose samples consist of several entries: named databases, and keys such as ``image-0001`` and
``label-0001``.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import cachetool
from cachetool.core.errors import BadObject, CacheToolError, UsageError
from cachetool.loaders.torch import LMDBDataset
from cachetool.sources.options import SourceOptions
from tests.sources.files import open_files, read, samples

Databases = dict[bytes | None, dict[bytes, bytes]]


def write(path: Path, databases: Databases, *, engine: int = 0, **how: Any) -> Path:
    """Write a file of these databases. The unnamed database has the name None."""
    with lmdb.open(str(path), subdir=False, map_size=2**25, max_dbs=70, lib_version=engine) as env:
        for name, entries in databases.items():
            db = env.open_db(name, **how) if name is not None else None
            with env.begin(write=True) as txn:
                for key, value in entries.items():
                    txn.put(key, value, db=db)
    return path


def numbered(pattern: bytes, count: int, start: int = 1) -> dict[bytes, bytes]:
    return {pattern % number: pattern % number + b"!" for number in range(start, start + count)}


def advised(error: CacheToolError | str, option: str = "--fields") -> list[str]:
    return [shlex.split(value)[0] for value in re.findall(rf"{option} ([^\s,]+(?:,[^\s,]+)*)", str(error))]


@pytest.mark.parametrize("engine", [0, 1], ids=["0.9", "1.0"])
def test_named_databases_with_the_same_keys_are_the_fields_of_samples(engine: int, tmp_path: Path) -> None:
    count = 2500  # a key is remembered every 1,024 entries
    names = (b"images", b"labels", b"masks")
    content = {name: {key: name + key for key in numbered(b"%06d", count)} for name in names}
    path = write(tmp_path / "x.lmdb", content, engine=engine)

    taken = samples(path)
    assert [sample["__key__"] for sample in taken] == [f"{number:06d}" for number in range(1, count + 1)]
    assert taken[7] == {
        "images": b"images000008",
        "labels": b"labels000008",
        "masks": b"masks000008",
        "__key__": "000008",
    }
    with open_files(path, SourceOptions(fields=("masks", "label"), rename={"labels": "label"})) as source:
        for start in (2040, 3, 1023, 2499):
            assert read(source, start, start + 1).sample(0)["label"] == b"labels%06d" % (start + 1)


@pytest.mark.parametrize(
    ("entries", "fields"),
    [
        (numbered(b"image-%09d", 12) | numbered(b"label-%09d", 12) | {b"num-samples": b"12"}, {"image", "label"}),
        (numbered(b"left:%d", 12) | numbered(b"right:%d", 12) | {b"length": b"12"}, {"left", "right"}),
        (numbered(b"img_%d", 30) | numbered(b"mask_%d", 30) | numbered(b"depth_%d", 30), {"img", "mask", "depth"}),
        (numbered(b"%05d.jpg", 12) | numbered(b"%05d.txt", 12), {"jpg", "txt"}),
        (numbered(b"train/%d.left.png", 12) | numbered(b"train/%d.right.png", 12), {"left.png", "right.png"}),
        (numbered(b"%05d_image", 12) | numbered(b"%05d_label", 12), {"image", "label"}),
    ],
    ids=["recognition", "noted", "names", "endings", "two-dots", "separators"],
)
def test_entries_that_share_a_number_or_a_name_are_fields_of_one_sample(
    entries: dict[bytes, bytes], fields: set[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "x.lmdb", {None: entries})

    taken = samples(path)

    assert {frozenset(sample) - {"__key__"} for sample in taken} == {frozenset(fields)}
    assert sum(len(sample) - 1 for sample in taken) == sum(not key.startswith((b"num", b"len")) for key in entries)
    for sample in taken:
        key = sample.pop("__key__").encode()
        assert all(key in value for value in sample.values())
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        pulled = cache.pull(str(path), all=True, workers=1)
        converted = cachetool.convert(path, to="lmdb", out=tmp_path / "out", workers=1)
        assert (pulled.samples, pulled.notes) == (len(taken), converted.notes)
        (note,) = pulled.notes
        (option,) = advised(note, "--read-as")
        rows = cache.pull(str(path), all=True, workers=1, dataset="rows", read_as=option)
        assert rows.samples == len(fields) * len(taken)


@pytest.mark.parametrize(
    ("entries", "notes"),
    [
        (numbered(b"cat-%d", 12) | numbered(b"dog-%d", 12), 1),
        (numbered(b"cat-%d", 12) | numbered(b"dog-%d", 7), 0),
        (numbered(b"%08d", 12), 0),
        (numbered(b"%d.jpg", 12), 0),
        (numbered(b"%d.jpg", 12) | numbered(b"%d.png", 5, 100), 0),
        (numbered(b"a-%d", 3) | {b"readme": b"x"}, 0),
    ],
    ids=["classes", "uneven", "numbers", "one-ending", "two-endings", "others"],
)
def test_entries_without_a_common_number_or_name_are_one_sample_each(
    entries: dict[bytes, bytes], notes: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.lmdb", {None: entries})

    assert {sample["__key__"].encode(): sample["value"] for sample in samples(path)} == entries
    with open_files(path) as source:
        said = [text for name, text in source.skipped if not name]
    assert len(said) == notes
    for text in said:
        with open_files(path, SourceOptions(read_as=advised(text, "--read-as")[0])) as source:
            assert set(source.schema.names) == {"cat", "dog", "__key__"}


@pytest.mark.parametrize(
    "databases",
    [
        {b"images": numbered(b"%d", 9), b"labels": numbered(b"%d", 9), b"meta": {b"classes": b"3"}},
        {b"images": numbered(b"%d", 300), None: numbered(b"k%d", 500)},
        {None: numbered(b"image-%d", 9) | numbered(b"label-%d", 8)},
        {None: numbered(b"image-%d", 9) | numbered(b"label-%d", 9) | numbered(b"path-%d", 2) | {b"num-samples": b"9"}},
    ],
    ids=["meta", "beside", "lost-one", "three"],
)
def test_fields_with_different_numbers_of_entries_are_refused_with_fields_that_work(
    databases: Databases, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.lmdb", databases)

    with pytest.raises(UsageError, match="have different numbers of entries") as refused:
        open_files(path)
    fields = tuple(advised(refused.value)[0].split(","))
    with open_files(path, SourceOptions(fields=fields)) as source:
        assert source.schema.names[:-1] == fields
        assert source.samples == max(9, max(map(len, databases.values())) if b"images" in databases else 9)
    for option in advised(refused.value, "--read-as"):
        with open_files(path, SourceOptions(read_as=option)) as source:
            assert source.samples == sum(key != b"num-samples" for key in databases[None])


def test_fields_with_different_keys_are_refused_and_a_single_one_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", {b"a": numbered(b"%d", 9), b"b": numbered(b"%d", 9, 2)})

    with pytest.raises(BadObject, match="all fields of a sample need the same key") as refused:
        open_files(path)
    assert len(samples(path, fields=tuple(advised(refused.value)))) == 9


@pytest.mark.parametrize("how", [{"dupsort": True}, {"dupsort": True, "dupfixed": True}, {"integerkey": True}])
def test_databases_that_cannot_be_read_are_named(how: dict[str, bool], tmp_path: Path) -> None:
    keys = {number.to_bytes(8, "little"): b"%04d" % number for number in range(300)}
    path = write(tmp_path / "x.lmdb", {b"images": keys}, **how)

    with pytest.raises(UsageError, match=r"named databases that cannot be read:\n'images': .*(dupsort|integerkey)"):
        open_files(path)
    write(tmp_path / "x.lmdb", {b"others": numbered(b"%d", 5), b"none": {}})
    with open_files(path) as source:
        assert (source.samples, source.schema.names) == (5, ("others", "__key__"))
        assert {name for name, _ in source.skipped} == {"images", "none"}


def test_arrays_and_images_of_one_field_are_decoded(tmp_path: Path) -> None:
    from tests.sources.test_files_lmdb import npy

    arrays = {b"%03d" % number: npy(np.full((2, 3), number)) for number in range(9)}
    path = write(tmp_path / "x.lmdb", {b"volumes": arrays, b"labels": numbered(b"%03d", 9, 0)})

    with pytest.raises(UsageError, match="--value-format npy needs one value per sample") as refused:
        open_files(path, SourceOptions(value_format="npy"))
    (field,) = advised(refused.value)
    with open_files(path, SourceOptions(value_format="npy", fields=("volumes",))) as source:
        assert source.schema["volumes"].shape == (2, 3)
    assert field in ("labels", "volumes")


@pytest.mark.parametrize("databases", [1, 2])
def test_the_dataset_of_raw_values_refuses_named_databases_with_a_command_that_works(
    databases: int, tmp_path: Path
) -> None:
    names = (b"images", b"labels")[:databases]
    path = write(tmp_path / "x.lmdb", {name: numbered(b"%d", 9) for name in names})

    with pytest.raises(UsageError, match="named databases") as refused:
        LMDBDataset(path, value_format="raw")
    assert all(name.decode() in str(refused.value) for name in names)
    assert f"cachetool convert {path} --to lmdb --out DIR" in str(refused.value)
    cachetool.convert(path, to="lmdb", out=tmp_path / "out", workers=1)
    with LMDBDataset(tmp_path / "out") as dataset:
        assert (len(dataset), dataset[0]["images"]) == (9, b"1!")
    path = write(tmp_path / "y.lmdb", {None: {b"a": b"x" * 48, b"b": bytes(48)}})
    with LMDBDataset(path, value_format="raw") as dataset:
        assert [dataset[index]["key"] for index in range(len(dataset))] == [b"a", b"b"]
