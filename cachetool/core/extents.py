"""Extents: the place of each sample's field in the files of a shard, and the checksum of its bytes.

Each shard has one ``extents.bin``, little-endian, which processes map into memory and share::

    "CTEXT002" | u64 length of the header | header, JSON | padding to 64 | array | padding to 64 | array | ...

The header names the files, the number of samples, and the dtype, shape and position of each array. So a reader touches
only the columns that it needs. Each field has one of:

- for a scalar: its raw column, (samples,), because a TFRecord stores integers as varints;
- for a constant stride: ``start`` and ``stride``, two numbers for any number of samples;
- for all others: ``offsets`` (samples,), and ``sizes`` (samples,) in bytes if the sizes differ.

Ragged fields also have ``shapes`` (samples, rank). In a compressed shard these positions are those of the values before
compression, and the field has ``frames`` (:class:`Frames`): the pieces in which the values are compressed.
``checksums`` is (fields, samples) uint64: xxh3-64 of a field's
value in its canonical encoding (see :func:`cachetool.formats.digest.checksums`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema, storage_dtype

__all__ = ["CODECS", "EXTENTS_FILE", "Extents", "FieldExtents", "Frames"]

EXTENTS_FILE = "extents.bin"
"""Name of the extents file, which lies beside the data files of a shard."""
CODECS = ("blosc", "zstd", "zlib", "deflate")
"""Forms of a compressed frame: a blosc chunk, a zstd frame, a zlib stream, or blocks of deflate."""
_MAGIC = b"CTEXT002"
# Every array begins at a multiple of 64 bytes, so a view of the mapped file is aligned for each dtype.
_ALIGN = 64
# Largest position in a file that is accepted. Below 2**62 the sum of a position and a size cannot wrap around in int64.
_FARTHEST = 2**62
# Most bytes of a frame before compression. The largest that is written has the size of one sample.
_MOST_FRAME = 2**31
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frames:
    """The compressed pieces of a field's values. Each is decoded alone.

    Before compression the values of a field lie end to end, and are cut into frames. All frames but those of ``starts``
    have the same size, the last one too: it is filled up with zeros.

    Args:
        codec: One of :data:`CODECS`.
        offsets: Position of each frame in its file, int64, (frames,).
        sizes: Compressed bytes of each frame, int64, (frames,).
        nbytes: Bytes of each frame before compression; unused with ``starts``. Default: 0.
        shuffle: Bytes of an item if the first bytes of all items of a frame come first, then their second bytes, and so
            on. Default: 1, the bytes are in order.
        starts: Position of each frame before compression, and behind them the end: int64, (frames + 1,). Default: None,
            all frames have ``nbytes``.

    Example:
        >>> import numpy as np
        >>> Frames("zstd", np.array([0, 90]), np.array([90, 80]), nbytes=4096).total
        8192
    """

    codec: str
    """One of :data:`CODECS`."""
    offsets: Int64s
    """Position of each frame in its file, (frames,)."""
    sizes: Int64s
    """Compressed bytes of each frame, (frames,)."""
    nbytes: int = 0
    """Bytes of each frame before compression; unused with :attr:`starts`."""
    shuffle: int = 1
    """Bytes of an item whose bytes were regrouped; 1 if the bytes are in order."""
    starts: Int64s | None = None
    """Position of each frame before compression, and the end, (frames + 1,); None if all frames have :attr:`nbytes`."""

    @property
    def total(self) -> int:
        """Return the bytes of all frames before compression."""
        return self.nbytes * len(self.sizes) if self.starts is None else int(self.starts[-1])

    def copy(self) -> Frames:
        """Return the same frames in memory of their own."""
        starts = None if self.starts is None else self.starts.copy()
        return replace(self, offsets=self.offsets.copy(), sizes=self.sizes.copy(), starts=starts)


@dataclass(frozen=True, slots=True)
class FieldExtents:
    """The place of one field in the files of a shard. Offsets and sizes are bytes.

    Args:
        file: Index in :attr:`Extents.files` of the file that holds the bytes.
        start: Position of the first sample, if the stride is constant.
        stride: Distance between neighbouring samples, if the distance is constant.
        nbytes: Size of each sample, if ``sizes`` is None.
        offsets: Position of each sample, int64, (samples,). Default: None, the stride is constant.
        sizes: Size of each sample, int64, (samples,). Default: None, all have ``nbytes``.
        shapes: Shape of the array of each sample, int64, (samples, rank), for a ragged field. Default: None.
        column: The values themselves, (samples,), for a scalar field; the other arguments are then unused. Default:
            None.
        frames: Compressed pieces of the values; positions are then those before compression. Default: None, the values
            are not compressed.

    Example:
        >>> import numpy as np
        >>> FieldExtents(start=64, stride=100, nbytes=12).locate(np.array([0, 2]))
        (array([ 64, 264]), array([12, 12]))
    """

    file: int = 0
    """Index in :attr:`Extents.files` of the file that holds the bytes."""
    start: int = 0
    """Position of the first sample, if the stride is constant."""
    stride: int = 0
    """Distance between neighbouring samples, if the distance is constant."""
    nbytes: int = 0
    """Size of each sample, if :attr:`sizes` is None."""
    offsets: Int64s | None = None
    """Position of each sample, (samples,); None if the stride is constant."""
    sizes: Int64s | None = None
    """Size of each sample, (samples,); None if all samples have the same size."""
    shapes: Int64s | None = None
    """Shape of the array of each sample, (samples, rank), for a ragged field; otherwise None."""
    column: npt.NDArray[Any] | None = None
    """The values themselves, (samples,), for a scalar field, which does not use the numbers above; otherwise None."""
    frames: Frames | None = None
    """Compressed pieces of the values, to which the positions above then refer; None for uncompressed values."""

    def locate(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return the positions and sizes of samples in the file.

        Args:
            indices: Numbers of samples in the shard, int64, of any shape.

        Returns:
            Positions and sizes in bytes, two int64 arrays in the shape of ``indices``.
        """
        offsets = self.start + self.stride * indices if self.offsets is None else self.offsets[indices]
        sizes = np.full(indices.shape, self.nbytes, dtype=np.int64) if self.sizes is None else self.sizes[indices]
        return offsets, sizes


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of one shard, or of one file of an exported folder.

    Args:
        samples: Number of samples.
        files: Names of the files that hold the bytes, relative to the folder of the shard, with ``/`` between folders.
        fields: Extents of each field by name, in the order of the schema.
        checksums: xxh3-64 of each value, uint64, (fields, samples), fields in the order of the schema.

    Example:
        >>> import numpy as np
        >>> from cachetool.core.schema import Field, Schema
        >>> schema = Schema((Field("x", "<f4", (3,)),))
        >>> field = FieldExtents(stride=12, nbytes=12)
        >>> extents = Extents(2, ("data.bin",), {"x": field}, np.zeros((1, 2), dtype=np.uint64))
        >>> Extents.from_buffer(extents.to_bytes(), schema=schema).fields["x"].stride
        12
    """

    samples: int
    """Number of samples."""
    files: tuple[str, ...]
    """Names of the files that hold the bytes, relative to the folder of the shard, with ``/`` between folders."""
    fields: Mapping[str, FieldExtents]
    """Extents of each field by name, in the order of the schema."""
    checksums: npt.NDArray[np.uint64]
    """xxh3-64 of each value, (fields, samples), fields in the order of the schema."""

    def to_bytes(self) -> bytes:
        """Return the content of ``extents.bin``."""
        arrays: list[npt.NDArray[Any]] = []
        table: list[dict[str, Any]] = []
        position = 0
        numbers: dict[int, int] = {}

        def add(array: npt.NDArray[Any] | None) -> int | None:
            nonlocal position
            if array is None:
                return None
            # Fields of one record share their frames, which are then written once.
            if id(array) in numbers:
                return numbers[id(array)]
            numbers[id(array)] = len(arrays)
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            arrays.append(little)
            table.append({"dtype": little.dtype.str, "shape": list(array.shape), "at": position})
            position += -(-little.nbytes // _ALIGN) * _ALIGN
            return len(arrays) - 1

        fields = [
            {
                "name": name,
                "file": f.file,
                "start": f.start,
                "stride": f.stride,
                "nbytes": f.nbytes,
                "offsets": add(f.offsets),
                "sizes": add(f.sizes),
                "shapes": add(f.shapes),
                "column": add(f.column),
                "frames": None
                if (frames := f.frames) is None
                else {
                    "codec": frames.codec,
                    "shuffle": frames.shuffle,
                    "nbytes": frames.nbytes,
                    "offsets": add(frames.offsets),
                    "sizes": add(frames.sizes),
                    "starts": add(frames.starts),
                },
            }
            for name, f in self.fields.items()
        ]
        header = {
            "samples": self.samples,
            "files": list(self.files),
            "fields": fields,
            "checksums": add(self.checksums),
            "arrays": table,
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        head = _MAGIC + struct.pack("<Q", len(text)) + text
        parts = [head, bytes(-len(head) % _ALIGN)]
        for array in arrays:
            parts += [array.tobytes(), bytes(-array.nbytes % _ALIGN)]
        return b"".join(parts)

    @classmethod
    def from_buffer(cls, buffer: Any, *, schema: Schema, name: str = EXTENTS_FILE) -> Extents:
        """Read extents from the content of an extents file.

        Args:
            buffer: The content: bytes or a memory map. The arrays of the result are views of it.
            schema: The schema of the shard.
            name: Name of the file, for the message of an error. Default: ``extents.bin``.

        Returns:
            The extents.

        Raises:
            CorruptError: If the buffer is cut short or does not fit ``schema``.
        """
        try:
            return cls._parse(memoryview(buffer).cast("B"), schema)
        # The file may come from somebody else. These are the errors that the JSON parser, NumPy and the code below
        # raise for a garbled header; RecursionError is for one of deeply nested brackets.
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error) as error:
            raise CorruptError(f"{name} is not a whole extents file: {error}") from error

    @classmethod
    def _parse(cls, view: memoryview, schema: Schema) -> Extents:
        magic = bytes(view[:8])
        if magic != _MAGIC:
            newer = magic[:6] == _MAGIC[:6] and magic[6:].isdigit() and magic > _MAGIC
            raise ValueError(
                f"version {int(magic[6:])}, this cachetool reads version {int(_MAGIC[6:])}; update cachetool"
                if newer
                else "wrong magic"
            )
        (length,) = struct.unpack("<Q", view[8:16])
        # Without this check a damaged length would select less than the header, and the message would be about JSON.
        if length > len(view) - 16:
            raise ValueError("header cut short")
        header = _header(bytes(view[16 : 16 + length]), schema)
        base = -(-(16 + length) // _ALIGN) * _ALIGN

        def array(of: _Array | None) -> npt.NDArray[Any] | None:
            if of is None:
                return None
            dtype, count, shape, at = of
            values = np.frombuffer(view, dtype=dtype, count=count, offset=base + at)
            return values if len(shape) == 1 else values.reshape(shape)

        fields = {}
        for name, (numbers, arrays, packed) in zip(schema.names, header.fields, strict=True):
            offsets, sizes, shapes, column = map(array, arrays)
            fields[name] = FieldExtents(*numbers, offsets, sizes, shapes, column, _frames(packed, array))
        checksums = array(header.checksums)
        assert checksums is not None
        return cls(header.samples, header.files, fields, checksums)


_Array = tuple[np.dtype[Any], int, tuple[int, ...], int]
"""One array of an extents file: the dtype of its values, their number, its shape, its position in bytes."""


class _Packed(NamedTuple):
    """The checked description of the frames of a field."""

    codec: str
    shuffle: int
    nbytes: int
    arrays: tuple[_Array | None, ...]
    """Offsets, sizes and starts of the frames."""


def _frames(packed: _Packed | None, array: Callable[[_Array | None], Any]) -> Frames | None:
    if packed is None:
        return None
    offsets, sizes, starts = map(array, packed.arrays)
    return Frames(packed.codec, offsets, sizes, packed.nbytes, packed.shuffle, starts)


class _Header(NamedTuple):
    """The checked content of a header."""

    schema: Schema
    samples: int
    files: tuple[str, ...]
    fields: list[tuple[tuple[int, int, int, int], list[_Array | None], _Packed | None]]
    """File, start, stride and size of a value of each field; offsets, sizes, shapes and column; frames."""
    checksums: _Array


# Parsed headers by their text. The shards of one dataset have few different headers, and a feeder opens hundreds of
# shards at the beginning of an epoch. At most 64 headers of at most 64 KiB are kept, because a large header, or a cache
# with many different ones, would fill the memory.
_headers: dict[bytes, _Header] = {}
_KEPT, _LONG = 64, 2**16


def _header(text: bytes, schema: Schema) -> _Header:
    """Return the header with this text, parsed at most once while the text is kept."""
    header = _headers.get(text)
    if header is None or header.schema != schema:
        header = _parsed(text, schema)
        if len(_headers) >= _KEPT:
            _headers.clear()
        if len(text) <= _LONG:
            _headers[text] = header
    return header


def _parsed(text: bytes, schema: Schema) -> _Header:
    # No library checks this header, so each value that becomes a path, a position or a size is checked here.
    header = json.loads(text)
    samples = int(header["samples"])
    if samples < 0:
        raise ValueError(f"{samples} samples")
    for file in header["files"]:
        # The reader opens these names relative to the folder of the shard. An absolute name or one with ".." would make
        # it map any file of the user.
        if not file or file[0] == "/" or ".." in file.split("/") or "\0" in file:
            raise ValueError(f"{file!r} is not a name inside of the folder")

    def array(index: int | None, shape: tuple[int, ...]) -> _Array | None:
        if index is None:
            return None
        entry = header["arrays"][index]
        if tuple(entry["shape"]) != shape:
            raise ValueError(f"array {index} has shape {entry['shape']}, not {shape}")
        dtype = storage_dtype(entry["dtype"])
        # storage_dtype() returns the little-endian form of any dtype, so a big-endian array would be read as other
        # numbers. to_bytes() aligns every array, so an array at another position was not written by cachetool.
        if dtype.str != entry["dtype"] or entry["at"] % _ALIGN:
            raise ValueError(f"array {index} has dtype {entry['dtype']} and lies at {entry['at']}")
        return dtype, math.prod(shape), shape, int(entry["at"])

    def packed(entry: Any, field: Field) -> _Packed:
        count = int(header["arrays"][entry["sizes"]]["shape"][0])
        shapes = {"offsets": (count,), "sizes": (count,), "starts": (count + 1,)}
        out = _Packed(
            str(entry["codec"]),
            int(entry["shuffle"]),
            int(entry["nbytes"]),
            tuple(array(entry[name], shape) for name, shape in shapes.items()),
        )
        int64s = all(one[0] == np.int64 for one in out.arrays if one is not None)
        good = int64s and out.arrays[0] is not None and out.codec in CODECS and not field.is_scalar
        # A frame is decoded into memory of this size, so a size without limit could ask for any amount.
        if not good or not 0 <= out.nbytes <= _MOST_FRAME or not 1 <= out.shuffle <= 64:
            raise ValueError(f"not frames of field {field.name!r}")
        # Without starts each frame has nbytes, which is a divisor.
        if out.arrays[2] is None and not out.nbytes % out.shuffle == 0 < out.nbytes:
            raise ValueError(f"frames of {out.nbytes} bytes in field {field.name!r}")
        return out

    fields = []
    for entry, field in zip(header["fields"], schema, strict=True):
        if entry["name"] != field.name:
            raise ValueError(f"field {entry['name']!r} where {field.name!r} should be")
        numbers = (int(entry["file"]), int(entry["start"]), int(entry["stride"]), int(entry["nbytes"]))
        shapes = {"offsets": (samples,), "sizes": (samples,), "shapes": (samples, field.rank), "column": (samples,)}
        arrays = [array(entry[name], shape) for name, shape in shapes.items()]
        _check(numbers, arrays, field, len(header["files"]), samples)
        fields.append((numbers, arrays, None if entry["frames"] is None else packed(entry["frames"], field)))
    checksums = array(header["checksums"], (len(schema), samples))
    if checksums is None:
        raise ValueError("no checksums")
    return _Header(schema, samples, tuple(str(f) for f in header["files"]), fields, checksums)


def _check(
    numbers: tuple[int, int, int, int], arrays: list[_Array | None], field: Field, files: int, samples: int
) -> None:
    """Raise ValueError unless the extents fit the field."""
    (file, start, stride, nbytes), (offsets, sizes, shapes, column) = numbers, arrays
    good = all(array[0] == np.int64 for array in (offsets, sizes, shapes) if array is not None)
    if field.is_scalar:
        good = good and column is not None and column[0] == field.numpy
    else:
        good = good and column is None and 0 <= file < files
        good = good and (field.kind != "fixed" or (sizes is None and nbytes == field.nbytes))
        good = good and (field.kind != "ragged" or shapes is not None)
        # locate() computes positions in int64. A product that wraps around could point to a place inside the file that
        # belongs to another sample. Python integers do not wrap around, so this check is exact.
        last = start + stride * max(0, samples - 1)
        good = good and min(start, last, nbytes) >= 0
        good = good and max(start, last, nbytes) <= _FARTHEST
    if not good:
        raise ValueError(f"not extents of field {field.name!r}, {field.describe()}")
