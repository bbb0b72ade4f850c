"""The bodies of answers: where their bytes go, and how one that came in parts becomes whole.

A body may come over several attempts. What says where it ends is, first of all, the server: the length of the first
answer, or the total that a later one names in ``Content-Range``; an answer that brings less than the rest is gone on
with, and one that contradicts what is known is never appended.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from cachetool.core.errors import BadObject
from cachetool.stores.redact import redact

__all__ = ["MOST", "Broken", "Partial", "Sink", "receive"]

_CHUNK = 2**20
_AT_ONCE = 2**28
"""Bytes of memory that are taken when a server says that so many come; more when they do."""
MOST = 2**32
"""Bytes of a body whose size nobody told."""
_TOO_MANY = "more than {} bytes come, which is the most that is taken"
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")


class Broken(Exception):
    """An attempt failed in a way that another may not."""


class _Body:
    """Memory for a body: what comes is read into its place."""

    def __init__(self) -> None:
        self._memory, self._filled = memoryview(b""), 0

    def __len__(self) -> int:
        return self._filled

    def take(self, answer: http.client.HTTPResponse, nbytes: int, wanted: int | None) -> int:
        """Read up to ``nbytes`` of an answer that brings ``wanted`` in all; gives how many came."""
        if self._filled + nbytes > len(self._memory):
            grown = max(self._filled + nbytes, 2 * len(self._memory), min(wanted or 0, _AT_ONCE))
            memory = np.empty(grown if wanted is None else min(grown, wanted), dtype=np.uint8).data
            memory[: self._filled] = self._memory[: self._filled]
            self._memory = memory
        try:
            came = answer.readinto(self._memory[self._filled : self._filled + nbytes])
        except http.client.IncompleteRead as error:  # of a chunked body, whose first chunks are in their place
            self._filled += len(error.partial)
            raise
        self._filled += came
        return came

    def clear(self) -> None:
        """Begin again."""
        self._filled = 0

    def as_memory(self) -> memoryview:
        """What came; of memory that was taken for much more, a copy."""
        body = self._memory[: self._filled]
        return memoryview(bytes(body)) if 2 * self._filled < len(self._memory) else body.toreadonly()


class Sink:
    """A file where a body goes instead of memory."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        """``file`` is empty; ``progress`` is told how many bytes are in it."""
        self._file, self._progress = file, progress

    def __len__(self) -> int:
        return self._file.tell()

    def take(self, answer: http.client.HTTPResponse, nbytes: int, wanted: int | None) -> int:
        """Write up to ``nbytes`` of an answer behind what is there; gives how many came."""
        try:
            part = answer.read(nbytes)
        except http.client.IncompleteRead as error:
            self._file.write(error.partial)
            raise
        self._file.write(part)
        self._progress(len(self))
        return len(part)

    def clear(self) -> None:
        """Begin again."""
        self._file.seek(0)
        self._file.truncate()


@dataclass(slots=True)
class Partial:
    """What has come of a body so far, over several attempts."""

    data: _Body | Sink = field(default_factory=_Body)
    validator: str = ""
    """The strong ETag it belongs to, quoted; empty: it cannot be gone on with."""
    total: int | None = None
    """Bytes of all of it, where the server told."""

    @property
    def body(self) -> memoryview:
        """What came, where it is in memory."""
        return self.data.as_memory() if isinstance(self.data, _Body) else memoryview(b"")

    def clear(self) -> None:
        """Begin again."""
        self.data.clear()
        self.validator, self.total = "", None


def receive(answer: http.client.HTTPResponse, partial: Partial, size: int, most: int, url: str) -> None:
    """Read the body of an answer into ``partial``, behind what is there when it goes on with that.

    ``size`` are the bytes that a 200 must bring, ``most`` the most that are taken; -1 when not known. Raises
    :class:`Broken` while it is not whole, :class:`BadObject` for a body that is not as promised.
    """
    length = answer.length
    _refuse_framing(answer, url)
    if len(partial.data) and answer.status == 206:
        end: int | None = _goes_on(answer, partial)
    else:
        if length is None and not answer.chunked and size < 0:
            raise BadObject(f"{redact(url)}: the server tells no length, so that nobody knows whether it is complete")
        if answer.status == 200 and size >= 0 and length not in (None, size):
            raise BadObject(f"{redact(url)} changed since it was listed: {length} bytes instead of {size}")
        partial.clear()
        etag = answer.headers.get("ETag", "")
        partial.validator, partial.total = etag if etag.startswith('"') else "", length
        end = length
    _read(answer, partial.data, end, partial.total, _limit(size, most, answer.status), url)
    if partial.total is not None and len(partial.data) < partial.total:
        raise Broken(f"the server sent {len(partial.data)} of {partial.total} bytes")


def _refuse_framing(answer: http.client.HTTPResponse, url: str) -> None:
    """Of a name that comes several times :mod:`http.client` takes the first, and what it does not know for nothing:
    where the body ends would be a guess (RFC 9112, section 6.3)."""
    if _said(answer, "Content-Encoding") - {"identity"}:
        raise BadObject(f"{redact(url)}: the server encodes the body, although it was asked not to")
    coded = _said(answer, "Transfer-Encoding")
    lengths = {part.strip().lstrip("0") for said in _said(answer, "Content-Length") for part in said.split(",")}
    is_readable = coded == {"chunked"} if answer.chunked else coded <= {"identity"}
    if not is_readable or len(lengths) > 1:
        raise BadObject(f"{redact(url)}: the server says in several ways, or in one unknown, where the body ends")


def _said(answer: http.client.HTTPResponse, name: str) -> set[str]:
    return {value.strip().lower() for value in answer.headers.get_all(name, ())} - {""}


def _goes_on(answer: http.client.HTTPResponse, partial: Partial) -> int:
    """Where the part ends that an answer brings for the rest of a body. Raises :class:`Broken` when it is of none."""
    said = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
    if said is None or int(said[1]) != len(partial.data):
        raise Broken("the server goes on at another place than asked")
    end, total = int(said[2]) + 1, partial.total if said[3] == "*" else int(said[3])
    other = partial.total is not None and total != partial.total
    if answer.headers.get("ETag", "") != partial.validator or other:  # not every server that knows Range knows If-Range
        partial.clear()
        raise Broken("it was replaced while it was fetched")
    if total is None or not len(partial.data) < end <= total or answer.length not in (None, end - len(partial.data)):
        partial.clear()  # from the beginning: nobody knows where it would end
        raise Broken("the server does not say what it goes on with")
    partial.total = total
    return end


def _read(
    answer: http.client.HTTPResponse, data: _Body | Sink, end: int | None, total: int | None, most: int, url: str
) -> None:
    """Append an answer's body to ``data``: up to ``end`` bytes in all, or to its own end; never beyond ``most``."""
    if end is not None and end > most:
        raise BadObject(f"{redact(url)}: {_TOO_MANY.format(most)}")
    while end is None or len(data) < end:
        if not data.take(answer, _CHUNK if end is None else min(_CHUNK, end - len(data)), total):
            break
        if len(data) > most:
            raise BadObject(f"{redact(url)}: {_TOO_MANY.format(most)}")
    if end is not None and len(data) < end:
        raise Broken(f"the connection ended after {len(data)} of {end if total is None else total} bytes")
    if end is not None and answer.read(1):  # also lets http.client see the end, so that the connection is used again
        raise Broken("the server sent more than it said")


def _limit(size: int, most: int, status: int) -> int:
    if size >= 0 and status == 200:
        return size
    return most if most >= 0 else max(size, MOST)
