"""HDF5 files that h5py wrote, read as samples, and files that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.sources.byte_source import MemoryRanges, SourceFile
from cachetool.sources.hdf5 import open_hdf5
from cachetool.sources.options import SourceOptions
from tests.sources.files import damaged, open_files, outcome, read, same, samples

N = 60
RANDOM = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "scalar": np.arange(N, dtype=np.int32),
    "image": RANDOM.integers(0, 255, (N, 4, 5, 3), dtype=np.uint8),
    "big": np.arange(N * 2, dtype=">i8").reshape(N, 2),
    "big_float": np.arange(N, dtype=">f4"),
    "half": np.arange(N, dtype=np.float16),
    "flag": np.arange(N) % 2 == 0,
    "complex": (np.arange(N) * 1j).astype(np.complex128),
    "empty": np.empty((N, 0), dtype=np.float32),
}


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"chunks": True},
        {"compression": "gzip", "shuffle": True},
        {"compression": "lzf", "fletcher32": True},
        {"maxshape": True},
    ],
    ids=["contiguous", "chunked", "gzip", "lzf", "growing"],
)
def test_hdf5_datasets_are_fields(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Every dtype, contiguous, chunked and compressed, value by value; big-endian becomes little-endian."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, array in ARRAYS.items():
            how = dict(layout) if array.size else {}
            if how.pop("maxshape", None):
                how["maxshape"] = (None, *array.shape[1:])
            file.create_dataset(name, data=array, **how)

    found = samples(tmp_path / "x.h5")

    assert len(found) == N
    assert sorted(found[0]) == sorted(ARRAYS)
    for i, sample in enumerate(found):
        assert all(same(sample[name], array[i]) for name, array in ARRAYS.items())


def test_groups_are_part_of_field_names(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["a/b/c"] = np.arange(3)
        file["a/d"] = np.arange(3) * 2
        file["e"] = np.arange(3) * 3

    assert samples(tmp_path / "x.hdf5")[2] == {"e": 6, "a/d": 4, "a/b/c": 2}
    assert samples(tmp_path / "x.hdf5", fields=("c", "e"), rename={"a/b/c": "c"})[1] == {"c": 1, "e": 3}


def test_texts_and_variable_length_values_are_read(tmp_path: Path) -> None:
    """Variable-length and fixed-length text in both character sets, and variable-length numbers."""
    texts = ["", "one", "zwölf", "日本", "x" * 300]
    raws = [b"", b"one", b"\xff\xfe", b"a b", b"y" * 300]
    lists = [np.arange(k, dtype=np.float32) for k in (3, 0, 1, 7, 2)]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("text", data=texts, dtype=h5py.string_dtype("utf-8"))
        file.create_dataset("text_chunked", data=texts, dtype=h5py.string_dtype("utf-8"), chunks=(2,))
        file.create_dataset("raw", (5,), dtype=h5py.string_dtype("ascii"))[:] = raws
        fixed = np.array([t.encode() for t in texts]).astype(h5py.string_dtype("utf-8", 300))
        file.create_dataset("fixed", data=fixed)
        file.create_dataset("fixed_raw", data=np.array(raws, dtype="S300"))
        vlen = file.create_dataset("list", (5,), dtype=h5py.vlen_dtype(np.float32))
        for i, values in enumerate(lists):
            vlen[i] = values

    with open_files(tmp_path / "x.h5") as source:
        assert source.schema["list"].shape == (None,)
    for i, sample in enumerate(samples(tmp_path / "x.h5")):
        assert sample["text"] == sample["text_chunked"] == sample["fixed"] == texts[i]
        assert sample["raw"] == sample["fixed_raw"] == raws[i]
        assert same(sample["list"], lists[i])


def test_datasets_that_cannot_be_fields_are_left_out_with_the_reason(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(5)
        file["y"] = np.arange(5)
        file["mean"] = np.arange(3)
        file["version"] = 7
        file["nothing"] = h5py.Empty("f4")
        file["table"] = np.zeros(5, dtype=[("a", "i4"), ("b", "f8")])
        file.create_dataset("big_lists", (5,), dtype=h5py.vlen_dtype(np.dtype(">i4")))
        file["kind"] = np.zeros(5, dtype=h5py.enum_dtype({"cat": 0, "dog": 1}))
        file["pointer"] = np.array([file["x"].ref] * 5, dtype=h5py.ref_dtype)
        file["grid"] = np.array([["a", "b"]] * 5, dtype=h5py.string_dtype())
        file["bad:name"] = np.arange(5)
        h5py.h5d.create(file.id, b"caf\xe9", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((5,)))
        file["soft"] = h5py.SoftLink("/x")
        file["again"] = file["x"]
        file["type"] = np.dtype("f8")
        file.create_dataset("opaque", (5,), dtype=h5py.opaque_dtype(np.dtype("V4")))

    with open_files(tmp_path / "x.h5") as source:
        skipped = dict(source.skipped)
        assert len(source.schema) == 2  # one of "x" and "again", which are the same dataset
        assert "y" in source.schema
    reasons = {
        "mean": "first dimension is 3, not 5",
        "version": "single value",
        "nothing": "empty",
        "table": "is a compound type; save each of its fields",
        "big_lists": "big-endian numbers, which h5py reads wrongly",
        "kind": "enumeration",
        "pointer": "references",
        "grid": "2 dimensions",
        "bad:name": "cannot be used",
        "caf\\xe9": "not UTF-8",
        "soft": "soft link",
        "type": "named type",
        "opaque": "cannot be stored",
    }
    assert all(reason in skipped[name] for name, reason in reasons.items()), skipped
    assert len(skipped) == len(reasons) + 1


def test_an_array_type_adds_its_dimensions(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", (4,), dtype=np.dtype(("f4", (2, 3))))
        for i in range(4):
            dataset[i] = values[i]

    assert all(same(sample["x"], value) for sample, value in zip(samples(tmp_path / "x.h5"), values, strict=True))


def test_rows_are_read_from_any_position_and_again_after_close(tmp_path: Path) -> None:
    values = RANDOM.normal(size=(1000, 30))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(64, 7), compression="gzip")
        file.create_dataset("n", data=np.arange(1000))
    source = open_files(tmp_path / "x.h5")

    for start, stop in [(900, 1000), (3, 70), (0, 1000), (500, 500)]:
        assert same(read(source, start, stop).columns["x"], values[start:stop])
        source.close()
    source.close()


def test_each_chunk_is_decompressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than a chunk are slices of kept rows, which are not read again."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4000).reshape(1000, 4), chunks=(100, 4), compression="gzip")
    asked: list[tuple[int, int]] = []
    original = h5py.Dataset.__getitem__

    def spy(self: Any, at: Any, *rest: Any) -> Any:
        asked.append((at.start, at.stop))
        return original(self, at, *rest)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    body = memoryview((tmp_path / "x.h5").read_bytes())

    with open_hdf5(SourceFile(Path("x.h5"), len(body), MemoryRanges(body)), SourceOptions()) as source:
        assert sum(len(source.read(at, at + 20)) for at in range(0, 1000, 20)) == 1000
    assert asked == [(at, at + 100) for at in range(0, 1000, 100)]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Return bytes of this machine that no file may present as its samples."""
    path = tmp_path / "secret"
    path.write_bytes(b"root:x:0:0" * 100)
    return path


