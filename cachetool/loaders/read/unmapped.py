"""Files that got no map, read when a batch needs them.

::

    runs of one field -- by their file --> open, preadv into the batch, close      7 microseconds a sample
                                           or a descriptor that was kept           3

A process may have 65,530 maps. Mapping and unmapping a file for each sample would take 18 microseconds, because the
kernel must tell all processors about each change.
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

__all__ = ["Descriptors", "Unmapped", "asleep_at", "raise_limit"]

_MOST = 2**18
"""The maximum of kept descriptors."""
# A program that uses select() cannot handle descriptors from this number on, so files that are kept
# open get higher numbers and leave the low ones to the program.
_USUAL = 1024
# Linux alone has this flag; without it nothing is known about what is in memory.
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


def raise_limit() -> None:
    """Raise the limit of open files of this process to what it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Descriptors:
    """Open files: the first that were asked for, up to the part ``share`` of the descriptors that this process may
    have.

    They are closed with their shards, or when this object is deleted.
    """

    def __init__(self, *, share: float) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = int(share * min(_MOST, _MOST if soft == resource.RLIM_INFINITY else soft))
        self._above = _USUAL if self._most > _USUAL else 0
        self._open: dict[str, dict[str, int]] = {}
        self._count = 0
        # Given the dict rather than self, so that the finalizer does not keep this object alive.
        self._finalizer = weakref.finalize(self, _close, self._open)

    def open(self, part: ShardFile, name: str) -> tuple[int, bool]:
        """Return a descriptor of a file of a shard, and True if it is kept; otherwise the caller closes it.

        Raises :class:`CorruptError` when there is no such file, and :class:`UsageError` when the shard was evicted.
        """
        fds = self._open.get(part.id)
        if fds is not None and name in fds:
            return fds[name], True
        path = f"{part.where}/{name}"
        try:
            fd = open_read(path, links=part.links)
        # Only after the failure it is looked why: an eviction may delete the file at any moment
        # before.
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
        """Close the files of all shards except these."""
        gone = {id: self._open.pop(id) for id in [id for id in self._open if id not in wanted]}
        self._count -= sum(map(len, gone.values()))
        _close(gone)

    def close(self) -> None:
        """Close all files."""
        self.keep(set())


def _close(fds: dict[str, dict[str, int]]) -> None:
    # Each entry is removed before its files are closed. So a call that is interrupted leaves no
    # number of a closed file behind, which may belong to another file by then.
    while fds:
        _, files = fds.popitem()
        for fd in files.values():
            os.close(fd)


def asleep_at(fd: int, positions: Int64s) -> npt.NDArray[np.bool_]:
    """Return a bool for each position of an open file: True if the kernel says that its page is not in memory."""
    asleep, page = np.zeros(len(positions), dtype=np.bool_), bytearray(1)
    if not _NOWAIT:
        return asleep
    for i, position in enumerate(positions.tolist()):
        try:
            # RWF_NOWAIT makes the read fail rather than wait for the disk, which tells what is in memory without a map
            # of the file.
            os.preadv(fd, (page,), position, _NOWAIT)
        except BlockingIOError:
            asleep[i] = True
        # The file system does not support the flag. The page counts as being in memory, so nothing is read ahead, and
        # the batch waits for the disk.
        except OSError:
            pass
    return asleep


class Unmapped:
    """The files in which the values of one field lie, for some samples. Value i is in the shard
    ``parts[numbers[i]]``."""

    __slots__ = ("_descriptors", "_names", "_numbers", "_parts")
    near = 2**14
    """Bytes between two runs of one value that are read rather than left out."""

    def __init__(
        self, descriptors: Descriptors, parts: Sequence[ShardFile], names: Sequence[str], numbers: npt.NDArray[np.intp]
    ) -> None:
        self._descriptors, self._parts, self._names, self._numbers = descriptors, parts, names, numbers

    def slice(self, start: int, stop: int) -> Unmapped:
        """Return the files of values ``start`` to ``stop`` alone."""
        return Unmapped(self._descriptors, self._parts, self._names, self._numbers[start:stop])

    def repeat(self, count: int) -> Unmapped:
        """Return the file of each value ``count`` times."""
        return Unmapped(self._descriptors, self._parts, self._names, np.repeat(self._numbers, count))

    def read(self, out: Bytes, to: Int64s, starts: Int64s, sizes: Int64s) -> None:
        """Read ``sizes[i]`` bytes from position ``starts[i]`` of its file to ``out[to[i] :]``, for every i.

        Raises :class:`CorruptError`, which names a file that is cut short, and the errors of :meth:`Descriptors.open`.
        """
        memory, to_, starts_, sizes_ = out.data, to.tolist(), starts.tolist(), sizes.tolist()
        preadv, i = os.preadv, 0
        try:
            for i, fd in self._opened():
                at, start = to_[i], starts_[i]
                stop = at + sizes_[i]
                # One call of preadv reads 2 GiB at most, so larger values take several.
                while at < stop:
                    if not (count := preadv(fd, (memory[at:stop],), start)):
                        has, path = os.fstat(fd).st_size, self._path(i)
                        raise CorruptError(f"{path} is cut short: it has {has} bytes, but a value needs more")
                    at, start = at + count, start + count
        except OSError as error:
            # These come of a folder or a pipe in place of the file, put there by somebody else.
            if error.errno in (errno.EISDIR, errno.ESPIPE):
                raise not_plain(self._path(i)) from error
            raise

    def _path(self, i: int) -> str:
        part, name = self._file(int(self._numbers[i]))
        return f"{part.where}/{name}"

    def asleep(self, starts: Int64s) -> npt.NDArray[np.bool_]:
        """Return a bool for each position: True if the kernel says that its page is not in memory."""
        asleep = np.zeros(len(starts), dtype=np.bool_)
        for i, fd in self._opened():
            asleep[i] = asleep_at(fd, starts[i : i + 1])[0]
        return asleep

    def will_need(self, starts: Int64s, sizes: Int64s) -> None:
        """Ask the kernel to read these runs, without waiting."""
        if not hasattr(os, "posix_fadvise"):
            return
        starts_, sizes_ = starts.tolist(), sizes.tolist()
        for i, fd in self._opened():
            # The file is no plain file, which the read itself reports.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, starts_[i], sizes_[i], os.POSIX_FADV_WILLNEED)

    def _file(self, number: int) -> tuple[ShardFile, str]:
        return self._parts[number], self._names[number]

    def _opened(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each value with a descriptor of its file, file by file."""
        # Sorted by file, so that each file is opened once a call.
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
