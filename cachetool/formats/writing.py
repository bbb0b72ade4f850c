"""The common part of all writers: checks of blocks, checksums, and reading a few samples back after the files are
closed.
A block is checked against the schema and against the announced numbers of samples and bytes.

::

    write(block) -> canonical columns -> checksums -> _put(block)       the format's own part
    finish()     -> _close() -> extents -> a few samples read back -> Written
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block
from cachetool.core.errors import UsageError
from cachetool.core.extents import Extents, FieldExtents
from cachetool.core.schema import Schema
from cachetool.formats.base import Written
from cachetool.formats.digest import canonical, checksums
from cachetool.formats.reading import ExtentsReader, check_values
from cachetool.proc.folders import fsync_folder

__all__ = ["ShardWriter"]

_READ_BACK, _READ_BACK_BYTES = 16, 16 * 2**20
"""Limits of the samples of a new shard that are read back: 16 samples and 16 MiB of values, but at least one sample."""


class ShardWriter(ABC):
    """The base class of the writers. A format implements :meth:`_put`, :meth:`_close` and :meth:`_abort`."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        self.path = path
        self.schema = schema
        self.announced_samples = samples
        self.announced_nbytes = nbytes
        self.samples = 0
        """Number of samples written so far."""
        self.payload = 0
        """Bytes of the values written so far."""
        self._checksums: list[npt.NDArray[np.uint64]] = []
        self._scalars: dict[str, list[npt.NDArray[np.generic]]] = {f.name: [] for f in schema if f.is_scalar}

    def write(self, block: Block) -> None:
        """Append the samples of ``block``.

        Raises :class:`UsageError` when the block has another schema or more samples or bytes come than were announced,
        and :class:`~cachetool.core.errors.CapacityError` when the disk is full.
        """
        if block.schema != self.schema:
            raise UsageError(
                f"{self.path.name}: a block has another schema, with the fields {', '.join(block.schema.names)}"
            )
        if not block.samples:
            return
        # Checksums and every format must see the same bytes, so the byte order, contiguity and offsets of a block are
        # settled once, here.
        block = canonical(block)
        samples, nbytes = self.samples + block.samples, self.payload + block.nbytes
        # The cache reserved the bound of the announced numbers. More bytes would break its cap, so they are refused
        # before anything is written.
        if samples > self.announced_samples or nbytes > self.announced_nbytes:
            raise UsageError(
                f"{self.path.name}: {samples} samples of {nbytes} bytes written, but at most "
                f"{self.announced_samples} samples of {self.announced_nbytes} bytes were announced"
            )
        self._put(block)
        # After _put, so that a block whose writing failed adds no checksums.
        self._checksums.append(checksums(block))
        for name, parts in self._scalars.items():
            # A copy, because the caller may fill the same block again. Scalars also go into the extents, where a loader
            # reads them without the data file.
            parts.append(np.array(block.columns[name]))
        self.samples, self.payload = samples, nbytes

    def finish(self) -> Written:
        """Complete the files, truncate them to their size, fsync them and their folder, and read a few samples back."""
        # The empty array gives the result its shape and dtype when no block came.
        sums = np.concatenate([np.empty((len(self.schema), 0), dtype=np.uint64), *self._checksums], axis=1)
        located = self._close()
        # The name of the file survives a power cut only when its folder is synced. The file's own fsync does not cover
        # the name.
        fsync_folder(self.path.parent)
        if located is None:
            return Written(self.samples, self.payload, sums, None)
        files, fields = located
        extents = Extents(self.samples, files, {f.name: fields[f.name] for f in self.schema}, sums)
        # A test of the extents: the loaders will trust these positions without the format's library.
        self._read_back(extents)
        return Written(self.samples, self.payload, sums, extents)

    def abort(self) -> None:
        """Close all files and leave them as they are. Never raises."""
        # abort runs while the caller handles the error that matters. An error in here must not replace that one.
        with contextlib.suppress(Exception):
            self._abort()

    def scalar_extents(self) -> dict[str, FieldExtents]:
        """Return the extents of all scalar fields. Their values themselves are the extents: raw columns."""
        return {
            name: FieldExtents(column=np.concatenate([np.empty(0, dtype=self.schema[name].numpy), *parts]))
            for name, parts in self._scalars.items()
        }

    def _read_back(self, extents: Extents) -> None:
        """Compare a few samples, read from the files through their extents, with their checksums."""
        if not self.samples:
            return
        # ``most``: the number of average samples in 16 MiB. Reading back must not make large samples slow to write.
        most = _READ_BACK_BYTES * self.samples // max(1, self.payload)
        count = max(1, min(self.samples, _READ_BACK, most))
        # The seed is fixed, so a failure shows again with the same shard.
        chosen = np.random.default_rng(self.samples).integers(self.samples, size=count)
        # Always the last sample too: an error in a writer's positions adds up and is largest at the end.
        chosen[-1] = self.samples - 1
        name = f"{self.path}, just written"
        with ExtentsReader(self.path.parent, extents, self.schema) as reader:
            # Small samples together, because one look for each was a tenth of the time of a small shard. Large ones one
            # at a time, because several of them may not fit into memory.
            chosen = np.unique(chosen)
            for at in np.split(chosen, len(chosen) if self.payload > _READ_BACK_BYTES else 1):
                check_values(reader.take(at), extents.checksums[:, at], name=name, indices=at)

    @abstractmethod
    def _put(self, block: Block) -> None:
        """Write a non-empty, canonical block. Keep none of its arrays: the caller may use their memory again."""

    @abstractmethod
    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]] | None:
        """Complete, truncate, fsync and close the files. Return their names and the extents of all fields; None if
        compressed."""

    @abstractmethod
    def _abort(self) -> None:
        """Close the files."""
