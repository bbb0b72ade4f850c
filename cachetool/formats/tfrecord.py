"""The format ``tfrecord``: each shard is one TFRecord file.

:mod:`cachetool.formats.framing` frames the records, :mod:`cachetool.formats.example` packs a sample into a
``tf.train.Example``.

Nothing here needs TensorFlow or the ``tfrecord`` package, which cannot be imported in one process.
``docs/reference/formats.md`` has a reader in TensorFlow.

The file does not contain its schema, so reading needs ``schema=``. With ``compression="gzip"`` the whole file is one
gzip stream (``compression_type="GZIP"`` in TensorFlow). After every few records the stream is flushed in full
(``Z_FULL_FLUSH``, https://zlib.net/manual.html), so that a decoder that knows the place can begin there: these are the
frames of the extents.
"""

from __future__ import annotations

import shlex
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block
from cachetool.core.closing import Closing
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.extents import FieldExtents, Frames
from cachetool.core.schema import Schema
from cachetool.formats.example import ExampleLayout, StorageKind, shape_name, storage_kind
from cachetool.formats.files import BulkFile, allocated_bound, map_file, missing_is_corrupt
from cachetool.formats.frames import FRAME_BYTES, framed_overhead
from cachetool.formats.framing import (
    AFTER,
    BEFORE,
    GZIP_MAGIC,
    GZIP_WBITS,
    GzipFile,
    check_records,
    frame_records,
    frame_size,
    scan_records,
)
from cachetool.formats.reading import check_indices, check_range, field_extents
from cachetool.formats.runs import Bytes, Int64s, ends
from cachetool.formats.writing import ShardWriter
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["StorageKind", "TFRecord", "is_gzip", "shape_name", "storage_kind"]

# Raw arrays hardly compress. Higher levels take more time and save nothing.
_LEVEL = 4


class TFRecord:
    """The format ``tfrecord``; see :class:`cachetool.formats.base.Format`."""

    name = "tfrecord"
    suffix = ".tfrecord"
    compressions = ("gzip",)

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return an upper bound of the disk space."""
        return allocated_bound(_file_bound(schema, samples, nbytes, framed=compression is not None), disk_block)

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> TFRecordWriter:
        """Begin a shard; see :meth:`cachetool.formats.base.Format.create`."""
        if compression not in (None, *self.compressions):
            raise UsageError(f"tfrecord has no compression {compression!r}; it has {', '.join(self.compressions)}")
        layout = ExampleLayout(schema)
        file = BulkFile.create(path, _file_bound(schema, samples, nbytes, framed=compression is not None))
        return TFRecordWriter(path, layout, file, samples=samples, nbytes=nbytes, compressed=compression is not None)

    def open(self, path: Path, *, schema: Schema | None = None) -> TFRecordReader:
        """Open a shard. :mod:`cachetool.sources.tfrecord` reads files that other programs wrote."""
        if schema is None:
            raise UsageError(f"{path}: a TFRecord file does not store its schema; pass schema=")
        return TFRecordReader.open(path, schema)


def _file_bound(schema: Schema, samples: int, nbytes: int, *, framed: bool) -> int:
    """Return an upper bound of the file's size in bytes. ``framed``: the file is compressed."""
    plain = nbytes + samples * (ExampleLayout(schema).overhead + BEFORE + AFTER)
    return plain + framed_overhead(plain, 1) + 64 if framed else plain + 64


