"""Stores of all other schemes, through fsspec if it is installed and knows the scheme."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from cachetool.core.errors import (
    AccessDenied,
    CacheToolError,
    MissingExtra,
    NotFound,
    SourceError,
    Unreachable,
    UsageError,
)
from cachetool.stores.base import SCHEMES, Object, Pages, check_length
from cachetool.stores.redact import redact, scrub, split_url

__all__ = ["FsspecStore", "open_fsspec_store"]

_BATCH = 1000
# These schemes wrap other URLs, or lead to files of this machine past the rules for links of stores/local.py.
_REFUSED = ("local", "file", "reference", "simplecache", "blockcache", "filecache", "cached", "dir", "data", "shell")


def open_fsspec_store(url: str) -> FsspecStore:
    """Open the store that fsspec has for the URL's scheme.

    Raises:
        UsageError: If nobody knows the scheme. The message names the known ones.
        MissingExtra: If a package that serves the scheme is not installed.
    """

    scheme, _ = split_url(url)
    try:
        # Imported here, because fsspec is optional.
        import fsspec
        from fsspec.registry import known_implementations, registry
    except ImportError:
        raise _unknown(scheme, SCHEMES, " (any other needs fsspec: pip install fsspec)") from None
    if "::" in url or scheme in _REFUSED or (scheme not in known_implementations and scheme not in registry):
        raise _unknown(scheme, SCHEMES, "; fsspec does not know this scheme either")
    place = redact(url)
    try:
        # The implementation's package is imported here, so a missing one shows as ImportError.
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(f"{place} needs a package that is not installed: {scrub(str(error))[:160]}") from None
    # Each implementation raises the errors of its own client, so no narrower class fits.
    except Exception as error:  # noqa: BLE001
        raise _ours(error, place) from None
    return FsspecStore(system, str(path), place)


def _unknown(scheme: str, schemes: tuple[str, ...], more: str) -> UsageError:
    return UsageError(f"unknown scheme '{scheme}://'; choose a path or one of {', '.join(schemes)}{more}")


class FsspecStore:
    """Files below one path of a file system of fsspec; see :class:`cachetool.stores.base.Store`.

    Made by :func:`open_fsspec_store`. ``system`` is an ``fsspec.AbstractFileSystem``, ``root`` a path in it.
    """

    concurrency = 8

    def __init__(self, system: Any, root: str, url: str) -> None:
        self._system, self._root, self.url = system, root.rstrip("/"), url
        self._pid = os.getpid()
        self._bare = False
        self._left_out: Counter[str] = Counter()

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts of the files that the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """Yield all files, in batches. fsspec itself lists them together."""
        self._refuse_fork()
        try:
            if not self._system.exists(self._root or "/"):
                raise NotFound(f"{self.url}: not found")
            entries = self._system.find(self._root, detail=True)
        except Exception as error:  # noqa: BLE001  # whatever the implementation's own client raises
            raise _ours(error, self.url) from None
        batch: list[Object] = []
        for path, info in entries.items():
            batch.append(_object(path.removeprefix(self._root).removeprefix("/"), info))
            if len(batch) == _BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def find(self, key: str) -> Object:
        """Return the file with this name below the path."""
        try:
            info = self._ask(self._system.info, key)
        except Exception as error:  # noqa: BLE001  # whatever the implementation's own client raises
            raise _ours(error, f"{self.url}: {key!r}") from None
        if info.get("type") == "directory":
            raise NotFound(f"{self.url}: {key!r} is not a file")
        return _object(key, info)

    def get(self, item: Object) -> memoryview:
        """Return the whole file. Only its length is compared, because fsspec returns no ETag with a body."""
        body = self._cat(item, {})
        if item.size >= 0:
            check_length(item, got=len(body), want=item.size)
        return memoryview(body)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``start``."""
        body = self._cat(item, {"start": start, "end": start + length})
        check_length(item, got=len(body), want=length)
        return memoryview(body)

    def _cat(self, item: Object, options: dict[str, int]) -> bytes:
        try:
            return bytes(self._ask(self._system.cat_file, item.key, **options))
        except FileNotFoundError:
            raise NotFound(f"{item.key!r} does not exist any more; it did when {self.url} was listed") from None
        except Exception as error:  # noqa: BLE001  # whatever the implementation's own client raises
            raise _ours(error, f"{self.url}: {item.key!r}") from None

    def _ask(self, call: Callable[..., Any], key: str, **options: int) -> Any:
        """Call a method of the file system with the path of ``key``."""
        self._refuse_fork()
        # In the root of all paths, some file systems begin a path with a slash and others do not. The first call finds
        # out; its answer is kept in _bare.
        if not self._bare:
            try:
                return call(f"{self._root}/{key}", **options)
            except FileNotFoundError:
                if self._root:
                    raise
        answer = call(key, **options)
        self._bare = True
        return answer

    def _refuse_fork(self) -> None:
        """Raise :class:`CacheToolError` in a child that was forked from the process which opened the store."""
        # The child shares the parent's connections and has none of its threads: answers would be mixed up, or the call
        # would hang.
        if self._pid != os.getpid():
            raise CacheToolError(
                f"{self.url}: this store cannot be used in a forked process; open it there, or start the process with"
                " 'spawn'"
            )

    def close(self) -> None:
        """Do nothing: fsspec owns the connections and keeps one file system for each address."""


def _object(key: str, info: Mapping[str, Any]) -> Object:
    size = info.get("size")
    etag = info.get("ETag") or info.get("etag") or info.get("mtime")
    return Object(key, -1 if size is None else int(size), str(etag).strip('"') if etag else None)


def _ours(error: Exception, place: str) -> CacheToolError:
    if isinstance(error, CacheToolError):
        return error
    said = scrub(str(error).strip().partition("\n")[0])[:160]
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{place}: not found")
    if isinstance(error, PermissionError) or "auth" in type(error).__name__.lower():
        return AccessDenied(f"{place}: access denied{f' ({said})' if said else ''}")
    if isinstance(error, ConnectionError | TimeoutError | OSError):
        # Any other OSError counts as a failing network, because implementations raise it for broken connections.
        return Unreachable(f"{place}: {said or type(error).__name__}")
    return SourceError(f"{place}: {type(error).__name__}: {said}")
