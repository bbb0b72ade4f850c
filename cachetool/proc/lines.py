"""Lines of JSON, and errors as such lines, over pipes between the training process and its feeders.

An error on its way from a feeder to the training process is text: what happened, and where.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from typing import Any

from cachetool.core.errors import CacheToolError, UsageError, from_json, to_json

__all__ = ["FeederTraceback", "Lines", "TransformError", "closed", "described", "rebuilt", "shared", "write_line"]


class Lines:
    """Lines out of a pipe, however they are cut on their way."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = b""
        self.ended = False

    def receive(self) -> None:
        """Read what is there, waiting for at least something."""
        data = os.read(self.fd, 1 << 20)
        self.ended = not data
        self._buffer += data

    def next(self) -> bytes | None:
        """A line that has come whole; None when there is none."""
        line, newline, remaining = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = remaining
        return line

    def read_line(self) -> bytes:
        """The next line, waited for."""
        while (line := self.next()) is None:
            self._more()
        return line

    def exactly(self, count: int) -> bytes:
        """So many bytes, waited for."""
        while len(self._buffer) < count:
            self._more()
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def _more(self) -> None:
        self.receive()
        if self.ended:
            os._exit(0)


def write_line(fd: int, value: Any) -> None:
    """Write a value as a line of JSON, all of it."""
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


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
