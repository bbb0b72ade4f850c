"""Tar files in WebDataset's grouping, plain or gzip: consecutive members with one key are one sample.

Keys, fields and values are those of a folder of objects (:mod:`cachetool.sources.keys`,
:mod:`cachetool.sources.decode`). All members are read once for the schema; of arrays and images only the header is
read.

Nothing is extracted: a member is bytes under a name, and its name is text. Links, devices and sparse files have no
bytes of their own and are left out. Members whose name begins with ``/`` or contains ``..`` are left out too. A key
that comes twice in one file, with other samples in between, is an error, because nobody can say which of the two is
meant.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Schema
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.decode import MAX_HEADER, Unusable, Value, decode, npy_layout
from cachetool.sources.grouping import Dots
from cachetool.sources.images import image_outline, no_images
from cachetool.sources.keys import IMAGES, Part, Stem
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.objects import Assembled, Assembler
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import EmptyFile, LeftOut, reading
from cachetool.sources.shapes import Shape, common_schema, names_of, nbytes_of, shape_of

__all__ = ["TarFile"]

MAX_SAMPLES = 2**14
"""Most samples of one block, however small."""
_RECORD = 512
_MAX_NOTE = 2**20
"""Most bytes of all names and notes before one member."""
_DIGITS = 20
_SKIP = 2**20
# An archive may be one sample of a few dozen fields, which must not be refused.
_MANY = 100
"""Number of different texts between dots above which they cannot be the fields of one sample."""
_GZIP = b"\x1f\x8b"
_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_NOT_FILES = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}

V = TypeVar("V")


class TarFile:
    """The samples of one tar file; see :class:`cachetool.sources.readers.RecordFile`."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        """Read all members, unless the file's schema is known.

        Raises :class:`BadObject` naming file and member, or two samples whose fields differ.
        """
        self._file, self._options = file, options
        self._stem, self._assembler = Stem(options.stem or "first"), Assembler(options, str(file))
        self.samples = 0
        self._has_image = False
        self.skipped: tuple[tuple[str, str], ...] = ()
        self.names: dict[str, str] = {}
        self.places: list[tuple[int, int]] = []
        self.schema = file.schema or self._look()

    def _look(self) -> Schema:
        left_out = LeftOut()
        names: dict[str, None] = {}
        dots = Dots()

        def shapes() -> Iterator[tuple[str, Mapping[str, Shape]]]:
            for sample in self._samples(self._outline, lambda _: Shape("str", ()), left_out, self.places, dots):
                self.samples += 1
                if len(names) < 100:
                    names.update(dict.fromkeys(sample.names))
                yield f"{self._file}: {sample.key}", sample.values

            if not self.samples:
                raise EmptyFile(f"{self._file}: no samples in it{left_out.because()}")

        try:
            schema = common_schema(shapes(), self._options.chosen)
        except BadObject:
            self._refuse_many(dots)
            raise
        self._refuse_many(dots)
        if self._options.decodes_images and not self._has_image:
            why = f"no member has the extension of an image ({', '.join(sorted(IMAGES))})"
            raise no_images(str(self._file), self._options.decode, schema, why)
        for name in (*(self._options.chosen or ()), *sorted(self._options.dropped - names.keys())):
            if name not in schema:
                raise UsageError(f"{self._file}: unknown field {name!r}; the samples have {names_of(list(names))}")
        self.skipped = left_out.listed()
        return schema

    def _refuse_many(self, dots: Dots) -> None:
        """Raise :class:`UsageError` if cutting names at the first dot makes no sense and ``stem`` does not ask for
        it."""
        if self._options.stem is None and (dots.are_dates or (dots.are_many and dots.different >= _MANY)):
            raise UsageError(
                f"{self._file}: names cut at the first dot would give {dots.different} different fields;\n"
                "use --stem last to cut names at the last dot"
            )

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all samples in order."""
        pending: list[Assembled[Value]] = []
        pending_bytes = 0
        for sample in self._samples(self._decode, str, LeftOut(), []):
            pending.append(sample)
            pending_bytes += sum(map(nbytes_of, sample.values.values()))
            if pending_bytes >= block_bytes or len(pending) >= MAX_SAMPLES:
                yield self._block(pending)
                pending, pending_bytes = [], 0
        if pending:
            yield self._block(pending)

    def _block(self, samples: Sequence[Assembled[Value]]) -> Block:
        try:
            return Block.from_samples(self.schema, [sample.values for sample in samples], exact=True)
        except UsageError:
            # Rare: the file was changed since it was listed. The samples are checked one by one to name the one that
            # differs.
            for sample in samples:
                try:
                    Block.from_samples(self.schema, [sample.values], exact=True)
                except UsageError as error:
                    raise BadObject(f"{self._file}: sample {quoted(sample.key)}: {error}") from None
            raise

    def _samples(
        self,
        take: Callable[[Part, _Member], Iterable[tuple[str, V]]],
        text: Callable[[str], V],
        left_out: LeftOut,
        places: list[tuple[int, int]],
        dots: Dots | None = None,
    ) -> Iterator[Assembled[V]]:
        """Yield the samples. ``take`` makes the fields of each member while the archive is read once.

        ``places`` receives the bytes of each sample, unless the file is compressed; ``dots`` counts the names.
        """
        file = self._file
        seen: set[int] = set()
        sample: Assembled[V] | None = None
        start = stop = 0
        for member in _members(file, left_out):
            part = self._stem.split(member.name)
            if isinstance(part, str):
                left_out.add(member.name, part)
                continue
            if dots is not None:
                dots.count(member.name.rpartition("/")[2])
            try:
                if sample is None or sample.key != part.sample:
                    if sample is not None:
                        self._assembler.finish(sample, text)
                        places += [(start, stop)] if stop else []
                        yield sample
                    # A sample begins where the previous one ended, because its headers and long names lie before its
                    # first byte.
                    sample, start = Assembled(part.sample), stop
                    # Hashes instead of keys, which take less memory in archives of millions of samples.
                    if hash(sample.key) in seen:
                        raise BadObject(f"the key {quoted(sample.key)} appears twice, with other samples in between")
                    seen.add(hash(sample.key))
                stop = member.end
                if self._assembler.takes(sample, part):
                    self._assembler.add(sample, member.name, take(part, member))
            except BadObject as error:
                raise BadObject(f"{file}: {error}") from error.__cause__
        if sample is not None:
            try:
                self._assembler.finish(sample, text)
            except BadObject as error:
                raise BadObject(f"{file}: {error}") from None
            places += [(start, stop)] if stop else []
            yield sample

    def _decode(self, part: Part, member: _Member) -> Iterator[tuple[str, Value]]:
        options = self._options
        yield from decode(part, member.read(), images=options.decodes_images, pixels=options.pixels)

    def _outline(self, part: Part, member: _Member) -> Iterator[tuple[str, Shape]]:
        """Yield the types of a member's fields and read no more of the member than that takes."""
        if part.kind == "npy":
            dtype, _, shape, _ = npy_layout(member.read(MAX_HEADER + 12))
            yield part.field, Shape(dtype.newbyteorder("<").str, shape)
        elif part.kind == "image" and self._options.decodes_images:
            self._has_image = True
            yield part.field, Shape(*image_outline(member.read(), self._options.pixels))
        elif part.kind in ("npz", "json"):
            for name, value in self._decode(part, member):
                outlined: Any = value if isinstance(value, Unusable) else shape_of(value)
                yield name, outlined
        elif part.kind == "int":
            yield part.field, shape_of(0)
        else:
            yield part.field, Shape("str" if part.kind == "str" else "bytes", ())


