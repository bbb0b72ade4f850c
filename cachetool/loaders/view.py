"""A list of samples: the parts that a snapshot consists of, and where in them the i-th sample is. Values, no I/O."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.schema import Schema
from cachetool.formats.exported import SIDE_FOLDER

if TYPE_CHECKING:
    from cachetool.cache import Shard, Snapshot

__all__ = ["ShardFile", "View"]

Int64s = npt.NDArray[np.int64]


class ShardFile(NamedTuple):
    """One shard of a cache, or one file outside any."""

    id: str
    """Names it in messages and tells it from all others."""
    format: str
    samples: int
    content: str
    """Content digest: parts with the same one hold the same samples in the same order, in whatever format."""
    where: str
    """What the names of its files are relative to; text, since a thousand paths cost 20 ms an epoch."""
    file: str = ""
    """Name of the data file; empty in a shard, where the format says it."""
    digest: str = ""
    """File digest of a shard; empty for a file outside a cache."""

    @classmethod
    def of_shard(cls, shard: Shard) -> ShardFile:
        """A shard of a cache as a part."""
        where = f"{shard.folder}/{shard.id}"
        return cls(shard.id, shard.format, shard.samples, shard.content, where, digest=shard.digest)

    @property
    def folder(self) -> Path:
        """``where`` as a path."""
        return Path(self.where)

    @property
    def links(self) -> bool:
        """Whether its files may be links: a user may have made those of a folder outside a cache."""
        return bool(self.file)

    @property
    def extents(self) -> Path:
        """Its extents; where there is no such file, the format's own library reads it."""
        return Path(self.extents_name)

    @property
    def extents_name(self) -> str:
        """The same as text."""
        side = f"{self.where}/{SIDE_FOLDER}/{self.file}" if self.file else self.where
        return f"{side}/{EXTENTS_FILE}"


@dataclass(frozen=True)
class View:
    """The samples of one snapshot of a dataset, numbered from 0, oldest part first."""

    version: int
    """The catalog's version; 1 for files outside a cache."""
    dataset: str
    schema: Schema
    parts: tuple[ShardFile, ...]
    in_parts: bool = False
    """True when its cache draws one node's share of a source."""
    starts: Int64s = field(init=False, repr=False, compare=False)
    """Number of the first sample of each part, and behind them the number of samples: (parts + 1,)."""

    def __post_init__(self) -> None:
        starts = np.zeros(len(self.parts) + 1, dtype=np.int64)
        np.cumsum([part.samples for part in self.parts], out=starts[1:])
        object.__setattr__(self, "starts", starts)

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> View:
        """The view of what was leased."""
        where = str(snapshot.folder)
        columns = snapshot.columns("id", "format", "samples", "content", "digest")
        parts = tuple(
            ShardFile(id, format, samples, content, f"{where}/{id}", "", digest)
            for id, format, samples, content, digest in columns
        )
        with snapshot.understood():
            return cls(snapshot.version, snapshot.dataset, snapshot.schema, parts, snapshot.in_parts)

    @classmethod
    def of_shards(cls, version: int, dataset: str, schema: Schema, shards: Iterable[Shard]) -> View:
        """The view of these shards of a cache."""
        return cls(version, dataset, schema, tuple(ShardFile.of_shard(shard) for shard in shards))

    @cached_property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.starts[-1])

    def find(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Part number and number within the part of each sample. Raises ``IndexError`` outside ``0 .. samples - 1``."""
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.samples:
            bad = int(indices.min()) if int(indices.min()) < 0 else int(indices.max())
            raise IndexError(f"sample {bad} of a dataset of {self.samples}")
        parts = np.searchsorted(self.starts, indices, side="right").astype(np.int64) - 1
        return parts, indices - self.starts[parts]

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ when the parts do."""
        text = "\n".join(f"{part.id} {part.samples}" for part in self.parts)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def conversion(self, format: str) -> str:
        """The command that makes these samples shards of another format, for messages."""
        from cachetool.cache.layout import cache_option

        first = self.parts[0]
        if not first.digest:
            return f"cachetool convert {shlex.quote(str(first.folder))} --to {format} --out NEW"
        named = "" if self.dataset == "default" else f" --dataset {shlex.quote(self.dataset)}"
        return f"cachetool convert --to {format}{named}{cache_option(first.folder.parent.parent)}"

    def extends(self, other: View) -> bool:
        """Whether every index of ``other`` means the same sample here: nothing of it left or moved.

        A part converted into another format counts as the same; one that was evicted does not.
        """
        return len(self.parts) >= len(other.parts) and all(
            part.id == other_part.id or (part.content == other_part.content and part.samples == other_part.samples)
            for part, other_part in zip(self.parts, other.parts, strict=False)
        )
