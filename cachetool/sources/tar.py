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

import dataclasses
import gzip
import itertools
import operator
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block, Column
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import KEY, MAX_FIELDS, Schema
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.classes import folder_of
from cachetool.sources.decode import MAX_HEADER, Unusable, Value, decode, npy_layout, parse_npy, whole_number
from cachetool.sources.grouping import Dots
from cachetool.sources.images import image_outline, no_images
from cachetool.sources.keys import CONTAINERS, IMAGES, Kind, Part, Stem
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.names import NamedPage
from cachetool.sources.objects import Assembled, Assembler
from cachetool.sources.options import LABEL, SourceOptions
from cachetool.sources.readers import EmptyFile, LeftOut, reading
from cachetool.sources.rows import joined
from cachetool.sources.shapes import Shape, common_schema, names_of, shape_of

__all__ = ["TarFile"]

MAX_MEMBERS = 2**14
"""Most members that are read for one block, however small."""
_RECORD = 512
_MAX_NOTE = 2**20
"""Most bytes of all names and notes before one member."""
_ADLER = 65521
"""The prime number of Adler-32."""
_MOST_NAMES = 100
"""Number of samples whose fields are named, and of patterns of suffixes that are remembered."""
_USUAL_HEADER = 128
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
        self._plans: dict[tuple[str, ...], _Plan | None] = {}
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
            for group in self._groups(self._counting(self._bytes_of_outline), left_out, dots):
                self.samples += len(group.keys)
                self.places += group.places
                plan = self._plan(group)
                alike = None if plan is None else self._shapes(group, plan)
                if plan is not None and alike is not None:
                    names.update(dict.fromkeys(plan.names) if len(names) < _MOST_NAMES else {})
                    # The other samples of the group have the same fields of the same types.
                    yield f"{self._file}: {group.keys[0]}", alike
                    continue
                for sample in self._assembled(group, self._outline, lambda _: Shape("str", ())):
                    if len(names) < _MOST_NAMES:
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
        for group in self._groups(self._counting(lambda _: sys.maxsize), LeftOut(), None, block_bytes=block_bytes):
            plan = self._plan(group)
            block = None if plan is None else self._columns(group, plan)
            yield self._block([*self._assembled(group, self._decode, str)]) if block is None else block

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

    def _groups(
        self, wanted: Callable[[str], int], left_out: LeftOut, dots: Dots | None, *, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[_Group]:
        """Yield complete samples, many at a time, while the archive is read once.

        ``wanted`` returns how many bytes of a member are read; ``dots`` counts the names.
        """
        seen: set[int] = set()
        rest = _Group()
        stop = 0
        for some in _members(self._file, wanted, block_bytes):
            self._cut(some, left_out, dots)
            rest.extend(some)
            # The next members may belong to the last sample, too.
            last = len(rest.samples) - 1
            while last > 0 and rest.samples[last - 1] == rest.samples[-1]:
                last -= 1
            group, rest = (rest, _Group()) if some.is_last else (rest.part(0, last), rest.part(last, None))
            repeated = _begin(group, seen, stop) if group.samples else None
            if repeated is not None:
                key, before = group.samples[repeated], group.part(0, repeated)
                # The samples before the repeated one may have an error of their own, which comes first.
                if before.samples:
                    _begin(before, set(), stop)
                    yield before
                raise BadObject(f"{self._file}: the key {quoted(key)} appears twice, with other samples in between")
            if group.samples:
                stop = group.ends[-1]
                yield group

    def _cut(self, members: _Group, left_out: LeftOut, dots: Dots | None) -> None:
        """Find the sample of each member. Members without a sample go to ``left_out``."""
        page = NamedPage(members.names, [], [])
        suffixes = self._stem.suffixes(page)
        if suffixes is None:
            parts = [self._stem.split(name) for name in members.names]
            members.samples = ["" if isinstance(part, str) else part.sample for part in parts]
            without = [at for at, part in enumerate(parts) if isinstance(part, str)]
        else:
            members.samples = [name[: -len(suffix) - 1] for name, suffix in zip(members.names, suffixes, strict=True)]
            without = sorted({*page.hidden, *(at for at, suffix in enumerate(suffixes) if not suffix)})
            members.suffixes = suffixes
        reasons = [(at, members.names[at], str(self._stem.split(members.names[at]))) for at in without]
        for _, name, why in sorted(members.left_out + reasons, key=lambda entry: entry[0]):
            left_out.add(name, why)
        if without:
            left = frozenset(without)
            members.keep([at for at in range(len(members.names)) if at not in left])
        if dots is not None:
            dots.count_all([name.rpartition("/")[2] for name in members.names])

    def _plan(self, group: _Group) -> _Plan | None:
        """Return the fields of all samples of a group, if the samples have the same ones, one for each member.

        Return None for samples that must be put together one by one.
        """
        count = len(group.names) // len(group.keys)
        pattern = tuple(group.suffixes[:count])
        if not pattern or len(pattern) * len(group.keys) != len(group.suffixes) or group.error is not None:
            return None
        if group.begins != [*range(0, len(group.names), count)] or list(pattern) * len(group.keys) != group.suffixes:
            return None
        if pattern not in self._plans:
            # A hostile archive may have a new pattern in each group.
            if len(self._plans) >= _MOST_NAMES:
                return None
            self._plans[pattern] = self._planned(pattern)
        plan = self._plans[pattern]
        # A sample without a folder has no label; the samples are put together one by one to name it.
        if plan is None or (self._options.label_from_folder and not all(map(folder_of, group.keys))):
            return None
        return plan

    def _planned(self, pattern: Sequence[str]) -> _Plan | None:
        fields: list[tuple[str, str] | None] = []
        names: list[str] = []
        for suffix in pattern:
            field, kind = self._stem.part(suffix)
            if kind in CONTAINERS or (kind == "image" and self._options.decodes_images):
                return None
            names.append(self._options.rename.get(field, field))
            fields.append((names[-1], kind) if self._assembler.wants(names[-1]) else None)
        taken = [field[0] for field in fields if field is not None]
        own = {KEY} | ({LABEL} if self._options.label_from_folder else set())
        is_plain = len(set(taken)) == len(taken) <= MAX_FIELDS and own.isdisjoint(taken)
        return _Plan(tuple(fields), tuple(names)) if is_plain else None

    def _shapes(self, group: _Group, plan: _Plan) -> dict[str, Shape] | None:
        """Return the types that all samples of a group have; None if they must be looked at one by one."""
        shapes = {}
        for (name, kind), values in plan.columns(group):
            if kind == "npy":
                heads = {value[:_USUAL_HEADER] for value in values}
                head = memoryview(heads.pop())
                # NumPy's usual header has 128 bytes. Equal ones say the same.
                if heads or len(head) < _USUAL_HEADER or int.from_bytes(head[8:10], "little") + 10 != _USUAL_HEADER:
                    return None
                try:
                    dtype, _, shape, _ = npy_layout(head)
                except BadObject:
                    return None
                shapes[name] = Shape(dtype.newbyteorder("<").str, shape)
            else:
                shapes[name] = shape_of(0) if kind == "int" else Shape("str" if kind == "str" else "bytes", ())
        own = [*([LABEL] if self._options.label_from_folder else []), *([KEY] if self._options.key else [])]
        return shapes | dict.fromkeys(own, Shape("str", ()))

    def _columns(self, group: _Group, plan: _Plan) -> Block | None:
        """Return the samples of a group; None if a value does not fit and must be named."""
        columns: dict[str, Column] = {}
        try:
            for (name, kind), values in plan.columns(group):
                if name not in self.schema:
                    return None
                field = self.schema[name]
                if kind == "int":
                    # Numbers of other samples may have made floats of the field.
                    if field.numpy != np.dtype("<i8") or field.shape:
                        return None
                    columns[name] = np.array([whole_number(memoryview(value)) for value in values], dtype="<i8")
                elif kind == "npy":
                    arrays = [{name: parse_npy(memoryview(value))} for value in values]
                    columns[name] = Block.from_samples(Schema((field,)), arrays, exact=True).columns[name]
                elif field.kind != ("str" if kind == "str" else "bytes"):
                    return None
                else:
                    if kind == "str":
                        for value in values:
                            str(value, "utf-8")
                    columns[name] = joined(values)
        # The samples are put together one by one, which names the one that is wrong.
        except (BadObject, UsageError, UnicodeDecodeError):
            return None
        own = {LABEL: folder_of} if self._options.label_from_folder else {}
        for name, text in (own | ({KEY: str} if self._options.key else {})).items():
            columns[name] = joined([text(key).encode("utf-8", "surrogateescape") for key in group.keys])
        if set(self.schema.names) != columns.keys():
            return None
        return Block(self.schema, {name: columns[name] for name in self.schema.names})

    def _assembled(
        self, group: _Group, take: Callable[[Part, _Member], Iterable[tuple[str, V]]], text: Callable[[str], V]
    ) -> Iterator[Assembled[V]]:
        """Yield the samples of a group. ``take`` makes the fields of each member."""
        bounds = [*group.begins, len(group.names)]
        for key, start, stop in zip(group.keys, bounds, bounds[1:], strict=False):
            sample: Assembled[V] = Assembled(key)
            try:
                for at in range(start, stop):
                    part = self._stem.split(group.names[at])
                    assert not isinstance(part, str)
                    if self._assembler.takes(sample, part):
                        error = group.error if at == len(group.names) - 1 else None
                        member = _Member(group.data[at], error)
                        self._assembler.add(sample, group.names[at], take(part, member))
                self._assembler.finish(sample, text)
            except BadObject as error:
                raise BadObject(f"{self._file}: {error}") from error.__cause__
            yield sample

    def _counting(self, needs: Callable[[Kind], int]) -> Callable[[str], int]:
        """Return a function that says how many bytes of a member are read, by its name. ``needs`` says it by kind."""
        known: dict[str, int] = {}
        suffix_of = self._stem.suffix

        def count(name: str) -> int:
            suffix = suffix_of(name)
            # A name without a suffix belongs to no sample: nothing of it is read, whatever size it claims.
            if not suffix:
                part = self._stem.split(name)
                return 0 if isinstance(part, str) else self._needed(part.field, part.kind, needs)
            if (number := known.get(suffix)) is None:
                number = self._needed(*self._stem.part(suffix), needs)
                # The members of an archive share a few suffixes.
                if len(known) < _MOST_NAMES:
                    known[suffix] = number
            return number

        return count

    def _needed(self, field: str, kind: Kind, needs: Callable[[Kind], int]) -> int:
        # The contents of a container show its fields.
        is_wanted = kind in CONTAINERS or self._assembler.wants(self._options.rename.get(field, field))
        return needs(kind) if is_wanted else 0

    def _bytes_of_outline(self, kind: Kind) -> int:
        """Return how many bytes of a member its type needs."""
        if kind == "npy":
            return MAX_HEADER + 12
        return sys.maxsize if kind in CONTAINERS or (kind == "image" and self._options.decodes_images) else 0

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


@dataclass(frozen=True, slots=True)
class _Plan:
    """The fields that all samples of a group have."""

    fields: tuple[tuple[str, str] | None, ...]
    """Name and kind of the field of each member of a sample; None if the field is not asked for."""
    names: tuple[str, ...]
    """Names of all fields, those not asked for included."""

    def columns(self, group: _Group) -> Iterator[tuple[tuple[str, str], list[bytes]]]:
        """Yield each field with the bytes of all samples."""
        for at, field in enumerate(self.fields):
            if field is not None:
                yield field, group.data[at :: len(self.fields)]


@dataclass(slots=True)
class _Group:
    """Members of an archive as columns; once they are cut into samples, complete samples."""

    names: list[str] = dataclasses.field(default_factory=list)
    data: list[bytes] = dataclasses.field(default_factory=list)
    """The bytes that were asked for."""
    ends: list[int] = dataclasses.field(default_factory=list)
    """Byte of the tar file at which each member ends; 0 in a compressed file."""
    error: BadObject | None = None
    """The reason why the last member could not be read."""
    is_last: bool = False
    left_out: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)
    """Position, name and reason of members that are no files."""
    samples: list[str] = dataclasses.field(default_factory=list)
    """The sample key of each member."""
    suffixes: list[str] = dataclasses.field(default_factory=list)
    """The text behind each member's sample key and the dot; empty if a regular expression cuts names."""
    begins: list[int] = dataclasses.field(default_factory=list)
    keys: list[str] = dataclasses.field(default_factory=list)
    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def extend(self, more: _Group) -> None:
        """Add members at the end."""
        self.names += more.names
        self.data += more.data
        self.ends += more.ends
        self.samples += more.samples
        self.suffixes += more.suffixes
        self.error = more.error

    def part(self, start: int, stop: int | None) -> _Group:
        """Return some of the members. An error belongs to the last one."""
        return _Group(
            self.names[start:stop], self.data[start:stop], self.ends[start:stop],
            samples=self.samples[start:stop], suffixes=self.suffixes[start:stop],
            error=self.error if stop is None else None,
        )  # fmt: skip

    def keep(self, places: list[int]) -> None:
        """Keep only the members at these positions."""
        is_last_kept = bool(places) and places[-1] == len(self.names) - 1
        self.error = self.error if is_last_kept else None
        self.names, self.data = [self.names[at] for at in places], [self.data[at] for at in places]
        self.ends, self.samples = [self.ends[at] for at in places], [self.samples[at] for at in places]
        self.suffixes = [self.suffixes[at] for at in places] if self.suffixes else []