@dataclass(slots=True)
class _Member:
    """A file inside a tar file. It can be read once, when the archive is read up to it."""

    name: str
    size: int
    stream: IO[bytes]
    stored: int
    """Bytes of the tar file on disk."""
    end: int
    """Byte of the tar file at which the member ends; 0 in a compressed file."""
    taken: int = 0

    def read(self, most: int | None = None) -> memoryview:
        """Return the member's bytes, or the first ``most`` of them."""
        count = self.size if most is None else min(most, self.size)
        # The size comes from the header, and a gzip file may state any size. It is checked before memory is allocated.
        check_allocation("it", count, stored=self.stored)
        with reading("the tar file is damaged"):
            data = memoryview(self.stream.read(count))
        self.taken = len(data)
        if len(data) != count:
            raise BadObject(f"the tar file is cut short: {len(data)} of {count} bytes")
        return data


def _members(file: SourceFile, left_out: LeftOut) -> Generator[_Member]:
    """Yield the regular files inside ``file``. Raises :class:`BadObject` naming the file and the damaged byte.

    Layout: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html and GNU tar's long names.
    """
    stored = file.size
    with reading(f"{file} is not a whole tar file"), file.stream() as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        at = noted = 0
        notes: dict[str, str] = {}
        # Headers are read here, not by tarfile.open(), which reads names and pax records of any size into memory. A
        # block of zeros is the end mark.
        while (head := stream.read(_RECORD)).strip(b"\0"):
            try:
                info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise BadObject(f"{file}{_why_no_header(head, at, error)}") from error
            at += _RECORD
            if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE):
                noted += max(0, info.size)
                if info.size < 0 or noted > _MAX_NOTE:
                    raise BadObject(f"{file}: the name or note at byte {at} claims {info.size} bytes")
                data = stream.read(info.size)
                if not _note(info, data, notes):
                    raise BadObject(f"{file}: the pax records at byte {at} are damaged")
                at += _skip(stream, len(data), info.size)
                continue
            name = notes.get("path", info.name).removeprefix("./")
            size = int(notes.get("size", info.size))
            sparse = info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in notes)
            notes, noted = {}, 0
            if info.type in (*_LINKS, tarfile.DIRTYPE):
                # tar stores no data for links and folders, whatever size their header states.
                size = 0
            if size < 0:
                raise BadObject(f"{file}: {quoted(name)} has a size of {size} bytes")
            member = _Member(name, size, stream, stored, 0 if packed else at + _padded(size))
            if sparse:
                left_out.add(name, "a sparse file")
            elif info.type in _REGULAR:
                if name.startswith("/") or ".." in name.split("/"):
                    left_out.add(name, "its name leads out of the archive")
                else:
                    yield member
            elif info.type != tarfile.DIRTYPE:
                left_out.add(name, _NOT_FILES.get(info.type, "neither a file nor a folder"))
            at += _skip(stream, member.taken, size)
        if len(head) < _RECORD:
            raise BadObject(f"{file} is cut short: it ends at byte {at} without an end mark")
        # gzip compares its checksum at the end of the stream, behind tar's end mark.
        while packed and stream.read(_SKIP):
            pass


