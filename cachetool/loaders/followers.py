"""The feeders beside the first: forked from it once it has what all of them need, and told by it what to read.

::

    leader --- plans, a pipe each ---> followers
           <-- a broken pipe: the follower has died

Importing NumPy and ours takes longer than everything else at a start, and processes that do so side by side slow each
other down. The leader has one thread when it forks, and nothing of the user's program or of a framework in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

from cachetool.loaders.pipes import end_with, write_line

__all__ = ["Followers", "fork"]


class Followers:
    """The leader's ends of the pipes to the other feeders."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        """Of each that lives, by the descriptor of its pipe."""

    def __bool__(self) -> bool:
        return bool(self._pids)

    @property
    def pids(self) -> list[int]:
        """Of those that live, in order."""
        return list(self._pids.values())

    @property
    def fds(self) -> list[int]:
        """Of these one has an error once its follower is dead."""
        return list(self._pids)

    def add(self, fd: int, pid: int) -> None:
        """One more."""
        self._pids[fd] = pid

    def tell(self, value: Any) -> None:
        """Send a value to all of them."""
        for fd in self._pids:
            with contextlib.suppress(BrokenPipeError):  # a dead follower is noticed by its pipe's error
                write_line(fd, value)

    def ended(self, fd: int) -> tuple[int, int]:
        """Pid of the one whose pipe has an error, and its exit code: less than zero for a signal. Forgets it."""
        pid = self._pids.pop(fd)
        os.close(fd)
        return pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def kill(self) -> None:
        """End all of them, whatever they do."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)  # nobody else can have its pid before we wait for it

    def wait(self) -> None:
        """Until all of them have ended."""
        for fd in self.fds:
            self.ended(fd)


def fork(feeders: int) -> tuple[int, int, Followers]:
    """Become so many processes.

    Gives each its number, of those other than the first the end of a pipe from which plans come (-1 in the first), and
    the other ends, which are the first one's alone. Those end with the first, however that ends.
    """
    followers, leader = Followers(), os.getpid()
    for number in range(1, feeders):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            end_with(leader)
            for fd in (write, *followers.fds):
                os.close(fd)
            if (random := sys.modules.get("numpy.random")) is not None:
                random.seed()  # else all would draw the same numbers; Python's own is seeded anew by forking
            return number, read, Followers()
        os.close(read)
        followers.add(write, pid)
    return 0, -1, followers
