"""Zarr v2 and v3, groups and single arrays, whose arrays hold one sample a row.

Every array whose first dimension is the number of samples becomes a field; arrays in groups are named ``group/name``,
and a single array is named after its folder. A missing chunk holds the array's fill value, as Zarr defines it.

CF attributes of an array, as xarray writes them, give the meaning of its numbers: :mod:`cachetool.core.cf`.

The metadata are read here first, and Zarr only gets arrays with known codecs. Other codecs that the metadata can name
unpickle data, also if they stand behind other codecs or inside a shard.

The codecs of Zarr in this process are changed to check what they read (:func:`distrust_codecs`). Unchanged, they
allocate whatever size a chunk states, or unpack without a limit. Blosc also believes its own length: after a chunk that
was cut it returns whatever bytes follow in memory, as values.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import importlib
import io
import itertools
import json
import lzma
import math
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from cachetool.core.block import Column
from cachetool.core.cf import packing_of
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import storage_dtype
from cachetool.formats.columnar import ATTRIBUTE
from cachetool.sources.blocks import Repeated, blocks_of, chunks_of, refuse_ours
from cachetool.sources.byte_source import Ranges, SourceFile
from cachetool.sources.flat import unflattened, wants_arrays
from cachetool.sources.groups import by_groups, too_many
from cachetool.sources.limits import allowed, check_allocation, quoted
from cachetool.sources.ome import IMAGE, Level, levels_of
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
    schema_of_ours,
    unpadded,
    wants_of_ours,
)

__all__ = ["distrust_codecs", "open_zarr"]


_BLOSC_HEAD = 16
_ZSTD = b"\x28\xb5\x2f\xfd"

Decode = Callable[..., Any]


class _Limit:
    most = 0


def distrust_codecs(most: int) -> None:
    """Make all codecs of this process refuse a chunk that unpacks to more than ``most`` bytes. The highest limit
    counts."""
    # The codecs are shared by all arrays of the process, so a smaller array must not lower the limit of a larger one.
    _Limit.most = max(_Limit.most, most)
    _replace_all()


@functools.cache
def _replace_all() -> None:
    numcodecs = importlib.import_module("numcodecs")
    for name, claimed in {"Blosc": _blosc_claims, "LZ4": _lz4_claims, "Zstd": _zstd_claims}.items():
        codec = getattr(numcodecs, name)
        codec.decode = _believing(codec.decode, claimed)
    for name, read in {"GZip": _gunzip, "Zlib": _inflate, "BZ2": _bunzip, "LZMA": _unlzma}.items():
        if (codec := getattr(numcodecs, name, None)) is not None:  # Python may be without one of them
            codec.decode = _unpacking(read)


def _believing(decode: Decode, claimed: Callable[[bytes, int], int]) -> Decode:
    """Return ``decode`` with a check of the size that the chunk states."""

    def checked(self: Any, buf: Any, out: Any = None) -> Any:
        chunk = np.frombuffer(buf, dtype=np.uint8)
        _check(claimed(chunk[:_BLOSC_HEAD].tobytes(), len(chunk)))
        return decode(self, buf, out)

    return checked


def _unpacking(read: Callable[[Any, bytes, int], bytes]) -> Decode:
    """Return a ``decode`` that stops one byte after the limit."""

    def checked(self: Any, buf: Any, out: Any = None) -> Any:
        data = read(self, np.frombuffer(buf, dtype=np.uint8).tobytes(), _Limit.most + 1)
        _check(len(data))
        return data if out is None else importlib.import_module("numcodecs.compat").ndarray_copy(data, out)

    return checked


def _check(nbytes: int) -> None:
    if nbytes > _Limit.most:
        raise ValueError(f"a chunk decompresses to more than the {_Limit.most} bytes allowed")


def _blosc_claims(head: bytes, stored: int) -> int:
    """Return the unpacked bytes that a Blosc chunk states. Raises ValueError for a chunk of another length than it
    states."""
    # Blosc trusts the length in bytes 12 to 16 and reads past the end of a cut chunk: 2 of the first 6 cut files
    # returned foreign memory as values.
    if len(head) < _BLOSC_HEAD or int.from_bytes(head[12:16], "little") != stored:
        raise ValueError("a Blosc chunk that is cut short or has a damaged length")
    return int.from_bytes(head[4:8], "little")


def _lz4_claims(head: bytes, stored: int) -> int:
    return int.from_bytes(head[:4], "little")


def _zstd_claims(head: bytes, stored: int) -> int:
    """Return the size in the header of a frame (RFC 8878, 3.1.1.1); 0 if the header does not state it."""
    # A frame without a size is left to the memory limit of the process.
    if len(head) < 5 or not head.startswith(_ZSTD):
        return 0
    how = head[4]
    single = how >> 5 & 1
    size = (single, 2, 4, 8)[how >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[how & 3]
    # RFC 8878 adds 256 to sizes of two bytes.
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


def _gunzip(codec: Any, data: bytes, most: int) -> bytes:
    return gzip.GzipFile(fileobj=io.BytesIO(data)).read(most)


def _inflate(codec: Any, data: bytes, most: int) -> bytes:
    stream = zlib.decompressobj()
    inflated = stream.decompress(data, most)
    # zlib.decompressobj returns what it has of a cut stream without an error.
    if not stream.eof and len(inflated) < most:
        raise ValueError("a chunk that is cut short")
    return inflated


def _bunzip(codec: Any, data: bytes, most: int) -> bytes:
    return bz2.BZ2File(io.BytesIO(data)).read(most)


def _unlzma(codec: Any, data: bytes, most: int) -> bytes:
    return lzma.LZMAFile(io.BytesIO(data), format=codec.format, filters=codec.filters).read(most)


MAX_ARRAYS = 2000
_MAX_DEPTH = 32
_LENGTH = 4
"""Bytes before each text of variable length."""
_MAX_METADATA = 16 * 2**20
_WIDEST = 16
"""Ratio of the widest stored number (16 bytes) to the narrowest (1 byte)."""
_ASIDE = 2**20
"""Bytes allowed for checksums and the index of a shard."""

_COMPRESSORS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"})
_CHECKSUMS = frozenset({"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"})
_NUMBERS = frozenset({"astype", "bitround", "bytes", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle"})
_ML_DTYPE = re.compile("bfloat16|float8_[a-z0-9]{1,20}")
_CODECS = _COMPRESSORS | _CHECKSUMS | _NUMBERS | {"transpose", "vlen-bytes", "vlen-utf8"}
"""Codecs that turn bytes into numbers or text and do nothing else."""

Array = npt.NDArray[Any]


def open_zarr(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the arrays of one Zarr folder. Raises :class:`BadObject` naming the folder and the array."""
    skipped: list[tuple[str, str]] = []
    columns: list[StoredColumn] = []
    slabs: list[Slab] = []
    root = _Folder(file.ranges, file.root, file.folders)
    about = _metadata(str(file), root)
    if about is None:
        raise BadObject(f"{file} is no Zarr folder: it has neither zarr.json nor .zarray nor .zgroup")
    attributes = about.get("attributes")
    marked = isinstance(attributes, dict) and ATTRIBUTE in attributes
    ours = schema_of_ours(file, attributes[ATTRIBUTE]) if isinstance(attributes, dict) and marked else None
    if options.block and ours is not None:
        raise refuse_ours(file)
    wants = wants_of_ours(options) if ours is not None else wants_arrays(options)
    if options.block:
        wants = options.wants
    levels: dict[str, Level] = {}
    for path, folder, metadata in _arrays(file, root, about, levels if options.block else None):
        level = levels.get(path)
        name = level.name if level is not None else path
        if level is not None and level.number != (options.level or 0):
            if not wants(name):
                skipped.append((path, NOT_ASKED))
                continue
            if (options.level or 0) >= level.levels:
                # Labels are often stored in the full resolution alone.
                if name != IMAGE:
                    skipped.append((name, f"it has no level {options.level}, only 0 to {level.levels - 1}"))
                    continue
                raise UsageError(
                    f"{file}: --level {options.level}: image {quoted(name)} has the levels 0 to {level.levels - 1}"
                )
            skipped.append((path, f"level {level.number} of {quoted(name)}; to read it: --level {level.number}"))
            continue
        if not wants(name):
            skipped.append((name, NOT_ASKED))
            continue
        if (unknown := _unknown_codec(metadata)) is not None:
            skipped.append((name, f"it uses {quoted(unknown)}, which is not a codec for numbers or text"))
            continue
        with reading(f"{file}: {quoted(name)}"):
            column = _column(file, name, folder, metadata, slabs)
        if isinstance(column, str):
            skipped.append((name, column))
        else:
            columns.append(column if level is None else replace(column, dims=level.axes))

    for slab in slabs:
        # All arrays of the file together may keep 256 MiB of rows.
        slab.share(len(slabs))

    repeated = Repeated()

    def close() -> None:
        for slab in slabs:
            slab.drop()
        repeated.drop()

    columns = decoded(columns, options, skipped)
    if options.block:
        columns, grid = blocks_of(file, columns, options, skipped, stored=file.size, repeated=repeated)
        return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, close=close, grid=grid)
    columns, keys = by_groups(file, columns, options, skipped, stored=file.size, ours=ours is not None)
    if ours is None and keys is None:
        columns = unflattened(file, columns, skipped, options)
    return ColumnFile(file, columns, options, skipped=skipped, stored=file.size, close=close, ours=ours, keys=keys)


