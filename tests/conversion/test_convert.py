"""Converting a cache's shards: from any format to any other, bit for bit, within the cap, without losing a sample."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachetool.api import Cache, open_cache, read_sample
from cachetool.cache import Facts, Origin
from cachetool.core.block import Block
from cachetool.core.errors import CapacityError, CapBlocked, CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import ShardFiles, open_shard, shard_bound
from cachetool.proc.folders import tree_bytes

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
SCHEMA = Schema(
    (
        Field("__key__", "str"),
        Field("volume", "<f4", (8, 8)),
        Field("label", "<i8"),
        Field("mask", "|u1", (None, None)),
        Field("raw", "bytes"),
    )
)


def block(count: int, first: int = 0) -> Block:
    rng = np.random.default_rng(first)
    return Block.from_samples(
        SCHEMA,
        [
            {
                "__key__": f"ä/{first + i}",
                "volume": rng.random((8, 8), dtype=np.float32),
                "label": -(first + i),
                "mask": rng.integers(0, 255, (i % 4, 3), dtype=np.uint8),
                "raw": bytes(i % 50),
            }
            for i in range(count)
        ],
    )


def add(cache: Cache, content: Block, format: str) -> str:
    kind = get_format(format)
    bound = shard_bound(kind, content.schema, len(content), content.nbytes)
    with cache.stage(dataset="default", schema=content.schema, format=format, bound=bound) as staging:
        files = ShardFiles(staging.path, kind, content.schema, samples=len(content), nbytes=content.nbytes)
        files.write(content)
        facts = files.facts()
        return staging.commit(
            Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files), origin=Origin()
        )


def samples(cache: Cache, *, library: bool = False) -> list[dict[str, object]]:
    found = []
    for shard in cache.shards():
        with open_shard(shard.path, get_format(shard.format), shard.schema, library=library) as reader:
            whole = reader.read(0, reader.samples)
            found += [{k: np.asarray(v).tolist() for k, v in whole.sample(i).items()} for i in range(len(whole))]
    return found


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with open_cache(tmp_path / "cache", max_size="20MB") as opened:
        opened.declare("default", SCHEMA)
        for number in range(3):
            add(opened, block(40, number * 40), "lmdb")
        yield opened


def test_a_chain_through_all_formats_keeps_every_sample_and_the_digest(cache: Cache) -> None:
    before, digests = samples(cache), set()
    for to in ("hdf5", "zarr", "tfrecord", "lmdb"):
        result = cache.convert(to=to, verify=True)
        digests.add(result.digest)

        assert result.samples == 120
        assert {shard.format for shard in cache.shards()} == {to}
        assert samples(cache) == before
        assert samples(cache, library=True) == before
        assert all(shard.bytes == tree_bytes(shard.path) for shard in cache.shards())
        assert sorted(os.listdir(cache.root / "shards")) == sorted(shard.id for shard in cache.shards())
    assert len(digests) == 1


@pytest.mark.parametrize(("to", "compression"), [("hdf5", "gzip"), ("zarr", "zstd"), ("tfrecord", "gzip")])
def test_a_compressed_shard_reads_back_equal_and_converts_back(cache: Cache, to: str, compression: str) -> None:
    before = samples(cache)
    digest = cache.convert(to=to, compression=compression, verify=True).digest
    assert samples(cache) == before
    assert cache.convert(to="lmdb").digest == digest
    assert samples(cache) == before


@pytest.mark.parametrize("to", FORMATS)
def test_plain_files_hold_the_same_samples_for_any_shard_size(cache: Cache, tmp_path: Path, to: str) -> None:
    whole = cache.convert(to=to, out=tmp_path / "whole", verify=True)
    cut = cache.convert(to=to, out=tmp_path / "cut", shard_size="7kB", verify=True)
    about = json.loads((tmp_path / "cut" / "dataset.json").read_text())

    assert cut.shards > whole.shards >= 1
    assert cut.digest == whole.digest == about["content"]
    assert about["samples"] == 120 == sum(part["samples"] for part in about["parts"])
    kind = get_format(to)
    rows = []
    for part in about["parts"]:
        with kind.open(tmp_path / "cut" / part["file"], schema=SCHEMA) as reader:
            rows += reader.read(0, reader.samples).columns["label"].tolist()
    assert rows == [-i for i in range(120)]


def test_an_existing_output_folder_is_not_touched(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        cache.convert(to="hdf5", out=tmp_path / "out")

    assert os.listdir(tmp_path / "out") == []


def test_an_open_snapshot_keeps_its_shards_through_a_conversion(cache: Cache) -> None:
    with cache.snapshot() as snapshot:
        cache.convert(to="hdf5")
        assert all(shard.format == "lmdb" and shard.data.exists() for shard in snapshot.shards)
        assert {shard.format for shard in cache.shards()} == {"hdf5"}
    assert sorted(os.listdir(cache.root / "shards")) == sorted(shard.id for shard in cache.shards())


def test_a_flipped_bit_is_named_with_its_sample_and_the_shard_stays(cache: Cache, tmp_path: Path) -> None:
    shard = cache.shards()[1]
    with open(shard.data, "r+b") as file:
        data = bytearray(file.read())
        at = data.rindex(b"\xc3\xa4/50")  # the key of one sample, inside its value
        data[at + 3] ^= 1
        file.seek(0)
        file.write(data)
    damaged = rf"{shard.id}/data\.lmdb: sample 10, field '__key__' does not match its checksum"
    with pytest.raises(CorruptError, match=rf"{damaged};\nshard {shard.id} .*: cachetool verify --repair"):
        cache.convert(to="hdf5", workers=1)
    with pytest.raises(CorruptError, match=damaged):
        cache.convert(to="tfrecord", out=tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptError, match=damaged):
        read_sample(cache, shard.id, 10)
    assert read_sample(cache, shard.id, 11)["__key__"] == "ä/51"

    assert shard.id in {each.id for each in cache.shards()}
    assert sum(each.samples for each in cache.shards()) == 120


def test_without_space_for_one_shard_nothing_is_converted(cache: Cache) -> None:
    add(cache, block(400, 1000), "lmdb")
    before = cache.shards()
    shrink(cache, cache.usage().total + 10_000)
    with pytest.raises(CapBlocked, match="cache is full"):
        cache.convert(to="hdf5", wait=0)

    assert cache.shards() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "parquet"}, "unknown format 'parquet'"),
        ({"to": "lmdb", "compression": "gzip"}, "lmdb has no compression 'gzip'"),
        ({"to": "hdf5", "compression": "zip"}, "choose one of gzip"),
        ({"to": "hdf5", "workers": 0}, "--workers must be at least 1"),
        ({"to": "hdf5", "dataset": "other"}, "no dataset 'other'"),
    ],
)
def test_wrong_arguments_are_named(cache: Cache, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cache.convert(**arguments)  # type: ignore[arg-type]


PAIRS = Schema((Field("x", "|u1", (4096,)),))
"""A schema whose samples take two pages of LMDB each."""


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Cache]:
    """Create a cache of twelve shards of 20 samples with 20 kB of free space."""
    with open_cache(tmp_path / "cache", max_size="20MB") as opened:
        opened.declare("default", PAIRS)
        for number in range(12):
            values = np.full((20, 4096), number, dtype=np.uint8)
            add(opened, Block(PAIRS, {"x": values}), "tfrecord" if number < 8 else "hdf5")
        shrink(opened, opened.usage().total + 20_000)
        yield opened


def shrink(cache: Cache, cap: int) -> None:
    with cache.catalog.write() as connection:
        connection.execute("UPDATE cache SET max_size = ?", (cap,))


@pytest.mark.parametrize("way", ["evict", "raise"])
@pytest.mark.parametrize("to", FORMATS)
def test_in_a_full_cache_each_advised_alternative_completes_the_conversion(full: Cache, to: str, way: str) -> None:
    """The rule also holds for shards that grow: there is no second error half-way."""
    before = {shard.id: shard for shard in full.shards()}
    with pytest.raises(CapBlocked) as refused:
        full.convert(to=to, wait=0)
    told = re.fullmatch(
        r"cache is full: [^;]+;\n"
        r"raise the cap with --max-size (\d+), or [a-z ]+: cachetool evict --max-size (\d+) --cache \S+",
        str(refused.value),
    )
    assert told is not None, str(refused.value)
    larger, target = map(int, told.groups())
    cap = full.max_size
    if way == "raise":
        with open_cache(full.root, max_size=larger) as opened:
            assert opened.convert(to=to).samples > 0
    else:
        assert full.evict(target).removed_shards < len(before)
        full.convert(to=to)

    assert {shard.format for shard in full.shards()} == {to}
    assert full.usage().total <= full.max_size == (larger if way == "raise" else cap)


def test_a_cap_too_small_for_the_conversion_is_refused_with_a_sufficient_cap(full: Cache) -> None:
    full.evict(1_200_000)
    shrink(full, 20_000_000)
    add(full, Block(PAIRS, {"x": np.zeros((200, 4096), dtype=np.uint8)}), "tfrecord")
    shrink(full, full.usage().total)
    with pytest.raises(CapacityError) as refused:
        full.convert(to="lmdb", wait=0)
    larger = int(str(refused.value).split(";\nraise the cap with --max-size ")[1].split(",")[0])

    with open_cache(full.root, max_size=larger) as opened:
        opened.convert(to="lmdb")
    assert {shard.format for shard in full.shards()} == {"lmdb"}
