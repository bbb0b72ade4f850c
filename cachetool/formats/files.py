"""Files that are allocated before they are written, and the steps that make them durable.

:meth:`BulkFile.create` allocates the whole bound of a shard's file at once. :meth:`BulkFile.finish` truncates the file
to its size before the fsync. So the disk cannot run out of space in the middle of a shard, a writer through a memory
map cannot die of SIGBUS, and the cap of the cache holds at every instant. Every error of a full disk, quota or size
limit becomes a :class:`CapacityError` that names the bytes.
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
# Errors of file systems that cannot allocate (EOPNOTSUPP on NFS before 4.2, for example). The file is then written
# without it.
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# A write below 1 MiB is not worth a system call of its own to start its writeback.
_WRITEBACK = 2**20
# IOV_MAX of Linux and macOS: a call with more buffers fails with EINVAL.
_VECTORS = 1024
# One call writes up to the next multiple of 2 MiB. Linux keeps these bytes of a file in one huge page if one call
# writes all of them. A loader then maps them by one entry and gathers up to 8 % faster (docs/explanation/decisions.md).
_PIECE = 2**21


def allocated_bound(nbytes: int, disk_block: int = DISK_BLOCK) -> int:
    """Return the most bytes that a preallocated file of ``nbytes`` takes on disk.

    These are whole blocks, plus the file system's own list of where the blocks are.
    """
    return whole_blocks(nbytes, disk_block) + nbytes // MAP_SHARE + 4 * disk_block


@contextlib.contextmanager
def capacity_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Turn an OSError that means "no space" into a :class:`CapacityError` that names ``nbytes`` and ``path``."""
    try:
        with naming_inodes(path):
            yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # EFBIG is no full disk but a limit of this process, so freeing space does not help.
        if error.errno == errno.EFBIG:
            advice = "raise the limit (ulimit -f), or lower --shard-size"
        # The options of a cache mean nothing for a file outside of one, such as a part of `convert --out`.
        elif cache_around(path) is None:
            advice = "free some disk space"
        else:
            advice = "free some disk space, or lower --max-size or --shard-size"
        raise CapacityError(
            f"no space for {format_size(nbytes)} ({nbytes} bytes) at {path}: {os.strerror(error.errno)}; {advice}"
        ) from error


def _view(buffer: bytes | memoryview | Bytes) -> memoryview:
    """Return the bytes of a buffer as a flat memoryview, without a copy if the buffer is contiguous."""
    if isinstance(buffer, np.ndarray):
        return as_bytes(buffer).data
    return memoryview(buffer).cast("B")


def _first(views: Sequence[memoryview], offset: int) -> list[memoryview]:
    """Return the pieces of ``views`` that the next call writes, from ``offset`` of the file on."""
    # The first call ends at a multiple of 2 MiB, so that all later calls fill whole huge pages.
    room, chosen = _PIECE - offset % _PIECE, []
    for view in views[:_VECTORS]:
        chosen.append(view[:room])
        room -= view.nbytes
        if room <= 0:
            break
    return chosen


def create_exclusive(path: Path) -> int:
    """Return the descriptor of a new, empty file for reading and writing. Raises :class:`UsageError` when ``path``
    exists."""
    try:
        with capacity_errors(path, 0):
            # O_EXCL: another process may have made the file since anybody looked. No file is ever overwritten.
            return new_descriptor(path)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already; it is never overwritten") from error


