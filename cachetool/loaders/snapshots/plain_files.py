"""Shards outside any cache: folders that ``cachetool convert --out`` wrote, single files of them, folders of shards.

::

    DIR                   all parts that DIR/dataset.json lists
    DIR/part-00003.h5     one of them
    shards/<id>           the shard of a cache or a copy of it: no lease keeps it there

They are read without a cache and never change. There is one view; nothing is leased and nothing is counted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cachetool.cache import CacheDir
from cachetool.cache.history import Delivered
from cachetool.cache.layout import SHARD_FILE, Layout, place_of, root_of
from cachetool.cache.marker import check
from cachetool.cache.records import read_shard_json
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Schema
from cachetool.core.text import shown
from cachetool.formats import get_format
from cachetool.formats.exported import DATASET_FILE, parse_dataset
from cachetool.loaders.view import ShardFile, View
from cachetool.proc.folders import read_json

__all__ = ["FileSubscription", "is_shards", "located", "shards_at"]


class FileSubscription:
    """A :class:`~cachetool.loaders.snapshots.follow.Subscription` of files: one view that never changes."""

    def __init__(self, schema: Schema, parts: tuple[ShardFile, ...]) -> None:
        self._view = View(1, "", schema, parts)

    def newest(
        self, *, epoch: int | None = None, peek: bool = False, sparing: bool = False, anew: bool = False,
        reads: Sequence[float] = (),
    ) -> View:  # fmt: skip
        """Return the view."""
        return self._view

    def share(self, other: object) -> None:
        """Do nothing: there is one view."""

    def now(self) -> View:
        """Return the view."""
        return self._view

    def at(self, version: int) -> View:
        """Return the view, whatever the version: there is no other."""
        return self._view

    @property
    def spared(self) -> bool:
        """Return False: no shard is left out."""
        return False

    def moved(self, view: View) -> bool:
        """Return False: the view never changes."""
        return False

    def served(self, delivered: Delivered | None = None, *, last: bool = False) -> None:
        """Do nothing: epochs of plain files are not counted."""

    def under_way(self, delivered: Delivered, *, epoch: int) -> None:
        """Do nothing: epochs of plain files are not counted."""

    def release(self, *, unread: bool = False) -> None:
        """Do nothing: nothing is leased."""

    def close(self) -> None:
        """Do nothing: nothing is leased."""


def is_shards(path: Path) -> bool:
    """Return True if the path names shards, and not a cache that exists or may be made there."""
    # os.path returns False where pathlib raises. A user who may not look into a cache is told so by
    # the code that opens it.
    return any(map(os.path.isfile, (path, path / DATASET_FILE, path / SHARD_FILE))) or _listed(path, {})


def located(
    cache_or_paths: CacheDir | str | Path | Sequence[str | Path], dataset: str | None
) -> tuple[Path, tuple[Path, ...]]:
    """Return the folder of a cache and no paths; or the first of the paths of shards, and all of them.

    A folder that is empty or does not exist yet is a cache's. Raises :class:`UsageError` for shards with a ``dataset``,
    and the errors of :func:`shards_at`.
    """
    if isinstance(cache_or_paths, CacheDir):
        return cache_or_paths.root, ()
    if isinstance(cache_or_paths, Mapping):
        raise UsageError(
            "a mixture of datasets needs cachetool.loaders.numpy.Loader or cachetool.loaders.torch.Loader; give one"
            " cache or folder here"
        )
    if isinstance(cache_or_paths, str | Path):
        path = place_of(root_of(cache_or_paths))
        if not is_shards(path):
            try:
                check(Layout(path))
            except UsageError as error:
                refused = error
            else:
                return path, ()
            # Looked at as shards first: its error says what the path is, which helps more than that
            # it is no cache.
            _look(path, {})
            raise refused
        cache_or_paths = [path]
    try:
        named = list(cache_or_paths)
    except TypeError:
        raise UsageError(
            f"{shown(cache_or_paths)} is not a cache; use an open cache, its folder, or a list of shards"
        ) from None
    paths = tuple(root_of(path).absolute() for path in named)
    shards_at(paths)
    if dataset is not None:
        raise UsageError(f"{paths[0]} is a folder of plain files, which hold one dataset; leave out dataset=")
    return paths[0], paths


def shards_at(paths: Sequence[str | Path]) -> FileSubscription:
    """Return all samples of the shards at these paths, in this order.

    Raises :class:`UsageError` for a path that is no shard, for a path that occurs twice, and for shards of different
    schemas; :class:`CorruptError` for a damaged ``dataset.json`` or ``shard.json``.
    """
    if not paths:
        raise UsageError("the list of shards is empty; name folders that cachetool convert --out wrote")
    schema: Schema | None = None
    parts: dict[str, ShardFile] = {}
    datasets: _Datasets = {}
    for path in (Path(name).absolute() for name in paths):
        path_schema, more = _look(path, datasets)
        if schema is not None and path_schema.is_reordered(schema):
            raise UsageError(
                f"{path} and {paths[0]} hold the same fields in different orders: {', '.join(path_schema.names)} and"
                f" {', '.join(schema.names)}; load each of them separately"
            )
        if schema is not None and path_schema != schema:
            raise UsageError(
                f"{path} and {paths[0]} hold different fields: {path_schema.describe()} and {schema.describe()};"
                " load each of them separately"
            )
        schema = path_schema
        for part in more:
            where = f"{part.where}/{part.file}" if part.file else part.where
            if where in parts:
                raise UsageError(f"{where} is listed twice; list it once")
            # Files of several folders may have the same name, so the whole path becomes the id.
            parts[where] = part if len(paths) == 1 else part._replace(id=where)
    assert schema is not None
    return FileSubscription(schema, tuple(parts.values()))


_Datasets = dict[Path, tuple[Schema, dict[str, ShardFile]]]
"""The contents of ``dataset.json`` by its folder, read once: the schema, and the parts by the names of their files."""


def _look(path: Path, datasets: _Datasets) -> tuple[Schema, Iterable[ShardFile]]:
    if (path / DATASET_FILE).is_file():
        return _dataset(path)
    if (path / SHARD_FILE).is_file():
        return _shard(path)
    if _listed(path, datasets):
        schema, parts = datasets[path.parent]
        return schema, [parts[path.name]]
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if Layout(path).marker.is_file():
        raise UsageError(f"{path} is a cache; give it alone, not in a list of shards")
    if path.is_dir():
        raise UsageError(
            f"{path} is neither a cache nor a shard; fill a cache from it with: cachetool pull"
            f" {shlex.quote(str(path))} --cache FOLDER"
        )
    raise UsageError(
        f"{path} is not a shard: neither {DATASET_FILE} nor {SHARD_FILE} lists it; convert it to shards with:"
        f" cachetool convert {shlex.quote(str(path))} --to lmdb --out FOLDER"
    )


def _listed(path: Path, datasets: _Datasets) -> bool:
    """Return True if the ``dataset.json`` beside this file lists it."""
    folder = path.parent.absolute()
    if folder not in datasets:
        if not os.path.exists(path) or not os.path.isfile(folder / DATASET_FILE):
            return False
        schema, parts = _dataset(folder)
        datasets[folder] = schema, {part.file: part for part in parts}
    return path.name in datasets[folder][1] and os.path.exists(path)


def _dataset(folder: Path) -> tuple[Schema, list[ShardFile]]:
    """Return the schema and the files of a folder that ``cachetool convert --out`` wrote."""
    with _reading(folder / DATASET_FILE) as about:
        dataset = parse_dataset(read_json(about, links=True))
        name = get_format(dataset.format).name
        files = [ShardFile(f.name, name, f.samples, f.content, str(folder), f.name) for f in dataset.files]
        return dataset.schema, files


def _shard(folder: Path) -> tuple[Schema, list[ShardFile]]:
    with _reading(folder / SHARD_FILE):
        value = read_shard_json(folder)
        name = get_format(value["format"]).name
        # A link that the user named is followed. Links inside a shard are not.
        where = folder.resolve() if folder.is_symlink() else folder
        part = ShardFile(value["id"], name, value["samples"], value["content"], str(where), digest=value["digest"])
        return Schema.from_json(value["schema"]), [part]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    # A damaged or hostile file can make the caller raise any of these errors. All of them become
    # one error that names the file.
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise CorruptError(f"{path} is damaged or was not written by cachetool: {error}") from error
