"""The door to files that others made: which kind of file a path is, and the source that reads it.

========  ==========================================================  ==================================
kind      a file named, or a folder that is                           several in one folder
========  ==========================================================  ==================================
npy npz   ``.npy`` ``.npz``                                           no: they are objects, one sample each
hdf5      ``.h5`` ``.hdf5`` ``.hdf`` ``.he5``                         one input, in the order of names
zarr      a folder with ``zarr.json``, ``.zarray`` or ``.zgroup``     one input, in the order of names
tar       ``.tar`` ``.tar.gz`` ``.tgz``                               one input, in the order of names
tfrecord  ``.tfrecord`` ``.tfrecords`` ``.tfrec``, also with ``.gz``  one input, in the order of names
          or ``-00000-of-00010`` behind
lmdb      ``.lmdb`` ``.mdb``, or a folder with ``data.mdb``           one input, in the order of names
========  ==========================================================  ==================================

A single file with another name is known by its first bytes. A folder that holds none of these is a folder of objects,
which :func:`cachetool.sources.open_source` reads.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, cast

from cachetool.core.errors import UsageError
from cachetool.sources.joined import JoinedFiles
from cachetool.sources.limits import is_lmdb
from cachetool.sources.readers import FileOptions, FileSource, RandomAccess, reading

__all__ = [
    "FileOptions",
    "FileSource",
    "Kind",
    "file_kind",
    "is_file_input",
    "kind_of_name",
    "kind_of_names",
    "open_files",
]

Kind = Literal["npy", "npz", "hdf5", "zarr", "tar", "tfrecord", "lmdb"]

_NAMES: dict[Kind, re.Pattern[str]] = {
    "npy": re.compile(r"\.npy\Z"),
    "npz": re.compile(r"\.npz\Z"),
    "hdf5": re.compile(r"\.(h5|hdf5|hdf|he5)\Z"),
    "tar": re.compile(r"\.(tar|tar\.gz|tgz)\Z"),
    "tfrecord": re.compile(r"\.tfrec(ords?)?(\.gz)?(-\d+-of-\d+)?(\.gz)?\Z"),
    "lmdb": re.compile(r"\.(lmdb|mdb)\Z"),
}
_GUARDED = ("hdf5", "zarr", "lmdb")
_PART = re.compile(r"-\d{5,}-of-\d{5,}\Z")
_ZARR = ("zarr.json", ".zarray", ".zgroup")
_LMDB = "data.mdb"
_HEAD = 512


def open_files(path: str | Path, options: FileOptions | None = None) -> FileSource:
    """The samples of a file, or of a folder of files of one kind.

    HDF5, Zarr and LMDB are read by a process of their own, which ends at ``close``. Raises :class:`UsageError` for what
    is no such file, and the errors of each kind: :class:`BadObject` for a damaged or hostile file, :class:`NotFound`,
    :class:`AccessDenied`.
    """
    path, options = Path(path), options or FileOptions()
    kind = _checked_kind(path, options)
    source: FileSource
    if kind in _GUARDED:
        from cachetool.sources.guard import GuardedFile

        source = GuardedFile(path, options)
    else:
        source = _open(path, options, lambda at: None)
    if options.decode == "image" and kind != "tar":
        from cachetool.sources.images import decoded

        source = decoded(source, options.resize)
    return source


def open_here(path: Path, options: FileOptions, *, notice: Callable[[Path], None]) -> RandomAccess:
    """As :func:`open_files`, in this process, for the kinds that need one of their own.

    ``notice`` is told which file is touched next.
    """
    if _checked_kind(path, options) not in _GUARDED:
        raise UsageError(f"{path} needs no process of its own")
    return cast(RandomAccess, _open(path, options, notice))


def _checked_kind(path: Path, options: FileOptions) -> Kind:
    kind = file_kind(path)
    if kind is None:
        raise UsageError(
            f"{path} is not a file of samples: give .npy, .npz, .h5, .zarr, .tar, .tfrecord or .lmdb, a folder of one"
            " kind of them, or a folder of objects"
        )
    if options.value_format is not None and kind != "lmdb":
        raise UsageError(f"--value-format is for lmdb files; {path} is {kind}")
    return kind


def file_kind(path: Path) -> Kind | None:
    """What ``path`` holds; None for a folder of objects, and for a file of no known kind.

    Raises :class:`NotFound`, and :class:`UsageError` for a folder that holds files of several kinds.
    """
    with reading(str(path)):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # nobody may ever write into a pipe
            raise UsageError(f"{path} is a device, a pipe or a socket; name a file or a folder")
        if not path.is_dir():
            return kind_of_name(path.name) or _by_content(path)
        if (kind := _folder_kind(path)) is not None:
            return kind
        kinds = {_entry_kind(entry) for entry in _entries(path)} - {None, "npy", "npz"}
    if len(kinds) > 1:
        raise UsageError(f"{path} holds {' and '.join(sorted(map(str, kinds)))} files; give one of them")
    return kinds.pop() if kinds else None


def is_file_input(path: Path) -> bool:
    """Whether :func:`open_files` is what reads ``path``: all but a folder of objects. Raises as :func:`file_kind`."""
    return not path.is_dir() or file_kind(path) is not None


def _is_one(path: Path) -> bool:
    return not path.is_dir() or _folder_kind(path) is not None


def _folder_kind(path: Path) -> Kind | None:
    """The kind of a folder that is one file of samples to its library."""
    if (path / _LMDB).is_file():
        return "lmdb"
    return "zarr" if any((path / name).is_file() for name in _ZARR) else None


def _entries(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(folder / entry.name for entry in entries if not entry.name.startswith("."))


def _entry_kind(entry: Path) -> Kind | None:
    return _folder_kind(entry) if entry.is_dir() else kind_of_name(entry.name)


def kind_of_names(keys: Iterable[str]) -> tuple[dict[str, Kind], bool]:
    """What a folder holds, by the keys below it, before it is fetched: its entries that are files of many samples, and
    whether the folder itself is one."""
    kinds: dict[str, Kind] = {}
    for key in keys:
        top, slash, below = key.partition("/")
        if not slash and (top == _LMDB or top in _ZARR):
            return {}, True
        kind = kind_of_name(top) if not slash else "lmdb" if below == _LMDB else "zarr" if below in _ZARR else None
        if kind not in (None, "npy", "npz"):
            kinds[top] = kind
    return kinds, False


def kind_of_name(name: str) -> Kind | None:
    """The kind that a file's name tells."""
    for kind, pattern in _NAMES.items():
        if pattern.search(name.lower()):
            return kind
    return "tfrecord" if _PART.search(name) else None


