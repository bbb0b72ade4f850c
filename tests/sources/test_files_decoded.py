"""``--decode image`` for files whose values have no names that show their kind."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr
from PIL import Image

from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.images import decode_image
from cachetool.sources.options import SourceOptions
from tests.sources.files import open_files, read, same, samples
from tests.sources.test_files_tfrecord import example
from tests.sources.test_files_tfrecord import write as write_records
from tests.sources.test_images import png_chunk
from tests.sources.test_remote_mixed import pulled

RANDOM = np.random.default_rng(4)


def png(array: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def pictures(*heights: int) -> list[Any]:
    return [RANDOM.integers(0, 255, (height, 6, 3), dtype=np.uint8) for height in heights]


def write(path: Path, images: list[bytes]) -> Path:
    """Write a dataset of byte lists, the usual form of images in h5py, beside one of labels and one of plain byte
    lists.
    """
    with h5py.File(path, "w") as file:
        for name in ("image", "noise"):
            dataset = file.create_dataset(name, (len(images),), h5py.vlen_dtype(np.uint8))
            for i, raw in enumerate(images):
                dataset[i] = np.frombuffer(raw if name == "image" else raw[1:], dtype=np.uint8)
        file["label"] = np.arange(len(images))
    return path


@pytest.mark.parametrize(("heights", "shape"), [((4, 4, 4), (4, 6, 3)), ((4, 5, 4), (None, None, None))])
def test_byte_lists_that_begin_like_images_are_decoded(
    tmp_path: Path, heights: tuple[int, ...], shape: tuple[int | None, ...]
) -> None:
    """Images of one size become a fixed field, images of several sizes a ragged one. Other fields do not change."""
    wanted = pictures(*heights)
    path = write(tmp_path / "x.h5", [png(array) for array in wanted])

    with open_files(path, SourceOptions(decode="image")) as source:
        assert source.schema["image"].shape == shape
        assert source.schema["noise"].shape == (None,)
        assert same(read(source, 1, 2).sample(0)["image"], wanted[1])
    for i, sample in enumerate(samples(path, decode="image")):
        assert same(sample["image"], wanted[i])
        assert sample["noise"].tobytes() == png(wanted[i])[1:]
        assert sample["label"] == i
    assert samples(path)[0]["image"].tobytes() == png(wanted[0])


def test_resized_images_become_one_fixed_field(tmp_path: Path) -> None:
    """The original sizes do not matter. The files either name the kind of their values or do not."""
    images = [png(array) for array in pictures(4, 50, 7)]
    path = write(tmp_path / "x.h5", images)
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, lib_version=0) as env, env.begin(write=True) as txn:
        for i, image in enumerate(images):
            txn.put(b"%d" % i, image)
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for i, image in enumerate(images):
            info = tarfile.TarInfo(f"{i}.image.png")
            info.size = len(image)
            tar.addfile(info, io.BytesIO(image))
    wanted = [decode_image(memoryview(image), (8, 12)) for image in images]

    for name, field, options in (
        ("x.h5", "image", {"decode": "image"}),
        ("x.tar", "image", {"decode": "image"}),
        ("x.lmdb", "value", {"decode": "image"}),
        ("x.lmdb", "value", {"value_format": "image"}),
    ):
        with open_files(tmp_path / name, SourceOptions(resize="8x12", **options)) as source:  # type: ignore[arg-type]
            assert source.schema[field].shape == (8, 12, 3), name
        for sample, array in zip(samples(tmp_path / name, resize="8x12", **options), wanted, strict=True):
            assert same(sample[field], array), name
    assert samples(path, decode="image", resize=3)[0]["noise"].tobytes() == images[0][1:]


def test_bytes_that_begin_like_images_are_decoded(tmp_path: Path) -> None:
    wanted = pictures(3, 7, 5)
    env = lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, lib_version=0)
    with env.begin(write=True) as txn:
        for i, array in enumerate(wanted):
            txn.put(b"%d" % i, png(array))
    env.close()

    found = samples(tmp_path / "x.lmdb", decode="image")

    assert all(same(sample["value"], array) for sample, array in zip(found, wanted, strict=True))
    assert [sample["__key__"] for sample in found] == ["0", "1", "2"]


def test_a_value_that_is_no_image_among_images_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", [png(array) for array in pictures(3, 3)] + [b"junk"])

    with pytest.raises(BadObject, match=r"'x\.h5#2': 'image': not an image that can be read"):
        open_files(path, SourceOptions(decode="image"))
    with (
        pytest.raises(BadObject, match=r"'x\.h5#2': 'image': not an image that can be read"),
        open_files(path, SourceOptions(decode="image", resize="2")) as source,  # type: ignore[arg-type]
    ):
        list(source.blocks())


def test_an_image_whose_pixels_are_damaged_is_named(tmp_path: Path) -> None:
    """The image's header is valid, so the damage is found during decoding."""
    whole = [png(array) for array in pictures(30, 30, 30)]
    path = write(tmp_path / "x.h5", [whole[0], whole[1][: len(whole[1]) // 2], whole[2]])

    with pytest.raises(BadObject, match=r"'x\.h5#1': 'image': not an image that can be read"):
        samples(path, decode="image")


def write_without_images(folder: Path) -> dict[str, Path]:
    """Write bytes, numbers and text of each kind of source, without any image."""
    raw = np.arange(12, dtype="u1").reshape(2, 6)
    places = {name: folder / name for name in ("x.h5", "x.npz", "x.tar", "x.lmdb", "x.tfrecord", "x.zarr", "objects")}
    write(places["x.h5"], [b"", b"abc", b"de"])
    np.savez(places["x.npz"], a=np.arange(4))
    zarr.open_group(places["x.zarr"], mode="w").create_array("a", data=raw)
    write_records(places["x.tfrecord"], *[example(x=b"\x0a\x05\x0a\x03abc")] * 3)
    with lmdb.open(str(places["x.lmdb"]), subdir=False, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"bytes")
    places["objects"].mkdir()
    with tarfile.open(places["x.tar"], "w") as tar:
        for name in ("0.cls", "1.cls", "0.image", "1.image"):
            (places["objects"] / name).write_bytes(b"7")
            if name.endswith("cls"):
                tar.add(places["objects"] / name, name)
    return places


@pytest.mark.parametrize("decode", ["image", "mask"])
def test_decode_image_without_an_image_is_an_error_in_every_kind_of_source(tmp_path: Path, decode: str) -> None:
    """A pull probes a few samples, a conversion reads all."""
    for name, path in write_without_images(tmp_path).items():
        for use in (
            lambda path: samples(path, decode=decode),
            lambda path: pulled(path, tmp_path / f"cache-{path.name}", decode=decode),
        ):
            with pytest.raises(UsageError, match=rf"--decode {decode} finds no image in .*{name}.*; the fields are "):
                use(path)


def test_decode_image_with_fields_that_exclude_the_image_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    for name, body in (("0.jpg.png", png(pictures(3)[0])), ("0.cls", b"1")):
        (tmp_path / "objects" / name).write_bytes(body)
    with pytest.raises(UsageError, match="finds no image in"):
        samples(tmp_path / "objects", decode="image", fields=("cls",))


def mask(values: Any, mode: str) -> bytes:
    """Return a PNG of one channel; in mode P it has the palette of VOC."""
    image = Image.fromarray(values) if mode == "I;16" else Image.fromarray(values.astype("u1"), "L")
    if mode == "P":
        image = image.convert("L")
        palette = Image.new("P", image.size)
        palette.putdata(values.reshape(-1).tolist())
        palette.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, *[255] * (3 * 253)])
        image = palette
    out = io.BytesIO()
    image.convert("1").save(out, "PNG") if mode == "1" else image.save(out, "PNG")
    return out.getvalue()


INDICES = np.array([[0, 1, 2], [2, 1, 0]], dtype="u1")
MASKS = {
    "P": (mask(INDICES, "P"), INDICES),
    "L": (mask(INDICES * 40, "L"), INDICES * 40),
    "1": (mask((INDICES > 0) * 255, "1"), (INDICES > 0).astype("u1")),
    "I;16": (mask(INDICES.astype("u2") * 30000, "I;16"), INDICES.astype("u2") * 30000),
}


@pytest.mark.parametrize("mode", MASKS)
def test_masks_keep_their_numbers_in_every_kind_of_source(tmp_path: Path, mode: str) -> None:
    """Photographs beside the masks become colours. A resize never mixes the numbers of a mask."""
    body, wanted = MASKS[mode]
    photo = pictures(5)[0]
    (tmp_path / "objects").mkdir()
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for at in range(3):
            for name, raw in ((f"{at}.photo.png", png(photo)), (f"{at}.mask.png", body)):
                (tmp_path / "objects" / name).write_bytes(raw)
                tar.add(tmp_path / "objects" / name, name)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, raw in (("photo", png(photo)), ("mask", body)):
            dataset = file.create_dataset(name, (3,), h5py.vlen_dtype(np.uint8))
            for at in range(3):
                dataset[at] = np.frombuffer(raw, np.uint8)
    for name in ("objects", "x.tar", "x.h5"):
        for found in (
            samples(tmp_path / name, decode="mask"),
            pulled(tmp_path / name, tmp_path / name[-2:], decode="mask").values(),
        ):
            assert len(found) == 3
            for sample in found:
                assert same(sample["mask"], wanted), name
                assert same(sample["photo"], photo), name
        larger = samples(tmp_path / name, decode="mask", resize="4x6")[0]
        assert same(larger["mask"], wanted.repeat(2, axis=0).repeat(2, axis=1)), name
        assert larger["photo"].shape == (4, 6, 3)


@pytest.mark.parametrize("options", [{"decode": "mask"}, {"decode": "mask", "value_format": "image"}])
def test_masks_of_a_database_keep_their_numbers_with_and_without_value_format_image(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, lib_version=0) as env, env.begin(write=True) as txn:
        for at in range(3):
            txn.put(b"%d" % at, MASKS["P"][0])
    assert all(same(sample["value"], INDICES) for sample in samples(tmp_path / "x.lmdb", **options))
    resized = samples(tmp_path / "x.lmdb", resize="4x6", **options)
    assert all(same(sample["value"], INDICES.repeat(2, axis=0).repeat(2, axis=1)) for sample in resized)


def test_decode_image_converts_a_palette_to_colours(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "0.png").write_bytes(MASKS["P"][0])
    (found,) = samples(tmp_path / "objects", decode="image")
    assert found["png"].tolist() == [[[0, 0, 0], [128, 0, 0], [0, 128, 0]], [[0, 128, 0], [128, 0, 0], [0, 0, 0]]]


def test_masks_of_several_sizes_are_ragged_and_jpegs_stay_colours(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    for at, size in enumerate((2, 3)):
        (tmp_path / "objects" / f"{at}.png").write_bytes(mask(np.full((size, 4), 7, "u1"), "L"))
        Image.new("L", (4, size), 90).save(tmp_path / "objects" / f"{at}.jpg")
    found = pulled(tmp_path / "objects", tmp_path / "cache", decode="mask")
    assert {key: sample["png"].shape for key, sample in found.items()} == {"0": (2, 4), "1": (3, 4)}
    assert {key: sample["jpg"].shape for key, sample in found.items()} == {"0": (2, 4, 3), "1": (3, 4, 3)}


@pytest.mark.parametrize("name", ["objects", "x.h5"])
def test_masks_among_colour_images_are_an_error_with_advice(tmp_path: Path, name: str) -> None:
    images = [MASKS["L"][0], png(pictures(2)[0])]
    write(tmp_path / "x.h5", images)
    (tmp_path / "objects").mkdir()
    for at, image in enumerate(images):
        (tmp_path / "objects" / f"{at}.image.png").write_bytes(image)
    with pytest.raises(BadObject, match=r"'image' (.|\n)*--fields -image"):
        pulled(tmp_path / name, tmp_path / "cache", decode="mask")
    assert len(pulled(tmp_path / name, tmp_path / "cache", decode="image")) == 2


def test_16_bit_depth_images_are_refused_with_the_option_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "0.png").write_bytes(MASKS["I;16"][0])
    with pytest.raises(BadObject, match="not 8 bits; pull it as bytes, or read its numbers with --decode mask"):
        samples(tmp_path / "objects", decode="image")
    assert same(samples(tmp_path / "objects", decode="mask")[0]["png"], MASKS["I;16"][1])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_images_of_few_bits_keep_their_stored_numbers(bits: int) -> None:
    """Pillow would spread them over 8 bits."""
    numbers = np.arange(16, dtype="u1").reshape(2, 8) & np.uint8(2**bits - 1)
    packed = np.packbits(np.unpackbits(numbers[..., None], axis=2)[..., 8 - bits :].reshape(2, -1), axis=1)
    head = struct.pack(">IIBBBBB", 8, 2, bits, 0, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed))
    whole = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")
    assert same(decode_image(memoryview(whole), masks=True), numbers)
