"""HDF5 files whose datasets hold one sample a row.

Every dataset whose first dimension is the number of samples becomes a field. A dataset in a group is named
``group/name``.

=============================  ==========================================================================
dataset                        field
=============================  ==========================================================================
bool, int, uint, float,        fixed, little-endian
complex, datetime64
text (variable or fixed        ``str`` when HDF5 calls it UTF-8, ``bytes`` when it calls it ASCII, as h5py
length)                        reads it
variable-length numbers        ragged, rank 1
compound, enum, opaque,        left out, with the reason
reference
=============================  ==========================================================================

CF attributes of a dataset, as netCDF4 has them, say what its numbers stand for: :mod:`cachetool.core.cf`.

A file may name other files that hold its data: external links, external storage, virtual datasets. A foreign file
could so have any file of this machine read as data. Such datasets are refused, and links are not followed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import h5py
import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column
from cachetool.core.cf import ATTRIBUTES, packing_of
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import storage_dtype
from cachetool.formats.columnar import ATTRIBUTE
from cachetool.sources.blocks import Repeated, blocks_of, refuse_ours
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.flat import unflattened, wants_arrays
from cachetool.sources.groups import SINGLE, by_groups, too_many
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOT_ASKED, reading
from cachetool.sources.rows import (
    Boxes,
    ColumnFile,
    Part,
    Place,
    Slab,
    StoredColumn,
    decoded,
    joined,
    named_dims,
    of_sizes,
    schema_of_ours,
    unpadded,
    wants_of_ours,
)

__all__ = ["open_hdf5"]

MAX_OBJECTS = 20_000
"""Largest number of groups and datasets in one file. Each takes a quarter of a millisecond whenever the file is
opened."""
_MAX_DEPTH = 32
_SCALES = "DIMENSION_LIST"
_REFERENCE = 16
"""Bytes in a dataset for each value of differing size. The value itself lies in another part of the file."""

Array = npt.NDArray[Any]


def open_hdf5(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Open the datasets of one HDF5 file. Raise :class:`BadObject` that names the file, and the dataset."""
    opened = _File(file)
    skipped: list[tuple[str, str]] = []
    try:
        with reading(f"{file} is not a whole HDF5 file"):
            root = opened.open()
            ours = schema_of_ours(file, root.attrs[ATTRIBUTE]) if ATTRIBUTE in root.attrs else None
        if options.block and ours is not None:
            raise refuse_ours(file)
        columns: list[StoredColumn] = []
        for name, dataset in _datasets(file, root, options, skipped, ours=ours is not None):
            with reading(f"{file}: {quoted(name)}"):
                column = _column(opened, name, dataset, stored=file.size)
            if isinstance(column, str):
                skipped.append((name, column))
            else:
                columns.append(column)
        for slab in opened.slabs:
            # All datasets of the file share 256 MiB for their last chunks, so the share is known only when all are
            # found.
            slab.share(len(opened.slabs))
        columns = decoded(columns, options, skipped)
        if options.block:
            columns, grid = blocks_of(file, columns, options, skipped, stored=file.size, repeated=opened.repeated)
            return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, close=opened.close, grid=grid)
        columns, keys = by_groups(file, columns, options, skipped, stored=file.size, ours=ours is not None)
        if ours is None and keys is None:
            columns = unflattened(file, columns, skipped, options)
        return ColumnFile(
            file, columns, options, skipped=skipped, stored=file.size, close=opened.close, ours=ours, keys=keys
        )
    finally:
        opened.close()


# Offset of the version behind the signature of 8 bytes. The flags are three bytes after the version.
_VERSION_AT = 8
# Flags of a file that is open for writing, or for writing while others read (SWMR).
_WRITTEN = 0b101


