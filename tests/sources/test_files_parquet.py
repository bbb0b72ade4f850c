"""Parquet tables in practice: each Arrow type is read by its meaning, or left out and named; a null affects only its
own row.
"""

from __future__ import annotations

import datetime
import io
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachetool
from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.options import SourceOptions
from tests.servers import folder_server
from tests.sources.files import open_files, same, samples
from tests.sources.test_remote import source_of
from tests.sources.test_remote_mixed import pulled

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FILE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
"""The struct that ``datasets`` writes for an image or audio."""


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def left_out(path: Path, **options: Any) -> dict[str, str]:
    with open_files(path, SourceOptions(**options)) as source:
        return dict(source.skipped)


def png(number: int, size: tuple[int, int] = (6, 4)) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 30 + number).convert("RGB").save(out, "PNG")
    return out.getvalue()


TIMES = np.array(["2020-01-01T00:00:00", "1969-12-31T23:59:59", "2031-07-08T09:10:11"], dtype="M8[s]")
DECIMALS = ["0.57", "-123.40", "999999999.99"]

TAKEN: dict[str, tuple[Any, list[Any]]] = {
    "bool": (pyarrow.array([True, False, True]), [np.bool_(True), np.bool_(False), np.bool_(True)]),
    **{
        name: (
            pyarrow.array([0, 1, 2**bits - 1], getattr(pyarrow, name)()),
            [np.dtype(name).type(v) for v in (0, 1, 2**bits - 1)],
        )
        for name, bits in (("uint8", 8), ("uint16", 16), ("uint32", 32), ("uint64", 64), ("int8", 7), ("int64", 63))
    },
    "float16": (pyarrow.array(np.array([1, 2, 3], "f2")), [np.float16(v) for v in (1, 2, 3)]),
    "date32": (pyarrow.array(TIMES.astype("M8[D]")), list(TIMES.astype("M8[D]"))),
    "date64": (
        pyarrow.array(TIMES.astype("M8[D]")).cast(pyarrow.date64()),
        list(TIMES.astype("M8[D]")),
    ),  # stored as days
    **{
        f"timestamp {unit}": (pyarrow.array(TIMES.astype(f"M8[{unit}]")), list(TIMES.astype(f"M8[{unit}]")))
        for unit in ("ms", "us", "ns")
    },
    "timestamp with a zone": (
        pyarrow.array(TIMES.astype("M8[us]")).cast(pyarrow.timestamp("us", "Europe/Berlin")),
        list(TIMES.astype("M8[us]")),
    ),
    "duration": (pyarrow.array(np.array([1, -2, 3], "m8[ms]")), list(np.array([1, -2, 3], "m8[ms]"))),
    "time of day": (
        pyarrow.array([datetime.time(0, 0, 1), datetime.time(12), datetime.time(23, 59)]).cast(pyarrow.time64("us")),
        list(np.array([10**6, 43200 * 10**6, 86340 * 10**6], "m8[us]")),
    ),
    "decimal": (
        pyarrow.array([Decimal(text) for text in DECIMALS], pyarrow.decimal128(12, 2)),
        [np.float64(text) for text in DECIMALS],
    ),
    "decimal256": (
        pyarrow.array([Decimal(text) for text in DECIMALS], pyarrow.decimal256(12, 2)),
        [np.float64(text) for text in DECIMALS],
    ),
    "string": (pyarrow.array(["a", "", "grün"]), ["a", "", "grün"]),
    "large_string": (pyarrow.array(["a", "", "grün"], pyarrow.large_string()), ["a", "", "grün"]),
    "string_view": (pyarrow.array(["a", "", "grün"], pyarrow.string_view()), ["a", "", "grün"]),
    "binary": (pyarrow.array([b"a", b"", b"\xff"]), [b"a", b"", b"\xff"]),
    "large_binary": (pyarrow.array([b"a", b"", b"\xff"], pyarrow.large_binary()), [b"a", b"", b"\xff"]),
    "binary of one length": (pyarrow.array([b"ab", b"cd", b"\xff\0"], pyarrow.binary(2)), [b"ab", b"cd", b"\xff\0"]),
    "dictionary of text": (pyarrow.array(["cat", "dog", "cat"]).dictionary_encode(), ["cat", "dog", "cat"]),
    "dictionary of numbers": (pyarrow.array([7, 9, 7]).dictionary_encode(), [np.int64(v) for v in (7, 9, 7)]),
    "list": (pyarrow.array([[1, 2], [], [3]]), [np.array(v, "i8") for v in ([1, 2], [], [3])]),
    "large_list": (
        pyarrow.array([[1.5], [], [2.5]], pyarrow.large_list(pyarrow.float32())),
        [np.array(v, "f4") for v in ([1.5], [], [2.5])],
    ),
    "list of times": (
        pyarrow.array([TIMES[:2].tolist(), [], TIMES[2:].tolist()], pyarrow.list_(pyarrow.timestamp("ms"))),
        [v.astype("M8[ms]") for v in (TIMES[:2], TIMES[:0], TIMES[2:])],
    ),
    "list of fixed length": (
        pyarrow.array([[1, 2], [3, 4], [5, 6]], pyarrow.list_(pyarrow.int16(), 2)),
        [np.array(v, "i2") for v in ([1, 2], [3, 4], [5, 6])],
    ),
    "list of decimals": (
        pyarrow.array([[Decimal("0.57")], [], [Decimal("1.10")] * 2], pyarrow.list_(pyarrow.decimal128(5, 2))),
        [np.array(v, "f8") for v in ([0.57], [], [1.1, 1.1])],
    ),
    "list of bools": (
        pyarrow.array([[True, False], [], [True]]),
        [np.array(v, "?") for v in ([True, False], [], [True])],
    ),
    "list of a dictionary": (
        pyarrow.ListArray.from_arrays([0, 2, 2, 3], pyarrow.array([7, 9, 7]).dictionary_encode()),
        [np.array(v, "i8") for v in ([7, 9], [], [7])],
    ),
    "tensor": (
        pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype="f4").reshape(3, 2, 2)),
        list(np.arange(12, dtype="f4").reshape(3, 2, 2)),
    ),
    "boxes": (
        pyarrow.array([[[1, 2], [3, 4]], [], [[5, 6]]], pyarrow.list_(pyarrow.list_(pyarrow.float32(), 2))),
        [np.array(v, "f4").reshape(-1, 2) for v in ([[1, 2], [3, 4]], [], [[5, 6]])],
    ),
}


