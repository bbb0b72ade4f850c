"""Files by their bytes, local or remote: parts of them, and the socket over which the guarded process reads such parts.

:class:`Files` has the objects of a listing as files by number, and as objects by key. Readers see a
:class:`SourceFile`, which gets its bytes from :class:`Ranges`. :class:`RangeServer` serves these to a process that has
no way to the store: the guarded one, which a hostile file may command.

::

    sampler                                               guarded process
    StoreRanges: whole blocks of 64 KiB, kept,
       larger parts as they are asked for
    RangeServer <- pair of sockets ------------------>    ServedRanges
                                                             SourceFile (what h5py reads)

The other side can ask for bytes of the files it was opened for, and nothing else. What the store raises is raised by
whoever waits for a block, so that an unreachable store is not taken for a damaged file::

    asked    ["part", file, start, length] | ["object", key] | ["size", key] | ["part_of", key, start, length]
             ["open", file] | ["facts", {...}]                                                  a line of JSON
    answer   {"bytes": n} and these | a size | null, for "open" with a descriptor              a line of JSON
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from cachetool.core.errors import CacheToolError
from cachetool.core.schema import Schema
from cachetool.proc.lines import Lines, write_line
from cachetool.sources.fetch import Fetcher, Fetching
from cachetool.sources.listing import Listing
from cachetool.stores import Object, Store
from cachetool.stores.base import Opening, Telling, check_identity

__all__ = [
    "Files",
    "MemoryRanges",
    "RangeServer",
    "Ranges",
    "Seen",
    "ServedRanges",
    "SourceFile",
    "StoreRanges",
    "fetch_part",
    "renamed",
]


BLOCK = 64 * 2**10
"""Bytes that are fetched and kept when fewer are asked for."""
KEPT = 64 * 2**20
"""Bytes of blocks and of small objects that are kept."""
_SMALL = 2**20
"""An object up to this size is kept: it may hold values of many samples."""
_MAX_REQUEST = 2**27
SILENCE = 900.0
"""Seconds until a process that says nothing, or does not take what it has asked for, is given up, however slow the
disk."""
_CALLS: dict[str, tuple[type, ...]] = {
    "part": (int, int, int), "part_of": (str, int, int), "object": (str,), "size": (str,)
}  # fmt: skip
"""Methods of :class:`Ranges` that the guarded process may call, and with what."""


class Ranges(Protocol):
    """Where the bytes of files come from: files by number, and objects by key."""

    def part(self, number: int, start: int, length: int) -> memoryview | bytes:
        """Bytes of a file, fewer at its end."""
        ...

    def object(self, key: str) -> memoryview | bytes | None:
        """A whole object; None when it is not there."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when it is not there."""
        ...

    def part_of(self, key: str, start: int, length: int) -> memoryview | bytes | None:
        """Bytes of an object; None when it is not there."""
        ...

    def opened(self, number: int) -> BinaryIO | None:
        """A file whose bytes are at hand, to read and seek in; None when they must be fetched."""
        ...


def fetch_part(store: Store, item: Object, start: int, stop: int) -> memoryview:
    """Bytes ``start`` to ``stop`` of an object; all of it at once where these are all, which needs no ranges."""
    if start == 0 and stop == item.size:
        return store.get(item)
    return store.get_range(item, start, stop - start)


