"""One shard's files: the format's writer, the extents beside it, and both digests.

Whoever writes a shard, for a cache or as a plain file, goes through :class:`ShardFiles`: blocks in, :class:`ShardFacts`
out, everything durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.block import Block
from cachetool.extents import EXTENTS_FILE
from cachetool.formats.base import Format, Reader, Written
from cachetool.formats.digest import ContentDigest, checksums, file_digests, joined_digest
from cachetool.formats.files import allocated_bound, fsync_folder
from cachetool.formats.reading import ExtentsReader, extents_bound, load_extents, write_extents
from cachetool.schema import Schema

__all__ = ["ShardFacts", "ShardFiles", "open_shard", "shard_bound", "stored_checksums"]


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
    files: dict[str, str]
    """Digest of each of them."""
    data: str
    """Name of the data file."""
    written: Written


def shard_bound(kind: Format, schema: Schema, samples: int, nbytes: int) -> int:
    """Upper bound of the data and the extents of a shard of at most ``samples`` samples and ``nbytes`` of values."""
    return kind.bound(schema, samples, nbytes) + allocated_bound(extents_bound(schema, samples))


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
            write_extents(self.folder, written.extents)
        fsync_folder(self.folder)
        content = ContentDigest(self.schema)
        content.update(written.checksums)
        files = file_digests(self.folder)
        return ShardFacts(
            samples=written.samples,
            payload=written.payload,
            content=content.hexdigest(),
            digest=joined_digest(files),
            files=files,
            data=self.data.name,
            written=written,
        )

    def abort(self) -> None:
        """Close everything; the folder is the caller's to delete."""
        self._writer.abort()


def open_shard(folder: Path, kind: Format, schema: Schema, *, library: bool = False) -> Reader:
    """Read the shard that :class:`ShardFiles` wrote into ``folder``: by its extents, or where it has none, or with
    ``library``, through the format's own library. Raises :class:`CorruptError` naming the file."""
    extents = folder / EXTENTS_FILE
    if library or not extents.exists():
        return kind.open(folder / f"data{kind.suffix}", schema=schema)
    return ExtentsReader(folder, load_extents(extents, schema), schema)


def stored_checksums(folder: Path, kind: Format, schema: Schema) -> npt.NDArray[np.uint64]:
    """Checksums of every value of a shard, (fields, samples): those kept in its extents, or where it has none, of the
    values themselves."""
    extents = folder / EXTENTS_FILE
    if extents.exists():
        return load_extents(extents, schema).checksums
    with open_shard(folder, kind, schema) as reader:
        parts = [checksums(reader.read(at, min(at + 1024, reader.samples))) for at in range(0, reader.samples, 1024)]
    return np.concatenate([np.empty((len(schema), 0), dtype=np.uint64), *parts], axis=1)