@dataclass(frozen=True, slots=True)
class _Member:
    """The bytes of a file inside a tar file, or the reason why they could not be read."""

    data: bytes
    error: BadObject | None

    def read(self, most: int | None = None) -> memoryview:
        """Return the member's bytes, or the first ``most`` of them."""
        if self.error is not None:
            raise self.error
        return memoryview(self.data)[:most]


def _begin(group: _Group, seen: set[int], stop: int) -> int | None:
    """Find where each sample of a group begins. Return the first member of a sample whose key was ``seen``, or None.

    ``stop``: the end of the sample before the first one.
    """
    samples = group.samples
    changes = map(operator.ne, samples, itertools.islice(samples, 1, None))
    group.begins = [0, *itertools.compress(range(1, len(samples)), changes)]
    group.keys = [samples[at] for at in group.begins]
    # A sample begins where the previous one ended, because its headers and long names lie before its first byte.
    ends = [group.ends[at - 1] for at in (*group.begins[1:], len(samples))]
    group.places = [place for place in zip([stop, *ends], ends, strict=False) if place[1]]
    # Hashes instead of keys, which take less memory in archives of millions of samples.
    for at, number in zip(group.begins, map(hash, group.keys), strict=True):
        if number in seen:
            return at
        seen.add(number)
    return None


