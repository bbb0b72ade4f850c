"""Extents on disk, and a reader of shards of every format that needs nothing but the extents.

This reader is the plain form, a :class:`~cachetool.formats.base.Reader` for conversion, verification and tests. The
loaders' gather engine uses the same :class:`~cachetool.core.extents.Extents`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.closing import Closing
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.extents import EXTENTS_FILE, Extents, FieldExtents
from cachetool.core.schema import Field, Schema
from cachetool.formats.digest import checksums
from cachetool.formats.files import map_file, missing_is_corrupt, refuse_links, write_durably
from cachetool.formats.frames import FRAME_BYTES, Scratch, check_frames, read_frames
from cachetool.formats.runs import Bytes, Int64s, as_bytes, copy_rows, copy_runs, ends, inside

__all__ = [
    "ExtentsReader",
    "check_range",
    "check_values",
    "compare_checksums",
    "extents_bound",
    "field_extents",
    "load_extents",
    "write_extents",
]


def extents_bound(schema: Schema, samples: int, *, framed: int = 0) -> int:
    """Return an upper bound, in bytes, of the size of ``extents.bin`` of a shard of at most ``samples`` samples.

    ``framed``: bytes of the values that are compressed in frames.
    """
    sample_bytes = sum(8 + (f.numpy.itemsize if f.is_scalar else 16 + 8 * f.rank) for f in schema)
    # The header's JSON has about 150 characters of text and numbers for each field and 60 for each array. A character
    # of a name may take 6 bytes when JSON escapes it.
    header = 4096 + sum(1024 + 6 * len(f.name) for f in schema)
    # Position, size and start of each frame. Rows of half a frame and a bit more make the most frames.
    frames = 24 * (2 * framed // FRAME_BYTES + 2 * len(schema)) if framed else 0
    return samples * sample_bytes + header + frames


def write_extents(folder: Path, extents: Extents) -> Path:
    """Write ``extents.bin`` durably into ``folder`` and return its path. Raises :class:`UsageError` when it exists."""
    path = folder / EXTENTS_FILE
    write_durably(path, extents.to_bytes())
    return path


def load_extents(path: Path, schema: Schema, *, links: bool = True) -> Extents:
    """Return the extents in the file ``path``, memory-mapped.

    Raises :class:`CorruptError`, naming the file, when the file is damaged, or is a link and ``links`` is False.
    """
    with missing_is_corrupt(path):
        buffer = map_file(path, links=links)
    return Extents.from_buffer(buffer, schema=schema, name=str(path))


def field_extents(
    field: Field, *, file: int = 0, offsets: Int64s, sizes: Int64s | None = None, shapes: Int64s | None = None
) -> FieldExtents:
    """Return the extents of a field whose samples lie at ``offsets``, as two numbers where the stride is constant.

    ``sizes`` (bytes) is given for fields whose samples differ in size, ``shapes`` for ragged fields.
    """
    nbytes = field.nbytes
    # Most fields of a real shard have one size and one stride even if their schema allows others. Then the extents are
    # a few numbers, and a loader needs no look-up for each sample.
    if sizes is not None and len(sizes) and (sizes == sizes[0]).all():
        nbytes, sizes = int(sizes[0]), None
    steps = np.diff(offsets)
    if not len(offsets) or (steps == steps[:1]).all():
        start = int(offsets[0]) if len(offsets) else 0
        stride = int(steps[0]) if len(steps) else nbytes
        return FieldExtents(file=file, start=start, stride=stride, nbytes=nbytes, sizes=sizes, shapes=shapes)
    return FieldExtents(file=file, nbytes=nbytes, offsets=offsets, sizes=sizes, shapes=shapes)


def check_range(start: int, stop: int, samples: int) -> Int64s:
    """Return ``arange(start, stop)``. Raises :class:`UsageError` when it reaches outside the samples of a shard."""
    if not 0 <= start <= stop <= samples:
        raise UsageError(f"samples {start} to {stop} are outside a shard of {samples} samples")
    return np.arange(start, stop, dtype=np.int64)


def check_indices(indices: npt.NDArray[np.int64], samples: int) -> Int64s:
    """Return ``indices`` as flat int64. Raises :class:`UsageError` when one lies outside the samples of a shard."""
    # NumPy would count negative indices from the end and return a wrong sample, so they are refused.
    at = np.asarray(indices, dtype=np.int64).reshape(-1)
    if len(at) and not 0 <= int(at.min()) <= int(at.max()) < samples:
        bad = int(at.min()) if int(at.min()) < 0 else int(at.max())
        raise UsageError(f"sample {bad} is outside a shard of {samples} samples")
    return at


def check_values(block: Block, expected: npt.NDArray[np.uint64], *, name: str, indices: Int64s) -> None:
    """Raise :class:`CorruptError`, naming file, sample and field, unless ``block`` has the ``expected`` checksums.

    ``expected`` is (fields, samples). ``indices`` are the numbers of the block's samples in their shard.
    """
    compare_checksums(checksums(block), expected, block.schema, name=name, indices=indices)


def compare_checksums(
    actual: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64], schema: Schema, *, name: str, indices: Int64s
) -> None:
    """Raise :class:`CorruptError` like :func:`check_values`, for samples whose checksums are computed already."""
    wrong = actual != expected
    if wrong.any():
        # Transposed, so that the first sample is named and not the first field: the sample is what a user can look up.
        sample, row = divmod(int(np.argmax(wrong.T)), len(schema))
        field = schema.names[row]
        raise CorruptError(f"{name}: sample {int(indices[sample])}, field {field!r} does not match its checksum")


class ExtentsReader(Closing):
    """A reader of one shard that takes samples out of memory maps of its files, without the format's library.
    Compressed values are decoded.

    The names in ``extents.files`` are relative to ``folder``. Fields that are not in ``schema`` stay unread. ``read``
    returns views of the maps where it can. Such views keep the maps alive, also after :meth:`close`. ``links=False`` is
    for a shard of a cache: no link is followed in it.
    """

    def __init__(self, folder: Path, extents: Extents, schema: Schema, *, links: bool = True) -> None:
        # Once, before anything is opened. The last part of each path is checked again when the file is opened
        # (O_NOFOLLOW).
        if not links:
            refuse_links(str(folder), extents.files)
        self._links = links
        self.schema = schema
        self.samples = extents.samples
        self.extents = extents
        self._paths = tuple(folder / name for name in extents.files)
        # A file is mapped when its first field is read, because a reader of few fields may not need the other files.
        self._maps: dict[int, Bytes] = {}
        self._checked: set[str] = set()
        self._scratch = Scratch()

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop - 1``. Fixed fields of constant stride are views of the map."""
        return self.take(check_range(start, stop, self.samples), _contiguous=True)

    def take(self, indices: npt.NDArray[np.int64], *, _contiguous: bool = False) -> Block:
        """Return the samples at ``indices``, in that order. Raises :class:`CorruptError` when a file is too short."""
        at = check_indices(indices, self.samples)
        return Block(self.schema, {f.name: self._column(f, at, contiguous=_contiguous) for f in self.schema})

    def _map(self, file: int) -> Bytes:
        buffer = self._maps.get(file)
        if buffer is None:
            with missing_is_corrupt(self._paths[file]):
                buffer = self._maps[file] = map_file(self._paths[file], links=self._links)
        return buffer

    def _column(self, field: Field, at: Int64s, *, contiguous: bool) -> Column:
        extents = self.extents.fields[field.name]
        # Scalars are stored in the extents, so the data file is not touched.
        if extents.column is not None:
            return extents.column[at]
        buffer = self._map(extents.file)
        offsets, sizes = extents.locate(at)
        # Nothing below checks a position, so a file that was cut short would be read outside of its map.
        length = len(buffer) if extents.frames is None else extents.frames.total
        if not inside(offsets, sizes, length):
            raise CorruptError(
                f"{self._paths[extents.file]} is cut short: it has {length} bytes, but field {field.name!r} needs more"
            )
        if field.kind != "fixed":
            return self._ragged(field, at, offsets, sizes)
        if extents.frames is not None:
            out = np.empty((len(at), *field.sizes), dtype=field.numpy)
            self._copy(field, as_bytes(out), np.arange(len(at)) * extents.nbytes, offsets, sizes)
            return out
        if contiguous and extents.offsets is None and len(at) and extents.stride >= 0:
            # A view of the map: conversion then copies each value once, straight into the new file.
            begin = buffer[int(offsets[0]) :]
            rows = np.lib.stride_tricks.as_strided(begin, (len(at), extents.nbytes), (extents.stride, 1))
            if extents.stride == extents.nbytes:
                return rows.reshape(-1).view(field.numpy).reshape(len(at), *field.sizes)
        # One sample is always in one piece, so a view is enough whatever the stride.
        elif contiguous and len(at) == 1:
            rows = buffer[None, int(offsets[0]) : int(offsets[0]) + extents.nbytes]
        else:
            rows = np.empty((len(at), extents.nbytes), dtype=np.uint8)
            copy_rows(rows.reshape(-1), None, buffer, offsets, extents.nbytes)
        # A view of zero bytes as another dtype is an error in NumPy, so fields without bytes get an empty array.
        if extents.nbytes == 0:
            return np.empty((len(at), *field.sizes), dtype=field.numpy)
        return rows.view(field.numpy).reshape(len(at), *field.sizes)

    def _ragged(self, field: Field, at: Int64s, offsets: Int64s, sizes: Int64s) -> Ragged:
        starts = ends(sizes)
        values = np.empty(int(starts[-1]), dtype=np.uint8)
        extents = self.extents.fields[field.name]
        self._copy(field, values, starts[:-1], offsets, sizes)
        itemsize = field.numpy.itemsize
        shapes = None if extents.shapes is None else extents.shapes[at]
        # Sizes and shapes come from a file. If they do not fit each other, the view below would fail with an error that
        # names no file.
        if (sizes % itemsize).any():
            raise CorruptError(
                f"{self._paths[extents.file]}: the size of field {field.name!r} is not a multiple of its item size"
            )
        if shapes is not None and ((shapes < 0).any() or (shapes.prod(axis=1) * itemsize != sizes).any()):
            raise CorruptError(
                f"{self._paths[extents.file]}: field {field.name!r} has a shape that does not fit its size"
            )
        return Ragged(values.view(field.numpy), starts // itemsize, shapes)

    def _copy(self, field: Field, out: Bytes, to: Int64s, starts: Int64s, sizes: Int64s) -> None:
        """Copy the bytes of values to ``out``, decoded if they are compressed."""
        extents = self.extents.fields[field.name]
        buffer, frames = self._map(extents.file), extents.frames
        if frames is None:
            copy_runs(out, to, buffer, starts, sizes)
            return
        path = str(self._paths[extents.file])
        if field.name not in self._checked:
            check_frames(path, frames, field.name)
            self._checked.add(field.name)
        try:
            read_frames(
                frames, lambda at, size: buffer.data[at : at + size], out, to, starts, sizes, scratch=self._scratch
            )
        except CorruptError as error:
            raise CorruptError(f"{path} {error}") from error

    def close(self) -> None:
        """Forget the maps. A map is unmapped when the last view of it is gone."""
        self._maps.clear()
