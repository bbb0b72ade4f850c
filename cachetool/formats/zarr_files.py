"""The folder of a Zarr shard and the shard files in it, byte by byte, without zarr.

A shard file has inner chunks one after another, then their index, little-endian: offset and size (u64 each) of every
inner chunk, and the crc32c of all that. This is Zarr v3, codec ``sharding_indexed`` with ``index_location`` ``end``
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/). A missing chunk has 2**64 - 1 for both
numbers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from cachetool.core.errors import CorruptError, UsageError
from cachetool.formats.columnar import ArrayPlan
from cachetool.formats.files import BulkFile, allocated_bound, capacity_errors
from cachetool.formats.frames import framed_overhead
from cachetool.formats.runs import Bytes, Int64s, ends
from cachetool.proc.disk import DISK_BLOCK, whole_blocks
from cachetool.proc.folders import fsync_folder, make_folder

__all__ = [
    "INNER_BYTES",
    "METADATA",
    "Folder",
    "check_shard_file",
    "chunk_key",
    "folder_bound",
    "inner_rows",
    "plain_chunks",
    "plain_file",
    "plain_file_bytes",
    "plain_index",
    "shard_index",
]

INNER_BYTES = 2**18
"""Least bytes of an inner chunk, if the array has as many."""

METADATA = "zarr.json"
"""Name of the file that describes a group or an array."""


def _folders(key: str) -> list[str]:
    """Return all folders on the way to a key: ``a/b/c`` -> ``a``, ``a/b``, ``a/b/c``."""
    parts = key.split("/")
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def chunk_key(plan: ArrayPlan, shard: int = 0) -> str:
    """Return the key, inside the root, of the shard file with this number."""
    # Keys separated by dots: with Zarr's default, slashes, each dimension would be one more folder on disk.
    return f"{plan.name}/c.{shard}" + ".0" * len(plan.row)


def inner_rows(plan: ArrayPlan, rows: int) -> int:
    """Return the rows of an inner chunk of an array of ``rows`` rows."""
    return max(1, min(rows, -(-INNER_BYTES // plan.row_nbytes) if plan.row_nbytes else rows))


def plain_chunks(plan: ArrayPlan, rows: int) -> tuple[int, int]:
    """Return number and size in bytes of the chunks of a plain array of ``rows`` rows. The last chunk is filled up."""
    if not rows or not plan.row_nbytes:
        return 0, 0
    inner = inner_rows(plan, rows)
    return -(-rows // inner), inner * plan.row_nbytes


def plain_file_bytes(plan: ArrayPlan, rows: int) -> int:
    """Return the bytes of the shard file of a plain array, or 0 when the array has no file."""
    chunks, chunk_nbytes = plain_chunks(plan, rows)
    return chunks * (chunk_nbytes + 16) + 4 if chunks else 0


def plain_index(chunks: int, chunk_nbytes: int) -> bytes:
    """Return the index of a shard file of raw chunks in order."""
    return shard_index(np.full(chunks, chunk_nbytes, dtype=np.int64))


def shard_index(sizes: Int64s) -> bytes:
    """Return the index of a shard file of chunks of these sizes, one after another."""
    # Imported here, so that looking at a bound or a folder needs no extra module.
    import crc32c

    table = np.empty((len(sizes), 2), dtype="<u8")
    table[:, 0] = ends(sizes)[:-1]
    table[:, 1] = sizes
    raw = table.tobytes()
    return raw + int(crc32c.crc32c(raw)).to_bytes(4, "little")


def folder_bound(
    plans: Iterable[ArrayPlan], samples: int, nbytes: int, *, about: int, framed: bool, disk_block: int
) -> int:
    """Return the most bytes on disk of a folder of these arrays.

    ``nbytes``: bytes of all values. ``about``: bytes of the root's attribute. ``framed``: the arrays are compressed.
    ``disk_block``: bytes that the smallest file or folder takes.
    """
    plans = tuple(plans)
    data = nbytes
    # Bytes of the names in every folder: a folder of many names takes more than one disk block.
    entries = {"": 0}
    total = whole_blocks(1024 + 2 * about, disk_block) + disk_block
    for plan in plans:
        rows = plan.rows(samples, -(-nbytes // plan.dtype.itemsize))
        if plan.role != "values":
            data += rows * plan.row_nbytes
        # The last inner chunk is filled up to its full size, unless it is the only one.
        inner = inner_rows(plan, rows)
        data += (inner - 1) * plan.row_nbytes if rows > inner else 0
        entries |= {name: 0 for name in _folders(plan.name) if name not in entries}
        total += whole_blocks(2048 + 128 * len(plan.row), disk_block)
    # The index of the chunks, and the bytes that codecs add to data that does not compress.
    data += 16 * (data // INNER_BYTES + len(plans))
    data += framed_overhead(data, len(plans)) if framed else 0
    for name in entries:
        parent, _, last = name.rpartition("/")
        entries[parent] += 2 * (len(last) + 16) if name else 256
        total += disk_block
    names = sum(whole_blocks(size, disk_block) for size in entries.values())
    return total + allocated_bound(data, disk_block) + 3 * disk_block * len(plans) + names


class Folder:
    """The folder of a shard while it is written. Files are named by their key in Zarr's store."""

    def __init__(self, path: Path) -> None:
        """Make the folder. Raises :class:`UsageError` when ``path`` exists."""
        self.path = path
        self._made: dict[Path, None] = {path: None}
        try:
            with capacity_errors(path, DISK_BLOCK):
                make_folder(path)
        except FileExistsError as error:
            raise UsageError(f"{path} exists already; it is never overwritten") from error

    def file(self, key: str, bound: int) -> BulkFile:
        """Return a new file of at most ``bound`` bytes, after its folders were made."""
        for name in _folders(key)[:-1]:
            # The order of making is kept: it is parents first, so the reverse order syncs inner folders first.
            if (folder := self.path / name) not in self._made:
                with capacity_errors(folder, DISK_BLOCK):
                    make_folder(folder)
                self._made[folder] = None
        return BulkFile.create(self.path / key, bound)

    def put(self, key: str, pieces: Sequence[bytes | memoryview | Bytes]) -> None:
        """Write a whole file. Its bytes are durable at the end, its name only after :meth:`sync`."""
        file = self.file(key, sum(len(piece) for piece in pieces))
        try:
            file.append(*pieces)
            file.finish()
        finally:
            file.close()

    def sync(self) -> None:
        """Make all names durable, inner folders first."""
        # Inner folders first: a folder's name must not be durable before the names in it, or a power cut would leave an
        # array without its files.
        for folder in reversed(self._made):
            fsync_folder(folder)


