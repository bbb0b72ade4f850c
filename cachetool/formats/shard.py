"""One data file and the files beside it: extents, or checksums for a format without extents. Also the two digests of a
shard.

Code that writes samples uses :class:`ShardFiles` (a folder in a cache) or :class:`PlainFile` (a file outside of a
cache). These take blocks and make everything durable. Code that reads samples back compares them with
:func:`stored_checksums` (:func:`check_samples`, :func:`verify_file`). :func:`check_digest` compares the file's digest
before a library opens the file, because a library may crash on a damaged file.
"""

from __future__ import annotations

import io
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import CorruptError
from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.schema import Schema
from cachetool.formats.base import Format, Reader, Written
from cachetool.formats.columnar import corrupt_errors
from cachetool.formats.compression import Compressed
from cachetool.formats.digest import check_plain, digest_of, file_digests, joined_digest
from cachetool.formats.exported import SIDE_FOLDER
from cachetool.formats.files import allocated_bound, missing_is_corrupt, refuse_links, write_durably
from cachetool.formats.files import open_plain as open_file
from cachetool.formats.reading import (
    ExtentsReader,
    check_values,
    compare_checksums,
    extents_bound,
    load_extents,
    write_extents,
)
from cachetool.proc.arrays import load_array
from cachetool.proc.disk import DISK_BLOCK
from cachetool.proc.folders import fsync_folder, make_folder

__all__ = [
    "CHECKSUMS_FILE",
    "PlainFile",
    "ShardFacts",
    "ShardFiles",
    "check_content",
    "check_digest",
    "check_library",
    "check_samples",
    "open_plain",
    "open_shard",
    "samples_within",
    "shard_bound",
    "side_folder",
    "stored_checksums",
    "verify_file",
]

CHECKSUMS_FILE = "checksums.npy"
"""File beside a file without extents, of a format of another package: its checksums, uint64 (fields, samples)."""


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The numbers and digests of a shard that was written."""

    samples: int
    payload: int
    """Bytes of the values."""
    content: str
    """Content digest: equal for equal samples in any format."""
    digest: str
    """File digest over all files of the folder."""
    files: dict[str, str]
    """Digest of each file, by name."""
    data: str
    """Name of the data file."""
    written: Written


def shard_bound(kind: Format, schema: Schema, samples: int, nbytes: int, disk_block: int = DISK_BLOCK) -> int:
    """Return an upper bound, in bytes on disk, of the data and extents of a shard.

    The shard has at most ``samples`` samples and ``nbytes`` bytes of values. ``disk_block`` is what the smallest file
    takes.
    """
    framed = nbytes + kind.bound(schema, samples, 0, disk_block) if isinstance(kind, Compressed) else 0
    extents = allocated_bound(extents_bound(schema, samples, framed=framed), disk_block)
    return kind.bound(schema, samples, nbytes, disk_block) + extents


def samples_within(kind: Format, schema: Schema, most: int, size: int) -> int:
    """Return how many samples of ``size`` bytes of values make a shard of at most ``most`` bytes of values.

    Very small samples get fewer: their keys, positions and checksums may not make the shard more than three times as
    large.
    """
    # The overhead is measured as the difference of two bounds of a million samples, because a format has no function
    # for one sample.
    many = 2**20
    sample_bytes = (shard_bound(kind, schema, many, many * size) - shard_bound(kind, schema, 0, 0)) // many
    # A sample of one byte costs about 90 bytes more. Without this limit a sixteenth of the cap in such samples would
    # ask for six caps (docs/explanation/decisions.md).
    return max(1, most // max(1, size, sample_bytes // 3))


class PlainFile:
    """A writer of the data file ``path`` and of the files beside it, which go into :func:`side_folder`."""

    def __init__(
        self,
        path: Path,
        kind: Format,
        schema: Schema,
        *,
        samples: int,
        nbytes: int,
        side: Path | None = None,
    ) -> None:
        self.path = path
        self.schema = schema
        # In a cache the extents lie in the shard's folder, which the caller has made already.
        self._side, self._shared_side = (side_folder(path), False) if side is None else (side, True)
        self._writer = kind.create(path, schema, samples=samples, nbytes=nbytes)

    def write(self, block: Block) -> None:
        """Append the samples of ``block``."""
        self._writer.write(block)

    def finish(self) -> Written:
        """Complete and fsync everything."""
        written = self._writer.finish()
        if not self._shared_side:
            make_folder(self._side)
        if written.extents is not None:
            write_extents(self._side, written.extents)
        else:
            array = io.BytesIO()
            np.save(array, written.checksums)
            write_durably(self._side / CHECKSUMS_FILE, array.getvalue())
        # For the name of the side folder itself. Its files are durable already.
        fsync_folder(self._side.parent)
        return written

    def abort(self) -> None:
        """Close everything. The caller deletes the written files."""
        self._writer.abort()


class ShardFiles(PlainFile):
    """A writer of ``data.<suffix>`` and its extents into a folder that exists and is empty."""

    def __init__(self, folder: Path, kind: Format, schema: Schema, *, samples: int, nbytes: int) -> None:
        path = folder / f"data{kind.suffix}"
        super().__init__(path, kind, schema, samples=samples, nbytes=nbytes, side=folder)

    def facts(self) -> ShardFacts:
        """Complete everything as :meth:`finish` does, and return the numbers and both digests."""
        written = self.finish()
        # The digests are computed from the files on disk, not from memory, so they cover every byte that a reader will
        # see. The bytes are still in the page cache.
        files = file_digests(self.path.parent)
        return ShardFacts(
            samples=written.samples,
            payload=written.payload,
            content=digest_of(self.schema, [written.checksums]),
            digest=joined_digest(files),
            files=files,
            data=self.path.name,
            written=written,
        )


def side_folder(path: Path) -> Path:
    """Return the folder of a plain file's extents: ``.extents/part-00000.h5/`` for ``part-00000.h5``."""
    return path.parent / SIDE_FOLDER / path.name


