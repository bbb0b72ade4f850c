"""The list of a store that lists in the order of its keys. Several threads ask for its pages, and the pages are kept,
so a killed process does not lose them.

::

Each page is written to the log before it is handed out. After a kill, the same list of the same store begins with the
logged pages, if the last one is less than an hour old, and continues after them. An error that is not the store's own
deletes the log, because its cause may lie in the logged pages and be repaired in the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cachetool.core.errors import AccessDenied, Interrupted, SourceError, Unreachable
from cachetool.proc.folders import new_file, shared_file
from cachetool.proc.scratch import WorkFolder
from cachetool.sources.fetch import Fetcher
from cachetool.stores import OrderedStore, Store
from cachetool.stores.base import LeftOut, Page, Pages

__all__ = ["StoreList"]

_PREFIX = "cachetool-listed-"
_LOG = "pages.log"
_SHORT = 32
"""Number of pages up to which a list is not logged."""
_OLD = 3600.0
"""Seconds after its last page when an interrupted list is deleted. Objects added to the store before that page since
then are not in it."""
# The search takes one request for each folder, and as many as its list for a folder without folders, so it ends early.
_FEWEST, _MOST, _DEEPEST = 2, 8, 4
"""Fewest and most ranges for each thread, and how many levels of folders are searched for bounds."""
_FRAME = struct.Struct("<II")


class StoreList:
    """All pages of a store's list. A context manager."""

    def __init__(self, store: Store, *, workers: int = 1, purpose: str = "") -> None:
        """``workers``: number of pages that are asked for at once, if the store is an :class:`OrderedStore`.
        ``purpose`` separates lists of one store that must not continue each other."""
        self._store, self._workers, self._purpose = store, workers, purpose
        self._ranges: list[_Range] = []
        self._short: list[_Page] = []
        self._log: _Log | None = None

    def pages(self) -> Pages:
        """Yield the pages. A second call yields the pages of an :class:`OrderedStore` again without requests.

        Raises the errors of :meth:`Store.list`.
        """
        if not isinstance(self._store, OrderedStore):
            yield from self._store.list()
            return
        if not self._ranges or not all(one.is_ordered for one in self._ranges):
            self._begin(self._store)
        for page in self._log if self._log is not None else tuple(self._short):
            self._ranges[page.range].take(page)
            yield page.objects
        for page in _asked([one for one in self._ranges if not one.ended], self._workers):
            if self._ranges[page.range].is_ordered:
                self._keep(page)
            elif self._cuts:
                # Keys out of order mean that ranges may miss keys or name them twice. One range alone is still
                # complete.
                raise SourceError(
                    f"{self._store.url} does not list in the order of its keys, which --list-workers needs; leave it"
                    " out"
                )
            else:
                self._forget()
            yield page.objects

    @property
    def left_out(self) -> Mapping[str, int]:
        """The objects that the store left out; see :attr:`Store.left_out`."""
        if not self._ranges:
            return self._store.left_out
        together = LeftOut()
        for one in self._ranges:
            together.joined(one.left_out)
        return together

    def _begin(self, store: OrderedStore) -> None:
        text = json.dumps([store.place(), self._purpose])
        self._name = f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}-"
        self._log = _Log.left(self._name)
        self._cuts = _cuts(store, self._workers) if self._log is None else self._log.cuts
        bounds = [None, *self._cuts, None]
        self._ranges = [_Range(store, at, *bounds[at : at + 2]) for at in range(len(bounds) - 1)]

    def _keep(self, page: _Page) -> None:
        """Keep a page, in memory for a short list, else in the log."""
        if self._log is not None:
            self._log.append(page)
            return
        self._short.append(page)
        # A short list is simply asked for again after a kill, so it needs no log on disk.
        if len(self._short) > _SHORT:
            self._log = _Log.make(self._name, self._cuts)
            for one in self._short:
                self._log.append(one)
            self._short = []

    def _forget(self) -> None:
        """Delete the kept pages and log no more."""
        self._short = []
        if self._log is not None:
            self._log.close(keep=False)
            self._log = None

    def __enter__(self) -> StoreList:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._log is not None:
            # Only these errors say nothing against the pages: the store was away or refused, or the user interrupted.
            is_of_store = kind is not None and issubclass(
                kind, Unreachable | AccessDenied | Interrupted | KeyboardInterrupt
            )
            self._log.close(keep=is_of_store and not all(one.ended for one in self._ranges))


@dataclass(frozen=True, slots=True)
class _Page:
    """Some objects of a range, and the range's progress."""

    range: int
    objects: Page
    ended: bool
    left_out: LeftOut
    """The objects left out of the range so far."""


class _Range:
    """The keys after ``after``, up to and including ``upto``."""

    def __init__(self, store: OrderedStore, number: int, after: str | None, upto: str | None) -> None:
        # A copy for each range, because the store counts what it leaves out and several threads list at once.
        self._store, self._number, self._after, self._upto = copy(store), number, after, upto
        self._pages: Pages | None = None
        self.is_ordered = True
        """True while the keys come in order."""
        self._before = LeftOut()
        self.ended = False
        self.left_out = LeftOut()

    def take(self, page: _Page) -> None:
        """Count a kept page as received, so that :meth:`ask` continues with the page after it."""
        self._after = page.objects.keys[-1] if page.objects else self._after
        self.ended = page.ended
        self.left_out = self._before = page.left_out

    def ask(self) -> _Page:
        """Ask for the next page."""
        if self._pages is None:
            self._pages = self._store.list_after(self._after, self._upto)
        batch = next(self._pages, None)
        self.ended = batch is None
        objects = Page.of(batch or ())
        if objects:
            keys = [key.encode("utf-8", "surrogateescape") for key in (self._after or "", *objects.keys)]
            self.is_ordered = self.is_ordered and keys == sorted(keys)
            self._after = objects.keys[-1]
        counted = self._store.left_out
        named, more = (counted.named, counted.more) if isinstance(counted, LeftOut) else ((), 0)
        # The store counts from the beginning of this process's requests, so the counts of kept pages are added each
        # time.
        self.left_out = LeftOut(self._before, self._before.named, self._before.more)
        self.left_out.joined(LeftOut(counted, named, more))
        return _Page(self._number, objects, self.ended, self.left_out)


