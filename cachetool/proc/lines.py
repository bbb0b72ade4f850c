"""JSON values over pipes, one a line, with blocks of bytes behind a line that announces them; and errors as such
values.

All processes of this package talk in this way. An error on its way from a feeder to the training process is text: what
happened, and where.
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
    """Wait at most ``seconds`` and return the descriptors that have something to read, or have ended."""
    # poll, because select cannot handle descriptors from 1,024 on.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else 1000 * seconds)}


class Lines:
    """The values that come out of a pipe, however the pipe cuts their lines.

    ``most`` is the maximum of bytes of a line, for a pipe whose other side a hostile file may command.
    """

    def __init__(self, fd: int, *, most: int = sys.maxsize) -> None:
        self.fd, self.ended = fd, False
        self._most = most
        self._buffer = bytearray()
        self._searched = 0

    def receive(self) -> None:
        """Read what is there; wait until there is something."""
        data = os.read(self.fd, 2**16)
        self.ended = not data
        self._buffer += data

    def next(self) -> Any:
        """Return the value of a complete line; None if there is none. Raises ``ValueError`` for a line that is no
        JSON."""
        # Searched from where the last search ended: a line of many MiB comes in pieces of 64 KiB,
        # and searching it from its beginning each time would take the square of that.
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
        """Return an iterator over the values that have come completely."""
        return iter(self.next, None)

    def wait(self) -> Any:
        """Wait for the next value and return it; None at the end of the pipe."""
        while (value := self.next()) is None and not self.ended:
            self.receive()
        return value

    def fill(self, view: memoryview, seconds: float | None = None) -> None:
        """Fill ``view`` with the bytes that come next.

        Raises ``EOFError`` when they end before, and ``TimeoutError`` when none comes for ``seconds``.
        """
        done = min(len(view), len(self._buffer))
        view[:done] = self._buffer[:done]
        del self._buffer[:done]
        while done < len(view):
            if not ready(seconds, self.fd):
                raise TimeoutError
            # Read straight into the block: it may have hundreds of MiB, which need not be copied
            # once more.
            if not (count := os.readv(self.fd, [view[done:]])):
                raise EOFError
            done += count


def write_line(fd: int, value: Any, *blocks: Any) -> None:
    """Write a value as a line of JSON, and behind it all bytes of ``blocks``."""
    for data in (json.dumps(value).encode() + b"\n", *blocks):
        left = memoryview(data)
        # A pipe takes part of the bytes when a signal interrupts the write.
        while left:
            left = left[os.write(fd, left) :]


def keep_standard_streams() -> None:
    """Open standard streams that are closed on ``/dev/null``, for this process and its children."""
    # Programs that start daemons close these streams. The next descriptor then takes the number,
    # that of a shard or of a pipe, and a library that prints an error writes into it. SQLite does
    # the same, but children do not inherit what SQLite opens, so they call this too.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number. Here it is this number, because those below are
            # open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def own_streams() -> tuple[Lines, int]:
    """Return the standard input and output of this process, for messages only.

    Afterwards all other code of this process reads an empty stdin, and prints to stderr instead of stdout.
    """
    keep_standard_streams()
    # Libraries, and programs that these start, find nothing to read on stdin, and what they print
    # goes to stderr. On stdout it would be taken for a message.
    lines, out = Lines(os.dup(0)), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return lines, out


_MOST = 500
"""Maximum of characters of a message; the traceback has all of it."""


class FeederTraceback(Exception):
    """The cause of an error that happened in a feeder: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


class TransformError(Exception):
    """The error that a function of the user raised, as its ``__cause__``; the text says for which sample."""

    def __init__(self, which: str, *, option: str = "transform=") -> None:
        super().__init__(which)
        self.option = option
        """The argument that the function is."""


def described(error: BaseException) -> dict[str, Any]:
    """Return the error as plain values, with a traceback where one helps."""
    if isinstance(error, TransformError):
        cause = error.__cause__ or error
        # The first entry is our own call, which tells the user nothing.
        where = traceback.format_exception(type(cause), cause, cause.__traceback__ and cause.__traceback__.tb_next)
        message = f"{error.option} raised {_said(cause)}{error}"
        return {"error": UsageError.__name__, "message": message, "traceback": "".join(where)}
    # A wrong argument needs no traceback: the message says it.
    if isinstance(error, UsageError) and error.__cause__ is None:
        return to_json(error)
    where = traceback.format_exception(error)
    if isinstance(error, CacheToolError):
        return {**to_json(error), "traceback": "".join(where)}
    return {"error": "CacheToolError", "message": f"a feeder failed: {_said(error)}", "traceback": "".join(where)}


def _said(error: BaseException) -> str:
    """Return the class of an error and the beginning of its text, in one line."""
    try:
        words = " ".join(str(error).split())
    # str() runs code of the user's error class, which may raise any error. The class name must still be reported.
    except Exception:  # noqa: BLE001
        words = ""
    name = type(error).__name__
    if len(words) > _MOST:
        words = f"{words[:_MOST].rstrip()} ..."
    return f"{name}: {words}" if words else name


def rebuilt(value: Mapping[str, Any]) -> CacheToolError:
    """Return the error that :func:`described` turned into values, with its traceback as the cause."""
    error = from_json(dict(value))
    if "traceback" in value:
        error.__cause__ = FeederTraceback(str(value["traceback"]))
    return error


def closed() -> CacheToolError:
    """Return the error for a loader that a signal handler or another thread closed meanwhile."""
    return CacheToolError("the loader was closed while the program waited for a batch")


def shared() -> UsageError:
    """Return the error for a batch that is not the one that is due."""
    return UsageError(
        "only one thread at a time can use an iterator of a loader: lock next(), or give each thread its own loader"
    )
