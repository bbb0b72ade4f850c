"""The registry of kinds of files, and the decision whether a place is a folder of objects (one sample each) or of files
with many samples each.

========  ==========================================================  ==================================
kind      a file named, or a folder that is                           several in one folder
========  ==========================================================  ==================================
npy npz   ``.npy`` ``.npz``                                           objects, one sample each
                                                                      (``--read-as files``: files)
hdf5      ``.h5`` ``.hdf5`` ``.hdf`` ``.he5``                         one source, in the order of names
netcdf3   ``.nc3``, and ``.nc`` with classic netCDF in it             one source, in the order of names
zarr      a folder with ``zarr.json``, ``.zarray`` or ``.zgroup``     one source, in the order of names
parquet   ``.parquet`` ``.parq``                                      one source, in the order of names
tar       ``.tar`` ``.tar.gz`` ``.tgz``                               one source, in the order of names
tfrecord  ``.tfrecord`` ``.tfrecords`` ``.tfrec``, also with ``.gz``  one source, in the order of names
          or ``-00000-of-00010`` behind
lmdb      ``.lmdb`` ``.mdb``, or a folder with ``data.mdb``           one source, in the order of names
raw       anything, with ``--value-format raw:DTYPE,SHAPE``           objects, one sample each
                                                                      (``--read-as files``: files)
========  ==========================================================  ==================================

The first bytes decide the kind of a single file, and its name if the bytes do not tell. In a folder the name decides.
If an extension belongs to no kind and to no object of a sample, the first and the last file with that extension are
opened. If both are of one kind, all files with the extension are of that kind (``.mat``: HDF5; ``.nc``: HDF5 or classic
netCDF). If one is HDF5 and the other classic netCDF, the reader of HDF5 reads both.

In a folder of several kinds the bytes decide. The kind of many-sample files with the most bytes is the source if these
files have at least half of all bytes. Otherwise the place is a folder of objects (``--read-as`` decides otherwise).
Archives are the source when three quarters of the files are archives, whatever their bytes. Files of another kind do
not count if they have the name of an archive (``00000.tar``, ``00000.parquet``).

Files beside the source's files are left out and named. Files that only describe others do not count: ``.idx``,
``.index``, checksums, ``README.md``, ``dataset_info.json``, names without an extension, and the files that ``cachetool
convert --out`` writes beside its data (``dataset.json`` and ``.extents``).

A package adds a kind of its own with an entry point in the group ``cachetool.sources``::

    [project.entry-points."cachetool.sources"]
    rawf32 = "mypackage.rawf32:KIND"      # a Kind; its opener gets a cachetool.sources.byte_source.SourceFile
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
from cachetool.sources.contents import HEAD, ZIP, foreign, is_hdf5, is_netcdf3, is_npz, is_tar, is_tfrecord_file
from cachetool.sources.keys import Part, Stem, extension_of, is_decoded
from cachetool.sources.limits import is_lmdb
from cachetool.sources.names import NamedPage, describes
from cachetool.sources.options import OF_FILES, READ_AS
from cachetool.sources.readers import NOTE, EmptyFile, LeftOut
from cachetool.stores import Object, redact, split_url
from cachetool.stores.base import Batch
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
_MOST_EXTENSIONS = 3
"""Number of unknown extensions whose files are opened: those with the most bytes."""
_COUNTED = 64
"""Number of unknown extensions that are counted separately."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of files that hold many samples: how files of this kind are recognised and opened."""

    name: str
    suffixes: tuple[str, ...]
    """Ends of file names, in lower case."""
    opener: str
    """The function that opens a file, as ``module:function``. It is called with a
    :class:`~cachetool.sources.byte_source.SourceFile` and :class:`~cachetool.sources.options.SourceOptions`, and
    returns a :class:`~cachetool.sources.rows.ColumnFile`, or for ``records`` a
    :class:`~cachetool.sources.readers.RecordFile`."""
    magic: Callable[[bytes], bool] = lambda head: False
    """A function that returns True if the first :data:`HEAD` bytes of a file show this kind."""
    marks: tuple[str, ...] = ()
    """Names of files that turn the folder they lie in into one file of this kind."""
    records: bool = False
    """True if a file is a sequence of samples; False if a file holds arrays whose rows are samples."""
    guarded: bool = True
    """True if a separate process reads the file, because a damaged file may crash the process that reads it."""
    by_path: bool = False
    """True if the library reads only complete files on this machine."""
    one_sample: bool = False
    """True if a folder of such files is a folder of objects, unless ``--read-as`` asks for files."""

    def opened(self, file: Any, options: Any) -> Any:
        """Call :attr:`opener` and return its result. If the file is of another kind, the error says which."""
        module, _, name = self.opener.partition(":")
        try:
            # The reader is imported only now: zarr takes 0.25 s to import and h5py 0.09, which other kinds must not
            # pay.
            return getattr(importlib.import_module(module), name)(file, options)
        except EmptyFile:
            # An empty file is a sound file of this kind, so its first bytes would only add a wrong explanation.
            raise
        except BadObject as error:
            head = _head_of(file)
            # The files of one series may have both forms of netCDF. The reader of classic files needs no library, so
            # the process that reads HDF5 reads them too.
            if self is _HDF5 and _NETCDF3.magic(head):
                return _NETCDF3.opened(file, options)
            if not file.root and (what := self._foreign(file, head)):
                raise BadObject(f"{file} is no {self.name} file: it is {what}") from error
            raise

    def _foreign(self, file: Any, head: bytes) -> str:
        """Return in words what the file is instead of this kind; empty if its first bytes do not tell."""
        if self.magic(head):
            return ""
        inside = kind_of_head(head)
        if inside is not None:
            return f"of the kind {inside.name}; rename it, for example to {file.name.stem}{inside.suffixes[0]}"
        return "" if self.name == "npz" and head.startswith(ZIP) else foreign(head)


