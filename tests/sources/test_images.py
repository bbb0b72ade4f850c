"""Images become what Pillow sees in them, and bombs stay closed."""

from __future__ import annotations

import io
import struct
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachetool.errors import BadObject, MissingExtra
from cachetool.sources import images
from cachetool.sources.images import decode_image


def saved(image: Image.Image, kind: str, **options: Any) -> memoryview:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return memoryview(file.getvalue())


def test_every_photograph_decodes_as_with_pillow(photos: Path) -> None:
    """JPEG decoders may round differently by a little; anything else is exact."""
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


@pytest.mark.parametrize("cut", [10, 100, 400])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_cut_image_is_refused(kind: str, cut: int) -> None:
    body = saved(Image.effect_noise((64, 64), 50).convert("RGB"), kind)

    with pytest.raises(BadObject):
        decode_image(body[: min(cut, len(body) - 20)])


def test_what_is_no_image_is_refused() -> None:
    for body in (b"", b"x", b"%PDF-1.4", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a"):
        with pytest.raises(BadObject):
            decode_image(memoryview(body))


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of one colour: a few bytes for every line."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(bytes((width // 8 + 1) * min(height, 2000)), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    """Row 80."""
    body = (
        png_bomb(width, height) if width < 2**20 else png_bomb(8, 8).replace(struct.pack(">I", 8), b"\x7f\xff\xff\xff")
    )
    tracemalloc.start()

    with pytest.raises(BadObject):
        decode_image(memoryview(body))

    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_jpeg_that_claims_too_much_is_refused() -> None:
    body = bytearray(saved(Image.new("RGB", (8, 8)), "JPEG"))
    at = bytes(body).index(b"\xff\xc0") + 5
    body[at : at + 4] = struct.pack(">HH", 60_000, 60_000)

    with pytest.raises(BadObject, match="too large"):
        decode_image(memoryview(bytes(body)))


def test_threads_may_decode_at_once(photos: Path) -> None:
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