@pytest.mark.parametrize("rows", [2, 100])
def test_each_arrow_type_is_read_by_its_meaning(tmp_path: Path, rows: int) -> None:
    """Dtype, unit and value are exact, in one row group and in several."""
    path = write(tmp_path / "x.parquet", {name: values for name, (values, _) in TAKEN.items()}, row_group_size=rows)
    found = samples(path)
    for name, (_, wanted) in TAKEN.items():
        taken = [sample[name] for sample in found]
        assert all(same(value, want) for value, want in zip(taken, wanted, strict=True)), (name, taken)


def test_times_keep_their_unit_in_the_cache_like_those_of_npy_and_zarr(tmp_path: Path) -> None:
    path = write(tmp_path / "w.parquet", {"when": pyarrow.array(TIMES.astype("M8[us]"))})
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "0.when.npy", TIMES.astype("M8[us]")[0])

    for source, cache in ((path, "a"), (tmp_path / "npy", "b")):
        pulled(source, tmp_path / cache)
        with cachetool.open_cache(tmp_path / cache) as opened:
            assert opened.schema("default")["when"].describe() == "datetime64[us]"


def test_a_time_zone_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"when": TAKEN["timestamp with a zone"][0]})
    assert left_out(path) == {"time zone of when": "Europe/Berlin; the values are UTC"}


