"""LMDB files by others, of both engines: every value is a sample, its key the sample's ``__key__``.

What the values are is not in the file:

==================  ==================================================================================
``value_format``    field ``value``
==================  ==================================================================================
None, ``bytes``     bytes. Values that look pickled are refused, unless ``bytes`` is asked for
``npy``             the array in each value, as :func:`numpy.save` writes it: fixed, or ragged when sizes differ
``image``           the decoded image, uint8 (height, width, 3), likewise
``raw:DTYPE,SHAPE`` numbers as they lie in memory: ``raw:float32,3x64x64``
==================  ==================================================================================

Entries like ``__len__`` are notes on the file and left out. LMDB trusts its files, and a damaged one can kill the
process that opens it: only the one of :mod:`cachetool.sources.guard` does.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block, Column
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import KEY, Field
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.decode import npy_layout, parse_npy
from cachetool.sources.images import decode_image, image_shape
from cachetool.sources.limits import FREE_VALUE, LMDB_HEAD, is_lmdb
from cachetool.sources.options import SourceOptions
from cachetool.sources.ours import OurFile, our_lmdb
from cachetool.sources.readers import ClosingFile, bounded, field_names, make_schema, reading
from cachetool.sources.rows import joined

__all__ = ["LMDBFile", "check_value_format", "open_lmdb"]

VALUE = "value"
MAX_NOTES = 1000
_NOTES = (b"length", b"num-samples", b"num_samples")
_LOOK = 100
"""Values that are looked at for pickles."""
_COUNT = 2**14
_SEEK = 2**10
"""Every so many samples a key is kept, to go to."""
_TABLE = struct.Struct("<IHHQQQQQ")
"""The record of a named database: ``MDB_db`` of LMDB's mdb.c. Pad, flags, depth; branch, leaf and overflow pages,
entries, and the page of the root."""
_NO_PAGE = 2**64 - 1
_RAW = re.compile(r"raw:([^,]+)(?:,([0-9]+(?:[,x][0-9]+)*))?")
_PICKLED = re.compile(rb"\x80[\x02-\x05](?:[\x8a\x95]|.*\.\Z)", re.DOTALL)


def check_value_format(text: str | None) -> tuple[Field, np.dtype[Any]] | None:
    """The field that ``raw:DTYPE,SHAPE`` describes, and the dtype that its values lie in the file with: that of a field
    is always little-endian. None for the other formats. Raises :class:`UsageError`."""
    if text in (None, "bytes", "npy", "image"):
        return None
    match = _RAW.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"unknown value format {text!r}; there are bytes, npy, image and raw:DTYPE,SHAPE (raw:float32,3x64x64)"
        )
    shape = tuple(int(size) for size in re.split("[,x]", match.group(2))) if match.group(2) else ()
    return Field(VALUE, match.group(1), shape), np.dtype(match.group(1))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some entries of the file, one after another; views of its map."""

    keys: Sequence[memoryview]
    values: Sequence[memoryview]

    def key(self, index: int) -> str:
        """For messages."""
        return repr(bytes(self.keys[index][:60]).decode("utf-8", "backslashreplace"))


def open_lmdb(file: SourceFile, options: SourceOptions) -> OurFile | LMDBFile:
    """The samples of an LMDB file that lies on this machine, by others or of ours."""
    assert file.path is not None
    return our_lmdb(file.path, options) or LMDBFile(file.path, options)


