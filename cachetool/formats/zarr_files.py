"""The folder of a Zarr shard and the shard files in it, byte by byte; without zarr.

A shard file holds inner chunks one after another, then their index, little-endian: offset and size, u64 each, of every
inner chunk, and the crc32c of all that (Zarr v3, codec ``sharding_indexed`` with ``index_location`` ``end``,
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/). A missing chunk has 2**64 - 1 for both.
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
from cachetool.formats.runs import Bytes
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
]

INNER_BYTES = 2**18
"""An inner chunk has at least this many bytes, if the array has."""

METADATA = "zarr.json"
"""Name of the file that describes a group or an array."""


def _folders(key: str) -> list[str]:
    """``a/b/c`` -> ``a``, ``a/b``, ``a/b/c``."""
    parts = key.split("/")
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def chunk_key(plan: ArrayPlan, shard: int = 0) -> str:
    """Where the shard file with that number lies, inside the root."""
    return f"{plan.name}/c.{shard}" + ".0" * len(plan.row)


def inner_rows(plan: ArrayPlan, rows: int) -> int:
    """Rows of an inner chunk of an array of ``rows`` rows."""
    return max(1, min(rows, -(-INNER_BYTES // plan.row_nbytes) if plan.row_nbytes else rows))


def plain_chunks(plan: ArrayPlan, rows: int) -> tuple[int, int]:
    """Number and size in bytes of the chunks of a plain array of ``rows`` rows; the last one is filled up."""
    if not rows or not plan.row_nbytes:
        return 0, 0
    inner = inner_rows(plan, rows)
    return -(-rows // inner), inner * plan.row_nbytes


def plain_file_bytes(plan: ArrayPlan, rows: int) -> int:
    """Bytes of the shard file of a plain array; 0 when it has none."""
    chunks, chunk_nbytes = plain_chunks(plan, rows)
    return chunks * (chunk_nbytes + 16) + 4 if chunks else 0


def plain_index(chunks: int, chunk_nbytes: int) -> bytes:
    """The index of a shard file of raw chunks in order."""
    import crc32c

    table = np.empty((chunks, 2), dtype="<u8")
    table[:, 0] = np.arange(chunks, dtype=np.uint64) * np.uint64(chunk_nbytes)
    table[:, 1] = chunk_nbytes
    raw = table.tobytes()
    return raw + int(crc32c.crc32c(raw)).to_bytes(4, "little")


def folder_bound(
    plans: Iterable[ArrayPlan], samples: int, nbytes: int, *, about: int, file_nbytes: int, disk_block: int
) -> int:
    """Most bytes on disk of a folder of these arrays, plain or compressed.

    ``nbytes`` are those of all values, ``about`` those of the root's attribute, ``file_nbytes`` what a compressed shard
    file holds.
    """
    data = nbytes
    files = 0
    entries = {"": 0}  # bytes of the names in every folder
    total = whole_blocks(1024 + 2 * about, disk_block) + disk_block
    for plan in plans:
        rows = plan.rows(samples, -(-nbytes // plan.dtype.itemsize))
        if plan.role != "values":
            data += rows * plan.row_nbytes
        # The last inner chunk is filled up, unless it is the only one.
        inner = inner_rows(plan, rows)
        data += (inner - 1) * plan.row_nbytes if rows > inner else 0
        files += 1
        entries |= {name: 0 for name in _folders(plan.name) if name not in entries}
        total += whole_blocks(2048 + 128 * len(plan.row), disk_block)
    # What codecs add to bytes that do not compress, and the index of the chunks.
    data += (data >> 8) + 16 * (data // INNER_BYTES + files)
    files += data // file_nbytes
    for name in entries:
        parent, _, last = name.rpartition("/")
        entries[parent] += 2 * (len(last) + 16) if name else 256 + 512 * (data // file_nbytes)
        total += disk_block
    names = sum(whole_blocks(size, disk_block) for size in entries.values())
    return total + allocated_bound(data, disk_block) + 3 * disk_block * files + names


class Folder:
    """The folder of a shard while it is written: files by their key in Zarr's store."""

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
        """A new file of at most ``bound`` bytes; its folders are made."""
        for name in _folders(key)[:-1]:
            if (folder := self.path / name) not in self._made:
                with capacity_errors(folder, DISK_BLOCK):
                    make_folder(folder)
                self._made[folder] = None
        return BulkFile.create(self.path / key, bound)

    def put(self, key: str, pieces: Sequence[bytes | memoryview | Bytes]) -> None:
        """Write a whole file, durably but for its name."""
        file = self.file(key, sum(len(piece) for piece in pieces))
        try:
            file.append(*pieces)
            file.finish()
        finally:
            file.close()

    def sync(self) -> None:
        """Make all names durable, inner folders first."""
        for folder in reversed(self._made):
            fsync_folder(folder)


def plain_file(root: str, key: str) -> int:
    """The size of a file below ``root``, which is a real path.

    Raises :class:`CorruptError` naming it unless it is there, a plain file, and reached without a symbolic link.
    """
    path = f"{root}/{key}"
    try:
        status = os.lstat(path)
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing") from error
    if not stat.S_ISREG(status.st_mode) or os.path.realpath(path) != path:
        raise CorruptError(f"{path} is not a plain file of this folder, which is refused")
    return status.st_size


def check_shard_file(root: str, key: str, *, chunks: int, used: int, chunk_nbytes: int, plain: bool) -> None:
    """Raise :class:`CorruptError` naming the file unless it is whole and its index names the first ``used`` chunks.

    ``chunks`` is the length of the index, ``plain`` says that chunks are raw, of ``chunk_nbytes`` bytes, and in order.
    """
    path = f"{root}/{key}"
    size = plain_file(root, key)
    end = 16 * chunks + 4
    if size < end or (plain and size != chunks * chunk_nbytes + end):
        raise CorruptError(f"{path} is cut short or grew: {size} bytes for {chunks} chunks of {chunk_nbytes} bytes")
    with open(path, "rb") as file:
        file.seek(size - end)
        tail = file.read(end)
    if plain and tail != plain_index(chunks, chunk_nbytes):
        raise CorruptError(f"{path}: the index of its chunks is damaged")
    table = np.frombuffer(tail, dtype="<u8", count=2 * used).reshape(used, 2)
    room = np.uint64(size - end)  # a chunk that was left out has 2**64 - 1
    if (table > room).any() or (table.sum(axis=1, dtype=np.uint64) > room).any():
        raise CorruptError(f"{path}: the index of its chunks leaves one out, or reaches behind its {size} bytes")