def _arrays(
    path: SourceFile, root: _Folder, about: dict[str, Any], levels: dict[str, Level] | None
) -> Iterator[tuple[str, _Folder, dict[str, Any]]]:
    """Yield name, folder and metadata of all arrays below ``root``, whose metadata are ``about``.

    The levels of images of OME-Zarr are added to ``levels`` before their arrays are yielded, if it is not None.
    """
    folders = [("", root)]
    count = 0
    while folders:
        name, folder = folders.pop(0)
        metadata = _metadata(f"{path}/{name}", folder) if name else about
        if not metadata:
            continue
        if "shape" in metadata:
            count += 1
            if count > MAX_ARRAYS:
                raise UsageError(too_many(path, MAX_ARRAYS, "arrays"))
            yield name or path.name.name.removesuffix(".zarr"), folder, metadata
            continue
        if name.count("/") >= _MAX_DEPTH:
            raise BadObject(f"{path}: groups are nested more than {_MAX_DEPTH} deep at {quoted(name)}")
        with reading(f"{path}: group {quoted(name)}"):
            if levels is not None:
                levels |= levels_of(name, _attributes(folder, metadata))
            folders += [(f"{name}/{entry}" if name else entry, folder.below(entry)) for entry in folder.folders()]


def _metadata(where: str, folder: _Folder) -> dict[str, Any] | None:
    """Return the contents of ``zarr.json`` or ``.zarray``, or of ``.zgroup``; None for a folder that is neither array
    nor group.

    A group has no ``shape``.
    """
    for name in ("zarr.json", ".zarray", ".zgroup"):
        file = f"{where}/{name}"
        with reading(file):
            raw = folder.metadata(name)
            if raw is None:
                continue
            metadata = json.loads(raw)
            if not isinstance(metadata, dict) or metadata.get("zarr_format") not in (2, 3):
                raise BadObject(f"{file}: not the metadata of Zarr v2 or v3")
            # Metadata that contradict themselves would be read as one thing here and as another by zarr.
            is_array = name == ".zarray" or (name == "zarr.json" and metadata.get("node_type") == "array")
            if is_array != ("shape" in metadata):
                raise BadObject(f"{file}: not the metadata of an array or a group")
            return metadata
    return None


