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
========  ==========================================================  ==================================

A single file with another name is known by its first bytes. In a folder of several kinds the bytes decide: it is one
of the files of many samples that have the most bytes, if these are at least half of all, and else one of objects
(``--read-as`` decides otherwise). What is beside such files is left out and named. Files that only describe others
(``.idx``, ``.index``, checksums, ``README.md``, names without an extension) do not count, nor what ``cachetool convert
--out`` writes beside its files: ``dataset.json`` and ``.extents``.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cachetool.core.errors import AccessDenied, UsageError
from cachetool.sources.keys import Part, Stem
from cachetool.sources.limits import is_lmdb
from cachetool.sources.readers import LeftOut
from cachetool.stores import Object, redact, split_url
from cachetool.stores.redact import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINTS",
    "HEAD",
    "OURS",
    "Census",
    "EachFile",
    "Kind",
    "kind_named",
    "kind_of",
    "kind_of_head",
    "kinds",
    "locate",
    "parent_of",
]

ENTRY_POINTS = "cachetool.sources"
"""The entry point group that adds kinds of files."""
HEAD = 512
"""Bytes from which a file without a telling name is known."""


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
    """Whether a file with another name begins so, by its first 512 bytes."""
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
        """What :attr:`opener` gives."""
        module, _, name = self.opener.partition(":")
        return getattr(importlib.import_module(module), name)(file, options)


_PART = re.compile(r"\.tfrec(ords?)?(\.gz)?-\d+-of-\d+(\.gz)?\Z|-\d{5,}-of-\d{5,}\Z")
_ASIDE = frozenset({"idx", "index", "tfindex", "md", "md5", "sha256", "crc", "rst", "yaml", "yml", "lock"})
OURS, _EXTENTS = "dataset.json", ".extents"
_ABOUT = ("dataset_info.json", "features.json")
"""What TensorFlow Datasets writes beside its files."""
_LOCKS = ("lock.mdb", ".lmdb-lock", ".mdb-lock")
"""Ends of names of what LMDB keeps beside its files."""


def _is_tfrecord(head: bytes) -> bool:
    from cachetool.sources.tfrecord import is_tfrecord

    return is_tfrecord(head[:12])


_TFRECORD = (".tfrecord", ".tfrecords", ".tfrec")
_BUILT_IN = (
    Kind(
        "npy", (".npy",), "cachetool.sources.numpy:open_npy",
        lambda head: head.startswith(b"\x93NUMPY"), guarded=False, one_sample=True,
    ),
    Kind("npz", (".npz",), "cachetool.sources.numpy:open_npz", guarded=False, one_sample=True),
    Kind(
        "hdf5", (".h5", ".hdf5", ".hdf", ".he5"), "cachetool.sources.hdf5:open_hdf5",
        lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"),
    ),
    Kind("zarr", (".zarr",), "cachetool.sources.zarr:open_zarr", marks=("zarr.json", ".zarray", ".zgroup")),
    Kind(
        "parquet", (".parquet", ".parq"), "cachetool.sources.parquet:open_parquet",
        lambda head: head.startswith(b"PAR1"),
    ),
    Kind(
        "tar", (".tar", ".tar.gz", ".tgz"), "cachetool.sources.tar:TarFile",
        lambda head: head[257:262] == b"ustar", records=True, guarded=False,
    ),
    Kind(
        "tfrecord", (*_TFRECORD, *(f"{suffix}.gz" for suffix in _TFRECORD)),
        "cachetool.sources.tfrecord:open_tfrecord", _is_tfrecord, records=True, guarded=False,
    ),
    Kind(
        "lmdb", (".lmdb", ".mdb"), "cachetool.sources.lmdb:open_lmdb", is_lmdb,
        marks=("data.mdb",), records=True, by_path=True,
    ),
)  # fmt: skip


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
        return next((kind for kind in _BUILT_IN if kind.name == name), None) or kinds()[name]
    except KeyError:
        raise UsageError(f"no package here reads files of the kind {name!r}; known are {', '.join(kinds())}") from None


def _by_turns() -> Iterator[Kind]:
    """All kinds. The packages that are installed are searched for more of them only after the built-in ones, because
    that takes as long as all else that opens a small file."""
    yield from _BUILT_IN
    yield from itertools.islice(kinds().values(), len(_BUILT_IN), None)


def kind_of(name: str) -> Kind | None:
    """What a file of this name holds, if it holds many samples."""
    name = name.lower()
    if _PART.search(name):
        return kind_named("tfrecord")
    if name.endswith(_LOCKS):
        return None
    return next((kind for kind in _by_turns() if name.endswith(kind.suffixes) and "." in name.lstrip(".")), None)


def kind_of_head(head: bytes) -> Kind | None:
    """What a file holds that begins with ``head``."""
    return next((kind for kind in _by_turns() if kind.magic(head)), None)