NOT_TAKEN = {
    "decimal128(38, 10)": pyarrow.array([Decimal("1.5")] * 3, pyarrow.decimal128(38, 10)),
    "list<element: string>": pyarrow.array([["a", "b"], [], ["c"]]),
    "map<string, int64": pyarrow.array([[("a", 1)]] * 3, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "list<element: struct": pyarrow.array([[{"a": 1}]] * 3),
    "list<element: list": pyarrow.array([[[1]], [[1, 2], [3]], []]),
    "all of its values are null": pyarrow.nulls(3),
}


def test_columns_that_no_field_can_hold_are_left_out_and_named(tmp_path: Path) -> None:
    names = {f"bad {at}": reason for at, reason in enumerate(NOT_TAKEN)}
    columns = {name: NOT_TAKEN[reason] for name, reason in names.items()}
    path = write(tmp_path / "x.parquet", {**columns, "good": [1, 2, 3]})
    found = left_out(path)

    assert found.keys() == names.keys()
    assert all(reason in found[name] for name, reason in names.items()), found
    assert [sample["good"] for sample in samples(path)] == [1, 2, 3]
    with pytest.raises(UsageError, match=f"'bad 0' cannot be read: of the type {re.escape('decimal128(38, 10)')}"):
        samples(path, fields=("bad 0",))


def test_the_advised_casts_for_decimals_work(tmp_path: Path) -> None:
    column = pyarrow.array([Decimal("12345678901234567890.5")] * 3, pyarrow.decimal128(38, 10))
    reason = left_out(write(tmp_path / "x.parquet", {"x": column, "y": [1, 2, 3]}))["x"]
    advised = re.findall(r"'(\w+)'", reason)

    assert advised == ["float64", "string"]
    table = parquet.read_table(tmp_path / "x.parquet")
    for kind, wanted in zip(
        advised, (np.float64("12345678901234567890.5"), "12345678901234567890.5000000000"), strict=True
    ):
        path = write(tmp_path / f"{kind}.parquet", {"x": table["x"].cast(kind)})
        assert same(samples(path)[0]["x"], wanted)


def test_the_advised_text_for_nested_values_is_read(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "hi"}], [], [{"role": "user", "content": "a"}]]
    path = write(tmp_path / "x.parquet", {"chat": chats, "tags": [["a"], ["b", "c"], []], "y": [1, 2, 3]})
    reasons = left_out(path)
    assert reasons["chat"].endswith("; write each value as one text (JSON) in the file")
    assert reasons["tags"].endswith("; join each list into one text in the file")
    table = parquet.read_table(path)
    texts = [json.dumps(value) for value in table["chat"].to_pylist()]
    tags = [" ".join(value) for value in table["tags"].to_pylist()]
    found = samples(write(path, {"chat": texts, "tags": tags}))
    assert [json.loads(sample["chat"]) for sample in found] == chats
    assert [sample["tags"] for sample in found] == ["a", "b c", ""]


def test_the_members_of_a_struct_are_separate_fields(tmp_path: Path) -> None:
    rows = [{"bbox": [[0.5, 1, 2, 3]] * at, "category": [at] * at, "meta": {"id": at}} for at in range(3)]
    kind = pyarrow.struct(
        [
            ("bbox", pyarrow.list_(pyarrow.list_(pyarrow.float32(), 4))),
            ("category", pyarrow.list_(pyarrow.int64())),
            ("meta", pyarrow.struct([("id", pyarrow.int32())])),
        ]
    )
    path = write(tmp_path / "x.parquet", {"objects": pyarrow.array(rows, kind), "y": [1, 2, 3]})

    found = samples(path)
    assert list(found[0]) == ["objects.bbox", "objects.category", "objects.meta.id", "y"]
    assert same(found[2]["objects.bbox"], np.array([[0.5, 1, 2, 3]] * 2, "f4"))
    assert [sample["objects.meta.id"] for sample in found] == [0, 1, 2]
    assert list(samples(path, fields=("-objects",))[0]) == ["y"]
    assert list(samples(path, fields=("-objects.bbox", "-y"))[0]) == ["objects.category", "objects.meta.id"]