def open_shard(
    folder: Path, kind: Format, schema: Schema, *, library: bool = False, digest: str | None = None
) -> Reader:
    """Open the shard that :class:`ShardFiles` wrote into ``folder``.

    It is read by its extents. Without extents, or with ``library``, it is read through the format's library, after its
    bytes were compared with ``digest``, if given. Raises :class:`CorruptError`, naming file or folder, also for a link
    in place of either.
    """
    if library or not (folder / EXTENTS_FILE).exists():
        check_library(folder, digest)
    return _open(folder / f"data{kind.suffix}", folder, kind, schema, library=library, links=False)


def check_library(folder: Path, digest: str | None) -> None:
    """Raise :class:`CorruptError` unless a library may open the shard in ``folder``.

    A library follows links, waits for pipes, and may crash on bytes that do not have the ``digest``.
    """
    # Links and pipes before the digest: reading a pipe would block for ever.
    with missing_is_corrupt(folder):
        check_plain(folder)
    if digest is not None:
        check_digest(folder, digest)


def check_digest(folder: Path, digest: str) -> None:
    """Raise :class:`CorruptError`, naming the ``folder`` of a shard, unless every byte is what was written."""
    try:
        actual = joined_digest(file_digests(folder))
    except OSError as error:
        raise CorruptError(f"{folder} cannot be read: {error}") from error
    if actual != digest:
        # The folder is CACHE/shards/ID, so its grandparent is the cache.
        command = f"cachetool verify --cache {shlex.quote(str(folder.parent.parent))}"
        raise CorruptError(f"{folder}: its bytes changed after they were written; find the file with: {command}")


def open_plain(path: Path, kind: Format, schema: Schema) -> Reader:
    """Open the file that :class:`PlainFile` wrote, by its extents or through the format's library."""
    return _open(path, side_folder(path), kind, schema, library=False, links=True)


