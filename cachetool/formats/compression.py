"""The choice of a compression for new shards: a name, ``none``, or ``auto``, which tries one on a few samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cachetool.core.block import Block
from cachetool.core.errors import UsageError
from cachetool.core.schema import Schema
from cachetool.core.text import shown
from cachetool.formats.base import Format, Reader, Writer
from cachetool.formats.registry import get_format
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["AUTO", "PROBED", "Compressed", "check_compression", "chosen", "compressed", "compression_of", "saving"]

AUTO = "auto"
"""The name with which the first samples decide."""

# Below this ratio the disk space saved is not worth the time of decoding (docs/how-to/choose-a-format.md).
_LEAST_RATIO = 1.3
# The compression that ``auto`` tries. Only blosc decodes at more than the rate of a disk.
_TRIED = {"zarr": "blosc"}
PROBED = 64
"""Samples that ``auto`` looks at."""
# Bytes of values that are enough for it.
_PROBED_BYTES = 2**24


class Compressed:
    """A format whose new shards are compressed; a :class:`~cachetool.formats.base.Format`."""

    def __init__(self, kind: Format, compression: str) -> None:
        self.kind, self.compression = kind, compression
        self.name, self.suffix, self.compressions = kind.name, kind.suffix, kind.compressions

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return an upper bound of the disk space of a compressed shard."""
        return self.kind.bound(schema, samples, nbytes, disk_block, compression=compression or self.compression)

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a new compressed shard."""
        compression = compression or self.compression
        return self.kind.create(path, schema, samples=samples, nbytes=nbytes, compression=compression)

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Open a shard for reading, compressed or not."""
        return self.kind.open(path, schema=schema)


def compressed(name: str, compression: str | None) -> Format:
    """Return the format ``name``, whose new shards are compressed unless ``compression`` is None."""
    kind = get_format(name)
    return kind if compression is None else Compressed(kind, compression)


def compression_of(kind: Format) -> str | None:
    """Return the compression of new shards of ``kind``."""
    return kind.compression if isinstance(kind, Compressed) else None


def check_compression(kind: Format, compression: str | None) -> str | None:
    """Return the name of a compression of ``kind``, or ``auto``; None for ``none``. Raises :class:`UsageError`."""
    if compression is None or compression == "none":
        return None
    if compression == AUTO:
        if kind.name in _TRIED:
            return AUTO
        raise UsageError(f"--compression auto is for {' and '.join(_TRIED)}, not for {kind.name}; add --to zarr")
    if compression not in kind.compressions:
        have = f"choose one of {', '.join(kind.compressions)}" if kind.compressions else "choose another format"
        raise UsageError(f"{kind.name} has no compression {shown(compression)}; {have}")
    return compression


def saving(kind: Format, blocks: Iterable[Block]) -> float:
    """Return how many times smaller the compression that ``auto`` tries makes the first of these samples."""
    from cachetool.formats.zarr import compressed_bytes

    plain = packed = 0
    for block in blocks:
        plain, packed = plain + block.nbytes, packed + compressed_bytes(block, _TRIED[kind.name])
        if plain >= _PROBED_BYTES:
            break
    return plain / max(1, packed)


def chosen(kind: Format, blocks: Iterable[Block]) -> Format:
    """Return ``kind``, whose new shards are compressed if that pays for samples like these."""
    return Compressed(kind, _TRIED[kind.name]) if saving(kind, blocks) >= _LEAST_RATIO else kind
