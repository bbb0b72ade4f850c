"""Decoding bytes to values: the contents of each kind of object, and the refused objects."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cachetool.core.errors import BadObject
from cachetool.sources.decode import NULL, decode, parse_npy
from cachetool.sources.keys import Stem


def read(name: str, body: bytes, *, images: bool = False) -> dict[str, Any]:
    """Return the fields of the object ``name``."""
    part = Stem("first").split(name)
    assert not isinstance(part, str)
    return dict(decode(part, memoryview(body), images=images))


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), **options)
    return file.getvalue()


def npz(save: Callable[..., None] = np.savez, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


@given(
    hnp.arrays(
        st.one_of(
            hnp.integer_dtypes(endianness="?"),
            hnp.unsigned_integer_dtypes(endianness="?"),
            hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
            hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
            hnp.boolean_dtypes(),
            hnp.datetime64_dtypes(max_period="Y", min_period="ns", endianness="?"),
        ),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.booleans(),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_every_array_that_numpy_writes_is_read_back(array: Any, fortran: bool, version: tuple[int, int]) -> None:
    array = np.asfortranarray(array) if fortran else array

    found = parse_npy(memoryview(npy(array, version=version)))

    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_an_array_is_a_view_of_its_bytes() -> None:
    body = npy(np.arange(1000.0))

    assert np.shares_memory(parse_npy(memoryview(body)), np.frombuffer(body, dtype=np.uint8))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x04\x00" + npy(np.zeros(3))[8:],
        npy(np.zeros(3))[:-1],
        npy(np.zeros(3)) + b"x",
        npy(np.zeros(3))[:60],
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + bytes(200),
        npy(np.array([1, "a", None], dtype=object)),
        npy(np.array([("a", 1)], dtype=[("x", "U1"), ("y", "i4")])),
        npy(np.array(["text"])),
        npy(np.array([b"bytes"])),
        npy(np.zeros(3)).replace(b"(3,)", b"3   "),
        npy(np.zeros(3)).replace(b"(3,)", b"(~3)"),
        npy(np.zeros(3)).replace(b"(3,), ", b"(-3,),"),
        npy(np.zeros(3)).replace(b"'fortran_order': False", b"'fortran_order': 12345"),
        npy(np.zeros(3)).replace(b"False", b"__imp"),
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 5000) + b"[" * 5000,
    ],
)
def test_files_without_a_plain_array_are_refused(body: bytes) -> None:
    with pytest.raises(BadObject):
        parse_npy(memoryview(body))


def test_nothing_is_ever_unpickled() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("a pickle was loaded",))

    header = npy(np.array([None], dtype=object)).partition(b"\n")[0] + b"\n"

    for body in (header + pickle.dumps(Bomb()), pickle.dumps(Bomb())):
        with pytest.raises(BadObject):
            read("a.npy", body)
        with pytest.raises(BadObject):
            read("a.npz", body)


def test_a_header_that_declares_a_huge_array_takes_no_memory() -> None:
    huge = b"{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 9), }"
    claims = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(huge)) + huge + bytes(64)
    tracemalloc.start()

    with pytest.raises(BadObject, match=r"array of shape .* needs"):
        parse_npy(memoryview(claims))

    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_is_decoded_to_its_arrays(save: Any) -> None:
    body = npz(save, image=np.arange(6).reshape(2, 3), scale=np.float32(0.5))

    plain, named = read("7.npz", body), read("7.views.npz", body)

    assert list(plain) == ["image", "scale"]
    assert list(named) == ["views/image", "views/scale"]
    np.testing.assert_array_equal(plain["image"], np.arange(6).reshape(2, 3))
    assert plain["scale"] == np.float32(0.5)


def test_a_string_in_an_npz_is_text_or_bytes_and_unsupported_members_fail_only_if_requested() -> None:
    found = read(
        "a.npz", npz(word="größe", raw=np.bytes_(b"\xff\x00x"), empty="", texts=["a", "bc"], x=np.zeros((), "O"))
    )

    assert (found["word"], found["raw"], found["empty"]) == ("größe", b"\xff\x00x", "")
    assert found["texts"].why == " is an array of texts (<U2), but a field holds only one text per sample"
    assert found["x"].why.startswith(": dtype object cannot be stored")
    with pytest.raises(BadObject):
        read("a.npz", npz(half=np.array("\ud800")))


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")  # warns about duplicate names, which this test wants
        for name, body in members:
            archive.writestr(name, body)
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"junk", "not an .npz file"),
        (npz(a=np.zeros(3))[:-10], "not an .npz file"),
        (npz(a=np.zeros(300)).replace(bytes(40), b"x" * 40, 1), "not an .npz file"),
        (zipped([("readme.txt", b"x")]), "not an array"),
        (zipped([("a.npy", npy(np.zeros(1))), ("a.npy", npy(np.zeros(1)))]), "two arrays of the same name"),
        (zipped([("a.npy", b"junk")]), "not a .npy file"),
        (zipped([("a.npy", npy(np.zeros(1)))], zipfile.ZIP_LZMA), "compressed by method 14"),
    ],
)
def test_a_bad_npz_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(BadObject, match=said):
        read("a.npz", body)


def test_an_npz_bomb_is_refused_before_it_is_inflated() -> None:
    """Row 80."""
    body = zipped([("a.npy", bytes(80 * 2**20))])
    tracemalloc.start()

    with pytest.raises(BadObject, match="npz is refused"):
        read("a.npz", body)

    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


def test_the_top_level_keys_of_a_json_object_are_fields() -> None:
    value = {"n": 3, "x": 0.5, "yes": True, "s": "grüße", "list": [1, {"a": None}], "d": {"k": "é"}}

    found = read("a.json", json.dumps(value).encode())

    assert found == {"n": 3, "x": 0.5, "yes": True, "s": "grüße", "list": '[1,{"a":null}]', "d": '{"k":"é"}'}
    assert [type(found[name]) for name in ("n", "x", "yes")] == [int, float, bool]
    assert read("a.meta.json", b'{"n": 3}') == {"meta/n": 3}
    assert read("a.json", b"\xef\xbb\xbf" + b'{"n": 3}') == {"n": 3}


@pytest.mark.parametrize(("text", "value"), [("[1, 2]", "[1,2]"), ("5", 5), ('"x"', "x"), ("false", False)])
def test_json_that_is_no_object_is_one_field(text: str, value: Any) -> None:
    assert read("a.json", text.encode()) == {"json": value}
    assert read("a.box.json", text.encode()) == {"box": value}


def test_null_is_an_error_only_if_its_field_is_requested() -> None:
    assert read("a.json", b'{"a": null, "b": 1}') == {"a": NULL, "b": 1}


@pytest.mark.parametrize("text", [b'{"a": {"e": 1e400}}', b'{"a": [[-1e999]]}', b'{"a": 1e400}', b"[1e400]"])
def test_a_json_number_beyond_float64_is_refused_and_not_infinity(text: bytes) -> None:
    with pytest.raises(BadObject, match=r"the number -?1e[49]\S+ does not fit into float64"):
        read("a.json", text)


def test_an_infinity_written_in_a_json_file_is_read() -> None:
    assert read("a.json", b'{"a": Infinity, "b": [-Infinity, 1e300], "c": ["Infinity"]}') == {
        "a": math.inf,
        "b": "[-Infinity,1e+300]",
        "c": '["Infinity"]',
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 2}}',
        b'{"a": 9223372036854775808}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": ["\\udfff"]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"a": 1} trailing',
    ],
)
def test_bad_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadObject):
        read("a.json", text)


@pytest.mark.parametrize(
    ("text", "value"), [(b"7", 7), (b" -12\n", -12), (b"+3", 3), (b"9223372036854775807", 2**63 - 1), (b"007", 7)]
)
def test_a_cls_or_id_object_is_a_whole_number(text: bytes, value: int) -> None:
    assert read("a.cls", text) == {"cls": value}
    assert read("a.id", text) == {"id": value}


@pytest.mark.parametrize(
    "text", [b"", b"x", b"1.5", b"1 2", b"9223372036854775808", b"1" * 100, b"0x10", "٣".encode(), b"1_0"]
)
def test_a_cls_object_without_a_whole_number_is_refused(text: bytes) -> None:
    with pytest.raises(BadObject, match="not a whole number"):
        read("a.cls", text)


def test_text_is_utf8_and_bytes_are_bytes() -> None:
    assert read("a.txt", "zwei\nZeilen ü".encode()) == {"txt": "zwei\nZeilen ü"}
    assert bytes(read("a.bin", b"\0\xff")["bin"]) == b"\0\xff"
    assert bytes(read("a.jpg", b"not looked at")["jpg"]) == b"not looked at"
    with pytest.raises(BadObject, match="not UTF-8"):
        read("a.txt", b"\xff")


def message(name: str, body: bytes) -> str:
    """Return the message of the error, if there is one. Exceptions that are not cachetool's propagate."""
    try:
        read(name, body, images=True)
    except BadObject as error:
        return str(error)
    return ""


