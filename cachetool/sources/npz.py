"""Zip files of arrays, such as ``.npz``, read without believing the sizes that they state.

The directory of a zip file states its own size and the unpacked size of each member. :mod:`zipfile` reads a directory
of any size at once, inflates a member until its stream ends, and cuts it only afterwards.
"""

from __future__ import annotations

import copy
import zipfile
from typing import IO, BinaryIO

from cachetool.core.schema import MAX_FIELDS

__all__ = ["directory_of", "stream_of", "unpacked"]

# 1 KiB for each array that a sample may have: an entry takes 46 bytes, the name and extra fields.
_DIRECTORY = 2**10 * MAX_FIELDS


def directory_of(file: BinaryIO) -> zipfile.ZipFile:
    """Return the zip file in ``file``.

    Raises :class:`zipfile.BadZipFile`, also for a directory that is far larger than one of as many arrays as a sample
    may have.
    """
    bounded = _Bounded(file)
    archive = zipfile.ZipFile(bounded)
    # Only the directory is bounded. Members are read in pieces, by sizes that the readers check themselves.
    bounded.most = None
    return archive


def stream_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """Return the bytes of a member as a stream. The checksum is compared at the end of the stream.

    Only as many bytes are inflated as are asked for.
    """
    # zipfile stops at the stated size, so a longer member would be cut without an error. One more byte shows it.
    more = copy.copy(member)
    more.file_size += 1
    return archive.open(more)


def unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return all bytes of a member. Raises ValueError when their number differs from the directory."""
    with stream_of(archive, member) as stream:
        data = stream.read(member.file_size + 1)
    if len(data) != member.file_size:
        raise ValueError(f"{'more' if len(data) > member.file_size else 'fewer'} bytes than its directory says")
    return data


class _Bounded:
    """A file that returns no more bytes at once than a sound directory has, while :attr:`most` is set."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.most: int | None = _DIRECTORY
        self.seek, self.tell, self.close, self.seekable = file.seek, file.tell, file.close, file.seekable

    def read(self, size: int = -1) -> bytes:
        if self.most is None:
            return self._file.read(size)
        data = self._file.read(min(size, self.most + 1) if size >= 0 else self.most + 1)
        if len(data) > self.most:
            raise zipfile.BadZipFile(f"its directory has more than {self.most} bytes")
        return data
