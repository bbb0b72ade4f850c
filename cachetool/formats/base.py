"""The interface of a format: a writer that takes blocks, a reader that returns blocks, and an upper bound of the disk
space.
Formats know nothing of caches, stores or sources. ``path`` is the data file (for Zarr the folder), and a format writes
nothing outside of ``path``. All threads and processes may use one format object. A writer or reader belongs to one
thread of one process and is never pickled.
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
    """The result of a finished writer.

    Example:
        >>> written = writer.finish()
        >>> written.samples, written.checksums.shape
        (2, (1, 2))
    """

    samples: int
    """Number of samples."""
    payload: int
    """Bytes of the values, before any overhead or compression of the format."""
    checksums: npt.NDArray[np.uint64]
    """Checksum xxh3-64 of each value, uint64 of shape (fields, samples), fields in schema order."""
    extents: Extents | None
    """Positions of the values. File names are relative to the folder that holds ``path``. None: without extents the
    loaders read a shard through the library of its format."""


class Writer(Protocol):
    """A writer of one shard.

    Call :meth:`write` any number of times, then either :meth:`finish` or :meth:`abort` once.

    Example:
        >>> writer = get_format("lmdb").create(Path("data.lmdb"), schema, samples=2, nbytes=8)
        >>> try:
        ...     writer.write(block)
        ...     written = writer.finish()
        ... except BaseException:
        ...     writer.abort()
        ...     raise
    """

    def write(self, block: Block) -> None:
        """Append the samples of a block.

        Args:
            block: Samples of the schema that :meth:`Format.create` got. The writer copies every array that it needs
                after the call.

        Raises:
            UsageError: The block has another schema, or more samples or bytes came than :meth:`Format.create`
                announced.
            CapacityError: The disk is full.
        """
        ...

    def finish(self) -> Written:
        """Complete the files, truncate them to their size and fsync them and their folders.

        Returns:
            The counts, checksums and positions of the written values.

        Raises:
            CapacityError: The disk is full.
            CorruptError: A sample that was read back differs from the written one.
        """
        ...

    def abort(self) -> None:
        """Close all files. The written files may remain on disk for the caller to delete. Never raises."""
        ...


class Reader(Protocol):
    """A reader of one shard through the format's own library, in any order of samples.

    A reader is a context manager that calls :meth:`close` at its end.

    Attributes:
        schema: Fields of the samples.
        samples: Number of samples.

    Example:
        >>> with get_format("lmdb").open(Path("data.lmdb")) as reader:
        ...     block = reader.read(0, reader.samples)
    """

    schema: Schema
    samples: int

    def read(self, start: int, stop: int) -> Block:
        """Return a run of samples.

        Args:
            start: Number of the first sample.
            stop: Number of the sample behind the last one.

        Returns:
            The samples ``start`` to ``stop - 1``.

        Raises:
            UsageError: The run reaches outside the shard.
            CorruptError: The file is damaged.
        """
        ...

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """Return chosen samples.

        Args:
            indices: Numbers of samples, int64 of shape (k,). Repeats are allowed.

        Returns:
            The k samples in the order of ``indices``.

        Raises:
            UsageError: An index lies outside the shard.
            CorruptError: The file is damaged.
        """
        ...

    def close(self) -> None:
        """Close files and memory maps. Blocks that were returned stay valid. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Format(Protocol):
    """One on-disk format, registered by name in :mod:`cachetool.formats`.

    A package adds a format with an entry point; see :mod:`cachetool.formats.registry`.

    Example:
        >>> import numpy as np
        >>> from cachetool.core.block import Block
        >>> from cachetool.core.schema import Field, Schema
        >>> schema = Schema((Field("x", "<f4", ()),))
        >>> block = Block(schema, {"x": np.array([1.0, 2.0], dtype="<f4")})
        >>> writer = get_format("hdf5").create(Path("data.h5"), schema, samples=2, nbytes=8)
        >>> writer.write(block)
        >>> writer.finish().samples
        2
    """

    name: str
    """Name of the format: ``lmdb``, ``hdf5``, ``zarr`` or ``tfrecord`` for the built-in ones."""
    suffix: str
    """Suffix of the files: ``.lmdb``, ``.h5``, ``.zarr``, ``.tfrecord``. A shard's data file is ``data`` + suffix."""
    compressions: tuple[str, ...]
    """Names that ``create(compression=)`` accepts. Empty if the format has no compression."""

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return an upper bound of the disk space of a shard, at any moment while it is written.

        The cache reserves this bound before the first byte is written. The bound counts allocated or apparent bytes,
        whichever are more. It includes folders but not the extents.

        Args:
            schema: Fields of the samples.
            samples: Largest number of samples.
            nbytes: Largest number of bytes of all values together.
            disk_block: Bytes that the smallest file or folder takes. Larger ones take multiples of it.
            compression: One of :attr:`compressions`. Values that do not compress take more than without. Default: no
                compression.

        Returns:
            Number of bytes.
        """
        ...

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a new shard.

        Args:
            path: Data file (for Zarr the folder). It must not exist.
            schema: Fields of the samples.
            samples: Largest number of samples that will be written. Fewer may come.
            nbytes: Largest number of bytes of all values together. Fewer may come.
            compression: One of :attr:`compressions`. Default: no compression.

        Returns:
            A writer, whose bound is allocated on disk already where the file system can do that.

        Raises:
            UsageError: ``path`` exists, or the format cannot hold a field or the compression.
            CapacityError: The disk has too little space for the bound.
        """
        ...

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Open the shard at ``path`` for reading.

        Args:
            path: Data file (for Zarr the folder).
            schema: Fields of the samples. Needed if the file does not contain them (TFRecord); otherwise compared with
                the file's.

        Returns:
            A reader, to be closed by the caller.

        Raises:
            UsageError: The file does not contain its schema and ``schema`` is missing.
            CorruptError: The file, which the message names, is missing, damaged or has another schema.
        """
        ...
