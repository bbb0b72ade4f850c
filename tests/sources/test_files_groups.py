"""The sample axis of a file's arrays, and files with one group per sample."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import UsageError
from cachetool.sources import groups, hdf5
from cachetool.sources.options import SourceOptions
from tests.docs.pages import DOCS
from tests.servers import folder_server
from tests.sources.files import open_files, same, samples

IMAGES = np.arange(200 * 16, dtype="u1").reshape(200, 4, 4)
FEATURES = {f"clip{i:03d}": {"feat": np.full((16, 4), i, "f4"), "label": np.array([i])} for i in range(50)}
KINDS = ("h5", "npz", "zarr")


def write(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Write a file of these arrays, of the kind that its name implies. A dictionary is a group."""
    flat = dict(_flat(arrays))
    if path.suffix == ".npz":
        np.savez(path, **flat)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            for name, array in flat.items():
                file[name] = array
    else:
        root = zarr.open_group(path, mode="w")
        for name, array in flat.items():
            root.create_array(name, data=np.asarray(array))
    return path


def _flat(arrays: Mapping[str, Any], prefix: str = "") -> Any:
    for name, value in arrays.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def advised(text: str, option: str) -> str:
    """Return the value that a message advises for an option."""
    (value,) = re.findall(rf"{option} ('[^']*'|[^\s)]+)", text)
    return shlex.split(value)[0]


def lost(path: Path) -> dict[str, str]:
    with open_files(path) as source:
        return {name: why for name, why in source.skipped if name}


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_with_most_bytes_is_the_number_of_samples(kind: str, tmp_path: Path) -> None:
    arrays = {"images": IMAGES, "labels": np.arange(200), "mean": np.zeros(3), "std": np.ones(3), "names": np.arange(3)}
    path = write(tmp_path / f"x.{kind}", arrays)

    with open_files(path) as source:
        assert (source.samples, set(source.schema.names)) == (200, {"images", "labels"})
        why = dict(source.skipped)
    assert set(why) == {"mean", "std", "names"}
    (line,) = [text for text in why.values() if "--fields" in text]
    assert "its first dimension is 3, not 200, the length with the most bytes" in line
    with open_files(path, SourceOptions(fields=tuple(advised(line, "--fields").split(",")))) as source:
        assert (source.samples, set(source.schema.names)) == (3, {"mean", "std", "names"})
    with open_files(path, SourceOptions(fields=("labels", "images"))) as source:
        assert (source.samples, source.schema.names) == (200, ("labels", "images"))