@pytest.mark.parametrize("sizes", [[(6, 4)] * 4, [(6, 4), (3, 9), (6, 4), (5, 5)]])
def test_images_of_the_hugging_face_hub_are_bytes_and_can_be_decoded(
    tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    images = [png(at, size) for at, size in enumerate(sizes)]
    column = pyarrow.array([{"bytes": image, "path": f"{at}.png"} for at, image in enumerate(images)], FILE)
    (tmp_path / "data").mkdir()
    write(
        tmp_path / "data" / "train-00000-of-00001.parquet", {"image": column, "label": [0, 1, 2, 3]}, row_group_size=3
    )
    place = tmp_path / "data" / "train-00000-of-00001.parquet"

    assert [sample["image"] for sample in samples(place)] == images
    assert left_out(place).keys() == {"image.path"}
    assert [s["image.path"] for s in samples(place, fields=("image.path", "label"))] == [f"{at}.png" for at in range(4)]
    with folder_server(tmp_path / "data", index="json") as server:
        for url, cache in ((str(tmp_path / "data"), "here"), (server.url, "there")):
            found = pulled(url, tmp_path / cache, decode="image")  # type: ignore[arg-type]
            assert len(found) == 4
            for key, sample in found.items():
                at = int(key.rpartition("#")[2])
                assert sample["label"] == at
                assert same(sample["image"], np.asarray(Image.open(io.BytesIO(images[at]))))


def test_an_image_without_bytes_is_a_bad_row_and_a_column_with_only_paths_is_named(tmp_path: Path) -> None:
    some = [{"bytes": None if at == 2 else b"x", "path": f"{at}.png"} for at in range(4)]
    with pytest.raises(BadObject, match=r"row 2: 'image' has no bytes"):
        samples(write(tmp_path / "some.parquet", {"image": pyarrow.array(some, FILE)}))

    none = [{"bytes": None, "path": f"{at}.png"} for at in range(4)]
    path = write(tmp_path / "none.parquet", {"image": pyarrow.array(none, FILE), "label": [0, 1, 2, 3]})
    assert "paths to files but no bytes" in left_out(path)["image"]
    with pytest.raises(UsageError, match="'image' cannot be read: it has paths to files"):
        samples(path, fields=("image",))


def test_decode_image_without_an_image_column_is_an_error(tmp_path: Path) -> None:
    columns = {"image": pyarrow.array([{"bytes": b"\x89PNG", "path": "a.png"}] * 4, FILE), "label": [0, 1, 2, 3]}
    for chosen in (columns, {"label": columns["label"]}, {"image": columns["image"]}):
        path = write(tmp_path / "x.parquet", chosen)
        for use in (lambda p: samples(p, decode="image"), lambda p: pulled(p, tmp_path / "c", decode="image")):
            with pytest.raises(
                UsageError, match=r"--decode image finds no image in .*; the fields are (image|label) \("
            ):
                use(path)


NULLS: dict[str, tuple[Any, Any, Any]] = {
    # column: its type, a value, and a null or invalid value
    "number": (pyarrow.float64(), 1.5, None),
    "bool": (pyarrow.bool_(), True, None),
    "text": (pyarrow.string(), "", None),
    "time": (pyarrow.timestamp("us"), datetime.datetime(2020, 1, 1), None),
    "decimal": (pyarrow.decimal128(5, 1), Decimal("1.5"), None),
    "dictionary": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "a", None),
    "list": (pyarrow.list_(pyarrow.int64()), [], None),
    "in a list": (pyarrow.list_(pyarrow.int64()), [1], [1, None]),
    "first of a list": (pyarrow.list_(pyarrow.float32()), [], [None, 2.0]),
    "fixed list": (pyarrow.list_(pyarrow.int32(), 2), [1, 2], None),
    "in a fixed list": (pyarrow.list_(pyarrow.int32(), 2), [1, 2], [7, None]),
    "boxes": (pyarrow.list_(pyarrow.list_(pyarrow.int32(), 2)), [[1, 2], [3, 4]], [[1, 2], [None, 4]]),
    "image": (FILE, {"bytes": b"", "path": None}, {"bytes": None, "path": "a.png"}),
    "no image": (FILE, {"bytes": b"x", "path": "a.png"}, None),
    "struct.part": (pyarrow.struct([("part", pyarrow.int8())]), {"part": 1}, None),
}


