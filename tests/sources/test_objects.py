"""Objects as samples: their fields, their schema, and the objects that are fetched to find it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.core.errors import AccessDenied, BadObject, CacheToolError, Unreachable, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.sources.objects import ObjectsSource
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from cachetool.stores import Limits
from tests.servers import Scripted, folder_server, scripted_server, serve_file

Files = Mapping[str, Any]


def write(folder: Path, files: Files) -> Path:
    """Write arrays as ``.npy``, dicts as JSON, other values unchanged."""
    for key, value in files.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, np.ndarray):
            np.save(path, value)
        elif isinstance(value, bytes):
            path.write_bytes(value)
        else:
            path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@contextlib.contextmanager
def opened(folder: Path, files: Files, **options: Any) -> Iterator[ObjectsSource]:
    """Open a source of these files."""
    place = write(folder / "place", files)
    given = SourceOptions(**options)
    list_source(str(place), folder / "listing", given)
    with contextlib.closing(open_source(str(place), folder / "listing", given)) as source:
        assert isinstance(source, ObjectsSource)
        yield source


def schema(folder: Path, files: Files, **options: Any) -> Schema:
    with opened(folder, files, **options) as source:
        return source.probe(np.arange(source.units)).schema


def samples(folder: Path, files: Files, **options: Any) -> list[dict[str, Any]]:
    with opened(folder, files, **options) as source:
        units = np.arange(source.units)
        pieces = list(source.read(units, schema=source.probe(units).schema))
        return [piece.block.sample(at) for piece in pieces for at in range(len(piece.block))]


def failure(folder: Path, files: Files, **options: Any) -> CacheToolError:
    with pytest.raises(CacheToolError) as caught:
        schema(folder, files, **options)
    assert str(caught.value).count("\n") <= 1
    return caught.value


def fields(found: Schema) -> dict[str, str]:
    return {field.name: field.describe() for field in found}


# --- fields ---------------------------------------------------------------------------------------------------------

ONE = {
    "7.image.npy": np.ones((2, 3), dtype=">f4"),
    "7.json": {"label": 3, "box": [1, 2]},
    "7.cls": "5",
    "7.caption.txt": "ein Löwe",
    "7.raw": b"\0\1",
}


def test_objects_with_the_same_key_are_the_fields_of_one_sample(tmp_path: Path) -> None:
    found = samples(tmp_path, ONE)

    assert len(found) == 1
    np.testing.assert_array_equal(found[0].pop("image"), np.ones((2, 3), dtype=np.float32))
    assert found[0] == {"label": 3, "box": "[1,2]", "cls": 5, "caption": "ein Löwe", "raw": b"\0\1", "__key__": "7"}


def test_fields_are_chosen_renamed_and_ordered(tmp_path: Path) -> None:
    found = schema(tmp_path, ONE, fields=("kind", "image"), rename={"cls": "kind", "raw": "image"} | {"image": "x"})

    assert fields(found) == {"kind": "int64", "image": "bytes", "__key__": "str"}
    assert found.names == ("kind", "image", "__key__")


def test_the_key_can_be_left_out_and_the_folder_can_be_the_label(tmp_path: Path) -> None:
    files = {"cats/a/1.txt": "x", "dogs/1.txt": "y"}

    assert samples(tmp_path, files, key=False, label_from_folder=True) == [
        {"txt": "x", "label": "a"},
        {"txt": "y", "label": "dogs"},
    ]


def test_several_extensions_can_become_one_field(tmp_path: Path) -> None:
    files = {"1.png": b"p", "2.jpg": b"j"}

    assert "--rename jpg=X --rename png=X" in str(failure(tmp_path, files)) or "--rename png=X" in str(
        failure(tmp_path / "again", files)
    )
    assert [s["image"] for s in samples(tmp_path / "ok", files, rename={"png": "image", "jpg": "image"})] == [
        b"p",
        b"j",
    ]


def test_only_objects_that_can_hold_a_chosen_field_are_fetched(tmp_path: Path) -> None:
    place = write(
        tmp_path / "place",
        {
            f"{n}.{name}": value
            for n in range(3)
            for name, value in {"a.npy": np.zeros(2), "b.npy": np.ones(2), "json": {"c": 1}}.items()
        },
    )

    def fetched(*names: str) -> set[str]:
        options = SourceOptions(fields=names)
        with folder_server(place, index="json") as server:
            list_source(server.url, tmp_path / "-".join(names), options)
            server.requests.clear()
            with contextlib.closing(open_source(server.url, tmp_path / "-".join(names), options)) as source:
                found = source.probe(np.arange(1)).schema
        assert found.names == (*names, "__key__")
        return {path for path, _ in server.requests}

    assert fetched("b") == {"/0.b.npy"}
    assert fetched("a", "b") == {"/0.a.npy", "/0.b.npy"}
    assert fetched("c", "a") == {"/0.a.npy", "/0.json"}


def saved(**arrays: Any) -> bytes:
    """Return an ``.npz`` file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        ({"1.npy": np.zeros(1), "1.json": {"npy": 1}}, {}, "has field 'npy' twice"),
        ({"1.a.npy": np.zeros(1), "1.a.txt": "x"}, {}, "has field 'a' twice"),
        ({"1.json": {"__key__": "x"}}, {}, "has field '__key__' twice"),
        ({"d/1.json": {"label": 1}}, {"label_from_folder": True}, "has field 'label' twice"),
        ({"1.txt": "x"}, {"label_from_folder": True}, "is in no folder"),
        ({"1.json": {"a": None, "b": 1}}, {}, "'a' is null"),
        ({"1.npz": saved(a=["x", "y"], b=1)}, {}, "'1.npz': 'a' is an array of texts (<U1)"),
        ({"1.json": {"größe": 1}}, {}, "--rename"),
        ({"1.json": {"a:b": 1}}, {}, "cannot be used"),
        ({"1.json": {"a": 1, "a/b": 2}}, {}, "also the folder"),
        ({"1.npy": b"junk"}, {}, "'1.npy': not a .npy file"),
        ({"1.json": b"{"}, {}, "'1.json': not JSON"),
        ({"1.cls": b"x"}, {}, "'1.cls': not a whole number"),
        ({"1.png": b"x"}, {"decode": "image"}, "'1.png': not an image"),
        ({"ctl\x1b\n.npy": b"junk"}, {}, r"'ctl\x1b\n.npy'"),
    ],
)
def test_a_sample_that_cannot_be_decoded_is_named(
    tmp_path: Path, files: Files, options: dict[str, Any], said: str
) -> None:
    error = failure(tmp_path, files, **options)

    assert isinstance(error, BadObject)
    assert said in str(error)
    assert str(error).replace("\n", "").isprintable()


