"""``--decode image`` for files of rows and records on a store works as if each image were an object."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import zarr
from PIL import Image

import cachetool
from cachetool.core.block import Block
from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.images import decode_image
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source
from tests.servers import Http, folder_server
from tests.sources.test_remote import everything, everything_whole, keys, source_of

COUNT = 40


def picture(number: int, height: int) -> bytes:
    """Return a PNG whose pixels follow from its number."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, 6, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


ONE_SIZE = [picture(number, 5) for number in range(COUNT)]
SEVERAL = [picture(number, 3 + number % 4) for number in range(COUNT)]


def write_parquet(folder: Path, images: list[bytes]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"image": images, "label": np.arange(len(images)), "other": [image[1:] for image in images]})
    parquet.write_table(table, folder / "x.parquet", row_group_size=7)
    return "x.parquet"


def write_hdf5(folder: Path, images: list[bytes]) -> str:
    with h5py.File(folder / "x.h5", "w") as file:
        for name in ("image", "other"):
            dataset = file.create_dataset(name, (len(images),), h5py.vlen_dtype(np.uint8), chunks=(7,))
            for at, raw in enumerate(images):
                dataset[at] = np.frombuffer(raw if name == "image" else raw[1:], dtype=np.uint8)
        file.create_dataset("label", data=np.arange(len(images)), chunks=(7,))
    return "x.h5"


def write_zarr(folder: Path, images: list[bytes]) -> str:
    """Write version 2, whose filter for variable-length values every reader knows."""
    group = zarr.open_group(folder / "x.zarr", mode="w", zarr_format=2)
    for name in ("image", "other"):
        array = group.create_array(name, shape=(len(images),), chunks=(7,), dtype=zarr.dtype.VariableLengthBytes())
        array[:] = np.array([image if name == "image" else image[1:] for image in images], dtype=object)
    group.create_array("label", data=np.arange(len(images)), chunks=(7,))
    return "x.zarr"


def write_lmdb(folder: Path, images: list[bytes]) -> str:
    with lmdb.open(str(folder / "x.lmdb"), subdir=False, lib_version=0) as env, env.begin(write=True) as txn:
        for number, image in enumerate(images):
            txn.put(b"%03d" % number, image)
    (folder / "x.lmdb-lock").unlink()
    return "x.lmdb"


def write_tfrecord(folder: Path, images: list[bytes], *, index: bool = False) -> str:
    tfrecord = pytest.importorskip("tfrecord")
    path, lines, at = folder / "x.tfrecord", [], 0
    writer = tfrecord.TFRecordWriter(str(path))
    for number, image in enumerate(images):
        writer.write({"image": (image, "byte"), "label": (number, "int"), "other": (image[1:], "byte")})
        writer.file.flush()
        lines.append(f"{at} {path.stat().st_size - at}\n")
        at = path.stat().st_size
    writer.close()
    if index:
        (folder / "x.tfrecord.idx").write_text("".join(lines))
    return "x.tfrecord"


def write_indexed_tfrecord(folder: Path, images: list[bytes]) -> str:
    return write_tfrecord(folder, images, index=True)


BY_ROWS = [write_parquet, write_hdf5, write_zarr, write_indexed_tfrecord]
WHOLE = [write_lmdb, write_tfrecord]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Http]:
    (tmp_path / "place").mkdir()
    with folder_server(tmp_path / "place", index="json") as found:
        yield found


@pytest.mark.parametrize(
    ("images", "shape"), [(ONE_SIZE, (5, 6, 3)), (SEVERAL, (None,) * 3)], ids=["one size", "several sizes"]
)
@pytest.mark.parametrize("write", [*BY_ROWS, *WHOLE])
def test_bytes_that_hold_images_become_arrays(
    tmp_path: Path, server: Http, write: object, images: list[bytes], shape: tuple[int | None, ...]
) -> None:
    """Images of one size in the first draws become a fixed field, otherwise a ragged one. Other bytes do not change."""
    name = write(tmp_path / "place", images)  # type: ignore[operator]
    with source_of(server.url, tmp_path / "listing", decode="image") as source:
        if write in WHOLE:
            block, draws = everything_whole(source), np.arange(COUNT)
        else:
            draws = source.order(seed=1, pass_number=0)[np.arange(COUNT)]
            schema = source.probe(draws).schema
            pieces = list(source.read(draws, schema=schema, block_bytes=2000))
            assert len(pieces) > 3, "arrays are larger than what they come from"
            block = Block.concat([piece.block for piece in pieces])
    field = "value" if name == "x.lmdb" else "image"

    assert sorted(draws.tolist()) == list(range(COUNT))
    assert block.schema[field].shape == shape
    for at, draw in enumerate(draws.tolist()):
        np.testing.assert_array_equal(block.columns[field][at], decode_image(memoryview(images[draw])))
        if name != "x.lmdb":
            assert block.columns["label"][at] == draw
            assert bytes(block.columns["other"][at]) == images[draw][1:]


