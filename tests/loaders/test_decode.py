"""Fields of JPEG images that the feeders decode: pixels, boxes, order of steps, and errors."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_images

from cachetool.bench.samples import fill
from cachetool.cache import CacheDir, open_cache
from cachetool.core.block import Block
from cachetool.core.errors import CacheToolError, CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.crop import uniforms
from cachetool.loaders.feed import jpeg
from cachetool.loaders.feed.crops import DRAWS, centre_boxes, random_boxes
from cachetool.loaders.numpy import JPEG, Loader
from cachetool.sources.images import decode_image

SCHEMA = Schema((Field("__key__", "str"), Field("image", "bytes"), Field("number", "<i8")))
PHOTOS = [Image.fromarray(photo) for photo in load_sample_images().images]
RANDOM = JPEG(size=32, crop="random", flip=True)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, quality=90, **options)
    return out.getvalue()


def photo(number: int, size: tuple[int, int] = (100, 75)) -> bytes:
    """Return a photograph of this width and height, another one for each number."""
    image = PHOTOS[number % len(PHOTOS)]
    box = (number * 7 % 120, number * 5 % 90, 520 + number * 7 % 120, 337 + number * 5 % 90)
    return encoded(image.crop(box).resize(size, Image.Resampling.LANCZOS))


def put(cache: CacheDir, images: list[bytes], first: int = 0) -> None:
    samples = [{"__key__": f"photo {n}", "image": data, "number": n} for n, data in enumerate(images, first)]
    fill(cache, "lmdb", Block.from_samples(SCHEMA, samples), 1)


@pytest.fixture
def photos(tmp_path: Path) -> list[bytes]:
    """Create a cache of two shards of twelve photographs and return these."""
    images = [photo(number) for number in range(24)]
    with open_cache(tmp_path / "photos", max_size="50MB") as cache:
        put(cache, images[:12])
        put(cache, images[12:], 12)
    return images


def read(place: Path, decode: Any = RANDOM, **options: Any) -> dict[int, Any]:
    """Return the image of each sample of the next epoch, by its number."""
    options = {"batch_size": 5, "workers": 0, "min_samples": 1, "decode": {"image": decode}, **options}
    with Loader(place, **options) as loader:
        return by_number(loader)


def by_number(batches: Any) -> dict[int, Any]:
    return {int(n): image.copy() for b in batches for n, image in zip(b["number"], b["image"], strict=True)}


def same(a: dict[int, Any], b: dict[int, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[number], b[number]) for number in a)


def only(tmp_path: Path, *images: bytes) -> Path:
    """Return the place of a cache with these images."""
    with open_cache(tmp_path / "only", max_size="50MB") as cache:
        put(cache, list(images))
    return tmp_path / "only"


def difference(image: Any, data: bytes, box: tuple[float, ...] | None = None) -> float:
    """Return the mean difference from Pillow's antialiased resize of a box of the image."""
    height, width, _ = image.shape
    with Image.open(io.BytesIO(data)) as opened:
        expected = opened.convert("RGB").resize((width, height), Image.Resampling.BILINEAR, box=box)
    return float(np.abs(image.astype(int) - np.asarray(expected)).mean())


# -- pixels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_images_in_stored_size_have_the_pixels_of_a_pull_that_decodes(
    workers: int, tmp_path: Path, photos: list[bytes]
) -> None:
    images = read(tmp_path / "photos", "jpeg", workers=workers)

    assert same(images, {number: decode_image(memoryview(data)) for number, data in enumerate(photos)})


@pytest.mark.parametrize("stored", [(500, 375), (640, 427), (1601, 1203), (3333, 2501)])
@pytest.mark.parametrize("size", [(224, 224), (64, 100), (150, 61)])
def test_a_resized_image_is_near_the_antialiased_resize_of_pillow(
    stored: tuple[int, int], size: tuple[int, int], tmp_path: Path
) -> None:
    data = photo(0, stored), photo(1, stored)
    images = read(only(tmp_path, *data), JPEG(size=size))

    assert {image.shape for image in images.values()} == {(*size, 3)}
    assert max(difference(images[number], data[number]) for number in images) < 2


@pytest.mark.parametrize("stored", [(500, 375), (375, 501), (2001, 1333)])
def test_a_box_in_the_middle_is_near_that_of_pillow(stored: tuple[int, int], tmp_path: Path) -> None:
    data = photo(0, stored)
    image = read(only(tmp_path, data), JPEG(size=100, crop="center", crop_pct=0.875))[0]

    side = round(0.875 * min(stored))
    left, top = (stored[0] - side) // 2, (stored[1] - side) // 2
    assert difference(image, data, (left, top, left + side, top + side)) < 2


