"""Zarr folders that zarr-python wrote in both formats, read as samples, and codecs that would unpickle."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.options import SourceOptions
from tests.sources.files import file_kind, open_files, outcome, read, same, samples

N = 50
RANDOM = np.random.default_rng(1)
ARRAYS: dict[str, Any] = {
    "scalar": np.arange(N, dtype=np.int32),
    "image": RANDOM.integers(0, 255, (N, 4, 5, 3), dtype=np.uint8),
    "big": np.arange(N * 2, dtype=">i8").reshape(N, 2),
    "flag": np.arange(N) % 2 == 0,
    "complex": (np.arange(N) * 1j).astype(np.complex64),
    "time": np.arange(N).astype("datetime64[s]"),
    "sub/half": np.arange(N * 3, dtype=np.float16).reshape(N, 3),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Silence zarr-python's warnings about data types that version 3 does not specify."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(path: Path, version: int, arrays: dict[str, Any], **how: Any) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version)  # type: ignore[arg-type]
    for name, array in arrays.items():
        chunks = (7, *array.shape[1:])
        created = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks, **how)
        created[:] = array


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("codec", ["default", "none"])
def test_arrays_of_a_group_are_fields(tmp_path: Path, version: int, codec: str) -> None:
    """Every dtype, value by value, with and without compression. Groups are part of field names."""
    write(tmp_path / "x.zarr", version, ARRAYS, **({} if codec == "default" else {"compressors": None}))

    found = samples(tmp_path / "x.zarr")

    assert len(found) == N
    assert sorted(found[0]) == sorted(ARRAYS)
    for i, sample in enumerate(found):
        assert all(same(sample[name], array[i]) for name, array in ARRAYS.items())


@pytest.mark.parametrize(
    "compressor",
    [numcodecs.Blosc("zstd"), numcodecs.GZip(), numcodecs.LZ4(), numcodecs.BZ2(), numcodecs.Zlib(), numcodecs.LZMA()],
    ids=lambda c: c.codec_id,
)
def test_compressors_of_version_2_are_read(tmp_path: Path, compressor: Any) -> None:
    filters = [numcodecs.Delta("i4"), numcodecs.CRC32()]
    array = zarr.create_array(
        tmp_path / "x", shape=(N, 3), chunks=(8, 2), dtype="i4", zarr_format=2, compressors=compressor, filters=filters
    )
    array[:] = values = RANDOM.integers(0, 9, (N, 3)).astype("i4")

    assert all(same(sample["x"], row) for sample, row in zip(samples(tmp_path / "x"), values, strict=True))


def test_shards_of_version_3_are_read(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(N, 6), chunks=(2, 3), shards=(16, 6), dtype="f8", fill_value=7
    )
    values = RANDOM.normal(size=(N, 6))
    array[:32] = values[:32]

    found = samples(tmp_path / "x.zarr")

    assert all(same(sample["x"], row) for sample, row in zip(found[:32], values, strict=False))
    assert all(same(sample["x"], np.full(6, 7.0)) for sample in found[32:])  # chunks that were never written


@pytest.mark.parametrize("version", [2, 3])
def test_texts_become_str_and_bytes(tmp_path: Path, version: Any) -> None:
    from zarr.dtype import VariableLengthBytes

    texts, raws = ["", "one", "zwölf", "日本"], [b"", b"one", b"\xff\0x", b"a b"]
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    group.create_array("text", shape=(4,), dtype=str, chunks=(3,))[:] = np.array(texts, dtype=object)
    group.create_array("raw", shape=(4,), dtype=VariableLengthBytes(), chunks=(3,))[:] = np.array(raws, dtype=object)
    group.create_array("wide", shape=(4,), dtype="U6", chunks=(3,))[:] = np.array(texts)
    group.create_array("fixed", shape=(4,), dtype="S6", chunks=(3,))[:] = np.array(raws)

    for i, sample in enumerate(samples(tmp_path / "x.zarr")):
        assert sample == {"text": texts[i], "raw": raws[i], "wide": texts[i], "fixed": raws[i]}


def test_arrays_that_cannot_be_fields_are_left_out_with_the_reason(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    for name in ("x", "y"):
        group.create_array(name, shape=(5,), dtype="f4")
    group.create_array("mean", shape=(3,), dtype="f4")
    group.create_array("single", shape=(), dtype="f4")
    group.create_array("table", shape=(5,), dtype=[("a", "i4"), ("b", "f8")])
    group.create_array("grid", shape=(5, 2), dtype="U4")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x.zarr" / "link").symlink_to(tmp_path / "elsewhere")

    with open_files(tmp_path / "x.zarr") as source:
        assert source.schema.names == ("x", "y")
        assert dict(source.skipped) == {
            "mean": "its first dimension is 3, not 5",
            "single": "a single value, without rows",
            "table": (
                "dtype [('a', '<i4'), ('b', '<f8')] is a compound type;"
                " save each of its fields (a, b) as a separate array"
            ),
            "grid": "texts in 2 dimensions",
            "link": "a link to a folder; name that folder as a source of its own",
        }


def test_rows_are_read_from_any_position_and_again_after_close(tmp_path: Path) -> None:
    write(tmp_path / "x.zarr", 3, {"image": ARRAYS["image"]})
    source = open_files(tmp_path / "x.zarr")

    for start, stop in [(40, 50), (3, 20), (0, 50), (9, 9)]:
        assert same(read(source, start, stop).columns["image"], ARRAYS["image"][start:stop])
        source.close()


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    """Return bytes that create a folder when they are unpickled. The folder must not exist afterwards."""
    place = tmp_path / "unpickled"
    raw = f"cos\nmkdir\n(V{place}\ntR.".encode()
    yield raw
    assert not place.exists()
    pickle.loads(raw)  # the canary does work
    assert place.exists()


def v2_array(path: Path, **changes: Any) -> None:
    path.mkdir(parents=True)
    about = {
        "zarr_format": 2,
        "shape": [4],
        "chunks": [4],
        "dtype": "|O",
        "fill_value": None,
        "order": "C",
        "compressor": None,
        "filters": None,
        **changes,
    }
    (path / ".zarray").write_text(json.dumps(about))


@pytest.mark.parametrize(
    "how",
    [
        {"filters": [{"id": "pickle", "protocol": 5}]},
        {"filters": [{"id": "zlib", "level": 1}, {"id": "pickle"}], "dtype": "<f8"},
        {"compressor": {"id": "pickle"}, "dtype": "<f8"},
        {"filters": [{"id": "vlen-utf8"}, {"id": "pickle"}]},
    ],
    ids=["filter", "behind a benign one", "compressor", "after text"],
)
def test_arrays_that_would_be_unpickled_are_never_opened(tmp_path: Path, canary: bytes, how: dict[str, Any]) -> None:
    v2_array(tmp_path / "x.zarr" / "evil", **how)
    (tmp_path / "x.zarr" / "evil" / "0").write_bytes(canary)
    zarr.open_group(tmp_path / "x.zarr", mode="a", zarr_format=2).create_array("good", shape=(4,), dtype="f4")

    with open_files(tmp_path / "x.zarr") as source:
        assert source.schema.names == ("good",)
        assert source.skipped == (("evil", "it uses 'pickle', which is not a codec for numbers or text"),)
    with pytest.raises(UsageError, match="'evil' cannot be read: it uses 'pickle'"):
        open_files(tmp_path / "x.zarr", SourceOptions(fields=("evil",)))


@pytest.mark.parametrize("inside", ["codecs", "index_codecs"])
def test_arrays_inside_shards_that_would_be_unpickled_are_never_opened(
    tmp_path: Path, canary: bytes, inside: str
) -> None:
    zarr.create_array(tmp_path / "x.zarr", shape=(8,), chunks=(2,), shards=(8,), dtype="f8", compressors=None)
    about = json.loads((tmp_path / "x.zarr" / "zarr.json").read_text())
    about["codecs"][0]["configuration"][inside].append({"name": "numcodecs.pickle", "configuration": {}})
    (tmp_path / "x.zarr" / "zarr.json").write_text(json.dumps(about))
    (tmp_path / "x.zarr" / "c").mkdir()
    (tmp_path / "x.zarr" / "c" / "0").write_bytes(canary)

    with pytest.raises(BadObject, match=r"nothing in it can be read as samples;\n'x': it uses 'numcodecs\.pickle'"):
        open_files(tmp_path / "x.zarr")


@pytest.mark.parametrize(
    ("shape", "chunks", "message"),
    [
        ([10**12, 1000], [1, 1000], "claims 8.0 PB of samples"),
        ([4, 10**9], [1, 1000], "a row of 'x' claims 8.0 GB in one piece"),
        ([4, 10**5, 10**5], [1, 10**4, 10**4], "a chunk of 'x' claims 800.0 MB in one piece"),
    ],
)
def test_shapes_that_the_folder_cannot_hold_are_refused(
    tmp_path: Path, shape: list[int], chunks: list[int], message: str
) -> None:
    v2_array(tmp_path / "x.zarr", shape=shape, chunks=chunks, dtype="<f8")

    with pytest.raises(BadObject, match=message):
        open_files(tmp_path / "x.zarr")


def test_a_decompression_bomb_in_a_chunk_is_an_error_and_takes_no_memory(tmp_path: Path) -> None:
    """A small file of zeros, compressed repeatedly, would fill the memory when it is decompressed."""
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(8,), chunks=(8,), dtype="f8", compressors=zarr.codecs.ZstdCodec()
    )
    array[:] = np.arange(8)
    chunk = next((tmp_path / "x.zarr" / "c").iterdir())
    chunk.write_bytes(numcodecs.Zstd(level=1).encode(np.zeros(1_500_000_000, dtype=np.uint8)))

    with pytest.raises(BadObject, match=r"x\.zarr: .* decompresses to more than the 1049600 bytes allowed"):
        samples(tmp_path / "x.zarr")


def test_damaged_metadata_and_chunks_are_errors_that_name_the_array(tmp_path: Path) -> None:
    write(tmp_path / "x.zarr", 3, {"scalar": ARRAYS["scalar"]})
    chunk = tmp_path / "x.zarr" / "scalar" / "c" / "3"
    whole = chunk.read_bytes()

    for raw in (whole[:10], b"", b"junk" * 10):
        chunk.write_bytes(raw)
        assert "'scalar', rows" in str(outcome(tmp_path / "x.zarr"))
    chunk.write_bytes(whole)
    for raw in ("", "[]", "{", '{"zarr_format": 3}', '{"zarr_format": 3, "node_type": "array"}', "[" * 10**5):
        (tmp_path / "x.zarr" / "scalar" / "zarr.json").write_text(raw)
        found = outcome(tmp_path / "x.zarr")
        assert isinstance(found, str)
        assert "scalar" in found or "no samples in it" in found


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_truncated_shard_is_an_error_and_never_fill_values(tmp_path: Path, cut: int) -> None:
    """zarr-python treats an empty shard as one that was never written."""
    array = zarr.create_array(tmp_path / "x.zarr", shape=(N, 6), chunks=(2, 6), shards=(16, 6), dtype="f8")
    array[:] = RANDOM.normal(size=(N, 6))
    shard = tmp_path / "x.zarr" / "c" / "1" / "0"
    shard.write_bytes(shard.read_bytes()[:cut])

    assert "rows" in str(outcome(tmp_path / "x.zarr"))


def test_folders_of_a_folder_are_one_input(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / f"{k}.zarr", 3 if k else 2, {"n": np.arange(5) + 5 * k})

    assert [sample["n"] for sample in samples(tmp_path)] == list(range(15))


def test_a_folder_without_metadata_is_no_zarr(tmp_path: Path) -> None:
    write(tmp_path / "x.zarr", 3, {"n": np.arange(5)})
    assert file_kind(tmp_path / "x.zarr") == "zarr"
    shutil.rmtree(tmp_path / "x.zarr" / "n")

    with pytest.raises(BadObject, match=r"x\.zarr: no samples in it"):
        open_files(tmp_path / "x.zarr")
    (tmp_path / "x.zarr" / "zarr.json").unlink()
    assert file_kind(tmp_path / "x.zarr") is None
