"""The registry of kinds of files; and whether a place is a folder of objects, each one sample, or files of many.

========  ==========================================================  ==================================
kind      a file named, or a folder that is                           several in one folder
========  ==========================================================  ==================================
npy npz   ``.npy`` ``.npz``                                           objects, one sample each
                                                                      (``--read-as files``: files)
hdf5      ``.h5`` ``.hdf5`` ``.hdf`` ``.he5``                         one source, in the order of names
zarr      a folder with ``zarr.json``, ``.zarray`` or ``.zgroup``     one source, in the order of names
parquet   ``.parquet`` ``.parq``                                      one source, in the order of names
tar       ``.tar`` ``.tar.gz`` ``.tgz``                               one source, in the order of names
tfrecord  ``.tfrecord`` ``.tfrecords`` ``.tfrec``, also with ``.gz``  one source, in the order of names
          or ``-00000-of-00010`` behind
lmdb      ``.lmdb`` ``.mdb``, or a folder with ``data.mdb``           one source, in the order of names
raw       anything, with ``--value-format raw:DTYPE,SHAPE``           objects, one sample each
                                                                      (``--read-as files``: files)
========  ==========================================================  ==================================

A single file is known by its first bytes, and by its name where they say nothing. In a folder the name decides. Of
extensions that no kind and no object of a sample has, two files are looked at: if both are of one kind, all with this
extension are files of that kind (``.nc`` and ``.mat``: HDF5). In a folder of several kinds the bytes decide: it is one
of the files of many samples that have the most bytes, if these are at least half of all, and else one of objects
(``--read-as`` decides otherwise). But it is one of archives when these are three quarters of its files, whatever their
bytes, and a file of another kind does not count that has the name of an archive (``00000.tar``, ``00000.parquet``).
What is beside such files is left out and named. Files that only describe others (``.idx``, ``.index``, checksums,
``README.md``, ``dataset_info.json``, names without an extension) do not count, nor what ``cachetool convert --out``
writes beside its files: ``dataset.json`` and ``.extents``.

A package of its own adds a kind with an entry point in the group ``cachetool.sources``::

    [project.entry-points."cachetool.sources"]
    rawf32 = "mypackage.rawf32:KIND"      # a Kind; :class:`cachetool.sources.byte_source.SourceFile` is what it opens
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cachetool.core.errors import AccessDenied, BadObject, UsageError
from cachetool.core.units import parse_choice
from cachetool.formats.exported import DATASET_FILE, SIDE_FOLDER
from cachetool.sources.contents import HEAD, ZIP, foreign, is_hdf5, is_npz, is_tar, is_tfrecord_file
from cachetool.sources.grouping import describes
from cachetool.sources.keys import Part, Stem, extension_of, is_decoded
from cachetool.sources.limits import is_lmdb
from cachetool.sources.options import OF_FILES, READ_AS
from cachetool.sources.readers import NOTE, EmptyFile, LeftOut
from cachetool.stores import Object, redact, split_url
from cachetool.stores.redact import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINTS",
    "HEAD",
    "INDEXES",
    "IN_USE",
    "RAW",
    "Census",
    "EachFile",
    "Kind",
    "check_read_as",
    "is_ours",
    "kind_by",
    "kind_named",
    "kind_of",
    "kind_of_head",
    "kinds",
    "locate",
    "parent_of",
    "refuse_file",
]

ENTRY_POINTS = "cachetool.sources"
"""The entry point group that adds kinds of files."""
_LOOKED_AT = 2
"""Files of an extension that are looked at..."""
_MOST_EXTENSIONS = 3
"""...for so many of them, those with the most bytes."""
_COUNTED = 64
"""Unknown extensions that are told apart."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of files that hold many samples: how it is known, and how it is opened."""

    name: str
    suffixes: tuple[str, ...]
    """Ends of names, in lower case."""
    opener: str
    """``module:function``, called with a :class:`~cachetool.sources.byte_source.SourceFile` and
    :class:`~cachetool.sources.options.SourceOptions`; gives a :class:`~cachetool.sources.rows.ColumnFile`, or for
    ``records`` a :class:`~cachetool.sources.readers.RecordFile`."""
    magic: Callable[[bytes], bool] = lambda head: False
    """Whether a file begins so, by its first :data:`HEAD` bytes."""
    marks: tuple[str, ...] = ()
    """Names of files that make the folder they lie in one file of this kind."""
    records: bool = False
    """Whether a file is one sample after another, as opposed to arrays whose rows are samples."""
    guarded: bool = True
    """Whether a process of its own reads it, which a damaged file may kill."""
    by_path: bool = False
    """Whether its library reads nothing but a whole file of this machine."""
    one_sample: bool = False
    """Whether a folder of such files is a folder of objects, unless files are asked for."""

    def opened(self, file: Any, options: Any) -> Any:
        """What :attr:`opener` gives. An error of a file that is something else says what it is."""
        module, _, name = self.opener.partition(":")
        try:
            return getattr(importlib.import_module(module), name)(file, options)
        except EmptyFile:
            raise
        except BadObject as error:
            if not file.root and (what := self._foreign(file)):
                raise BadObject(f"{file} is no {self.name} file: it is {what}") from error
            raise

    def _foreign(self, file: Any) -> str:
        """What a file is that is none of this kind, in words; empty where its first bytes do not say it."""
        head = bytes(file.ranges.part(file.number, 0, HEAD)) if file.path is None else _beginning(file.path)
        if self.magic(head):
            return ""
        inside = kind_of_head(head)
        if inside is not None:
            return f"one of {inside.name}, which a name such as {file.name.stem}{inside.suffixes[0]} would say"
        return "" if self.name == "npz" and head.startswith(ZIP) else foreign(head)