class LMDBFile(ClosingFile):
    """One LMDB file or folder; see :class:`cachetool.sources.readers.RandomAccess`."""

    def __init__(self, path: Path, options: SourceOptions) -> None:
        """Counts the entries and finds the schema. Raises :class:`BadObject` naming the file, and the key."""
        self.path = path
        self._raw = check_value_format(options.value_format)
        self._format = "raw" if self._raw is not None else options.value_format
        self._size = options.resize
        names = field_names(path, [VALUE], [], options)
        if VALUE not in names:
            raise UsageError(f"{path}: its values are the field {VALUE!r}; name it in --fields")
        self._name = names[VALUE]
        self._env: Any = None
        self._txn: Any = None
        self._next = 0
        with reading(str(path)):
            self._stored = self.piece = path.stat().st_size
            try:
                notes: list[str] = []
                self.samples = self._count(notes)
                if not self.samples:
                    raise BadObject(f"{path}: no samples in it")
                self._refuse_pickles()
                fields = [self._find_field(self._name)]
            finally:
                self.close()
        self.schema = make_schema(path, [*fields, Field(KEY, "str")] if options.key else fields, ())
        self.skipped = bounded((name, "a note on the file, not a sample") for name in notes)

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        if start == stop:
            return Block.from_samples(self.schema, [])
        return Block.concat([self._block(b) for b in self._batches(start, stop, nbytes=2**62)])

    def close(self) -> None:
        """Let go of the file; views of it must not be used any more."""
        self._entries: Iterator[tuple[memoryview, memoryview]] = iter(())
        self._next = 0
        if self._env is not None:
            if self._txn is not None:
                self._txn.abort()
            self._env.close()
            self._env = self._txn = None

    def _open(self) -> Any:
        if self._env is None:
            _refuse_others(self.path)
            self._env = lmdb.open(os.fspath(self.path), subdir=False, readonly=True, lock=False, max_dbs=1)
            if self.path.stat().st_size % self._env.stat()["psize"]:  # what is missing of a page would be read as zeros
                raise BadObject(f"{self.path} is cut short: it ends inside of a page")
            self._txn = self._env.begin(buffers=True)
            self._entries, self._next = _samples(self._txn), 0
        return self._txn

    def _batches(self, start: int, stop: int, *, nbytes: int) -> Iterator[_Batch]:
        while start < stop:
            with reading(str(self.path)):
                batch = self._take(start, min(_COUNT, stop - start), nbytes)
            if not batch.keys:
                raise BadObject(f"{self.path}: it ends after {start} of {stop} samples; it was changed meanwhile")
            yield batch
            start += len(batch.keys)

    def _take(self, start: int, count: int, nbytes: int) -> _Batch:
        txn = self._open()
        if not self._next <= start < self._next + _SEEK:
            mark = start // _SEEK
            self._entries, self._next = _samples(txn, self._marks[mark]), mark * _SEEK
        while self._next < start and next(self._entries, None) is not None:
            self._next += 1
        keys: list[memoryview] = []
        values: list[memoryview] = []
        total = 0
        for key, value in self._entries:
            keys.append(key)
            values.append(value)
            total += len(key) + len(value)
            if total >= nbytes or len(keys) >= count:
                break
        self._next += len(keys)
        return _Batch(keys, values)

    def _count(self, notes: list[str]) -> int:
        """Samples in the file. Keys must rise: a tree that leads back into itself would never end. Named databases are
        entries too: they are refused rather than their page numbers read as values."""
        txn = self._open()
        pages = self._env.info()["last_pgno"]
        count, total, last = 0, 0, None
        self._marks: list[bytes] = []
        for view, value in txn.cursor():
            key = bytes(view)
            if last is not None and key <= last:
                raise ValueError(f"its keys are not in order at {key[:50]!r}")
            last = key
            if len(value) == _TABLE.size and _may_be_table(value, pages) and self._is_table(key):
                name = key.rstrip(b"\0").decode("utf-8", "replace")[:50]
                raise UsageError(
                    f"{self.path} holds named databases ({name});\ncopy one into a file of its own, with"
                    f" mdb_dump -s {name} and mdb_load"
                )
            if _is_note(view):
                if len(notes) == MAX_NOTES:
                    raise ValueError(f"more than {MAX_NOTES} of its keys are notes such as {key[:50]!r}")
                notes.append(key.decode("utf-8", "replace")[:100])
                continue
            if count % _SEEK == 0:
                self._marks.append(key)
            count, total = count + 1, total + len(value)
            if total > FREE_VALUE + 4 * self._stored:
                raise BadObject(f"{self.path}: its values overlap: they are more than the file holds")
        return count

    def _is_table(self, key: bytes) -> bool:
        try:
            self._env.open_db(key.rstrip(b"\0"), txn=self._txn, create=False)
        except lmdb.Error:  # an entry like any other
            return False
        return True

    def _refuse_pickles(self) -> None:
        if self._format == "bytes":
            return
        for batch in self._batches(0, min(_LOOK, self.samples), nbytes=BLOCK_BYTES):
            for index in range(len(batch.values)):
                value = batch.values[index]
                if self._raw is not None and len(value) == self._raw[0].nbytes:
                    continue  # numbers, as declared: any bytes are some
                if _PICKLED.match(value):
                    raise BadObject(
                        f"{self.path}: the value of {batch.key(index)} is a Python pickle, which can run any program"
                        " when it is read, so it is not;\nwrite the values again as arrays (numpy.save, tobytes), or"
                        " take them unread with --value-format bytes"
                    )
            return  # what one batch holds is enough

    def _find_field(self, name: str) -> Field:
        """The field of the values: for arrays and images by looking at the beginning of every one."""
        if self._raw is not None:
            return replace(self._raw[0], name=name)
        if self._format in (None, "bytes"):
            return Field(name, "bytes")
        example: dict[str, tuple[str, tuple[int, ...]]] = {}
        fixed = True
        for batch in self._batches(0, self.samples, nbytes=BLOCK_BYTES):
            for index in range(len(batch.values)):
                dtype, shape = self._look(batch, index)
                if not example:
                    example[batch.key(index)] = dtype, shape
                    continue
                ((first, (first_dtype, first_shape)),) = example.items()
                if dtype != first_dtype or len(shape) != len(first_shape):
                    raise BadObject(
                        f"{self.path}: the value of {first} is {first_dtype} {first_shape}, that of {batch.key(index)}"
                        f" {dtype} {shape}: no field can hold both"
                    )
                fixed = fixed and shape == first_shape
        ((dtype, shape),) = example.values()
        return Field(name, dtype, shape if fixed else (None,) * len(shape))

    def _look(self, batch: _Batch, index: int) -> tuple[str, tuple[int, ...]]:
        try:
            if self._format == "image":
                return "|u1", image_shape(batch.values[index], self._size)
            dtype, _, shape, _ = npy_layout(batch.values[index])
            return dtype.newbyteorder("<").str, shape
        except BadObject as error:
            raise BadObject(f"{self.path}: the value of {batch.key(index)}: {error}") from error

    def _block(self, batch: _Batch) -> Block:
        columns: dict[str, Column] = {self._name: self._values(batch)}
        if KEY in self.schema:
            columns[KEY] = joined(batch.keys)
        return Block(self.schema, columns)

    def _values(self, batch: _Batch) -> Column:
        field = self.schema[self._name]
        if field.kind == "bytes":
            return joined(batch.values)
        if self._raw is not None:
            for index, value in enumerate(batch.values):
                if len(value) != field.nbytes:
                    raise BadObject(
                        f"{self.path}: the value of {batch.key(index)} has {len(value)} bytes, not the"
                        f" {field.nbytes} of {field.describe()}"
                    )
            flat = np.frombuffer(b"".join(batch.values), dtype=self._raw[1]).astype(field.numpy, copy=False)
            return flat.reshape(len(batch.values), *field.sizes)
        samples = [self._decode(batch, index) for index in range(len(batch.values))]
        try:
            return Block.from_samples(self.schema.select([self._name]), samples).columns[self._name]
        except UsageError as error:
            raise BadObject(f"{self.path}: it was changed while it was read: {error}") from error

    def _decode(self, batch: _Batch, index: int) -> dict[str, Any]:
        data = batch.values[index]
        try:
            array = decode_image(data, self._size) if self._format == "image" else parse_npy(data)
        except BadObject as error:
            raise BadObject(f"{self.path}: the value of {batch.key(index)}: {error}") from error
        return {self._name: array}