def test_a_large_image_is_decoded_at_a_part_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def recorded(*args: Any, **options: Any) -> Any:
        decoded.append(pixels := simplejpeg.decode_jpeg(*args, **options))
        return pixels

    monkeypatch.setattr(jpeg, "simplejpeg", type("", (), {**vars(simplejpeg), "decode_jpeg": staticmethod(recorded)}))
    place = only(tmp_path, photo(0, (1601, 1203)))
    for side in (1000, 400, 200, 100, 50):
        read(place, JPEG(size=side))

    assert [pixels.shape[:2] for pixels in decoded] == [
        *[(1203, 1601), (602, 801), (301, 401), (151, 201), (151, 201)],
    ]  # the last one is more than 1/8


def test_channels_may_come_first_and_gray_has_one(tmp_path: Path, photos: list[bytes]) -> None:
    place = tmp_path / "photos"
    for options in ({}, {"size": 40}, {"size": 40, "crop": "random", "flip": True}):
        plain, planes = (read(place, JPEG(**options, layout=layout)) for layout in ("HWC", "CHW"))
        assert same({n: image.transpose(2, 0, 1) for n, image in plain.items()}, planes)
        gray, plane = (read(place, JPEG(**options, grayscale=True, layout=layout)) for layout in ("HWC", "CHW"))
        assert same({n: image.transpose(2, 0, 1) for n, image in gray.items()}, plane)
        weights = [0.299, 0.587, 0.114]
        assert max(np.abs(plain[n] @ weights - gray[n][..., 0]).mean() for n in plain) < 2


@pytest.mark.parametrize("form", ["progressive", "gray", "cmyk", "full colour"])
def test_other_forms_of_jpeg_have_the_pixels_of_a_pull_that_decodes(form: str, tmp_path: Path) -> None:
    image = PHOTOS[0].resize((200, 150))
    data = {
        "progressive": lambda: encoded(image, progressive=True),
        "gray": lambda: encoded(image.convert("L")),
        "cmyk": lambda: encoded(image.convert("CMYK")),
        "full colour": lambda: encoded(image, subsampling=0),
    }[form]()
    place = only(tmp_path, data)

    assert np.array_equal(read(place, "jpeg")[0], decode_image(memoryview(data)))
    assert difference(read(place, JPEG(size=60))[0], data) < 2
    assert read(place, JPEG(size=60, grayscale=True))[0].shape == (60, 60, 1)


def test_bytes_between_segments_are_no_damage(tmp_path: Path) -> None:
    data = photo(0)
    at = data.index(b"\xff\xdb")
    stray = data[:at] + bytes(12) + data[at:]

    assert np.array_equal(read(only(tmp_path, stray), "jpeg")[0], decode_image(memoryview(data)))


def test_images_of_a_few_pixels_are_enlarged(tmp_path: Path) -> None:
    data = [encoded(Image.new("RGB", size, (200, 100, 50))) for size in ((1, 1), (1, 300), (700, 2), (9, 9))]
    place = only(tmp_path, *data)
    for options in ({}, {"crop": "random"}, {"crop": "center"}):
        images = read(place, JPEG(size=(20, 30), **options))
        assert max(np.abs(image.astype(int) - (200, 100, 50)).max() for image in images.values()) < 5


# -- random boxes ------------------------------------------------------------------------------------------------------