def test_a_null_in_an_unused_field_is_ignored(tmp_path: Path) -> None:
    assert fields(schema(tmp_path, {"1.json": {"a": None, "b": 1}}, fields=("b",))) == {"b": "int64", "__key__": "str"}


def test_a_field_that_no_sample_has_is_a_usage_error(tmp_path: Path) -> None:
    error = failure(tmp_path, ONE, fields=("volume",))

    assert isinstance(error, UsageError)
    assert "unknown field 'volume'; the samples have" in str(error)
    assert "caption" in str(error)


# --- schema ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "described"),
    [
        ([np.zeros((2, 3)), np.ones((2, 3))], "float64 (2, 3)"),
        ([np.zeros((2, 3)), np.zeros((4, 3))], "float64 ragged rank 2"),
        ([np.zeros(0, dtype="i2"), np.zeros(5, dtype=">i2")], "int16 ragged rank 1"),
        ([np.array(1.5), np.array(2.5)], "float64"),
        ([np.asfortranarray(np.zeros((2, 3))), np.zeros((2, 3))], "float64 (2, 3)"),
    ],
)
def test_arrays_of_one_dtype_and_rank_share_a_field(tmp_path: Path, values: list[Any], described: str) -> None:
    found = schema(tmp_path, {f"{at}.npy": value for at, value in enumerate(values)})

    assert fields(found)["npy"] == described