def parent_of(url: str) -> tuple[str, str]:
    """The URL of the folder that ``url`` lies in, and its name there; no name for a folder or a whole bucket."""
    place, mark, query = url.partition("?") if split_url(url)[0] in ("http", "https") else (url, "", "")
    folder, slash, name = place.rpartition("/")
    if not slash or folder.endswith("/"):
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


_ZARR = next(kind for kind in _BUILT_IN if kind.name == "zarr")


def _local(path: Path) -> tuple[str, str, Kind] | None:
    if path.is_dir():
        marks = ((mark, kind) for kind in _by_turns() if kind.by_path for mark in kind.marks)
        return next(((str(path), mark, kind) for mark, kind in marks if (path / mark).is_file()), None)
    if not path.exists():
        return None
    if not stat.S_ISREG(path.stat().st_mode):  # nobody may ever write into a pipe
        raise UsageError(f"{path} is a device, a pipe or a socket; name a file or a folder")
    found = kind_of(path.name)
    if found is None:
        with path.open("rb") as file:
            found = kind_of_head(file.read(HEAD))
    return None if found is None or found is _ZARR else (str(path.parent), path.name, found)


class Census:
    """Counts what lies in a place while its listing passes by."""

    def __init__(self, url: str) -> None:
        self.url = redact(url)
        self._kinds: Counter[str | None] = Counter()
        self._bytes: Counter[str | None] = Counter()
        self._sized = True
        self._root = False
        self.exported: Object | None = None
        """Its ``dataset.json``, by which it may be a folder that ``convert --out`` wrote."""

    def count(self, pages: Iterable[list[Object]]) -> Iterator[list[Object]]:
        """The pages, as they are."""
        for page in pages:
            for item in page:
                self._count(item)
                if item.key == OURS:
                    self.exported = item
            yield page

    def _count(self, item: Object) -> None:
        folder, _, name = item.key.rpartition("/")
        if _describes(item.key):
            return
        if name in _ZARR.marks and not folder:
            self._root = True
            return
        if _in_zarr(folder):
            kind: str | None = _ZARR.name
        else:
            found = kind_of(name)
            kind = None if found is None else found.name
        self._kinds[kind] += 1
        self._bytes[kind] += max(0, item.size)
        self._sized = self._sized and item.size >= 0

    def kind(self, read_as: str | None) -> Kind | None:
        """The kind of files that the place consists of; None for a folder of objects.

        Raises :class:`UsageError` when files are asked for and there are none, or several kinds.
        """
        if read_as == "objects":
            return None
        if self._root:
            return _ZARR
        names = [name for name in self._kinds if name is not None]
        if read_as == "files":
            if not names:
                raise UsageError(
                    f"--read-as files: under {self.url} there are none that hold many samples; known are"
                    f" {', '.join(kinds())}"
                )
            return kind_named(max(names, key=self._weight))
        many = [name for name in names if not kind_named(name).one_sample]
        if not many:
            return None
        largest = max(many, key=self._weight)
        rest = [self._weight(name) for name in self._kinds if name != largest]
        return kind_named(largest) if self._weight(largest) >= sum(rest) else None

    def _weight(self, name: str | None) -> int:
        return self._bytes[name] if self._sized else self._kinds[name]


def _describes(key: str) -> bool:
    """True for a file that only describes others, or that is there for a program."""
    folder, _, name = key.rpartition("/")
    if key == OURS or folder.partition("/")[0] == _EXTENTS or name in _ABOUT or name.endswith(_LOCKS):
        return True
    if not (name.startswith(".") or "." not in name or name.rpartition(".")[2].lower() in _ASIDE):
        return False  # of a million keys most end here
    return kind_of(name) is None and name not in _ZARR.marks and not _in_zarr(folder)


def _in_zarr(folder: str) -> bool:
    return any(part.lower().endswith(_ZARR.suffixes) for part in folder.split("/"))


class EachFile(Stem):
    """The grouping of a listing of files: each object is a group of its own, those of other kinds are left out."""

    def __init__(self, kind: Kind, *, alone: bool = False) -> None:
        """``alone``: the one object is such a file, whatever its name."""
        self.rule = f"{'file' if alone else 'files'}:{kind.name}"
        self._kind, self._alone = kind, alone
        self.others = LeftOut()
        """Files of other kinds, without those that only describe files."""

    def split(self, key: str) -> Part | str:
        """The file, or why it is none."""
        name = key.rpartition("/")[2]
        if self._kind is not _ZARR and not self._alone:
            if name.startswith("."):
                return "hidden"
            if kind_of(name) is not self._kind:
                if not _describes(key):
                    self.others.add(key, f"no {self._kind.name} file; --read-as objects takes it")
                return f"no {self._kind.name} files"
        return Part(key, "", "bytes")
