"""The Ray actor that runs on a node for a driver on another machine: its child processes and their messages.

Only :mod:`cachetool.cluster.engine` makes and calls it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cachetool.core.errors import Interrupted, UsageError, to_json
from cachetool.core.names import Name
from cachetool.proc.child import outcome_of
from cachetool.proc.folders import write_piece
from cachetool.proc.parent import GRACE, Child, stop
from cachetool.proc.scratch import scratch
from cachetool.proc.task import Message, Task

__all__ = ["Agent", "version_here"]

_GATHER = 0.2
"""Seconds for which an agent gathers messages of its children before it passes them on. Many small answers would cost
the driver more."""
_LISTEN = 60.0
"""Seconds that :meth:`Agent.hear` waits for a first message."""


def version_here() -> str:
    """Return the version of the package, or an empty string where it is used without being installed."""
    try:
        return version("cachetool")
    except PackageNotFoundError:
        return ""


class Agent:
    """Child processes on a node, for the tasks of one driver."""

    def __init__(self, argv: Sequence[str], wanted: str) -> None:
        self._version = wanted
        # The cache shows the command line of a process to users. The children then appear as the
        # program that the user started, and not as a worker of Ray.
        sys.argv[:] = argv
        self._children: dict[int, Child] = {}
        self._over: set[int] = set()
        """Numbers of tasks that must end. Calls arrive in several threads, and the end of a task may arrive before its
        beginning."""
        self._said: list[tuple[int, Message]] = []
        self._news = threading.Condition()
        self._place = ""
        self._places = contextlib.ExitStack()

    def begin(self, number: int, target: str, arguments: Message, name: str) -> None:
        """Start a child for a task on this node, whose name is ``name``."""
        # Messages and tables may differ between versions. An empty version is a package that is not
        # installed, which is not compared.
        if (installed := version_here()) != self._version and installed and self._version:
            text = f"node {name} has cachetool {installed}, but this command is cachetool {self._version}"
            self._say((number, to_json(UsageError(f"{text}; install the same version on both"))))
            return
        try:
            with self._news:
                if number in self._over:
                    raise Interrupted("stopped")
                child = self._children[number] = Child(Task(target, arguments))
        except Exception as error:  # noqa: BLE001 - the driver would wait for ever
            # Every error becomes an answer: the driver never asks Ray for the result of this call.
            self._say((number, outcome_of(error)))
            return
        threading.Thread(target=self._attend, args=(number, child), daemon=True).start()

    def hear(self) -> list[tuple[int, Message]]:
        """Return the messages of the tasks since the last call, by number. Waits up to a minute for the first one."""
        with self._news:
            self._news.wait_for(lambda: self._said, _LISTEN)
        # Outside of the lock: the children's threads add their messages meanwhile.
        time.sleep(_GATHER)
        with self._news:
            said, self._said = self._said, []
        return said

    def end(self, number: int) -> None:
        """Tell a task to return what it holds and to end."""
        with self._news:
            self._over.add(number)
            child = self._children.get(number)
        if child is not None:
            child.process.terminate()
            # A child that does not end within the grace time is killed; the next recovery in its
            # cache frees what it held.
            threading.Timer(GRACE, child.process.kill).start()

    def place(self) -> str:
        """Return a folder for files of the driver, which exists until :meth:`leave`."""
        # Calls arrive in several threads, and only one folder may be made. If this agent is killed,
        # the next `scratch` sweeps the folder.
        with self._news:
            if not self._place:
                self._place = str(self._places.enter_context(scratch(Path(tempfile.gettempdir()), "cachetool-node-")))
            return self._place

    def leave(self) -> None:
        """Delete that folder. The driver kills this process afterwards."""
        # Ray kills agents without cleanup, so each pull over nodes left a folder until the driver
        # said so first.
        with self._news:
            self._places.close()

    def write(self, name: str, at: int, piece: Any) -> None:
        """Write a piece of a file into that folder, from byte ``at`` on."""
        # Each part of the name is checked: it comes from a message and becomes a path.
        write_piece(Path(self.place()), [Name(part) for part in name.split("/")], at, memoryview(piece))

    def _attend(self, number: int, child: Child) -> None:
        try:
            more = True
            while more:
                more, messages = child.receive()
                self._say(*((number, {"message": message}) for message in messages))
                child.check(ended=not more)
            outcome: Message = {"result": child.result or {}}
        except Exception as error:  # noqa: BLE001 - the driver would wait for ever
            outcome = outcome_of(error)
        stop([child])
        del self._children[number]
        self._say((number, outcome))

    def _say(self, *said: tuple[int, Message]) -> None:
        with self._news:
            self._said += said
            self._news.notify_all()
