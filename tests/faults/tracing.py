"""System calls that are killed or fail, one after another: ``strace`` is attached to a waiting child."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

CHANGING = (
    "openat,write,writev,pwrite64,pwritev,pwritev2,ftruncate,truncate,fallocate,fsync,fdatasync,msync,sync_file_range,"
    "copy_file_range,sendfile,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat"
)
"""The calls that change files or sync them."""
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)")
_MAKES = re.compile(r"O_(CREAT|WRONLY|RDWR|TRUNC)")

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: apt-get install strace (needs the right to trace)"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One call of a run: the ``nth`` with its name that a thread makes."""

    call: str
    nth: int
    text: str
    """The call's arguments and result in the undisturbed run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a child process."""

    status: int
    """The exit code, or minus the signal."""
    kinds: tuple[str, ...] = ()
    """The class names of its error, most specific first."""
    text: str = ""


class Children:
    """A starter of actions in separate processes, traced or not."""

    def __init__(self) -> None:
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(30)

    def run(self, action: str, *, inject: str | None = None, paths: tuple[Path, ...] = (), **arguments: Any) -> Outcome:
        """Run the action while strace disturbs system calls by ``-e inject=``."""
        pid = self._start(action, arguments)
        if inject is None:
            return self._go(pid)
        only = [word for path in paths for word in ("-P", str(path))]
        tracer = _attach(
            pid, ["-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}", *only, "-o", "/dev/null"]
        )
        outcome = self._go(pid)
        tracer.wait(30)
        return outcome

    def log(self, action: str, log: Path, *, calls: str = CHANGING, **arguments: Any) -> None:
        """Run the action undisturbed, and log the calls that change files."""
        pid = self._start(action, arguments)
        tracer = _attach(pid, ["-y", "-s", "40", "-e", f"trace={calls}", "-o", str(log)])
        outcome = self._go(pid)
        assert outcome.status == 0, outcome
        tracer.wait(30)

    def points(self, action: str, log: Path, *, within: Path, **arguments: Any) -> list[Point]:
        """Return the calls of an undisturbed run that change files below ``within``, in order."""
        self.log(action, log, **arguments)
        count: Counter[tuple[str, str]] = Counter()
        found: dict[tuple[str, int], Point] = {}
        for line in log.read_text(errors="replace").splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            thread, call, rest = match.groups()
            count[thread, call] += 1
            if str(within) in rest and (call != "openat" or _MAKES.search(rest)):
                nth = count[thread, call]
                found.setdefault((call, nth), Point(call, nth, rest[:120]))
        return list(found.values())

    def start(self, action: str, **arguments: Any) -> int:
        """Start an action. Return its pid for :meth:`wait`."""
        pid = self._start(action, arguments)
        self._tell(go=pid)
        return pid

    def wait(self, pid: int) -> Outcome:
        """Wait until a started action has ended."""
        self._tell(wait=pid)
        said = self._hear()
        error = said["error"] or {"kinds": [], "text": ""}
        return Outcome(said["status"], tuple(error["kinds"]), error["text"])

    def _start(self, action: str, arguments: dict[str, Any]) -> int:
        self._tell(action=action, arguments=arguments)
        return int(self._hear()["pid"])

    def _go(self, pid: int) -> Outcome:
        self._tell(go=pid)
        return self.wait(pid)

    def _tell(self, **values: Any) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(values, default=str) + "\n")
        self._zygote.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        assert line, "the zygote died"
        found: dict[str, Any] = json.loads(line)
        return found


def _attach(pid: int, options: list[str]) -> subprocess.Popen[str]:
    tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), *options], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        pytest.skip(f"this process may not be traced: {said.strip()}")
    return tracer