def _by_content(path: Path) -> Kind | None:
    from cachetool.sources.tfrecord import is_tfrecord

    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head[257:262] == b"ustar":
        return "tar"
    if is_lmdb(head):
        return "lmdb"
    return "tfrecord" if is_tfrecord(head[:12]) else None


def _members(path: Path, kind: Kind) -> tuple[list[Path], list[tuple[str, str]]]:
    """The files of one kind in a folder, and what else lies there."""
    entries = _entries(path)
    files = [entry for entry in entries if _entry_kind(entry) == kind]
    return files, [(entry.name, f"not {kind}") for entry in entries if entry not in set(files)]


def _open(path: Path, options: FileOptions, notice: Callable[[Path], None]) -> FileSource:
    kind = _checked_kind(path, options)
    files, others = ([path], []) if _is_one(path) else _members(path, kind)
    source: FileSource
    if kind == "tar":
        from cachetool.sources.tar import TarFiles

        source = TarFiles(path, files, options)
    elif kind == "tfrecord":
        from cachetool.sources.tfrecord import TFRecordFiles

        source = TFRecordFiles(path, files, options)
    elif len(files) == 1:
        notice(files[0])
        source = _open_one(kind, files[0], options)
    else:
        source = JoinedFiles(path, files, lambda file: _open_one(kind, file, options), notice)
    source.skipped = (*others, *source.skipped)
    return source


def _open_one(kind: Kind, file: Path, options: FileOptions) -> RandomAccess:
    if kind == "npy":
        from cachetool.sources.numpy import open_npy

        return open_npy(file, options)
    if kind == "npz":
        from cachetool.sources.numpy import open_npz

        return open_npz(file, options)
    if kind == "hdf5":
        from cachetool.sources.hdf5 import open_hdf5

        return open_hdf5(file, options)
    if kind == "zarr":
        from cachetool.sources.zarr import open_zarr

        return open_zarr(file, options)
    from cachetool.sources.lmdb import LMDBFile
    from cachetool.sources.ours import our_lmdb

    return our_lmdb(file, options) or LMDBFile(file, options)