def test_a_null_affects_only_its_own_row(tmp_path: Path) -> None:
    """Each row except the last has a null in another column. Good rows are read and never blamed. A bad row is named
    with its number, its column and the remedy.
    """
    count = len(NULLS) + 1
    columns = {
        name.partition(".")[0]: pyarrow.array([none if row == at else value for row in range(count)], kind)
        for at, (name, (kind, value, none)) in enumerate(NULLS.items())
    }
    path = write(tmp_path / "t.parquet", {"a": list(range(count)), **columns}, row_group_size=4)
    draws = np.random.default_rng(1).permutation(count)
    with source_of(str(path), tmp_path / "listing", key=False) as source:
        schema = source.probe(draws, skip_bad=True).schema
        pieces = list(source.read(draws, schema=schema, skip_bad=True))

    assert np.concatenate([draws[piece.draws] for piece in pieces]).tolist() == [count - 1]
    assert np.concatenate([piece.block.columns["a"] for piece in pieces]).tolist() == [count - 1]
    skipped = {int(draws[skip.draw]): skip for piece in pieces for skip in piece.skipped}
    assert len(skipped) == sum(len(piece.skipped) for piece in pieces) == count - 1
    for row, name in enumerate(NULLS):
        assert skipped[row].key == f"t.parquet#{row}"
        assert re.match(f"'{name}' .*; leave the column out with --fields -{name}$", skipped[row].reason)
    with pytest.raises(BadObject, match=r"t\.parquet: row 0: 'number' is null; .*--fields -number$"):
        samples(path)
    dropped = tuple(f"-{name}" for name in NULLS if name != "text")
    assert [s["a"] for s in samples(path, fields=(*dropped, "-text"))] == list(range(count))


@pytest.mark.parametrize("name", ["text", "boxes", "in a fixed list"])
@pytest.mark.parametrize("row", [0, 2, 3])
def test_rows_beside_a_null_keep_their_values(tmp_path: Path, name: str, row: int) -> None:
    kind, value, none = NULLS[name]
    path = write(tmp_path / "t.parquet", {"b": pyarrow.array([none if at == row else value for at in range(4)], kind)})
    with source_of(str(path), tmp_path / "listing", key=False) as source:
        schema = source.probe(np.arange(4), skip_bad=True).schema
        (piece,) = list(source.read(np.arange(4), schema=schema, skip_bad=True))
    assert len(piece.block) == 3
    assert all(np.array_equal(piece.block.sample(at)["b"], value) for at in range(3))


def test_a_pull_skips_only_the_row_with_a_null_and_a_strict_pull_names_both_alternatives(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"a": [1, 2, 3, 4], "b": [1.5, None, 3.0, 4.0]})
    with pytest.raises(BadObject, match=r"row 1: 'b' is null; .*--fields -b, or .* with --on-error skip") as error:
        pulled(path, tmp_path / "strict")
    advised = re.search(r"--fields (\S+),", str(error.value))
    assert advised is not None

    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        result = cache.pull(path, all=True, on_error="skip")
    assert (result.samples, result.skipped) == (3, 1)
    assert [skip["key"] for skip in result.skipped_examples] == ["t.parquet#1"]
    assert {int(sample["a"]) for sample in pulled(path, tmp_path / "strict", fields=[advised[1]]).values()} == {
        1,
        2,
        3,
        4,
    }