def test_random_images_are_the_same_for_any_number_of_workers_and_ranks(tmp_path: Path, photos: list[bytes]) -> None:
    place = tmp_path / "photos"
    expected = read(place)
    for workers in (1, 3):
        assert same(read(place, workers=workers), expected)
    ranks: dict[int, Any] = {}
    for rank in range(2):
        ranks |= read(place, rank=rank, world_size=2, run=f"run {rank}")
    assert same(ranks, expected)
    assert not same(read(place, seed=1), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_images_change_with_the_epoch_and_are_the_same_after_a_resume(
    workers: int, tmp_path: Path, photos: list[bytes]
) -> None:
    options: dict[str, Any] = {"batch_size": 5, "workers": workers, "decode": {"image": RANDOM}}
    with Loader(tmp_path / "photos", **options) as loader:
        first, second = by_number(loader), by_number(loader)
    assert not any(np.array_equal(first[number], second[number]) for number in first)

    with Loader(tmp_path / "photos", **options) as loader:
        by_number(loader)
        batches = iter(loader)
        before = by_number([next(batches), next(batches)])
        state = loader.state_dict()
    with Loader(tmp_path / "photos", **options) as loader:
        loader.load_state_dict(state)
        assert same(before | by_number(loader), second)


def test_every_second_image_is_mirrored(tmp_path: Path, photos: list[bytes]) -> None:
    plain, mirrored = (read(tmp_path / "photos", JPEG(size=40, flip=flip)) for flip in (False, True))
    flipped = {n for n in plain if not np.array_equal(plain[n], mirrored[n])}

    assert all(np.array_equal(plain[n][:, ::-1], mirrored[n]) for n in flipped)
    assert 6 <= len(flipped) <= 18


def test_fields_of_the_same_options_get_the_same_boxes(tmp_path: Path) -> None:
    schema = Schema((Field("left", "bytes"), Field("right", "bytes")))
    samples = [{"left": photo(n), "right": photo(n)} for n in range(6)]
    with open_cache(tmp_path / "pairs", max_size="50MB") as cache:
        fill(cache, "hdf5", Block.from_samples(schema, samples), 1)
    with Loader(tmp_path / "pairs", batch_size=6, workers=0, decode={"left": RANDOM, "right": RANDOM}) as loader:
        (batch,) = loader

    assert np.array_equal(batch["left"], batch["right"])


def test_a_random_box_is_cut_out_of_the_image_and_resized(tmp_path: Path) -> None:
    """The colours of this image say where each pixel was."""
    ramp = np.zeros((256, 256, 3), dtype=np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(256), np.arange(256)[:, None]
    data = encoded(Image.fromarray(ramp), subsampling=0)
    images = read(only(tmp_path, *[data] * 40), JPEG(size=50, crop="random", scale=(0.1, 0.5)))

    edges = np.array(
        [[i[:, 0, 0].mean(), i[:, -1, 0].mean(), i[0, :, 1].mean(), i[-1, :, 1].mean()] for i in images.values()]
    )
    wide, high = edges[:, 1] - edges[:, 0], edges[:, 3] - edges[:, 2]
    assert (wide > 0).all()
    assert (high > 0).all()
    assert 0.07 < (wide * high / 256**2).min() < 0.2
    assert 0.3 < (wide * high / 256**2).max() < 0.52
    assert len(np.unique(edges[:, 0].round())) > 20


def test_boxes_lie_in_their_images_with_the_area_and_ratio_asked_for() -> None:
    sides = np.random.default_rng(0).integers(200, 400, size=(500, 2))
    draws = uniforms(np.arange(500), DRAWS, of="decode", seed=0, epoch=0)
    boxes = random_boxes(sides, draws, scale=(0.2, 0.4), ratio=(0.5, 2.0))

    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= sides).all()
    areas, ratios = boxes[:, 2] * boxes[:, 3] / sides.prod(axis=1), boxes[:, 3] / boxes[:, 2]
    assert areas.min() > 0.19
    assert areas.max() < 0.41
    assert 0.27 < areas.mean() < 0.33
    assert ratios.min() > 0.49
    assert ratios.max() < 2.05
    assert abs(np.log(ratios).mean()) < 0.1


def test_an_image_too_long_for_any_box_gives_its_middle() -> None:
    sides = np.array([[10, 1000], [1000, 10]])
    boxes = random_boxes(
        sides, uniforms(np.arange(2), DRAWS, of="decode", seed=0, epoch=0), scale=(0.9, 1.0), ratio=(0.5, 2.0)
    )

    assert boxes.tolist() == [[0, 490, 10, 20], [490, 0, 20, 10]]
    assert centre_boxes(sides, ratio=1.0, share=0.5).tolist() == [[2, 497, 5, 5], [497, 2, 5, 5]]


def test_random_numbers_are_even_and_differ_for_samples_epochs_and_seeds() -> None:
    numbers = uniforms(np.arange(2000), 8, of="decode", seed=3, epoch=1)

    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers, bins=10)[0] - 1600).max() < 200
    assert np.abs(np.corrcoef(numbers.T) - np.eye(8)).max() < 0.1
    assert len(np.unique(numbers)) == numbers.size
    for other in (
        uniforms(np.arange(2000), 8, of="decode", seed=3, epoch=2),
        uniforms(np.arange(2000), 8, of="decode", seed=4, epoch=1),
    ):
        assert not np.isin(other, numbers).any()