def hostile(path: Path, secret: Path, how: str) -> None:
    """Write an HDF5 file whose dataset ``evil`` takes its bytes from another file."""
    with h5py.File(path, "w") as file:
        file["good"] = np.arange(10)
        if how == "external storage":
            file.create_dataset("evil", (10,), "S10", external=[(str(secret), 0, 100)])
        elif how == "external link":
            with h5py.File(path.with_name("other.h5"), "w") as other:
                other["x"] = np.arange(10)
            file["evil"] = h5py.ExternalLink(str(path.with_name("other.h5")), "/x")
        elif how == "external group":
            with h5py.File(path.with_name("other.h5"), "w") as other:
                other["g/x"] = np.arange(10)
            file["evil"] = h5py.ExternalLink(str(path.with_name("other.h5")), "/g")
        elif how == "virtual":
            with h5py.File(path.with_name("other.h5"), "w") as other:
                other["x"] = np.arange(10)
            layout = h5py.VirtualLayout((10,), "i8")
            layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "x", (10,))
            file.create_virtual_dataset("evil", layout)
        else:
            file["hidden/evil"] = h5py.ExternalLink(str(secret), "/")


@pytest.mark.parametrize("how", ["external storage", "external link", "external group", "virtual", "in a group"])
def test_external_data_is_refused(tmp_path: Path, secret: Path, how: str) -> None:
    hostile(tmp_path / "x.h5", secret, how)

    with pytest.raises(BadObject, match=r"x\.h5: '(hidden/)?evil' .* which is refused;\nchoose other fields"):
        open_files(tmp_path / "x.h5")
    assert samples(tmp_path / "x.h5", fields=("good",))[3] == {"good": 3}


def test_a_soft_link_to_a_link_into_another_file_is_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.arange(4)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["links/a"] = h5py.ExternalLink("other.h5", "/")
        file["b"] = h5py.SoftLink("/links/a/x")
        file["good"] = np.arange(4)

    with open_files(tmp_path / "x.h5", SourceOptions(fields=("good",))) as source:
        assert source.schema.names == ("good",)
    with pytest.raises(UsageError, match="'b' cannot be read: a soft link"):
        open_files(tmp_path / "x.h5", SourceOptions(fields=("b",)))


