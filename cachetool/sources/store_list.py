"""The list of a store that lists in the order of its keys: by several threads, and kept so that a killed one goes on.

::

    keys     a/..      b/..      c/..      d/..         ranges, cut where folders begin
             |---->    |-->      |------>  |            each is asked for a page at a time
                   \\      \\        \\
    pages.log       page, page, page ...                from the 33rd page on, in a working folder
                          \\
                           the listing                  is made of all pages, in any order

A page is written down before it is given out. Killed, the same list of the same store begins with what was written down
within an hour, and goes on behind it. The log is deleted with an error that is not the store's: what caused the error
may be mended in the store.
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
from cachetool.stores import Object, OrderedStore, Store
from cachetool.stores.base import LeftOut, Pages

__all__ = ["StoreList"]

_PREFIX = "cachetool-listed-"
_LOG = "pages.log"
_SHORT = 32
"""Pages of a list that nobody writes down."""
_OLD = 3600.0
"""Seconds after its last page when a list that was broken off is deleted: what came into the store before that page
meanwhile is not in it."""
_FEWEST, _MOST, _DEEPEST = 2, 8, 4
"""Ranges for each thread: with fewer, folders are looked into for more, as deep as this. That takes a request for each,
and of a folder without folders as many as its list, so that it ends early."""
_FRAME = struct.Struct("<II")


class StoreList:
    """All pages of a store's list. A context manager."""

    def __init__(self, store: Store, *, workers: int = 1, purpose: str = "") -> None:
        """``workers``: pages that are asked for at once, where the store is an :class:`OrderedStore`. ``purpose`` tells
        lists of one store apart, which do not go on with each other."""
        self._store, self._workers, self._purpose = store, workers, purpose
        self._ranges: list[_Range] = []
        self._short: list[_Page] = []
        self._log: _Log | None = None

    def pages(self) -> Pages:
        """The pages; those of an :class:`OrderedStore` are given again without a request. Raises as
        :meth:`Store.list`."""
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
                raise SourceError(
                    f"{self._store.url} does not list in the order of its keys, which --list-workers needs; leave it"
                    " out"
                )
            else:
                self._forget()
            yield page.objects

    @property
    def left_out(self) -> Mapping[str, int]:
        """See :attr:`Store.left_out`."""
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
        if self._log is not None:
            self._log.append(page)
            return
        self._short.append(page)
        if len(self._short) > _SHORT:
            self._log = _Log.make(self._name, self._cuts)
            for one in self._short:
                self._log.append(one)
            self._short = []

    def _forget(self) -> None:
        """Do without what was kept: some stores list in no order, and nobody could go on."""
        self._short = []
        if self._log is not None:
            self._log.close(keep=False)
            self._log = None

    def __enter__(self) -> StoreList:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._log is not None:
            is_of_store = kind is not None and issubclass(
                kind, Unreachable | AccessDenied | Interrupted | KeyboardInterrupt
            )
            self._log.close(keep=is_of_store and not all(one.ended for one in self._ranges))


@dataclass(frozen=True, slots=True)
class _Page:
    """Some objects of a range, and how far it is with them."""

    range: int
    objects: list[Object]
    ended: bool
    left_out: LeftOut
    """Of the range so far."""


class _Range:
    """The keys behind ``after``, up to ``upto``."""

    def __init__(self, store: OrderedStore, number: int, after: str | None, upto: str | None) -> None:
        self._store, self._number, self._after, self._upto = copy(store), number, after, upto
        self._pages: Pages | None = None
        self.is_ordered = True
        """Whether the keys came in order so far."""
        self._before = LeftOut()
        self.ended = False
        self.left_out = LeftOut()

    def take(self, page: _Page) -> None:
        """Go on behind a page that was kept."""
        self._after = page.objects[-1].key if page.objects else self._after
        self.ended = page.ended
        self.left_out = self._before = page.left_out

    def ask(self) -> _Page:
        """Ask for the next page."""
        if self._pages is None:
            self._pages = self._store.list_after(self._after, self._upto)
        objects = next(self._pages, None)
        self.ended = objects is None
        if objects:
            keys = [key.encode("utf-8", "surrogateescape") for key in (self._after or "", *(o.key for o in objects))]
            self.is_ordered = self.is_ordered and keys == sorted(keys)
            self._after = objects[-1].key
        counted = self._store.left_out
        named, more = (counted.named, counted.more) if isinstance(counted, LeftOut) else ((), 0)
        self.left_out = LeftOut(self._before, self._before.named, self._before.more)
        self.left_out.joined(LeftOut(counted, named, more))
        return _Page(self._number, objects or [], self.ended, self.left_out)


def _asked(ranges: list[_Range], workers: int) -> Iterator[_Page]:
    """The pages of ranges as they come, of ``workers`` ranges at a time."""
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
                if not page.ended:
                    running[fetcher.begin(one, stop)] = one
                yield page
    finally:
        fetcher.close()


def _cuts(store: OrderedStore, workers: int) -> list[str]:
    """Keys between which ranges lie: names of folders, of the first level that has enough of them."""
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
    return [folders[at * len(folders) // count] for at in range(count)]


class _Log:
    """Pages in a file of a working folder, which holds its lock."""

    def __init__(self, work: WorkFolder, file: BinaryIO, cuts: list[str]) -> None:
        self._work, self._file, self.cuts = work, file, cuts
        self._begin = file.tell()

    @classmethod
    def make(cls, name: str, cuts: list[str]) -> _Log:
        """A new one."""
        work = WorkFolder.make(Path(tempfile.gettempdir()), name, _PREFIX)
        file = new_file(work.inside / _LOG)
        file.write(_framed(cuts))
        return cls(work, file, cuts)

    @classmethod
    def left(cls, name: str) -> _Log | None:
        """The one that a killed process of this user left; those of any list that are old are deleted."""
        log = None
        for work in WorkFolder.existing(Path(tempfile.gettempdir()), _PREFIX, _PREFIX):
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
        """The pages; what follows the last whole one is cut off."""
        self._file.seek(self._begin)
        for number, ended, objects, counts, named, more in _frames(self._file):
            yield _Page(number, [Object(*item) for item in objects], ended, LeftOut(counts, named, more))
        self._file.truncate()

    def append(self, page: _Page) -> None:
        """Write down a page. A kill leaves what was written; of a loss of power the checksum finds the rest."""
        out = page.left_out
        objects = [(item.key, item.size, item.etag) for item in page.objects]
        self._file.write(_framed([page.range, page.ended, objects, out, out.named, out.more]))
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
    data = zlib.compress(json.dumps(value).encode(), 1)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _frames(file: BinaryIO) -> Iterator[Any]:
    """The values, up to the first that is not whole; the file is at its beginning then."""
    while True:
        at = file.tell()
        head = file.read(_FRAME.size)
        nbytes, checksum = _FRAME.unpack(head) if len(head) == _FRAME.size else (0, 1)
        data = file.read(nbytes)
        if len(data) != nbytes or zlib.crc32(data) != checksum:
            file.seek(at)
            return
        yield json.loads(zlib.decompress(data))
