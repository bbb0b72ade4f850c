"""Lines of JSON over pipes between the training process and its feeders, and how a feeder learns of its end."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from typing import Any

__all__ = ["Lines", "end_with", "parent_fd", "write_line"]

_PDEATHSIG = 1  # linux/prctl.h


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


def parent_fd(pid: int) -> list[int]:
    """A descriptor that becomes readable when the training process ends, though forked children of it still hold
    their copies of our pipe; none on kernels before 5.3."""
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return []
    if os.getppid() != pid:
        os._exit(0)
    return [fd]


def end_with(pid: int) -> None:
    """Let the kernel kill this process when the thread of the training process that started it ends: whoever listens
    for that in Python never hears of it while a transform keeps the GIL. Only for what its main thread started."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pid:
        os._exit(0)
