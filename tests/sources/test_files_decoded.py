"""``--decode image`` for files whose values do not say by a name what they are."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
from PIL import Image

from cachetool.core.errors import BadObject
from cachetool.sources import SourceOptions
from cachetool.sources.images import decode_image
from tests.sources.files import open_files, read, same, samples

RANDOM = np.random.default_rng(4)


def png(array: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def pictures(*heights: int) -> list[Any]:
    return [RANDOM.integers(0, 255, (height, 6, 3), dtype=np.uint8) for height in heights]


def write(path: Path, images: list[bytes]) -> Path:
    """A dataset of byte lists, as h5py users keep images, beside one of labels and one of plain byte lists."""
    with h5py.File(path, "w") as file:
        for name in ("image", "noise"):
            dataset = file.create_dataset(name, (len(images),), h5py.vlen_dtype(np.uint8))
            for i, raw in enumerate(images):
                dataset[i] = np.frombuffer(raw if name == "image" else raw[1:], dtype=np.uint8)
        file["label"] = np.arange(len(images))
    return path


@pytest.mark.parametrize(("heights", "shape"), [((4, 4, 4), (4, 6, 3)), ((4, 5, 4), (None, None, None))])
def test_lists_of_bytes_that_begin_as_images_are_decoded(
    tmp_path: Path, heights: tuple[int, ...], shape: tuple[int | None, ...]
) -> None:
    """Of one size fixed, of several ragged; other fields stay as they are."""
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


def test_resized_images_are_one_fixed_field(tmp_path: Path) -> None:
    """Whatever their own sizes, in a file whose values have no names as in one that says what they are."""
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


def test_bytes_that_begin_as_images_are_decoded(tmp_path: Path) -> None:
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
    """Its header is sound, so that it is found when it is decoded."""
    whole = [png(array) for array in pictures(30, 30, 30)]
    path = write(tmp_path / "x.h5", [whole[0], whole[1][: len(whole[1]) // 2], whole[2]])

    with pytest.raises(BadObject, match=r"'x\.h5#1': 'image': not an image that can be read"):
        samples(path, decode="image")


def test_without_images_nothing_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", [b"", b"abc", b"de"])

    assert [s["image"].tobytes() for s in samples(path, decode="image")] == [b"", b"abc", b"de"]
