"""The format ``hdf5``: each shard is one ``.h5`` file. The library makes its metadata, cachetool writes its contiguous
arrays.
``docs/reference/formats.md`` has the layout (version 1) and a reader without cachetool. The arrays are those of
:mod:`cachetool.formats.columnar`.

HDF5 places a contiguous dataset when the dataset is created, by its size, but the size is known only at the end. So the
library makes the metadata twice, in memory (:func:`_skeleton`). The first time is for the most samples that may come:
it says where arrays are written while blocks arrive. The second time is for the samples that came: this metadata goes
into the file. If fewer samples came, arrays are moved down.

:class:`Recorder` is the file object for HDF5's ``fileobj`` driver, over memory or over a preallocated file. HDF5 cannot
close a file whose driver raised an error, and the interpreter then crashes at exit. So the recorder never raises. It
keeps the first error for :meth:`Recorder.check`, and the caller then throws the file away.
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
from cachetool.core.extents import Frames
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
from cachetool.formats.frames import FRAME_BYTES, framed_overhead
from cachetool.formats.runs import as_bytes
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["HDF5", "Recorder", "SparseImage"]


class SparseImage:
    """The bytes that were written to a file, with their positions. All other bytes read as zeros."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        """Positions and bytes in the order of the writes. A later write may cover an earlier one."""

    def write(self, at: int, data: memoryview) -> None:
        """Keep a copy of ``data``."""
        self.writes.append((at, bytes(data)))

    def read(self, at: int, count: int) -> bytes:
        """Return ``count`` bytes from ``at``."""
        out = bytearray(count)
        # In the order of the writes, because HDF5 writes some metadata again, and the last bytes count.
        for start, data in self.writes:
            low, high = max(at, start), min(at + count, start + len(data))
            if low < high:
                out[low - at : high - at] = data[low - start : high - start]
        return bytes(out)


class Recorder(io.RawIOBase):
    """A file object that passes writes on with their position and knows the size of the file. It never raises."""

    def __init__(self, write: Callable[[int, memoryview], object], read: Callable[[int, int], bytes]) -> None:
        self.size = 0
        """Size of the file in bytes, as HDF5 sees it."""
        self._write, self._read = write, read
        self._at = 0
        self._error: Exception | None = None

    def check(self) -> None:
        """Raise the first error that a read or write met."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, with zeros where the file has no bytes. Return the number of bytes."""
        view = memoryview(buffer).cast("B")
        try:
            data = self._read(self._at, len(view))
        # HDF5 must not see the error; see the module's docstring. It gets zeros.
        except Exception as error:  # noqa: BLE001 - see the module
            data, self._error = b"", self._error or error
        view[: len(data)] = data
        # HDF5 reads behind the end of the file and expects zeros there.
        view[len(data) :] = bytes(len(view) - len(data))
        self._at += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        """Pass ``data`` on. Return the number of bytes."""
        view = memoryview(data).cast("B")
        try:
            self._write(self._at, view)
        # HDF5 must not see the error; see the module's docstring.
        except Exception as error:  # noqa: BLE001 - see the module
            self._error = self._error or error
        self._at += len(view)
        self.size = max(self.size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size, and return it. The size is not passed on: the caller truncates the real file at the end."""
        self.size = self._at if size is None else size
        return self.size

    def flush(self) -> None:
        """Do nothing, because no bytes are buffered."""


# h5py 3.16 bundles HDF5 2.0. With "latest" it writes compressed datasets that HDF5 1.14 cannot read, and TensorFlow
# 2.21 needs an h5py with 1.14. Format 1.10 is readable by all.
_LIBVER = ("earliest", "v110")
# Interval and threshold in bytes. Arrays of compressed files begin at multiples of 64, whatever their size.
_ALIGN = (64, 1)
# Arrays of plain files from 64 KiB on begin at a page: glibc copies 10 to 28 % slower if the destination lies just
# behind the source modulo 4,096. Smaller arrays are packed, because pages for all arrays cost 30 KB a small shard
# (docs/explanation/decisions.md).
_PAGES = (4096, 2**16)
# Bytes of a compressed chunk of an index, if it has as many. Chunks of values are frames.
_CHUNK_BYTES = 2**19
# HDF5 itself ends at chunks of 4 GiB, its filters earlier.
_MAX_CHUNK = 2**31
_MAX_RANK = 32
# Memory for moving an array down in its file.
_MOVE_BYTES = 8 * 2**20
# Numbers of deflate and shuffle. A filter that HDF5 does not have built in would make it load a plugin, which is
# foreign code.
_FILTERS = {1, 2}


class HDF5:
    """The format ``hdf5``; see :class:`cachetool.formats.base.Format`."""

    name = "hdf5"
    suffix = ".h5"
    compressions: tuple[str, ...] = ("gzip",)

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return an upper bound of the disk space, during and after writing."""
        return allocated_bound(_size_bound(schema, samples, nbytes, framed=compression is not None), disk_block)

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a file of at most ``samples`` samples and ``nbytes`` bytes of values.

        Raises :class:`UsageError` for a compression or field that HDF5 does not have.
        """
        for plan in array_plans(schema):
            # The samples are a dimension of their own.
            if len(plan.row) >= _MAX_RANK:
                raise UsageError(f"field {plan.name!r}: HDF5 holds {_MAX_RANK - 1} dimensions, got {len(plan.row)}")
            if compression and plan.row_nbytes >= _MAX_CHUNK:
                raise UsageError(f"field {plan.name!r}: a sample of {plan.row_nbytes} bytes is too large to compress")
        if compression is None:
            return _Plain(path, schema, samples=samples, nbytes=nbytes)
        if compression not in self.compressions:
            raise UsageError(f"hdf5 has no compression {compression!r}; use one of {', '.join(self.compressions)}")
        return _Compressed(path, schema, samples=samples, nbytes=nbytes)

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Open the file at ``path``. Raises :class:`CorruptError` naming it."""
        return _Reader.open(path, schema)


def _size_bound(schema: Schema, samples: int, nbytes: int, *, framed: bool = False) -> int:
    """Return the most bytes of a file. The terms were found by counting what HDF5 allocates, plus spare.

    ``framed``: the arrays are compressed.
    """
    plans = array_plans(schema)
    data = nbytes + sum(plan.rows(samples) * plan.row_nbytes for plan in plans if plan.role != "values")
    total = 16384 + 2 * len(json.dumps(header(schema, samples))) + data + (data >> 9)
    for plan in plans:
        # Object header, attributes, links; alignment; the groups above the array; the first two nodes of the tree of
        # its chunks.
        total += 2048 + 2 * len(plan.name) + _PAGES[0]
        total += 4096 * plan.name.count("/") + 2 * _node_bytes(len(plan.row))
    if framed:
        rank = 1 + max((len(plan.row) for plan in plans), default=0)
        # Each chunk has an entry in a node of its tree, at least 16 to a node.
        total += framed_overhead(data, len(plans)) + 2 * data // FRAME_BYTES // 16 * _node_bytes(rank)
    return total


def _node_bytes(rank: int) -> int:
    """Return the bytes of a node of a tree of chunks: 65 keys and 64 children. A node holds at least 16 chunks."""
    return 1024 + 65 * 8 * (rank + 3)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that HDF5 stores. HDF5 has no type for times, so these are stored as int64."""
    return np.dtype("<i8") if dtype.kind in "mM" else dtype


class _Skeleton(NamedTuple):
    """A file without the bytes of its arrays."""

    size: int
    """Bytes of the whole file."""
    starts: dict[str, int]
    """Position of the bytes of each array; 0 for an array without bytes."""
    writes: Sequence[tuple[int, bytes]]
    """The metadata: positions and bytes, in the order in which they must be written."""


def _skeleton(about: dict[str, Any], plans: Sequence[ArrayPlan], rows: Callable[[ArrayPlan], int]) -> _Skeleton:
    """Let HDF5 lay out a file of contiguous datasets, in the order of ``plans``, without writing their bytes."""
    # Imported here: h5py takes 88 ms to load, and most commands never write HDF5.
    from h5py import h5d, h5p, h5s, h5t

    image, starts = SparseImage(), dict[str, int]()
    record = Recorder(image.write, image.read)
    with _new_file(record, *_PAGES) as file:
        file.attrs[ATTRIBUTE] = json.dumps(about)
        how = h5p.create(h5p.DATASET_CREATE)
        how.set_layout(h5d.CONTIGUOUS)
        # Early allocation gives each dataset its place now. Fill time NEVER keeps HDF5 from writing fill values over
        # the whole array.
        how.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5d.FILL_TIME_NEVER)
        # Without time stamps equal samples make equal files.
        how.set_obj_track_times(False)
        links = h5p.create(h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        for plan in plans:
            kind = h5t.py_create(_stored(plan.dtype), logical=True)
            space = h5s.create_simple((rows(plan), *plan.row))
            dataset = h5d.create(file.id, plan.name.encode(), kind, space, dcpl=how, lcpl=links)
            # HDF5 gives no place to a dataset without bytes.
            starts[plan.name] = dataset.get_offset() or 0
            _mark_time(file, plan)
    record.check()
    return _Skeleton(record.size, starts, image.writes)


def _new_file(record: Recorder, interval: int, threshold: int) -> Any:
    """Return a new HDF5 file. Anything of ``threshold`` bytes or more begins at a multiple of ``interval``."""
    import h5py

    return h5py.File(record, "w", libver=_LIBVER, alignment_interval=interval, alignment_threshold=threshold)


def _mark_time(file: Any, plan: ArrayPlan) -> None:
    """Write the dtype of an array of times into an attribute of its dataset."""
    if plan.dtype.kind in "mM":
        file[plan.name].attrs["dtype"] = plan.dtype.str


class _Plain(ColumnarWriter):
    """A writer of contiguous datasets. It writes by ``pwrite`` where HDF5 placed them."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._streamed = self.streamed(STREAM_BYTES)
        # Streamed arrays come first. So their places depend on nothing but their own sizes, also when the number of
        # other bytes is still unknown.
        self._order = sorted(self.plans, key=lambda plan: plan not in self._streamed)
        # Only streamed arrays are laid out now. All others wait in memory until their size is known.
        # A small shard has none, and h5py would take 3 ms for nothing.
        self._starts: dict[str, int] = {}
        if self._streamed:
            most = _skeleton(header(schema, self.capacity), self._streamed, lambda plan: plan.rows(self.capacity))
            self._starts = most.starts
        self._next = dict(self._starts)
        self._held = Held()
        self._file = BulkFile.create(path, _size_bound(schema, samples, nbytes))

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        if plan.name in self._next:
            self._next[plan.name] += self._file.write_at(self._next[plan.name], [as_bytes(rows)])
        else:
            self._held.add(plan.name, rows)

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        # The layout for the samples that really came, made by HDF5 again, so no code here knows how HDF5 places things.
        final = _skeleton(header(self.schema, self.samples), self._order, self.rows)
        for plan in self._streamed:
            # In the order of the layout, from the front: a moved array may only overwrite bytes that were moved before.
            self._move(self._starts[plan.name], final.starts[plan.name], self.samples * plan.row_nbytes)
        for plan in self.plans:
            pieces = [as_bytes(index[plan.name])] if plan.is_index else self._held.pop(plan.name)
            self._file.write_at(final.starts[plan.name], pieces)
        # The metadata comes last. A writer that is killed before leaves a file without a signature, which no reader
        # opens.
        for at, data in final.writes:
            self._file.write_at(at, [data])
        # The file ends where HDF5 has its end of file: HDF5 refuses a shorter one.
        self._file.finish(final.size)
        return {plan.name: Place(self.path.name, final.starts[plan.name]) for plan in self.plans}

    def _move(self, start: int, target: int, nbytes: int) -> None:
        """Move the bytes of an array from where they were written to their final place."""
        # A target never lies in bytes that still have to be moved. In both layouts HDF5 allocates space in the same
        # order, from the end of the file or from gaps before it, and in the final layout no array takes more. Metadata
        # does not go into gaps between arrays, because h5py's driver of file objects keeps the free space of each kind
        # apart.
        if target == start or not nbytes:
            return
        assert target < start, f"HDF5 placed an array after its temporary position: {target} > {start}"
        buffer, done = memoryview(bytearray(min(nbytes, _MOVE_BYTES))), 0
        while done < nbytes:
            # In pieces from the front, so source and target may overlap: a target lies always before its source.
            count = os.preadv(self._file.fd, [buffer[: nbytes - done]], start + done)
            if not count:
                raise CorruptError(f"{self.path} became shorter while it was written")
            done += self._file.write_at(target + done, [buffer[:count]])

    def _abort(self) -> None:
        self._file.close()


class _Compressed(ColumnarWriter):
    """A writer of chunked datasets, which the library compresses and writes."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._steps = {p.name: Steps(self._chunk_rows(p)) for p in self.plans if p.row_nbytes}
        # HDF5 writes into a preallocated file, so it cannot meet a full disk, whose error it could not survive.
        self._bulk = BulkFile.create(path, _size_bound(schema, samples, nbytes, framed=True))
        self._record = Recorder(
            lambda at, data: self._bulk.write_at(at, [data]), lambda at, count: os.pread(self._bulk.fd, count, at)
        )
        try:
            self._file = _new_file(self._record, *_ALIGN)
        except BaseException:
            self._bulk.close()
            raise

    def _chunk_rows(self, plan: ArrayPlan) -> int:
        return -(-_CHUNK_BYTES // plan.row_nbytes) if plan.is_index else self.frame_rows(plan)

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        if (ready := self._steps[plan.name].push(rows)) is not None:
            self._write(plan, ready)

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        for plan in self.plans:
            if plan.is_index:
                self._append(plan, index[plan.name])
            rows = self._steps[plan.name].remaining_rows() if plan.row_nbytes else None
            if rows is not None:
                self._write(plan, rows)
            # An array without rows or bytes is a dataset too: the reader looks for every array of the schema.
            elif plan.name not in self._file:
                self._file.create_dataset(plan.name, (self.rows(plan), *plan.row), _stored(plan.dtype))
            _mark_time(self._file, plan)
        self._file.attrs[ATTRIBUTE] = json.dumps(header(self.schema, self.samples))
        # Chunks have no place in the file before they are written.
        self._file.flush()
        self._record.check()
        places = {plan.name: self._place(plan) for plan in self.plans if plan.role == "values" and not plan.is_index}
        self._file.close()
        self._record.check()
        self._bulk.finish(self._record.size)
        return places

    def _place(self, plan: ArrayPlan) -> Place:
        """Return the places of the chunks of an array."""
        dataset = self._file[plan.name]
        if dataset.chunks is None:
            return Place(self.path.name)
        chunks: list[tuple[int, int, int, int]] = []
        # One walk through the tree: asking for one chunk after another takes a walk each.
        dataset.id.chunk_iter(
            lambda info: chunks.append((info.chunk_offset[0], info.byte_offset, info.size, info.filter_mask))
        )
        # The tree is in the order of the rows already, but HDF5 does not promise that.
        table = np.array(sorted(chunks), dtype=np.int64).reshape(-1, 4)
        # HDF5 leaves out deflate for a chunk that becomes larger by a thousandth and 12 bytes. That never happens: what
        # zlib cannot compress takes 5 bytes more for each 16 KiB, and 6.
        assert not table[:, 3].any(), "HDF5 wrote a chunk without compression"
        nbytes = dataset.chunks[0] * plan.row_nbytes
        frames = Frames("zlib", table[:, 1].copy(), table[:, 2].copy(), nbytes, plan.dtype.itemsize)
        return Place(self.path.name, 0, frames)

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
                # The number of rows is unknown at the beginning, so the dataset grows.
                maxshape=(None, *plan.row),
                chunks=(min(self._steps[plan.name].step, len(rows)), *plan.row),
                compression="gzip",
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
    """A reader of a file through h5py."""

    def __init__(self, path: Path, schema: Schema, samples: int, file: Any) -> None:
        super().__init__(path, schema, samples)
        self._file = file
        self._datasets: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path, schema: Schema | None) -> _Reader:
        """Open and check the file. Raises :class:`CorruptError` naming it."""
        import h5py

        # locking=False: a shard never changes, and a lock of another program, or a file system without locks, must not
        # keep readers out.
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
        """Return the dataset of ``plan`` after checks: it is in this file, whole, and of the schema's
        dtype and shape."""
        import h5py

        what = f"{self.path}: {plan.name!r}"
        parts = plan.name.split("/")
        # Each part of the name must be a hard link. A soft or external link leads to another object or to another file.
        for depth in range(1, len(parts) + 1):
            if (link := self._file.get("/".join(parts[:depth]), getlink=True)) is None:
                raise CorruptError(f"{what} is missing")
            if not isinstance(link, h5py.HardLink):
                raise CorruptError(f"{what} is reached through a {type(link).__name__}, which is refused")
        dataset = self._file[plan.name]
        if (
            not isinstance(dataset, h5py.Dataset)
            or dataset.dtype != _stored(plan.dtype)
            or dataset.shape is None
            or dataset.shape[1:] != plan.row
        ):
            raise CorruptError(f"{what} is {dataset!r}, not rows of {plan.dtype} {plan.row}")
        # External storage and virtual datasets take their bytes from any file that the damaged or hostile file names.
        how = dataset.id.get_create_plist()
        if how.get_external_count() or how.get_layout() == h5py.h5d.VIRTUAL:
            raise CorruptError(f"{what} has its bytes in other files, which is refused")
        if how.get_layout() == h5py.h5d.CHUNKED:
            used = {how.get_filter(i)[0] for i in range(how.get_nfilters())}
            if not used <= _FILTERS or dataset.chunks[1:] != plan.row:
                raise CorruptError(f"{what} has chunks or filters that cachetool does not write")
            # HDF5 reads a chunk that is missing as fill values, without an error. So all chunks must be there.
            chunks = -(-dataset.shape[0] // dataset.chunks[0])
            if dataset.id.get_num_chunks() != chunks:
                raise CorruptError(f"{what} has {dataset.id.get_num_chunks()} of its {chunks} chunks")
        elif dataset.nbytes:
            # For a contiguous dataset behind the end of the file HDF5 may read zeros.
            at = dataset.id.get_offset()
            if at is None or at + dataset.nbytes > size:
                raise CorruptError(f"{what} is cut short: it ends after the file's {size} bytes")
        return dataset