_PART = re.compile(r"\.tfrec(ords?)?(\.gz)?-\d+-of-\d+(\.gz)?\Z|-\d{5,}-of-\d{5,}\Z")
_ASIDE = frozenset({"idx", "index", "tfindex", "md", "md5", "sha256", "crc", "rst", "yaml", "yml", "lock"})
INDEXES = (".idx", ".index", ".tfindex")
"""Ends of names of what says where the records of a file lie."""
_OF_CONVERT, _OF_LIBRARIES = "written beside its files by convert", "indexes and locks"
IN_USE = (_OF_CONVERT, _OF_LIBRARIES)
"""The reasons of names that are no samples, but used by who reads these."""
_SIDE_TABLE = re.compile(r"(metadata|meta|manifest|index)\.parq(uet)?", re.IGNORECASE)
"""A table that describes other files, where there are any."""
_MOST_STEMS = 2**18
"""Names of one kind that are compared with those of another."""
_PACKED = ("gz", "bz2", "xz", "zst")
_LOCKS = ("lock.mdb", ".lmdb-lock", ".mdb-lock")
"""Ends of names of what LMDB keeps beside its files."""


_TFRECORD = (".tfrecord", ".tfrecords", ".tfrec")
_BUILT_IN = (
    Kind(
        "npy", (".npy",), "cachetool.sources.numpy:open_npy",
        lambda head: head.startswith(b"\x93NUMPY"), guarded=False, one_sample=True,
    ),
    Kind("npz", (".npz",), "cachetool.sources.numpy:open_npz", is_npz, guarded=False, one_sample=True),
    Kind(
        "hdf5", (".h5", ".hdf5", ".hdf", ".he5"), "cachetool.sources.hdf5:open_hdf5", is_hdf5,
    ),
    Kind("zarr", (".zarr",), "cachetool.sources.zarr:open_zarr", marks=("zarr.json", ".zarray", ".zgroup")),
    Kind(
        "parquet", (".parquet", ".parq"), "cachetool.sources.parquet:open_parquet",
        lambda head: head.startswith(b"PAR1"),
    ),
    Kind(
        "tar", (".tar", ".tar.gz", ".tgz"), "cachetool.sources.tar:TarFile", is_tar, records=True,
        guarded=False,
    ),
    Kind(
        "tfrecord", (*_TFRECORD, *(f"{suffix}.gz" for suffix in _TFRECORD)),
        "cachetool.sources.tfrecord:open_tfrecord", is_tfrecord_file, records=True, guarded=False,
    ),
    Kind(
        "lmdb", (".lmdb", ".mdb"), "cachetool.sources.lmdb:open_lmdb", is_lmdb,
        marks=("data.mdb",), records=True, by_path=True,
    ),
)  # fmt: skip
_SUFFIXES = tuple(suffix for kind in _BUILT_IN for suffix in kind.suffixes)


