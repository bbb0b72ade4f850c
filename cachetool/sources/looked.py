"""A file with the bytes of the samples that were read for the schema. The workers that draw these samples first take
the bytes from the file instead of fetching them again.

::

The file lies in the pull's folder for temporary files, outside the cache, and takes at most :data:`MOST` bytes.
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
"""Most bytes that are kept. Objects beyond that are fetched again."""

_Place = tuple[int, int, int]
"""First byte in the object, number of bytes, first byte in the file."""


class LookedAt:
    """Bytes that one process keeps in the folder ``path``, for other processes."""

    def __init__(self, path: Path) -> None:
        """Create and read nothing yet."""
        self._bodies, self._places = path / "bodies", path / "places"

    def kept_of(self, store: Store) -> Store:
        """Return ``store``; from now on the bytes that it returns are kept."""
        # Without space for temporary files nothing is kept, and the workers fetch everything again.
        with contextlib.suppress(OSError):
            make_folder(self._bodies.parent)
            return _Keeping(store, self._bodies, self._places)
        return store

    def over(self, store: Store) -> Store:
        """Return ``store``, but bytes that were kept come from the file, each part once."""
        places: dict[Object, list[_Place]] = {}
        # The lister may have been killed in the middle of a line, or kept nothing. What cannot be read is fetched
        # again.
        with contextlib.suppress(OSError, ValueError, TypeError), self._places.open(encoding="utf-8") as lines:
            for line in lines:
                key, size, etag, start, length, at = json.loads(line)
                places.setdefault(Object(key, size, etag), []).append((start, length, at))
        return _Giving(store, self._bodies, places) if places else store


class _Keeping(StoreAround):
    """The store of the process that lists the source and reads samples for the schema."""

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
        # Without an ETag another part may come from a newer version of the object, and the mixture would not be
        # noticed.
        if item.etag is not None:
            self._keep(item, start, body)
        return body

    def _keep(self, item: Object, start: int, body: memoryview) -> None:
        # Several threads fetch at once. OSError: the disk is full. ValueError: the file was closed after an error.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._written + len(body) > MOST:
                return
            bodies, places = self._files
            at = bodies.tell()
            bodies.write(body)
            # The bytes are flushed before the line that names them, so a line never names bytes that are not in the
            # file.
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