def allocate(fd: int, path: Path, nbytes: int) -> bool:
    """Allocate ``nbytes`` on disk for the file, now. Return False where the file system or platform cannot do that."""
    # macOS has no posix_fallocate. There a shard is written without an allocation, and running out of space shows
    # later.
    if not hasattr(os, "posix_fallocate"):
        return False
    # posix_fallocate refuses a length of 0 with EINVAL, which would look like a file system that cannot allocate.
    if nbytes <= 0:
        return True
    with capacity_errors(path, nbytes):
        try:
            # The blocks are reserved for real; a sparse file of this size would fail at some later write instead.
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            return False
    return True


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing these bytes to disk now, in the background. ``nbytes`` 0: all from ``offset`` on.

    Without this call the disk is idle until the fsync at the end. With it a TFRecord file of 512 MiB was written 1.6 to
    2.3 times as fast.
    """
    # The advice says "not needed", and the kernel starts to write dirty pages because of it. Pages that are dirty or
    # being written stay in the page cache all the same, so loaders that read the new shard soon find them there.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


class BulkFile:
    """A new file of a known largest size. It is written in large pieces, then truncated to its size and made durable.

    ``append`` and ``write_at`` accept bytes, contiguous memoryviews and arrays, and write all of them.
    """

    def __init__(self, path: Path, fd: int, bound: int, *, allocated: bool) -> None:
        self.path = path
        self.fd = fd
        self.bound = bound
        """Bytes to allocate."""
        self.allocated = allocated
        """True if the bound is really allocated on disk."""
        self.size = 0
        """Position of the next ``append``, in bytes. :meth:`finish` truncates the file to this size."""

    @classmethod
    def create(cls, path: Path, bound: int) -> BulkFile:
        """Make the file, which must not exist, and allocate ``bound`` bytes.

        Raises :class:`UsageError` when ``path`` exists and :class:`CapacityError` when the disk has too little space.
        """
        fd = create_exclusive(path)
        try:
            return cls(path, fd, bound, allocated=allocate(fd, path, bound))
        except BaseException:
            os.close(fd)
            # A failed allocation may have reserved a part of the space. An empty file in its place would also make a
            # second try fail with "exists already".
            remove_path(path)
            raise

    def append(self, *buffers: bytes | memoryview | Bytes) -> int:
        """Write ``buffers`` one after another at the end. Return the position of the first one."""
        at = self.size
        self.size += self.write_at(at, buffers)
        return at

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | Bytes]) -> int:
        """Write all of ``buffers`` one after another from ``offset`` on. Return the number of bytes."""
        views = [view for view in (_view(b) for b in buffers) if view.nbytes]
        done = 0
        with capacity_errors(self.path, sum(view.nbytes for view in views)):
            while views:
                # pwritev writes many buffers without joining them in memory and does not move the descriptor's
                # position, so several arrays of a shard can grow in turn.
                count = os.pwritev(self.fd, _first(views, offset + done), offset + done)
                done += count
                # A short write is no error (Linux writes at most 2 GiB a call): drop the written
                # bytes and continue behind them.
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
        """Truncate to ``size`` (default: the appended bytes), fsync and close. Return the size."""
        size = self.size if size is None else size
        try:
            # Before the fsync, so that the new size is durable with the bytes, and the unused rest of the bound is free
            # again.
            os.ftruncate(self.fd, size)
            with capacity_errors(self.path, size):
                # On file systems that allocate late (NFS, or where fallocate is missing) ENOSPC and EDQUOT appear only
                # here.
                os.fsync(self.fd)
        finally:
            self.close()
        return size

    def close(self) -> None:
        """Close the descriptor and leave the file as it is. May be called twice."""
        if self.fd >= 0:
            # The number is forgotten before the close: a signal handler that closes the file again must not close
            # another file that got the same number.
            fd, self.fd = self.fd, -1
            os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new small file and fsync the file and its folder. Raises :class:`UsageError` when ``path`` exists."""
    file = BulkFile.create(path, len(data))
    try:
        file.append(data)
        file.finish()
    finally:
        file.close()
    # A new name survives a power cut only when its folder is synced.
    fsync_folder(path.parent)


@contextlib.contextmanager
def missing_is_corrupt(path: Path | str) -> Iterator[None]:
    """Raise :class:`CorruptError` if ``path``, a file of a shard, is missing or is not a file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptError(f"{path} is missing") from error
    except IsADirectoryError as error:
        raise not_plain(path) from error


def not_plain(path: Path | str) -> CorruptError:
    """Return the error for a folder, pipe or device in the place of a shard's file."""
    return CorruptError(f"{path} is no plain file{_mend(path)}")


def refused_link(path: Path | str) -> CorruptError:
    """Return the error for a link in a shard of a cache. cachetool makes no links there, so it may lead to a foreign
    file."""
    return CorruptError(f"{path} is a link, but a shard never has links, so cachetool does not follow it{_mend(path)}")


def _mend(path: Path | str) -> str:
    """Return the words of an error that say how to repair a shard of a cache. Empty for a file outside of a cache."""
    # A shard of a cache lies in CACHE/shards/ID. Any other place has no cache to repair.
    shards = next((above for above in Path(path).absolute().parents if above.name == "shards"), None)
    return "" if shards is None else f"; run: cachetool verify --repair --cache {shlex.quote(str(shards.parent))}"


def refuse_links(folder: str, names: Iterable[str]) -> None:
    """Raise :class:`CorruptError` if the ``folder`` of a shard, or a folder between it and one of ``names``, is a link.

    The last part of each name is checked by the code that opens the file, with ``links=False``.
    """
    # O_NOFOLLOW refuses a link in the last part of a path only, so the folders above are checked by name.
    above = {name[:at] for name in names for at, mark in enumerate(name) if mark == "/"}
    for path in (folder, *(f"{folder}/{name}" for name in sorted(above))):
        if os.path.islink(path):
            raise refused_link(path)


def open_read(path: Path | str, *, links: bool) -> int:
    """Return a descriptor that reads ``path``, of any type.

    Raises OSError, and :class:`CorruptError` for a link if ``links`` is False.
    """
    # O_NONBLOCK: opening a pipe in the place of a file would wait for ever for a writer. For plain files the flag has
    # no effect.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise refused_link(path) from error
        # Linux answers ENXIO when a socket is opened.
        if error.errno == errno.ENXIO:
            raise IsADirectoryError(errno.EISDIR, "not a plain file", str(path)) from error
        raise


def open_plain(path: Path | str, *, links: bool = True) -> tuple[int, int]:
    """Return a descriptor that reads the file ``path``, and the file's size in bytes.

    Raises OSError, also for anything that is not a plain file, and :class:`CorruptError` for a link if ``links`` is
    False.
    """
    fd = open_read(path, links=links)
    # The type is taken from the open descriptor, because the name may lead to something else a moment later.
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, "not a plain file", str(path))
    return fd, status.st_size


def map_file(path: Path, *, links: bool = True) -> Bytes:
    """Return the bytes of a file as a read-only, shared memory map, which lives as long as an array refers to it.

    Raises the errors of :func:`open_plain`.
    """
    fd, size = open_plain(path, links=links)
    try:
        # mmap refuses an empty file with an error.
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        # The map has its own reference to the file: the descriptor can be closed, and the bytes stay readable after
        # another process deletes the file.
        return np.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(fd)
