"""The Ray actor that runs on a node for a driver elsewhere: child processes, and what they say.

Made and called by :mod:`cachetool.cluster.engine` alone.
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
"""Seconds for which an agent gathers what its children say before it passes it on."""
_LISTEN = 60.0


def version_here() -> str:
    """Of the package; empty where it is used without being installed."""
    try:
        return version("cachetool")
    except PackageNotFoundError:
        return ""


class Agent:
    """On a node: child processes for the tasks of one driver."""

    def __init__(self, argv: Sequence[str], wanted: str) -> None:
        self._version = wanted
        sys.argv[:] = argv  # by which its children are known to the cache: as the program that was started
        self._children: dict[int, Child] = {}
        self._over: set[int] = set()
        """Tasks that are to end, by number: calls come in several threads, the end at times before the beginning."""
        self._said: list[tuple[int, Message]] = []
        self._news = threading.Condition()
        self._place = ""
        self._places = contextlib.ExitStack()

    def begin(self, number: int, target: str, arguments: Message, name: str) -> None:
        """Start a child for a task on this node, whose name is ``name``."""
        if (installed := version_here()) != self._version and installed and self._version:
            text = f"node {name} has cachetool {installed}, the command is of {self._version}"
            self._say((number, to_json(UsageError(f"{text}; install the same version on both"))))
            return
        try:
            with self._news:
                if number in self._over:
                    raise Interrupted("stopped")
                child = self._children[number] = Child(Task(target, arguments))
        except Exception as error:  # noqa: BLE001 - the driver would wait for ever
            self._say((number, outcome_of(error)))
            return
        threading.Thread(target=self._attend, args=(number, child), daemon=True).start()

    def hear(self) -> list[tuple[int, Message]]:
        """What the tasks said since the last time, by number; waits some seconds for the first word."""
        with self._news:
            self._news.wait_for(lambda: self._said, _LISTEN)
        time.sleep(_GATHER)
        with self._news:
            said, self._said = self._said, []
        return said

    def end(self, number: int) -> None:
        """Tell a task to give back what it holds and to end."""
        with self._news:
            self._over.add(number)
            child = self._children.get(number)
        if child is not None:
            child.process.terminate()
            threading.Timer(GRACE, child.process.kill).start()

    def place(self) -> str:
        """A folder for files of the driver, until :meth:`leave`; that of a killed agent goes with the next one."""
        with self._news:  # calls come in several threads
            if not self._place:
                self._place = str(self._places.enter_context(scratch(Path(tempfile.gettempdir()), "cachetool-node-")))
            return self._place

    def leave(self) -> None:
        """Delete that folder: this process is about to be killed."""
        with self._news:
            self._places.close()

    def write(self, name: str, at: int, piece: Any) -> None:
        """Put a piece of a file into that folder, from byte ``at`` on."""
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
