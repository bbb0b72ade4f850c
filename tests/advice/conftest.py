"""A folder with samples, files and a cache, in which tests run the commands that messages advise."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import pytest

from cachetool.core.errors import CacheToolError
from tests.advice.messages import Message, matches, messages
from tests.commands import run_command

__all__ = ["ADVISED", "FOLLOWS", "World", "followed", "follows"]

FOLLOWS = "__follows__"
ADVISED = re.compile(r"\bcachetool (\w+(?: .*?)?)(?:[;\n]|, | or |$)")
"""A command in a message, without the program's name."""


def follows(module: str, *beginnings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that follows the advice of a module's messages. ``beginnings`` are the first words of these
    messages.
    """

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        setattr(test, FOLLOWS, [*getattr(test, FOLLOWS, ()), *followed(module, *beginnings)])
        return test

    return mark


def followed(module: str, *beginnings: str) -> list[Message]:
    """Return the messages of a module with these beginnings. Raise :class:`LookupError` if a beginning matches none."""
    chosen = []
    for beginning in beginnings:
        alike = [message for message in messages() if message.module == module and message.text.startswith(beginning)]
        if not alike:
            raise LookupError(f"{module} has no message that begins with {beginning!r}")
        chosen += alike
    return chosen


@dataclass
class World:
    """A runner of commands in its folder. It records their output."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"COLUMNS": "400"})
    said: list[str] = field(default_factory=list)
    worked: int = 0

    def run(self, *words: object) -> str:
        """Run a command that may fail, and return its output. A single word is a whole command line."""
        return self._run(words)[1]

    def fails(self, *words: object, powerless: bool = False) -> str:
        """Run a command that must fail, and return its output. ``powerless`` as in
        :func:`tests.commands.run_command`.
        """
        code, said = self._run(words, powerless=powerless)
        assert code, f"{words} worked:\n{said}"
        return said

    def raises(self, call: Callable[[], object]) -> str:
        """Return the message of the library's error."""
        with pytest.raises(CacheToolError) as error:
            call()
        self.note(error.value)
        return self.said[-1]

    def works(self, *words: object, powerless: bool = False) -> str:
        """Run a command that must succeed, and return its output."""
        code, said = self._run(words, powerless=powerless)
        assert not code, f"{words} failed:\n{said}"
        self.worked += 1
        return said

    def advised(self, **values: str) -> str:
        """Run the command that the last message advised, word by word. ``values`` replace names such as SOURCE."""
        line = ADVISED.findall(self.said[-1])[-1]
        for name, value in values.items():
            line = re.sub(rf"\b{name}\b", value, line)
        return self.works(line.rstrip(" .)"))

    def note(self, said: object) -> None:
        """Record text that no command printed, such as the error of a loader."""
        self.said.append(str(said))

    def _run(self, words: tuple[object, ...], *, powerless: bool = False) -> tuple[int, str]:
        line = shlex.split(str(words[0])) if len(words) == 1 else [str(word) for word in words]
        environment = {**os.environ, **self.environment}
        done = run_command(*line, folder=self.folder, environment=environment, powerless=powerless)
        self.said.append(done.stdout + done.stderr)
        return done.returncode, self.said[-1]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare ``src`` with twelve samples of the fields x and n, ``a.h5`` and ``a.tar`` with the same samples, the
    cache ``c`` of them, and the exported folder ``out``.
    """
    folder = tmp_path_factory.mktemp("advice")
    (folder / "src").mkdir()
    for number in range(12):
        np.savez(folder / f"src/s{number:02d}.npz", x=np.full((4, 4), number, "f4"), n=np.int64(number))
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"], file["n"] = np.arange(192, dtype="f4").reshape(12, 4, 4), np.arange(12)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for path in sorted((folder / "src").iterdir()):
            archive.add(path, path.name)
    for line in ("pull src --all --cache c --max-size 50MB", "convert a.h5 --to lmdb --out out"):
        done = run_command(*line.split(), folder=folder)
        assert not done.returncode, done.stderr
    return folder


@pytest.fixture
def world(prepared: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """Copy the prepared folder. At the end, check that the followed message was printed and that a command worked after
    it.
    """
    shutil.copytree(prepared, tmp_path / "w")
    world = World(tmp_path / "w")
    yield world
    texts = getattr(request.function, FOLLOWS, [])
    if hasattr(request.node, "callspec"):
        texts = [*texts, *getattr(request.node.callspec.params.get("row"), "texts", ())]
    if request.node.stash.get(_PASSED, False):
        for message in texts:
            assert any(matches(message.text, said) for said in world.said), f"nothing said: {message}\n{world.said}"
        assert world.worked, "no advice was followed"


_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record whether a test passed, because the fixture ``world`` checks more at its end."""
    report: pytest.TestReport = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report