# -- with other options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("each", ["sample", "batch"])
def test_a_transform_gets_decoded_images(each: str, workers: int, tmp_path: Path, photos: list[bytes]) -> None:
    def halved(given: dict[str, Any]) -> dict[str, Any]:
        return {"image": given["image"] // 2, "number": given["number"]}

    images = read(tmp_path / "photos", transform=halved, transform_each=each, workers=workers)

    assert same(images, {number: image // 2 for number, image in read(tmp_path / "photos").items()})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [None, lambda sample: sample])
def test_ranks_without_samples_get_empty_batches_of_images(
    transform: Callable[..., Any] | None, workers: int, tmp_path: Path
) -> None:
    place = only(tmp_path, *map(photo, range(5)))
    shapes = []
    for rank in range(4):
        options: dict[str, Any] = {"rank": rank, "world_size": 4, "run": str(rank), "batch_size": 2, "min_samples": 1}
        with Loader(place, workers=workers, decode={"image": RANDOM}, transform=transform, **options) as loader:
            shapes += [batch["image"].shape for batch in loader]

    assert sum(shape[0] for shape in shapes) == 5
    assert {shape[1:] for shape in shapes} == {(32, 32, 3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_checksums_are_compared_before_images_are_decoded(workers: int, tmp_path: Path, photos: list[bytes]) -> None:
    assert same(read(tmp_path / "photos", verify=True, workers=workers), read(tmp_path / "photos"))
    data = next((tmp_path / "photos").glob("shards/*/data.lmdb"))
    raw = bytearray(data.read_bytes())
    raw[raw.index(b"\xff\xda", raw.index(b"\xff\xd8\xff")) + 30] ^= 1
    data.write_bytes(raw)

    with pytest.raises(CorruptError, match="field 'image' does not match its checksum"):
        read(tmp_path / "photos", verify=True, workers=workers)


def test_fields_and_selections_choose_what_is_decoded(tmp_path: Path, photos: list[bytes]) -> None:
    expected = read(tmp_path / "photos")
    with Loader(tmp_path / "photos", batch_size=5, fields=["image"], decode={"image": RANDOM}, workers=1) as loader:
        batches = list(loader)
    assert {tuple(batch) for batch in batches} == {("image",)}
    chosen = read(tmp_path / "photos", where={"number": range(3, 9)}, fields=["number", "image"])
    assert same(chosen, {number: expected[number] for number in range(3, 9)})


def test_a_growing_cache_is_decoded(tmp_path: Path, photos: list[bytes]) -> None:
    with Loader(tmp_path / "photos", batch_size=5, workers=2, decode={"image": "jpeg"}) as loader:
        assert len(by_number(loader)) == 24
        with open_cache(tmp_path / "photos") as cache:
            put(cache, list(map(photo, range(24, 30))), 24)
        loader.refresh()
        images = by_number(loader)

    assert len(images) == 30
    assert np.array_equal(images[29], decode_image(memoryview(photo(29))))


def test_images_in_lists_of_bytes_are_decoded(tmp_path: Path) -> None:
    """Users of HDF5 store them so."""
    schema = Schema((Field("image", "|u1", (None,)), Field("number", "<i8")))
    samples = [{"image": np.frombuffer(photo(n), dtype=np.uint8), "number": n} for n in range(3)]
    with open_cache(tmp_path / "lists", max_size="50MB") as cache:
        fill(cache, "hdf5", Block.from_samples(schema, samples), 1)

    assert same(read(tmp_path / "lists", "jpeg"), {n: decode_image(memoryview(photo(n))) for n in range(3)})


def test_tensors_of_pytorch_are_decoded(tmp_path: Path, photos: list[bytes]) -> None:
    from cachetool.loaders import torch

    with torch.Loader(tmp_path / "photos", batch_size=24, workers=1, decode={"image": RANDOM}) as loader:
        assert same(
            by_number({n: v.numpy() for n, v in b.items() if n != "__key__"} for b in loader), read(tmp_path / "photos")
        )
    with pytest.raises(UsageError, match=r"decode=.* is not an argument here: decode the bytes .* with decode="):
        torch.CacheDataset(tmp_path / "photos", decode={"image": "jpeg"})  # type: ignore[call-arg]


# -- errors ------------------------------------------------------------------------------------------------------------


def failing(place: Path, *, workers: int = 0, decode: Any = RANDOM, **options: Any) -> CacheToolError:
    with pytest.raises(CacheToolError) as raised:
        read(place, decode, workers=workers, **options)
    return raised.value


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("decode", ["jpeg", RANDOM])
def test_a_damaged_image_is_named_by_shard_sample_and_field(workers: int, decode: Any, tmp_path: Path) -> None:
    data = photo(2)
    for broken in (data[: len(data) // 2], data[:100], b"\xff\xd8\xff\xe0" + bytes(500)):
        place = only(tmp_path, photo(0), photo(1), broken, photo(3))
        error = failing(place, workers=workers, decode=decode, fields=["number", "image"])
        assert isinstance(error, CorruptError)
        (shard,) = place.glob("shards/*/data.lmdb")
        assert str(error).startswith(f"{shard}: sample 2 ('photo 2'), field 'image': the JPEG is damaged (")
        assert "pull --decode image --on-error skip" in str(error)
        shutil.rmtree(place)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (encoded(PHOTOS[0], "PNG"), "a PNG image"),
        (encoded(PHOTOS[0], "WEBP"), "a WebP image"),
        (b"text", "no image that is known"),
        (b"", "empty"),
    ],
)
def test_bytes_of_another_kind_name_the_way_to_decode_them(value: bytes, what: str, tmp_path: Path) -> None:
    for decode in ("jpeg", RANDOM):
        error = failing(only(tmp_path / str(decode == RANDOM), value), decode=decode)
        assert isinstance(error, UsageError)
        assert f"field 'image': the value is {what}, not a JPEG; decode it in transform=, or pull it decoded" in str(
            error
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_several_sizes_need_a_size(workers: int, tmp_path: Path) -> None:
    place = only(tmp_path, photo(0), photo(1), photo(2, (100, 76)))
    error = failing(place, workers=workers, decode="jpeg")

    assert isinstance(error, UsageError)
    assert str(error).endswith(
        "sample 2 ('photo 2'), field 'image': the image has 76 x 100 pixels, but the first one had 75 x 100; give all"
        " images one size: decode= with JPEG(size=...)"
    )
    assert len(read(place, workers=workers)) == 3


def test_an_image_that_claims_to_be_huge_or_has_endless_scans_is_refused(tmp_path: Path) -> None:
    data = bytearray(photo(0))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = b"\xf0\x00\xf0\x00"
    assert "is refused as too large" in str(failing(only(tmp_path / "a", bytes(data))))
    scans = photo(0) + b"\xff\xda" * 200
    assert "a JPEG of 201 scans is refused" in str(failing(only(tmp_path / "b", scans)))


def test_fields_that_are_missing_or_decoded_already_are_refused(tmp_path: Path, photos: list[bytes]) -> None:
    place = tmp_path / "photos"
    error = failing(place, fields=["number"])
    assert str(error) == "decode= names the field 'image', but a batch has number"
    with pytest.raises(UsageError, match="field 'number' needs the bytes of JPEG images, but it holds int64; leave it"):
        next(iter(Loader(place, batch_size=4, min_samples=1, workers=0, decode={"number": "jpeg"})))


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        ("jpeg", "decode='jpeg' cannot be used; it must be a dict such as {'image': 'jpeg'}"),
        ({}, r"decode=\{\} cannot be used"),
        ({3: "jpeg"}, "cannot be used; it must be a dict"),
        (
            {"image": "png"},
            r"decode=\{'image': 'png'\} cannot be used; the decoders are 'jpeg', 'cf', or with options JPEG\(",
        ),
        ({"image": None}, r"decode=\{'image': None\} cannot be used"),
    ],
)
def test_a_decoder_that_does_not_exist_is_refused(decode: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(tmp_path, batch_size=4, decode=decode)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0 cannot be used; it must be two sides of 1 to 8000 pixels"),
        ({"size": (10, 20, 30)}, r"size=\(10, 20, 30\) cannot be used"),
        ({"size": "224"}, "size='224' cannot be used"),
        ({"size": True}, "size=True cannot be used"),
        ({"size": 9, "crop": "middle"}, "crop='middle' cannot be used; it must be 'random', 'center' or None"),
        ({"crop": "random"}, r"crop='random' needs a size that boxes are resized to: size=\(224, 224\)"),
        ({"scale": (0.5, 0.1)}, "cannot be used; it must be two numbers above 0 and at most 1, the lower first"),
        ({"scale": (0.5, 2)}, "scale=.* cannot be used"),
        ({"ratio": 3}, "ratio=3 cannot be used; it must be two numbers above 0, the lower first"),
        ({"ratio": (1, float("nan"))}, "ratio=.* cannot be used"),
        ({"crop_pct": 1.5}, "crop_pct=1.5 cannot be used; it must be a number above 0 and at most 1"),
        ({"flip": "yes"}, "flip='yes' cannot be used; it must be True or False"),
        ({"layout": "NCHW"}, "layout='NCHW' cannot be used; it must be 'HWC' or 'CHW'"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JPEG(**options)


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"decode= of JPEG images needs the extra 'image'"):
        Loader(tmp_path, batch_size=4, decode={"image": "jpeg"})
