"""Shards as one LMDB file each, in the format of engine 0.9, which every LMDB since 2011 reads.

Keys are ``b"%012d" % sample``; then ``__len__`` (the count as text) and ``__schema__`` (JSON: a list of name, dtype,
shape). A value is the sample's fields packed as :mod:`cachetool.formats.lmdb_values` has it; ``docs/formats.md`` has a
reader without cachetool.

The file is written through a memory map (``writemap``) after it was allocated whole: without that a full disk kills
the process, with it writing is 3-5 times faster. No lock file is made or left behind: a shard has one writer, and its
readers never meet it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lmdb
import numpy as np
import numpy.typing as npt

from cachetool.block import Block
from cachetool.errors import CapacityError, CorruptError, UsageError
from cachetool.extents import FieldExtents
from cachetool.formats.files import allocate, allocated_bound, capacity_errors, create_exclusive, map_file
from cachetool.formats.lmdb_file import KEY, LEN_KEY, PUTS, SCHEMA_KEY, map_size, read_header, schema_json
from cachetool.formats.lmdb_pages import read_leaves
from cachetool.formats.lmdb_values import ValueLayout
from cachetool.formats.reading import check_indices, check_range, field_extents
from cachetool.formats.runs import Int64s, ends
from cachetool.formats.writing import ShardWriter
from cachetool.schema import Schema

__all__ = ["LMDB", "Environment", "ValueLayout", "open_environment"]

_MAX_VALUE = 2**32 - 1


class LMDB:
    """The format ``lmdb``; see :class:`cachetool.formats.base.Format`."""

    name = "lmdb"
    suffix = ".lmdb"
    compressions: tuple[str, ...] = ()

    def bound(self, schema: Schema, samples: int, nbytes: int) -> int:
        """Upper bound on disk. A value above about half a page takes whole pages, 16 bytes of which are a header."""
        return allocated_bound(map_size(schema, samples, nbytes))

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> LMDBWriter:
        """Begin a shard; see :meth:`cachetool.formats.base.Format.create`."""
        if compression is not None:
            raise UsageError(f"lmdb has no compression, got {compression!r}; use hdf5, zarr or tfrecord")
        return LMDBWriter.create(path, schema, samples=samples, nbytes=nbytes, size=map_size(schema, samples, nbytes))

    def open(self, path: Path, *, schema: Schema | None = None) -> LMDBReader:
        """Read a shard; the schema is in the file, ``schema`` only checks it."""
        return LMDBReader.open(path, schema=schema)


@contextlib.contextmanager
def _lmdb_errors(path: Path, nbytes: int) -> Iterator[None]:
    """LMDB's errors while writing, as ours."""
    with capacity_errors(path, nbytes):
        try:
            yield
        except lmdb.Error as error:
            # LMDB tells the causes of a failed system call apart by their text alone.
            if isinstance(error, lmdb.MemoryError) or "No space left" in str(error) or "quota" in str(error).lower():
                raise CapacityError(f"no room for {nbytes} bytes at {path}: {error}; lower --shard-size") from error
            raise


