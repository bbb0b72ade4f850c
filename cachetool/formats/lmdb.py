"""The format ``lmdb``: each shard is one LMDB file of engine 0.9, which every LMDB since 2011 reads.

Keys are ``b"%012d" % sample``, then ``__len__`` (the number of samples as text) and ``__schema__`` (JSON: a list of
name, dtype, shape). Both sort behind all digits, so a shard is written by appending alone.
:mod:`cachetool.formats.lmdb_values` packs the fields of a sample into its value. ``docs/reference/formats.md``
has a reader without cachetool.

:mod:`cachetool.formats.lmdb_pages` makes the pages of the file. LMDB opens the complete file before it counts as
written. No lock file is made: a shard has one writer, and readers open it only after the writer has finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block
from cachetool.core.closing import Closing
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.extents import FieldExtents
from cachetool.core.schema import Schema
from cachetool.formats.files import BulkFile, allocated_bound, map_file, missing_is_corrupt
from cachetool.formats.lmdb_pages import (
    LARGEST_NODE,
    NODE_HEADER,
    PAGE,
    PAGE_HEADER,
    TreeWriter,
    last_keys,
    read_leaves,
)
from cachetool.formats.lmdb_values import ValueLayout
from cachetool.formats.reading import check_indices, check_range, field_extents
from cachetool.formats.runs import Bytes, Int64s, Placed, ends, windows
from cachetool.formats.writing import ShardWriter
from cachetool.proc.disk import DISK_BLOCK

__all__ = [
    "DATABASE",
    "Environment",
    "KEY",
    "LEN_KEY",
    "LMDB",
    "SCHEMA_KEY",
    "ValueLayout",
    "file_bound",
    "is_ours",
    "keys_of",
    "may_be_database",
    "named_databases",
    "open_environment",
    "read_header",
    "schema_json",
]


KEY = b"%012d"
LEN_KEY, SCHEMA_KEY = b"__len__", b"__schema__"
_KEY_BYTES = 12
_POWERS = 10 ** np.arange(_KEY_BYTES - 1, -1, -1, dtype=np.int64)
# Bytes of a node without its value, and of the pointer to it in the page.
_NODE = NODE_HEADER + _KEY_BYTES + 2
_INLINE = LARGEST_NODE - NODE_HEADER - _KEY_BYTES


def schema_json(schema: Schema) -> bytes:
    """Return the value of ``__schema__``."""
    return json.dumps(schema.to_json(), separators=(",", ":")).encode()


def keys_of(first: int, count: int) -> Bytes:
    """Return the keys of ``count`` samples from ``first`` on, uint8 of shape (samples, 12)."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    # Digits by arithmetic for all keys of a block at once, because Python can format only one key at a time.
    return (numbers[:, None] // _POWERS % 10 + ord("0")).astype(np.uint8)


def file_bound(schema: Schema, samples: int, nbytes: int) -> int:
    """Return an upper bound, in bytes, of a file of at most ``samples`` samples and ``nbytes`` bytes of values.

    The bound is whole pages. A value above about half a page takes whole pages, with a header of 16 bytes in the first
    one.
    """
    layout = ValueLayout(schema)
    room = PAGE - PAGE_HEADER
    if schema.is_fixed:
        if schema.fixed_nbytes:
            # No more samples can come than the bytes of their fixed fields allow. The smaller number keeps the bound
            # tight, and the cap is charged with the bound.
            samples = min(samples, nbytes // schema.fixed_nbytes)
        inline = layout.head <= _INLINE
        node = _NODE + (layout.head + layout.head % 2 if inline else 8)
        leaves = -(-samples // (room // node))
        pages = leaves + (0 if inline else samples * -(-(PAGE_HEADER + layout.head) // PAGE))
    else:
        # For any mixture of sizes: the smaller of two bounds, each linear in bytes and samples. They hold because leaf
        # pages are at least half full, an overflow page holds at least `_INLINE` bytes, and a value wastes less than a
        # page.
        total = nbytes + samples * layout.overhead
        small = total * PAGE // _INLINE + samples * 3 * _NODE
        large = total + samples * (PAGE + 4 * _NODE)
        pages = min(small, large) // PAGE + 1
        leaves = min(pages, samples + 1)
    # A branch page holds more than 64 children: each takes 22 of its 4,080 bytes. The 4 covers the upper levels of a
    # small tree.
    branches = leaves // 64 + 4
    # Two meta pages, two leaves for the last entries, and the pages of a long schema.
    extra = 2 + 2 + len(schema_json(schema)) // PAGE + 2
    return (pages + branches + extra) * PAGE


def is_ours(buffer: Bytes) -> bool:
    """Return True if the LMDB file in ``buffer`` ends with the entries of a cachetool shard. Reads a few pages only."""
    return last_keys(buffer)[-2:] in ([LEN_KEY, SCHEMA_KEY], [SCHEMA_KEY])


def read_header(buffer: Bytes, *, name: str) -> tuple[int, Schema]:
    """Return number of samples and schema of the shard in ``buffer``, after its structure and all keys were checked.

    Raises :class:`CorruptError`, naming ``name``.
    """
    # The structure before anything else: every position below is known to lie inside the file.
    nodes = read_leaves(buffer, name=name)

    def text(array: Int64s, sizes: Int64s, entry: int) -> bytes:
        start = int(array[entry])
        return buffer[start : start + int(sizes[entry])].tobytes()

    def key(entry: int) -> bytes:
        return text(nodes.key_starts, nodes.key_sizes, entry)

    samples = len(nodes.starts) - 2
    if samples < 0 or key(-2) != LEN_KEY or key(-1) != SCHEMA_KEY:
        raise CorruptError(f"{name} is an LMDB file, but not a shard of cachetool: it has no __len__ and __schema__")
    try:
        schema = Schema.from_json(json.loads(text(nodes.starts, nodes.sizes, -1)))
        count = int(text(nodes.starts, nodes.sizes, -2))
    except ValueError as error:
        raise CorruptError(f"{name}: its __schema__ or __len__ is damaged: {error}") from error
    # The keys must be exactly 0 to samples - 1: the extents count on sample i being entry i.
    good = (nodes.key_sizes[:samples] == _KEY_BYTES).all() and count == samples
    if good and samples:
        digits = windows(buffer, _KEY_BYTES)[nodes.key_starts[:samples]].astype(np.int64) - ord("0")
        good = ((digits >= 0) & (digits <= 9)).all() and np.array_equal(digits @ _POWERS, np.arange(samples))
    if not good:
        raise CorruptError(f"{name}: its keys are not the numbers of its {count} samples")
    return samples, schema


# A node has 32 bits for the size of its value.
_MAX_VALUE = 2**32 - 1


class LMDB:
    """The format ``lmdb``; see :class:`cachetool.formats.base.Format`."""

    name = "lmdb"
    suffix = ".lmdb"
    compressions: tuple[str, ...] = ()

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return an upper bound of the disk space; see :func:`file_bound`."""
        return allocated_bound(file_bound(schema, samples, nbytes), disk_block)

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> LMDBWriter:
        """Begin a shard; see :meth:`cachetool.formats.base.Format.create`."""
        if compression is not None:
            raise UsageError(f"lmdb has no compression, got {compression!r}; use hdf5, zarr or tfrecord")
        # The bound is allocated now, so a full disk ends the pull before it fetches anything for this shard.
        file = BulkFile.create(path, file_bound(schema, samples, nbytes))
        return LMDBWriter(path, schema, file, samples=samples, nbytes=nbytes)

    def open(self, path: Path, *, schema: Schema | None = None) -> LMDBReader:
        """Open a shard. The file contains its schema, so ``schema`` is only compared with it."""
        return LMDBReader.open(path, schema=schema)


class LMDBWriter(ShardWriter):
    """A writer of one LMDB file; see :class:`cachetool.formats.base.Writer`."""

    def __init__(self, path: Path, schema: Schema, file: BulkFile, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._layout = ValueLayout(schema)
        self._file = file
        self._tree = TreeWriter(file)
        self._variable: list[Int64s] = []
        self._shapes: dict[str, list[Int64s]] = {f.name: [] for f in schema if f.kind == "ragged"}

    def _put(self, block: Block) -> None:
        totals = self._layout.totals(block)
        if int(totals.max()) > _MAX_VALUE:
            raise UsageError(
                f"{self.path.name}: a sample has {int(totals.max())} bytes, but lmdb holds at most {_MAX_VALUE}"
            )

        def place(out: Bytes, starts: Int64s, part: slice) -> Placed:
            return self._layout.place(block.slice(part.start, part.stop), out, starts)

        self._tree.append(keys_of(self.samples, block.samples), totals, place)
        if self._layout.variable:
            self._variable.append(self._layout.variable_sizes(block))
        for name, shapes in self._shapes.items():
            column = block.columns[name]
            # A copy: the caller may use the block's memory again.
            shapes.append(np.array(column.shapes))  # type: ignore[union-attr]

    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]]:
        for key, value in ((LEN_KEY, b"%d" % self.samples), (SCHEMA_KEY, schema_json(self.schema))):
            self._append_text(key, np.frombuffer(value, dtype=np.uint8))
        # Without the two entries behind the samples.
        starts = self._tree.finish()[: self.samples]
        self._file.finish()
        self._check()
        return (self.path.name,), self._locate(starts)

    def _append_text(self, key: bytes, value: Bytes) -> None:
        """Append one of the two entries behind the samples."""

        def place(out: Bytes, starts: Int64s, _part: slice) -> Placed:
            out[starts[0] : starts[0] + len(value)] = value
            return []

        self._tree.append(np.frombuffer(key, dtype=np.uint8)[None], np.array([len(value)]), place)

    def _check(self) -> None:
        """Raise :class:`CorruptError` unless LMDB finds the expected number of entries in the file."""
        # The pages are of our own making. LMDB must agree before the shard counts as written. The samples themselves
        # are compared by ShardWriter, through their extents.
        with contextlib.closing(open_environment(self.path)) as environment, environment.env.begin() as txn:
            if txn.stat()["entries"] != self.samples + 2 or txn.get(LEN_KEY) != b"%d" % self.samples:
                raise CorruptError(f"{self.path}, just written: LMDB does not find its {self.samples} samples")

    def _locate(self, starts: Int64s) -> dict[str, FieldExtents]:
        """Return the extents of all fields, given the position of each value."""
        fields = self.scalar_extents()
        for name, offset in self._layout.fixed.items():
            if name not in fields:
                fields[name] = field_extents(self.schema[name], offsets=starts + offset)
        if self._layout.variable:
            empty = np.empty((0, len(self._layout.variable)), dtype=np.int64)
            sizes = np.concatenate([empty, *self._variable])
            within, _totals = self._layout.positions(sizes)
            for column, field in enumerate(self._layout.variable):
                shapes = None
                if field.kind == "ragged":
                    shapes = np.concatenate([np.empty((0, field.rank), dtype=np.int64), *self._shapes[field.name]])
                fields[field.name] = field_extents(
                    field, offsets=starts + within[:, column], sizes=sizes[:, column].copy(), shapes=shapes
                )
        return fields

    def _abort(self) -> None:
        self._file.close()


class Environment:
    """A read-only LMDB environment that all readers of this process share. :func:`open_environment` makes it."""

    def __init__(self, key: tuple[int, int], env: Any) -> None:
        self.key = key
        self.env = env
        """The ``lmdb.Environment``. Bytes read with ``buffers=True`` must be copied before the last :meth:`close`."""
        self.users = 0

    def close(self) -> None:
        """Give up one use of the environment. The last user of this process closes it."""
        with _lock:
            self.users -= 1
            # After a fork the table is empty and the environment is closed already; its readers still call close().
            if self.users == 0 and _open.get(self.key) is self:
                del _open[self.key]
                self.env.close()


_open: dict[tuple[int, int], Environment] = {}
# Reentrant, because a signal handler may close a reader while its thread opens another one.
_lock = threading.RLock()


def _after_fork() -> None:
    """Close the environments that a forked child inherited, before the child opens anything."""
    global _lock
    # A new lock: the old one may be held by a thread that does not exist in the child.
    _lock = threading.RLock()
    # py-lmdb refuses to open a file twice in a process, and this mark survives a fork. So the child must close what it
    # inherited, or it could never open these files.
    inherited = list(_open.values())
    _open.clear()
    for environment in inherited:
        environment.env.close()


os.register_at_fork(after_in_child=_after_fork)


DATABASE = struct.Struct("<IHHQQQQQ")
"""The record of a named database: ``MDB_db`` of LMDB's mdb.c. Pad, flags, depth; branch, leaf and overflow pages,
entries, and the page of the root."""
_NO_PAGE = 2**64 - 1


def may_be_database(value: memoryview, last: int) -> bool:
    """Return True if a value can be the record of a named database.

    ``last`` is the number of the file's last page. LMDB is asked about such values only, because its answer takes
    longer than all other work for an entry.
    """
    # Nearly all values of other files have another size, so this test alone spares most calls of LMDB.
    if len(value) != DATABASE.size:
        return False
    _, _, depth, branch, leaf, overflow, _, root = DATABASE.unpack(value)
    return bool(depth < 64 and max(branch, leaf, overflow) <= last and (root <= last or root == _NO_PAGE))


def named_databases(environment: Environment) -> list[str]:
    """Return the names of the databases that an open foreign file holds beside the one without a name."""
    env, names = environment.env, list[str]()
    last = env.info()["last_pgno"]
    with env.begin(buffers=True) as txn:
        for key, value in txn.cursor():
            if not may_be_database(value, last):
                continue
            # Some programs store the name with C's final zero byte.
            name = bytes(key).rstrip(b"\0")
            # A value of 48 bytes may also be an ordinary entry. LMDB's error says so.
            with contextlib.suppress(lmdb.Error):
                try:
                    env.open_db(name, txn=txn, create=False)
                # The environment has space for one handle (max_dbs=1), which the first database took. A second one
                # exists, then.
                except lmdb.DbsFullError:
                    if not names:
                        raise
                names.append(name.decode("utf-8", "backslashreplace"))
    return names


def open_environment(path: Path) -> Environment:
    """Return the environment over the file ``path``, opened at most once per process, by any of its names.

    Give it back with :meth:`Environment.close`. A forked child begins without environments. Raises
    :class:`CorruptError`, naming the file, when LMDB cannot open it, and OSError when the file is missing.
    """
    status = os.stat(path)
    # By device and inode, because one file may have several names (links, relative paths), and py-lmdb compares files
    # too.
    key = (status.st_dev, status.st_ino)
    with _lock:
        environment = _open.get(key)
        if environment is None:
            try:
                # lock=False: a shard never changes, so readers need no lock file, also in a folder that they may not
                # write to.
                env = lmdb.open(os.fsencode(path), subdir=False, readonly=True, lock=False, max_dbs=1)
            except lmdb.Error as error:
                raise CorruptError(f"{path} cannot be opened by LMDB: {error}") from error
            environment = _open[key] = Environment(key, env)
        environment.users += 1
        return environment


class LMDBReader(Closing):
    """A reader of one cachetool shard through py-lmdb; see :class:`cachetool.formats.base.Reader`."""

    def __init__(self, path: Path, schema: Schema, samples: int, environment: Environment) -> None:
        self.path = path
        self.schema = schema
        self.samples = samples
        self._layout = ValueLayout(schema)
        self._environment: Environment | None = environment
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: Path, *, schema: Schema | None) -> LMDBReader:
        """Check the file's structure, then open it. Raises :class:`CorruptError` naming the file."""
        # LMDB follows a damaged page number out of the file and dies of SIGBUS: of 2,000 files with a flipped bit 3
        # killed the process. So all pages are checked before it opens the file.
        with missing_is_corrupt(path):
            buffer = map_file(path)
        samples, stored_schema = read_header(buffer, name=str(path))
        if schema is not None and stored_schema != schema:
            raise CorruptError(f"{path} has other fields than its shard: {', '.join(stored_schema.names)}")
        return cls(path, stored_schema, samples, open_environment(path))

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop - 1``."""
        return self.take(check_range(start, stop, self.samples))

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """Return the samples at ``indices``, in that order."""
        at = check_indices(indices, self.samples)
        environment = self._environment
        # In a forked child the environment is closed. Reading through it would end in SIGSEGV, not in an error.
        if environment is None or self._pid != os.getpid():
            raise UsageError(f"{self.path}: this reader is closed, or belongs to another process; open it again")
        keys = [KEY % n for n in at.tolist()]
        try:
            # buffers=True: the values are views of the map, so only the join below copies them. They are invalid after
            # the transaction.
            with environment.env.begin(buffers=True) as txn:
                values = [txn.get(key) for key in keys]
                if None in values:
                    raise CorruptError(f"{self.path}: sample {int(at[values.index(None)])} is missing")
                sizes = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
                joined = np.frombuffer(b"".join(values), dtype=np.uint8)
        except lmdb.Error as error:
            raise CorruptError(f"{self.path}: LMDB cannot read it: {error}") from error
        return self._layout.decode_block(joined, ends(sizes)[:-1], sizes, where=str(self.path), numbers=at)

    def close(self) -> None:
        """Close the LMDB environment."""
        environment, self._environment = self._environment, None
        # A forked child only has a copy of this object. The environment stays open for the parent that uses it.
        if environment is not None and self._pid == os.getpid():
            environment.close()