def plain_file(root: str, key: str) -> int:
    """Return the size of a file below ``root``, which is a real path.

    Raises :class:`CorruptError`, naming the file, unless it exists, is a plain file, and no link leads to it.
    """
    path = f"{root}/{key}"
    try:
        # lstat and realpath: zarr follows links, and a link in a foreign folder may lead to any file of the user.
        status = os.lstat(path)
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing") from error
    if not stat.S_ISREG(status.st_mode) or os.path.realpath(path) != path:
        raise CorruptError(f"{path} is not a plain file of this folder, so it is not read")
    return status.st_size


def check_shard_file(root: str, key: str, *, chunks: int, used: int, chunk_nbytes: int, plain: bool) -> None:
    """Raise :class:`CorruptError`, naming the file, unless it is whole and its index has the first ``used`` chunks.

    ``chunks`` is the length of the index. ``plain``: the chunks are raw, of ``chunk_nbytes`` bytes, and in order.
    """
    path = f"{root}/{key}"
    size = plain_file(root, key)
    end = 16 * chunks + 4
    # Zarr reads a chunk that is missing as fill values, without an error, so damage must be found here.
    if size < end or (plain and size != chunks * chunk_nbytes + end):
        raise CorruptError(f"{path} is cut short or grew: {size} bytes for {chunks} chunks of {chunk_nbytes} bytes")
    with open(path, "rb") as file:
        file.seek(size - end)
        # The index alone is read, so opening a shard of many gigabytes stays fast.
        tail = file.read(end)
    if plain and tail != plain_index(chunks, chunk_nbytes):
        raise CorruptError(f"{path}: the index of its chunks is damaged")
    table = np.frombuffer(tail, dtype="<u8", count=2 * used).reshape(used, 2)
    # A chunk that was left out has 2**64 - 1 for both numbers, which is larger than any file.
    room = np.uint64(size - end)
    # The single numbers first: the sum of two large ones may wrap around and look small.
    if (table > room).any() or (table.sum(axis=1, dtype=np.uint64) > room).any():
        raise CorruptError(f"{path}: the index of its chunks lacks a chunk, or points beyond its {size} bytes")