@pytest.mark.parametrize(
    ("values", "described"),
    [([1, 2], "int64"), ([1, 2.5], "float64"), ([0.5, 1], "float64"), ([True, False], "bool"), (["a", ""], "str")],
)
def test_numbers_under_one_json_key_share_a_field(tmp_path: Path, values: list[Any], described: str) -> None:
    files = {f"{at}.json": {"x": value} for at, value in enumerate(values)}

    assert fields(schema(tmp_path, files))["x"] == described
    assert [sample["x"] for sample in samples(tmp_path / "again", files)] == values


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (np.zeros(3), np.zeros(3, dtype="f4")),
        (np.zeros(3), np.zeros((3, 1))),
        (np.zeros(3, dtype="i4"), np.zeros(3, dtype="u4")),
        (np.array(1), np.array(1.5)),
    ],
)
def test_arrays_of_different_dtype_or_rank_are_an_error_naming_both(tmp_path: Path, one: Any, two: Any) -> None:
    error = failure(tmp_path, {"a.npy": one, "b.npy": two})

    assert isinstance(error, BadObject)
    assert "field 'npy' is" in str(error)
    assert "'a'" in str(error)
    assert "'b'" in str(error)


@pytest.mark.parametrize("pair", [(1, "1"), (True, 1), (0.5, False), (1, [1])])
def test_json_values_of_different_types_are_an_error_naming_both(tmp_path: Path, pair: tuple[Any, Any]) -> None:
    error = failure(tmp_path, {"a.json": {"x": pair[0]}, "b.json": {"x": pair[1]}})

    assert "field 'x' is" in str(error)
    assert "'a'" in str(error)
    assert "'b'" in str(error)


@pytest.mark.parametrize(
    ("usual", "late"),
    [
        (0.5, 2**53 + 1),  # float64 cannot represent this number
        (1.5, True),  # would become 1.0 if the probe had only seen numbers
        (7, True),
        (7, False),
    ],
)
def test_a_json_value_that_would_change_is_a_bad_object(tmp_path: Path, usual: Any, late: Any) -> None:
    """The rule also holds for samples that were not probed."""
    files = {"a.json": {"x": usual}, "b.json": {"x": late}, "c.json": {"x": usual}}
    with opened(tmp_path, files) as source:
        found = source.probe(np.array([0, 2])).schema
        with pytest.raises(BadObject, match=r"sample 'b': field 'x' holds (float64|int64), (which cannot|got bool)"):
            list(source.read(np.arange(3), schema=found))
        (piece,) = source.read(np.arange(3), schema=found, skip_bad=True)

    assert [piece.block.sample(at)["x"] for at in range(2)] == [usual, usual]
    assert [each.key for each in piece.skipped] == ["b"]


@pytest.mark.parametrize("number", [0.1, 1e300])
def test_a_json_number_that_a_narrower_array_field_cannot_represent_is_a_bad_object(
    tmp_path: Path, number: float
) -> None:
    """The rule is that of probed samples: otherwise 0.1 would be rounded, and 1e300 would become infinite."""
    files = {"a.x.npy": np.ones((), np.float32), "b.json": {"x": number}, "c.x.npy": np.ones((), np.float32)}
    assert "is float32" in str(failure(tmp_path / "seen", files))
    with opened(tmp_path, files) as source:
        found = source.probe(np.array([0, 2])).schema
        with pytest.raises(BadObject, match=rf"sample 'b': .* float32, which cannot hold {re.escape(str(number))}"):
            list(source.read(np.arange(3), schema=found))


