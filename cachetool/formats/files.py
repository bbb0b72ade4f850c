"""Files that are allocated before they are written, and what makes them durable.

A shard's file takes its whole bound at once (:meth:`BulkFile.create`) and is cut to its size before the fsync: the disk
cannot run full in the middle, a memory-mapped writer cannot die of SIGBUS, and the cap of the cache holds at every
instant. Every error of a full disk, quota or size limit becomes a :class:`CapacityError` naming the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cachetool.core.errors import CapacityError, CorruptError, UsageError
from cachetool.core.units import format_size
from cachetool.formats.runs import Bytes, as_bytes
from cachetool.proc.disk import DISK_BLOCK, MAP_SHARE, cache_around, naming_inodes, whole_blocks
from cachetool.proc.folders import fsync_folder, new_descriptor, remove_path

__all__ = [
    "BulkFile",
    "allocate",
    "allocated_bound",
    "capacity_errors",
    "create_exclusive",
    "map_file",
    "missing_is_corrupt",
    "not_plain",
    "open_plain",
    "open_read",
    "refuse_links",
    "refused_link",
    "start_writeback",
    "write_durably",
]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_WRITEBACK = 2**20  # smaller writes are not worth a call of their own
_VECTORS = 1024  # IOV_MAX of Linux and macOS
_PIECE = 2**21
"""One call writes up to the next multiple of these bytes: Linux keeps that much of a file in one huge page if one call
writes all of it, and a loader then gathers from it faster (docs/decisions.md)."""


def allocated_bound(nbytes: int, disk_block: int = DISK_BLOCK) -> int:
    """Most bytes that a preallocated file of ``nbytes`` takes on disk: whole blocks, plus the file system's own list
    of where they are."""
    return whole_blocks(nbytes, disk_block) + nbytes // MAP_SHARE + 4 * disk_block


@contextlib.contextmanager
def capacity_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Turn an OSError that means "no room" into :class:`CapacityError` naming ``nbytes`` and ``path``."""
    try:
        with naming_inodes(path):
            yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        if error.errno == errno.EFBIG:
            advice = "ulimit -f sets that limit; lower --shard-size"
        elif cache_around(path) is None:
            advice = "free some disk"
        else:
            advice = "free some disk, or lower --max-size or --shard-size"
        raise CapacityError(
            f"no room for {format_size(nbytes)} ({nbytes} bytes) at {path}: {os.strerror(error.errno)}; {advice}"
        ) from error


def _view(buffer: bytes | memoryview | Bytes) -> memoryview:
    if isinstance(buffer, np.ndarray):
        return as_bytes(buffer).data
    return memoryview(buffer).cast("B")


def _first(views: Sequence[memoryview], offset: int) -> list[memoryview]:
    """What one call writes of them, from ``offset``."""
    room, chosen = _PIECE - offset % _PIECE, []
    for view in views[:_VECTORS]:
        chosen.append(view[:room])
        room -= view.nbytes
        if room <= 0:
            break
    return chosen


def create_exclusive(path: Path) -> int:
    """The descriptor of a new, empty file, for reading and writing. Raises :class:`UsageError` when ``path`` exists."""
    try:
        with capacity_errors(path, 0):
            return new_descriptor(path)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already; it is never overwritten") from error


def allocate(fd: int, path: Path, nbytes: int) -> bool:
    """Give the file ``nbytes`` on disk, now. False where the file system or platform cannot."""
    if not hasattr(os, "posix_fallocate"):
        return False
    if nbytes <= 0:
        return True
    with capacity_errors(path, nbytes):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            return False
    return True


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to write these bytes to disk now, in the background; ``nbytes`` 0: all from ``offset``.

    Without it the disk idles until the fsync at the end: a TFRecord of 512 MiB was written at 1.6 to 2.3 times the rate
    with it. The advice says "not needed"; pages that are dirty or being written stay in the page cache all the same.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