def _why_no_header(head: bytes, at: int, error: tarfile.HeaderError) -> str:
    """Return the reason why 512 bytes are no header, as the end of a message."""
    if at == 0 and (packed := next((_PACKED[mark] for mark in _PACKED if head.startswith(mark)), None)):
        return f" is compressed with {packed}: decompress it, or compress it with gzip"
    if len(head) < _RECORD:
        return f" is cut short at byte {at}"
    return f": there is no valid header of a member at byte {at} ({error})"


def _note(info: tarfile.TarInfo, data: bytes, notes: dict[str, str]) -> bool:
    """Add a note before a member: a long name, or pax records ``LENGTH KEY=VALUE`` with a line feed.

    Return False if the bytes are no such records, or their ``size`` is no number of bytes.
    """
    if info.type == tarfile.GNUTYPE_LONGNAME:
        notes["path"] = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
    elif info.type == tarfile.XHDTYPE:
        at = 0
        while at < len(data):
            # Only 20 bytes are searched for the blank: a search of the whole rest for each record would take quadratic
            # time.
            length, blank, _ = data[at : at + _DIGITS].partition(b" ")
            if not blank or not length.isdigit() or not len(length) < int(length) <= len(data) - at:
                return False
            record, at = data[at + len(length) + 1 : at + int(length) - 1], at + int(length)
            key, _, value = record.partition(b"=")
            if key == b"size" and not (value.isdigit() and len(value) < _DIGITS):
                return False
            notes[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
    return True


def _padded(size: int) -> int:
    return -(-size // _RECORD) * _RECORD


def _skip(stream: IO[bytes], taken: int, size: int) -> int:
    """Skip the rest of ``size`` bytes and the padding of their last record; return the bytes of all of it."""
    padded = _padded(size)
    if isinstance(stream, gzip.GzipFile):
        left = padded - taken
        while left > 0 and (got := len(stream.read(min(left, _SKIP)))):
            left -= got
    else:
        stream.seek(padded - taken, os.SEEK_CUR)
    return padded
