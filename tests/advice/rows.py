"""Messages and the commands that follow their advice, as rows of command lines."""

from __future__ import annotations

import re
import shlex
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.advice.conftest import World, followed
from tests.advice.messages import Message

__all__ = ["VALUES", "Row", "follow", "group", "shell"]

Line = str | Callable[[Path], object]

VALUES = {
    "SOURCE": "src",
    "URL": "src",
    "FOLDER": "new",
    "NEW": "new",
    "FILE": "a.h5",
    "DIR": "new",
    "SIZE": "60MB",
    "CACHE": "c",
    "DATA": "src",
}
"""The words that replace the names in an advised command."""


@dataclass
class Row:
    """A message, the lines that cause it, and the lines that follow its advice.

    A line is a command of cachetool. A line that begins with ``$`` is a shell command. ``!`` is the advised command,
    word by word, with :data:`VALUES` (``$!``: as a shell command). ``{PATTERN}`` is replaced by the first group of the
    pattern's match in the message. A function is called with the folder and may create files in it.
    """

    module: str
    beginning: str
    fails: str | tuple[Line, ...]
    works: str | tuple[Line, ...]
    texts: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = followed(self.module, self.beginning)

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{self.module[:-3]}-{self.beginning}")[:60]


def follow(world: World, row: Row) -> None:
    """Run the lines of a row."""
    for line in _lines(row.fails):
        if callable(line):
            line(world.folder)
        elif line.startswith("$ "):
            shell(world, line[2:])
        else:
            world.run(line)
    message = world.said[-1]
    for line in _lines(row.works):
        if callable(line):
            line(world.folder)
        elif line == "!":
            world.note(message)
            world.advised(**VALUES)
        elif line == "$!":
            shell(world, message[message.index(": cd ") + 2 :].replace("\n", " "))
        elif line.startswith("$ "):
            shell(world, line[2:])
        else:
            world.works(re.sub(r"\{(.*)\}", lambda pattern: group(pattern[1], message), line))


def _lines(lines: str | tuple[Line, ...]) -> tuple[Line, ...]:
    return (lines,) if isinstance(lines, str) else lines


def group(pattern: str, message: str) -> str:
    """Return the first group of a pattern's match in a message."""
    match = re.search(pattern, message)
    assert match, message
    return match[1]


def shell(world: World, line: str) -> None:
    """Run a shell command. ``sqlite FILE STATEMENT`` needs no program of that name."""
    words = shlex.split(line)
    if words[0] == "sqlite":
        with sqlite3.connect(world.folder / words[1]) as connection:
            connection.execute(words[2])
        connection.close()
    else:
        subprocess.run(line, shell=True, cwd=world.folder, check=True)
