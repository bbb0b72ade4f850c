"""What an engine runs: a named function with plain arguments that talks in plain messages.

A task never carries code, pickles or sample bytes: its target is a function of this package by name, its arguments, its
messages and its result are JSON values.
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
    """The function or class ``module:name`` of this package, which is imported now."""
    module, _, name = target.partition(":")
    if not module.startswith("cachetool."):
        raise CacheToolError(f"not a part of cachetool: {target}")
    called: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return called


@dataclass(frozen=True, slots=True)
class Task:
    """One call of ``target(channel, **arguments)`` in a process of its own."""

    target: str
    """``module:function`` inside cachetool."""
    arguments: Mapping[str, Any]
    """JSON values. They travel through a pipe, never on a command line."""


class Channel(Protocol):
    """A running task's line to whoever started it."""

    def send(self, message: Message) -> None:
        """Report progress; any JSON values."""
        ...


class Asking(Channel, Protocol):
    """The line of a task whose starter answers questions, as :class:`cachetool.cluster.engine.RayEngine` does."""

    def ask(self, message: Message, *blocks: Any) -> Message:
        """Wait for the answer to ``message``, which has ``blocks`` of bytes with it; raises the error that it may
        be."""
        ...


class Engine(Protocol):
    """Runs tasks somewhere else than in processes here."""

    def pieces(self, workers: int) -> int:
        """Into how many tasks work is best cut for so many ``workers``."""
        ...

    def run(self, tasks: Sequence[Task], on_message: Callable[[int, Message], None] | None = None) -> list[Message]:
        """The results of all tasks, in their order; ``on_message(number, message)`` hears task ``number``. The first
        error of a task stops the others and is raised; Ctrl-C stops all."""
        ...