def test_samples_with_other_fields_are_an_error_naming_both_with_a_hint(tmp_path: Path) -> None:
    error = failure(tmp_path, {"scan.v1.npy": np.zeros(1), "scan.v2.npy": np.zeros(1), "other.v1.npy": np.zeros(1)})

    assert isinstance(error, BadObject)
    assert "'other' has v1; 'scan' has v1, v2" in str(error)
    assert "--fields v1" in str(error)
    assert fields(
        schema(tmp_path / "b", {"scan.v1.npy": np.zeros(1), "scan.v2.npy": np.zeros(1)}, stem="last", key=False)
    ) == {"npy": "float64 (1,)"}


def test_with_skip_the_schema_is_that_of_the_majority(tmp_path: Path) -> None:
    files = {f"{n}.npy": np.zeros((2, n)) for n in range(1, 6)}
    files |= {"0.npy": np.zeros(3), "7.npy": b"junk"}  # type: ignore[dict-item]
    with opened(tmp_path, files) as source:
        units = np.arange(source.units)
        found = source.probe(units, skip_bad=True).schema
        pieces = list(source.read(units, schema=found, skip_bad=True))

    assert fields(found) == {"npy": "float64 ragged rank 2", "__key__": "str"}
    assert sum(len(piece.block) for piece in pieces) == 5
    assert {s.key for piece in pieces for s in piece.skipped} == {"0", "7"}
    assert all("\n" not in s.reason for piece in pieces for s in piece.skipped)


def test_if_all_samples_are_bad_the_error_is_that_of_the_first(tmp_path: Path) -> None:
    with opened(tmp_path, {"1.npy": b"junk", "2.npy": b"junk"}) as source, pytest.raises(BadObject, match=r"'1\.npy'"):
        source.probe(np.arange(2), skip_bad=True)


def test_a_later_number_that_does_not_fit_is_named(tmp_path: Path) -> None:
    files = {"a.json": {"x": 1}, "b.json": {"x": 2.5}}
    with opened(tmp_path, files) as source:
        found = source.probe(np.array([0])).schema
        assert fields(found)["x"] == "int64"
        with pytest.raises(BadObject, match=r"sample 'b'.*'x'"):
            list(source.read(np.arange(2), schema=found))


# --- real data ------------------------------------------------------------------------------------------------------


def test_few_large_objects_are_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetool.sources.objects._PROBED_BYTES", 5000)
    files: dict[str, Any] = {f"{n}.x.npy": np.full(100 if n else 3, n, dtype="<f8") for n in range(20)}
    with opened(tmp_path, files) as source:
        units, got = np.arange(1, 20), []
        real = source._store.get
        monkeypatch.setattr(source._store, "get", lambda item: got.append(item.key) or real(item))
        assert source.probe(units).schema["x"].shape == (100,)
        assert len(got) == 8  # the minimum: 5 of 928 bytes would be enough
        got.clear()
        monkeypatch.setattr("cachetool.sources.objects._PROBED_BYTES", 1)
        source.probe(units)
        assert len(got) == 8


def test_other_samples_are_probed_if_the_first_ones_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachetool.sources.objects._PROBED_BYTES", 1)
    files: dict[str, Any] = {f"{n}.x.npy": b"no array" if n < 3 else np.zeros(4, dtype="<f8") for n in range(6)}
    with opened(tmp_path, files) as source:
        assert source.probe(np.arange(6), skip_bad=True).schema["x"].shape == (4,)
        with pytest.raises(BadObject):
            source.probe(np.arange(3), skip_bad=True)


