"""Values of JSON over pipes, a line each, with bytes behind a line that announces some; and errors as such values.

All processes of ours talk so. An error on its way from a feeder to the training process is text: what happened, and
where.
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from cachetool.core.errors import CacheToolError, UsageError, from_json, to_json

__all__ = [
    "FeederTraceback",
    "Lines",
    "TransformError",
    "closed",
    "described",
    "keep_standard_streams",
    "own_streams",
    "ready",
    "rebuilt",
    "shared",
    "write_line",
]


def ready(seconds: float | None, *fds: int) -> set[int]:
    """Which of these have something to read, or have ended: waited for, but no longer than ``seconds``. Their numbers
    may be any: select ends at 1,024."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else 1000 * seconds)}


class Lines:
    """Values out of a pipe, however their lines are cut on their way."""

    def __init__(self, fd: int, *, most: int = sys.maxsize) -> None:
        """``most``: bytes of a line, where a hostile file may command the other side."""
        self.fd, self.ended = fd, False
        self._most = most
        self._buffer = bytearray()
        self._searched = 0

    def receive(self) -> None:
        """Read what is there, waiting for at least something."""
        data = os.read(self.fd, 2**16)
        self.ended = not data
        self._buffer += data

    def next(self) -> Any:
        """The value of a line that has come whole; None when there is none. Raises ``ValueError`` for what is none."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            if self._searched > self._most:
                raise ValueError("a line without an end")
            return None
        line = self._buffer[:end]
        del self._buffer[: end + 1]
        self._searched = 0
        return json.loads(line)

    def __iter__(self) -> Iterator[Any]:
        """The values that have come whole."""
        return iter(self.next, None)

    def wait(self) -> Any:
        """The next value, waited for; None at the end."""
        while (value := self.next()) is None and not self.ended:
            self.receive()
        return value

    def fill(self, view: memoryview, seconds: float | None = None) -> None:
        """Fill ``view`` with the bytes that come next. Raises ``EOFError`` where they end before, and ``TimeoutError``
        where none comes for so long."""
        done = min(len(view), len(self._buffer))
        view[:done] = self._buffer[:done]
        del self._buffer[:done]
        while done < len(view):
            if not ready(seconds, self.fd):
                raise TimeoutError
            if not (count := os.readv(self.fd, [view[done:]])):
                raise EOFError
            done += count


def write_line(fd: int, value: Any, *blocks: Any) -> None:
    """Write a value as a line of JSON, and behind it ``blocks`` of bytes, all of them."""
    for data in (json.dumps(value).encode() + b"\n", *blocks):
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


def keep_standard_streams() -> None:
    """Open the standard streams that are closed on ``/dev/null``, for this process and those it starts: whoever starts
    daemons closes them.

    Else the next descriptor takes the number, that of a shard or of a pipe, and what a library says there is in it.
    SQLite does the same, but children of its process do not get what it opens: they call this too.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one, as those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def own_streams() -> tuple[Lines, int]:
    """The standard input and output of this process, out of reach of libraries and of programs that these start: they
    find nothing to read, and what they print goes to stderr."""
    keep_standard_streams()
    lines, out = Lines(os.dup(0)), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return lines, out


_MOST = 500
"""Characters of a message; the traceback has all of it."""


class FeederTraceback(Exception):
    """The cause of an error that happened in a feeder: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


class TransformError(Exception):
    """What the user's ``transform`` raised, as its ``__cause__``; its text says for which sample."""


def described(error: BaseException) -> dict[str, Any]:
    """The error as plain values, with a traceback where that helps: not for a wrong argument, which the message says;
    of what a transform raised, the user's own part."""
    if isinstance(error, TransformError):
        cause = error.__cause__ or error
        # The first of its places is our call.
        where = traceback.format_exception(type(cause), cause, cause.__traceback__ and cause.__traceback__.tb_next)
        message = f"transform= raised {_said(cause)}{error}"
        return {"error": UsageError.__name__, "message": message, "traceback": "".join(where)}
    if isinstance(error, UsageError) and error.__cause__ is None:
        return to_json(error)
    where = traceback.format_exception(error)
    if isinstance(error, CacheToolError):
        return {**to_json(error), "traceback": "".join(where)}
    return {"error": "CacheToolError", "message": f"a feeder failed: {_said(error)}", "traceback": "".join(where)}


def _said(error: BaseException) -> str:
    """Its class and the beginning of what it says, in one line: it may be of any class and say anything."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  # a class of the user's may do anything
        words = ""
    name = type(error).__name__
    if len(words) > _MOST:
        words = f"{words[:_MOST].rstrip()} ..."
    return f"{name}: {words}" if words else name


def rebuilt(value: Mapping[str, Any]) -> CacheToolError:
    """The error that :func:`described` gave, its traceback as the cause."""
    error = from_json(dict(value))
    if "traceback" in value:
        error.__cause__ = FeederTraceback(str(value["traceback"]))
    return error


def closed() -> CacheToolError:
    """The error where a signal's handler, or another thread, closed the loader meanwhile."""
    return CacheToolError("the loader was closed while a batch was waited for")


def shared() -> UsageError:
    """The error where another batch comes than the one that is due."""
    return UsageError(
        "an iterator of a loader belongs to one thread at a time: lock next(), or give each thread a loader of its own"
    )