@pytest.mark.parametrize(
    ("arrays", "count", "advice"),
    [
        ({"table": np.zeros((5000, 76)), "images": IMAGES, "labels": np.arange(200)}, 5000, "images,labels"),
        ({"table": np.zeros((5000, 76)), "images": IMAGES}, 5000, "images"),
        ({"x": IMAGES, "y": np.arange(200), "offsets": np.arange(201)}, 200, None),
        ({"x": np.zeros((100, 5)), "texts": np.array([b"a"] * 7)}, 100, "texts"),
        ({"x": np.zeros((100, 5)), "one": np.float32(3), "y": np.zeros(100)}, 100, None),
        ({"x y": np.zeros(3), "b z": np.zeros(3), "data": np.zeros((40, 4))}, 40, "x y,b z"),
        ({"train": {"x": IMAGES, "y": np.arange(200)}, "test": {"x": IMAGES[:50], "y": np.arange(50)}}, 200,
         "test/x,test/y"),
        ({"left": {"x": np.zeros((9, 5))}, "right": {"x": np.zeros((9, 5))}, "info": np.zeros(2)}, 9, None),
    ],
    ids=["table", "table-and-one", "offsets", "texts", "single", "spaces", "splits", "cameras"],
)  # fmt: skip
def test_the_option_in_the_note_reads_the_arrays_of_the_other_length(
    arrays: Any, count: int, advice: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.h5", arrays)

    with open_files(path) as source:
        assert source.samples == count
    lines = [why for why in lost(path).values() if "--fields" in why]
    assert len(lines) == (advice is not None)
    if advice is not None:
        fields = tuple(advised(lines[0], "--fields").split(","))
        assert sorted(fields) == sorted(advice.split(","))
        with open_files(path, SourceOptions(fields=fields)) as source:
            assert (source.schema.names, source.samples != count) == (fields, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content",
    [
        FEATURES,
        {name: {"feat": np.full((4, 16 + i), i), "label": np.int64(i)} for i, name in enumerate(FEATURES)},
        {"data": {
            f"demo_{i}": {"actions": np.full((5 + i, 7), i, "f4"), "obs": {"s": np.zeros((5 + i, 3))}} for i in range(4)
        }},
        {f"v{i}": np.full((3 + i, 4), i) for i in range(5)},
        {"abcdefghijk"[i] * 3: np.full((3 + i, 4), i) for i in range(11)},
        {f"{i}": {"x": np.zeros((0, 2) if i == 1 else (2, 2)), "y": np.array(["a" * i])[0]} for i in range(3)},
        {f"e{i}": {"x": np.full((2, 2), i), "t": np.array([b"abc"])} for i in range(12)},
    ],
    ids=["clips", "videos", "demos", "arrays", "ids", "texts", "episodes"],
)  # fmt: skip
def test_each_group_is_a_sample_with_its_name_as_the_key(kind: str, content: Any, tmp_path: Path) -> None:
    if kind != "npz" and any(isinstance(value, np.str_) for _, value in _flat(content)):
        content = {name: {"x": group["x"], "y": np.int64(3)} for name, group in content.items()}
    path = write(tmp_path / f"x.{kind}", content)
    place = "data/" if "data" in content else ""
    by_key = {place + name: value for name, value in content.get("data", content).items()}

    taken = samples(path)

    assert sorted(sample["__key__"] for sample in taken) == sorted(by_key)
    for sample in taken:
        value = by_key[sample.pop("__key__")]
        wanted = dict(_flat(value if isinstance(value, dict) else {"value": value}))
        assert sample.keys() == wanted.keys()
        for name, array in wanted.items():
            if array.dtype.kind in "SU":
                array = array.item() if array.ndim == 0 else array[0]
                array = array.decode() if isinstance(sample[name], str) and isinstance(array, bytes) else array
                assert sample[name] == array
            else:
                assert same(sample[name], array)


@pytest.mark.parametrize("kind", KINDS)
def test_pull_and_convert_report_how_groups_are_read_and_the_option_for_the_other_way(
    kind: str, tmp_path: Path
) -> None:
    content = {"data": FEATURES, "mask": {"train": np.arange(4)}}
    path = write(tmp_path / f"x.{kind}", content)
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        pulled = cache.pull(str(path), all=True, workers=1)
        converted = cachetool.convert(path, to="hdf5", out=tmp_path / "out", workers=1)
        assert pulled.samples == converted.samples == 50
        assert pulled.notes == converted.notes
        assert [name for name, _ in pulled.left_out] == [name for name, _ in converted.skipped] == ["mask/train"]
        (note,) = pulled.notes
        assert "50 groups ('data/clip000' to 'data/clip049') is a sample" in note
        rows = cache.pull(str(path), all=True, workers=1, dataset="rows", read_as=advised(note, "--read-as"))
        assert (rows.samples, rows.notes) == (16, ())
        fields = cache.pull(str(path), all=True, workers=1, dataset="some", fields=["label"])
        assert (fields.samples, fields.left_out) == (50, ())
    with open_files(path, SourceOptions(fields=("feat",), rename={"label": "class"}, key=False)) as source:
        assert (source.samples, source.schema.names) == (50, ("feat",))


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ({f"clip{i}": {"x": np.zeros((100, 4))} for i in range(50)}, 50),  # could be 50 sensors
        ({"train": {"x": np.zeros((6, 4))}, "test": {"x": np.zeros((6, 4))}}, 2),
        ({"office": {"x": np.zeros((6, 4))}, "home": {"x": np.zeros((7, 4))}, "web": {"x": np.zeros((8, 4))}}, 3),
    ],
    ids=["sensors", "splits", "domains"],
)
def test_ambiguous_groups_are_refused_with_options_that_work(content: Any, count: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", content)

    with pytest.raises(UsageError, match=f"{count} groups have the same arrays") as refused:
        open_files(path)
    text = str(refused.value)
    assert re.findall("--read-as ([a-z]+)", text) == ["groups", "rows"]
    with open_files(path, SourceOptions(read_as="groups")) as source:
        assert source.samples == count
    with open_files(path, SourceOptions(read_as="rows")) as source:
        assert source.samples in (100, 6, 8)
    with open_files(path, SourceOptions(fields=(advised(text, "--fields"),))) as source:
        assert len(source.schema) == 1


@pytest.mark.parametrize(
    "content",
    [
        {f"camera{i}": {"rgb": np.zeros((30, 4, 4)), "depth": np.zeros((30, 4))} for i in range(6)},
        {
            name: {"data": np.zeros((30, 4))}
            for name in ("t2m", "u10", "v10", "z500", "q", "r", "w", "tp", "msl", "sst")
        },
        {"x": np.zeros((30, 4)), "y": np.zeros((30, 4)), "z": np.zeros((30, 4)), "bias": np.zeros(4)},
        {f"c{i}": np.zeros(30) for i in range(12)} | {"mean": np.zeros((12, 1))},
    ],
    ids=["cameras", "variables", "plain", "columns"],
)
def test_groups_that_are_fields_stay_fields(content: Any, tmp_path: Path) -> None:
    with open_files(write(tmp_path / "x.h5", content)) as source:
        assert source.samples == 30
        assert "__key__" not in source.schema


@pytest.mark.parametrize(
    ("odd", "fields", "left"),
    [
        ({"data/demo_1/note": np.zeros(3)}, ("actions", "states"), ["data/demo_1/note"]),
        ({"data/demo_1/actions": np.zeros((4, 3), "f4")}, ("states",), [f"data/demo_{n}/actions" for n in range(6)]),
        ({"data/demo_1/actions": None}, ("states",), [f"data/demo_{n}/actions" for n in (0, 2, 3, 4, 5)]),
        ({"mask/train": np.arange(4), "mask/valid": np.arange(2)}, ("actions", "states"), ["mask/train", "mask/valid"]),
    ],
    ids=["one more", "another type", "one lacks", "beside"],
)
def test_numbered_groups_become_samples_with_the_fields_common_to_all(
    odd: dict[str, Any], fields: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    content = {f"data/demo_{n}/actions": np.full((3 + n % 2, 3), n, "f8") for n in range(6)}
    content |= {f"data/demo_{n}/states": np.full((3 + n % 2, 5), n, "f8") for n in range(6)}
    path = tmp_path / "demos.h5"
    with h5py.File(path, "w") as file:
        for name, array in (content | odd).items():
            if array is not None:
                file[name] = array

    for options in (SourceOptions(), SourceOptions(read_as="groups")):
        with open_files(path, options) as source:
            assert source.samples == 6
            assert set(source.schema.names) == {*fields, "__key__"}
            assert sorted(name for name, _ in source.skipped if name) == sorted(left)
            assert [float(source.read(n, n + 1).sample(0)["states"].max()) for n in range(6)] == list(range(6))


def test_missing_groups_are_no_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", {"x": np.zeros((4, 2)), "y": np.zeros(4, "i4")})

    with pytest.raises(UsageError, match="--read-as groups needs groups with arrays of the same names"):
        open_files(path, SourceOptions(read_as="groups"))


def test_several_files_of_groups_are_one_source_at_random_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for file in range(2):
        demos = {f"demo_{i}": {"x": np.full((3 + i + file, 2), 10 * file + i)} for i in range(5)}
        write(tmp_path / "runs" / f"{file}.h5", demos)
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        result = cache.pull(str(tmp_path / "runs"), all=True, workers=1)
        assert (result.samples, len(result.notes)) == (10, 1)
    assert [int(sample["x"][0, 0]) for sample in samples(tmp_path / "runs")] == [*range(5), *range(10, 15)]


def test_groups_of_compressed_chunks_are_read_completely(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = {f"demo_{i}": rng.normal(size=(100 + i, 8)) for i in range(12)}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, array in content.items():
            file.create_dataset(f"{name}/x", data=array, chunks=(7, 8), compression="gzip")
    for sample in samples(tmp_path / "x.h5"):
        assert same(sample["x"], content[sample["__key__"]])


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_the_advice_for_too_many_groups_is_the_program_in_the_docs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / f"clips.{kind}", FEATURES)
    page = (DOCS / "how-to" / "read-hdf5-and-zarr.md").read_text(encoding="utf-8")
    text = groups.too_many("x.h5", hdf5.MAX_OBJECTS, "groups and datasets")
    (name, heading) = re.findall(r'docs/how-to/([a-z0-9-]+\.md), "(.+)"', text)[0]
    assert (name, f"## {heading}\n" in page) == ("read-hdf5-and-zarr.md", True)
    (program,) = re.findall(r"```python\n(.*?)```", page.split(f"## {heading}\n")[1].split("\n## ")[0], re.DOTALL)
    if kind == "zarr":
        program = re.sub(r"file = h5py.*# a Zarr: ", "", program)
    monkeypatch.chdir(tmp_path)

    exec(program, {})

    assert sorted(int(sample["label"][0]) for sample in samples(tmp_path / "clips")) == list(range(50))


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_groups_of_a_remote_file_are_samples_too(kind: str, tmp_path: Path) -> None:
    demos = {f"demo_{i}": {"x": np.full((5 + i, 3), i, "f4"), "y": np.int64(i)} for i in range(12)}
    write(tmp_path / f"x.{kind}", {"data": demos})
    with (
        folder_server(tmp_path, index="json") as server,
        cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache,
    ):
        url = f"{server.url}/x.{kind}"
        assert cache.pull(url, all=True, workers=1).samples == 12
        assert sorted(int(sample["y"]) for sample in samples(url)) == [*range(12)]