_PART = re.compile(r"\.tfrec(ords?)?(\.gz)?-\d+-of-\d+(\.gz)?\Z|-\d{5,}-of-\d{5,}\Z")
_ASIDE = frozenset({"idx", "index", "tfindex", "md", "md5", "sha256", "crc", "rst", "yaml", "yml", "lock"})
INDEXES = (".idx", ".index", ".tfindex")
"""Ends of the names of index files, which say where the records of a file lie."""
_OF_CONVERT, _OF_LIBRARIES = "written by convert beside the data files", "indexes and locks"
IN_USE = (_OF_CONVERT, _OF_LIBRARIES)
"""Reasons for names that are no samples, although the readers of the samples use the files."""
_SIDE_TABLE = re.compile(r"(metadata|meta|manifest|index)\.parq(uet)?", re.IGNORECASE)
"""Names of tables that describe the other files of a folder."""
_MOST_STEMS = 2**18
"""Most names of one kind that are compared with the names of archives."""
_MOST_SUFFIXES = 2**12
"""Most suffixes whose kinds are remembered."""
_NOT_PLAIN = ("-of-", ".zarr/", f"{SIDE_FOLDER}/")
"""Texts in lower case in keys whose suffix does not tell their kind."""
_PACKED = ("gz", "bz2", "xz", "zst")
_LOCKS = ("lock.mdb", ".lmdb-lock", ".mdb-lock")
"""Ends of the names of the lock files that LMDB keeps beside its files."""


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
    Kind("netcdf3", (".nc3",), "cachetool.sources.netcdf3:open_netcdf3", is_netcdf3, guarded=False),
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
    """Return all kinds by name. Raises :class:`UsageError` for an entry point that cannot be loaded."""
    from importlib.metadata import entry_points

    all_kinds = {kind.name: kind for kind in _BUILT_IN}
    # Built-in names win, so an installed package cannot replace the reader of files that listings already name. Sorted
    # by name, because the first kind that recognises a file wins.
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        if point.name not in all_kinds:
            all_kinds[point.name] = _loaded(point)
    return all_kinds


def _loaded(point: EntryPoint) -> Kind:
    """Return the kind that an entry point names. Raises :class:`UsageError` if the entry point names no usable kind."""
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"kind {point.name!r} cannot be loaded from {point.value}: {error}") from error
    if not isinstance(kind, Kind):
        raise UsageError(
            f"kind {point.name!r} cannot be loaded from {point.value}: it is not a cachetool.sources.kinds.Kind"
        )
    # A listing keeps the kind's own name, and a later process finds the kind by the entry point's name.
    if kind.name != point.name:
        raise UsageError(
            f"the entry point {point.name!r} ({point.value}) names the kind {kind.name!r}; give both the same name"
        )
    return kind


