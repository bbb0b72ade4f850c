"""The objects of a Zarr at a place that can be read but not listed: a bucket without the right to list, or a web server
without an index.

The metadata name the arrays, and the shape of an array names its chunks. Each of these keys is asked for, so the result
is the same as that of a listing: sizes, ETags, and which chunks were never written. The metadata are those of one array
(``zarr.json``, ``.zarray``), or the consolidated metadata of a group (``zarr.json``, ``.zmetadata``).
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
from cachetool.stores.base import Batch

__all__ = ["keys_of_zarr", "without_mark"]

_MARKS = (".zmetadata", "zarr.json", ".zarray")
_NAMED = (*_MARKS, ".zgroup")
_MAX_METADATA = 64 * 2**20
MOST = 2**20
"""Most chunks that are asked for one by one."""
_PAGE = 1000


def without_mark(url: str) -> str:
    """Return the URL of a Zarr's folder if ``url`` names a file of metadata in it; otherwise ``url``."""
    place, mark, query = url.partition("?") if split_url(url)[0] in ("http", "https") else (url, "", "")
    folder, slash, name = place.rpartition("/")
    return f"{folder}{mark}{query}" if slash and name in _NAMED else url


def keys_of_zarr(store: Store, options: SourceOptions) -> Iterator[Batch] | None:
    """Yield all objects of the Zarr at a store that cannot list them, in pages; return None if there is no Zarr.

    Raises :class:`UsageError` for a group that names no arrays, :class:`BadObject` for damaged metadata.
    """
    for mark in _MARKS:
        try:
            item = store.find(mark)
            # A server may serve an endless body under this name, so the metadata are fetched only when their size is
            # known.
            if not 0 <= item.size <= _MAX_METADATA:
                continue
            raw = bytes(store.get(item))
        except Unreachable:
            # A store that is away must not look like one without a Zarr.
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
                "give the URL of one array of the group, or ask its owner to run zarr.consolidate_metadata()"
            )
        return _pages(store, [item], arrays, options)
    return None


def _arrays(about: Mapping[str, Any], mark: str) -> dict[str, Mapping[str, Any] | None] | None:
    """Return the metadata of each array by key, and None for those of groups; return None for a group that names
    nothing."""
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
    """Return the last part of a key."""
    return key.rpartition("/")[2]


def _pages(
    store: Store, first: list[Object], arrays: Mapping[str, Mapping[str, Any] | None], options: SourceOptions
) -> Iterator[Batch]:
    """Yield the objects of the metadata, then those of the chunks, in pages."""
    asked = {item.key: item for item in first}

    def ask(key: str, stop: threading.Event) -> Object | None:
        try:
            return asked.get(key) or store.find(key)
        except NotFound:
            # A chunk that was never written does not exist; zarr reads it as fill values.
            return None
        except AccessDenied as error:
            raise AccessDenied(
                f"{error};\na store that does not let you list its names may also deny access to chunks that were never"
                " written"
            ) from error

    keys = list(arrays)
    fetcher: Fetcher[str, Object | None] = Fetcher(ask, store.concurrency)
    try:
        metadata = list(fetcher.run(keys, ahead=len(keys), size=lambda _: 1))
        # Attributes are optional. Any other metadata that the group names must exist, or an array would silently be
        # missing.
        for key, item in zip(keys, metadata, strict=True):
            if item is None and _name(key) != ".zattrs":
                raise NotFound(f"{store.url}: {key!r} is missing, but its group names it")
        yield [item for item in metadata if item is not None]
        chunks = _chunks(store, arrays, options)
        while batch := list(itertools.islice(chunks, _PAGE)):
            yield [item for item in fetcher.run(batch, ahead=_PAGE, size=lambda _: 1) if item is not None]
    finally:
        fetcher.close()


def _chunks(store: Store, arrays: Mapping[str, Mapping[str, Any] | None], options: SourceOptions) -> Iterator[str]:
    """Yield the keys of all chunks of the arrays that are wanted."""
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
        # Each chunk costs a request, and a few bytes of metadata can claim any number of chunks.
        if count > MOST:
            raise UsageError(
                f"{store.url} cannot be listed, and its arrays have more than {MOST} chunks, each of which needs a"
                " request; choose fewer arrays with --fields"
            )
        for at in itertools.product(*map(range, counts)):
            name = separator.join(map(str, at))
            name = f"{prefix}{separator}{name}" if prefix and name else prefix or name or "0"
            yield f"{folder}/{name}" if folder else name


def _grid(about: Mapping[str, Any]) -> tuple[list[int], str, str]:
    """Return the number of chunks in each dimension, the prefix of a chunk's key, and the separator of its numbers."""
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
