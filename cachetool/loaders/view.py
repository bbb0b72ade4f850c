"""Views: the list of samples of a snapshot, as the shard files that hold them and the place of the i-th sample. No
I/O."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
    """One shard of a cache, or one data file outside of any cache."""

    id: str
    """Id of the shard, or name of the file: unique, and used in messages."""
    format: str
    samples: int
    content: str
    """Content digest: files with equal digests hold the same samples in the same order, in whatever format."""
    # Text and not a Path, because making a thousand paths takes 20 ms an epoch.
    where: str
    """Folder to which the names of its files are relative."""
    file: str = ""
    """Name of the data file; empty for a shard, whose format names its files."""
    digest: str = ""
    """File digest of a shard; empty for a file outside of a cache."""

    @classmethod
    def of_shard(cls, shard: Shard) -> ShardFile:
        """Return the shard file of a shard of a cache."""
        where = f"{shard.folder}/{shard.id}"
        return cls(shard.id, shard.format, shard.samples, shard.content, where, digest=shard.digest)

    @property
    def folder(self) -> Path:
        """The folder :attr:`where` as a path."""
        return Path(self.where)

    @property
    def links(self) -> bool:
        """True if its files may be links, which a user may make in a folder outside of a cache."""
        return bool(self.file)

    @property
    def extents(self) -> Path:
        """Path of its extents file. If the file does not exist, the library of the format reads the data."""
        return Path(self.extents_name)

    @property
    def extents_name(self) -> str:
        """Path of its extents file, as text."""
        side = f"{self.where}/{SIDE_FOLDER}/{self.file}" if self.file else self.where
        return f"{side}/{EXTENTS_FILE}"


@dataclass(frozen=True)
class View:
    """The samples of one snapshot of a dataset, numbered from 0, oldest shard first."""

    version: int
    """Version of the catalog; 1 for files outside of a cache."""
    dataset: str
    schema: Schema
    parts: tuple[ShardFile, ...]
    in_parts: bool = False
    """True if the cache draws one node's share of a source."""
    members: tuple[int, ...] = ()
    """Number of shard files of each dataset of a mixture, one dataset after another; empty for one dataset."""
    schemas: tuple[Schema, ...] = ()
    """The schemas of the datasets of a mixture. :attr:`schema` has the fields that all have."""
    starts: Int64s = field(init=False, repr=False, compare=False)
    """Number of the first sample of each shard file, then the number of all samples: int64, (parts + 1,)."""

    def __post_init__(self) -> None:
        starts = np.zeros(len(self.parts) + 1, dtype=np.int64)
        np.cumsum([part.samples for part in self.parts], out=starts[1:])
        object.__setattr__(self, "starts", starts)

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, before: View | None = None) -> View:
        """Return the view of a leased snapshot. Shard files that the view ``before`` has too are the same objects."""
        where = str(snapshot.folder)
        have = {} if before is None else {part.id: part for part in before.parts}
        parts = []
        for id, format, samples, content, digest in snapshot.columns("id", "format", "samples", "content", "digest"):
            part = have.get(id)
            # Compared, because a repair may correct the row of a shard.
            if part is None or part[1:4] != (format, samples, content) or part.digest != digest:
                part = ShardFile(id, format, samples, content, f"{where}/{id}", "", digest)
            parts.append(part)
        with snapshot.understood():
            return cls(snapshot.version, snapshot.dataset, snapshot.schema, tuple(parts), snapshot.in_parts)

    @classmethod
    def of_shards(cls, version: int, dataset: str, schema: Schema, shards: Iterable[Shard]) -> View:
        """Return the view of these shards of a cache."""
        return cls(version, dataset, schema, tuple(ShardFile.of_shard(shard) for shard in shards))

    @cached_property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.starts[-1])

    def schema_of(self, number: int) -> Schema:
        """Return the schema of the shard file with this number."""
        if not self.members:
            return self.schema
        return self.schemas[int(np.searchsorted(np.cumsum(self.members), number, side="right"))]

    def only(self, numbers: Sequence[int]) -> View:
        """Return the view of these shard files, by their numbers, ascending."""
        edges = np.cumsum((0, *self.members))
        members = tuple(np.diff(np.searchsorted(np.asarray(numbers, dtype=np.int64), edges)).tolist())
        return replace(self, parts=tuple(self.parts[number] for number in numbers), members=members)

    def find(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return the number of the shard file of each sample, and its number within that file. Raises ``IndexError``
        for an index outside of ``0 .. samples - 1``."""
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.samples:
            bad = int(indices.min()) if int(indices.min()) < 0 else int(indices.max())
            raise IndexError(f"index {bad} is outside a dataset of {self.samples} samples")
        parts = np.searchsorted(self.starts, indices, side="right").astype(np.int64) - 1
        return parts, indices - self.starts[parts]

    @cached_property
    def fingerprint(self) -> int:
        """Number of 63 bits that differs if the shard files differ."""
        text = "\n".join(f"{part.id} {part.samples}" for part in self.parts)
        # 63 bits, so that the number fits an int64 in memory that processes share.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def conversion(self, format: str) -> str:
        """Return, for a message, the command that converts these samples to another format."""
        from cachetool.cache.layout import cache_option

        first = self.parts[0]
        if not first.digest:
            return f"cachetool convert {shlex.quote(str(first.folder))} --to {format} --out NEW"
        named = "" if self.dataset == "default" else f" --dataset {shlex.quote(self.dataset)}"
        return f"cachetool convert --to {format}{named}{cache_option(first.folder.parent.parent)}"

    def extends(self, other: View) -> bool:
        """Return True if every index of ``other`` means the same sample here, so that no sample was removed or moved.

        A shard that was converted into another format counts as the same; one that was evicted does not.
        """
        return len(self.parts) >= len(other.parts) and all(
            part.id == other_part.id or (part.content == other_part.content and part.samples == other_part.samples)
            for part, other_part in zip(self.parts, other.parts, strict=False)
        )