class _File:
    """The HDF5 file, opened when it is needed, also after it was closed."""

    def __init__(self, file: SourceFile) -> None:
        self.path = file
        self._bytes: BinaryIO | None = None
        self._file: Any = None
        self.slabs: list[Slab] = []
        self.repeated = Repeated()

    def open(self) -> Any:
        if self._file is None:
            self._bytes = self.path.open()
            # The default chunk cache stays: without it a chunk would be fetched again for each of its rows.
            self._file = h5py.File(self._bytes, "r")
            self._refuse_open(self._bytes, self._file.userblock_size)
        return self._file

    def _refuse_open(self, file: BinaryIO, start: int) -> None:
        """Raise ``OSError`` for a file whose writer has not closed it, because chunks may be missing.

        The superblock: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html (version and flags).
        """
        # HDF5 refuses such a file when it opens it by path. It does not check the flags of a file that it reads through
        # a Python object, as here.
        file.seek(start + _VERSION_AT)
        version, *_, flags = file.read(4)
        if version >= 3 and flags & _WRITTEN:
            self.close()
            raise OSError("a program is writing it, or ended without closing it (then run: h5clear -s FILE)")

    def close(self) -> None:
        for slab in self.slabs:
            slab.drop()
        self.repeated.drop()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._bytes is not None:
            self._bytes.close()
            self._bytes = None


def _datasets(
    path: SourceFile, root: Any, options: SourceOptions, skipped: list[tuple[str, str]], *, ours: bool
) -> Iterator[tuple[str, Any]]:
    """Yield all datasets below ``root`` that are in this file, with their names."""
    wants = wants_of_ours(options) if ours else options.wants if options.block else wants_arrays(options)
    with reading(f"{path} is not a whole HDF5 file"):
        info = h5py.h5o.get_info(root.id)
    # Hard links can form a cycle or name one dataset twice. Addresses in the file tell that; names do not.
    seen = {(info.fileno, info.addr): "/"}
    folders = [("", root)]
    count = 0
    while folders:
        prefix, group = folders.pop(0)
        with reading(f"{path}: group {quoted(prefix or '/')}"):
            names = list(group)
        for name in names:
            count += 1
            if count > MAX_OBJECTS:
                raise UsageError(too_many(path, MAX_OBJECTS, "groups and datasets"))
            # h5py returns a name as bytes if it cannot be decoded.
            if isinstance(name, bytes):
                skipped.append((prefix + name.decode("utf-8", "backslashreplace"), "its name is not UTF-8"))
                continue
            with reading(f"{path}: {quoted(prefix + name)}"):
                entry = _member(path, prefix + name, group, name, wants)
                if isinstance(entry, str):
                    skipped.append((prefix + name, entry))
                    continue
                info = h5py.h5o.get_info(entry.id)
            first = seen.setdefault((info.fileno, info.addr), prefix + name)
            named = options.chosen is not None and wants(prefix + name) and isinstance(entry, h5py.Dataset)
            if first != prefix + name and not named:
                skipped.append((prefix + name, f"the same as {quoted(first)}"))
                continue
            if isinstance(entry, h5py.Group):
                if prefix.count("/") >= _MAX_DEPTH:
                    raise BadObject(f"{path}: groups are nested more than {_MAX_DEPTH} deep at {quoted(prefix)}")
                folders.append((f"{prefix}{name}/", entry))
            elif not isinstance(entry, h5py.Dataset):
                skipped.append((prefix + name, "a named type"))
            elif not wants(prefix + name):
                skipped.append((prefix + name, NOT_ASKED))
            else:
                yield prefix + name, entry


def _member(path: SourceFile, full: str, group: Any, name: str, wants: Callable[[str], bool]) -> Any:
    """Return the object behind a name, or why it is left out. Nothing outside of the file is opened."""
    # The link is examined before it is followed: HDF5 opens the file behind an external link as soon as the object is
    # opened.
    link = group.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        if wants(full):
            raise BadObject(f"{path}: {quoted(full)} is a link into another file, which is refused;{_OTHER}")
        return "a link into another file"
    if not isinstance(link, h5py.HardLink):
        return "a soft link"
    entry = group[name]
    if isinstance(entry, h5py.Dataset):
        how = entry.id.get_create_plist()
        # Bytes of external storage and of virtual datasets are read from other files, such as /etc/passwd, as soon as a
        # row is read.
        if how.get_external_count() or how.get_layout() == h5py.h5d.VIRTUAL:
            if wants(full):
                raise BadObject(f"{path}: {quoted(full)} has its bytes in other files, which is refused;{_OTHER}")
            return "its bytes are in other files"
    return entry


_OTHER = "\nchoose other fields with --fields, or copy the data into one file: h5repack --merge -l CONTI FILE NEW"