def use(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def test_the_digits_from_s3_equal_those_of_scikit_learn(
    s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sklearn.datasets import load_digits

    use(monkeypatch, s3_env)
    digits = load_digits()
    listing = list_source("s3://digits/train/", tmp_path / "l")
    units = np.random.default_rng(7).permutation(listing.units)

    with contextlib.closing(open_source("s3://digits/train/", tmp_path / "l")) as source:
        found = source.probe(units[:64]).schema
        pieces = list(source.read(units, schema=found, block_bytes=2**16))

    assert (listing.objects, listing.units) == (2 * 1797, 1797)
    assert fields(found) == {"label": "int64", "npy": "float64 (8, 8)", "__key__": "str"}
    np.testing.assert_array_equal(np.concatenate([p.block.columns["npy"] for p in pieces]), digits.images[units])
    np.testing.assert_array_equal(np.concatenate([p.block.columns["label"] for p in pieces]), digits.target[units])
    assert len(pieces) > 10


@pytest.mark.parametrize("decode", [None, "image"])
def test_the_photographs_are_bytes_or_ragged_arrays(
    s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, photos: Path, decode: str | None
) -> None:
    from PIL import Image

    use(monkeypatch, s3_env)
    options = SourceOptions(rename={"png": "image", "jpg": "image"}, decode=decode)
    listing = list_source("s3://photos", tmp_path / "l", options)
    units = np.arange(listing.units)
    with contextlib.closing(open_source("s3://photos", tmp_path / "l", options)) as source:
        found = source.probe(units).schema
        blocks = [piece.block for piece in source.read(units, schema=found)]

    assert fields(found) == {"image": "uint8 ragged rank 3" if decode else "bytes", "__key__": "str"}
    files = {path.name.partition(".")[0]: path for path in photos.iterdir()}
    got = {s["__key__"]: s["image"] for block in blocks for s in map(block.sample, range(len(block)))}
    assert got.keys() == files.keys()
    for key, path in files.items():
        if decode:
            with Image.open(path) as image:
                assert got[key].shape == (image.height, image.width, 3)
        else:
            assert got[key] == path.read_bytes()


# --- failing stores -------------------------------------------------------------------------------------------------


def serving(script: Callable[[Scripted], None], tmp_path: Path) -> contextlib.AbstractContextManager[Any]:
    """Serve 40 samples whose objects are answered by ``script``."""
    index = json.dumps([{"name": f"{n:02d}.txt", "type": "file", "size": 2} for n in range(40)]).encode()

    def answer(handler: Scripted) -> None:
        if handler.path == "/":
            handler.answer(200, index, Content_Type="application/json")
        else:
            script(handler)

    return scripted_server(answer)


@pytest.mark.parametrize(
    ("status", "others", "kind"), [(503, 200, Unreachable), (403, 403, AccessDenied), (500, 500, Unreachable)]
)
def test_a_failing_store_is_an_error_and_never_skipped(
    tmp_path: Path, status: int, others: int, kind: type[CacheToolError]
) -> None:
    failed = threading.Event()

    def script(handler: Scripted) -> None:
        if handler.path == "/25.txt":
            failed.set()
            handler.answer(status)
        else:
            handler.answer(others if failed.is_set() else 200, b"ok")

    with serving(script, tmp_path) as server:
        list_source(server.url, tmp_path / "l")
        limits = Limits(retry=0.3, throttle=0.3)
        with contextlib.closing(open_source(server.url, tmp_path / "l", limits=limits)) as source:
            found = source.probe(np.arange(5)).schema
            with pytest.raises(kind, match=r"\.txt"):
                list(source.read(np.arange(40), schema=found, skip_bad=True))


@pytest.mark.parametrize("status", [403, 500, 502])
@pytest.mark.parametrize("skip_bad", [True, False])
def test_an_object_that_is_refused_while_others_are_served_is_bad(
    tmp_path: Path, status: int, *, skip_bad: bool
) -> None:
    def script(handler: Scripted) -> None:
        handler.answer(status if handler.path == "/25.txt" else 200, b"ok")

    with serving(script, tmp_path) as server:
        list_source(server.url, tmp_path / "l")
        limits = Limits(retry=0.3, throttle=0.3)
        with contextlib.closing(open_source(server.url, tmp_path / "l", limits=limits)) as source:
            found = source.probe(np.arange(5)).schema
            with (
                contextlib.nullcontext()
                if skip_bad
                else pytest.raises(BadObject, match=r"25\.txt.*other objects can be read")
            ):
                pieces = list(source.read(np.arange(40), schema=found, skip_bad=skip_bad))

    if skip_bad:
        skipped = [each for piece in pieces for each in piece.skipped]
        assert [each.key for each in skipped] == ["25"]
        assert str(status) in skipped[0].reason or "denied" in skipped[0].reason
        assert sum(len(piece.block) for piece in pieces) == 39


def test_an_object_that_is_refused_first_is_bad_if_another_is_served_later(tmp_path: Path) -> None:
    def script(handler: Scripted) -> None:
        handler.answer(403 if handler.path == "/00.txt" else 200, b"ok")

    options = SourceOptions(concurrency=1)
    with serving(script, tmp_path) as server:
        list_source(server.url, tmp_path / "l", options)
        with contextlib.closing(open_source(server.url, tmp_path / "l", options)) as source:
            found = Schema((Field("txt", "str"), Field("__key__", "str")))
            pieces = list(source.read(np.arange(2), schema=found, skip_bad=True))

    assert [each.key for piece in pieces for each in piece.skipped] == ["00"]


@pytest.mark.parametrize("refused", [0, 2])
def test_a_file_whose_size_is_refused_while_others_are_served_is_skipped(refused: int, tmp_path: Path) -> None:
    """The index page has no sizes."""
    place = tmp_path / "place"
    place.mkdir()
    for number in range(4):
        with tarfile.open(place / f"{number}.tar", "w") as tar:
            info = tarfile.TarInfo("a.txt")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"%d" % number))
    page = "".join(f'<a href="{number}.tar">{number}</a>' for number in range(4)).encode()

    def script(handler: Scripted) -> None:
        if handler.path == "/":
            handler.answer(200, page, Content_Type="text/html")
        elif handler.path == f"/{refused}.tar":
            handler.answer(403)
        else:
            serve_file(handler, place, "none")

    with scripted_server(script) as server:
        list_source(server.url, tmp_path / "l")
        with contextlib.closing(open_source(server.url, tmp_path / "l")) as source:
            found = source.probe(np.arange(4), skip_bad=True).schema
            pieces = list(source.read(np.arange(4), schema=found, skip_bad=True))

    assert [each.key for piece in pieces for each in piece.skipped] == [f"{refused}.tar#0"]
    assert sum(len(piece.block) for piece in pieces) == 3


