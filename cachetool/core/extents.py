"""Where each sample's field lies in a shard's files, and what its bytes must hash to.

One ``extents.bin`` per uncompressed shard, little-endian, made to be memory-mapped and shared between processes::

    "CTEXT001" | u64 length of the header | header, JSON | padding to 64 | array | padding to 64 | array | ...

The header names the files, the number of samples, and for every array its dtype, shape and position, so that a reader
touches only the columns it needs. Field by field there is one of:

- a scalar: its raw column, (samples,), since a TFRecord keeps integers as varints;
- a constant stride: ``start`` and ``stride``, two numbers for any count of samples;
- anything else: ``offsets`` (samples,), and ``sizes`` (samples,) in bytes when they differ.

Ragged fields also have ``shapes`` (samples, rank). ``checksums`` is (fields, samples) uint64: xxh3-64 of a field's
value in its canonical encoding (see :func:`cachetool.formats.digest.checksums`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema, storage_dtype

__all__ = ["EXTENTS_FILE", "Extents", "FieldExtents"]

EXTENTS_FILE = "extents.bin"
"""Name of the file, beside the data files of a shard."""
_MAGIC = b"CTEXT001"
_ALIGN = 64
_FARTHEST = 2**62
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FieldExtents:
    """Where one field lies. Offsets and sizes are bytes."""

    file: int = 0
    """Which of :attr:`Extents.files` holds the bytes."""
    start: int = 0
    """Position of the first sample, when the stride is constant."""
    stride: int = 0
    """Distance between neighbours, when it is constant."""
    nbytes: int = 0
    """Bytes of each sample, when :attr:`sizes` is None."""
    offsets: Int64s | None = None
    """Position of each sample, (samples,), when no stride is constant."""
    sizes: Int64s | None = None
    """Bytes of each sample, (samples,), when they differ."""
    shapes: Int64s | None = None
    """Shape of each sample's array, (samples, rank), of a ragged field."""
    column: npt.NDArray[Any] | None = None
    """The values themselves, (samples,), of a scalar field; the numbers above are then not used."""

    def locate(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Positions and sizes in bytes of the samples at ``indices``, two int64 arrays of that shape."""
        offsets = self.start + self.stride * indices if self.offsets is None else self.offsets[indices]
        sizes = np.full(indices.shape, self.nbytes, dtype=np.int64) if self.sizes is None else self.sizes[indices]
        return offsets, sizes


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of one shard or part."""

    samples: int
    """Number of samples."""
    files: tuple[str, ...]
    """The files that hold the bytes, relative to the folder of the shard, ``/`` between parts."""
    fields: Mapping[str, FieldExtents]
    """Extents of each field, in the order of the schema."""
    checksums: npt.NDArray[np.uint64]
    """xxh3-64 of each value, (fields, samples), fields in the order of the schema."""

    def to_bytes(self) -> bytes:
        """The content of ``extents.bin``."""
        arrays: list[npt.NDArray[Any]] = []
        table: list[dict[str, Any]] = []
        position = 0

        def add(array: npt.NDArray[Any] | None) -> int | None:
            nonlocal position
            if array is None:
                return None
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
        """The extents in ``buffer`` (bytes, a memory map), their arrays views of it.

        Raises :class:`CorruptError`, naming ``name``, when the buffer is cut short or does not fit ``schema``.
        """
        try:
            return cls._parse(memoryview(buffer).cast("B"), schema)
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

        fields = {
            name: FieldExtents(*numbers, *map(array, arrays))
            for name, (numbers, arrays) in zip(schema.names, header.fields, strict=True)
        }
        checksums = array(header.checksums)
        assert checksums is not None
        return cls(header.samples, header.files, fields, checksums)


_Array = tuple[np.dtype[Any], int, tuple[int, ...], int]
"""Type of its values, how many, shape, position."""


class _Header(NamedTuple):
    """What a header says, checked."""

    schema: Schema
    samples: int
    files: tuple[str, ...]
    fields: list[tuple[tuple[int, int, int, int], list[_Array | None]]]
    """File, start, stride, bytes of a value; offsets, sizes, shapes, column."""
    checksums: _Array


_headers: dict[bytes, _Header] = {}
_KEPT, _LONG = 64, 2**16


def _header(text: bytes, schema: Schema) -> _Header:
    """The header with this text. Shards of one dataset have few different ones, which are parsed once."""
    header = _headers.get(text)
    if header is None or header.schema != schema:
        header = _parsed(text, schema)
        if len(_headers) >= _KEPT:
            _headers.clear()
        if len(text) <= _LONG:
            _headers[text] = header
    return header


def _parsed(text: bytes, schema: Schema) -> _Header:
    header = json.loads(text)
    samples = int(header["samples"])
    if samples < 0:
        raise ValueError(f"{samples} samples")
    for file in header["files"]:
        if not file or file[0] == "/" or ".." in file.split("/") or "\0" in file:
            raise ValueError(f"{file!r} is not a name inside of the folder")

    def array(index: int | None, shape: tuple[int, ...]) -> _Array | None:
        if index is None:
            return None
        entry = header["arrays"][index]
        if tuple(entry["shape"]) != shape:
            raise ValueError(f"array {index} has shape {entry['shape']}, not {shape}")
        dtype = storage_dtype(entry["dtype"])
        if dtype.str != entry["dtype"] or entry["at"] % _ALIGN:
            raise ValueError(f"array {index} has dtype {entry['dtype']} and lies at {entry['at']}")
        return dtype, math.prod(shape), shape, int(entry["at"])

    fields = []
    for entry, field in zip(header["fields"], schema, strict=True):
        if entry["name"] != field.name:
            raise ValueError(f"field {entry['name']!r} where {field.name!r} should be")
        numbers = (int(entry["file"]), int(entry["start"]), int(entry["stride"]), int(entry["nbytes"]))
        shapes = {"offsets": (samples,), "sizes": (samples,), "shapes": (samples, field.rank), "column": (samples,)}
        arrays = [array(entry[name], shape) for name, shape in shapes.items()]
        _check(numbers, arrays, field, len(header["files"]), samples)
        fields.append((numbers, arrays))
    checksums = array(header["checksums"], (len(schema), samples))
    if checksums is None:
        raise ValueError("no checksums")
    return _Header(schema, samples, tuple(str(f) for f in header["files"]), fields, checksums)


def _check(
    numbers: tuple[int, int, int, int], arrays: list[_Array | None], field: Field, files: int, samples: int
) -> None:
    """Raise ValueError unless the extents are those of such a field."""
    (file, start, stride, nbytes), (offsets, sizes, shapes, column) = numbers, arrays
    good = all(array[0] == np.int64 for array in (offsets, sizes, shapes) if array is not None)
    if field.is_scalar:
        good = good and column is not None and column[0] == field.numpy
    else:
        good = good and column is None and 0 <= file < files
        good = good and (field.kind != "fixed" or (sizes is None and nbytes == field.nbytes))
        good = good and (field.kind != "ragged" or shapes is not None)
        # Positions are computed with 64 bits, which must not wrap around to some that are inside of the file.
        last = start + stride * max(0, samples - 1)
        good = good and min(start, last, nbytes) >= 0
        good = good and max(start, last, nbytes) <= _FARTHEST
    if not good:
        raise ValueError(f"not extents of field {field.name!r}, {field.describe()}")
