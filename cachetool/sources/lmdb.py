"""LMDB files of other programs, of both engines. Each value is a sample and its key the sample's ``__key__``; or each
key has the values of several streams (:mod:`cachetool.sources.lmdb_streams`), as bytes.

The file does not say what its values are:

==================  ==================================================================================
``value_format``    field ``value``
==================  ==================================================================================
None, ``bytes``     bytes. Values that look pickled are refused, unless ``bytes`` is asked for
``npy``             the array in each value, as :func:`numpy.save` writes it: fixed, or ragged when sizes differ
``image``           the decoded image, uint8 (height, width, 3), likewise
``raw:DTYPE,SHAPE`` numbers as they lie in memory: ``raw:float32,3x64x64``
==================  ==================================================================================

Entries such as ``__len__`` are notes on the file and left out. LMDB does not check what it reads, and a damaged file
can crash the process that opens it. So only the guarded process of :mod:`cachetool.sources.guard` opens one.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block, Column
from cachetool.core.closing import Closing
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import KEY, Field
from cachetool.formats.lmdb import DATABASE, may_be_database
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.decode import npy_layout, parse_npy
from cachetool.sources.images import decode_image, image_outline
from cachetool.sources.limits import FREE_VALUE, LMDB_HEAD, is_lmdb, quoted
from cachetool.sources.lmdb_streams import KeyFacts, Stream, is_note, streams_of
from cachetool.sources.options import SourceOptions
from cachetool.sources.ours import OurFile, our_lmdb
from cachetool.sources.readers import bounded, field_names, make_schema, reading
from cachetool.sources.rows import joined
from cachetool.sources.value_format import VALUE, check_value_format

__all__ = ["LMDBFile", "open_lmdb"]

# Limits against hostile files: notes are listed by name, and each named database takes a handle.
MAX_NOTES = 1000
MAX_TABLES = 64
"""Most named databases in one file."""
_LOOK = 100
"""Number of values that are checked for pickles."""
_COUNT = 2**14
_SEEK = 2**10
"""Number of samples between two keys that are kept, so reading from any sample passes over fewer entries than this."""
# The PROTO opcode with a protocol from 2 to 5, then LONG1 (torch.save begins so), FRAME (protocol 4 and later), or STOP
# as the last byte.
_PICKLED = re.compile(rb"\x80[\x02-\x05](?:[\x8a\x95]|.*\.\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some consecutive entries of the file, as views of its memory map."""

    keys: Sequence[memoryview]
    columns: Sequence[Sequence[memoryview]]
    """The values of each stream."""

    @property
    def values(self) -> Sequence[memoryview]:
        """The values of the first stream."""
        return self.columns[0]

    def key(self, index: int) -> str:
        """Return a key for a message."""
        return repr(bytes(self.keys[index][:60]).decode("utf-8", "backslashreplace"))


def open_lmdb(file: SourceFile, options: SourceOptions) -> OurFile | LMDBFile:
    """Return the samples of an LMDB file on this machine, written by cachetool or by another program."""
    assert file.path is not None
    return our_lmdb(file.path, options) or LMDBFile(file.path, options)


