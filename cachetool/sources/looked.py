"""The bytes of the samples that were looked at for the schema, kept in a file for the workers that draw these first.

::

    lister   get(object) from the store --> LookedAt.kept_of(store)     bodies, and a line for each in `places`
    workers  LookedAt.over(store): get(object) from the file, once, else from the store

The file lies in the pull's folder for temporary files, outside the cache, and takes no more than :data:`MOST`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from cachetool.proc.folders import make_folder, new_file
from cachetool.stores import Object, Store
from cachetool.stores.base import StoreAround

__all__ = ["LookedAt"]

MOST = 64 * 2**20
"""Bytes that are kept; what was looked at beyond is fetched again."""

_Place = tuple[int, int, int]
"""First byte in the object, length, first byte in the file."""


class LookedAt:
    """What one process kept in the folder at ``path``, and others take from there."""

    def __init__(self, path: Path) -> None:
        """Nothing is made or read yet."""
        self._bodies, self._places = path / "bodies", path / "places"

    def kept_of(self, store: Store) -> Store:
        """``store``, of which what comes is kept from now on."""
        with contextlib.suppress(OSError):  # no room for temporary files: it is fetched again
            make_folder(self._bodies.parent)
            return _Keeping(store, self._bodies, self._places)
        return store

    def over(self, store: Store) -> Store:
        """``store``, but what was kept comes from here, each part once."""
        places: dict[Object, list[_Place]] = {}
        with contextlib.suppress(OSError, ValueError, TypeError), self._places.open(encoding="utf-8") as lines:
            for line in lines:
                key, size, etag, start, length, at = json.loads(line)
                places.setdefault(Object(key, size, etag), []).append((start, length, at))
        return _Giving(store, self._bodies, places) if places else store


class _Keeping(StoreAround):
    """The store of who looks first."""

    def __init__(self, store: Store, bodies: Path, places: Path) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._files = [new_file(path) for path in (bodies, places)]
        self._written = 0

    def get(self, item: Object) -> memoryview:
        body = self._store.get(item)
        self._keep(item, 0, body)
        return body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        body = self._store.get_range(item, start, length)
        if item.etag is not None:  # else a later part may be of another version, and nobody would notice
            self._keep(item, start, body)
        return body

    def _keep(self, item: Object, start: int, body: memoryview) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # no room, or closed
            if self._written + len(body) > MOST:
                return
            bodies, places = self._files
            at = bodies.tell()
            bodies.write(body)
            bodies.flush()
            place = [item.key, item.size, item.etag, start, len(body), at]
            places.write(json.dumps(place).encode() + b"\n")
            places.flush()
            self._written += len(body)

    def close(self) -> None:
        self._store.close()
        with self._lock:
            for file in self._files:
                with contextlib.suppress(OSError):
                    file.close()


class _Giving(StoreAround):
    """The store of a worker."""

    def __init__(self, store: Store, bodies: Path, places: dict[Object, list[_Place]]) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._bodies, self._places = bodies, places

    def get(self, item: Object) -> memoryview:
        body = self._kept(item, 0, None)
        return self._store.get(item) if body is None else body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        body = self._kept(item, start, length) if item.etag is not None else None
        return self._store.get_range(item, start, length) if body is None else body

    def _kept(self, item: Object, start: int, length: int | None) -> memoryview | None:
        with self._lock:
            places = self._places.get(item, [])
            for place in places:
                first, count, at = place
                complete = first == 0 and item.size in (-1, count)
                if complete if length is None else first <= start and start + length <= first + count:
                    if length is None or (first, count) == (start, length):
                        places.remove(place)
                    break
            else:
                return None
        want = count if length is None else length
        try:
            with self._bodies.open("rb", buffering=0) as file:
                body = os.pread(file.fileno(), want, at + start - first)
        except OSError:
            return None
        return memoryview(body) if len(body) == want else None