@functools.cache
def kinds() -> dict[str, Kind]:
    """All kinds by name; a name of ours cannot be taken by somebody else's entry point. Raises :class:`UsageError`."""
    from importlib.metadata import entry_points

    all_kinds = {kind.name: kind for kind in _BUILT_IN}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        if point.name not in all_kinds:
            all_kinds[point.name] = _loaded(point)
    return all_kinds


def _loaded(point: EntryPoint) -> Kind:
    """The kind that an entry point names. Listings keep the kind's own name, so the entry point must have the same."""
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"kind {point.name!r} cannot be loaded from {point.value}: {error}") from error
    if not isinstance(kind, Kind):
        raise UsageError(
            f"kind {point.name!r} cannot be loaded from {point.value}: it is no cachetool.sources.kinds.Kind"
        )
    if kind.name != point.name:
        raise UsageError(
            f"the entry point {point.name!r} ({point.value}) names the kind {kind.name!r}; give both the same name"
        )
    return kind


def kind_named(name: str) -> Kind:
    """The kind called so, as a listing keeps it. Raises :class:`UsageError` for one that is not installed here."""
    try:
        return next((kind for kind in (*_BUILT_IN, RAW) if kind.name == name), None) or kinds()[name]
    except KeyError:
        raise UsageError(f"no package here reads files of the kind {name!r}; known are {', '.join(kinds())}") from None


def check_read_as(read_as: str | None) -> None:
    """Raise :class:`UsageError` for what is neither a way to read a place nor a kind of files."""
    if read_as not in (None, *READ_AS, *(kind.name for kind in _BUILT_IN)):  # others are searched for
        parse_choice(read_as, (*READ_AS, *kinds()), what="--read-as")


def _by_turns() -> Iterator[Kind]:
    """All kinds. The packages that are installed are searched for more of them only after the built-in ones, because
    that takes as long as all else that opens a small file."""
    yield from _BUILT_IN
    yield from _installed()


def _installed() -> Iterator[Kind]:
    """The kinds of other packages."""
    return itertools.islice(kinds().values(), len(_BUILT_IN), None)


def kind_of(name: str) -> Kind | None:
    """What a file of this name holds, if it holds many samples."""
    name = name.lower()
    if "-of-" in name and _PART.search(name):
        return kind_named("tfrecord")
    if name.endswith(_LOCKS):
        return None
    some = _by_turns() if name.endswith(_SUFFIXES) else _installed()  # of a million names most have no such end
    return next((kind for kind in some if name.endswith(kind.suffixes) and "." in name.lstrip(".")), None)


def kind_of_head(head: bytes) -> Kind | None:
    """What a file holds that begins with ``head``."""
    return next((kind for kind in _by_turns() if kind.magic(head)), None)


def kind_by(name: str, head: bytes) -> Kind | None:
    """What a file of this name holds that begins with ``head``: by its content first, by its name where that says
    nothing. Raises :class:`BadObject` when the name promises a kind and the content is known to be none."""
    named = kind_of(name)
    if named is not None and named.magic(head):
        return named
    inside = kind_of_head(head)
    is_zip = named is not None and named.name == "npz" and head.startswith(ZIP)  # its arrays may come later
    if inside is None and named is not None and not is_zip and (what := foreign(head)):
        raise BadObject(f"{printable(name)!r} is no {named.name} file: it is {what}")
    return inside or named


_IN_HUB = 4
"""Slashes of ``hf://datasets/OWNER/NAME``, which is a folder whatever its name."""