def kind_named(name: str) -> Kind:
    """Return the kind of this name, as listings keep it. Raises :class:`UsageError` for a kind that is not installed
    here."""
    try:
        return next((kind for kind in (*_BUILT_IN, RAW) if kind.name == name), None) or kinds()[name]
    except KeyError:
        raise UsageError(
            f"no installed package reads files of the kind {name!r}; installed kinds: {', '.join(kinds())}"
        ) from None


def check_read_as(read_as: str | None) -> None:
    """Raise :class:`UsageError` if ``read_as`` is neither a way to read a place nor a kind of files."""
    # Built-in names are compared first, because a search for installed packages takes as long as opening a small file.
    if read_as not in (None, *READ_AS, *(kind.name for kind in _BUILT_IN)):
        parse_choice(read_as, (*READ_AS, *kinds()), what="--read-as")


def _by_turns() -> Iterator[Kind]:
    """Yield all kinds, the built-in ones first."""
    # The built-in kinds come first because searching the installed packages takes as long as everything else that opens
    # a small file.
    yield from _BUILT_IN
    yield from _installed()


def _installed() -> Iterator[Kind]:
    """Yield the kinds that other packages add."""
    return itertools.islice(kinds().values(), len(_BUILT_IN), None)


def kind_of(name: str) -> Kind | None:
    """Return the kind that a file's name tells, or None for a name of no file with many samples."""
    name = name.lower()
    if "-of-" in name and _PART.search(name):
        return kind_named("tfrecord")
    if name.endswith(_LOCKS):
        return None
    # One endswith() over all suffixes first: of a million names of objects most end in none of them.
    some = _by_turns() if name.endswith(_SUFFIXES) else _installed()
    return next((kind for kind in some if name.endswith(kind.suffixes) and "." in name.lstrip(".")), None)


def _all_suffixes_have_dots() -> bool:
    """Return True if a name's text behind its first dot tells its kind, also of the kinds that other packages add."""
    return all(suffix.startswith(".") for kind in _installed() for suffix in kind.suffixes)


def kind_of_head(head: bytes) -> Kind | None:
    """Return the kind of a file that begins with the bytes ``head``, or None."""
    return next((kind for kind in _by_turns() if kind.magic(head)), None)


def kind_by(name: str, head: bytes) -> Kind | None:
    """Return the kind of a file by its first bytes ``head``, or by its name if the bytes do not tell.

    Raises :class:`BadObject` if the name promises a kind and the bytes show that the file is something else.
    """
    named = kind_of(name)
    if named is not None and named.magic(head):
        return named
    inside = kind_of_head(head)
    # A zip file may begin with a member that is no array, so its first bytes do not show that it is an .npz.
    is_zip = named is not None and named.name == "npz" and head.startswith(ZIP)
    if inside is None and named is not None and not is_zip and (what := foreign(head)):
        raise BadObject(f"{printable(name)!r} is no {named.name} file: it is {what}")
    return inside or named


_IN_HUB = 4
"""Slashes in ``hf://datasets/OWNER/NAME``, which is a folder whatever its name."""


def parent_of(url: str) -> tuple[str, str]:
    """Return the URL of the folder that ``url`` lies in, and the name in that folder.

    The name is empty for a folder or a whole bucket.
    """
    place, mark, query = url.partition("?") if split_url(url)[0] in ("http", "https") else (url, "", "")
    folder, slash, name = place.rpartition("/")
    if not slash or folder.endswith("/") or (split_url(url)[0] == "hf" and folder.count("/") < _IN_HUB):
        return url, ""
    if split_url(url)[0] in ("http", "https", "file", "sftp"):
        name = unquote(name, errors="surrogateescape")
    return f"{folder}/{mark}{query}", name