@pytest.mark.parametrize("write", [write_parquet, write_lmdb])
def test_images_can_be_resized_to_one_size_and_pulled(tmp_path: Path, server: Http, write: object) -> None:
    name = write(tmp_path / "place", SEVERAL)  # type: ignore[operator]
    field = "value" if name == "x.lmdb" else "image"
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        result = cache.pull(f"{server.url}/{name}", all=True, decode="image", resize="4x8", shard_size="2kB")
        again = cache.pull(f"{server.url}/{name}", all=True)
        assert cache.schema()[field].shape == (4, 8, 3)
    assert (result.samples, again.samples) == (COUNT, 0)
    assert result.shards > 1 or name == "x.lmdb"


@pytest.mark.parametrize("bad", [b"junk", SEVERAL[1][:-40], picture(0, 9)], ids=["no image", "cut", "another size"])
@pytest.mark.parametrize("write", [write_parquet, write_hdf5])
def test_a_value_that_is_no_image_is_named_or_skipped_alone(
    tmp_path: Path, server: Http, write: object, bad: bytes
) -> None:
    """The bad value comes after the first draws, which decided the schema."""
    name = write(tmp_path / "place", [*ONE_SIZE[:-1], bad])  # type: ignore[operator]
    with source_of(server.url, tmp_path / "listing", decode="image") as source:
        schema = source.probe(np.arange(10)).schema
        draws = np.arange(COUNT)[::-1].copy()
        with pytest.raises(BadObject, match=rf"{name}#{COUNT - 1}': 'image': "):
            list(source.read(draws, schema=schema))
        pieces = list(source.read(draws, schema=schema, skip_bad=True))
    block = Block.concat([piece.block for piece in pieces])

    assert [skip.key for piece in pieces for skip in piece.skipped] == [f"{name}#{COUNT - 1}"]
    assert [skip.draw for piece in pieces for skip in piece.skipped] == [0]
    assert np.concatenate([piece.draws for piece in pieces]).tolist() == list(range(1, COUNT))
    assert keys(block) == [f"{name}#{draw}" for draw in draws[1:]]
    assert block.columns["label"].tolist() == draws[1:].tolist()
    np.testing.assert_array_equal(block.columns["image"][0], decode_image(memoryview(ONE_SIZE[COUNT - 2])))


def test_an_archive_with_a_bad_image_is_skipped_as_a_whole(tmp_path: Path, server: Http) -> None:
    """The archive's samples are drawn together, so none of them is stored alone."""
    for number, images in enumerate((ONE_SIZE, [*ONE_SIZE[:5], b"junk"])):
        made = write_lmdb(tmp_path / "place", images)
        (tmp_path / "place" / made).rename(tmp_path / "place" / f"{number}.lmdb")
    with source_of(server.url, tmp_path / "listing", decode="image") as source:
        schema = source.probe(np.arange(1)).schema
        pieces = list(source.read(np.array([1, 0]), schema=schema, skip_bad=True))

    assert [skip.draw for piece in pieces for skip in piece.skipped] == [0]
    assert np.concatenate([piece.draws for piece in pieces]).tolist() == [1] * COUNT


def test_decode_image_of_files_without_images_is_an_error(tmp_path: Path, server: Http) -> None:
    write_parquet(tmp_path / "place", [b"", b"abc", b"de"])
    with (
        source_of(server.url, tmp_path / "listing", decode="image") as source,
        pytest.raises(
            UsageError, match=r"--decode image finds no image in http.*; the fields are image \(bytes\), label"
        ),
    ):
        everything(source, np.arange(3))


def test_decode_image_of_rows_of_numbers_is_an_error(tmp_path: Path, server: Http) -> None:
    np.save(tmp_path / "place" / "x.npy", np.zeros((3, 5), dtype=np.uint8))
    with pytest.raises(UsageError, match=r"the rows of \.npy files are numbers"):
        list_source(f"{server.url}/x.npy", tmp_path / "listing", SourceOptions(decode="image"))