def _members(file: SourceFile, wanted: Callable[[str], int], block_bytes: int) -> Iterator[_Group]:
    """Yield the regular files inside ``file``, many at a time.

    Raises :class:`BadObject` naming the file and the damaged byte. ``wanted`` returns how many bytes of a member are
    read. Layout:
    https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html and GNU tar's long names.
    """
    stored = file.size
    with reading(f"{file} is not a whole tar file"), file.stream() as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        at = noted = nbytes = 0
        notes: dict[str, str] = {}
        group = _Group()
        # Headers are read here, not by tarfile.open(), which reads names and pax records of any size into memory. A
        # block of zeros is the end mark.
        while (head := stream.read(_RECORD)) and (head[0] or head.strip(b"\0")):
            at += _RECORD
            plain = _plain_header(head)
            if plain is not None and not notes:
                name, size = plain
                is_file, noted = True, 0
            else:
                try:
                    info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
                except tarfile.HeaderError as error:
                    raise BadObject(f"{file}{_why_no_header(head, at - _RECORD, error)}") from error
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
                is_file = info.type in _REGULAR and not sparse
                if sparse:
                    group.left_out.append((len(group.names), name, "a sparse file"))
                elif not is_file and info.type != tarfile.DIRTYPE:
                    why = _NOT_FILES.get(info.type, "neither a file nor a folder")
                    group.left_out.append((len(group.names), name, why))
            taken = 0
            if is_file and (name.startswith("/") or (".." in name and ".." in name.split("/"))):
                group.left_out.append((len(group.names), name, "its name leads out of the archive"))
            elif is_file:
                count = min(size, wanted(name))
                data, unread = _read(stream, count, stored) if count else (b"", None)
                taken = len(data)
                nbytes += taken
                group.names.append(name)
                group.data.append(data)
                group.ends.append(0 if packed else at + _padded(size))
                if unread is not None:
                    group.error, group.is_last = unread, True
                    yield group
                    # The member is in no sample, but nothing behind it can be read either.
                    raise BadObject(f"{file}: {quoted(name)}: {unread}") from unread
                if nbytes >= block_bytes or len(group.names) >= MAX_MEMBERS:
                    yield group
                    group, nbytes = _Group(), 0
            padded = -(-size // _RECORD) * _RECORD
            at += padded
            if packed:
                _skip(stream, taken, size)
            else:
                stream.seek(padded - taken, os.SEEK_CUR)
        if len(head) < _RECORD:
            raise BadObject(f"{file} is cut short: it ends at byte {at} without an end mark")
        # gzip compares its checksum at the end of the stream, behind tar's end mark.
        while packed and stream.read(_SKIP):
            pass
        group.is_last = True
        yield group


def _plain_header(head: bytes) -> tuple[str, int] | None:
    """Return the name and size of a plain file, from its header; None if :mod:`tarfile` must read the header."""
    if len(head) != _RECORD or head[156] not in b"\0000" or head[124] >= 0x80:
        return None
    try:
        total = int(head[148:156].partition(b"\0")[0], 8)
        size = int(head[124:136].partition(b"\0")[0], 8)
    except ValueError:
        return None
    # The sum of all bytes, with 8 blanks in place of the checksum itself. Adler-32 has a sum in its lower half.
    rest = zlib.adler32(head[156:], zlib.adler32(head[:148])) & 0xFFFF
    if (total - 8 * ord(" ") + 1) % _ADLER != rest or size < 0:
        return None
    name = head[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    if prefix := head[345:500].partition(b"\0")[0]:
        name = f"{prefix.decode('utf-8', 'surrogateescape')}/{name}"
    # An old way to write a folder.
    return None if name.endswith("/") else (name.removeprefix("./"), size)


def _read(stream: IO[bytes], count: int, stored: int) -> tuple[bytes, BadObject | None]:
    """Return the next bytes of a member, or the reason why they cannot be read."""
    try:
        # The size comes from the header, and a gzip file may state any size. It is checked before memory is allocated.
        if count > _SKIP:
            check_allocation("it", count, stored=stored)
        data = stream.read(count)
    except BadObject as error:
        return b"", error
    # The errors of a damaged gzip file, and of a disk.
    except (OSError, EOFError, zlib.error) as error:
        try:
            with reading("the tar file is damaged"):
                raise error
        except BadObject as bad:
            return b"", bad
    if len(data) != count:
        return b"", BadObject(f"the tar file is cut short: {len(data)} of {count} bytes")
    return data, None


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
