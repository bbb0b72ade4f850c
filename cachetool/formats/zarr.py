"""The format ``zarr``: each shard is one Zarr v3 folder, with one shard file of chunks for each array.

cachetool writes the shard files itself. ``docs/reference/formats.md`` has the layout (version 1) and a reader without
cachetool. The arrays are those of :mod:`cachetool.formats.columnar`. Chunk keys are separated by ``.``, so an array
is one folder of two files.

zarr reads a missing chunk as zeros. So opening a shard checks that every chunk file exists, is whole and a plain file,
and that its index has every chunk. zarr itself checks the index's crc32c.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Ragged
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
from cachetool.formats.files import BulkFile
from cachetool.formats.frames import frame_rows, framed_overhead
from cachetool.formats.runs import as_bytes, ends
from cachetool.formats.zarr_files import (
    METADATA,
    Folder,
    check_shard_file,
    chunk_key,
    folder_bound,
    inner_rows,
    plain_chunks,
    plain_file,
    plain_file_bytes,
    plain_index,
    shard_index,
)
from cachetool.proc.disk import DISK_BLOCK
from cachetool.proc.folders import remove_path

__all__ = ["Zarr", "compressed_bytes"]

# Chunks that are written together.
_AT_ONCE = 64
# Most files that are open at once: a process may often have no more than 1,024.
_MOST_STREAMED = 256
_COMPRESSIONS = ("blosc", "zstd")
_LEVEL = 3
_BLOSC_LEVEL = 5


class Zarr:
    """The format ``zarr``; see :class:`cachetool.formats.base.Format`."""

    name = "zarr"
    suffix = ".zarr"
    compressions: tuple[str, ...] = _COMPRESSIONS

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return an upper bound of the disk space of the folder, during and after writing."""
        about = len(json.dumps(header(schema, samples), indent=4))
        framed = compression is not None
        return folder_bound(array_plans(schema), samples, nbytes, about=about, framed=framed, disk_block=disk_block)

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a folder of at most ``samples`` samples and ``nbytes`` bytes of values.

        Raises :class:`UsageError` for a compression that is not one of :attr:`compressions`.
        """
        if compression is not None and compression not in self.compressions:
            raise UsageError(f"zarr has no compression {compression!r}; use one of {', '.join(self.compressions)}")
        if compression is None:
            return _Plain(path, schema, samples=samples, nbytes=nbytes)
        for plan in array_plans(schema):
            if plan.row_nbytes > _MOST_SAMPLE:
                raise UsageError(f"field {plan.name!r}: a sample of {plan.row_nbytes} bytes is too large to compress")
        return _Compressed(path, schema, samples=samples, nbytes=nbytes, compression=compression)

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Open the folder at ``path``. Raises :class:`CorruptError` naming the file."""
        return _Reader.open(path, schema)


_MOST_SAMPLE = 2**31 - 2**6
"""Most bytes of a sample that is compressed: blosc counts them and its header in 31 bits."""


def _blosc_shuffle(dtype: np.dtype[Any]) -> Literal["bitshuffle", "noshuffle"]:
    # The first bits of neighbouring numbers are often equal, and side by side they compress. For bytes the regrouping
    # takes more time than it saves: lz4 alone decodes at 6 GB/s.
    return "bitshuffle" if dtype.itemsize > 1 else "noshuffle"


def _encoder(compression: str, dtype: np.dtype[Any]) -> Callable[[npt.NDArray[Any]], bytes]:
    """Return the function that compresses an array of ``dtype``, as zarr's codec of :class:`_Metadata` does."""
    # Imported here: numcodecs takes 150 ms to load.
    import numcodecs
    import numcodecs.blosc

    # As zarr has it: the threads of blosc do not survive a fork.
    numcodecs.blosc.use_threads = False
    if compression == "zstd":
        codec: Any = numcodecs.Zstd(level=_LEVEL, checksum=True)
    else:
        shuffle = numcodecs.Blosc.BITSHUFFLE if _blosc_shuffle(dtype) == "bitshuffle" else numcodecs.Blosc.NOSHUFFLE
        codec = numcodecs.Blosc("lz4", clevel=_BLOSC_LEVEL, shuffle=shuffle)
    # Numbers of the same size: numcodecs knows no dates.
    plain = np.dtype(f"u{dtype.itemsize}") if dtype.itemsize in (1, 2, 4, 8) else dtype
    return lambda rows: codec.encode(np.ascontiguousarray(rows).view(plain))


