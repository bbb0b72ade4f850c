"""Files by their bytes, local or remote, and the socket over which the guarded process reads them.

:class:`Files` has the objects of a listing as files by number, and as objects by key. Readers see a
:class:`SourceFile`, which gets its bytes from a :class:`Ranges`. :class:`RangeServer` serves these bytes to the
guarded process. That process has no access to the store, because a hostile file may control it.

::

    pull worker                                           guarded process
    StoreRanges: whole blocks of 64 KiB, cached;
       larger parts as requested
    RangeServer <- pair of sockets ------------------>    ServedRanges
                                                             SourceFile (what h5py reads)

The guarded process can ask for bytes of the files it was started for, and for nothing else. An error of the store is
raised in the pull worker, which waits for the block. So an unreachable store is not mistaken for a damaged file::

    request  ["part", file, start, length] | ["object", key] | ["size", key] | ["part_of", key, start, length]
             ["open", file] | ["facts", {...}]                                               a line of JSON
    answer   {"bytes": n} and these bytes | a size | null, for "open" with a descriptor     a line of JSON
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
"""Bytes that are fetched and cached when a reader asks for fewer."""
KEPT = 64 * 2**20
"""Bytes of blocks and of small objects that are cached."""
_SMALL = 2**20
"""Largest object in bytes that is cached: a small object may hold values of many samples."""
# The longest line of a request. A hostile file may control the process that writes it, and without a limit the pull
# worker would buffer a line without end.
_MAX_REQUEST = 2**27
SILENCE = 900.0
"""Seconds after which a process that sends nothing, or does not read its answer, is given up. The limit allows for a
very slow disk."""
_CALLS: dict[str, tuple[type, ...]] = {
    "part": (int, int, int), "part_of": (str, int, int), "object": (str,), "size": (str,)
}  # fmt: skip
"""Methods of :class:`Ranges` that the guarded process may call, with the types of their arguments."""


class Ranges(Protocol):
    """A supplier of the bytes of files: files by number, and objects by key."""

    def part(self, number: int, start: int, length: int) -> memoryview | bytes:
        """Return ``length`` bytes of a file from ``start`` on, or fewer at the end of the file."""
        ...

    def object(self, key: str) -> memoryview | bytes | None:
        """Return a complete object, or None if there is no such object."""
        ...

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None if there is no such object."""
        ...

    def part_of(self, key: str, start: int, length: int) -> memoryview | bytes | None:
        """Return bytes of an object as :meth:`part` does, or None if there is no such object."""
        ...

    def opened(self, number: int) -> BinaryIO | None:
        """Return a file of this machine, opened to read and seek, or None if its bytes must be fetched."""
        ...


def fetch_part(store: Store, item: Object, start: int, stop: int) -> memoryview:
    """Return bytes ``start`` to ``stop`` of an object. A complete object is fetched without a range request."""
    if start == 0 and stop == item.size:
        return store.get(item)
    return store.get_range(item, start, stop - start)


