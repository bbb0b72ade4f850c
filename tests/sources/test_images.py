"""Images are decoded as by Pillow, and image bombs are refused."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachetool.core.errors import BadObject, MissingExtra
from cachetool.sources import images
from cachetool.sources.images import decode_image, image_shape

RANDOM = np.random.default_rng(8)


def saved(image: Image.Image, kind: str, **options: Any) -> memoryview:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return memoryview(file.getvalue())


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_every_photograph_decodes_as_with_pillow(photos: Path) -> None:
    """JPEG decoders may round slightly differently; all other formats are exact."""
    paths = sorted(photos.iterdir())

    for path in paths:
        found = decode_image(memoryview(path.read_bytes()))
        with Image.open(path) as image:
            expected = np.asarray(image.convert("RGB"))
        assert found.dtype == np.uint8
        assert found.shape == expected.shape
        difference = np.abs(found.astype(int) - expected)
        assert difference.max() <= (3 if path.suffix == ".jpg" else 0), path.name
    assert len(paths) > 20


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_kind_of_8_bit_pixels_becomes_rgb(mode: str) -> None:
    image = Image.effect_noise((9, 7), 50).convert("RGB").convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"

    found = decode_image(saved(image, kind))

    assert found.shape == (7, 9, 3)
    if kind == "PNG":
        np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))


def test_pixels_of_more_than_8_bits_are_refused_rather_than_rounded() -> None:
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)

    with pytest.raises(BadObject, match="not 8 bits"):
        decode_image(saved(deep, "PNG"))


def deep_png(channels: int) -> bytes:
    """Return a PNG of 16 bits per channel: gray with alpha (2), RGB (3), RGBA (4)."""
    rows = np.arange(2 * 3 * channels, dtype=">u2").reshape(2, -1) * 999
    head = struct.pack(">IIBBBBB", 3, 2, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


def tiff(pixels: np.ndarray[Any, Any], orientation: int = 1, *, order: str = "<") -> bytes:
    """Return a TIFF of one uncompressed strip, followed by its tags, as the specification says."""
    height, width, channels = pixels.shape
    bits = [8 * pixels.itemsize] * channels
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    data += bytes(len(data) % 2)
    tags: list[tuple[int, int, list[int]]] = [
        *[(256, 3, [width]), (257, 3, [height]), (258, 3, bits), (259, 3, [1]), (262, 3, [2]), (273, 4, [8])],
        *[(274, 3, [orientation]), (277, 3, [channels]), (278, 3, [height]), (279, 4, [len(data)])],
        *([(338, 3, [2])] if channels == 4 else []),
    ]
    where = 8 + len(data)
    head = struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, where + 2 * channels)
    entries = b""
    for tag, kind, values in tags:
        if len(values) > 2:
            value = struct.pack(order + "I", where)
        else:
            value = struct.pack(order + {3: "H", 4: "I"}[kind] * len(values), *values).ljust(4, b"\0")
        entries += struct.pack(order + "HHI", tag, kind, len(values)) + value
    sizes = struct.pack(f"{order}{channels}H", *bits)
    return head + data + sizes + struct.pack(order + "H", len(tags)) + entries + bytes(4)


DEEP = {
    "png-la": deep_png(2),
    "png-rgb": deep_png(3),
    "png-rgba": deep_png(4),
    "tiff-rgb": tiff(np.full((2, 3, 3), 999, np.uint16)),
    "tiff-rgb-big-endian": tiff(np.full((2, 3, 3), 999, np.uint16), order=">"),
    "tiff-rgba": tiff(np.full((2, 3, 4), 999, np.uint16)),
    "ppm": b"P6 3 2 65535\n" + np.arange(18, dtype=">u2").tobytes(),
    "ppm-of-10-bits": b"P6 3 2 1023\n" + np.arange(18, dtype=">u2").tobytes(),
    "ppm-as-text": b"P3 1 1 65535\n1 2 3\n",
}


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
def test_colour_pixels_of_more_than_8_bits_are_refused_too(body: bytes) -> None:
    """Pillow converts them to 8 bits silently. They are also refused if only the shape is requested."""
    for use in (decode_image, image_shape):
        for size in (None, (4, 4)):
            with pytest.raises(BadObject, match=r"an image of 1[06] bits a channel, not 8 bits; pull it as bytes"):
                use(memoryview(body), size)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("packed", [False, True])
def test_pixels_of_a_tiff_are_as_stored_for_any_orientation_tag(orientation: int, *, packed: bool) -> None:
    """JPEG and PNG behave likewise. Pillow uses another path for compressed TIFFs, and rotates both while loading."""
    pixels = RANDOM.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    body = memoryview(tiff(pixels, orientation))
    if packed:
        body = saved(image, "TIFF", tiffinfo={274: orientation}, compression="tiff_lzw")

    assert np.array_equal(decode_image(body), pixels)
    assert image_shape(body) == (5, 7, 3)
    assert np.array_equal(decode_image(body, (4, 9)), decode_image(saved(image, "PNG"), (4, 9)))
    assert image_shape(body, (4, 9)) == (4, 9, 3)


@pytest.mark.parametrize("kind", ["tiff", "ppm", "ppm-as-text", "bmp-of-16-bits-a-pixel"])
def test_pixels_of_at_most_8_bits_per_channel_are_accepted(kind: str) -> None:
    pixels = RANDOM.integers(0, 256, (2, 3, 3), dtype=np.uint8)
    body = {
        "tiff": tiff(pixels),
        "ppm": b"P6 3 2 255\n" + pixels.tobytes(),
        "ppm-as-text": b"P3 3 2 255\n" + b" ".join(b"%d" % value for value in pixels.flat),
        "bmp-of-16-bits-a-pixel": struct.pack("<2sIIIIiiHHIIiiII", b"BM", 70, 0, 54, 40, 3, 2, 1, 16, *[0] * 6)
        + bytes(16),
    }[kind]

    found = decode_image(memoryview(body))

    assert found.shape == image_shape(memoryview(body)) == (2, 3, 3)
    assert np.array_equal(found, pixels) or (kind.startswith("bmp") and not found.any())


def test_bytes_that_are_no_image_are_refused() -> None:
    for body in (b"", b"x", b"%PDF-1.4", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a"):
        with pytest.raises(BadObject):
            decode_image(memoryview(body))


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG of one colour with a few bytes per line."""
    pixels = zlib.compress(bytes((width // 8 + 1) * min(height, 2000)), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_an_image_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    """Row 80."""
    body = (
        png_bomb(width, height) if width < 2**20 else png_bomb(8, 8).replace(struct.pack(">I", 8), b"\x7f\xff\xff\xff")
    )
    tracemalloc.start()

    with pytest.raises(BadObject):
        decode_image(memoryview(body))

    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_jpeg_that_declares_too_many_pixels_is_refused() -> None:
    body = bytearray(saved(Image.new("RGB", (8, 8)), "JPEG"))
    at = bytes(body).index(b"\xff\xc0") + 5
    body[at : at + 4] = struct.pack(">HH", 60_000, 60_000)

    with pytest.raises(BadObject, match="too large"):
        decode_image(memoryview(bytes(body)))


def test_threads_can_decode_at_the_same_time(photos: Path) -> None:
    body = memoryview((photos / "coffee.png").read_bytes())
    expected = decode_image(body)
    wrong = []

    def work() -> None:
        wrong.extend(1 for _ in range(3) if not np.array_equal(decode_image(body), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)

    with pytest.raises(MissingExtra, match=r"cachetool\[image\]"):
        decode_image(memoryview((photos / "rocket.jpg").read_bytes()))


def test_pillow_alone_is_enough(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    body = memoryview((photos / "rocket.jpg").read_bytes())

    assert images._jpeg(body) is None
    assert decode_image(body).shape == (427, 640, 3)


@pytest.mark.parametrize("size", [(224, 224), (64, 320), (900, 30)])
def test_a_resized_photograph_looks_like_the_decoded_one_made_smaller(photos: Path, size: tuple[int, int]) -> None:
    """Averaging in the decoder costs about one of 256 steps, on photographs and on noise."""
    bodies = [memoryview(path.read_bytes()) for path in sorted(photos.iterdir())]
    bodies += [saved(Image.effect_noise((1999, 1501), 80).convert("RGB"), kind) for kind in ("JPEG", "PNG")]

    for body in bodies:
        found = decode_image(body, size)
        whole = Image.fromarray(decode_image(body))
        expected = np.asarray(whole.resize(size[::-1], Image.Resampling.BICUBIC))
        assert found.dtype == np.uint8
        assert found.shape == (*size, 3) == image_shape(body, size)
        assert np.abs(found.astype(int) - expected).mean() < 1.2


PEAK = """
import sys
def peak():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
from cachetool.sources.images import decode_image
data = memoryview(open(sys.argv[1], "rb").read())
decode_image(data, (224, 224))
print(peak())
decode_image(data)
print(peak())
"""


def test_a_large_jpeg_is_never_completely_in_memory_while_it_is_resized(tmp_path: Path) -> None:
    """4,000 x 4,000 pixels take at least 48 MB. The decoder averages four pixels per side, which is a sixteenth of
    that.
    """
    path = tmp_path / "large.jpg"
    path.write_bytes(saved(Image.effect_noise((4000, 4000), 50).convert("RGB"), "JPEG"))
    ran = subprocess.run([sys.executable, "-c", PEAK, path], check=True, capture_output=True, text=True)
    resized, whole = map(int, ran.stdout.split())

    assert whole - resized > 30_000


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_every_kind_of_8_bit_pixels_can_be_resized(mode: str, kind: str) -> None:
    image = Image.new("RGB", (40, 60), (200, 100, 50)).convert(mode)
    if kind == "JPEG":
        image = image if mode in ("L", "CMYK") else image.convert("RGB")
    elif mode == "CMYK":
        image = image.convert("RGB")
    body = saved(image, kind)

    found = decode_image(body, (5, 7)).astype(int)

    assert np.abs(found - decode_image(body).reshape(-1, 3).mean(axis=0)).max() <= (140 if mode in "1P" else 3)


@pytest.mark.parametrize("size", [None, (8, 8)])
@pytest.mark.parametrize("cut", [10, 100, 400])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_truncated_image_is_refused_at_any_size(kind: str, cut: int, size: tuple[int, int] | None) -> None:
    body = saved(Image.effect_noise((64, 64), 50).convert("RGB"), kind)

    with pytest.raises(BadObject):
        decode_image(body[: min(cut, len(body) - 20)], size)


def test_an_image_bomb_is_refused_for_any_target_size() -> None:
    """Row 80: the declared pixels count, not the resized ones."""
    for body in (png_bomb(10_000, 10_000), png_bomb(60_000, 60_000)):
        for use in (decode_image, image_shape):
            with pytest.raises(BadObject, match="too large"):
                use(memoryview(body), (8, 8))