def _unknown_codec(metadata: dict[str, Any]) -> str | None:
    """Return the first codec of an array that is not known to be harmless; None if all are known."""
    if metadata["zarr_format"] == 2:
        codecs: Any = [metadata.get("compressor"), *(metadata.get("filters") or [])]
    else:
        codecs = metadata.get("codecs")
    pending = list(codecs) if isinstance(codecs, list) else ["none"]
    while pending:
        codec = pending.pop()
        if codec is None:
            continue
        settings = codec if isinstance(codec, dict) else {"name": codec}
        name = settings.get("id", settings.get("name"))
        # A codec that unpickles may also hide inside a shard's configuration.
        if name == "sharding_indexed":
            inner = settings.get("configuration")
            for key in ("codecs", "index_codecs"):
                below = inner.get(key) if isinstance(inner, dict) else None
                pending += below if isinstance(below, list) else ["none"]
        elif not isinstance(name, str) or name.removeprefix("numcodecs.") not in _CODECS:
            return str(name)[:100]
    return None


def _column(
    path: SourceFile, name: str, folder: _Folder, metadata: dict[str, Any], slabs: list[Slab]
) -> StoredColumn | str:
    """Return the array as a candidate for a field, or the reason why it cannot be one."""
    # Imported only for an array that is read, because it takes 0.25 s.
    import zarr

    stored = path.size
    if (unknown := _ML_DTYPE.fullmatch(str(metadata.get("data_type")))) is not None:
        plain = "uint16" if unknown[0] == "bfloat16" else "uint8"
        return (
            f"of the data type {unknown[0]}, which NumPy does not have; to read its bits as numbers, set data_type to"
            f" {plain!r} and fill_value to 0 in its zarr.json"
        )
    # Replaces the codecs before zarr opens the array. The limit follows when the size of a chunk is known.
    distrust_codecs(0)
    array = zarr.open_array(folder.store(), mode="r", zarr_format=metadata["zarr_format"])
    dtype = array.dtype
    chunk = math.prod(array.shards or array.chunks) * dtype.itemsize
    check_allocation(f"{path}: a chunk of {quoted(name)}", chunk, stored=stored)
    # Numbers may be stored wider than they come out, and texts have any length, so the limit is larger than a chunk.
    distrust_codecs(allowed(stored) if dtype.kind in "TO" else _WIDEST * chunk + _ASIDE)

    def rows(start: int, stop: int) -> Array:
        return np.asarray(array[start:stop]) if array.shape else np.asarray(array[()])[None]

    # O: bytes of variable length. T: text of variable length.
    if dtype.kind in "TOSU":
        return f"texts in {len(array.shape)} dimensions" if len(array.shape) > 1 else _text(name, array, rows, stored)
    try:
        little = storage_dtype(dtype)
    except UsageError as error:
        return str(error)
    row = math.prod(array.shape[1:]) * dtype.itemsize
    # The chunk of a dimension may be 0 in an array without values.
    length, chunk_rows = _length(array), max(1, *array.chunks[:1], 0)

    def fetch(start: int, stop: int) -> Array:
        return np.ascontiguousarray(rows(start, stop), dtype=little)

    slab = Slab(fetch, rows=length, row_nbytes=row, chunk=chunk_rows)
    slabs.append(slab)
    return StoredColumn(
        name,
        little.str,
        array.shape,
        row * length,
        slab.read,
        piece=chunk,
        chunk=chunk_rows,
        # Several chunks of a shard lie in one object, so a chunk has no key of its own to fetch.
        parts=None if array.shards else lambda: _parts(folder, array),
        once=fetch,
        packing=packing_of(attributes := _attributes(folder, metadata), little),
        dims=named_dims(metadata.get("dimension_names") or attributes.get("_ARRAY_DIMENSIONS"), len(array.shape)),
        boxes=Boxes(
            lambda bounds: np.ascontiguousarray(array[bounds], dtype=little),
            array.chunks,
            lambda shape: _places(folder, array, shape),
            lambda: _fill(array, attributes, little),
        ),
    )