class StoreRanges:
    """Parts of the files of a store, with a cache of blocks and small objects. Many threads may use it."""

    def __init__(self, files: Files) -> None:
        self._store, self._files = files.store, files
        self._kept: OrderedDict[Hashable, memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self.given: list[tuple[int | str, int, int, memoryview]] = []
        """Bytes that were fetched in advance for the samples that are read now: (file or key, start, stop, bytes)."""
        self.fetched = 0
        """Bytes that were fetched from the store."""

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
        # A larger buffer would read the members of an archive that a survey skips.
        return io.BufferedReader(self._store.opened(self._files.item(number)), BLOCK)

    def object(self, key: str) -> memoryview | bytes | None:
        """See :class:`Ranges`."""
        item = self._files.find(key)
        if item is None:
            return None
        for name, first, last, body in self.given:
            # Parts of a shard are given as well, and are not the object.
            if name == key and first == 0 and last == item.size:
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
        # The bodies that the pull worker fetched in advance come first: a request for these bytes would fetch them a
        # second time.
        for name, first, last, body in self.given:
            if name == number and first <= start and stop <= last:
                return body[start - first : stop - first]
        # A large part is fetched exactly as requested. Whole blocks around it would add up to two blocks to the bytes
        # fetched, which pulls count and limit.
        # The end of an object of Zarr is the index of a shard: whole blocks would fetch chunks along with the index of
        # each shard.
        if stop - start >= BLOCK or (isinstance(number, str) and stop == item.size):
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
    """One file whose bytes are in memory."""

    def __init__(self, body: memoryview | bytes) -> None:
        self._body = body

    def part(self, number: int, start: int, length: int) -> memoryview | bytes:
        """See :class:`Ranges`."""
        return self._body[start : start + length]

    def opened(self, number: int) -> BinaryIO:
        """See :class:`Ranges`."""
        return io.BytesIO(self._body)

    def object(self, key: str) -> None:
        """Return None: a file in memory has no other objects beside it."""

    def size(self, key: str) -> None:
        """Return None: a file in memory has no other objects beside it."""

    def part_of(self, key: str, start: int, length: int) -> None:
        """Return None: a file in memory has no other objects beside it."""


class RangeServer:
    """A server that answers the requests of one guarded process after another with bytes of ``ranges``."""

    asked: Lines
    """The requests of the process, once a process is connected."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._socket: socket.socket | None = None
        self.facts: list[dict[str, Any]] = []
        """The facts about files that the process has sent, one dict for each file."""
        self.opened: int | None = None
        """Number of the file of this machine whose descriptor was sent last. The process reads this file by itself."""

    def connected(self) -> socket.socket:
        """Return the other end of a new connection, to be passed to a process."""
        self.close()
        self._socket, other = socket.socketpair()
        # A process that stopped reading would block sendall for ever once the socket's buffer is full.
        self._socket.settimeout(SILENCE)
        self.asked = Lines(self._socket.fileno(), most=_MAX_REQUEST)
        return other

    def close(self) -> None:
        """Close the connection. May be called twice."""
        if self._socket is not None:
            self._socket.close()

    def serve(self) -> None:
        """Answer the requests that have arrived. Raise the errors of the store, and ``TimeoutError`` if the process
        does not read an answer."""
        self.asked.receive()
        for name, *arguments in self.asked:
            # The process has ended. The caller learns that, and the exit code, from the process's other pipe.
            with contextlib.suppress(ConnectionError):
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
                    # The kernel copies the descriptor into the process, so values need not pass the socket: an HDF5
                    # file of 5,000 chunks took 1.7 instead of 2.9 s of processor time. This process closes its own copy
                    # at once.
                    socket.send_fds(self._socket, [b"null\n"], [file.fileno()])
                    return
        elif name == "facts":
            self.facts.append(dict(arguments[0]))
        else:
            # The table is the list of permitted methods, and converts each argument. A name outside of it raises
            # KeyError, which the guard reports as a fault of the file.
            kinds = _CALLS[name]
            value = getattr(self._ranges, name)(*(kind(of) for kind, of in zip(kinds, arguments, strict=True)))
            if name != "size" and value is not None:
                body, value = value, {"bytes": len(value)}
        self._socket.sendall(json.dumps(value).encode() + b"\n")
        self._socket.sendall(body)


class ServedRanges:
    """The client of a :class:`RangeServer`, in the guarded process."""

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
        """Send facts about the next file to the pull worker."""
        self._ask("facts", facts)

    def _ask(self, *asked: Any) -> Any:
        with self._lock:
            # A library may call from several threads. Request and answer must not interleave, or a thread would read
            # the bytes of another one's answer.
            write_line(self._socket.fileno(), asked)
            value = json.loads(self._answers.readline())
            return self._answers.read(value["bytes"]) if isinstance(value, dict) else value


class RangeFile(io.RawIOBase):
    """A file object that can read and seek, whose bytes come from a :class:`Ranges`."""

    def __init__(self, ranges: Ranges, number: int, size: int) -> None:
        super().__init__()
        self._ranges, self._number, self._size, self._at = ranges, number, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position in bytes, and return it."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` from the position on, and return how many bytes were read: 0 at the end of the file."""
        data = self._part(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _part(self, start: int, length: int) -> memoryview | bytes:
        return self._ranges.part(self._number, start, length)


class _Ahead(RangeFile):
    """A file object for readers that go from start to end: four parts of 1 MiB ahead are fetched in the meantime."""

    def __init__(self, ranges: Ranges, number: int, size: int) -> None:
        super().__init__(ranges, number, size)
        self._fetcher: Fetcher[int, memoryview | bytes] = Fetcher(self._fetch, _THREADS)
        self._fetching: Fetching[int, memoryview | bytes] | None = None
        self._body: memoryview | bytes = b""
        self._first = 0

    def _fetch(self, start: int, stop: threading.Event) -> memoryview | bytes:
        # A part whose request has not started when the file is closed is not fetched any more: nobody reads it.
        return b"" if stop.is_set() else self._ranges.part(self._number, start, _STRIDE)

    def _part(self, start: int, length: int) -> memoryview | bytes:
        if start >= self._size:
            return b""
        if not self._first <= start < self._first + len(self._body):
            at, after = start // _STRIDE * _STRIDE, self._first + len(self._body)
            # A short jump forward skips parts that are already in flight. That is cheaper than to cancel them and start
            # again.
            while self._fetching is not None and after < at <= after + _THREADS * _STRIDE:
                after += len(next(self._fetching, b"")) or self._size
            # A jump backwards or far ahead: the requests in flight are for the wrong place.
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
    """One file as the reader of its kind sees it, independent of where the file is."""

    name: Path
    """The file's name in messages, and the name of its field if the field has none."""
    size: int
    """Size of the file in bytes; for Zarr of all objects of the listing."""
    ranges: Ranges
    number: int = 0
    """The number of the file in ``ranges``."""
    root: str = ""
    """Prefix of the keys of a file that is a folder (Zarr); else empty."""
    folders: tuple[str, ...] = ()
    """All folders that hold metadata of Zarr."""
    path: Path | None = None
    """Path of the file on this machine, for kinds whose library reads by path."""
    alone: bool = True
    """True if the file is the only one of its source."""
    in_order: bool = False
    """True if rows are read from first to last, so that the bytes after a row are needed as well."""
    schema: Schema | None = None
    """The fields of the samples, if known from the listing. Then the reader reads only the samples that are asked
    for."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that the file uses for fields of :attr:`schema`, by field."""

    def __str__(self) -> str:
        return str(self.name)

    def open(self) -> BinaryIO:
        """Open the file for random reads: each read requests these bytes, unless they are cached."""
        return self._at_hand() or cast(BinaryIO, RangeFile(self.ranges, self.number, self.size))

    def stream(self) -> BinaryIO:
        """Open the file to be read from its beginning on. The bytes ahead are fetched in the meantime."""
        return self._at_hand() or io.BufferedReader(_Ahead(self.ranges, self.number, self.size), _STRIDE)

    def _at_hand(self) -> BinaryIO | None:
        # A pull reads in random order by ranges even on this machine, because it counts and limits the bytes that it
        # fetches. A descriptor would pass these bytes by.
        return self.ranges.opened(self.number) if self.in_order else None


Seen = Mapping[int, tuple[int, str | None]]
"""Size in bytes and ETag of objects by number, from the answers of the store, where the listing does not tell them."""


class Files:
    """The objects of one listing in their store. Many threads may use it."""

    def __init__(self, store: Store, listing: Listing, seen: Seen | None = None, *, folder: Path | None = None) -> None:
        """Use the listing of a store.

        ``seen`` is the result of :meth:`seen` from the time of the listing: the objects must be unchanged.
        ``folder`` is the store's folder on this machine, or None.
        """
        self.store, self.listing, self._folder = store, listing, folder
        self._objects = {
            number: replace(listing.object(number), size=size, etag=etag)
            for number, (size, etag) in (seen or {}).items()
        }
        self._lock = threading.Lock()

    @property
    def at_hand(self) -> bool:
        """True if the files can be opened on this machine."""
        return isinstance(self.store, Opening)

    def item(self, number: int) -> Object:
        """Return an object by its number, with its size. If the listing does not tell the size, the store is asked
        once."""
        with self._lock:
            item = self._objects.get(number)
        if item is not None:
            return item
        listed = self.listing.object(number)
        return listed if listed.size >= 0 else self._asked(listed, number)

    def identified(self, number: int) -> Object:
        """Return :meth:`item` with its ETag. If only answers tell the ETag, the store is asked for one."""
        item = self.item(number)
        return item if item.etag is not None or not isinstance(self.store, Telling) else self._asked(item, number)

    def _asked(self, item: Object, number: int) -> Object:
        answer = self.store.find(item.key)
        # Not every server tells the size in its answer. Then the size of the listing stays.
        if answer.size < 0:
            answer = replace(answer, size=item.size)
        check_identity(item, size=answer.size, etag=None)
        with self._lock:
            # Two threads may have asked at once. All must use the first answer, or an object that changes between the
            # two would pass every later comparison.
            return self._objects.setdefault(number, answer)

    def path(self, number: int) -> Path | None:
        """Return the path of an object on this machine, or None. Raise :class:`BadObject` if the file has changed since
        it was listed."""
        if self._folder is None:
            return None
        item = self.item(number)
        answer = self.store.find(item.key)
        check_identity(item, size=answer.size, etag=answer.etag)
        return self._folder / item.key

    def seen(self) -> Seen:
        """Return sizes and ETags that came with answers of the store and that the listing does not have."""
        etags = self.store.seen() if isinstance(self.store, Telling) else {}
        numbers = {number for key in etags if (number := self.index(key)) is not None}
        out: dict[int, tuple[int, str | None]] = {}
        # Only objects that were asked for are visited: a Zarr may have a million chunks.
        for number in sorted(numbers.union(self._objects)):
            listed = self.listing.object(number)
            item = self._objects.get(number, listed)
            etag = etags.get(item.key) or item.etag
            if (item.size, etag) != (listed.size, listed.etag):
                out[number] = item.size, etag
        return out

    def find(self, key: str) -> Object | None:
        """Return an object by its key, or None if the listing has no such key."""
        index = self.index(key)
        return None if index is None else self.item(index)

    def index(self, key: str) -> int | None:
        """Return the number of an object by its key, or None."""
        # The listing is sorted by the bytes of its keys. Python compares str by code points, and surrogates of
        # undecodable bytes would sort differently.
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
        """Return the key of an object for messages."""
        return self.listing.object(min(number, self.listing.objects - 1)).key

    def mark_folders(self, marks: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return all folders that hold a file with one of these names, and those of them that are in no other such
        folder.

        A folder is ``""`` or ends with ``/``.
        """
        folders: dict[str, None] = {}
        for number in range(self.listing.objects):
            folder, slash, name = self.listing.object(number).key.rpartition("/")
            if name in marks:
                folders[folder + slash] = None
        roots: list[str] = []
        for folder in sorted(folders):
            # In sorted order a folder follows directly behind the root that contains it, so the last root is the only
            # candidate.
            if not any(folder.startswith(root) for root in roots[-1:]):
                roots.append(folder)
        return tuple(folders), tuple(roots)


@contextlib.contextmanager
def renamed(at: Path, place: str) -> Iterator[None]:
    """Replace the local path ``at`` in the messages of errors by ``place``, the name that the user knows."""
    try:
        yield
    except CacheToolError as error:
        if str(at) in str(error):
            raise type(error)(str(error).replace(str(at), place)) from error
        raise
