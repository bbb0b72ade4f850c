"""Files of which there was no map to be had, read when a batch needs them.

::

    runs of one field -- by their file --> open, preadv into the batch, close      7 microseconds a sample
                                           or a descriptor that was kept           3

A process may have 65,530 maps. Mapped and unmapped one after another a file takes 18 microseconds a sample, since the
kernel must tell all processors each time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.formats.files import missing_is_corrupt, not_plain, open_read
from cachetool.formats.runs import Bytes, Int64s
from cachetool.loaders.read.gather import evicted_errors
from cachetool.loaders.view import ShardFile

__all__ = ["Descriptors", "Unmapped", "raise_limit"]

_MOST = 2**18  # descriptors
_USUAL = 1024  # a program that uses select() knows none from here on
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def raise_limit() -> None:
    """Let this process have as many descriptors as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Descriptors:
    """Open files, the first that were asked for: up to a ``share`` of those that this process may have. They are closed
    with their parts, or when this is collected."""

    def __init__(self, *, share: float) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = int(share * min(_MOST, _MOST if soft == resource.RLIM_INFINITY else soft))
        self._above = _USUAL if self._most > _USUAL else 0
        self._open: dict[str, dict[str, int]] = {}
        self._count = 0
        self._finalizer = weakref.finalize(self, _close, self._open)

    def open(self, part: ShardFile, name: str) -> tuple[int, bool]:
        """A descriptor of a file of a part, and whether it is kept, else it is the caller's to close. Raises
        :class:`CorruptError` where there is no such file, :class:`UsageError` when the part was evicted."""
        fds = self._open.get(part.id)
        if fds is not None and name in fds:
            return fds[name], True
        path = f"{part.where}/{name}"
        try:
            fd = open_read(path, links=part.links)
        except OSError:
            with evicted_errors(part), missing_is_corrupt(path):
                raise
        if self._count >= self._most:
            return fd, False
        if self._above:
            low = fd
            try:
                fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, self._above)
            finally:
                os.close(low)
        self._open.setdefault(part.id, {})[name] = fd
        self._count += 1
        return fd, True

    def keep(self, wanted: set[str]) -> None:
        """Close the files of all parts but these."""
        gone = {id: self._open.pop(id) for id in [id for id in self._open if id not in wanted]}
        self._count -= sum(map(len, gone.values()))
        _close(gone)

    def close(self) -> None:
        """Close all of them."""
        self.keep(set())


def _close(fds: dict[str, dict[str, int]]) -> None:
    while fds:
        _, files = fds.popitem()
        for fd in files.values():
            os.close(fd)


class Unmapped:
    """In which files the values of one field lie, for some samples: value i in the part ``parts[numbers[i]]``."""

    __slots__ = ("_descriptors", "_names", "_numbers", "_parts")

    def __init__(
        self, descriptors: Descriptors, parts: Sequence[ShardFile], names: Sequence[str], numbers: npt.NDArray[np.intp]
    ) -> None:
        self._descriptors, self._parts, self._names, self._numbers = descriptors, parts, names, numbers

    def slice(self, start: int, stop: int) -> Unmapped:
        """The same of values ``start`` to ``stop``."""
        return Unmapped(self._descriptors, self._parts, self._names, self._numbers[start:stop])

    def read(self, out: Bytes, to: Int64s, starts: Int64s, sizes: Int64s) -> None:
        """Read ``sizes[i]`` bytes from ``starts[i]`` of its file to ``out[to[i] :]``, for every i. Raises
        :class:`CorruptError`, naming a file that is cut short, and what :meth:`Descriptors.open` raises."""
        memory, to_, starts_, sizes_ = out.data, to.tolist(), starts.tolist(), sizes.tolist()
        preadv, i = os.preadv, 0
        try:
            for i, fd in self._opened():
                at, start = to_[i], starts_[i]
                stop = at + sizes_[i]
                while at < stop:  # one call brings 2 GiB at most
                    if not (count := preadv(fd, (memory[at:stop],), start)):
                        has, path = os.fstat(fd).st_size, self._path(i)
                        raise CorruptError(f"{path} is cut short: it has {has} bytes, a value reaches out of them")
                    at, start = at + count, start + count
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ESPIPE):  # a folder, a pipe
                raise not_plain(self._path(i)) from error
            raise

    def _path(self, i: int) -> str:
        part, name = self._file(int(self._numbers[i]))
        return f"{part.where}/{name}"

    def asleep(self, starts: Int64s) -> npt.NDArray[np.bool_]:
        """Which of the pages at these positions are not in memory, as far as the kernel says: bool, one each."""
        asleep, page = np.zeros(len(starts), dtype=np.bool_), bytearray(1)
        if not _NOWAIT:
            return asleep
        for i, fd in self._opened():
            try:
                os.preadv(fd, (page,), int(starts[i]), _NOWAIT)
            except BlockingIOError:
                asleep[i] = True
            except OSError:  # a file system that does not say
                pass
        return asleep

    def will_need(self, starts: Int64s, sizes: Int64s) -> None:
        """Have the kernel read these runs, without waiting for it."""
        if not hasattr(os, "posix_fadvise"):
            return
        starts_, sizes_ = starts.tolist(), sizes.tolist()
        for i, fd in self._opened():
            with contextlib.suppress(OSError):  # no plain file, as the read says
                os.posix_fadvise(fd, starts_[i], sizes_[i], os.POSIX_FADV_WILLNEED)

    def _file(self, number: int) -> tuple[ShardFile, str]:
        return self._parts[number], self._names[number]

    def _opened(self) -> Iterator[tuple[int, int]]:
        """The number of each value with a descriptor of its file, file by file."""
        order = np.argsort(self._numbers, kind="stable")
        last, fd, kept = -1, -1, True
        try:
            for i, number in zip(order.tolist(), self._numbers[order].tolist(), strict=True):
                if number != last:
                    if not kept:
                        kept = True
                        os.close(fd)
                    fd, kept = self._descriptors.open(*self._file(number))
                    last = number
                yield i, fd
        finally:
            if not kept:
                os.close(fd)
