"""Tasks of an engine: named functions with plain arguments that talk in plain messages.

A task never carries code, pickles or the bytes of samples. Its target is a function of this package by name; its
arguments, messages and result are JSON values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cachetool.core.errors import CacheToolError

__all__ = ["Asking", "Channel", "Engine", "Message", "Task", "named"]

Message = dict[str, Any]


def named(target: str) -> Callable[..., Any]:
    """Import and return the function or class ``module:name`` of this package."""
    module, _, name = target.partition(":")
    # The name comes out of a pipe. A name outside of this package could be any function of Python.
    if not module.startswith("cachetool."):
        raise CacheToolError(f"not a part of cachetool: {target}")
    called: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return called


@dataclass(frozen=True, slots=True)
class Task:
    """One call of ``target(channel, **arguments)`` in a process of its own."""

    target: str
    """Name of the function, ``module:function`` inside cachetool."""
    # They travel through a pipe: other users can read a command line, and arguments may hold
    # credentials.
    arguments: Mapping[str, Any]
    """JSON values."""


class Channel(Protocol):
    """The connection of a running task to the process that started it."""

    def send(self, message: Message) -> None:
        """Report progress; any JSON values."""
        ...


class Asking(Channel, Protocol):
    """The connection of a task whose starter answers questions, as :class:`cachetool.cluster.engine.RayEngine` does."""

    def ask(self, message: Message, *blocks: Any) -> Message:
        """Send ``message`` with ``blocks`` of bytes, and wait for the answer. Raises the answer if it is an error."""
        ...


class Engine(Protocol):
    """A runner of tasks somewhere else than in processes of this machine."""

    def pieces(self, workers: int) -> int:
        """Return into how many tasks work for so many ``workers`` is best divided."""
        ...

    def run(self, tasks: Sequence[Task], on_message: Callable[[int, Message], None] | None = None) -> list[Message]:
        """Run the tasks and return their results, in their order.

        ``on_message(number, message)`` is called for each message of task ``number``. The first error of a task stops
        the others and is raised; Ctrl-C stops all.
        """
        ...
