"""Tasks in plain child processes on this machine.

Not ``multiprocessing``: a child here never imports the user's script, needs no main guard, is started the same way from
scripts, notebooks and ``python -``, and inherits nothing, so that a store's client, which hangs in a forked child, is
only ever used in a process of its own. Children end when their stdin does, and when this process is gone, however it
went: a program that forks hands the other end of that stdin to processes that may outlive it.

For that the kernel sends a signal (:func:`cachetool.proc.child.end_with`), which comes when the *thread* that started
the process ends. So all are started by the main thread or by one that stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Self

from cachetool.core.errors import CacheToolError, UsageError, from_json
from cachetool.proc.lines import Lines, ready, write_line
from cachetool.proc.task import Message, Task

__all__ = ["Child", "LocalEngine", "begin", "begun_early", "boot", "how_ended", "started", "stop"]

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


def boot(*calls: str, named: bool = True) -> str:
    """The program of a process that imports from where this one does and makes these ``calls``: ``module:function()``.

    A ``Path`` in ``sys.path``, which Python passes over, is left out. ``named``: it knows the first words of the
    command line, by which the cache calls who uses it; a process that reads files of others is told nothing.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    words = sys.argv[:2] if named else ["-c"]
    program = f"import sys; sys.path[:] = {path!r}; sys.argv[:] = {words!r}"
    for module, _, call in (call.partition(":") for call in calls):
        program += f"; from {module} import {call.partition('(')[0]}; {call}"
    return program


def begin(
    call: str,
    *,
    gives_back: bool | None,
    named: bool = True,
    flags: Sequence[str] = (),
    quiet: bool = False,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a process that runs :func:`boot`'s program, with pipes to and from it and apart from the terminal, whose
    Ctrl-C reaches this process alone. It ends with this one, however that goes.

    ``gives_back``: it may hold what it should give back first, and has a few seconds for that; else it is killed at
    once. None: it sees to its end itself. ``flags`` are Python's. ``quiet``: what libraries print there is shown only
    with CACHETOOL_DEBUG. ``options`` are of ``Popen``. Raises what :func:`started` does.
    """
    ends = [] if gives_back is None else [f"cachetool.proc.child:end_with({os.getpid()}, gives_back={gives_back})"]
    command = [sys.executable, *flags, "-c", boot(*ends, call, named=named)]
    if quiet and not os.environ.get("CACHETOOL_DEBUG"):
        options["stderr"] = subprocess.DEVNULL

    def start() -> subprocess.Popen[bytes]:
        return started(command, **options)

    return start() if not ends or threading.get_native_id() == os.getpid() else _lasting(start)


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process with pipes to and from it, which a terminal's Ctrl-C does not reach; ``options`` are of ``Popen``.

    Raises the error of the limit that was met, or :class:`UsageError` where the system starts none.
    """
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        try:
            return subprocess.Popen(command, start_new_session=True, **options)
        except PermissionError:  # some sandboxes forbid setsid(); a process group of its own does as well
            return subprocess.Popen(command, process_group=0, **options)
    except OSError as error:
        from cachetool.proc.disk import limit_error

        raise limit_error(error) or UsageError(
            f"a process cannot be started: {error.strerror}; allow fork, exec and setsid where this runs"
        ) from error


_Start = Callable[[], "subprocess.Popen[bytes]"]
_Done = SimpleQueue["subprocess.Popen[bytes] | BaseException"]
_threads: dict[int, SimpleQueue[tuple[_Start, _Done]]] = {}
"""What the thread that stays is to start, by process: one that was forked has none yet."""


def _lasting(start: _Start) -> subprocess.Popen[bytes]:
    """Start a process in a thread that ends with this process and not before."""
    queue: SimpleQueue[tuple[_Start, _Done]] = SimpleQueue()
    asked = _threads.setdefault(os.getpid(), queue)
    if asked is queue:
        threading.Thread(target=_serve, args=(queue,), name="cachetool starts", daemon=True).start()
    done: _Done = SimpleQueue()
    asked.put((start, done))
    outcome = done.get()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _serve(asked: SimpleQueue[tuple[_Start, _Done]]) -> None:
    while True:
        start, done = asked.get()
        try:
            done.put(start())
        except BaseException as error:  # noqa: BLE001 - whoever asked for it gets it
            done.put(error)
        del start, done


def how_ended(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


class LocalEngine:
    """Runs tasks side by side, one process each.

    As a context manager it keeps processes for the tasks that come later, until its end. ``options`` are those of
    :class:`Child`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
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
            self._idle.append(_early.pop() if _early else Child(imports=imports, **self._options))

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
                # The first that was begun has loaded most.
                children.append(self._idle.pop(0) if self._idle else Child(**self._options))
                children[-1].begin(task, stay=stay)
            if last:
                self.dismiss()
            running = {child.lines.fd: number for number, child in enumerate(children)}
            while running:
                for fd in ready(None, *running):
                    child = children[running[fd]]
                    more, messages = child.receive()
                    for message in messages:
                        if on_message is not None:
                            on_message(running[fd], message)
                    if not more or (stay and child.result is not None):
                        del running[fd]
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

    def __init__(
        self,
        task: Task | None = None,
        *,
        imports: str = "",
        gives_back: bool = True,
        env: Mapping[str, str] | None = None,
        most: int = sys.maxsize,
        **options: Any,
    ) -> None:
        """``most``: bytes of a line that it may send. ``options`` are those of :func:`begin`."""
        call = f"cachetool.proc.child:main({os.getpid()}, {imports!r})"
        env = {**_ENVIRONMENT, **os.environ} if env is None else env
        self.process = begin(call, gives_back=gives_back, env=env, **options)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.lines = Lines(self.stdout.fileno(), most=most)
        self.result: Message | None = None
        self.error: CacheToolError | None = None
        self.asked: list[Message] = []
        """Questions that wait for :meth:`answer`: ask, number, and the sizes of the blocks that are next in
        :attr:`lines`."""
        if task is not None:
            self.begin(task)

    def begin(self, task: Task, *, stay: bool = False) -> None:
        """Hand it a task; with ``stay`` it waits for another one afterwards."""
        self.result = None
        told = {"target": task.target, "arguments": dict(task.arguments), "starter": os.getpid(), "stay": stay}
        self._tell(told)

    def answer(self, message: Message) -> None:
        """Answer the oldest question; an error in its JSON form is raised there."""
        self._tell({"answer": message, "number": self.asked.pop(0)["number"]})

    def _tell(self, value: Message) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # its end is noticed otherwise, or it was told to stop
            write_line(self.stdin.fileno(), value)

    def says(self, seconds: float | None) -> bool:
        """Return True when something comes from it within so long."""
        return bool(ready(seconds, self.lines.fd))

    def receive(self) -> tuple[bool, list[Message]]:
        """Whether the child may still say something, and the messages that came now."""
        self.lines.receive()
        messages: list[Message] = []
        for value in self.lines:
            if "message" in value and "error" not in value:
                messages.append(value["message"])
            elif "ask" in value:
                self.asked.append(value)
                if "blocks" in value:
                    break
            elif "result" in value:
                self.result = value["result"]
            else:
                self.error = from_json(value)
        return not self.lines.ended, messages

    def check(self, *, ended: bool) -> None:
        """Raise what the child reported, or that it died without a word."""
        if self.error is not None:
            raise self.error
        if ended and self.result is None:
            code = self.process.wait()
            how = how_ended(code)
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
