"""Conversions in the process of the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pytest

from cachetool.conversion import to_files as export
from cachetool.proc.task import Message, Task


class Here:
    """An engine that runs the tasks of ``convert`` in this process."""

    def run(self, tasks: Sequence[Task], on_message: Callable[[int, Message], None]) -> list[Message]:
        class Channel:
            def send(self, message: Message) -> None:
                on_message(0, message)

        assert {task.target for task in tasks} <= {"cachetool.conversion.to_files:write_parts"}
        return [export.write_parts(Channel(), **task.arguments) for task in tasks]


@pytest.fixture
def here() -> Iterator[None]:
    """Use no child processes and no fsync, so an example takes milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "LocalEngine", Here)
        patch.setattr(os, "fsync", lambda fd: None)
        yield
