"""Checksums of values and the two digests of a shard.

- :func:`checksums`: one xxh3-64 per value, over its *canonical encoding*, which no format, byte order or shard cut
  changes: a fixed array or scalar is its C-order little-endian bytes; a ragged array is its shape as little-endian
  int64, then those bytes; bytes and str are the raw bytes (UTF-8).
- :class:`ContentDigest`: over those checksums in sample order. Equal for equal data after any chain of conversions.
- :func:`file_digest`: over every byte of every file of a shard. Finds every flipped bit; :func:`file_digests` in which
  file.

They guard against accidents, not against an adversary: xxh3 is no cryptographic hash.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats.files import not_plain, refused_link
from cachetool.formats.runs import as_bytes

__all__ = [
    "ContentDigest",
    "canonical",
    "check_plain",
    "checksums",
    "digest_of",
    "file_digest",
    "file_digests",
    "joined_digest",
]

_CHUNK = 2**20


def canonical(block: Block) -> Block:
    """``block`` with every column little-endian, C-contiguous and, if ragged, compact; views where it is already so.

    Raises :class:`UsageError` naming the field when a column is not what the schema says.
    """
    return Block(block.schema, {f.name: _canonical(f, block.columns[f.name]) for f in block.schema})


def _canonical(field: Field, column: Column) -> Column:
    if isinstance(column, Ragged) == (field.kind == "fixed"):
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got a {type(column).__name__} column")
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.newbyteorder("<") != field.numpy:
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {values.dtype}")
    if not isinstance(column, Ragged):
        if column.shape[1:] != field.sizes:
            raise UsageError(f"field {field.name!r} holds {field.describe()}, got samples of shape {column.shape[1:]}")
        return np.ascontiguousarray(column, dtype=field.numpy)
    tight = column.compact()
    shapes = None
    if field.kind == "ragged":
        if tight.shapes is None or tight.shapes.shape != (len(tight), field.rank):
            raise UsageError(f"field {field.name!r} holds {field.describe()}, got no shapes of that rank")
        shapes = np.ascontiguousarray(tight.shapes, dtype="<i8")
        if not np.array_equal(shapes.prod(axis=1), tight.sizes) or (shapes < 0).any():
            raise UsageError(f"field {field.name!r}: shapes and numbers of values of a block do not agree")
    return Ragged(np.ascontiguousarray(tight.values, dtype=field.numpy), tight.offsets, shapes)


def checksums(block: Block) -> npt.NDArray[np.uint64]:
    """xxh3-64 of every value of ``block`` in its canonical encoding, (fields, samples), fields in schema order."""
    block = canonical(block)
    out = np.empty((len(block.schema), block.samples), dtype=np.uint64)
    for row, field in zip(out, block.schema, strict=True):
        row[:] = _hash_column(field, block.columns[field.name])
    return out


def _hash_column(field: Field, column: Column) -> list[int]:
    hash_one = xxhash.xxh3_64_intdigest
    if not isinstance(column, Ragged):
        view, size = as_bytes(column).data, field.nbytes
        if size == 0:
            return [hash_one(b"")] * len(column)
        return [hash_one(view[at : at + size]) for at in range(0, len(view), size)]
    view = as_bytes(column.values).data
    at = (column.offsets * column.values.itemsize).tolist()
    if column.shapes is None:
        return [hash_one(view[a:b]) for a, b in itertools.pairwise(at)]
    heads, size = as_bytes(column.shapes).data, 8 * field.rank
    return [_hash_two(heads[i * size : (i + 1) * size], view[at[i] : at[i + 1]]) for i in range(len(column))]


def _hash_two(head: memoryview, body: memoryview) -> int:
    hasher = xxhash.xxh3_64(head)
    hasher.update(body)
    return int(hasher.intdigest())


class ContentDigest:
    """A running xxh3-128 over the checksums of all samples, in order; begins with the schema's fingerprint."""

    def __init__(self, schema: Schema) -> None:
        self._hash = xxhash.xxh3_128(schema.fingerprint.encode())
        self._fields = len(schema)

    def update(self, checksums: npt.NDArray[np.uint64]) -> None:
        """Add the next samples, (fields, samples), as :func:`checksums` gives them."""
        if checksums.ndim != 2 or len(checksums) != self._fields:
            raise UsageError(f"checksums of shape {checksums.shape} do not fit a schema of {self._fields} fields")
        # Sample by sample, so that the cut into blocks and shards leaves no trace.
        self._hash.update(as_bytes(checksums.T.astype("<u8")).data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits for the samples so far."""
        return str(self._hash.hexdigest())


def digest_of(schema: Schema, checksums: Iterable[npt.NDArray[np.uint64]]) -> str:
    """Return the content digest of samples, from their checksums in order."""
    digest = ContentDigest(schema)
    for more in checksums:
        digest.update(more)
    return digest.hexdigest()


def file_digest(folder: Path, *, skip: Collection[str] = ("shard.json",)) -> str:
    """xxh3-128 over every byte of every file under ``folder`` and their names; 32 hexadecimal digits.

    A ``folder`` that is a single file is digested without its name. Otherwise as :func:`file_digests`.
    """
    return joined_digest(file_digests(folder, skip=skip)) if folder.is_dir() else _digest_file(folder)


def file_digests(folder: Path, *, skip: Collection[str] = ("shard.json",)) -> dict[str, str]:
    """xxh3-128 of every file under ``folder``, by name, sorted.

    ``skip`` names files of the top folder that are left out. Raises :class:`CorruptError` when something is neither a
    plain file nor a folder, and OSError.
    """
    return {name: _digest_file(folder / name) for name in sorted(_files(folder, "")) if name not in skip}


def check_plain(folder: Path) -> None:
    """Raise :class:`CorruptError` where the folder of a shard, or anything in it, is a link, a pipe or a device: a
    library would open that."""
    if folder.is_symlink():
        raise refused_link(folder)
    _files(folder, "")


def joined_digest(files: Mapping[str, str]) -> str:
    """:func:`file_digest` of a folder of which :func:`file_digests` are known."""
    hasher = xxhash.xxh3_128()
    for name, digest in sorted(files.items()):
        raw = os.fsencode(name)
        # Lengths before names: no two different folders can give the same stream.
        hasher.update(struct.pack("<Q", len(raw)) + raw + digest.encode())
    return str(hasher.hexdigest())


def _files(folder: Path, prefix: str) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                names += _files(folder / entry.name, name + "/")
            elif entry.is_file(follow_symlinks=False):
                names.append(name)
            elif entry.is_symlink():
                raise refused_link(folder / entry.name)
            else:
                raise not_plain(folder / entry.name)
    return names


def _digest_file(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptError(f"{path} is not a plain file")
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return str(hasher.hexdigest())