def test_a_range_of_a_file_that_is_refused_while_others_are_served_is_skipped_with_its_rows(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for number in range(4):
        np.save(place / f"{number}.npy", np.full((3, 2**15), number, dtype="<f4"))

    def script(handler: Scripted) -> None:
        if handler.path == "/2.npy" and not handler.headers.get("Range", "").startswith("bytes=0-"):
            handler.answer(500)
        else:
            serve_file(handler, place, "json")

    options = SourceOptions(read_as="files")
    with scripted_server(script) as server:
        list_source(server.url, tmp_path / "l", options)
        limits = Limits(retry=0.3, throttle=0.3)
        with contextlib.closing(open_source(server.url, tmp_path / "l", options, limits=limits)) as source:
            found = source.probe(np.arange(2)).schema
            pieces = list(source.read(np.arange(12), schema=found, skip_bad=True))

    assert sorted(each.key for piece in pieces for each in piece.skipped) == [f"2.npy#{row}" for row in range(3)]
    assert sum(len(piece.block) for piece in pieces) == 9


def test_as_many_requests_are_in_flight_as_requested(tmp_path: Path) -> None:
    """A barrier opens only when four requests arrive together; a fifth request never waits for it."""
    gate = threading.Barrier(4, timeout=20)
    now, most, lock = [0], [0], threading.Lock()

    def script(handler: Scripted) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        gate.wait()
        with lock:
            now[0] -= 1
        handler.answer(200, b"ok")

    options = SourceOptions(concurrency=4)
    with serving(script, tmp_path) as server:
        list_source(server.url, tmp_path / "l", options)
        with contextlib.closing(open_source(server.url, tmp_path / "l", options)) as source:
            found = Schema((Field("txt", "str"), Field("__key__", "str")))
            pieces = list(source.read(np.arange(40), schema=found))

    assert sum(len(piece.block) for piece in pieces) == 40
    assert most[0] == 4


# --- options --------------------------------------------------------------------------------------------------------


def test_options_cross_processes_as_json() -> None:
    options = SourceOptions(
        fields=("a", "b"),
        rename={"x": "a"},
        stem=r"(\d+)",
        decode="image",
        resize=(224, 320),
        label_from_folder=True,
        key=False,
        concurrency=3,
    )

    assert SourceOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert SourceOptions.from_json(SourceOptions().to_json()) == SourceOptions()
    assert SourceOptions(stem="last").numbering() != SourceOptions().numbering()
    assert SourceOptions(key=False).numbering() == SourceOptions().numbering()


@pytest.mark.parametrize(
    "wrong",
    [
        {"stem": "("},
        {"decode": "video"},
        {"resize": 224},
        {"decode": "image", "resize": 0},
        {"decode": "image", "resize": "224x"},
        {"decode": "image", "resize": "2x3x4"},
        {"decode": "image", "resize": "-5"},
        {"decode": "image", "resize": (3, 10_001)},
        {"decode": "image", "resize": ()},
        {"concurrency": 0},
        {"concurrency": 5000},
        {"fields": ("a:b",)},
        {"fields": (), "key": False},
        {"rename": {"a": "../b"}},
        {"rename": {"a": "__key__"}},
        {"rename": {"__key__": "a"}},
    ],
)
def test_invalid_options_are_refused_at_creation(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SourceOptions(**wrong)


@pytest.mark.parametrize(
    ("given", "size"),
    [(224, (224, 224)), ("224", (224, 224)), ("224x320", (224, 320)), ([3, 5], (3, 5)), ((1, 10_000), (1, 10_000))],
)
def test_an_image_size_is_a_side_or_height_and_width(given: Any, size: tuple[int, int]) -> None:
    assert SourceOptions(decode="image", resize=given).resize == size


def test_json_that_is_not_options_is_refused() -> None:
    with pytest.raises(UsageError, match="not the options"):
        SourceOptions.from_json({"nope": 1})


def test_the_key_may_be_named_among_the_fields() -> None:
    assert SourceOptions(fields=("a", "__key__")).fields == ("a",)


def test_large_arrays_and_bytes_are_probed_by_their_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachetool.sources.objects._HEADS", 1000)
    files: dict[str, Any] = {}
    for n in range(20):
        files[f"{n}.x.npy"] = np.zeros((200, 3 if n % 7 else 4), dtype=">f8")
        files[f"{n}.raw.bin"] = b"b" * 5000
        files[f"{n}.y.npy"] = np.zeros(2, dtype="<i4")
    with opened(tmp_path, files) as source:
        whole, heads = [], []
        get, get_range = source._store.get, source._store.get_range
        monkeypatch.setattr(source._store, "get", lambda item: whole.append(item.key) or get(item))
        monkeypatch.setattr(
            source._store, "get_range", lambda item, *at: heads.append(item.key) or get_range(item, *at)
        )
        found = source.probe(np.arange(20))
        assert {name.partition(".")[2] for name in whole} == {"y.npy"}
        assert {name.partition(".")[2] for name in heads} == {"x.npy"}
        assert found.schema["x"].shape == (None, None)
        assert 5000 + 200 * 3 * 8 <= found.mean_bytes <= 5000 + 200 * 4 * 8 + 20
        heads.clear()
        pieces = list(source.read(np.arange(20), schema=found.schema))
        assert sum(len(piece.block) for piece in pieces) == 20
        assert not heads


def test_one_large_sample_among_many_small_ones_does_not_distort_the_mean_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachetool.sources.objects._PROBED_BYTES", 5000)
    files: dict[str, Any] = {f"{n:02}.x.npy": np.zeros(9000 if n == 0 else 10, dtype="<f8") for n in range(40)}
    with opened(tmp_path, files) as source:
        assert source.probe(np.arange(40)).mean_bytes < 4000  # 72 kB if only the first ones counted
