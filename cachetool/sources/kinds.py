"""Whether a place is a folder of objects, each one sample, or files of many samples; and of which kind.

::

    a URL that ends in .npy .h5 .zarr .tar .tfrecord .lmdb .parquet    that one file: its samples
    a folder, all of it files of one of these kinds                    the files together, numbered as one source
      but of .npy files                                                objects: each is one sample (--read-as files)
    any other folder                                                   objects (--read-as files: those of one kind)

Files that only describe others (``.idx``, ``.index``, checksums, ``README.md``, names without an extension) do not
count, nor what ``cachetool convert --out`` writes beside its files: ``dataset.json`` and ``.extents``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import unquote

from cachetool.core.errors import AccessDenied, UsageError
from cachetool.sources.keys import Part, Stem
from cachetool.stores import Object, redact, split_url
from cachetool.stores.redact import printable

__all__ = ["OURS", "Census", "EachFile", "Kind", "kind_of", "locate"]

Kind = Literal["npy", "hdf5", "zarr", "parquet", "tar", "tfrecord", "lmdb"]

_EXTENSIONS: dict[str, Kind] = {
    "npy": "npy",
    **dict.fromkeys(("h5", "hdf5", "hdf", "he5"), "hdf5"),
    **dict.fromkeys(("parquet", "parq"), "parquet"),
    **dict.fromkeys(("tar", "tgz"), "tar"),
    **dict.fromkeys(("tfrecord", "tfrecords", "tfrec"), "tfrecord"),
    **dict.fromkeys(("lmdb", "mdb"), "lmdb"),
    "zarr": "zarr",
}
_PART = re.compile(r"\.tfrec(ords?)?(\.gz)?-\d+-of-\d+(\.gz)?\Z|-\d{5,}-of-\d{5,}\Z")
_ASIDE = frozenset({"idx", "index", "tfindex", "md", "md5", "sha256", "crc", "rst", "yaml", "yml", "lock"})
OURS, _EXTENTS = "dataset.json", ".extents"
_ZARR_METADATA = ("zarr.json", ".zarray", ".zgroup")


def kind_of(name: str) -> Kind | None:
    """What a file of this name holds, if it holds many samples."""
    name = name.lower()
    if _PART.search(name):
        return "tfrecord"
    stem, _, extension = name.rpartition(".")
    if extension == "gz":
        extension = {"tar": "tgz", "tfrecord": "tfrecord", "tfrecords": "tfrecord"}.get(stem.rpartition(".")[2], "")
    return _EXTENSIONS.get(extension) if stem else None


def locate(url: str) -> tuple[str, str, Kind] | None:
    """For a URL or path of one file: that of its folder, its name there, and its kind; else None.

    Raises :class:`AccessDenied` for a path that this user may not look at.
    """
    if "://" not in url:
        try:
            return _local(Path(url))
        except PermissionError as error:
            raise AccessDenied(f"{printable(url)!r}: permission denied") from error
    place, mark, query = url.partition("?")
    folder, slash, name = place.rpartition("/")
    kind = kind_of(name)
    if not slash or folder.endswith("/") or kind in (None, "zarr"):
        return None
    if split_url(url)[0] in ("http", "https", "file", "sftp"):
        name = unquote(name, errors="surrogateescape")
    assert kind is not None
    return f"{folder}/{mark}{query}", name, kind


def _local(path: Path) -> tuple[str, str, Kind] | None:
    kind = kind_of(path.name)
    if path.is_dir() and (path / "data.mdb").is_file():
        return str(path), "data.mdb", "lmdb"
    return (str(path.parent), path.name, kind) if kind and kind != "zarr" and path.is_file() else None


class Census:
    """Counts what lies in a place while its listing passes by."""

    def __init__(self, url: str) -> None:
        self.url = redact(url)
        self._kinds: Counter[Kind | None] = Counter()
        self._root = False

    def count(self, pages: Iterable[list[Object]]) -> Iterator[list[Object]]:
        """The pages, as they are."""
        for page in pages:
            for item in page:
                self._count(item.key)
            yield page

    def _count(self, key: str) -> None:
        folder, _, name = key.rpartition("/")
        if key == OURS or folder.partition("/")[0] == _EXTENTS:
            return
        if name in _ZARR_METADATA and not folder:
            self._root = True
        elif any(part.lower().endswith(".zarr") for part in folder.split("/")):
            self._kinds["zarr"] += 1
        elif kind := kind_of(name):
            self._kinds[kind] += 1
        elif not name.startswith(".") and "." in name and name.rpartition(".")[2].lower() not in _ASIDE:
            self._kinds[None] += 1

    def kind(self, read_as: str | None) -> Kind | None:
        """The kind of files that the place consists of; None for a folder of objects.

        Raises :class:`UsageError` when files are asked for and there are none, or several kinds.
        """
        if read_as == "objects":
            return None
        if self._root:
            return "zarr"
        kinds = [kind for kind in self._kinds if kind is not None]
        if read_as == "files":
            if len(kinds) != 1:
                there = f"files of {len(kinds)} kinds ({', '.join(sorted(kinds))})" if kinds else "none"
                raise UsageError(
                    f"--read-as files: under {self.url} there are {there} that hold many samples; known are"
                    f" {', '.join(get_args(Kind))}"
                )
            return kinds[0]
        return kinds[0] if list(self._kinds) == kinds and len(kinds) == 1 and kinds[0] != "npy" else None


class EachFile(Stem):
    """The grouping of a listing of files: each object is a group of its own, those of other kinds are left out."""

    def __init__(self, kind: Kind) -> None:
        self.rule = f"files:{kind}"
        self._kind = kind

    def split(self, key: str) -> Part | str:
        """The file, or why it is none."""
        name = key.rpartition("/")[2]
        if self._kind != "zarr" and name.startswith("."):
            return "hidden"
        if self._kind != "zarr" and kind_of(name) != self._kind:
            return f"no {self._kind} files"
        return Part(key, "", "bytes")