class StoreRanges:
    """Parts of files of a store, of which blocks and small objects are kept. Used by many threads."""

    def __init__(self, files: Files) -> None:
        self._store, self._files = files.store, files
        self._kept: OrderedDict[Hashable, memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self.given: list[tuple[int | str, int, int, memoryview]] = []
        """What was fetched beforehand for the samples that are read now: file or key, start, stop, bytes."""
        self.fetched = 0
        """Bytes that came over the wire."""

    def part(self, number: int, start: int, length: int) -> memoryview | bytes:
        """See :class:`Ranges`."""
        return self._part(number, self._files.item(number), start, length)

    def size(self, key: str) -> int | None:
        """See :class:`Ranges`."""
        item = self._files.find(key)
        return None if item is None else item.size

    def part_of(self, key: str, start: int, length: int) -> memoryview | bytes | None:
        """See :class:`Ranges`."""
        item = self._files.find(key)
        return None if item is None else self._part(key, item, start, length)

    def opened(self, number: int) -> BinaryIO | None:
        """See :class:`Ranges`."""
        if not isinstance(self._store, Opening):
            return None
        # A larger buffer would read members of an archive that a survey skips.
        return io.BufferedReader(self._store.opened(self._files.item(number)), BLOCK)

    def object(self, key: str) -> memoryview | bytes | None:
        """See :class:`Ranges`."""
        item = self._files.find(key)
        if item is None:
            return None
        for name, _, _, body in self.given:
            if name == key:
                return body
        if (kept := self._of_kept(key)) is not None:
            return kept
        body = self._store.get(item)
        self.fetched += len(body)
        if len(body) <= _SMALL:
            self._keep(key, body)
        return body

    def _keep(self, key: Hashable, body: memoryview) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = body
                self._kept_bytes += len(body)
            while self._kept_bytes > KEPT and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _of_kept(self, key: Hashable) -> memoryview | None:
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
            return kept

    def _part(self, number: int | str, item: Object, start: int, length: int) -> memoryview | bytes:
        stop = min(start + length, item.size)
        if start < 0 or stop <= start:
            return b""
        for name, first, last, body in self.given:
            if name == number and first <= start and stop <= last:
                return body[start - first : stop - first]
        if stop - start >= BLOCK:
            return self._fetched((number, start, stop), item, start, stop)
        parts = []
        for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
            first = block * BLOCK
            body = self._fetched((number, block), item, first, min(first + BLOCK, item.size))
            parts.append(body[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetched(self, key: Hashable, item: Object, start: int, stop: int) -> memoryview:
        if (kept := self._of_kept(key)) is not None:
            return kept
        body = fetch_part(self._store, item, start, stop)
        self.fetched += len(body)
        if len(body) <= _SMALL:
            self._keep(key, body)
        return body


class MemoryRanges:
    """One file that lies in memory."""

    def __init__(self, body: memoryview | bytes) -> None:
        self._body = body

    def part(self, number: int, start: int, length: int) -> memoryview | bytes:
        """See :class:`Ranges`."""
        return self._body[start : start + length]

    def opened(self, number: int) -> BinaryIO:
        """See :class:`Ranges`."""
        return io.BytesIO(self._body)

    def object(self, key: str) -> None:
        """See :class:`Ranges`: there are no others."""

    def size(self, key: str) -> None:
        """See :class:`Ranges`: there are no others."""

    def part_of(self, key: str, start: int, length: int) -> None:
        """See :class:`Ranges`: there are no others."""


class RangeServer:
    """Serves ``ranges`` to one process after another."""

    asked: Lines
    """The request of the process, once there is one."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._socket: socket.socket | None = None
        self.facts: list[dict[str, Any]] = []
        """What was told."""
        self.opened: int | None = None
        """The file of this machine that was opened last, and is read by the process itself."""

    def connected(self) -> socket.socket:
        """The other end of a new connection, which is for a process."""
        self.close()
        self._socket, other = socket.socketpair()
        self._socket.settimeout(SILENCE)
        self.asked = Lines(self._socket.fileno(), most=_MAX_REQUEST)
        return other

    def close(self) -> None:
        """End the connection. May be called twice."""
        if self._socket is not None:
            self._socket.close()

    def serve(self) -> None:
        """Answer what has come. Raises what the store does, and ``TimeoutError`` where nobody takes an answer."""
        self.asked.receive()
        for name, *arguments in self.asked:
            with contextlib.suppress(ConnectionError):  # the process has ended, which its other pipe tells
                self._answer(str(name), arguments)

    def _answer(self, name: str, arguments: list[Any]) -> None:
        assert self._socket is not None
        body: memoryview | bytes = b""
        value: Any = None
        if name == "open":
            number = int(arguments[0])
            if (file := self._ranges.opened(number)) is not None:
                with file:
                    self.opened = number
                    socket.send_fds(self._socket, [b"null\n"], [file.fileno()])
                    return
        elif name == "facts":
            self.facts.append(dict(arguments[0]))
        else:
            kinds = _CALLS[name]
            value = getattr(self._ranges, name)(*(kind(of) for kind, of in zip(kinds, arguments, strict=True)))
            if name != "size" and value is not None:
                body, value = value, {"bytes": len(value)}
        self._socket.sendall(json.dumps(value).encode() + b"\n")
        self._socket.sendall(body)


class ServedRanges:
    """What a :class:`RangeServer` serves, in the guarded process."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._answers = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def part(self, number: int, start: int, length: int) -> bytes:
        """See :class:`Ranges`."""
        part: bytes = self._ask("part", number, start, length)
        return part

    def object(self, key: str) -> bytes | None:
        """See :class:`Ranges`."""
        body: bytes | None = self._ask("object", key)
        return body

    def size(self, key: str) -> int | None:
        """See :class:`Ranges`."""
        size: int | None = self._ask("size", key)
        return size

    def part_of(self, key: str, start: int, length: int) -> bytes | None:
        """See :class:`Ranges`."""
        part: bytes | None = self._ask("part_of", key, start, length)
        return part

    def opened(self, number: int) -> BinaryIO | None:
        """See :class:`Ranges`."""
        with self._lock:
            write_line(self._socket.fileno(), ["open", number])
            _, descriptors, _, _ = socket.recv_fds(self._socket, 100, 1)
        return os.fdopen(descriptors[0], "rb", BLOCK) if descriptors else None

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Say something about the next file."""
        self._ask("facts", facts)

    def _ask(self, *asked: Any) -> Any:
        with self._lock:
            write_line(self._socket.fileno(), asked)
            value = json.loads(self._answers.readline())
            return self._answers.read(value["bytes"]) if isinstance(value, dict) else value


class RangeFile(io.RawIOBase):
    """A file as an object to read and seek in, by ranges."""

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
        data = self._part(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _part(self, start: int, length: int) -> memoryview | bytes:
        return self._ranges.part(self._number, start, length)


class _Ahead(RangeFile):
    """The same for one who reads on and on: the next parts are fetched meanwhile."""

    def __init__(self, ranges: Ranges, number: int, size: int) -> None:
        super().__init__(ranges, number, size)
        self._fetcher: Fetcher[int, memoryview | bytes] = Fetcher(self._fetch, _THREADS)
        self._fetching: Fetching[int, memoryview | bytes] | None = None
        self._body: memoryview | bytes = b""
        self._first = 0

    def _fetch(self, start: int, stop: threading.Event) -> memoryview | bytes:
        return b"" if stop.is_set() else self._ranges.part(self._number, start, _STRIDE)

    def _part(self, start: int, length: int) -> memoryview | bytes:
        if start >= self._size:
            return b""
        if not self._first <= start < self._first + len(self._body):
            at, after = start // _STRIDE * _STRIDE, self._first + len(self._body)
            while self._fetching is not None and after < at <= after + _THREADS * _STRIDE:
                after += len(next(self._fetching, b"")) or self._size
            if self._fetching is None or at != after:
                self._stop()
                self._fetching = self._fetcher.run(
                    range(at, self._size, _STRIDE), ahead=_THREADS * _STRIDE, size=lambda _: _STRIDE
                )
            self._first, self._body = at, next(self._fetching, b"")
        return self._body[start - self._first : start - self._first + length]

    def _stop(self) -> None:
        if self._fetching is not None:
            self._fetching.close()

    def close(self) -> None:
        self._stop()
        self._fetcher.close()
        super().close()


_STRIDE, _THREADS = 2**20, 4


@dataclass(frozen=True)
class SourceFile:
    """One file as the reader of its kind sees it, wherever it lies."""

    name: Path
    """What to call it in messages, and its fields where they have no name."""
    size: int
    """Bytes that it has, or for Zarr all objects of the listing."""
    ranges: Ranges
    number: int = 0
    """By which ``ranges`` know it."""
    root: str = ""
    """Of a file that is a folder: the beginning of its keys."""
    folders: tuple[str, ...] = ()
    """All folders that hold metadata."""
    path: Path | None = None
    """Where it lies on this machine, for kinds that are read by path."""
    alone: bool = True
    """Whether its source has no others."""
    in_order: bool = False
    """Whether rows are read from the first to the last, so that what stands behind them is read as well."""
    schema: Schema | None = None
    """What its samples are, where that was found out before; then no more is read than is asked for."""
    names: Mapping[str, str] = field(default_factory=dict)
    """For each field of :attr:`schema` what the file calls it."""

    def __str__(self) -> str:
        return str(self.name)

    def open(self) -> BinaryIO:
        """Open it to read here and there: every read asks for these bytes, unless they are at hand."""
        return self._at_hand() or cast(BinaryIO, RangeFile(self.ranges, self.number, self.size))

    def stream(self) -> BinaryIO:
        """Open it to be read from its beginning on; what lies ahead is fetched meanwhile."""
        return self._at_hand() or io.BufferedReader(_Ahead(self.ranges, self.number, self.size), _STRIDE)

    def _at_hand(self) -> BinaryIO | None:
        return self.ranges.opened(self.number) if self.in_order else None  # else what is fetched is counted


Seen = Mapping[int, tuple[int, str | None]]
"""Size and identity of objects by number, as their answers told them, where the listing does not."""


class Files:
    """Objects of one listing on their store. Used by many threads."""

    def __init__(self, store: Store, listing: Listing, seen: Seen | None = None, *, folder: Path | None = None) -> None:
        """``seen`` is what :meth:`seen` gave when they were listed: they must still be these. ``folder``: where they
        lie on this machine, if they do."""
        self.store, self.listing, self._folder = store, listing, folder
        self._objects = {
            number: replace(listing.object(number), size=size, etag=etag)
            for number, (size, etag) in (seen or {}).items()
        }
        self._lock = threading.Lock()

    @property
    def at_hand(self) -> bool:
        """Whether they can be opened on this machine."""
        return isinstance(self.store, Opening)

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

    def path(self, number: int) -> Path | None:
        """Where an object lies on this machine, if it does and is still the one that was listed."""
        if self._folder is None:
            return None
        item = self.item(number)
        answer = self.store.find(item.key)
        check_identity(item, size=answer.size, etag=answer.etag)
        return self._folder / item.key

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

    def mark_folders(self, marks: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All folders that hold one of these names, ``""`` or ending in ``/``, and those that lie in no other one."""
        folders: dict[str, None] = {}
        for number in range(self.listing.objects):
            folder, slash, name = self.listing.object(number).key.rpartition("/")
            if name in marks:
                folders[folder + slash] = None
        roots: list[str] = []
        for folder in sorted(folders):
            if not any(folder.startswith(root) for root in roots[-1:]):
                roots.append(folder)
        return tuple(folders), tuple(roots)


@contextlib.contextmanager
def renamed(at: Path, place: str) -> Iterator[None]:
    """Errors that speak of the local path ``at`` speak of ``place``."""
    try:
        yield
    except CacheToolError as error:
        if str(at) in str(error):
            raise type(error)(str(error).replace(str(at), place)) from error
        raise
