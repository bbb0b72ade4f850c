"""Tasks in plain child processes on this machine.

Not ``multiprocessing``: a child here never imports the user's script, needs no main guard, is started the same way from
scripts, notebooks and ``python -``, and inherits nothing, so that a store's client, which hangs in a forked child, is
only ever used in a process of its own. Children end when their stdin does, and when this process is gone, however it
went: a program that forks hands the other end of that stdin to processes that may outlive it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from cachetool.core.errors import CacheToolError, from_json
from cachetool.proc.boot import begin
from cachetool.proc.task import Message, Task

__all__ = ["Child", "LocalEngine", "begun_early", "stop"]

_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # NumPy's threads would wait for work by spinning
    # Bodies of many MiB come and go: glibc is to keep memory for the next, instead of having each page cleared anew.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # in pages of 2 MiB, where the system has them: half of the page faults
}
GRACE = 5.0
"""Seconds that a stopped child has to give back what it holds."""


class LocalEngine:
    """Runs tasks side by side, one process each.

    As a context manager it keeps processes for the tasks that come later, until its end.
    """

    def __init__(self) -> None:
        self._idle: list[Child] = []
        self._keeps = False

    def __enter__(self) -> Self:
        self._keeps = True
        return self

    def __exit__(self, *_: object) -> None:
        self._keeps = False
        self.dismiss()

    def expect(self, tasks: int, imports: str) -> None:
        """Start processes for so many tasks that will come, which load the module ``imports`` meanwhile."""
        while len(self._idle) < tasks:
            self._idle.append(_early.pop() if _early else Child(imports=imports))

    def dismiss(self) -> None:
        """End the processes that wait for a task."""
        stop(self._idle)
        self._idle = []

    def run(
        self, tasks: Sequence[Task], on_message: Callable[[int, Message], None] | None = None, *, last: bool = False
    ) -> list[Message]:
        """The results of all tasks, in their order.

        ``on_message(number, message)`` is called here for every message of task ``number``. The first error of a task
        stops the others and is raised; Ctrl-C stops all. No child is left behind in any case, but for those that wait
        for more tasks to come: with ``last`` none do.
        """
        children: list[Child] = []
        stay = self._keeps and not last
        try:
            for task in tasks:
                children.append(self._idle.pop(0) if self._idle else Child())  # the first begun has loaded most
                children[-1].begin(task, stay=stay)
            if last:
                self.dismiss()
            with selectors.DefaultSelector() as ready:
                for number, child in enumerate(children):
                    ready.register(child.stdout, selectors.EVENT_READ, number)
                while ready.get_map():
                    for key, _ in ready.select():
                        child = children[key.data]
                        more, messages = child.receive()
                        for message in messages:
                            if on_message is not None:
                                on_message(key.data, message)
                        if not more or (stay and child.result is not None):
                            ready.unregister(child.stdout)
                        child.check(ended=not more)
            results = [child.result or {} for child in children]
            if stay:
                self._idle += children
                children = []
            return results
        finally:
            stop(children)


_early: list[Child] = []


@contextlib.contextmanager
def begun_early(imports: str) -> Iterator[None]:
    """Start a process that loads the module ``imports`` while this program itself still loads what knows the task; the
    first :meth:`LocalEngine.expect` takes it, and it ends if none does."""
    with contextlib.suppress(OSError, CacheToolError):  # too many processes or files: whoever needs one says so
        _early.append(Child(imports=imports))
    try:
        yield
    finally:
        stop(_early)
        _early.clear()


class Child:
    """A process of its own, which begins ``task`` at once, or loads a module while it waits for one."""

    def __init__(self, task: Task | None = None, *, imports: str = "") -> None:
        call = f"main({os.getpid()}, {imports!r})"
        self.process = begin("cachetool.proc.child", call, gives_back=True, env={**_ENVIRONMENT, **os.environ})
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.result: Message | None = None
        self.error: CacheToolError | None = None
        self.asked: list[Message] = []
        """Questions that wait for :meth:`answer`: ask, number."""
        self._buffer = b""
        if task is not None:
            self.begin(task)

    def begin(self, task: Task, *, stay: bool = False) -> None:
        """Hand it a task; with ``stay`` it waits for another one afterwards."""
        self.result = None
        line = {"target": task.target, "arguments": dict(task.arguments), "starter": os.getpid(), "stay": stay}
        with contextlib.suppress(BrokenPipeError):  # it died at once: the end of its stdout says so
            self.stdin.write(json.dumps(line).encode() + b"\n")
            self.stdin.flush()

    def answer(self, message: Message) -> None:
        """Answer the oldest question; an error in its JSON form is raised there."""
        number = self.asked.pop(0)["number"]
        with contextlib.suppress(BrokenPipeError, ValueError):  # it is gone, or was told to stop
            self.stdin.write(json.dumps({"answer": message, "number": number}).encode() + b"\n")
            self.stdin.flush()

    def says(self, seconds: float | None) -> bool:
        """Whether something comes from it within so long; its pipe may have any number (select ends at 1,024)."""
        poll = select.poll()
        poll.register(self.stdout, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def receive(self) -> tuple[bool, list[Message]]:
        """Whether the child may still say something, and the messages that came now."""
        data = self.stdout.read1(65536)  # type: ignore[attr-defined]
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()
        messages: list[Message] = []
        for line in lines:
            value: dict[str, Any] = json.loads(line)
            if "message" in value and "error" not in value:
                messages.append(value["message"])
            elif "ask" in value:
                self.asked.append(value)
            elif "result" in value:
                self.result = value["result"]
            else:
                self.error = from_json(value)
        return bool(data), messages

    def check(self, *, ended: bool) -> None:
        """Raise what the child reported, or that it died without a word."""
        if self.error is not None:
            raise self.error
        if ended and self.result is None:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            if code == -signal.SIGKILL:
                how += ", perhaps for lack of memory (the machine's, or a container's)"
            raise CacheToolError(f"a worker (pid {self.process.pid}) {how}; what it had committed is kept")


def stop(children: Sequence[Child]) -> None:
    """End children that still run: they give back what they hold, and are killed when that takes too long."""
    for child in children:
        with contextlib.suppress(OSError):  # the child is gone: there is nothing left to tell it
            child.stdin.close()
        # Its stdin may have another end in a process that was forked here.
        child.process.terminate()
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.stdout.close()
