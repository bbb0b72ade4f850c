"""Packed keys: they are read back exactly, and a damaged listing never results in another key or a crash."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import CorruptError
from cachetool.sources.key_blocks import BLOCK, KeyBlocks, packed
from cachetool.sources.keys import Stem
from cachetool.sources.listing import Listing, write_listing
from cachetool.stores import Object
from cachetool.stores.base import KEY_BYTES

ETAGS = st.one_of(
    st.just(b""), st.binary(max_size=40), st.text("0123456789abcdef", max_size=40).map(str.encode), st.just(b"AB")
)


def blocks_of(pairs: list[tuple[bytes, bytes]]) -> KeyBlocks:
    parts = [pairs[at : at + BLOCK] for at in range(0, len(pairs), BLOCK)]
    blocks = [packed([key for key, _ in part], [etag for _, etag in part]) for part in parts]
    data = np.frombuffer(b"".join(blocks), dtype=np.uint8)
    starts = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
    return KeyBlocks(Path("l"), data, starts, len(pairs))


@given(st.lists(st.tuples(st.binary(max_size=60), ETAGS), max_size=3 * BLOCK))
def test_keys_and_etags_are_read_back_exactly(pairs: list[tuple[bytes, bytes]]) -> None:
    blocks = blocks_of(pairs)

    assert list(blocks) == pairs
    assert [blocks[at] for at in reversed(range(len(pairs)))] == pairs[::-1]


def test_the_longest_keys_fit_a_block() -> None:
    pairs = [(bytes([at]) * KEY_BYTES, b"-" * KEY_BYTES) for at in range(BLOCK)]

    assert list(blocks_of(pairs)) == pairs


def test_names_of_folders_take_a_few_bytes_beside_their_etags() -> None:
    pairs = [
        (f"train/n{at // 1300:08d}/n{at // 1300:08d}_{37 * at}.JPEG".encode(), f"{at * 7**45 % 16**32:032x}".encode())
        for at in range(100 * BLOCK)
    ]
    size = sum(len(packed([key], [etag])) for key, etag in pairs[:1])
    blocks = blocks_of(pairs)

    assert len(blocks._data) / len(pairs) < 16 + 6 < size


def test_an_endless_block_takes_no_memory() -> None:
    bomb = zlib.compress(b"\0" + bytes(2**28))
    blocks = KeyBlocks(Path("l"), np.frombuffer(bomb, np.uint8), np.array([0, len(bomb)]), 5)

    tracemalloc.start()
    with pytest.raises(CorruptError, match="listing 'l' is damaged; remove it to list again"):
        blocks[0]
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "l"
    names = [f"a/{at:04d}.{name}" for at in range(100) for name in ("npy", "json")[: 1 + at % 2]]
    write_listing(
        folder, [[Object(name, at, f"{at:032x}") for at, name in enumerate(names)]], stem=Stem("first"), url="s3://b"
    )
    return folder


@given(st.data())
def test_a_damaged_listing_is_an_error_or_has_the_same_keys(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in good.iterdir())))
    raw = bytearray((good / name).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del raw[at : at + data.draw(st.integers(1, len(raw)))]
    wanted = [item.key for unit in range(100) for item in Listing.open(good).unit(unit)]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "l")
        shutil.copytree(good, folder)
        (folder / name).write_bytes(raw)
        try:
            listing = Listing.open(folder)
            listing.unit_bytes(np.arange(listing.units))
            keys = [item.key for unit in range(listing.units) for item in listing.unit(unit)]
            assert keys == [record[1].decode() for _, record in listing.records(Stem("first"))] == wanted
        except CorruptError as error:
            message = str(error)
            assert message.endswith("remove it to list again")
