"""The samples that are measured: some of the user's own, in memory, and as a cache of each format on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachetool.cache import CacheDir, Facts, Origin, open_cache
from cachetool.conversion.inputs import described, open_input
from cachetool.core.block import Block
from cachetool.core.errors import NotFound, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats.compression import compressed
from cachetool.formats.shard import ShardFiles, shard_bound
from cachetool.proc.folders import remove_path
from cachetool.sources.options import SourceOptions

__all__ = ["Trial", "drop", "files_of", "fill", "made_up", "of_cache", "of_files", "written"]

BYTES = 128 * 2**20
_SHARDS = 4
_CAP = "20GB"


@dataclass(frozen=True)
class Trial:
    """Samples in memory, and figures of the dataset that they are taken from."""

    what: str
    """The origin of the samples, as text for people."""
    format: str | None
    """The format of most of the dataset; None outside a cache."""
    block: Block
    total_bytes: int
    """Bytes of the values of the whole dataset."""

    @property
    def mean(self) -> int:
        """Return the bytes of a sample, on average."""
        return max(1, self.block.nbytes // self.block.samples)

    @property
    def batch(self) -> int:
        """Return the samples of a batch of about 8 MB, at most 256."""
        return max(1, min(256, 2**23 // self.mean, self.block.samples))


def made_up() -> Trial:
    """Return made-up samples of 128 KiB."""
    schema = Schema((Field("x", "<f4", (2**15,)), Field("y", "<i8")))
    count = BYTES // 2**17
    # Noise, because scientific data is noise to any disk or format that compresses.
    raw = np.random.default_rng(0).integers(0, 2**63, size=count * 2**14, dtype=np.int64)
    block = Block(schema, {"x": raw.view("<f4").reshape(count, -1), "y": np.arange(count)})
    return Trial("made-up samples of 128 KiB", None, block, block.nbytes)


def of_cache(cache: CacheDir, dataset: str | None) -> Trial:
    """Return the oldest samples of a dataset, read under a lease. Raises :class:`NotFound` when there are none."""
    if not cache.shards(dataset):
        raise NotFound(f"no samples in the cache {cache.root} yet; name files to measure: cachetool bench DATA")
    # Under a lease, so that no pull evicts the shards while they are read.
    with cache.snapshot(dataset=dataset) as snapshot:
        shards = snapshot.shards
        charged: dict[str, int] = {}
        for shard in shards:
            charged[shard.format] = charged.get(shard.format, 0) + shard.bytes
        own = max(charged, key=lambda name: charged[name])
        place = {"kind": "cache", "root": str(cache.root), "dataset": snapshot.dataset, "version": snapshot.version}
        with closing(open_input(place)) as opened:
            block = _some(opened.blocks(0, opened.samples))
        where = f"dataset {snapshot.dataset!r} of the cache {cache.root}"
        return Trial(where, own, block, sum(shard.payload for shard in shards))


def of_files(path: Path) -> Trial:
    """Return the first samples of a file or folder that ``convert`` reads. Raises the errors of opening it."""
    with described(path, SourceOptions()) as description, closing(open_input(description)) as opened:
        if not opened.samples:
            raise NotFound(f"{path} has no samples")
        block = _some(opened.blocks(0, opened.samples))
        return Trial(str(path), None, block, opened.samples * (block.nbytes // block.samples))


def _some(blocks: Iterator[Block]) -> Block:
    taken, nbytes = [], 0
    for block in blocks:
        taken.append(block)
        nbytes += block.nbytes
        if nbytes >= BYTES:
            break
    if sum(block.samples for block in taken) < 2:
        raise UsageError("one sample is too few to measure a loader; name more data")
    return Block.concat(taken)


@contextmanager
def deleted(folder: Path) -> Iterator[Path]:
    """Yield the folder, and delete it at the end."""
    try:
        yield folder
    finally:
        with suppress(OSError):
            remove_path(folder)


def fill(
    cache: CacheDir, name: str, block: Block, shards: int, *, compression: str | None = None, dataset: str = "default"
) -> None:
    """Commit the block as ``shards`` shards of a format."""
    kind = compressed(name, compression)
    cache.declare(dataset, block.schema)
    for rows in np.array_split(np.arange(block.samples), min(shards, block.samples)):
        part = block.slice(int(rows[0]), int(rows[-1]) + 1)
        bound = shard_bound(kind, block.schema, part.samples, part.nbytes, cache.layout.disk_block)
        with cache.stage(dataset=dataset, schema=block.schema, format=name, bound=bound) as staging:
            files = ShardFiles(staging.path, kind, block.schema, samples=part.samples, nbytes=part.nbytes)
            files.write(part)
            facts = files.facts()
            row = Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)
            staging.commit(row, origin=Origin())


@contextmanager
def written(trial: Trial, name: str, folder: Path) -> Iterator[CacheDir]:
    """Yield the samples as a cache of one format in ``folder``."""
    with deleted(folder / name) as root, open_cache(root, max_size=_CAP) as cache:
        fill(cache, name, trial.block, _SHARDS)
        yield cache


def files_of(cache: CacheDir) -> list[Path]:
    """Return every file of the shards of a cache."""
    return [path for shard in cache.shards() for path in sorted(shard.path.rglob("*")) if path.is_file()]


def drop(paths: list[Path]) -> None:
    """Ask the kernel to drop these files from memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            # Synced first, because the kernel does not drop pages that are still to be written.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