class TFRecordWriter(ShardWriter):
    """A writer of one TFRecord file; see :class:`cachetool.formats.base.Writer`."""

    def __init__(
        self, path: Path, layout: ExampleLayout, file: BulkFile, *, samples: int, nbytes: int, compressed: bool
    ) -> None:
        super().__init__(path, layout.schema, samples=samples, nbytes=nbytes)
        self._layout = layout
        self._file = file
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, GZIP_WBITS) if compressed else None
        self._at = 0
        self._starts: list[Int64s] = []
        self._variable: list[Int64s] = []
        self._frames: list[tuple[int, int, int]] = []
        """Bytes before compression, position in the file and compressed bytes of each frame."""
        self._shapes: dict[str, list[Int64s]] = {f.name: [] for f in layout.schema if f.kind == "ragged"}

    def _put(self, block: Block) -> None:
        # The layout leaves space for the frames, so the records are not copied a second time.
        buffer, starts, sizes = self._layout.encode(block, before=BEFORE, after=AFTER)
        frame_records(buffer, starts, sizes)
        if self._deflate is None:
            self._starts.append(self._file.append(buffer) + starts)
        else:
            self._starts.append(self._at + starts)
            self._compress(self._deflate, buffer, starts + sizes + AFTER)
        self._variable.append(self._layout.variable_sizes(block))
        for name, shapes in self._shapes.items():
            shapes.append(np.array(block.columns[name].shapes))  # type: ignore[union-attr]

    def _compress(self, deflate: zlib._Compress, buffer: Bytes, stops: Int64s) -> None:
        """Append records in frames, each of whole records. ``stops``: where the records end in ``buffer``."""
        at, pieces = 0, []
        if not self._frames:
            # The first bytes that come are the head of the file, which belongs to no frame.
            pieces.append(deflate.compress(b"") + deflate.flush(zlib.Z_FULL_FLUSH))
        place = self._file.size + sum(map(len, pieces))
        while at < len(buffer):
            stop = int(stops[min(int(np.searchsorted(stops, at + FRAME_BYTES)), len(stops) - 1)])
            pieces.append(deflate.compress(buffer[at:stop].data) + deflate.flush(zlib.Z_FULL_FLUSH))
            self._frames.append((stop - at, place, len(pieces[-1])))
            place, at = place + len(pieces[-1]), stop
        self._at += at
        self._file.append(b"".join(pieces))

    def _close(self) -> tuple[tuple[str, ...], dict[str, FieldExtents]]:
        if self._deflate is not None:
            self._file.append(self._deflate.flush())
        self._file.finish()
        fields = self._locate()
        if self._deflate is not None and self._frames:
            plain, offsets, sizes = np.ascontiguousarray(np.array(self._frames, dtype=np.int64).T)
            frames = Frames("deflate", offsets, sizes, starts=ends(plain))
            fields = {
                name: one if one.column is not None else replace(one, frames=frames) for name, one in fields.items()
            }
        return (self.path.name,), fields

    def _locate(self) -> dict[str, FieldExtents]:
        """Return the extents of all fields."""
        starts = np.concatenate([np.empty(0, dtype=np.int64), *self._starts])
        fields = self.scalar_extents()
        for place in self._layout.places:
            if place.mode == "raw" and place.field.name not in fields:
                fields[place.field.name] = field_extents(place.field, offsets=starts + place.offset)
        sizes = np.concatenate([np.empty((0, len(self._layout.entries)), dtype=np.int64), *self._variable])
        within, _totals = self._layout.positions(sizes)
        for column, entry in enumerate(self._layout.entries):
            field, shapes = entry.field, None
            if field.kind == "ragged":
                shapes = np.concatenate([np.empty((0, field.rank), dtype=np.int64), *self._shapes[field.name]])
            fields[field.name] = field_extents(
                field, offsets=starts + within[:, column], sizes=sizes[:, column].copy(), shapes=shapes
            )
        return fields

    def _abort(self) -> None:
        self._file.close()


