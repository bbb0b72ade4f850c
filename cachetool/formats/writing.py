"""What every writer does alike: check blocks against the schema and the announced size, keep their checksums, and
after closing the files read a few samples back through their extents.

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
"""Samples of a new shard that are read back: at most so many, and of large ones no more than these bytes, but one."""


class ShardWriter(ABC):
    """Base of the writers: a format implements :meth:`_put`, :meth:`_close` and :meth:`_abort`."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        self.path = path
        self.schema = schema
        self.announced_samples = samples
        self.announced_nbytes = nbytes
        self.samples = 0
        """Samples written so far."""
        self.payload = 0
        """Bytes of their values."""
        self._checksums: list[npt.NDArray[np.uint64]] = []
        self._scalars: dict[str, list[npt.NDArray[np.generic]]] = {f.name: [] for f in schema if f.is_scalar}

    def write(self, block: Block) -> None:
        """Append the samples of ``block``.

        Raises :class:`UsageError` when it is of another schema or more than was announced, and
        :class:`~cachetool.core.errors.CapacityError` when the disk is full.
        """
        if block.schema != self.schema:
            raise UsageError(f"{self.path.name}: a block of another schema: {', '.join(block.schema.names)}")
        if not block.samples:
            return
        block = canonical(block)
        samples, nbytes = self.samples + block.samples, self.payload + block.nbytes
        if samples > self.announced_samples or nbytes > self.announced_nbytes:
            raise UsageError(
                f"{self.path.name}: {samples} samples of {nbytes} bytes written, but at most "
                f"{self.announced_samples} samples of {self.announced_nbytes} bytes were announced"
            )
        self._put(block)
        self._checksums.append(checksums(block))
        for name, parts in self._scalars.items():
            parts.append(np.array(block.columns[name]))
        self.samples, self.payload = samples, nbytes

    def finish(self) -> Written:
        """Complete the files, cut them to their size, fsync them and their folder, and read a few samples back."""
        sums = np.concatenate([np.empty((len(self.schema), 0), dtype=np.uint64), *self._checksums], axis=1)
        located = self._close()
        fsync_folder(self.path.parent)
        if located is None:
            return Written(self.samples, self.payload, sums, None)
        files, fields = located
        extents = Extents(self.samples, files, {f.name: fields[f.name] for f in self.schema}, sums)
        self._read_back(extents)
        return Written(self.samples, self.payload, sums, extents)

    def abort(self) -> None:
        """Close everything; the files stay as they are. Never raises."""
        with contextlib.suppress(Exception):  # the caller is already handling the error that matters
            self._abort()

    def scalar_extents(self) -> dict[str, FieldExtents]:
        """Extents of all scalar fields: their raw columns."""
        return {
            name: FieldExtents(column=np.concatenate([np.empty(0, dtype=self.schema[name].numpy), *parts]))
            for name, parts in self._scalars.items()
        }

    def _read_back(self, extents: Extents) -> None:
        if not self.samples:
            return
        most = _READ_BACK_BYTES * self.samples // max(1, self.payload)
        count = max(1, min(self.samples, _READ_BACK, most))
        chosen = np.random.default_rng(self.samples).integers(self.samples, size=count)
        chosen[-1] = self.samples - 1  # a writer that went astray is astray at its end
        name = f"{self.path} just written"
        with ExtentsReader(self.path.parent, extents, self.schema) as reader:
            for at in range(len(chosen)):  # one by one: together they may be more than fits into memory
                one = chosen[at : at + 1]
                check_values(reader.read(one[0], one[0] + 1), extents.checksums[:, one], name=name, indices=one)

    @abstractmethod
    def _put(self, block: Block) -> None:
        """Write a non-empty, canonical block; keep none of its arrays."""

    @abstractmethod
    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]] | None:
        """Complete, cut, fsync and close the files; their names and the extents of all fields, None if compressed."""

    @abstractmethod
    def _abort(self) -> None:
        """Close the files."""