def _column(file: _File, name: str, dataset: Any, *, stored: int) -> StoredColumn | str:
    """Return the dataset as a candidate for a field, or why it cannot be a field."""
    if dataset.shape is None:
        return "empty"
    if reason := _unreadable(dataset):
        return reason
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError) as error:
        return f"a type that h5py does not know ({error})"
    chunk = 0
    if dataset.chunks is not None:
        chunk = math.prod(dataset.chunks) * dtype.itemsize
        # HDF5 unpacks a chunk as a whole, so the chunk's claimed size is memory that a few hostile bytes can demand.
        check_allocation(f"{file.path}: a chunk of {quoted(name)}", chunk, stored=stored)
    text, base = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if text is not None or base is not None:
        if len(dataset.shape) > 1:
            return f"values of differing size in {len(dataset.shape)} dimensions"
        if text is not None:
            return _text(file, name, dataset, text, stored=stored)
        if not dataset.shape:
            return SINGLE
        return _ragged(file, name, dataset, base, stored=stored)
    if h5py.check_enum_dtype(dtype) is not None:
        return "an enumeration"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    element, inner = dtype.subdtype or (dtype, ())
    try:
        little = storage_dtype(element)
    except UsageError as error:
        return str(error)
    if inner and not dataset.shape:
        return SINGLE
    row = math.prod((*dataset.shape[1:], *inner)) * element.itemsize

    def fetch(start: int, stop: int) -> Array:
        rows: Array = _rows(file.open()[name], start, stop)
        return np.ascontiguousarray(rows, dtype=little)

    read = fetch
    if dataset.chunks is not None:
        slab = Slab(fetch, rows=dataset.shape[0], row_nbytes=row, chunk=dataset.chunks[0])
        file.slabs.append(slab)
        read = slab.read
    length = dataset.shape[0] if dataset.shape else 1
    packed = dataset.chunks or dataset.id.get_create_plist().get_nfilters() or not _plain(dataset, dtype)
    # HDF5 reports an offset for values that were never written, too, if the file has a user block. Other bytes of the
    # file would be read as values.
    written = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_ALLOCATED
    offset = None if packed or not written else dataset.id.get_offset()
    return StoredColumn(
        name,
        little.str,
        (*dataset.shape, *inner),
        row * length,
        read,
        piece=chunk,
        offset=-1 if offset is None else int(offset),
        stored=element.str,
        chunk=dataset.chunks[0] if dataset.chunks else 1,
        parts=(lambda: _parts(file.open()[name])) if dataset.chunks else None,
        once=fetch,
        packing=packing_of(attributes := _attributes(dataset), little),
        dims=_dims(dataset) if not inner else (),
        boxes=None if inner else _boxes(file, name, dataset, little, attributes, -1 if offset is None else int(offset)),
    )


_NO_VARIABLE = ("This is a netCDF dimension but not", "b'This is a netCDF dimension but not")


def _boxes(
    file: _File, name: str, dataset: Any, little: np.dtype[Any], attributes: dict[str, Any], offset: int
) -> Boxes | None:
    """Return the reading of boxes. None for a dimension of netCDF4 without values."""
    # An attribute of a type that h5py does not know is no name of netCDF4.
    with contextlib.suppress(TypeError, ValueError, OSError, RuntimeError, KeyError):
        if h5py.h5ds.is_scale(dataset.id) and str(dataset.attrs["NAME"]).startswith(_NO_VARIABLE):
            return None
    chunks = dataset.chunks or (1,) * len(dataset.shape)
    # Only plain values are kept here, because the dataset is closed with its file and opened again.
    chunked, whole = dataset.chunks is not None, tuple(dataset.shape)
    row = math.prod(whole[1:]) * little.itemsize

    def read(bounds: tuple[slice, ...]) -> Array:
        return np.ascontiguousarray(file.open()[name][bounds], dtype=little)

    def places(shape: tuple[int, ...]) -> Iterator[Place]:
        found: list[Place] = []
        if chunked:
            stored = file.open()[name].id
            stored.chunk_iter(lambda info: found.append((info.chunk_offset, info.byte_offset, info.size, "")))
        # The rows of a block lie together if no other dimension is cut.
        elif offset >= 0 and whole and shape[1:] == whole[1:] and shape[0]:
            zeros = (0,) * (len(whole) - 1)
            for first in range(0, whole[0], shape[0]):
                found.append(((first, *zeros), offset + first * row, min(shape[0], whole[0] - first) * row, ""))
        return iter(found)

    def fill() -> Any:
        number = (packing_of(attributes, little).get("_FillValue") or [file.open()[name].fillvalue])[0]
        return np.asarray(number).astype(little)[()]

    return Boxes(read, chunks, places, fill)