def test_rows_around_a_null_keep_their_values_from_every_place(tmp_path: Path) -> None:
    """Several files and row groups, drawn in random order, locally and from a server: all other rows are read."""
    random = np.random.default_rng(5)
    (tmp_path / "place").mkdir()
    wanted: dict[str, tuple[int, str, list[int]]] = {}
    for file in range(3):
        number = [None if random.random() < 0.004 else int(v) for v in random.integers(0, 1000, 900)]
        text = [None if random.random() < 0.004 else f"text {at}" for at in range(900)]
        lists = [[int(v) for v in random.integers(0, 9, at % 4)] for at in range(900)]
        write(tmp_path / "place" / f"{file}.parquet", {"n": number, "t": text, "l": lists}, row_group_size=101)
        for at, row in enumerate(zip(number, text, lists, strict=True)):
            if None not in row:
                wanted[f"{file}.parquet#{at}"] = row  # type: ignore[assignment]
    assert 3 <= 2700 - len(wanted) <= 27

    with folder_server(tmp_path / "place", index="json") as server:
        for url, cache in ((str(tmp_path / "place"), "here"), (server.url, "there")):
            found = pulled(url, tmp_path / cache, on_error="skip")  # type: ignore[arg-type]
            assert found.keys() == wanted.keys()
            for key, (number_, text_, list_) in wanted.items():
                sample = found[key]
                assert (int(sample["n"]), sample["t"], sample["l"].tolist()) == (number_, text_, list_)


def test_more_rows_with_a_null_than_may_be_skipped_stop_the_pull_like_other_bad_rows(tmp_path: Path) -> None:
    values = [None if at % 20 == 0 else at for at in range(1000)]
    path = write(tmp_path / "t.parquet", {"a": list(range(1000)), "b": values})
    with pytest.raises(BadObject, match=r"\d+ of \d+ draws could not be used, more than 1 %"):
        pulled(path, tmp_path / "cache", on_error="skip")


def test_a_column_without_any_value_is_left_out_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"a": [1, 2, 3], "b": pyarrow.array([None] * 3, pyarrow.float64())})
    assert left_out(path) == {"b": "all of its values are null"}
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(path, all=True).left_out == (("b", "all of its values are null"),)


def test_a_column_without_any_value_in_one_of_several_files_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    write(tmp_path / "place" / "a.parquet", {"a": [1, 2], "b": pyarrow.array([None] * 2, pyarrow.float64())})
    write(tmp_path / "place" / "b.parquet", {"a": [3, 4], "b": [1.5, 2.5]})
    with pytest.raises(BadObject, match="differ in their fields: b; leave these fields out with --fields -b,") as error:
        pulled(tmp_path / "place", tmp_path / "cache")
    advised = re.search(r"--fields (\S+),", str(error.value))
    assert advised is not None
    assert sorted(
        int(s["a"]) for s in pulled(tmp_path / "place", tmp_path / "cache", fields=[advised[1]]).values()
    ) == [
        1,
        2,
        3,
        4,
    ]


def test_without_statistics_nulls_make_bad_rows_instead_of_a_left_out_column(tmp_path: Path) -> None:
    columns = {"a": [1, 2], "b": pyarrow.array([None] * 2, pyarrow.float64())}
    path = write(tmp_path / "t.parquet", columns, write_statistics=False)
    with pytest.raises(BadObject, match="row 0: 'b' is null"):
        samples(path)


def test_a_null_raises_bad_object_in_every_process(tmp_path: Path) -> None:
    """The conversion reads a local and a remote file, also with the null in the first row."""
    (tmp_path / "place").mkdir()
    path = write(tmp_path / "place" / "t.parquet", {"a": ["x", "y"], "b": [None, 1.5]})
    with folder_server(tmp_path / "place", index="json") as server:
        for url in (path, f"{server.url}/t.parquet"):
            with pytest.raises(BadObject, match=r"row 0: 'b' is null; leave the column out with --fields -b$"):
                cachetool.convert(url, to="hdf5", out=tmp_path / "out")
            cachetool.convert(url, to="hdf5", out=tmp_path / f"out-{url == path}", fields=["-b"])