def parent_of(url: str) -> tuple[str, str]:
    """The URL of the folder that ``url`` lies in, and its name there; no name for a folder or a whole bucket."""
    place, mark, query = url.partition("?") if split_url(url)[0] in ("http", "https") else (url, "", "")
    folder, slash, name = place.rpartition("/")
    if not slash or folder.endswith("/") or (split_url(url)[0] == "hf" and folder.count("/") < _IN_HUB):
        return url, ""
    if split_url(url)[0] in ("http", "https", "file", "sftp"):
        name = unquote(name, errors="surrogateescape")
    return f"{folder}/{mark}{query}", name


def locate(url: str) -> tuple[str, str, Kind] | None:
    """For a URL or path of one file: that of its folder, its name there, and its kind; else None.

    Raises :class:`AccessDenied` for a path that this user may not look at, :class:`UsageError` for one of a device.
    """
    if "://" not in url:
        try:
            return _local(Path(url))
        except PermissionError as error:
            raise AccessDenied(f"{printable(url)!r}: permission denied") from error
    folder, name = parent_of(url)
    kind = kind_of(name)
    return None if kind is None or kind.marks == _ZARR.marks else (folder, name, kind)


RAW = Kind("raw", (), "cachetool.sources.raw:open_raw", guarded=False)
"""Files of nothing but numbers; no name and no first bytes tell them, only ``--value-format raw:DTYPE,SHAPE``."""
_ZARR = next(kind for kind in _BUILT_IN if kind.name == "zarr")


def _local(path: Path) -> tuple[str, str, Kind] | None:
    if path.is_dir():
        marks = ((mark, kind) for kind in _by_turns() if kind.by_path for mark in kind.marks)
        return next(((str(path), mark, kind) for mark, kind in marks if (path / mark).is_file()), None)
    if not path.exists():
        return None
    if not stat.S_ISREG(path.stat().st_mode):  # nobody may ever write into a pipe
        raise UsageError(f"{path} is a device, a pipe or a socket; name a file or a folder")
    kind = kind_by(path.name, _beginning(path))
    return None if kind is None or kind is _ZARR else (str(path.parent), path.name, kind)


def refuse_file(path: Path) -> None:
    """Raise :class:`UsageError` for a path of a file of no known kind."""
    if path.is_file():
        what = foreign(_beginning(path))
        raise UsageError(
            f"{printable(str(path))!r} is a file; give the folder that holds the samples, or a file of many samples"
            f" ({', '.join(kinds())}){f': this is {what}' if what else ''}"
        )


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


