"""What a format is: a writer that takes blocks, a reader that gives blocks, and a bound on what it writes.

Formats know nothing of caches, stores or sources. ``path`` is the data file (for Zarr the folder); everything a format
writes lies at ``path``. One format object serves all threads and processes; writers and readers belong to one thread of
one process and are never pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block
from cachetool.core.extents import Extents
from cachetool.core.schema import Schema
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["Format", "Reader", "Writer", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """What a finished writer left on disk."""

    samples: int
    """Number of samples."""
    payload: int
    """Bytes of the values, before any overhead or compression of the format."""
    checksums: npt.NDArray[np.uint64]
    """xxh3-64 of each value, (fields, samples)."""
    extents: Extents | None
    """Where the values lie, files relative to the folder that holds ``path``; None when compressed."""


class Writer(Protocol):
    """Writes one shard. ``write`` any number of times, then exactly one of ``finish`` and ``abort``."""

    def write(self, block: Block) -> None:
        """Append the samples of ``block``; its arrays are not kept after the call unless copied."""
        ...

    def finish(self) -> Written:
        """Complete the files, truncate them to their size and fsync them and their folders."""
        ...

    def abort(self) -> None:
        """Close everything; what was written may stay behind for the caller to delete. Never raises."""
        ...


class Reader(Protocol):
    """Reads one shard through the format's own library, in any order."""

    schema: Schema
    samples: int

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        ...

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """The samples at ``indices``, in that order, repeats allowed."""
        ...

    def close(self) -> None:
        """Let go of files and maps; blocks handed out stay valid. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Format(Protocol):
    """One on-disk format. Registered by name in :mod:`cachetool.formats`."""

    name: str
    """``lmdb``, ``hdf5``, ``zarr``, ``tfrecord``."""
    suffix: str
    """Of its files: ``.lmdb``, ``.h5``, ``.zarr``, ``.tfrecord``. A shard's data file is ``data`` + suffix."""
    compressions: tuple[str, ...]
    """Names that ``create(compression=)`` takes; empty when the format has none."""

    def bound(self, schema: Schema, samples: int, nbytes: int, disk_block: int = DISK_BLOCK) -> int:
        """Upper bound of the bytes on disk (allocated or apparent, whichever is larger) of a shard of at most
        ``samples`` samples and ``nbytes`` bytes of values, at any moment while it is written; folders included,
        extents not. ``disk_block`` is what the smallest file or folder takes; larger ones take multiples of it."""
        ...

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a shard at ``path``, which must not exist, of at most ``samples`` samples and ``nbytes`` bytes of
        values. Fewer may come. Raises :class:`UsageError` for a field the format cannot hold."""
        ...

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Read the shard at ``path``. ``schema`` is needed where the file itself does not say (TFRecord).
        Raises :class:`CorruptError`, naming the file, when it is not what it should be."""
        ...