class LMDBFile(Closing):
    """One LMDB file; see :class:`cachetool.sources.readers.RandomAccess`."""

    def __init__(self, path: Path, options: SourceOptions) -> None:
        """Count the entries and find the schema. Raises :class:`BadObject` naming the file and the key."""
        self.path = path
        self._raw = check_value_format(options.value_format)
        self._format = "raw" if self._raw is not None else options.value_format
        self._pixels = options.pixels
        self._env: Any = None
        self._txn: Any = None
        self._next = -1
        self._tables: dict[str, Any] = {}
        with reading(str(path)):
            self._stored = self.piece = path.stat().st_size
            try:
                skipped: list[tuple[str, str]] = []
                self._choose(options, skipped)
                if not self.samples:
                    raise BadObject(f"{path}: no samples in it")
                self._refuse_pickles()
                fields = self._find_fields()
            finally:
                self.close()
        self.schema = make_schema(path, [*fields, Field(KEY, "str")] if options.key else fields, ())
        self.skipped = bounded(skipped)

    def read(self, start: int, stop: int) -> Block:
        """Return the samples from ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} do not exist; the file has {self.samples}")
        if start == stop:
            return Block.from_samples(self.schema, [])
        return Block.concat([self._block(b) for b in self._batches(start, stop, nbytes=2**62)])

    def close(self) -> None:
        """Close the file. Views of it must not be used afterwards."""
        # The iterator is dropped first, because it holds a cursor. A view that is read after env.close() ends the
        # process with SIGSEGV: py-lmdb's views do not keep the environment alive.
        self._entries: Iterator[tuple[tuple[memoryview, memoryview], ...]] = iter(())
        self._next = -1
        if self._env is not None:
            if self._txn is not None:
                self._txn.abort()
            self._env.close()
            self._env = self._txn = None

    def _open(self) -> Any:
        if self._env is None:
            _refuse_others(self.path)
            # lock=False: without it LMDB creates a lock file beside the user's file. No lib_version: both engines are
            # detected.
            self._env = lmdb.open(os.fsencode(self.path), subdir=False, readonly=True, lock=False, max_dbs=MAX_TABLES)
            # The kernel shows the missing end of a cut page as zeros, which would be read as values.
            if self.path.stat().st_size % self._env.stat()["psize"]:
                raise BadObject(f"{self.path} is cut short: it ends inside of a page")
            self._txn = self._env.begin(buffers=True)
            # The old handles belonged to the environment that was closed.
            self._tables = {}
        return self._txn

    def _run(self, first: bytes | None = None) -> Iterator[tuple[tuple[memoryview, memoryview], ...]]:
        """Yield key and value of each stream, for all samples or from the key ``first`` on."""
        txn = self._open()
        streams = [replace(s, database=self._table(s.name)) if s.database is not None else s for s in self._streams]
        # Not strict: the iterator is often left in the middle. _count has compared the keys of all streams before.
        return zip(*(stream.of(txn, first) for stream in streams), strict=False)

    def _table(self, name: str) -> Any:
        """Return the handle of a named database. It is valid while the file is open."""
        if name not in self._tables:
            self._tables[name] = self._env.open_db(self._raw_names[name], txn=self._txn, create=False)
        return self._tables[name]

    def _batches(self, start: int, stop: int, *, nbytes: int) -> Iterator[_Batch]:
        while start < stop:
            with reading(str(self.path)):
                batch = self._take(start, min(_COUNT, stop - start), nbytes)
            if not batch.keys:
                raise BadObject(
                    f"{self.path}: it ends after {start} of {stop} samples, because it was changed while it was read"
                )
            yield batch
            start += len(batch.keys)

    def _take(self, start: int, count: int, nbytes: int) -> _Batch:
        # Reading continues where the last call ended, because positioning a cursor walks the tree from its root. Going
        # back, or far ahead, begins at the nearest kept key.
        if not 0 <= self._next <= start < self._next + _SEEK:
            mark = start // _SEEK
            self._entries, self._next = self._run(self._marks[mark]), mark * _SEEK
        while self._next < start and next(self._entries, None) is not None:
            self._next += 1
        keys: list[memoryview] = []
        columns: list[list[memoryview]] = [[] for _ in self._streams]
        total = 0
        for entries in self._entries:
            keys.append(entries[0][0])
            for (_, value), column in zip(entries, columns, strict=True):
                column.append(value)
                total += len(value)
            total += len(keys[-1])
            if total >= nbytes or len(keys) >= count:
                break
        self._next += len(keys)
        return _Batch(keys, columns)

    def _choose(self, options: SourceOptions, skipped: list[tuple[str, str]]) -> None:
        """Find out what the file's entries are, and which of them are the fields of samples."""
        self._raw_names: dict[str, bytes] = {}
        tables: dict[str, Stream | str] = {}
        facts = self._scan(tables, skipped)
        self._streams = streams_of(self.path, facts, tables, options, skipped)
        present = [stream.name for stream in self._streams]
        names = field_names(self.path, present, skipped, options)
        if not names:
            raise UsageError(f"{self.path}: --fields leaves out all of its fields; name one, such as {present[0]!r}")
        self._streams = [stream for name in names for stream in self._streams if stream.name == name]
        self._names = list(names.values())
        if len(names) > 1 and self._format not in (None, "bytes"):
            raise UsageError(
                f"{self.path}: --value-format {options.value_format} needs one value per sample, but its samples have"
                f" {', '.join(self._names)}; choose one with --fields {self._names[0]}"
            )
        self.samples = facts.count
        if [stream.name for stream in self._streams] != [VALUE] or tables:
            self._count()

    def _scan(self, tables: dict[str, Stream | str], skipped: list[tuple[str, str]]) -> KeyFacts:
        """Read all entries of the database without a name. Named databases are entries there too."""
        txn = self._open()
        pages = self._env.info()["last_pgno"]
        facts, total, notes, last = KeyFacts(), 0, 0, None
        self._marks: list[bytes] = []
        for view, value in txn.cursor():
            key = bytes(view)
            if last is not None and key <= last:
                raise ValueError(f"its keys are not in order at {key[:50]!r}")
            last = key
            if may_be_database(value, pages) and self._is_table(key):
                if len(tables) == MAX_TABLES - 1:
                    raise UsageError(f"{self.path} has too many named databases; at most {MAX_TABLES - 1} can be read")
                name = key.rstrip(b"\0").decode("utf-8", "backslashreplace")[:100]
                facts.tables.append(key)
                tables[name], self._raw_names[name] = _of_table(name, value), key.rstrip(b"\0")
                continue
            if is_note(view):
                notes += 1
                if notes > MAX_NOTES:
                    raise ValueError(f"more than {MAX_NOTES} of its keys are notes such as {key[:50]!r}")
                skipped.append((key.decode("utf-8", "replace")[:100], "a note on the file, not a sample"))
                facts.note(bytes(value[:20]))
                continue
            if facts.count % _SEEK == 0:
                self._marks.append(key)
            facts.add(key)
            total += len(value)
            self._refuse_overlap(total)
        return facts

    def _refuse_overlap(self, total: int) -> None:
        """Raise :class:`BadObject` when the values together are larger than the file."""
        # A hostile tree may point to the same pages from many keys, so that a small file unpacks to any size.
        if total > FREE_VALUE + 4 * self._stored:
            raise BadObject(f"{self.path}: its values overlap: together they are larger than the file")

    def _count(self) -> None:
        """Count the samples whose fields are streams. Raises :class:`BadObject` when a key is missing in one stream."""
        self._marks, count, total, last = [], 0, 0, None
        for entries in self._run():
            key = bytes(entries[0][0])
            if last is not None and key <= last:
                raise ValueError(f"its keys are not in order at {key[:50]!r}")
            last = key
            for stream, (other, _) in zip(self._streams, entries, strict=True):
                if other != key:
                    raise BadObject(
                        f"{self.path}: {quoted(self._streams[0].name)} has the key {key[:50]!r} where"
                        f" {quoted(stream.name)} has {bytes(other[:50])!r}, but all fields of a sample need the same"
                        f" key;\nchoose one of them with --fields {self._names[0]}"
                    )
            if count % _SEEK == 0:
                self._marks.append(key)
            count, total = count + 1, total + sum(len(value) for _, value in entries)
            self._refuse_overlap(total)
        self.samples = count

    def _is_table(self, key: bytes) -> bool:
        try:
            self._env.open_db(key.rstrip(b"\0"), txn=self._txn, create=False)
        except lmdb.DbsFullError:
            # More databases than max_dbs: a database, which _scan refuses with a message.
            return True
        except lmdb.Error:
            # The value only looks like the record of a database: the entry is a sample.
            return False
        return True

    def _refuse_pickles(self) -> None:
        """Raise :class:`BadObject` for values that are Python pickles, which can run any program when they are
        loaded."""
        if self._format == "bytes":
            return
        for batch in self._batches(0, min(_LOOK, self.samples), nbytes=BLOCK_BYTES):
            for index, value in itertools.chain.from_iterable(map(enumerate, batch.columns)):
                if self._raw is not None and len(value) == self._raw[0].nbytes:
                    # Raw numbers of the declared size may begin with any bytes, also with those of a pickle.
                    continue
                if _PICKLED.match(value):
                    raise BadObject(
                        f"{self.path}: the value of {batch.key(index)} is a Python pickle, which is refused, because"
                        " loading it can run any program;\nwrite the values again as arrays (numpy.save, tobytes), or"
                        " read them as plain bytes with --value-format bytes"
                    )
            # The first batch, 100 values or 8 MB, is enough to recognise a file of pickles.
            return

    def _find_fields(self) -> list[Field]:
        """Return the fields of the values. For arrays and images the beginning of every value is read."""
        name = self._names[0]
        if self._raw is not None:
            return [replace(self._raw[0], name=name)]
        if self._format in (None, "bytes"):
            return [Field(name, "bytes") for name in self._names]
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
                        f"{self.path}: the value of {first} is {first_dtype} {first_shape}, but the value of"
                        f" {batch.key(index)} is {dtype} {shape}; no field can hold both"
                    )
                fixed = fixed and shape == first_shape
        ((dtype, shape),) = example.values()
        return [Field(name, dtype, shape if fixed else (None,) * len(shape))]

    def _look(self, batch: _Batch, index: int) -> tuple[str, tuple[int, ...]]:
        try:
            if self._format == "image":
                return image_outline(batch.values[index], self._pixels)
            dtype, _, shape, _ = npy_layout(batch.values[index])
            return dtype.newbyteorder("<").str, shape
        except BadObject as error:
            raise BadObject(f"{self.path}: the value of {batch.key(index)}: {error}") from error

    def _block(self, batch: _Batch) -> Block:
        columns: dict[str, Column] = {
            name: joined(values) for name, values in zip(self._names, batch.columns, strict=True)
        }
        if self.schema[self._names[0]].kind != "bytes":
            columns = {self._names[0]: self._values(batch)}
        if KEY in self.schema:
            columns[KEY] = joined(batch.keys)
        return Block(self.schema, columns)

    def _values(self, batch: _Batch) -> Column:
        field = self.schema[self._names[0]]
        if self._raw is not None:
            for index, value in enumerate(batch.values):
                if len(value) != field.nbytes:
                    raise BadObject(
                        f"{self.path}: the value of {batch.key(index)} has {len(value)} bytes, but"
                        f" {field.describe()} needs {field.nbytes}"
                    )
            # The join copies, so the block stays valid when the file is closed and its memory map is gone.
            flat = np.frombuffer(b"".join(batch.values), dtype=self._raw[1]).astype(field.numpy, copy=False)
            return flat.reshape(len(batch.values), *field.sizes)
        samples = [self._decode(batch, index) for index in range(len(batch.values))]
        try:
            return Block.from_samples(self.schema.select([self._names[0]]), samples).columns[self._names[0]]
        except UsageError as error:
            raise BadObject(f"{self.path}: it was changed while it was read: {error}") from error

    def _decode(self, batch: _Batch, index: int) -> dict[str, Any]:
        data = batch.values[index]
        try:
            pixels = self._pixels
            image = self._format == "image"
            array = decode_image(data, pixels.size, masks=pixels.masks) if image else parse_npy(data)
        except BadObject as error:
            raise BadObject(f"{self.path}: the value of {batch.key(index)}: {error}") from error
        return {self._names[0]: array}


def _refuse_others(file: Path) -> None:
    """Raise :class:`BadObject` for a file that does not begin like an LMDB file."""
    # Checked before LMDB opens the file, because the library's errors name its own calls and would not help a user.
    with file.open("rb") as opened:
        head = opened.read(LMDB_HEAD)
    if not is_lmdb(head):
        raise BadObject(f"{file} is not an LMDB file: it {'does not begin like one' if head else 'is empty'}")


def _of_table(name: str, record: Any) -> Stream | str:
    """Return the stream of a named database, or the reason why it cannot be read."""
    _, flags, _, _, _, _, entries, _ = DATABASE.unpack(record)
    if flags:
        return "its keys have several values (dupsort), or are numbers (integerkey)"
    return Stream(name, database=name, entries=entries) if entries else "no entries in it"