def locate(url: str) -> tuple[str, str, Kind] | None:
    """Return the URL of the folder, the name and the kind of the one file at ``url``; None if ``url`` is no such file.

    Raises :class:`AccessDenied` for a path that this user may not read, :class:`UsageError` for a device.
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
"""Files of raw numbers. No name and no first bytes show this kind, only ``--value-format raw:DTYPE,SHAPE``."""
_ZARR, _HDF5, _NETCDF3 = (next(kind for kind in _BUILT_IN if kind.name == name) for name in ("zarr", "hdf5", "netcdf3"))


def _local(path: Path) -> tuple[str, str, Kind] | None:
    if path.is_dir():
        marks = ((mark, kind) for kind in _by_turns() if kind.by_path for mark in kind.marks)
        return next(((str(path), mark, kind) for mark, kind in marks if (path / mark).is_file()), None)
    if not path.exists():
        return None
    # Opening a named pipe would block for ever if no process writes into it.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{path} is a device, a pipe or a socket; name a file or a folder")
    kind = kind_by(path.name, _beginning(path))
    return None if kind is None or kind is _ZARR else (str(path.parent), path.name, kind)


def refuse_file(path: Path) -> None:
    """Raise :class:`UsageError` if ``path`` is a file of no known kind."""
    if path.is_file():
        what = foreign(_beginning(path))
        raise UsageError(
            f"{printable(str(path))!r} is a file of an unknown kind{f': {what}' if what else ''};\n"
            f"give the folder that holds the samples, or a file of many samples ({', '.join(kinds())})"
        )


def _head_of(file: Any) -> bytes:
    if file.root:
        return b""
    return bytes(file.ranges.part(file.number, 0, HEAD)) if file.path is None else _beginning(file.path)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


class Census:
    """Counts of the files of a place, collected while its listing is read, and the decision what the place is."""

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
        """Kinds of files by extension, for extensions that belong to no kind."""
        self._sized = True
        self._plain: dict[str, tuple[str | None, str] | None] = {}
        self.is_zarr = False
        """True if the place itself is a Zarr."""
        self.exported: Object | None = None
        """The place's ``dataset.json``, which shows a folder written by ``convert --out``."""

    def count(self, pages: Iterable[Batch]) -> Iterator[NamedPage]:
        """Yield ``pages`` unchanged and count their objects."""
        for batch in pages:
            page = NamedPage.of(batch)
            for at in self._count_plain(page):
                item = page[at]
                self._count(item)
                if item.key == DATASET_FILE:
                    self.exported = item
            yield page

    def _count_plain(self, page: NamedPage) -> Iterable[int]:
        """Count the objects whose suffix alone tells their kind. Return the positions of the other ones."""
        text = page.text
        # A false alarm only costs the time to look at each name.
        if any(word in text.lower() for word in _NOT_PLAIN) or not _all_suffixes_have_dots():
            return range(len(page))
        known = {suffix: self._plain_kind(suffix) for suffix in set(page.suffixes)}
        others = {*page.hidden, *page.describing}
        if unclear := {suffix for suffix, kind in known.items() if kind is None}:
            others.update(at for at, suffix in enumerate(page.suffixes) if suffix in unclear)
        if DATASET_FILE in text or _ZARR.marks[0] in text:
            names = (DATASET_FILE, *_ZARR.marks)
            others.update(at for at, name in enumerate(page.names) if name in names)
        suffixes, sizes = page.suffixes, page.sizes
        if others:
            plain = [at for at in range(len(page)) if at not in others]
            suffixes, sizes = [suffixes[at] for at in plain], [sizes[at] for at in plain]
        if sizes and min(sizes) < 0:
            self._sized = False
            sizes = [max(0, size) for size in sizes]
        counts = Counter(suffixes)
        sums = dict.fromkeys(counts, 0 if len(counts) > 1 else sum(sizes))
        for suffix, size in zip(suffixes, sizes, strict=True) if len(counts) > 1 else ():
            sums[suffix] += size
        for suffix, number in counts.items():
            kind, ending = known[suffix] or (None, "")
            self._kinds[kind] += number
            self._bytes[kind] += sums[suffix]
            if kind is None and self._counts_unknown(ending):
                ahead, back = range(len(page)), range(len(page) - 1, -1, -1)
                for places in (back,) if self._extensions[ending] else (ahead, back):
                    at = next(at for at in places if page.suffixes[at] == suffix and at not in others)
                    self._look_later(ending, page[at])
                self._unknown[ending] += number
                self._unknown_bytes[ending] += sums[suffix]
        return sorted(others)

    def _plain_kind(self, suffix: str) -> tuple[str | None, str] | None:
        """Return the kind of all names with this suffix behind their first dot, and their extension.

        Return None if each name must be looked at.
        """
        if suffix not in self._plain:
            name = f"x.{suffix}"
            kind = kind_of(name)
            is_plain = suffix and not _describes(name) and (kind is None or kind.one_sample)
            plain = (None if kind is None else kind.name, _ending(name)) if is_plain else None
            if len(self._plain) >= _MOST_SUFFIXES:
                return plain
            self._plain[suffix] = plain
        return self._plain[suffix]

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
                    # Hashes instead of names, because up to 2**18 of them are held for each kind while the listing is
                    # read.
                    stems.add(hash(name.partition(".")[0]))
        self._kinds[kind] += 1
        self._bytes[kind] += max(0, item.size)
        # Some web servers list no sizes. As soon as one size is missing, kinds are compared by number of files.
        self._sized = self._sized and item.size >= 0

    def _count_unknown(self, item: Object, extension: str) -> None:
        if not self._counts_unknown(extension):
            return
        self._look_later(extension, item)
        self._unknown[extension] += 1
        self._unknown_bytes[extension] += max(0, item.size)

    def _look_later(self, extension: str, item: Object) -> None:
        """Keep the first and the last file of an extension: the files of a series may change their kind at some
        time."""
        items = self._extensions[extension]
        items[1:] = [item] if items and items[0].key != item.key else []
        if not items:
            items.append(item)

    def _counts_unknown(self, extension: str) -> bool:
        """Return True if files of this extension are counted as files of an unknown kind."""
        # A hostile listing may have a new extension for each key, so only the first 64 are counted.
        if is_decoded(extension) or (extension not in self._extensions and len(self._extensions) >= _COUNTED):
            return False
        self._extensions.setdefault(extension, [])
        return True

    def look_inside(self, head_of: Callable[[Object], bytes], read_as: str | None) -> None:
        """Open files with unknown extensions to learn their kind, if that may decide what the place is."""
        if read_as == "objects" or self.is_zarr or (read_as is None and self.kind(None) is not None):
            return
        weights = self._unknown_bytes if self._sized else self._unknown
        # Opening files costs requests. Files with less than half of all bytes cannot become the source.
        if read_as is None and 2 * sum(weights.values()) < sum(map(self._weight, self._kinds)):
            return
        nameless = read_as is not None or not any(self._kinds.values())
        extensions = [extension for extension, _ in weights.most_common() if extension or nameless]
        for extension in extensions[:_MOST_EXTENSIONS]:
            inside = {kind_of_head(head_of(item)) for item in self._extensions[extension]}
            # Old files of a series are often classic netCDF and the new ones HDF5, whose kind opens both.
            inside = {_HDF5} if inside == {_HDF5, _NETCDF3} else inside
            # Two files of different kinds, or one that cannot be recognised, leave the extension unknown.
            if len(inside) == 1 and (kind := inside.pop()) is not None:
                self.learned[extension] = kind
                for counts, unknown in ((self._kinds, self._unknown), (self._bytes, self._unknown_bytes)):
                    counts[None] -= unknown[extension] if extension else 0
                    counts[kind.name] += unknown[extension]

    @property
    def inside(self) -> str:
        """A note on objects that are stored as bytes although their first bytes show files of rows; empty without such
        objects."""
        learned = {extension: kind.name for extension, kind in self.learned.items()}
        if not learned:
            return ""
        named = ", ".join(
            f"{f'.{extension}' if extension else 'no extension'} ({name})" for extension, name in learned.items()
        )
        return f"read as bytes: files of the extensions {named}; to read their rows as samples: --read-as files"

    def kind(self, read_as: str | None) -> Kind | None:
        """Return the kind of files that the place consists of; None for a folder of objects.

        Raises :class:`UsageError` when files, or files of one kind, are asked for and there are none.
        """
        if read_as == "objects":
            return None
        if self.is_zarr and read_as in (None, *OF_FILES, _ZARR.name):
            return _ZARR
        counts = dict(self._kinds)
        # Tables such as metadata.parquet describe other files. Without other files they are the samples themselves.
        if self._side_tables and not (counts and read_as is None):
            counts["parquet"] = counts.get("parquet", 0) + self._side_tables
        names = [name for name in counts if name is not None]
        if read_as not in (None, *OF_FILES):
            if read_as not in names:
                raise UsageError(f"--read-as {read_as}: {self.url} {_amounts(counts)}")
            return kind_named(read_as)
        if read_as is not None and not names:
            raise UsageError(
                f"--read-as {read_as}: {self.url} has no files of many samples; the known kinds are"
                f" {', '.join(kinds())}"
            )
        side = self._side_kinds(names)
        files = [name for name in names if name not in side]
        if read_as is not None:
            return kind_named(max(files, key=self._weight))
        others = {name: count for name, count in counts.items() if name not in side}
        many = [name for name in files if not kind_named(name).one_sample]
        total = sum(others.values())
        # Two .h5 files beside two .pdf files once became two samples of raw bytes, so bytes decide. Archives are the
        # exception: a folder of archives stays one whatever a large file beside them weighs.
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
        """Return the kinds whose every file lies beside an archive of the same name, such as the tables of
        img2dataset."""
        archives = set().union(*(self._stems.get(name, ()) for name in names if _is_archive(name)))
        tables = [name for name in names if name in self._stems and not _is_archive(name)]
        return {name for name in tables if len(self._stems[name]) <= _MOST_STEMS and self._stems[name] <= archives}

    def _weight(self, name: str | None) -> int:
        return self._bytes[name] if self._sized else self._kinds[name]


