"""Single LMDB files outside any cache: shards written by cachetool, and foreign files as keys and raw values."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats.files import map_file
from cachetool.formats.runs import Int64s, ends
from cachetool.loaders.read.gather import OpenPart, Runs
from cachetool.loaders.snapshots.plain_files import FileSubscription
from cachetool.loaders.view import ShardFile, View

__all__ = ["RAW", "is_lmdb", "only_lmdb", "open_foreign", "subscribe_file"]

RAW = Schema((Field("key", "bytes"), Field("value", "bytes")))
"""The schema of the samples of a foreign file."""
_FOREIGN = "lmdb, raw"


def is_lmdb(path: Path) -> bool:
    """Return True if ``path`` is a file, or a folder as LMDB makes it by default."""
    return os.path.isfile(path) or os.path.isfile(path / "data.mdb")


def subscribe_file(path: Path, *, value_format: str | None) -> FileSubscription:
    """Return the samples of the LMDB file at ``path``, in key order.

    Raises :class:`UsageError` for a foreign file without ``value_format="raw"``.
    """
    if value_format not in (None, "raw"):
        raise UsageError(f"value_format={value_format!r} is unknown; use 'raw', which gives the bytes of each value")
    file = (path / "data.mdb" if path.is_dir() else path).absolute()
    schema, samples = _look(file, foreign=value_format is not None)
    kind = "lmdb" if value_format is None else _FOREIGN
    part = ShardFile(file.name, kind, samples, "", str(file.parent), file.name)
    return FileSubscription(schema, (part,))


def _look(file: Path, *, foreign: bool) -> tuple[Schema, int]:
    """Return the schema and the number of samples."""
    from cachetool.formats.lmdb import is_ours, named_databases, open_environment, read_header

    if not foreign:
        # A file that should be ours is first read as plain pages. LMDB follows pointers in a
        # damaged file and dies of it, so it opens the file only after every pointer was found to
        # stay inside.
        buffer = map_file(file)
        if not is_ours(buffer):
            raise UsageError(
                f"{file} was not written by cachetool; use value_format='raw' to read its keys and raw values"
            )
        samples, schema = read_header(buffer, name=str(file))
        return schema, samples
    environment = open_environment(file)
    try:
        if names := named_databases(environment):
            raise UsageError(
                f"{file} holds named databases ({', '.join(names)[:200]}), but value_format='raw' reads only the"
                " unnamed database;\nconvert the values to samples first, then use DIR: cachetool convert"
                f" {shlex.quote(str(file))} --to lmdb --out DIR"
            )
        with environment.env.begin() as txn:
            return RAW, int(txn.stat()["entries"])
    finally:
        environment.close()


def only_lmdb(view: View) -> None:
    """Raise :class:`UsageError`, which names the formats, if a shard of the view cannot be read by py-lmdb."""
    others = sorted({part.format for part in view.parts} - {"lmdb", _FOREIGN})
    if others:
        raise UsageError(
            f"dataset {view.dataset!r} has shards in {', '.join(others)}, but LMDBDataset reads only lmdb;"
            f" use CacheDataset, or run: {view.conversion('lmdb')}"
        )


def open_foreign(part: ShardFile, schema: Schema) -> OpenPart:
    """Open a foreign file through py-lmdb."""
    return _ForeignPart(part.folder / part.file)


class _ForeignPart:
    """The keys and values of a foreign file. The keys are read once; sample i is the i-th key."""

    def __init__(self, file: Path) -> None:
        from cachetool.formats.lmdb import open_environment

        self._environment: Any = open_environment(file)
        with self._environment.env.begin() as txn, txn.cursor() as cursor:
            # LMDB finds a value by its key, not by its number, so the order of the keys must be
            # known here.
            keys = list(cursor.iternext(keys=True, values=False))
        # One bytes object and an array of offsets: lists of millions of keys and numbers would take several times their
        # bytes, in each worker.
        self._starts = ends(np.fromiter(map(len, keys), dtype=np.int64, count=len(keys)))
        self._keys = b"".join(keys)

    def locate(self, within: Int64s, schema: Schema) -> Mapping[str, Runs]:
        bounds = zip(self._starts[within].tolist(), self._starts[within + 1].tolist(), strict=True)
        keys = [self._keys[start:stop] for start, stop in bounds]
        columns = {"key": _joined(keys)}
        if "value" in schema:
            # buffers=True: the values are views of the map, which only the join copies. They end with the transaction.
            with self._environment.env.begin(buffers=True) as txn:
                columns["value"] = _joined([txn.get(key) for key in keys])
        return {name: columns[name] for name in schema.names}

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()


def _joined(values: Sequence[bytes | memoryview]) -> Runs:
    starts = ends(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
    return Runs(np.frombuffer(b"".join(values), dtype=np.uint8), starts[:-1], np.diff(starts), None)