def _refuse_others(file: Path) -> None:
    """Raise :class:`BadObject` for a file that does not begin as LMDB writes one: the library's words are about its
    own calls."""
    with file.open("rb") as opened:
        head = opened.read(LMDB_HEAD)
    if not is_lmdb(head):
        raise BadObject(f"{file} is not an LMDB file: it {'does not begin like one' if head else 'is empty'}")


def _is_note(key: memoryview) -> bool:
    text = bytes(key)
    return text in _NOTES or (len(text) > 4 and text.startswith(b"__") and text.endswith(b"__"))


def _samples(txn: Any, first: bytes | None = None) -> Iterator[tuple[memoryview, memoryview]]:
    """The samples, or those from the key ``first`` on."""
    cursor = txn.cursor()
    if first is not None:
        cursor.set_range(first)
    return ((key, value) for key, value in cursor if not _is_note(key))


def _may_be_table(value: memoryview, last: int) -> bool:
    """Whether 48 bytes can be the record of a named database in a file whose last page has this number: only of these
    LMDB is asked, since that takes longer than all else that is done about an entry."""
    _, _, depth, branch, leaf, overflow, _, root = _TABLE.unpack(value)
    return bool(depth < 64 and max(branch, leaf, overflow) <= last and (root <= last or root == _NO_PAGE))
