"""Checksums of values and the two digests of a shard.

- :func:`checksums`: one xxh3-64 for each value, over the value's *canonical encoding*. No format, byte order or cut
  into shards changes this encoding. A fixed array or scalar is encoded as its C-order little-endian bytes. A ragged
  array is encoded as its shape (little-endian int64) and then those bytes. bytes and str are encoded as their raw bytes
  (UTF-8).
- :class:`ContentDigest`: one digest over those checksums in the order of samples. Equal data has an equal digest after
  any chain of conversions.
- :func:`file_digest`: one digest over every byte of every file of a shard. It finds every flipped bit;
  :func:`file_digests` says in which file.

Checksums and digests detect accidents, not an attacker: xxh3 is not a cryptographic hash.
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
    """Return ``block`` with every column little-endian, C-contiguous and, if ragged, compact; views where it is so
    already.
    Raises :class:`UsageError`, naming the field, when a column does not fit the schema.
    """
    return Block(block.schema, {f.name: _canonical(f, block.columns[f.name]) for f in block.schema})


def _canonical(field: Field, column: Column) -> Column:
    if isinstance(column, Ragged) == (field.kind == "fixed"):
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got a {type(column).__name__} column")
    values = column.values if isinstance(column, Ragged) else column
    # Only the byte order may differ. Any other dtype is a mistake of the caller: a cast here would hide it and change
    # values.
    if values.dtype.newbyteorder("<") != field.numpy:
        raise UsageError(f"field {field.name!r} holds {field.describe()}, got {values.dtype}")
    if not isinstance(column, Ragged):
        if column.shape[1:] != field.sizes:
            raise UsageError(f"field {field.name!r} holds {field.describe()}, got samples of shape {column.shape[1:]}")
        return np.ascontiguousarray(column, dtype=field.numpy)
    # A slice of a block may point into a larger array. Its checksum must not depend on values outside of the slice.
    tight = column.compact()
    shapes = None
    if field.kind == "ragged":
        if tight.shapes is None or tight.shapes.shape != (len(tight), field.rank):
            raise UsageError(f"field {field.name!r} holds {field.describe()}, got no shapes of that rank")
        shapes = np.ascontiguousarray(tight.shapes, dtype="<i8")
        if not np.array_equal(shapes.prod(axis=1), tight.sizes) or (shapes < 0).any():
            raise UsageError(f"field {field.name!r}: the shapes of a block do not fit its numbers of values")
    return Ragged(np.ascontiguousarray(tight.values, dtype=field.numpy), tight.offsets, shapes)


def checksums(block: Block) -> npt.NDArray[np.uint64]:
    """Return the xxh3-64 of every value of ``block`` in its canonical encoding, uint64 (fields, samples) in schema
    order."""
    block = canonical(block)
    out = np.empty((len(block.schema), block.samples), dtype=np.uint64)
    for row, field in zip(out, block.schema, strict=True):
        row[:] = _hash_column(field, block.columns[field.name])
    return out


def _hash_column(field: Field, column: Column) -> list[int]:
    # The one-shot function makes no object for each value. At 4 KB a value takes 0.4 us, so a call costs about as much
    # as the hash.
    hash_one = xxhash.xxh3_64_intdigest
    if not isinstance(column, Ragged):
        view, size = as_bytes(column).data, field.nbytes
        # A step of 0 is an error for range(), so values without bytes get the checksum of an empty string.
        if size == 0:
            return [hash_one(b"")] * len(column)
        return [hash_one(view[at : at + size]) for at in range(0, len(view), size)]
    view = as_bytes(column.values).data
    at = (column.offsets * column.values.itemsize).tolist()
    if column.shapes is None:
        return [hash_one(view[a:b]) for a, b in itertools.pairwise(at)]
    # The shape is part of the checksum: arrays of shape (2, 3) and (3, 2) with equal bytes are different values.
    heads, size = as_bytes(column.shapes).data, 8 * field.rank
    return [_hash_two(heads[i * size : (i + 1) * size], view[at[i] : at[i + 1]]) for i in range(len(column))]


def _hash_two(head: memoryview, body: memoryview) -> int:
    # Two updates instead of joined bytes, because joining would copy the whole array.
    hasher = xxhash.xxh3_64(head)
    hasher.update(body)
    return int(hasher.intdigest())


class ContentDigest:
    """A running xxh3-128 over the checksums of all samples, in order. It begins with the schema's fingerprint."""

    def __init__(self, schema: Schema) -> None:
        # The fingerprint first: equal bytes under other names or dtypes are different samples.
        self._hash = xxhash.xxh3_128(schema.fingerprint.encode())
        self._fields = len(schema)

    def update(self, checksums: npt.NDArray[np.uint64]) -> None:
        """Add the checksums of the next samples, (fields, samples), as :func:`checksums` returns them."""
        if checksums.ndim != 2 or len(checksums) != self._fields:
            raise UsageError(f"checksums of shape {checksums.shape} do not fit a schema of {self._fields} fields")
        # Sample by sample, not field by field. So the digest does not depend on how samples are cut into blocks and
        # shards.
        self._hash.update(as_bytes(checksums.T.astype("<u8")).data)

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits for the samples so far."""
        return str(self._hash.hexdigest())


def digest_of(schema: Schema, checksums: Iterable[npt.NDArray[np.uint64]]) -> str:
    """Return the content digest of samples, given their checksums in order."""
    digest = ContentDigest(schema)
    for more in checksums:
        digest.update(more)
    return digest.hexdigest()


def file_digest(folder: Path, *, skip: Collection[str] = ("shard.json",)) -> str:
    """Return the xxh3-128 over every byte of every file under ``folder`` and over their names, as 32 hexadecimal
    digits.
    If ``folder`` is a single file, its name does not count. Arguments and errors are those of :func:`file_digests`.
    """
    return joined_digest(file_digests(folder, skip=skip)) if folder.is_dir() else _digest_file(folder)


def file_digests(folder: Path, *, skip: Collection[str] = ("shard.json",)) -> dict[str, str]:
    """Return the xxh3-128 of every file under ``folder``, by name, sorted.

    ``skip`` names files of the top folder to leave out. Raises :class:`CorruptError` when an entry is neither a plain
    file nor a folder, and OSError.
    """
    # ``shard.json`` is skipped by default because it holds this digest itself.
    return {name: _digest_file(folder / name) for name in sorted(_files(folder, "")) if name not in skip}


def check_plain(folder: Path) -> None:
    """Raise :class:`CorruptError` if the folder of a shard, or anything in it, is a link, a pipe or a device.

    A format's library would open such an entry.
    """
    if folder.is_symlink():
        raise refused_link(folder)
    _files(folder, "")


def joined_digest(files: Mapping[str, str]) -> str:
    """Return the :func:`file_digest` of a folder, given its :func:`file_digests`."""
    hasher = xxhash.xxh3_128()
    for name, digest in sorted(files.items()):
        raw = os.fsencode(name)
        # The length comes before each name, so no two different folders can give the same stream of bytes.
        hasher.update(struct.pack("<Q", len(raw)) + raw + digest.encode())
    return str(hasher.hexdigest())


def _files(folder: Path, prefix: str) -> list[str]:
    """Return the names of all plain files under ``folder``, each with ``prefix``."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            # No link is followed: a link in a shard may lead to somebody else's file, and a pipe would block the reader
            # for ever.
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
    # O_NOFOLLOW and fstat on the open file: the entry may have been replaced since the folder was listed.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptError(f"{path} is not a plain file")
        # One buffer of 1 MiB for the whole file instead of a new bytes object for each piece. Unbuffered, because a
        # second copy through Python's buffer has no use.
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return str(hasher.hexdigest())
