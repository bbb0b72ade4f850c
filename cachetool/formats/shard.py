"""One shard's files: the format's writer, the extents beside it, and both digests.

Whoever writes a shard, for a cache or as a plain file, goes through :class:`ShardFiles`: blocks in, :class:`ShardFacts`
out, everything durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cachetool.block import Block
from cachetool.extents import EXTENTS_FILE, extents_bound
from cachetool.formats.base import Format, Written
from cachetool.formats.digest import ContentDigest, file_digest
from cachetool.formats.files import fsync_folder, write_durably
from cachetool.schema import Schema

__all__ = ["ShardFacts", "ShardFiles", "shard_bound"]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What was written."""

    samples: int
    payload: int
    """Bytes of the values."""
    content: str
    """Content digest: equal for equal samples in any format."""
    digest: str
    """File digest over all files of the folder."""
    data: str
    """Name of the data file."""
    written: Written


def shard_bound(kind: Format, schema: Schema, samples: int, nbytes: int) -> int:
    """Upper bound of the data and the extents of a shard of at most ``samples`` samples and ``nbytes`` of values."""
    return kind.bound(schema, samples, nbytes) + extents_bound(schema, samples)


class ShardFiles:
    """Writes ``data.<suffix>`` and ``extents.bin`` into a folder that exists and is empty."""

    def __init__(
        self,
        folder: Path,
        kind: Format,
        schema: Schema,
        *,
        samples: int,
        nbytes: int,
        compression: str | None = None,
    ) -> None:
        self.folder = folder
        self.data = folder / f"data{kind.suffix}"
        self.schema = schema
        self._writer = kind.create(self.data, schema, samples=samples, nbytes=nbytes, compression=compression)

    def write(self, block: Block) -> None:
        """Append the samples of ``block``."""
        self._writer.write(block)

    def finish(self) -> ShardFacts:
        """Complete and fsync everything."""
        written = self._writer.finish()
        if written.extents is not None:
            write_durably(self.folder / EXTENTS_FILE, written.extents.to_bytes())
        fsync_folder(self.folder)
        content = ContentDigest(self.schema)
        content.update(written.checksums)
        return ShardFacts(
            samples=written.samples,
            payload=written.payload,
            content=content.hexdigest(),
            digest=file_digest(self.folder),
            data=self.data.name,
            written=written,
        )

    def abort(self) -> None:
        """Close everything; the folder is the caller's to delete."""
        self._writer.abort()
