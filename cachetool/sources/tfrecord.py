"""TFRecord files of ``tf.train.Example`` records, plain, gzip or zlib, of any program.

A file does not say what its records hold, so all of them are read first:

==============================  ===============================================
feature                         field
==============================  ===============================================
``float_list``                  float32: scalar when it always has one value, fixed ``(k,)`` when always k,
``int64_list``                  else ragged, rank 1; int64 likewise
``bytes_list``, always one      bytes
``bytes_list``, other counts    left out
==============================  ===============================================

A list of numbers that some records lack is empty in them, as TensorFlow's ``VarLenFeature`` has it. Fields are in the
order of their names, because features have no order. Neither TensorFlow nor the package ``tfrecord`` is needed; the two
cannot be imported into one process. Both checksums of every record are checked.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Collection, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

from cachetool.core.block import BLOCK_BYTES, Block, Column
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.tf_example import BYTES, EMPTY, FLOAT, INT64, KIND_NAMES, Feature, Gathered, parse_example
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import (
    NOT_ASKED,
    EmptyFile,
    bounded,
    checked_key,
    field_names,
    make_schema,
    reading,
)
from cachetool.sources.rows import of_sizes

__all__ = ["TFRecordFile", "is_tfrecord", "open_tfrecord"]

MAX_FEATURES = 1000
"""Most features of a file, by name: a hostile file could name new ones in every record."""
MAX_RECORDS = 2**14
"""Most records of one block, however small."""
_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_BUFFER = 2**20
_GZIP = b"\x1f\x8b"
_PIECE = 2**16
_DTYPES = {FLOAT: "<f4", INT64: "<i8"}


def open_tfrecord(file: SourceFile, options: SourceOptions) -> TFRecordFile:
    """Return the records of one foreign file."""
    return TFRecordFile(file, options)


class TFRecordFile:
    """The records of one file; see :class:`cachetool.sources.readers.RecordFile`."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        """Read all records, unless the file's schema is known.

        Raises :class:`BadObject` naming file and record, :class:`UsageError` when no feature can be a field.
        """
        self._file = file
        self.samples = 0
        self.skipped: tuple[tuple[str, str], ...] = ()
        self.names: dict[str, str] = dict(file.names)
        self.places: list[tuple[int, int]] = []
        self.schema = file.schema or self._look(options)

    def _look(self, options: SourceOptions) -> Schema:
        file = self._file
        features: dict[str, _FeatureFacts] = {}
        for run in _runs(file, BLOCK_BYTES, places=self.places):
            _look(features, run, options, first=self.samples == 0)
            self.samples += len(run.examples)
        if not self.samples:
            raise EmptyFile(f"{file}: no records in it")
        skipped: list[tuple[str, str]] = []
        reasons = {
            name: NOT_ASKED if not options.wants(name) else feature.reason() for name, feature in features.items()
        }
        for name in sorted(features):
            if reason := reasons[name]:
                skipped.append((name, reason))
        names = field_names(file, [name for name in sorted(features) if not reasons[name]], skipped, options)
        fields: list[Field] = []
        for name, new in names.items():
            try:
                fields.append(checked_key(features[name].field(new)))
            except UsageError as error:
                skipped.append((name, str(error)))
                continue
            self.names[new] = name
        self.skipped = bounded(skipped)
        return make_schema(file, fields, skipped)

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all records in order."""
        names = {field.name: self.names.get(field.name, field.name) for field in self.schema}
        for run in _runs(self._file, block_bytes, frozenset(names.values())):
            yield Block(self.schema, {field.name: _column(field, names[field.name], run) for field in self.schema})


def is_tfrecord(head: bytes) -> bool:
    """Return True if ``head``, the first 12 bytes of a file, is the length of a record and its checksum."""
    return len(head) >= _HEAD.size and _length(head[: _HEAD.size]) is not None