def _is_archive(name: str) -> bool:
    kind = kind_named(name)
    return kind.records and not kind.by_path


def _amounts(counts: dict[str | None, int]) -> str:
    """Return the counts of files for a message."""
    amounts = sorted(counts.items(), key=lambda amount: -amount[1])
    texts = [f"{number} {name or 'other'}" for name, number in amounts]
    return f"has no such file; it has {', '.join(texts)} files" if texts else "has no files"


def _describes(key: str) -> bool:
    """Return True for a file that only describes others, or that belongs to a program."""
    folder, _, name = key.rpartition("/")
    if is_ours(key) or name.endswith(_LOCKS) or describes(name):
        return True
    if not (name.startswith(".") or "." not in name or name.rpartition(".")[2].lower() in _ASIDE):
        # The cheap test comes first: of a million keys most end here.
        return False
    return kind_of(name) is None and name not in _ZARR.marks and not _in_zarr(folder)


def is_ours(key: str) -> bool:
    """Return True if ``cachetool convert --out`` writes a file of this name beside its data files."""
    return key == DATASET_FILE or key.startswith(f"{SIDE_FOLDER}/")


def _ending(name: str) -> str:
    """Return the extension, with the extension before it if the last one only names a compression."""
    ending = extension_of(name)
    inner = extension_of(name[: -len(ending) - 1]) if ending in _PACKED else ""
    return f"{inner}.{ending}" if inner else ending


