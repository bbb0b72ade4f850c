"""Remote files by number and by key, and the socket over which the guarded process reads parts of them.

:class:`Files` has the objects of a listing as files by number, and as objects by key. :class:`RangeServer` serves parts
of them to a process that has no way to the store: the guarded one, which a hostile file may command.

::

    sampler                                               guarded process
    RangeServer <- Unix socket in a private folder ->     Ranges (one connection)
       whole blocks of 64 KiB, kept                          RangeFile (what h5py reads)
       larger parts as they are asked for

The other side can ask for bytes of the files it was opened for, and nothing else. What the store raised is kept and
raised again here, so that an unreachable store is not taken for a damaged file::

    asked    {"spec": true} | {"part": [file, start, length]} | {"object": key}
             {"size": key} | {"part_of": [key, start, length]} | {"facts": {...}}                 a line of JSON
    answer   i64 bytes (-1: there is none, -2: it failed), then the bytes
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachetool.core.errors import CacheToolError
from cachetool.proc.scratch import scratch
from cachetool.sources.listing import Listing
from cachetool.stores import Object, Store
from cachetool.stores.base import Telling, check_identity

__all__ = ["Files", "RangeFile", "RangeServer", "Ranges", "Seen", "renamed"]


BLOCK = 64 * 2**10
"""Bytes that are fetched and kept when fewer are asked for."""
KEPT = 64 * 2**20
"""Bytes of blocks and of small objects that are kept."""
_SMALL = 2**20
"""An object up to this size is kept: it may hold values of many samples."""
_HEAD = struct.Struct("<q")
_LONG = 60
_ABSENT, _FAILED = -1, -2
_MAX_REQUEST = 2**27


class RangeServer:
    """Serves parts of ``files`` to one child after another, until it is closed."""

    def __init__(
        self,
        store: Store,
        files: Callable[[int], Object],
        spec: Mapping[str, Any],
        find: Callable[[str], Object | None],
    ) -> None:
        """``files(number)`` and ``find(key)`` say which objects these are; ``spec`` is told to the child."""
        self._store, self._files, self._spec, self._find = store, files, dict(spec), find
        self._kept: OrderedDict[Hashable, memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self.facts: list[dict[str, Any]] = []
        """What the child told."""
        self.given: list[tuple[int | str, int, int, memoryview]] = []
        """What was fetched beforehand for the samples that are read now: file or key, start, stop, bytes."""
        self.failure: CacheToolError | None = None
        """What the store raised last."""
        self.fetched = 0
        """Bytes that came over the wire."""
        # The name of a socket has room for about 100 bytes.
        place = tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONG else "/tmp"
        self._folder = contextlib.ExitStack()
        self.path = self._folder.enter_context(scratch(Path(place), "cachetool-ranges-")) / "ranges"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="ranges", daemon=True).start()

    def close(self) -> None:
        """Take no more connections. May be called twice."""
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._folder.close()

    def give(self, key: Hashable, body: memoryview) -> None:
        """Keep something that was fetched ahead."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = body
                self._kept_bytes += len(body)
            while self._kept_bytes > KEPT and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="range", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as asked, contextlib.suppress(OSError):
            while line := asked.readline(_MAX_REQUEST):
                try:
                    body = self._answer(json.loads(line))
                except CacheToolError as error:
                    self.failure = error
                    connection.sendall(_HEAD.pack(_FAILED))
                except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                    connection.sendall(_HEAD.pack(_FAILED))
                else:
                    connection.sendall(_HEAD.pack(_ABSENT if body is None else len(body)))
                    if body:
                        connection.sendall(body)

    def _answer(self, asked: Mapping[str, Any]) -> memoryview | bytes | None:
        if "spec" in asked:
            return json.dumps(self._spec).encode()
        if "facts" in asked:
            self.facts.append(dict(asked["facts"]))
            return b""
        if "object" in asked:
            key = str(asked["object"])
            item = self._find(key)
            return None if item is None else self._object(key, item)
        if "size" in asked:
            item = self._find(str(asked["size"]))
            return None if item is None else _HEAD.pack(item.size)
        if "part_of" in asked:
            key, start, length = asked["part_of"]
            item = self._find(str(key))
            return None if item is None else self._part(str(key), item, int(start), int(length))
        number, start, length = (int(value) for value in asked["part"])
        return self._part(number, self._files(number), start, length)

    def _object(self, key: str, item: Object) -> memoryview:
        for name, _, _, body in self.given:
            if name == key:
                return body
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        body = self._store.get(item)
        self.fetched += len(body)
        if len(body) <= _SMALL:
            self.give(key, body)
        return body

    def _part(self, number: int | str, item: Object, start: int, length: int) -> memoryview | bytes:
        stop = min(start + length, item.size)
        if start < 0 or stop <= start:
            return b""
        for name, first, last, body in self.given:
            if name == number and first <= start and stop <= last:
                return body[start - first : stop - first]
        if stop - start >= BLOCK:
            key = (number, start, stop)
            with self._lock:
                if (kept := self._kept.get(key)) is not None:
                    return kept
            body = self._store.get_range(item, start, stop - start)
            self.fetched += len(body)
            if len(body) <= _SMALL:
                self.give(key, body)
            return body
        parts = []
        for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
            first = block * BLOCK
            body = self._block(number, item, block)
            parts.append(body[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, number: int | str, item: Object, block: int) -> memoryview:
        key = (number, block)
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        first = block * BLOCK
        body = self._store.get_range(item, first, min(BLOCK, item.size - first))
        self.fetched += len(body)
        self.give(key, body)
        return body


class Ranges:
    """The other side, in the guarded process."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.fspath(path))
        self._answers = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self.spec: dict[str, Any] = json.loads(self._ask({"spec": True}) or b"null")

    def part(self, number: int, start: int, length: int) -> bytes:
        """Bytes of a file, fewer at its end."""
        return self._ask({"part": [number, start, length]}) or b""

    def object(self, key: str) -> bytes | None:
        """A whole object; None when it is not there."""
        return self._ask({"object": key})

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when it is not there."""
        answer = self._ask({"size": key})
        return None if answer is None else int(_HEAD.unpack(answer)[0])

    def part_of(self, key: str, start: int, length: int) -> bytes | None:
        """Bytes of an object; None when it is not there."""
        return self._ask({"part_of": [key, start, length]})

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Say something about the next file."""
        self._ask({"facts": facts})

    def _ask(self, asked: Mapping[str, Any]) -> bytes | None:
        with self._lock:
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            (count,) = _HEAD.unpack(self._answers.read(_HEAD.size))
            if count == _ABSENT:
                return None
            if count < 0:
                raise OSError("a part of it could not be fetched")
            return self._answers.read(count)


class RangeFile(io.RawIOBase):
    """A remote file as an object to read and seek in."""

    def __init__(self, ranges: Ranges, number: int, size: int) -> None:
        super().__init__()
        self._ranges, self._number, self._size, self._at = ranges, number, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        data = self._ranges.part(self._number, self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


Seen = Mapping[int, tuple[int, str | None]]
"""Size and identity of objects by number, as their answers told them, where the listing does not."""
_ZARR_METADATA = ("zarr.json", ".zarray", ".zgroup")


class Files:
    """Objects of one listing on their store. Used by many threads."""

    def __init__(self, store: Store, listing: Listing, seen: Seen | None = None) -> None:
        """``seen`` is what :meth:`seen` gave when they were listed: they must still be these."""
        self.store, self.listing = store, listing
        self._objects = {
            number: replace(listing.object(number), size=size, etag=etag)
            for number, (size, etag) in (seen or {}).items()
        }
        self._lock = threading.Lock()

    def item(self, number: int) -> Object:
        """An object by its number, with its size: where the listing does not tell it, the store is asked once."""
        with self._lock:
            item = self._objects.get(number)
        if item is not None:
            return item
        listed = self.listing.object(number)
        return listed if listed.size >= 0 else self._asked(listed, number)

    def identified(self, number: int) -> Object:
        """:meth:`item`, with its identity: where answers tell that and the listing does not, one is asked for."""
        item = self.item(number)
        return item if item.etag is not None or not isinstance(self.store, Telling) else self._asked(item, number)

    def _asked(self, item: Object, number: int) -> Object:
        answer = self.store.find(item.key)
        if answer.size < 0:  # not every server tells it
            answer = replace(answer, size=item.size)
        check_identity(item, size=answer.size, etag=None)
        with self._lock:
            return self._objects.setdefault(number, answer)

    def seen(self) -> Seen:
        """What answers have told of the objects that the listing does not."""
        etags = self.store.seen() if isinstance(self.store, Telling) else {}
        numbers = {number for key in etags if (number := self.index(key)) is not None}
        out: dict[int, tuple[int, str | None]] = {}
        for number in sorted(numbers.union(self._objects)):  # not all: there may be a million chunks
            listed = self.listing.object(number)
            item = self._objects.get(number, listed)
            etag = etags.get(item.key) or item.etag
            if (item.size, etag) != (listed.size, listed.etag):
                out[number] = item.size, etag
        return out

    def find(self, key: str) -> Object | None:
        """An object by its key; None when the listing has none."""
        index = self.index(key)
        return None if index is None else self.item(index)

    def index(self, key: str) -> int | None:
        """The number of an object by its key."""
        raw = key.encode("utf-8", "surrogateescape")
        low, high = 0, self.listing.objects
        while low < high:
            middle = (low + high) // 2
            if self.listing.object(middle).key.encode("utf-8", "surrogateescape") < raw:
                low = middle + 1
            else:
                high = middle
        if low == self.listing.objects or self.listing.object(low).key != key:
            return None
        return low

    def name(self, number: int) -> str:
        """For messages."""
        return self.listing.object(min(number, self.listing.objects - 1)).key

    def zarr_folders(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All folders that hold metadata of Zarr, ``""`` or ending in ``/``, and those that lie in no other one."""
        folders: dict[str, None] = {}
        for number in range(self.listing.objects):
            folder, slash, name = self.listing.object(number).key.rpartition("/")
            if name in _ZARR_METADATA:
                folders[folder + slash] = None
        roots: list[str] = []
        for folder in sorted(folders):
            if not any(folder.startswith(root) for root in roots[-1:]):
                roots.append(folder)
        return tuple(folders), tuple(roots)


@contextlib.contextmanager
def renamed(at: Path, place: str, server: RangeServer | None = None) -> Iterator[None]:
    """Errors that speak of the local path ``at`` speak of ``place``; what the store raised comes first."""
    try:
        yield
    except CacheToolError as error:
        if server is not None and server.failure is not None:
            raise server.failure from error
        if str(at) in str(error):
            raise type(error)(str(error).replace(str(at), place)) from error
        raise