@dataclass(frozen=True, slots=True)
class _Run:
    """Some consecutive records of one file."""

    file: SourceFile
    first: int
    """Number of the first record in its file."""
    examples: list[dict[str, Feature]]

    def name(self, index: int) -> str:
        """Return the name of a record for messages."""
        return f"{self.file}: record {self.first + index}"

    def gather(self, name: str, kind: int) -> Gathered:
        """Return one feature of all records. Raises :class:`BadObject` naming a record that has it as another kind."""
        out = Gathered(kind)
        for index, example in enumerate(self.examples):
            feature = example.get(name)
            if feature is not None and feature.kind not in (EMPTY, kind):
                raise BadObject(
                    f"{self.name(index)}: feature {quoted(name)} is {KIND_NAMES[feature.kind]},"
                    f" but {KIND_NAMES[kind]} in earlier records; leave the feature out with"
                    f" --fields -{name}"
                )
            try:
                out.add(feature)
            except ValueError as error:
                raise BadObject(f"{self.name(index)}: feature {quoted(name)}: {error}") from error
        return out


@dataclass(slots=True)
class _FeatureFacts:
    """The facts about one feature in all records read so far."""

    kind: int
    least: int
    """Fewest and most values in a record; -1 before the first record."""
    most: int

    def reason(self) -> str | None:
        """Return the reason why the feature cannot be a field, or None."""
        if self.kind == EMPTY:
            return "always empty"
        if self.kind == BYTES and not self.least == self.most == 1:
            return f"{self.least} to {self.most} byte strings per record, but a field holds only one"
        return None

    def field(self, name: str) -> Field:
        """Return the field that the feature becomes."""
        if self.kind == BYTES:
            return Field(name, "bytes")
        if self.least == self.most:
            return Field(name, _DTYPES[self.kind], () if self.most == 1 else (self.most,))
        return Field(name, _DTYPES[self.kind], (None,))


def _look(features: dict[str, _FeatureFacts], run: _Run, options: SourceOptions, *, first: bool) -> None:
    """Add the facts of a run to ``features``; ``first``: it is the first run of the file."""
    for name in {*features, *(name for example in run.examples for name in example)}:
        # A feature that appears after the first run was missing in earlier records, so its fewest values are 0.
        feature = features.setdefault(name, _FeatureFacts(EMPTY, -1 if first else 0, 0))
        if len(features) > MAX_FEATURES:
            raise BadObject(f"{run.name(0)}: more than {MAX_FEATURES} different features")
        if not options.wants(name):
            continue
        if feature.kind == EMPTY:
            kinds = (example[name].kind for example in run.examples if name in example)
            feature.kind = next((kind for kind in kinds if kind != EMPTY), EMPTY)
        counts = run.gather(name, feature.kind).counts()
        least = int(counts.min())
        feature.least = least if feature.least < 0 else min(feature.least, least)
        feature.most = max(feature.most, int(counts.max()))


def _column(field: Field, name: str, run: _Run) -> Column:
    kind = BYTES if field.kind == "bytes" else FLOAT if field.numpy.kind == "f" else INT64
    gathered = run.gather(name, kind)
    with reading(f"{run.name(0)} or one of the {len(run.examples) - 1} after it: feature {quoted(name)}"):
        counts, values = gathered.counts(), gathered.values()
    wanted = 1 if kind == BYTES or not field.shape else field.shape[0]
    if wanted is not None and (counts != wanted).any():
        index = int((counts != wanted).argmax())
        raise BadObject(f"{run.name(index)}: feature {quoted(name)} has changed since the file was listed")
    if kind == BYTES:
        return of_sizes(values, gathered.sizes())
    return values.reshape(len(counts), *field.sizes) if wanted is not None else of_sizes(values, counts, shapes=True)


def _runs(
    file: SourceFile,
    block_bytes: int,
    wanted: Collection[str] | None = None,
    places: list[tuple[int, int]] | None = None,
) -> Iterator[_Run]:
    """Yield the records of a file, parsed, in runs of about ``block_bytes``; ``places`` receives the bytes of each."""
    first = nbytes = 0
    examples: list[dict[str, Feature]] = []
    # The file is closed at once if the consumer stops early, and not when the generator is collected.
    with closing(_records(file, places)) as records:
        for record in records:
            try:
                examples.append(parse_example(record, wanted))
            except ValueError as error:
                number = first + len(examples)
                raise BadObject(f"{file}: record {number} is not a tf.train.Example ({error})") from error
            nbytes += len(record)
            if nbytes >= block_bytes or len(examples) >= MAX_RECORDS:
                yield _Run(file, first, examples)
                first, nbytes, examples = first + len(examples), 0, []
    if examples:
        yield _Run(file, first, examples)


