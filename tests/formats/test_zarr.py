"""Zarr folders as zarr alone reads them, and folders that must not be trusted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from google_crc32c import value as crc32c

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from tests.formats.samples import EVERY_KIND, block, write

ZARR = get_format("zarr")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.zarr"


def test_zarr_reads_every_array_with_its_dtype_and_the_extents_match_its_bytes(path: Path) -> None:
    content = block(EVERY_KIND, 17)

    written = write(ZARR, path, content)

    assert written.extents is not None
    group: Any = zarr.open_group(path, mode="r")
    assert group.attrs["cachetool"] == {"layout": 1, "samples": 17, "schema": EVERY_KIND.to_json()}
    for field in EVERY_KIND:
        array, column = group[field.name], content.columns[field.name]
        values = column.values if isinstance(column, Ragged) else column
        stored = array[...]
        assert (stored.dtype, stored.shape) == (field.numpy, values.shape)
        assert stored.tobytes() == values.tobytes()
        assert array.compressors == ()
        extents = written.extents.fields[field.name]
        if extents.column is None:
            file = path.parent / written.extents.files[extents.file]
            assert file.name == ("zarr.json" if not values.size else "c.0" + ".0" * (values.ndim - 1))
            offsets, sizes = extents.locate(np.arange(17))
            raw = file.read_bytes()
            assert b"".join(raw[a : a + n] for a, n in zip(offsets, sizes, strict=True)) == values.tobytes()


def test_every_node_of_a_nested_name_is_a_group(path: Path) -> None:
    write(ZARR, path, block(Schema((Field("a/b/c", "<f4", (2,)), Field("a/d", "str"), Field("__key__", "str"))), 3))

    group: Any = zarr.open_group(path, mode="r")

    found = sorted(name for name, _ in group.members(max_depth=None))
    assert found == ["__key__", "__key__.offsets", "a", "a/b", "a/b/c", "a/d", "a/d.offsets"]


@pytest.mark.parametrize("nbytes", [1, 3000, 2**17, 2**18 - 1, 2**18 + 1, 2**20])
@pytest.mark.parametrize("samples", [1, 5, 400])
def test_inner_chunks_hold_complete_samples_of_at_least_256_kib_in_one_file(
    path: Path, nbytes: int, samples: int
) -> None:
    samples = min(samples, 2**24 // nbytes)
    schema = Schema((Field("x", "|u1", (nbytes,)),))
    content = Block(schema, {"x": np.random.default_rng(0).integers(0, 256, (samples, nbytes), dtype=np.uint8)})

    write(ZARR, path, content, cuts=(samples // 3,))

    group: Any = zarr.open_group(path, mode="r")
    array = group["x"]
    inner = array.chunks[0]
    assert array.chunks[1] == nbytes
    assert inner == samples or inner * nbytes >= 2**18 > (inner - 1) * nbytes
    assert sorted(p.name for p in (path / "x").iterdir()) == ["c.0.0", "zarr.json"]
    raw = (path / "x" / "c.0.0").read_bytes()
    chunks = math.ceil(samples / inner)
    assert len(raw) == chunks * inner * nbytes + 16 * chunks + 4
    index = raw[-16 * chunks - 4 : -4]
    assert np.frombuffer(index, "<u8").tolist() == [
        n for i in range(chunks) for n in (i * inner * nbytes, inner * nbytes)
    ]
    assert int.from_bytes(raw[-4:], "little") == crc32c(index)
    assert np.array_equal(array[:], content.columns["x"])  # type: ignore[arg-type]


def test_the_same_samples_make_the_same_files(tmp_path: Path) -> None:
    content = block(EVERY_KIND, 40)
    write(ZARR, tmp_path / "a", content)
    write(ZARR, tmp_path / "b", content, cuts=(3, 11, 12))

    assert _contents(tmp_path / "a") == _contents(tmp_path / "b")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_array_has_two_files_and_a_folder(path: Path) -> None:
    """The number does not depend on size and rank."""
    schema = Schema((Field("x", "<f4", (2, 3, 4, 5)), Field("s", "str"), Field("none", "<f4", (0,))))
    write(ZARR, path, block(schema, 1000))

    assert sorted(_contents(path)) == [
        "none/zarr.json",
        "s.offsets/c.0",
        "s.offsets/zarr.json",
        "s/c.0",
        "s/zarr.json",
        "x/c.0.0.0.0.0",
        "x/zarr.json",
        "zarr.json",
    ]


@pytest.mark.parametrize("compression", ZARR.compressions)
def test_compressed_shard_files_contain_every_chunk(path: Path, compression: str) -> None:
    """Chunks of zeros, which zarr would omit, are written too, so a missing chunk always means damage."""
    schema = Schema((Field("x", "<f4", (2**14,)), Field("s", "bytes")))
    x = np.repeat(np.arange(41, dtype="<f4")[:, None] // 30, 2**14, axis=1)
    text = Ragged(np.zeros(41 * 50_000, dtype=np.uint8), np.arange(42) * 50_000)
    content = Block(schema, {"x": x, "s": text})

    written = write(ZARR, path, content, cuts=(1, 20, 40), compression=compression)

    group: Any = zarr.open_group(path, mode="r")
    # A large sample is a chunk of its own. Values of different sizes are cut at a power of two near their mean.
    assert (group["x"].chunks, group["x"].shards) == ((1, 2**14), (41, 2**14))
    assert (group["s"].chunks, group["s"].shards) == ((2**16,), (32 * 2**16,))
    assert sorted(p.name for p in (path / "x").iterdir()) == ["c.0.0", "zarr.json"]
    assert sum(len(data) for data in _contents(path).values()) < content.nbytes / 10
    assert np.array_equal(group["x"][:], x)
    with ZARR.open(path) as reader:
        assert np.array_equal(checksums(reader.read(0, 41)), written.checksums)


def _missing(file: Path) -> None:
    file.unlink()


def _partial(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 20)


def _longer(file: Path) -> None:
    with file.open("ab") as end:
        end.write(bytes(20))


def _index_flipped(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def _index_crc_flipped(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def _chunk_left_out(file: Path) -> None:
    """Omit a chunk of zeros as zarr does, with a valid crc."""
    raw = bytearray(file.read_bytes())
    raw[-20:-4] = b"\xff" * 16
    raw[-4:] = crc32c(bytes(raw[-36:-4])).to_bytes(4, "little")
    file.write_bytes(raw)


def _swapped(file: Path) -> None:
    """Exchange two chunks in the index, with a valid crc."""
    raw = bytearray(file.read_bytes())
    raw[-36:-20], raw[-20:-4] = raw[-20:-4], raw[-36:-20]
    raw[-4:] = crc32c(bytes(raw[-36:-4])).to_bytes(4, "little")
    file.write_bytes(raw)


def _middle_left_out(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:100] + raw[120:])


def _middle_longer(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:100] + bytes(20) + raw[100:])


def _index_wrapping(file: Path) -> None:
    """Write a position and a size whose sum exceeds 64 bits, with a valid crc."""
    raw = bytearray(file.read_bytes())
    raw[-20:-4] = b"\xff" * 8 + (1).to_bytes(8, "little")
    raw[-4:] = crc32c(bytes(raw[-36:-4])).to_bytes(4, "little")
    file.write_bytes(raw)


def _folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link_outside(file: Path) -> None:
    file.rename(file.parent.parent.parent / "outside")
    file.symlink_to(file.parent.parent.parent / "outside")


def _link_above(file: Path) -> None:
    folder = file.parent
    folder.rename(folder.parent.parent / "outside")
    folder.symlink_to(folder.parent.parent / "outside")


@pytest.mark.parametrize(
    ("compression", "damage"),
    [
        (compression, damage)
        for compression in (None, *ZARR.compressions)
        for damage in (
            *(_missing, _partial, _longer, _index_flipped, _index_crc_flipped, _chunk_left_out, _swapped),
            *(_index_wrapping, _middle_left_out, _middle_longer, _folder_instead, _link_outside, _link_above),
        )
        # compressed chunks have no own checksum, so only a digest detects these
        if compression is None or damage not in (_swapped, _middle_longer)
    ],
)
def test_a_damaged_chunk_file_is_an_error_not_zeros(
    path: Path, damage: Callable[[Path], None], compression: str | None
) -> None:
    """Fault 64: missing, partial, additional or replaced files are named when the shard is opened or read."""
    schema = Schema((Field("x", "<f4", (2**16,)), Field("y", "<i8")))
    content = block(schema, 2)
    write(ZARR, path, content, compression=compression)

    damage(path / "x" / "c.0.0")

    with pytest.raises(CorruptError, match=r"data\.zarr(/x/|: 'x')"), ZARR.open(path) as reader:
        reader.read(0, 2)


@pytest.mark.parametrize("file", ["zarr.json", "x/zarr.json"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1, 2", b'{"zarr_format": 3, "node_type": "group"}'])
def test_damaged_metadata_is_an_error(path: Path, file: str, content: bytes | None) -> None:
    write(ZARR, path, block(Schema((Field("x", "<f4", (2,)),)), 2))
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content)

    with pytest.raises(CorruptError, match=r"data\.zarr"):
        ZARR.open(path)


def test_a_pipe_in_place_of_metadata_is_an_error_without_waiting(path: Path) -> None:
    write(ZARR, path, block(Schema((Field("x", "<f4", (2,)),)), 2))
    for file in (path / "x" / "zarr.json", path / "zarr.json"):
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CorruptError, match=f"{file} is not a plain file"):
            ZARR.open(path)


def test_a_flipped_bit_of_a_compressed_chunk_names_field_and_rows(path: Path) -> None:
    """The bytes do not compress, so a codec without a checksum would detect nothing."""
    write(ZARR, path, block(Schema((Field("x", "|u1", (2**18,)),)), 4), compression="zstd")
    raw = bytearray((path / "x" / "c.0.0").read_bytes())
    raw[2 * 2**18 + 2**17] ^= 8
    (path / "x" / "c.0.0").write_bytes(raw)

    with ZARR.open(path) as reader:
        with pytest.raises(CorruptError, match=r"data\.zarr: 'x', rows 2 to 3"):
            reader.read(2, 3)
        assert reader.read(0, 2).samples == 2


def test_an_empty_shard_of_many_announced_samples_has_no_chunk_files(path: Path) -> None:
    schema = Schema((Field("x", "<f8", (2**15,)), Field("s", "str")))
    ZARR.create(path, schema, samples=100, nbytes=100 * 2**18).finish()

    assert sorted(_contents(path)) == [
        "s.offsets/c.0",
        "s.offsets/zarr.json",
        "s/zarr.json",
        "x/zarr.json",
        "zarr.json",
    ]


def _set(document: dict[str, Any], value: Any, *keys: Any) -> None:
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = value


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ([2**40, 2], ("shape",)),
        ([2, 3], ("shape",)),
        ("int32", ("data_type",)),
        ("start", ("codecs", 0, "configuration", "index_location")),
        ([2**40, 2], ("chunk_grid", "configuration", "chunk_shape")),
        ([1, 1], ("codecs", 0, "configuration", "chunk_shape")),
        ("/", ("chunk_key_encoding", "configuration", "separator")),
        ({"name": "bytes", "configuration": {"endian": "big"}}, ("codecs", 0, "configuration", "codecs", 0)),
        ([{"name": "bytes", "configuration": {"endian": "little"}}], ("codecs",)),
    ],
)
def test_metadata_that_contradict_the_schema_are_refused(path: Path, value: Any, keys: tuple[Any, ...]) -> None:
    """A huge declared shape allocates no memory, and no array is read otherwise than it was written."""
    write(ZARR, path, block(Schema((Field("x", "<f4", (2,)),)), 2))
    document = json.loads((path / "x" / "zarr.json").read_text())
    _set(document, value, *keys)
    (path / "x" / "zarr.json").write_text(json.dumps(document))

    with pytest.raises(CorruptError, match=r"data\.zarr(/x/|: 'x')"):
        ZARR.open(path)