class TFRecordReader(Closing):
    """A reader of one TFRecord file that checks every record; see :class:`cachetool.formats.base.Reader`."""

    def __init__(self, path: Path, schema: Schema, source: Bytes | GzipFile, starts: Int64s, sizes: Int64s) -> None:
        self.path = path
        self.schema = schema
        self.samples = len(starts)
        self._layout = ExampleLayout(schema)
        self._source: Bytes | GzipFile | None = source
        self._starts = starts
        self._sizes = sizes

    @classmethod
    def open(cls, path: Path, schema: Schema) -> TFRecordReader:
        """Find the records by their lengths, whose checksums are checked. Raises :class:`CorruptError`
        naming the file."""
        with missing_is_corrupt(path):
            buffer = map_file(path)
        if _begins_gzip(buffer[:BEFORE].tobytes()):
            # Kept open: a sample is unpacked when it is asked for, because the uncompressed file may not fit into
            # memory.
            stream = GzipFile(path)
            try:
                return cls(path, schema, stream, *_scan_stream(stream))
            except BaseException:
                stream.close()
                raise
        return cls(path, schema, buffer, *scan_records(buffer, name=str(path)))

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop - 1``."""
        return self.take(check_range(start, stop, self.samples))

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """Return the samples at ``indices``, in that order."""
        at = check_indices(indices, self.samples)
        if self._source is None:
            raise UsageError(f"{self.path}: this reader is closed; open it again")
        starts, sizes = self._starts[at], self._sizes[at]
        if isinstance(self._source, GzipFile):
            buffer, starts = _inflate(self._source, starts, sizes)
        else:
            buffer = self._source
        # Checksums first: the decoder then sees only bytes that some writer wrote, and a flipped bit is reported as
        # damage.
        check_records(buffer, starts, sizes, name=str(self.path), numbers=at)
        block = self._layout.decode(buffer, starts, sizes)
        # The block failed as a whole. Decode sample by sample now, so that the message can name the first bad one.
        if block is None:
            alone = (self._layout.decode(buffer, starts[i : i + 1], sizes[i : i + 1]) for i in range(len(at)))
            number = next(int(at[i]) for i, one in enumerate(alone) if one is None)
            raise CorruptError(
                f"{self.path}: sample {number} is not a record that cachetool wrote with this schema;\n"
                f"convert a file of another program with: cachetool convert {shlex.quote(str(self.path))} --to lmdb"
                " --out NEW"
            )
        return block

    def close(self) -> None:
        """Close the file."""
        if isinstance(self._source, GzipFile):
            self._source.close()
        self._source = None


def is_gzip(path: Path) -> bool:
    """Return True if the file at ``path`` is one gzip stream of records, False if it has plain records."""
    with path.open("rb") as file:
        return _begins_gzip(file.read(BEFORE))


def _begins_gzip(head: bytes) -> bool:
    # A plain file may begin with gzip's two bytes too, as a part of a length. Then the checksum of this length is
    # right, and in a gzip file it is not.
    return head[:2] == GZIP_MAGIC and frame_size(head) is None


def _scan_stream(stream: GzipFile) -> tuple[Int64s, Int64s]:
    """Return starts and sizes of the records in the uncompressed bytes, without keeping their data."""
    starts: list[int] = []
    sizes: list[int] = []
    at = 0
    while head := stream.read(at, BEFORE):
        size = frame_size(head)
        if size is None:
            what = "is cut short" if len(head) < BEFORE else "has a damaged length"
            raise CorruptError(f"{stream.path}: sample {len(starts)}, at uncompressed byte {at}, {what}")
        end = at + BEFORE + size + AFTER
        # Reading the last four bytes of a record proves that it is complete. Only these are kept in memory.
        if len(stream.read(end - AFTER, AFTER)) < AFTER:
            raise CorruptError(f"{stream.path} is cut short: sample {len(starts)} needs {size} bytes")
        starts.append(at + BEFORE)
        sizes.append(size)
        at = end
    return np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)


def _inflate(stream: GzipFile, starts: Int64s, sizes: Int64s) -> tuple[Bytes, Int64s]:
    """Return the records at ``starts`` with the checksums behind them in one buffer, and their positions in it."""
    to = ends(sizes + AFTER)
    buffer = np.empty(int(to[-1]), dtype=np.uint8)
    view = buffer.data
    # Forward through the file, whatever order was asked for: going back means to unpack up to 4 MiB again.
    for i in np.argsort(starts, kind="stable").tolist():
        raw = stream.read(int(starts[i]), int(sizes[i]) + AFTER)
        if len(raw) < int(sizes[i]) + AFTER:
            raise CorruptError(f"{stream.path} is cut short at uncompressed byte {int(starts[i])}")
        view[int(to[i]) : int(to[i]) + len(raw)] = raw
    return buffer, to[:-1]