def _records(file: SourceFile, places: list[tuple[int, int]] | None) -> Generator[memoryview]:
    """Yield the bytes of each record, checked; ``places`` receives where each begins and ends, unless the file is
    compressed.

    Raises :class:`BadObject` naming the file and the record.
    """
    number = at = 0
    with reading(str(file)), file.stream() as raw:
        stored = left = file.size
        head = raw.read(_HEAD.size)
        raw.seek(0)
        # A plain file may begin with the two bytes of gzip or zlib too, as part of a length. Then the checksum of the
        # length fits.
        plain = is_tfrecord(head) or not (head[:2] == _GZIP or _is_zlib(head))
        stream: IO[bytes] = raw
        if not plain:
            inflated = gzip.GzipFile(fileobj=raw) if head[:2] == _GZIP else _Zlib(raw)
            stream = io.BufferedReader(inflated, _BUFFER)
        while head := stream.read(_HEAD.size):
            what = f"{file}: record {number}"
            size = _length(head)
            if size is None:
                why = (
                    "is cut short"
                    if len(head) < _HEAD.size
                    else "has a damaged length, or the file is not a TFRecord file"
                )
                raise BadObject(f"{what} {why}")
            whole = _HEAD.size + size + _CRC.size
            left -= whole
            # Checked before memory is allocated: a length of up to 2**64 bytes may have a valid checksum.
            if plain and left < 0:
                raise BadObject(f"{what} is cut short: its {size} bytes reach past the end of the file")
            # In a compressed file the size of the file does not bound a record.
            check_allocation(what, size, stored=stored)
            data = memoryview(stream.read(size + _CRC.size))
            if len(data) < size + _CRC.size:
                raise BadObject(f"{what} is cut short: it should have {size} bytes")
            if _masked(data[:size]) != _CRC.unpack_from(data, size)[0]:
                raise BadObject(f"{what} does not match its checksum")
            if plain and places is not None:
                places.append((at, at + whole))
            yield data[:size]
            number, at = number + 1, at + whole


def _is_zlib(head: bytes) -> bool:
    """Return True if bytes begin a zlib stream by RFC 1950."""
    return (
        # Deflate (8), a window of at most 32 KiB (7), no preset dictionary (bit 5), and a header that is a multiple of
        # 31.
        len(head) > 1
        and head[0] & 15 == 8
        and head[0] >> 4 < 8
        and not head[1] & 32
        and not (head[0] << 8 | head[1]) % 31
    )


class _Zlib(io.RawIOBase):
    """The unpacked bytes of a zlib stream. Raises as gzip does: ``zlib.error``, or ``EOFError`` when its end is
    missing."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed, self._inflate = packed, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        data = b""
        while not data and not self._inflate.eof:
            # Each call unpacks at most len(out) bytes, so a bomb does not fill the memory; the rest of the input waits
            # in the tail.
            given = self._inflate.unconsumed_tail or self._packed.read(_PIECE)
            if not given:
                raise EOFError("its zlib stream does not end")
            data = self._inflate.decompress(given, len(out))
        out[: len(data)] = data
        return len(data)


def _length(head: bytes) -> int | None:
    """Return the length of a record from the 12 bytes before it; None if they are not a length and its checksum."""
    if len(head) != _HEAD.size:
        return None
    size, crc = _HEAD.unpack(head)
    return int(size) if _masked(head[:8]) == crc else None


def _masked(data: bytes | memoryview) -> int:
    """Return the CRC-32C, masked as TFRecord does (tensorflow/core/lib/hash/crc32c.h)."""
    import crc32c

    value = crc32c.crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