def _open(path: Path, side: Path, kind: Format, schema: Schema, *, library: bool, links: bool) -> Reader:
    extents = side / EXTENTS_FILE
    if library or not extents.exists():
        return kind.open(path, schema=schema)
    return ExtentsReader(path.parent, load_extents(extents, schema, links=links), schema, links=links)


def stored_checksums(side: Path, schema: Schema, *, links: bool = False) -> npt.NDArray[np.uint64]:
    """Return the checksums of every value of a file, (fields, samples), from ``side``.

    ``side`` is the shard's folder or a :func:`side_folder`. ``links``: follow links in it. Raises :class:`CorruptError`
    naming the file that is missing or damaged.
    """
    if not links:
        refuse_links(str(side), ())
    if (side / EXTENTS_FILE).exists():
        return load_extents(side / EXTENTS_FILE, schema, links=links).checksums
    path = side / CHECKSUMS_FILE
    with corrupt_errors(f"{path} cannot be read"):
        with missing_is_corrupt(path):
            # NumPy would follow a link and wait for a pipe. So the file is opened once before, only for this check.
            os.close(open_file(path, links=links)[0])
        # Mapped: a header that claims more bytes than the file has is an error before anything is allocated for it.
        checksums = load_array(path, mapped=True)
        if checksums.dtype != np.uint64 or checksums.ndim != 2 or len(checksums) != len(schema):
            raise CorruptError(
                f"{path} holds {checksums.dtype} {checksums.shape}, not the checksums of {len(schema)} fields"
            )
        return np.array(checksums, dtype=np.uint64)


def check_content(side: Path, schema: Schema, content: str, *, links: bool = False) -> npt.NDArray[np.uint64]:
    """Return :func:`stored_checksums` after a comparison with the digest ``content``. Raises :class:`CorruptError`
    naming the file."""
    checksums = stored_checksums(side, schema, links=links)
    if digest_of(schema, [checksums]) != content:
        name = EXTENTS_FILE if (side / EXTENTS_FILE).exists() else CHECKSUMS_FILE
        raise CorruptError(f"{side / name} does not hold the checksums of the samples that were written")
    return checksums


def check_samples(
    actual: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64], schema: Schema, *, name: str, first: int = 0
) -> None:
    """Raise :class:`CorruptError`, naming the file ``name``, sample and field, if checksums differ.

    Both arrays are (fields, samples). Their first sample has the number ``first``.
    """
    if actual.shape != expected.shape:
        raise CorruptError(f"{name}: {actual.shape[1]} samples were read, {expected.shape[1]} were written")
    compare_checksums(actual, expected, schema, name=name, indices=np.arange(first, first + actual.shape[1]))


def verify_file(path: Path, kind: Format, schema: Schema, expected: npt.NDArray[np.uint64]) -> None:
    """Read a whole file through its format's own library and compare every value with its checksum.

    Raises :class:`CorruptError` naming file, sample and field.
    """
    # One sample first, then up to eight times as many, until a block has about 8 MB: the size of a sample is unknown
    # before one is read.
    step = 1
    with kind.open(path, schema=schema) as reader:
        if reader.samples != expected.shape[1]:
            raise CorruptError(f"{path}: {reader.samples} samples read back, {expected.shape[1]} were written")
        at = 0
        while at < reader.samples:
            indices = np.arange(at, min(at + step, reader.samples))
            block = reader.read(at, int(indices[-1]) + 1)
            check_values(block, expected[:, indices], name=str(path), indices=indices)
            at += len(block)
            step = min(8 * step, max(1, len(block) * BLOCK_BYTES // max(1, block.nbytes)))
    # The reader of TFRecord is our own and checks only our own framing. So here another program's reader has to read
    # the file too.
    if kind.name == "tfrecord":
        # Imported here: it loads the code that starts processes, which readers of shards do not need.
        from cachetool.formats.tfrecord_package import worker_reader

        worker_reader().check(path, schema, expected)