class Census:
    """Counts what lies in a place while its listing passes by."""

    def __init__(self, url: str) -> None:
        self.url = redact(url)
        self._kinds: Counter[str | None] = Counter()
        self._bytes: Counter[str | None] = Counter()
        self._stems: dict[str, set[int]] = {}
        self._side_tables = 0
        self._extensions: dict[str, list[Object]] = {}
        self._unknown: Counter[str] = Counter()
        self._unknown_bytes: Counter[str] = Counter()
        self.learned: dict[str, Kind] = {}
        """Kinds of files by extensions that none of them has."""
        self._sized = True
        self.is_zarr = False
        """Whether the place itself is a Zarr."""
        self.exported: Object | None = None
        """Its ``dataset.json``, by which it may be a folder that ``convert --out`` wrote."""

    def count(self, pages: Iterable[list[Object]]) -> Iterator[list[Object]]:
        """The pages, as they are."""
        for page in pages:
            for item in page:
                self._count(item)
                if item.key == DATASET_FILE:
                    self.exported = item
            yield page

    def _count(self, item: Object) -> None:
        folder, _, name = item.key.rpartition("/")
        if _describes(item.key):
            if _may_be_file(name):
                self._count_unknown(item, "")
            return
        if name in _ZARR.marks and not folder:
            self.is_zarr = True
            return
        if _in_zarr(folder):
            kind: str | None = _ZARR.name
        else:
            file_kind = kind_of(name)
            kind = None if file_kind is None else file_kind.name
            if file_kind is not None and _SIDE_TABLE.fullmatch(name):
                self._side_tables += 1
                return
            if file_kind is None:
                self._count_unknown(item, _ending(name))
            elif not file_kind.one_sample:
                stems = self._stems.setdefault(file_kind.name, set())
                if len(stems) <= _MOST_STEMS:
                    stems.add(hash(name.partition(".")[0]))
        self._kinds[kind] += 1
        self._bytes[kind] += max(0, item.size)
        self._sized = self._sized and item.size >= 0

    def _count_unknown(self, item: Object, extension: str) -> None:
        if is_decoded(extension) or (extension not in self._extensions and len(self._extensions) >= _COUNTED):
            return
        items = self._extensions.setdefault(extension, [])
        if len(items) < _LOOKED_AT:
            items.append(item)
        self._unknown[extension] += 1
        self._unknown_bytes[extension] += max(0, item.size)

    def look_inside(self, head_of: Callable[[Object], bytes], read_as: str | None) -> None:
        """Learn of which kind the files of unknown extensions are, where that may decide what the place is."""
        if read_as == "objects" or self.is_zarr or (read_as is None and self.kind(None) is not None):
            return
        weights = self._unknown_bytes if self._sized else self._unknown
        if read_as is None and 2 * sum(weights.values()) < sum(map(self._weight, self._kinds)):
            return
        nameless = read_as is not None or not any(self._kinds.values())
        extensions = [extension for extension, _ in weights.most_common() if extension or nameless]
        for extension in extensions[:_MOST_EXTENSIONS]:
            inside = {kind_of_head(head_of(item)) for item in self._extensions[extension]}
            if len(inside) == 1 and (kind := inside.pop()) is not None:
                self.learned[extension] = kind
                for counts, unknown in ((self._kinds, self._unknown), (self._bytes, self._unknown_bytes)):
                    counts[None] -= unknown[extension] if extension else 0
                    counts[kind.name] += unknown[extension]

    @property
    def inside(self) -> str:
        """A note on objects that are taken as bytes, and are files of rows by their first bytes; empty without any."""
        learned = {extension: kind.name for extension, kind in self.learned.items()}
        if not learned:
            return ""
        named = ", ".join(
            f"{f'.{extension}' if extension else 'nameless'} ({name})" for extension, name in learned.items()
        )
        return f"taken as bytes: {named}; to read the rows of them as samples: --read-as files"

    def kind(self, read_as: str | None) -> Kind | None:
        """The kind of files that the place consists of; None for a folder of objects.

        Raises :class:`UsageError` when files, or those of one kind, are asked for and there are none.
        """
        if read_as == "objects":
            return None
        if self.is_zarr and read_as in (None, *OF_FILES, _ZARR.name):
            return _ZARR
        counts = dict(self._kinds)
        if self._side_tables and not (counts and read_as is None):  # nothing is there that they may describe
            counts["parquet"] = counts.get("parquet", 0) + self._side_tables
        names = [name for name in counts if name is not None]
        if read_as not in (None, *OF_FILES):
            if read_as not in names:
                raise UsageError(f"--read-as {read_as}: under {self.url} {_amounts(counts)}")
            return kind_named(read_as)
        if read_as is not None and not names:
            raise UsageError(
                f"--read-as {read_as}: under {self.url} there are none that hold many samples; known are"
                f" {', '.join(kinds())}"
            )
        side = self._side_kinds(names)
        files = [name for name in names if name not in side]
        if read_as is not None:
            return kind_named(max(files, key=self._weight))
        others = {name: count for name, count in counts.items() if name not in side}
        many = [name for name in files if not kind_named(name).one_sample]
        total = sum(others.values())
        nearly_all = [name for name in many if 4 * counts[name] >= 3 * total]
        for name in nearly_all:
            if _is_archive(name):
                return kind_named(name)
        if not many:
            return None
        largest = max(many, key=self._weight)
        if self._weight(largest) >= sum(self._weight(name) for name in others if name != largest):
            return kind_named(largest)
        return kind_named(nearly_all[0]) if nearly_all else None

    def _side_kinds(self, names: list[str]) -> set[str]:
        """Kinds all of whose files lie beside an archive of the same name, as the tables of img2dataset do."""
        archives = set().union(*(self._stems.get(name, ()) for name in names if _is_archive(name)))
        tables = [name for name in names if name in self._stems and not _is_archive(name)]
        return {name for name in tables if len(self._stems[name]) <= _MOST_STEMS and self._stems[name] <= archives}

    def _weight(self, name: str | None) -> int:
        return self._bytes[name] if self._sized else self._kinds[name]


