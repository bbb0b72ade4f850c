"""Tasks in plain child processes on this machine.

``multiprocessing`` is not used. A child here never imports the user's script, needs no main guard, and starts in the
same way from scripts, notebooks and ``python -``. It inherits nothing, so a store's client, which hangs in a forked
child, is only used in a process of its own.

Children end when their stdin ends, and when this process ends in any way: a program that forks gives the other end of
that stdin to processes that may outlive it. The kernel sends a signal for that (:func:`cachetool.proc.child.end_with`),
when the *thread* that started the child ends. So children are started by the main thread or by a thread that stays.
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
    # Threads of NumPy's library would wait for work by spinning, on processors that other workers
    # need.
    "OPENBLAS_NUM_THREADS": "1",
    # Bodies of many MiB come and go. With these values glibc keeps memory for the next one;
    # otherwise the kernel clears each page anew.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
    # Memory in pages of 2 MiB, where the system has them: half of the page faults.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
GRACE = 5.0
"""Seconds that a stopped child has to give back what it holds."""


def boot(*calls: str, named: bool = True) -> str:
    """Return the program of a process that imports from the same places as this one and makes ``calls``.

    A call is ``module:function()``. With ``named`` the process knows the first words of the command line, by which the
    cache names its users. A process that reads foreign files is told nothing.
    """
    # Python itself skips a Path in sys.path, and its repr in the program would be an error.
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
    """Start a process that runs :func:`boot`'s program, with pipes to and from it. It ends with this process, in any
    way.

    Args:
        call: ``module:function()``.
        gives_back: True if the process may hold something that it should give back first; it then has a few
            seconds. False if it is killed at once. None if it takes care of its end itself.
        named: See :func:`boot`.
        flags: Options of Python.
        quiet: Show what libraries print there only with CACHETOOL_DEBUG.
        options: Arguments of ``Popen``.

    Raises:
        CacheToolError: A limit was met; see :func:`started`.
    """
    ends = [] if gives_back is None else [f"cachetool.proc.child:end_with({os.getpid()}, gives_back={gives_back})"]
    command = [sys.executable, *flags, "-c", boot(*ends, call, named=named)]
    if quiet and not os.environ.get("CACHETOOL_DEBUG"):
        options["stderr"] = subprocess.DEVNULL

    def start() -> subprocess.Popen[bytes]:
        return started(command, **options)

    # The kernel's signal comes when the thread that started the child ends, so a thread that may
    # end earlier than the process leaves the start to one that stays.
    return start() if not ends or threading.get_native_id() == os.getpid() else _lasting(start)


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Return a process with pipes to and from it, which a terminal's Ctrl-C does not reach; ``options`` are
    ``Popen``'s.

    Raises the error of the limit that was met, or :class:`UsageError` if the system starts no process.
    """
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        try:
            return subprocess.Popen(command, start_new_session=True, **options)
        # Some sandboxes forbid setsid(). A process group of its own keeps Ctrl-C away as well.
        except PermissionError:
            return subprocess.Popen(command, process_group=0, **options)
    except OSError as error:
        # Imported here, because only a failure needs it.
        from cachetool.proc.disk import limit_error

        raise limit_error(error) or UsageError(
            f"a process cannot be started: {error.strerror}; allow fork, exec and setsid where this runs"
        ) from error


_Start = Callable[[], "subprocess.Popen[bytes]"]
_Done = SimpleQueue["subprocess.Popen[bytes] | BaseException"]
_threads: dict[int, SimpleQueue[tuple[_Start, _Done]]] = {}
"""The queue of the thread that stays, by pid. A forked process has no such thread yet."""


def _lasting(start: _Start) -> subprocess.Popen[bytes]:
    """Start a process in a thread that ends with this process and not before."""
    queue: SimpleQueue[tuple[_Start, _Done]] = SimpleQueue()
    # By pid, because threads do not survive a fork. setdefault decides between two threads that
    # come at once.
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
        # The thread that asked for the process gets the error.
        except BaseException as error:  # noqa: BLE001
            done.put(error)
        # The names would keep the last process object alive until the next start.
        del start, done