def compressed_bytes(block: Block, compression: str) -> int:
    """Return the bytes that the values of ``block`` take in compressed frames."""
    total = 0
    for field in block.schema:
        column = block.columns[field.name]
        values = column.values if isinstance(column, Ragged) else np.asarray(column)
        encode = _encoder(compression, field.numpy)
        rows = frame_rows(values.nbytes // max(1, len(values)))
        total += sum(len(encode(values[at : at + rows])) for at in range(0, len(values), rows))
    return total


class _Metadata:
    """A group in memory. zarr makes its files, which :class:`Folder` then writes to disk."""

    def __init__(self, compression: str | None = None) -> None:
        import zarr

        # Imported here: zarr takes 280 ms to load, and a reader of an uncompressed shard never needs it.
        from zarr.storage import MemoryStore

        self._compression = compression
        self._files: dict[str, Any] = {}
        self.group: Any = zarr.create_group(MemoryStore(store_dict=self._files), zarr_format=3)

    def _codec(self, dtype: np.dtype[Any]) -> Any:
        from zarr.codecs import BloscCodec, ZstdCodec

        if self._compression == "blosc":
            return BloscCodec(cname="lz4", clevel=_BLOSC_LEVEL, shuffle=_blosc_shuffle(dtype), typesize=dtype.itemsize)
        return None if self._compression is None else ZstdCodec(level=_LEVEL, checksum=True)

    def array(self, plan: ArrayPlan, rows: int, *, inner: int, shard: int) -> Any:
        """Make an array of ``rows`` rows, with ``inner`` rows a chunk and ``shard`` rows a file."""
        row = tuple(max(1, size) for size in plan.row)
        return self.group.create_array(
            plan.name,
            shape=(rows, *plan.row),
            chunks=(inner, *row),
            shards=(shard, *row),
            dtype=plan.dtype,
            compressors=self._codec(plan.dtype),
            fill_value=np.zeros((), dtype=plan.dtype)[()],
            chunk_key_encoding={"name": "default", "separator": "."},
            # By default zarr leaves out chunks that hold only fill values. Here a missing chunk must mean damage.
            config={"write_empty_chunks": True},
        )

    def drain(self) -> Iterable[tuple[str, bytes]]:
        """Yield key and bytes of each metadata file."""
        return [(key, data.to_bytes()) for key, data in self._files.items() if key.rpartition("/")[2] == METADATA]


class _Plain(ColumnarWriter):
    """A writer of raw chunks by our own writes. The metadata comes last."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._held = Held()
        self._folder = Folder(path)
        self._files: dict[str, BulkFile] = {}
        # An array streams if it may hold a 256th of all bytes, so no more than 256 arrays can.
        least = max(STREAM_BYTES, nbytes // _MOST_STREAMED)
        try:
            for plan in self.streamed(least):
                self._files[plan.name] = self._folder.file(chunk_key(plan), plain_file_bytes(plan, self.capacity))
        except BaseException:
            self._abort()
            raise

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        if plan.name in self._files:
            self._files[plan.name].append(as_bytes(rows))
        else:
            self._held.add(plan.name, rows)

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        # The streamed files first: truncating them frees the space that was allocated but not used, before the other
        # files need theirs.
        for plan in self.plans:
            if (file := self._files.get(plan.name)) is not None:
                chunks, chunk_nbytes = plain_chunks(plan, self.rows(plan))
                end = plain_index(chunks, chunk_nbytes)
                file.write_at(chunks * chunk_nbytes, [end])
                file.finish(chunks * chunk_nbytes + len(end))
                if not chunks:
                    remove_path(file.path)
        metadata = _Metadata()
        for plan in self.plans:
            rows = self.rows(plan)
            chunks, chunk_nbytes = plain_chunks(plan, rows)
            if chunks and plan.name not in self._files:
                pieces = [as_bytes(index[plan.name])] if plan.is_index else self._held.pop(plan.name)
                # The last inner chunk has full size in a raw shard file.
                pad = bytes(chunks * chunk_nbytes - sum(len(piece) for piece in pieces))
                self._folder.put(chunk_key(plan), [*pieces, pad, plain_index(chunks, chunk_nbytes)])
            inner = inner_rows(plan, rows)
            metadata.array(plan, rows, inner=inner, shard=-(-max(rows, 1) // inner) * inner)
        _finish(self._folder, metadata, self.schema, self.samples)
        return {plan.name: self._place(plan) for plan in self.plans if plan.role == "values"}

    def _place(self, plan: ArrayPlan) -> Place:
        """Return the file in which the values of an array begin."""
        # An array without bytes has no file, but its extents must name a file that exists.
        key = chunk_key(plan) if self.rows(plan) and plan.row_nbytes else METADATA
        return Place(f"{self.path.name}/{key}")

    def _abort(self) -> None:
        for file in self._files.values():
            file.close()


def _finish(folder: Folder, metadata: _Metadata, schema: Schema, samples: int) -> None:
    """Write the metadata of all arrays and make all names durable."""
    metadata.group.attrs[ATTRIBUTE] = header(schema, samples)
    # The metadata last: a writer that is killed before leaves a folder that no reader takes for a Zarr group.
    for key, data in metadata.drain():
        folder.put(key, [data])
    folder.sync()


class _Compressed(ColumnarWriter):
    """A writer of chunks that are compressed one by one: frames of the extents (:mod:`cachetool.formats.frames`)."""

    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        self._compression = compression
        self._folder = Folder(path)
        self._steps = {p.name: Steps(self.frame_rows(p)) for p in self.plans if p.row_nbytes and not p.is_index}
        self._encode = {plan.name: _encoder(compression, plan.dtype) for plan in self.plans}
        self._sizes: dict[str, list[int]] = {plan.name: [] for plan in self.plans}
        self._held: dict[str, list[bytes]] = {plan.name: [] for plan in self.plans}
        self._files: dict[str, BulkFile] = {}
        least = max(STREAM_BYTES, nbytes // _MOST_STREAMED)
        try:
            for plan in self.streamed(least):
                bound = (self.capacity + self._steps[plan.name].step) * plan.row_nbytes
                self._files[plan.name] = self._folder.file(chunk_key(plan), bound + framed_overhead(bound, 1))
        except BaseException:
            self._abort()
            raise

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        ready = self._steps[plan.name].push(rows)
        if ready is not None:
            self._compress(plan, ready, self._steps[plan.name].step)

    def _compress(self, plan: ArrayPlan, rows: npt.NDArray[Any], step: int) -> None:
        """Compress whole chunks of ``step`` rows, and write them or keep them."""
        encode, file = self._encode[plan.name], self._files.get(plan.name)
        for first in range(0, len(rows), step * _AT_ONCE):
            last = min(len(rows), first + step * _AT_ONCE)
            chunks = [encode(rows[at : at + step]) for at in range(first, last, step)]
            self._sizes[plan.name] += map(len, chunks)
            if file is None:
                self._held[plan.name] += chunks
            else:
                file.append(b"".join(chunks))

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        metadata = _Metadata(self._compression)
        places: dict[str, Place] = {}
        for plan in self.plans:
            rows, key = self.rows(plan), chunk_key(plan)
            step = self._steps[plan.name].step if plan.name in self._steps else inner_rows(plan, rows)
            rest = index[plan.name] if plan.is_index else None
            if plan.name in self._steps:
                rest = self._steps[plan.name].remaining_rows()
            if rest is not None and rest.size:
                # A chunk has its full size, also the last one.
                full = np.zeros((-(-len(rest) // step) * step, *plan.row), dtype=plan.dtype)
                full[: len(rest)] = rest
                self._compress(plan, full, step)
            sizes = np.array(self._sizes[plan.name], dtype=np.int64)
            file = self._files.get(plan.name)
            if file is not None:
                file.append(shard_index(sizes))
                file.finish()
                if not len(sizes):
                    remove_path(file.path)
            elif len(sizes):
                self._folder.put(key, [*self._held.pop(plan.name), shard_index(sizes)])
            metadata.array(plan, rows, inner=step, shard=max(1, len(sizes)) * step)
            # An array without bytes has no file, but its extents must name a file that exists.
            places[plan.name] = Place(f"{self.path.name}/{key if len(sizes) else METADATA}")
            if len(sizes):
                frames = Frames(self._compression, ends(sizes)[:-1], sizes, step * plan.row_nbytes)
                places[plan.name] = places[plan.name]._replace(frames=frames)
        _finish(self._folder, metadata, self.schema, self.samples)
        return {plan.name: places[plan.name] for plan in self.plans if plan.role == "values"}

    def _abort(self) -> None:
        for file in self._files.values():
            file.close()


class _Reader(ColumnarReader):
    """A reader of a folder through zarr."""

    # A call of zarr takes 770 us for one sample, longer than reading 2 MiB in one piece.
    gap_bytes = 2**21

    def __init__(self, path: Path, schema: Schema, samples: int) -> None:
        super().__init__(path, schema, samples)
        self._arrays: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path, schema: Schema | None) -> _Reader:
        """Open and check the folder. Raises :class:`CorruptError` naming the file."""
        import zarr

        root = os.path.realpath(path)
        with corrupt_errors(f"{path} is not a Zarr group"):
            # Before zarr opens it: zarr would wait for a pipe in the place of the file.
            plain_file(root, METADATA)
            # Consolidated metadata is a second copy, which cachetool does not write and a foreign file may contradict.
            group = zarr.open_group(path, mode="r", zarr_format=3, use_consolidated=False)
            stored_schema, samples = parse_header(group.attrs.get(ATTRIBUTE), path=path, schema=schema)
        reader = cls(path, stored_schema, samples)
        for plan in reader.plans.values():
            with corrupt_errors(f"{path}: {plan.name!r} cannot be read"):
                plain_file(root, f"{plan.name}/{METADATA}")
                reader._arrays[plan.name] = array = group[plan.name]
                _check_array(f"{path}: {plan.name!r}", plan, array)
                _check_files(root, plan, array)
        reader._check_lengths()
        return reader

    def close(self) -> None:
        self._arrays.clear()

    def _length(self, plan: ArrayPlan) -> int:
        return int(self._arrays[plan.name].shape[0])

    def _fetch(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        with corrupt_errors(f"{self.path}: {plan.name!r}, rows {start} to {stop}"):
            return np.asarray(self._arrays[plan.name][start:stop], dtype=plan.dtype)


def _check_array(what: str, plan: ArrayPlan, array: Any) -> None:
    """Raise :class:`CorruptError` unless zarr's metadata are those of an array that cachetool wrote."""
    if not hasattr(array, "shards") or array.dtype != plan.dtype or array.shape[1:] != plan.row:
        raise CorruptError(f"{what} is {array!r}, not rows of {plan.dtype} {plan.row}")
    # The files are checked below by our own layout. An array with other codecs, such as a shard in a shard, would need
    # other checks.
    codecs = _codecs(array)
    settings = codecs[0]["configuration"]
    inner = [codec["name"] for codec in settings["codecs"]]
    row = tuple(max(1, size) for size in plan.row)
    ours = (
        [codec["name"] for codec in codecs] == ["sharding_indexed"]
        and settings["index_location"] == "end"
        and [codec["name"] for codec in settings["index_codecs"]] == ["bytes", "crc32c"]
        and inner[0] == "bytes"
        and settings["codecs"][0].get("configuration", {}).get("endian", "little") == "little"
        and (inner[1:] == [] or (len(inner) == 2 and inner[1] in _COMPRESSIONS))
        and array.chunks[1:] == array.shards[1:] == row
        and array.metadata.encode_chunk_key((0,) * len(array.shape)) == chunk_key(plan).rpartition("/")[2]
    )
    if not ours:
        raise CorruptError(f"{what} is stored in a way that cachetool does not write: {codecs}")


def _codecs(array: Any) -> Any:
    return array.metadata.to_dict()["codecs"]


def _check_files(root: str, plan: ArrayPlan, array: Any) -> None:
    """Raise :class:`CorruptError`, naming the file, unless every chunk exists and is whole."""
    rows, per_file, inner = array.shape[0], array.shards[0], array.chunks[0]
    if not plan.row_nbytes:
        return
    for number, first in enumerate(range(0, rows, per_file)):
        check_shard_file(
            root,
            chunk_key(plan, number),
            chunks=per_file // inner,
            used=-(-min(per_file, rows - first) // inner),
            chunk_nbytes=inner * plan.row_nbytes,
            plain=len(_codecs(array)[0]["configuration"]["codecs"]) == 1,
        )
