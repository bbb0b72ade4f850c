"""Lines of JSON over pipes between the training process and its feeders."""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["Lines", "write_line"]


class Lines:
    """Lines out of a pipe, however they are cut on their way."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""
        self.ended = False

    def receive(self) -> None:
        """Read what is there, waiting for at least something."""
        data = os.read(self.fd, 1 << 20)
        self.ended = not data
        self._rest += data

    def next(self) -> bytes | None:
        """A line that has come whole; None when there is none."""
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        return line

    def whole(self) -> bytes:
        """The next line, waited for."""
        while (line := self.next()) is None:
            self._more()
        return line

    def exactly(self, count: int) -> bytes:
        """So many bytes, waited for."""
        while len(self._rest) < count:
            self._more()
        data, self._rest = self._rest[:count], self._rest[count:]
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
