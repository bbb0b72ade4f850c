"""HDF5: one ``.h5`` file a shard, its arrays contiguous, made by the library and filled by our own writes.

``docs/formats.md`` has the layout (version 1) and a reader without cachetool; the arrays are those of
:mod:`cachetool.formats.columnar`.

HDF5 places a contiguous dataset when it is made, by its size, which is only known in the end. So the library makes the
metadata twice, in memory (:func:`_skeleton`): for the most samples that may come, which says where arrays are written
while blocks arrive; and for the samples that came, which is what the file gets. Fewer samples move arrays down.

A Python file object for HDF5's ``fileobj`` driver that cannot fail, over memory or over a preallocated file.

HDF5 cannot close a file whose driver raised, and the interpreter then crashes at its end. So :class:`Recorder` keeps
the first error for :meth:`Recorder.check` and goes on as if nothing happened: the file is thrown away then.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Schema
from cachetool.formats.base import Reader, Writer
from cachetool.formats.columnar import (
    ATTRIBUTE,
    STREAM_BYTES,
    ArrayPlan,
    ColumnarReader,
    ColumnarWriter,
    Held,
    Place,
    Steps,
    array_plans,
    corrupt_errors,
    header,
    parse_header,
)
from cachetool.formats.files import BulkFile, allocated_bound
from cachetool.formats.runs import as_bytes
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["HDF5", "Recorder", "SparseImage"]


class SparseImage:
    """The bytes that were written of a file, and where; the rest reads as zeros."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        """Positions and bytes in the order in which they were written; later ones may cover earlier ones."""

    def write(self, at: int, data: memoryview) -> None:
        """Keep a copy of ``data``."""
        self.writes.append((at, bytes(data)))

    def read(self, at: int, count: int) -> bytes:
        """``count`` bytes from ``at``."""
        out = bytearray(count)
        for start, data in self.writes:
            low, high = max(at, start), min(at + count, start + len(data))
            if low < high:
                out[low - at : high - at] = data[low - start : high - start]
        return bytes(out)


class Recorder(io.RawIOBase):
    """Hands writes on with their position, and knows the size of the file."""

    def __init__(self, write: Callable[[int, memoryview], object], read: Callable[[int, int], bytes]) -> None:
        self.size = 0
        """Of the file, as HDF5 has it."""
        self._write, self._read = write, read
        self._at = 0
        self._error: Exception | None = None

    def check(self) -> None:
        """Raise the first error that was met."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, with zeros where the file has nothing."""
        view = memoryview(buffer).cast("B")
        try:
            data = self._read(self._at, len(view))
        except Exception as error:  # noqa: BLE001 - see the module
            data, self._error = b"", self._error or error
        view[: len(data)] = data
        view[len(data) :] = bytes(len(view) - len(data))
        self._at += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        """Hand ``data`` on."""
        view = memoryview(data).cast("B")
        try:
            self._write(self._at, view)
        except Exception as error:  # noqa: BLE001 - see the module
            self._error = self._error or error
        self._at += len(view)
        self.size = max(self.size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size; nothing is handed on."""
        self.size = self._at if size is None else size
        return self.size

    def flush(self) -> None:
        """Nothing is held back."""


_LIBVER = ("earliest", "v110")
_ALIGN = (64, 1)  # where arrays of compressed files begin, and from what size on
_PAGES = (4096, 2**16)  # and of plain ones: from pages memory is copied faster (docs/decisions.md)
_CHUNK_BYTES = 2**19  # a compressed chunk has at least this many, if the array has
_MAX_CHUNK = 2**31  # HDF5 itself ends at 4 GiB, its filters earlier
_MAX_RANK = 32
_MOVE_BYTES = 8 * 2**20
_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32, lzf: all built into h5py


class HDF5:
    """The format ``hdf5``."""

    name = "hdf5"
    suffix = ".h5"
    compressions: tuple[str, ...] = ("gzip", "lzf")

    def bound(self, schema: Schema, samples: int, nbytes: int, disk_block: int = DISK_BLOCK) -> int:
        """Upper bound of the file on disk, while written and after."""
        return allocated_bound(_size_bound(schema, samples, nbytes), disk_block)

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a file of at most ``samples`` samples and ``nbytes`` bytes of values."""
        for plan in array_plans(schema):
            if len(plan.row) >= _MAX_RANK:
                raise UsageError(f"field {plan.name!r}: HDF5 holds {_MAX_RANK - 1} dimensions, got {len(plan.row)}")
            if compression and plan.row_nbytes >= _MAX_CHUNK:
                raise UsageError(f"field {plan.name!r}: a sample of {plan.row_nbytes} bytes is too large to compress")
        if compression is None:
            return _Plain(path, schema, samples=samples, nbytes=nbytes)
        if compression not in self.compressions:
            raise UsageError(f"hdf5 has no compression {compression!r}; use one of {', '.join(self.compressions)}")
        return _Compressed(path, schema, samples=samples, nbytes=nbytes, compression=compression)

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Read the file at ``path``."""
        return _Reader.open(path, schema)


def _size_bound(schema: Schema, samples: int, nbytes: int) -> int:
    """Most bytes of a file, plain or compressed. Found by counting what HDF5 allocates, with room to spare."""
    plans = array_plans(schema)
    data = nbytes + sum(plan.rows(samples) * plan.row_nbytes for plan in plans if plan.role != "values")
    total = 16384 + 2 * len(json.dumps(header(schema, samples))) + data + (data >> 9)
    for plan in plans:
        # Object header, attributes, links; alignment; groups above it; the first two nodes of the tree of its chunks.
        total += 2048 + 2 * len(plan.name) + _PAGES[0]
        total += 4096 * plan.name.count("/") + 2 * _node_bytes(len(plan.row))
    return total + data // _CHUNK_BYTES // 16 * _node_bytes(_MAX_RANK)


def _node_bytes(rank: int) -> int:
    """Bytes of a node of a tree of chunks: 65 keys and 64 children; it holds at least 16 chunks."""
    return 1024 + 65 * 8 * (rank + 3)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that HDF5 gets: it has no type for times."""
    return np.dtype("<i8") if dtype.kind in "mM" else dtype


class _Skeleton(NamedTuple):
    """All of a file but the arrays' bytes."""

    size: int  # of the whole file
    starts: dict[str, int]  # where the bytes of each array begin; 0 for an array without bytes
    writes: Sequence[tuple[int, bytes]]  # metadata: positions and bytes, in the order in which they must be written


def _skeleton(about: dict[str, Any], plans: Sequence[ArrayPlan], rows: Callable[[ArrayPlan], int]) -> _Skeleton:
    """Let HDF5 lay out a file of contiguous datasets, in the order of ``plans``, without writing their bytes."""
    from h5py import h5d, h5p, h5s, h5t

    image, starts = SparseImage(), dict[str, int]()
    record = Recorder(image.write, image.read)
    with _new_file(record, *_PAGES) as file:
        file.attrs[ATTRIBUTE] = json.dumps(about)
        how = h5p.create(h5p.DATASET_CREATE)
        how.set_layout(h5d.CONTIGUOUS)
        how.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5d.FILL_TIME_NEVER)
        how.set_obj_track_times(False)
        links = h5p.create(h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        for plan in plans:
            kind = h5t.py_create(_stored(plan.dtype), logical=True)
            space = h5s.create_simple((rows(plan), *plan.row))
            dataset = h5d.create(file.id, plan.name.encode(), kind, space, dcpl=how, lcpl=links)
            starts[plan.name] = dataset.get_offset() or 0
            _mark_time(file, plan)
    record.check()
    return _Skeleton(record.size, starts, image.writes)


def _new_file(record: Recorder, interval: int, threshold: int) -> Any:
    """A file of HDF5 in which what has ``threshold`` bytes or more begins at a multiple of ``interval``."""
    import h5py

    return h5py.File(record, "w", libver=_LIBVER, alignment_interval=interval, alignment_threshold=threshold)


def _mark_time(file: Any, plan: ArrayPlan) -> None:
    if plan.dtype.kind in "mM":
        file[plan.name].attrs["dtype"] = plan.dtype.str


class _Plain(ColumnarWriter):
    """Contiguous datasets, written by ``pwrite`` where HDF5 placed them."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._streamed = self.streamed(STREAM_BYTES)
        # Streamed arrays come first: their places then depend on nothing but their own sizes.
        self._order = sorted(self.plans, key=lambda plan: plan not in self._streamed)
        most = _skeleton(header(schema, self.capacity), self._streamed, lambda plan: plan.rows(self.capacity))
        self._starts = most.starts
        self._next = dict(most.starts)
        self._held = Held()
        self._file = BulkFile.create(path, _size_bound(schema, samples, nbytes))

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        if plan.name in self._next:
            self._next[plan.name] += self._file.write_at(self._next[plan.name], [as_bytes(rows)])
        else:
            self._held.add(plan.name, rows)

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        final = _skeleton(header(self.schema, self.samples), self._order, self.rows)
        for plan in self._streamed:
            self._move(self._starts[plan.name], final.starts[plan.name], self.samples * plan.row_nbytes)
        for plan in self.plans:
            pieces = [as_bytes(index[plan.name])] if plan.is_index else self._held.pop(plan.name)
            self._file.write_at(final.starts[plan.name], pieces)
        for at, data in final.writes:
            self._file.write_at(at, [data])
        self._file.finish(final.size)
        return {plan.name: (self.path.name, final.starts[plan.name]) for plan in self.plans}

    def _move(self, start: int, target: int, nbytes: int) -> None:
        # A target never lies in bytes still to be moved: in both layouts HDF5 gives room in the same order, from the
        # file's end or from gaps before it, and in this one no array takes more. (Metadata does not go into gaps
        # between arrays: h5py's driver of file objects keeps the free room of each kind apart.)
        if target == start or not nbytes:
            return
        assert target < start, f"HDF5 placed fewer bytes behind more: {target} > {start}"
        buffer, done = memoryview(bytearray(min(nbytes, _MOVE_BYTES))), 0
        while done < nbytes:
            count = os.preadv(self._file.fd, [buffer[: nbytes - done]], start + done)
            if not count:
                raise CorruptError(f"{self.path} became shorter while it was written")
            done += self._file.write_at(target + done, [buffer[:count]])

    def _abort(self) -> None:
        self._file.close()


class _Compressed(ColumnarWriter):
    """Chunked datasets, compressed and written by the library."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._compression = compression
        self._steps = {p.name: Steps(-(-_CHUNK_BYTES // p.row_nbytes)) for p in self.plans if p.row_nbytes}
        self._bulk = BulkFile.create(path, _size_bound(schema, samples, nbytes))
        self._record = Recorder(
            lambda at, data: self._bulk.write_at(at, [data]), lambda at, count: os.pread(self._bulk.fd, count, at)
        )
        try:
            self._file = _new_file(self._record, *_ALIGN)
        except BaseException:
            self._bulk.close()
            raise

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        if (ready := self._steps[plan.name].push(rows)) is not None:
            self._write(plan, ready)

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> None:
        for plan in self.plans:
            if plan.is_index:
                self._append(plan, index[plan.name])
            rows = self._steps[plan.name].remaining_rows() if plan.row_nbytes else None
            if rows is not None:
                self._write(plan, rows)
            elif plan.name not in self._file:
                self._file.create_dataset(plan.name, (self.rows(plan), *plan.row), _stored(plan.dtype))
            _mark_time(self._file, plan)
        self._file.attrs[ATTRIBUTE] = json.dumps(header(self.schema, self.samples))
        self._file.close()
        self._record.check()
        self._bulk.finish(self._record.size)

    def _write(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        rows = rows.view(_stored(plan.dtype))
        if plan.name in self._file:
            dataset = self._file[plan.name]
            dataset.resize(len(dataset) + len(rows), axis=0)
        else:
            dataset = self._file.create_dataset(
                plan.name,
                rows.shape,
                rows.dtype,
                maxshape=(None, *plan.row),
                chunks=(min(self._steps[plan.name].step, len(rows)), *plan.row),
                compression=self._compression,
                shuffle=True,
            )
        dataset[len(dataset) - len(rows) :] = rows
        self._record.check()

    def _abort(self) -> None:
        try:
            self._file.close()
        finally:
            self._bulk.close()


class _Reader(ColumnarReader):
    """Reads a file through h5py, which is opened without a lock: shards never change."""

    def __init__(self, path: Path, schema: Schema, samples: int, file: Any) -> None:
        super().__init__(path, schema, samples)
        self._file = file
        self._datasets: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path, schema: Schema | None) -> _Reader:
        """Open and check the file. Raises :class:`CorruptError` naming it."""
        import h5py

        with corrupt_errors(f"{path} is not a whole HDF5 file"):
            file = h5py.File(path, "r", locking=False)
        try:
            with corrupt_errors(f"{path} cannot be read"):
                stored_schema, samples = parse_header(file.attrs.get(ATTRIBUTE), path=path, schema=schema)
                reader = cls(path, stored_schema, samples, file)
                size = os.path.getsize(path)
                reader._datasets = {name: reader._dataset(plan, size) for name, plan in reader.plans.items()}
                reader._check_lengths()
                return reader
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        self._datasets.clear()
        self._file.close()

    def _length(self, plan: ArrayPlan) -> int:
        return int(self._datasets[plan.name].shape[0])

    def _fetch(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        out = np.empty((stop - start, *plan.row), dtype=_stored(plan.dtype))
        with corrupt_errors(f"{self.path}: {plan.name!r}, rows {start} to {stop}"):
            self._datasets[plan.name].read_direct(out, np.s_[start:stop])
        return out.view(plan.dtype)

    def _dataset(self, plan: ArrayPlan, size: int) -> Any:
        """The dataset of ``plan``: here, in this file, whole, of the dtype and shape that the schema says."""
        import h5py

        what = f"{self.path}: {plan.name!r}"
        parts = plan.name.split("/")
        for depth in range(1, len(parts) + 1):
            if (link := self._file.get("/".join(parts[:depth]), getlink=True)) is None:
                raise CorruptError(f"{what} is missing")
            if not isinstance(link, h5py.HardLink):
                raise CorruptError(f"{what} lies behind a {type(link).__name__}, which is refused")
        dataset = self._file[plan.name]
        if (
            not isinstance(dataset, h5py.Dataset)
            or dataset.dtype != _stored(plan.dtype)
            or dataset.shape is None
            or dataset.shape[1:] != plan.row
        ):
            raise CorruptError(f"{what} is {dataset!r}, not rows of {plan.dtype} {plan.row}")
        how = dataset.id.get_create_plist()
        if how.get_external_count() or how.get_layout() == h5py.h5d.VIRTUAL:
            raise CorruptError(f"{what} takes its bytes from other files, which is refused")
        if how.get_layout() == h5py.h5d.CHUNKED:
            used = {how.get_filter(i)[0] for i in range(how.get_nfilters())}
            if not used <= _FILTERS or dataset.chunks[1:] != plan.row:
                raise CorruptError(f"{what} is not chunked and filtered as cachetool does it")
            chunks = -(-dataset.shape[0] // dataset.chunks[0])
            if dataset.id.get_num_chunks() != chunks:
                raise CorruptError(f"{what} has {dataset.id.get_num_chunks()} of its {chunks} chunks")
        elif dataset.nbytes:
            at = dataset.id.get_offset()
            if at is None or at + dataset.nbytes > size:
                raise CorruptError(f"{what} is cut short: it ends behind the file's {size} bytes")
        return dataset
