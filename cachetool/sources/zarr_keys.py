"""The objects of a Zarr at a place that may be read and not be listed: a bucket without the right to list, a web server
without an index.

Its metadata name the arrays, and the shape of an array names its chunks; each of these keys is asked for, so that what
comes is what a listing would say: sizes, ETags, and which chunks were never written. The metadata are those of one
array (``zarr.json``, ``.zarray``), or of a group that were consolidated (``zarr.json``, ``.zmetadata``).
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, Unreachable, UsageError
from cachetool.sources.fetch import Fetcher
from cachetool.sources.options import SourceOptions
from cachetool.stores import Object, Store, split_url

__all__ = ["keys_of_zarr", "without_mark"]

_MARKS = (".zmetadata", "zarr.json", ".zarray")
_NAMED = (*_MARKS, ".zgroup")
_MAX_METADATA = 64 * 2**20
MOST = 2**20
"""Chunks that are asked for, one by one."""
_PAGE = 1000


def without_mark(url: str) -> str:
    """The URL of the folder of a Zarr where ``url`` names a file of metadata in it; else ``url``."""
    place, mark, query = url.partition("?") if split_url(url)[0] in ("http", "https") else (url, "", "")
    folder, slash, name = place.rpartition("/")
    return f"{folder}{mark}{query}" if slash and name in _NAMED else url


def keys_of_zarr(store: Store, options: SourceOptions) -> Iterator[list[Object]] | None:
    """All objects of the Zarr at a store that does not list them, in pages; None where no Zarr lies.

    Raises :class:`UsageError` for a group that names no arrays, :class:`BadObject` for damaged metadata.
    """
    for mark in _MARKS:
        try:
            item = store.find(mark)
            if not 0 <= item.size <= _MAX_METADATA:
                continue
            raw = bytes(store.get(item))
        except Unreachable:
            raise
        except SourceError:
            continue
        try:
            about = json.loads(raw)
            arrays = _arrays(about, mark)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadObject(f"{store.url}: {mark!r} is not the metadata of a Zarr") from error
        if arrays is None:
            raise UsageError(
                f"{store.url} cannot be listed, and the metadata of its group are not consolidated;\n"
                "name one array of the group, or have its owner run zarr.consolidate_metadata()"
            )
        return _pages(store, [item], arrays, options)
    return None


def _arrays(about: Mapping[str, Any], mark: str) -> dict[str, Mapping[str, Any] | None] | None:
    """By key the metadata of each array, and None for those of groups; None for a group that names nothing."""
    if mark == ".zarray":
        return {mark: about}
    if mark == ".zmetadata":
        return {str(key): value if _name(key) == ".zarray" else None for key, value in about["metadata"].items()}
    if about["node_type"] == "array":
        return {mark: about}
    if not (consolidated := about.get("consolidated_metadata")):
        return None
    nodes = {f"{path}/{mark}": node for path, node in consolidated["metadata"].items()}
    return {key: node if node["node_type"] == "array" else None for key, node in nodes.items()} | {mark: None}


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _pages(
    store: Store, first: list[Object], arrays: Mapping[str, Mapping[str, Any] | None], options: SourceOptions
) -> Iterator[list[Object]]:
    asked = {item.key: item for item in first}

    def ask(key: str, stop: threading.Event) -> Object | None:
        try:
            return asked.get(key) or store.find(key)
        except NotFound:
            return None  # never written
        except AccessDenied as error:
            raise AccessDenied(
                f"{error};\nwithout the right to list, some stores do not tell a chunk that was never written from one"
                " that may not be read"
            ) from error

    keys = list(arrays)
    fetcher: Fetcher[str, Object | None] = Fetcher(ask, store.concurrency)
    try:
        metadata = list(fetcher.run(keys, ahead=len(keys), size=lambda _: 1))
        # Attributes need not be there.
        for key, item in zip(keys, metadata, strict=True):
            if item is None and _name(key) != ".zattrs":
                raise NotFound(f"{store.url}: {key!r} is not there, though its group names it")
        yield [item for item in metadata if item is not None]
        chunks = _chunks(store, arrays, options)
        while batch := list(itertools.islice(chunks, _PAGE)):
            yield [item for item in fetcher.run(batch, ahead=_PAGE, size=lambda _: 1) if item is not None]
    finally:
        fetcher.close()


def _chunks(store: Store, arrays: Mapping[str, Mapping[str, Any] | None], options: SourceOptions) -> Iterator[str]:
    """The keys of all chunks of the arrays that are wanted."""
    count = 0
    for key, about in arrays.items():
        folder = key.rpartition("/")[0]
        if about is None or (folder and not options.wants(folder)):
            continue
        try:
            counts, prefix, separator = _grid(about)
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise BadObject(f"{store.url}: {key!r} is not the metadata of an array") from error
        count += math.prod(counts)
        if count > MOST:
            raise UsageError(
                f"{store.url} cannot be listed, and its arrays have more than {MOST} chunks, which would be asked for"
                " one by one; choose arrays with --fields"
            )
        for at in itertools.product(*map(range, counts)):
            name = separator.join(map(str, at))
            name = f"{prefix}{separator}{name}" if prefix and name else prefix or name or "0"
            yield f"{folder}/{name}" if folder else name


def _grid(about: Mapping[str, Any]) -> tuple[list[int], str, str]:
    """Chunks in each dimension; what begins the key of a chunk, and what separates its numbers."""
    shape = [int(side) for side in about["shape"]]
    if about["zarr_format"] == 2:
        chunks, prefix, separator = about["chunks"], "", about.get("dimension_separator", ".")
    else:
        chunks = about["chunk_grid"]["configuration"]["chunk_shape"]
        encoding = about["chunk_key_encoding"]
        settings, is_default = encoding.get("configuration") or {}, encoding["name"] == "default"
        prefix, separator = "c" if is_default else "", settings.get("separator", "/" if is_default else ".")
    if len(chunks) != len(shape) or min(shape, default=0) < 0 or separator not in (".", "/"):
        raise ValueError("no grid of chunks")
    return [-(-side // max(1, int(chunk))) for side, chunk in zip(shape, chunks, strict=True)], prefix, separator