class LMDBWriter(ShardWriter):
    """Writes one LMDB file; see :class:`cachetool.formats.base.Writer`."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int, fd: int, env: Any, size: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._layout = ValueLayout(schema)
        self._fd = fd
        self._env = env
        self._size = size
        self._txn = env.begin(write=True)
        self._puts = 0
        self._variable: list[Int64s] = []
        self._shapes: dict[str, list[Int64s]] = {f.name: [] for f in schema if f.kind == "ragged"}

    @classmethod
    def create(cls, path: Path, schema: Schema, *, samples: int, nbytes: int, size: int) -> LMDBWriter:
        """Make the file and allocate ``size`` bytes for it."""
        fd = create_exclusive(path)
        try:
            with _lmdb_errors(path, size):
                # The first opening writes the two meta pages; LMDB would not take a file of zeros for a new one.
                lmdb.open(str(path), subdir=False, map_size=min(size, 2**20), lock=False, lib_version=0).close()
                allocated = allocate(fd, path, size)
                env = lmdb.open(
                    str(path),
                    subdir=False,
                    map_size=size,
                    lock=False,
                    writemap=allocated,
                    map_async=True,
                    sync=False,
                    metasync=False,
                    meminit=False,
                )
            return cls(path, schema, samples=samples, nbytes=nbytes, fd=fd, env=env, size=size)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    def _put(self, block: Block) -> None:
        values, starts = self._layout.encode(block)
        sizes = np.diff(starts)
        if int(sizes.max()) > _MAX_VALUE:
            raise UsageError(f"{self.path.name}: a sample of {int(sizes.max())} bytes; lmdb holds at most {_MAX_VALUE}")
        view, keys = values.data, [KEY % n for n in range(self.samples, self.samples + block.samples)]
        for first in range(0, block.samples, PUTS):
            part = slice(first, first + PUTS)
            bounds = starts[first : first + PUTS + 1].tolist()
            self._append(list(zip(keys[part], [view[a:b] for a, b in itertools.pairwise(bounds)], strict=True)))
        if self._layout.variable:
            self._variable.append(self._layout.variable_sizes(block))
        for name, shapes in self._shapes.items():
            column = block.columns[name]
            shapes.append(np.array(column.shapes))  # type: ignore[union-attr]

    def _append(self, items: list[tuple[bytes, Any]]) -> None:
        with _lmdb_errors(self.path, self._size):
            if self._puts + len(items) > PUTS:
                self._txn.commit()
                self._txn = self._env.begin(write=True)
                self._puts = 0
            self._puts += len(items)
            with self._txn.cursor() as cursor:
                cursor.putmulti(items, append=True)

    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]]:
        self._append([(LEN_KEY, b"%d" % self.samples), (SCHEMA_KEY, schema_json(self.schema))])
        with _lmdb_errors(self.path, self._size):
            self._txn.commit()
            used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            self._env.close()
            os.ftruncate(self._fd, used)
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        return (self.path.name,), self._locate()

    def _locate(self) -> dict[str, FieldExtents]:
        nodes = read_leaves(map_file(self.path), name=str(self.path))
        starts = nodes.starts[: self.samples]
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
        try:
            self._txn.abort()
            self._env.close()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Environment:
    """A read-only LMDB environment that this process shares; made by :func:`open_environment`."""

    def __init__(self, key: tuple[int, int], env: Any) -> None:
        self.key = key
        self.env = env
        """The ``lmdb.Environment``. Bytes read with ``buffers=True`` must be copied before the last :meth:`close`."""
        self.users = 0

    def close(self) -> None:
        """Give it back; the last user of this process closes it."""
        with _lock:
            self.users -= 1
            if self.users == 0 and _open.get(self.key) is self:
                del _open[self.key]
                self.env.close()


_open: dict[tuple[int, int], Environment] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """LMDB opens a file once per process and counts what a fork copied: let go of it before anything is opened."""
    global _lock
    _lock = threading.Lock()  # the other one may have been held by a thread that does not exist here
    inherited = list(_open.values())
    _open.clear()
    for environment in inherited:
        environment.env.close()


os.register_at_fork(after_in_child=_after_fork)


def open_environment(path: Path) -> Environment:
    """The environment over the file ``path``, opened at most once per process whatever it is called; give it back with
    :meth:`Environment.close`. A forked child begins with none.

    Raises :class:`CorruptError`, naming the file, when LMDB cannot open it, and OSError when it is not there.
    """
    status = os.stat(path)
    key = (status.st_dev, status.st_ino)
    with _lock:
        found = _open.get(key)
        if found is None:
            try:
                env = lmdb.open(str(path), subdir=False, readonly=True, lock=False, max_dbs=0)
            except lmdb.Error as error:
                raise CorruptError(f"{path} cannot be opened by LMDB: {error}") from error
            found = _open[key] = Environment(key, env)
        found.users += 1
        return found


class LMDBReader:
    """Reads one LMDB shard of ours through py-lmdb; see :class:`cachetool.formats.base.Reader`."""

    def __init__(self, path: Path, schema: Schema, samples: int, environment: Environment) -> None:
        self.path = path
        self.schema = schema
        self.samples = samples
        self._layout = ValueLayout(schema)
        self._environment: Environment | None = environment
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: Path, *, schema: Schema | None) -> LMDBReader:
        """Check the file's structure, then open it: LMDB itself follows a damaged page number out of the file."""
        try:
            buffer = map_file(path)
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing") from error
        samples, found = read_header(buffer, name=str(path))
        if schema is not None and found != schema:
            raise CorruptError(f"{path} holds other fields than its shard says: {', '.join(found.names)}")
        return cls(path, found, samples, open_environment(path))

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        return self.take(check_range(start, stop, self.samples))

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """The samples at ``indices``, in that order."""
        at = check_indices(indices, self.samples)
        environment = self._environment
        if environment is None or self._pid != os.getpid():
            raise UsageError(f"{self.path}: this reader is closed, or belongs to another process; open it again")
        keys = [KEY % n for n in at.tolist()]
        try:
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
        """Give the environment back."""
        environment, self._environment = self._environment, None
        if environment is not None and self._pid == os.getpid():
            environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