@given(st.binary(max_size=200), st.sampled_from(["npy", "npz", "json", "cls", "txt", "jpg", "png", "gif", "tif"]))
def test_no_bytes_raise_anything_but_bad_object(body: bytes, extension: str) -> None:
    """Fuzzing: arbitrary bytes result in values or in one error."""
    assert message(f"a.{extension}", body).isprintable()


@given(st.data())
def test_damaged_files_raise_nothing_but_bad_object(data: st.DataObject) -> None:
    """Fuzzing: real files with some changed bytes."""
    name, good = data.draw(st.sampled_from(GOOD))
    body = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, min(len(body) - 1, 400)))] = data.draw(st.integers(0, 255))

    assert message(name, bytes(body[: data.draw(st.integers(1, len(body)))])).isprintable()


def _png() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, "PNG")
    return file.getvalue()


GOOD = [
    ("a.npy", npy(np.arange(20.0))),
    ("a.npz", npz(a=np.arange(9))),
    ("a.json", b'{"a": [1, 2], "b": 1e5}'),
    ("a.png", _png()),
]


@pytest.mark.parametrize("shape", ["(4294967296, 4294967296, 0)", "(9223372036854775808, 0)"])
def test_a_shape_larger_than_any_array_is_refused_although_it_has_no_bytes(shape: str) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    file = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(BadObject, match="too large for an array"):
        parse_npy(memoryview(file))