def _may_be_file(name: str) -> bool:
    """Return True if a name without an extension may be a file of samples, unlike ``_SUCCESS`` and ``LICENSE``."""
    return "." not in name and not name.startswith("_") and not name.isupper()


def _in_zarr(folder: str) -> bool:
    return any(part.lower().endswith(_ZARR.suffixes) for part in folder.split("/"))


class EachFile(Stem):
    """The grouping of a listing of files: each object is a group of its own, and files of other kinds are left out."""

    def __init__(self, kind: Kind, *, alone: bool = False, learned: Mapping[str, Kind] = MappingProxyType({})) -> None:
        """``alone``: the source is this one file, whatever its name. ``learned``: kinds by unknown extension."""
        self.rule = f"{'file' if alone else 'files'}:{kind.name}"
        self._kind, self._alone = kind, alone
        self._extensions = frozenset(extension for extension, inside in learned.items() if inside is kind)
        self.others = LeftOut()
        """Files of other kinds, and files that only describe files."""
        for extension in sorted(self._extensions):
            some = f".{extension} files" if extension else "files without an extension"
            advice = "; to read each file as bytes: --read-as objects" if extension else ""
            self.others.add(NOTE, f"{some} are read as {kind.name}, because they begin like {kind.name}{advice}")

    def _learned(self, name: str) -> bool:
        return _ending(name) in self._extensions and ("." in name or _may_be_file(name))

    def split(self, key: str) -> Part | str:
        """Return the file as a group of its own, or the reason why it is left out."""
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
                why = f"no {self._kind.name} file" + ("" if kind is None else f"; --read-as {kind.name} reads it")
                self.others.add(key, why)
                return why
        return Part(key, "", "bytes")