def _fill(array: Any, attributes: dict[str, Any], dtype: np.dtype[Any]) -> Any:
    """Return the number that stands for a missing value: by CF, else the one of chunks that were never written."""
    fill = (packing_of(attributes, dtype).get("_FillValue") or [array.fill_value])[0]
    return np.zeros((), dtype)[()] if fill is None else np.asarray(fill).astype(dtype)[()]


_MAX_SHARDS = 4096
"""Most shards of an array whose indexes are read in advance."""
_NOWHERE = 2**64 - 1
_INDEX_BYTES = 16
_CRC32C_BYTES = 4


def _places(folder: _Folder, array: Any, shape: tuple[int, ...]) -> Iterator[Place]:
    """Yield the places of all chunks. ``shape`` is the shape of a block."""
    if not array.shards:
        for corner in chunks_of(array.shape, array.chunks):
            at = tuple(first // max(1, chunk) for first, chunk in zip(corner, array.chunks, strict=True))
            yield corner, 0, 0, folder.prefix + array.metadata.encode_chunk_key(at)
        return
    shards = list(itertools.islice(chunks_of(array.shape, array.shards), _MAX_SHARDS + 1))
    if len(shards) > _MAX_SHARDS:
        return
    inner = tuple(whole // chunk for whole, chunk in zip(array.shards, array.chunks, strict=True))
    for corner in shards:
        key = array.metadata.encode_chunk_key(
            tuple(first // whole for first, whole in zip(corner, array.shards, strict=True))
        )
        # zarr fetches a shard as a whole if a block has all of its chunks, and otherwise chunk by chunk.
        if all(
            first // step == (first + whole - 1) // step and first + whole <= size
            for first, whole, step, size in zip(corner, array.shards, shape, array.shape, strict=True)
        ):
            yield corner, 0, 0, folder.prefix + key
            continue
        index = _shard_index(folder, array, key, math.prod(inner))
        for number, (start, nbytes) in enumerate(index):
            if start != _NOWHERE and 0 < nbytes < 2**62 and start < 2**62:
                at = np.unravel_index(number, inner)
                first = tuple(
                    base + int(place) * chunk for base, place, chunk in zip(corner, at, array.chunks, strict=True)
                )
                yield first, int(start), int(nbytes), folder.prefix + key


def _shard_index(folder: _Folder, array: Any, key: str, chunks: int) -> list[list[int]]:
    """Return the first byte and the bytes of each chunk of a shard; nothing if the index is not a plain one."""
    codec: Any = array.metadata.codecs[-1] if array.metadata.codecs else None
    names = [type(one).__name__ for one in getattr(codec, "index_codecs", ())]
    if names not in (["BytesCodec"], ["BytesCodec", "Crc32cCodec"]) or len(array.metadata.codecs) != 1:
        return []
    nbytes = _INDEX_BYTES * chunks
    order = "<u8" if getattr(codec.index_codecs[0].endian, "value", "little") == "little" else ">u8"
    raw = folder.end_of(key, nbytes + _CRC32C_BYTES * (len(names) - 1), at_end=codec.index_location.value == "end")
    if raw is None or len(raw) < nbytes:
        return []
    return np.frombuffer(raw, dtype=order, count=2 * chunks).reshape(-1, 2).tolist()


def _length(array: Any) -> int:
    """Return the number of rows; a single value is its own row 0."""
    return int(array.shape[0]) if array.shape else 1


def _attributes(folder: _Folder, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an array."""
    if metadata["zarr_format"] == 3:
        attributes = metadata.get("attributes")
        return attributes if isinstance(attributes, dict) else {}
    raw = folder.metadata(".zattrs")
    attributes = None if raw is None else json.loads(raw)
    if not isinstance(attributes, dict):
        return {}
    # In version 2 xarray stores the CF fill value as the array's fill_value. Its _ARRAY_DIMENSIONS show that xarray
    # wrote the array; other programs set fill_value for missing chunks only.
    if "_ARRAY_DIMENSIONS" in attributes and metadata.get("fill_value") is not None:
        return {"_FillValue": metadata["fill_value"], **attributes}
    return attributes


def _parts(folder: _Folder, array: Any) -> Iterator[Part]:
    """Yield the keys of all chunks, including those that were never written."""
    counts = [-(-size // max(1, chunk)) for size, chunk in zip(array.shape, array.chunks, strict=True)]
    for at in itertools.product(*map(range, counts)):
        yield at[0] * array.chunks[0] if at else 0, 0, 0, folder.prefix + array.metadata.encode_chunk_key(at)


def _text(name: str, array: Any, rows: Any, stored: int) -> StoredColumn:
    kind, itemsize = array.dtype.kind, array.dtype.itemsize

    def read(start: int, stop: int) -> Column:
        values: Array = rows(start, stop)
        if kind in "SU":
            return unpadded(values)
        return joined([v.encode("utf-8", "surrogateescape") if isinstance(v, str) else bytes(v) for v in values])

    if kind in "TO":
        return StoredColumn(
            name, "str" if kind == "T" else "bytes", array.shape, _LENGTH * _length(array), read, piece=stored
        )
    return StoredColumn(name, "str" if kind == "U" else "bytes", array.shape, itemsize * _length(array), read)


class _Folder:
    """A folder of a Zarr in any store: the objects whose keys begin with ``prefix``."""

    def __init__(self, ranges: Ranges, prefix: str, folders: Iterable[str]) -> None:
        """``folders``: all folders below the root that hold metadata, each ending in ``/``."""
        self._ranges, self.prefix, self._folders = ranges, prefix, tuple(folders)

    def metadata(self, name: str) -> bytes | None:
        """Return the bytes of a file of metadata, at most 16 MiB; None when it does not exist."""
        key = self.prefix + name
        size = self._ranges.size(key)
        if size is not None and size > _MAX_METADATA:
            raise BadObject(f"{key}: its {size} bytes are too many for metadata")
        body = None if size is None else self._ranges.object(key)
        return None if body is None else bytes(body)

    def end_of(self, key: str, count: int, *, at_end: bool) -> memoryview | bytes | None:
        """Return the last ``count`` bytes of an object, or the first ones; None when it does not exist."""
        size = self._ranges.size(self.prefix + key)
        if size is None or size < count:
            return None
        return self._ranges.part_of(self.prefix + key, size - count if at_end else 0, count)

    def folders(self) -> Iterator[str]:
        """Return the folders that hold metadata, directly or below, in order of their names."""
        start = len(self.prefix)
        names = {folder[start:].partition("/")[0] for folder in self._folders if folder.startswith(self.prefix)}
        return iter(sorted(names - {""}))

    def below(self, name: str) -> _Folder:
        """Return a folder inside this one."""
        return _Folder(self._ranges, f"{self.prefix}{name}/", self._folders)

    def store(self) -> Store:
        """Return the store that zarr reads."""
        return _Store(self._ranges, self.prefix)


class _Store(Store):
    """A read-only Zarr store over the ranges that the worker serves."""

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, ranges: Ranges, prefix: str) -> None:
        super().__init__(read_only=True)
        self._ranges, self._prefix = ranges, prefix

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        import asyncio

        # Reading blocks on a socket. A thread keeps zarr's event loop free, so several chunks are asked for at once.
        data = await asyncio.to_thread(self._read, self._prefix + key, byte_range)
        # zarr reads an empty shard as fill values, which would hide a cut file.
        if data is not None and not data:
            raise ValueError(f"{key} is empty")
        return None if data is None else prototype.buffer.from_bytes(bytes(data))

    def _read(self, key: str, part: ByteRequest | None) -> memoryview | bytes | None:
        if part is None:
            return self._ranges.object(key)
        size = self._ranges.size(key)
        if size is None:
            return None
        if isinstance(part, RangeByteRequest):
            start, stop = part.start, part.end
        elif isinstance(part, OffsetByteRequest):
            start, stop = part.offset, size
        else:
            assert isinstance(part, SuffixByteRequest)
            start, stop = max(0, size - part.suffix), size
        return self._ranges.part_of(key, start, min(stop, size) - start)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        return self._ranges.size(self._prefix + key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        raise PermissionError("this Zarr is only read")

    async def delete(self, key: str) -> None:
        raise PermissionError("this Zarr is only read")

    async def list(self) -> AsyncIterator[str]:
        for name in list[str]():
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for name in list[str]():
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in list[str]():
            yield name