def _is_archive(name: str) -> bool:
    kind = kind_named(name)
    return kind.records and not kind.by_path


def _amounts(counts: dict[str | None, int]) -> str:
    """What there is, for a message."""
    texts = [f"{number} {name or 'other'}" for name, number in counts.items()]
    return f"there is none; there are {', '.join(texts)} files" if texts else "there is no file"


def _describes(key: str) -> bool:
    """True for a file that only describes others, or that is there for a program."""
    folder, _, name = key.rpartition("/")
    if is_ours(key) or name.endswith(_LOCKS) or describes(name):
        return True
    if not (name.startswith(".") or "." not in name or name.rpartition(".")[2].lower() in _ASIDE):
        return False  # of a million keys most end here
    return kind_of(name) is None and name not in _ZARR.marks and not _in_zarr(folder)


def is_ours(key: str) -> bool:
    """Whether ``cachetool convert --out`` writes a file of this name beside its files."""
    return key == DATASET_FILE or key.startswith(f"{SIDE_FOLDER}/")


def _ending(name: str) -> str:
    """The extension, with the one before where the last only says how the file is packed."""
    ending = extension_of(name)
    inner = extension_of(name[: -len(ending) - 1]) if ending in _PACKED else ""
    return f"{inner}.{ending}" if inner else ending


def _may_be_file(name: str) -> bool:
    """Whether a name without an extension may be that of a file of samples: ``_SUCCESS`` and ``LICENSE`` are not."""
    return "." not in name and not name.startswith("_") and not name.isupper()


def _in_zarr(folder: str) -> bool:
    return any(part.lower().endswith(_ZARR.suffixes) for part in folder.split("/"))


class EachFile(Stem):
    """The grouping of a listing of files: each object is a group of its own, those of other kinds are left out."""

    def __init__(self, kind: Kind, *, alone: bool = False, learned: Mapping[str, Kind] = MappingProxyType({})) -> None:
        """``alone``: the one object is such a file, whatever its name; ``learned``: kinds by unknown extensions."""
        self.rule = f"{'file' if alone else 'files'}:{kind.name}"
        self._kind, self._alone = kind, alone
        self._extensions = frozenset(extension for extension, inside in learned.items() if inside is kind)
        self.others = LeftOut()
        """Files of other kinds, and those that only describe files."""
        for extension in sorted(self._extensions):
            some = f".{extension} files" if extension else "files without an extension"
            advice = "; to take each as bytes: --read-as objects" if extension else ""
            self.others.add(NOTE, f"{some} are {kind.name} by their first bytes{advice}")

    def _learned(self, name: str) -> bool:
        return _ending(name) in self._extensions and ("." in name or _may_be_file(name))

    def split(self, key: str) -> Part | str:
        """The file, or why it is none."""
        name = key.rpartition("/")[2]
        if self._kind is not _ZARR and not self._alone:
            if is_ours(key):
                return _OF_CONVERT
            if name.startswith("."):
                return "hidden"
            kind = kind_of(name)
            if self._kind is RAW and kind is None and "." in name and not _describes(key):
                return Part(key, "", "bytes")
            if kind is not self._kind and not self._learned(name):
                if (self._kind.records and name.endswith(INDEXES)) or name.endswith(_LOCKS):
                    return _OF_LIBRARIES
                if _describes(key):
                    self.others.add(key, "describes other files")
                    return "describes other files"
                why = f"no {self._kind.name} file" + ("" if kind is None else f"; --read-as {kind.name} takes it")
                self.others.add(key, why)
                return why
        return Part(key, "", "bytes")