def _asked(ranges: list[_Range], workers: int) -> Iterator[_Page]:
    """Yield the pages of ranges as they arrive, of ``workers`` ranges at a time."""
    fetcher: Fetcher[_Range, _Page] = Fetcher(lambda one, _: one.ask(), workers)
    waiting, stop = deque(ranges), threading.Event()
    running: dict[Future[_Page], _Range] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                one = waiting.popleft()
                running[fetcher.begin(one, stop)] = one
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                one, page = running.pop(future), future.result()
                # The next page of this range is asked for before this one is handed out, so the network does not wait
                # for the consumer.
                if not page.ended:
                    running[fetcher.begin(one, stop)] = one
                yield page
    finally:
        fetcher.close()


def _cuts(store: OrderedStore, workers: int) -> list[str]:
    """Return the keys between which ranges lie: names of folders, of the first level that has enough folders."""
    folders: list[str] = []
    below = [""]
    looking: Fetcher[str, Sequence[str]] = Fetcher(lambda folder, _: store.folders(folder), workers)
    for _ in range(_DEEPEST if workers > 1 else 0):
        below = [name for names in looking.run(below, ahead=1, size=lambda _: 0) for name in names]
        folders += below
        if not below or len(folders) >= _FEWEST * workers:
            break
    looking.close()
    folders = sorted(set(folders), key=lambda name: name.encode("utf-8", "surrogateescape"))
    count = min(len(folders), _MOST * workers)
    # Evenly spread over the folders: their sizes are unknown, and more ranges than threads even out large ones.
    return [folders[at * len(folders) // count] for at in range(count)]


class _Log:
    """Pages in a file of a working folder, which holds the folder's lock."""

    def __init__(self, work: WorkFolder, file: BinaryIO, cuts: list[str]) -> None:
        self._work, self._file, self.cuts = work, file, cuts
        self._begin = file.tell()

    @classmethod
    def make(cls, name: str, cuts: list[str]) -> _Log:
        """Create a new log."""
        work = WorkFolder.make(Path(tempfile.gettempdir()), name, _PREFIX)
        file = new_file(work.inside / _LOG)
        file.write(_framed(cuts))
        return cls(work, file, cuts)

    @classmethod
    def left(cls, name: str) -> _Log | None:
        """Return the log that a killed process of this user left for the same list. Old logs of any list are
        deleted."""
        log = None
        for work in WorkFolder.existing(Path(tempfile.gettempdir()), _PREFIX, _PREFIX):
            # Another process is listing the same place now and holds the lock.
            if work.busy:
                work.close()
                continue
            file = shared_file(work.inside / _LOG)
            is_old = time.time() - os.fstat(file.fileno()).st_mtime > _OLD
            cuts = next(_frames(file), None)
            if is_old or not isinstance(cuts, list):
                file.close()
                _removed(work)
            elif log is None and work.path.name.startswith(name):
                log = cls(work, file, cuts)
            else:
                file.close()
                work.close()
        return log

    def __iter__(self) -> Iterator[_Page]:
        """Yield the pages."""
        self._file.seek(self._begin)
        for number, ended, objects, counts, named, more in _frames(self._file):
            page = Page([item[0] for item in objects], [item[1] for item in objects], [item[2] for item in objects])
            yield _Page(number, page, ended, LeftOut(counts, named, more))
        # A kill may leave half a page at the end. New pages must follow the last complete one.
        self._file.truncate()

    def append(self, page: _Page) -> None:
        """Write a page to the log."""
        out = page.left_out
        objects = list(zip(page.objects.keys, page.objects.sizes, page.objects.etags, strict=True))
        self._file.write(_framed([page.range, page.ended, objects, out, out.named, out.more]))
        # Not synced: what was written survives a kill, and after a power cut the checksum shows where the log ends.
        self._file.flush()

    def close(self, *, keep: bool) -> None:
        """Leave the log to the next process, or delete it."""
        self._file.close()
        if keep:
            self._work.close()
        else:
            _removed(self._work)


def _removed(work: WorkFolder) -> None:
    with contextlib.suppress(OSError):
        work.remove()


def _framed(value: Any) -> bytes:
    """Return a value as a compressed frame with its length and checksum in front."""
    data = zlib.compress(json.dumps(value).encode(), 1)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _frames(file: BinaryIO) -> Iterator[Any]:
    """Yield the values up to the first incomplete one. The file's position is then the beginning of that one."""
    while True:
        at = file.tell()
        head = file.read(_FRAME.size)
        nbytes, checksum = _FRAME.unpack(head) if len(head) == _FRAME.size else (0, 1)
        data = file.read(nbytes)
        if len(data) != nbytes or zlib.crc32(data) != checksum:
            file.seek(at)
            return
        yield json.loads(zlib.decompress(data))