def _rows(dataset: Any, start: int, stop: int) -> Array:
    """Return rows of a dataset. A single value is its own row 0."""
    return dataset[start:stop] if dataset.shape else np.asarray(dataset[()])[None]


def _attributes(dataset: Any) -> dict[str, Any]:
    """Return the CF attributes that can be read."""
    attributes = {}
    for name in ATTRIBUTES:
        # An attribute of a type that h5py does not know carries no CF meaning. It must not make the dataset unreadable.
        with contextlib.suppress(TypeError, ValueError, OSError, RuntimeError):
            if name in dataset.attrs:
                attributes[name] = dataset.attrs[name]
    return attributes


def _dims(dataset: Any) -> tuple[str, ...]:
    """Return the names of the dimensions, as netCDF4 and xarray name them by dimension scales; empty if one has no
    name."""
    names: list[str] = []
    # Scales are found by references, which a damaged file may point anywhere. Names are only a note beside the values,
    # so they must not make the dataset unreadable.
    with contextlib.suppress(TypeError, ValueError, OSError, RuntimeError, KeyError):
        attributes = dataset.attrs
        if _SCALES in attributes:
            for references in attributes[_SCALES]:
                names.append(str(dataset.file[references[0]].name).rpartition("/")[2] if len(references) else "")
        elif attributes.get("CLASS") == b"DIMENSION_SCALE" and len(dataset.shape) == 1:
            # A coordinate is the scale of its own dimension.
            names.append(dataset.name.rpartition("/")[2])
        else:
            names += [dimension.label for dimension in dataset.dims] if "DIMENSION_LABELS" in attributes else []
    return named_dims(names, len(dataset.shape))


def _plain(dataset: Any, dtype: np.dtype[Any]) -> bool:
    """Return True if the values have the same bytes in the file as in an array of ``dtype``."""
    try:
        # For types that NumPy lacks h5py gives the next NumPy type: int16 for 12 bits in two bytes, float32 for
        # bfloat16. Reading such bytes by their offset would give wrong numbers.
        return bool(dataset.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))
    except TypeError:
        return False


def _parts(dataset: Any) -> list[Part]:
    """Return the chunks that are stored in the file."""
    parts: list[Part] = []
    dataset.id.chunk_iter(lambda info: parts.append((info.chunk_offset[0], info.byte_offset, info.size, "")))
    return parts


def _unreadable(dataset: Any) -> str | None:
    """Return why this HDF5 library cannot unpack the dataset, or None."""
    how = dataset.id.get_create_plist()
    for index in range(how.get_nfilters()):
        number, _, _, label = how.get_filter(index)
        if not h5py.h5z.filter_avail(number):
            said = label.decode("ascii", "replace") if label.isascii() else ""
            return f"compressed by filter {number} {said}".rstrip() + ", which this HDF5 library does not have"
    return None


def _text(file: _File, name: str, dataset: Any, text: Any, *, stored: int) -> StoredColumn:
    def read(start: int, stop: int) -> Column:
        rows: Array = _rows(file.open()[name], start, stop)
        return unpadded(rows) if text.length is not None else joined(rows.tolist())

    kind, length = "str" if text.encoding == "utf-8" else "bytes", dataset.shape[0] if dataset.shape else 1
    if text.length is None:
        return StoredColumn(name, kind, dataset.shape, _REFERENCE * length, read, piece=stored)
    return StoredColumn(name, kind, dataset.shape, text.length * length, read)


def _ragged(file: _File, name: str, dataset: Any, base: Any, *, stored: int) -> StoredColumn | str:
    if not isinstance(base, np.dtype) or base.hasobject:
        return "lists of values of differing size"
    # h5py returns wrong numbers for variable-length lists of big-endian values, without an error.
    if not base.isnative:
        return "lists of big-endian numbers, which h5py reads wrongly"
    try:
        little = storage_dtype(base)
    except UsageError as error:
        return str(error)

    def read(start: int, stop: int) -> Column:
        rows = [np.asarray(row, dtype=little) for row in file.open()[name][start:stop]]
        return of_sizes(np.concatenate(rows), np.array([len(row) for row in rows], dtype=np.int64), shapes=True)

    nbytes = _REFERENCE * dataset.shape[0]
    return StoredColumn(name, little.str, dataset.shape, nbytes, read, ragged=1, piece=stored)