class BulkFile:
    """A new file of a known upper size, written in large pieces, then cut to its size and made durable.

    ``append`` and ``write_at`` take bytes, contiguous memoryviews and arrays, and write all of them.
    """

    def __init__(self, path: Path, fd: int, bound: int, *, allocated: bool) -> None:
        self.path = path
        self.fd = fd
        self.bound = bound
        """Bytes allocated."""
        self.allocated = allocated
        """Whether the bound is really on disk."""
        self.size = 0
        """Where the next ``append`` writes, and the size that :meth:`finish` cuts to."""

    @classmethod
    def create(cls, path: Path, bound: int) -> BulkFile:
        """Make the file, which must not exist, and allocate ``bound`` bytes.

        Raises :class:`UsageError` when ``path`` exists and :class:`CapacityError` when there is no room.
        """
        fd = create_exclusive(path)
        try:
            return cls(path, fd, bound, allocated=allocate(fd, path, bound))
        except BaseException:
            os.close(fd)
            remove_path(path)
            raise

    def append(self, *buffers: bytes | memoryview | Bytes) -> int:
        """Write ``buffers`` one after another at the end; returns where the first begins."""
        at = self.size
        self.size += self.write_at(at, buffers)
        return at

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | Bytes]) -> int:
        """Write ``buffers`` one after another from ``offset``, all of them; returns the number of bytes."""
        views = [view for view in (_view(b) for b in buffers) if view.nbytes]
        done = 0
        with capacity_errors(self.path, sum(view.nbytes for view in views)):
            while views:
                count = os.pwritev(self.fd, _first(views, offset + done), offset + done)
                done += count
                # A short write is no error: drop what went out and carry on behind it.
                written = 0
                while written < len(views) and count >= views[written].nbytes:
                    count -= views[written].nbytes
                    written += 1
                views = views[written:]
                if count:
                    views[0] = views[0][count:]
        if done >= _WRITEBACK:
            start_writeback(self.fd, offset, done)
        return done

    def finish(self, size: int | None = None) -> int:
        """Cut to ``size`` (default: what was appended), fsync, close; returns the size."""
        size = self.size if size is None else size
        try:
            os.ftruncate(self.fd, size)
            with capacity_errors(self.path, size):
                os.fsync(self.fd)
        finally:
            self.close()
        return size

    def close(self) -> None:
        """Let go of the descriptor, leaving the file as it is. May be called twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new small file and fsync it and its folder. Raises :class:`UsageError` when ``path`` exists."""
    file = BulkFile.create(path, len(data))
    try:
        file.append(data)
        file.finish()
    finally:
        file.close()
    fsync_folder(path.parent)


@contextlib.contextmanager
def missing_is_corrupt(path: Path | str) -> Iterator[None]:
    """Raise :class:`CorruptError` where ``path``, a file of a shard, turns out not to be there, or to be no file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptError(f"{path} is missing") from error
    except IsADirectoryError as error:
        raise not_plain(path) from error


def not_plain(path: Path | str) -> CorruptError:
    """The error of a folder, pipe or device where a file of a shard should be."""
    return CorruptError(f"{path} is no plain file{_mend(path)}")


def refused_link(path: Path | str) -> CorruptError:
    """The error of a link in a shard of a cache, where cachetool makes none: it may lead to a file of somebody else."""
    return CorruptError(f"{path} is a link, which cachetool never makes in a shard and does not follow{_mend(path)}")


def _mend(path: Path | str) -> str:
    """What to do about a file, or the folder, of a shard; nothing is known to do about one outside a cache."""
    shards = next((above for above in Path(path).absolute().parents if above.name == "shards"), None)
    return "" if shards is None else f"; run: cachetool verify --repair --cache {shlex.quote(str(shards.parent))}"


def refuse_links(folder: str, names: Iterable[str]) -> None:
    """Raise :class:`CorruptError` where the ``folder`` of a shard, or a folder on the way from it to one of the files
    ``names``, is a link. Whoever opens the files looks at their last part: ``links=False``."""
    above = {name[:at] for name in names for at, mark in enumerate(name) if mark == "/"}
    for path in (folder, *(f"{folder}/{name}" for name in sorted(above))):
        if os.path.islink(path):
            raise refused_link(path)


def open_read(path: Path | str, *, links: bool) -> int:
    """A descriptor that reads ``path``, whatever that is. Raises OSError, and :class:`CorruptError` for a link where
    ``links`` are not followed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for its other end
    try:
        return os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise refused_link(path) from error
        if error.errno == errno.ENXIO:  # a socket
            raise IsADirectoryError(errno.EISDIR, "not a plain file", str(path)) from error
        raise


def open_plain(path: Path | str, *, links: bool = True) -> tuple[int, int]:
    """A descriptor that reads the file ``path``, and its size. Raises OSError, also for what is no plain file, and
    :class:`CorruptError` for a link where ``links`` are not followed."""
    fd = open_read(path, links=links)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, "not a plain file", str(path))
    return fd, status.st_size


def map_file(path: Path, *, links: bool = True) -> Bytes:
    """The bytes of a file as a read-only, shared memory map that lives as long as anything points into it. Raises what
    :func:`open_plain` does."""
    fd, size = open_plain(path, links=links)
    try:
        if size == 0:
            return np.empty(0, dtype=np.uint8)  # an empty file cannot be mapped
        return np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(fd)
