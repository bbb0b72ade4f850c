"""Zip files of arrays, as ``.npz`` are, believed no further than what comes out of them.

The directory of a zip file says how large it is itself and what each member unpacks to; :mod:`zipfile` reads the first
at once, inflates a member until its stream ends, and cuts it afterwards.
"""

from __future__ import annotations

import copy
import zipfile
from typing import IO, BinaryIO

from cachetool.core.schema import MAX_FIELDS

__all__ = ["directory_of", "stream_of", "unpacked"]

_DIRECTORY = 2**10 * MAX_FIELDS


def directory_of(file: BinaryIO) -> zipfile.ZipFile:
    """The zip file in ``file``. Raises :class:`zipfile.BadZipFile`, also when its directory is far larger than one of
    as many arrays as a sample may have."""
    bounded = _Bounded(file)
    archive = zipfile.ZipFile(bounded)
    bounded.most = None
    return archive


def stream_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """The bytes of a member; one more than its directory says can be read, so that more of them are noticed.

    What is asked for at once is inflated at once and no more; the checksum is compared where the stream ends.
    """
    more = copy.copy(member)
    more.file_size += 1
    return archive.open(more)


def unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """All bytes of a member. Raises ValueError when they are not as many as its directory says."""
    with stream_of(archive, member) as stream:
        data = stream.read(member.file_size + 1)
    if len(data) != member.file_size:
        raise ValueError(f"{'more' if len(data) > member.file_size else 'fewer'} bytes than its directory says")
    return data


class _Bounded:
    """A file that hands out no more at once than a sound directory has, as long as :attr:`most` is set."""

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