def test_cyclic_groups_are_read_without_a_loop(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["g/x"] = np.arange(4)
        file["g/up"] = file["/"]
        file["g/self"] = file["g"]

    with open_files(tmp_path / "x.h5") as source:
        assert source.schema.names == ("g/x",)
        assert dict(source.skipped) == {"g/up": "the same as '/'", "g/self": "the same as 'g'"}


def test_a_dataset_with_two_names_is_one_field_unless_both_are_requested(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/b"] = np.arange(4)
        file["hl"] = file["a/b"]

    with open_files(tmp_path / "x.h5") as source:
        assert (source.schema.names, source.skipped) == (("hl",), (("a/b", "the same as 'hl'"),))
    for names in (("a/b",), ("a/b", "hl")):
        with open_files(tmp_path / "x.h5", SourceOptions(fields=names)) as source:
            assert source.schema.names == names
            assert all(same(read(source, 0, 4).columns[name], np.arange(4)) for name in names)


@pytest.mark.parametrize(
    ("shape", "chunks", "message"),
    [
        ((10**12, 1000), (1, 1000), "claims 8.0 PB of samples"),
        ((4, 10**9), (1, 1000), "a row of 'x' claims 8.0 GB in one piece"),
        ((4, 10**5, 10**5), (1, 10**4, 10**4), "a chunk of 'x' claims 800.0 MB in one piece"),
    ],
)
def test_shapes_that_the_file_cannot_hold_are_refused(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], message: str
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", shape, "f8", chunks=chunks)
        file["good"] = np.arange(4)

    with pytest.raises(BadObject, match=message):
        open_files(tmp_path / "x.h5", SourceOptions(rows=shape[0]))
    assert len(samples(tmp_path / "x.h5", fields=("good",))) == 4


def test_a_missing_filter_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["good"] = np.arange(4)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(32999, h5py.h5z.FLAG_OPTIONAL, (1,))
        h5py.h5d.create(file.id, b"packed", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((4,)), plist)

    with open_files(tmp_path / "x.h5") as source:
        assert source.skipped == (("packed", "compressed by filter 32999, which this HDF5 library does not have"),)


def test_files_of_a_folder_are_one_input(tmp_path: Path) -> None:
    """Files are read in the order of names. Arrays whose sizes differ between files become ragged."""
    for k, width in enumerate((2, 3)):
        with h5py.File(tmp_path / f"part-{k}.h5", "w") as file:
            file["x"] = np.full((5, width), k, dtype=np.float32)
            file["n"] = np.arange(5) + 5 * k
    (tmp_path / "README.md").write_text("hello")

    found = samples(tmp_path)

    assert [sample["n"] for sample in found] == list(range(10))
    assert [sample["x"].shape for sample in found] == [(2,)] * 5 + [(3,)] * 5
    with open_files(tmp_path) as source:
        assert source.skipped == (("README.md", "describes other files"),)
        assert read(source, 3, 8).sample(4)["x"].tolist() == [1, 1, 1]


def test_incompatible_files_of_a_folder_are_refused(tmp_path: Path) -> None:
    for k, (name, dtype) in enumerate([("x", "f4"), ("x", "f8"), ("y", "f4")]):
        with h5py.File(tmp_path / f"{k}.h5", "w") as file:
            file["n"] = np.arange(5)
            file[name] = np.arange(5, dtype=dtype)

    with pytest.raises(BadObject, match=r"field 'x' is float32 in .*0\.h5 but float64 in .*1\.h5"):
        open_files(tmp_path)
    (tmp_path / "1.h5").unlink()
    with pytest.raises(BadObject, match=r"0\.h5 and .*2\.h5 differ in their fields: x, y"):
        open_files(tmp_path)
    assert len(samples(tmp_path, fields=("n",))) == 10


@pytest.mark.parametrize("layout", [{}, {"chunks": (8, 3), "compression": "gzip", "fletcher32": True}])
def test_damaged_files_are_errors_that_name_them(
    tmp_path: Path, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncations are detected, and no file keeps its reader busy forever. With checksums no value is wrong."""
    monkeypatch.setattr("cachetool.sources.guard.CPU_SECONDS", 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(96).reshape(32, 3), **layout)
        file.create_dataset("t", data=[f"text {i}" for i in range(32)])

    for how, path in damaged(tmp_path / "x.h5", cuts=6, flips=14):
        found = outcome(path)
        assert isinstance(found, str) or not how.startswith("cut"), how


def test_a_file_whose_reading_never_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit in the size of a text is flipped: HDF5 1.14 then searches for the next text forever."""
    monkeypatch.setattr("cachetool.sources.guard.CPU_SECONDS", 1)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("t", data=[f"text {i}" for i in range(32)])
    raw = bytearray((tmp_path / "x.h5").read_bytes())
    raw[raw.index(b"text 20") - 7] ^= 4
    (tmp_path / "x.h5").write_bytes(raw)

    with pytest.raises(BadObject, match=r"x\.h5: reading it does not end, so the file is damaged"):
        samples(tmp_path / "x.h5")


def test_a_file_that_is_not_hdf5_is_refused(tmp_path: Path) -> None:
    (tmp_path / "y.h5").write_bytes(b"junk")

    with pytest.raises(BadObject, match=r"y\.h5 is not a whole HDF5 file"):
        open_files(tmp_path / "y.h5")
    with pytest.raises(NotFound):
        open_files(tmp_path / "z.h5")