def how_ended(code: int) -> str:
    """Return how a process ended, by its exit code."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


class LocalEngine:
    """A runner of tasks side by side, one process each.

    As a context manager it keeps processes for later tasks, until its end. ``options`` are those of :class:`Child`.
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
        """Start processes for ``tasks`` tasks that will come. Meanwhile they import the module ``imports``."""
        while len(self._idle) < tasks:
            self._idle.append(_early.pop() if _early else Child(imports=imports, **self._options))

    def dismiss(self) -> None:
        """End the processes that wait for a task."""
        stop(self._idle)
        self._idle = []

    def run(
        self, tasks: Sequence[Task], on_message: Callable[[int, Message], None] | None = None, *, last: bool = False
    ) -> list[Message]:
        """Run the tasks and return their results, in their order.

        ``on_message(number, message)`` is called for every message of task ``number``. The first error of a task stops
        the others and is raised; Ctrl-C stops all. No child is left behind, except those that wait for more tasks; with
        ``last`` none waits.
        """
        children: list[Child] = []
        stay = self._keeps and not last
        try:
            for task in tasks:
                # The process that was started first has imported most by now.
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
                    # After its messages: an error must not hide what the task reported before it.
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
    """Start a process that imports the module ``imports`` while this program still loads the code that knows the task.

    The first :meth:`LocalEngine.expect` takes it. If there is none, the process ends with the ``with`` block.
    """
    # The limit of processes or files was met. The code that needs a process will report it.
    with contextlib.suppress(OSError, CacheToolError):
        _early.append(Child(imports=imports))
    try:
        yield
    finally:
        stop(_early)
        _early.clear()


class Child:
    """A child process, which begins ``task`` at once, or imports a module while it waits for a task.

    ``most`` is the maximum of bytes of a line that it may send. ``options`` are those of :func:`begin`.
    """

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
        call = f"cachetool.proc.child:main({os.getpid()}, {imports!r})"
        # The user's environment comes last, so its settings win.
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
        """Hand it a task. With ``stay`` it waits for another one afterwards."""
        self.result = None
        told = {"target": task.target, "arguments": dict(task.arguments), "starter": os.getpid(), "stay": stay}
        self._tell(told)

    def answer(self, message: Message) -> None:
        """Answer the oldest question. An error in its JSON form is raised in the child."""
        self._tell({"answer": message, "number": self.asked.pop(0)["number"]})

    def _tell(self, value: Message) -> None:
        # The child has ended, which is noticed by other means, or it was told to stop.
        with contextlib.suppress(BrokenPipeError, ValueError):
            write_line(self.stdin.fileno(), value)

    def says(self, seconds: float | None) -> bool:
        """Return True when something comes from it within ``seconds``."""
        return bool(ready(seconds, self.lines.fd))

    def receive(self) -> tuple[bool, list[Message]]:
        """Read what the child sent. Return False after its end, and the messages that came."""
        self.lines.receive()
        messages: list[Message] = []
        for value in self.lines:
            if "message" in value and "error" not in value:
                messages.append(value["message"])
            elif "ask" in value:
                self.asked.append(value)
                # The bytes behind this line are blocks, not lines; the caller reads them first.
                if "blocks" in value:
                    break
            elif "result" in value:
                self.result = value["result"]
            else:
                self.error = from_json(value)
        return not self.lines.ended, messages

    def check(self, *, ended: bool) -> None:
        """Raise the error that the child reported, or one that says that it died without a word."""
        if self.error is not None:
            raise self.error
        if ended and self.result is None:
            code = self.process.wait()
            how = how_ended(code)
            if code == -signal.SIGKILL:
                how += ", perhaps because the machine or the container ran out of memory"
            raise CacheToolError(f"a worker (pid {self.process.pid}) {how}; the samples that it committed are kept")


def stop(children: Sequence[Child]) -> None:
    """End children that still run. They give back what they hold, and are killed if that takes too long."""
    for child in children:
        # The child has ended, so there is nothing left to tell it.
        with contextlib.suppress(OSError):
            child.stdin.close()
        # A process that was forked here may hold another end of its stdin, which then does not end.
        child.process.terminate()
    # One deadline for all of them: several children give back at the same time.
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.stdout.close()
