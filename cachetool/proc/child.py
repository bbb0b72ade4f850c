"""The main function of a worker process: tasks in on stdin, messages out on stdout.

::

    stdin    {"target": "cachetool.pull.worker:draw", "arguments": {...}, "starter": pid, "stay": false}
    stdout   {"message": {...}} ...                                   then {"result": {...}} or {"error": ...}
             {"ask": {...}, "number": n}     and on stdin {"answer": {...}, "number": n}, before the task goes on
             {"ask": {...}, "number": n, "blocks": [size, ...]}       and so many bytes behind it

After a task that says ``stay`` another one may come; it begins with all that is imported. When stdin ends, at SIGTERM,
or when the starter is not the parent any more, the work is to stop: :class:`Interrupted` is raised in the main thread,
so that ``with`` blocks give back what they hold. Anything that a library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from queue import SimpleQueue
from types import FrameType
from typing import Any

from cachetool.core.errors import CacheToolError, Interrupted, from_json, to_json
from cachetool.proc.disk import known_error
from cachetool.proc.lines import own_streams, ready, write_line
from cachetool.proc.task import Message, named

__all__ = ["end_with", "main", "outcome_of"]

_PDEATHSIG = 1  # linux/prctl.h
_GONE = signal.SIGQUIT
"""Says that the starter is gone. Its number is also how many seconds are left then."""
_WATCH = 0.5
"""Seconds until a child notices at the latest that its starter is gone."""
AGAIN = 30.0
"""Seconds that the clean-up may take before the work is stopped once more: something may have caught the first
:class:`Interrupted`, such as a finaliser that ran just then."""


def end_with(starter: int, *, gives_back: bool) -> None:
    """Have the kernel end this process when the process ``starter`` is gone; see :func:`cachetool.proc.parent.begin`.

    A thread that watches would need the GIL, which a library that computes may keep for minutes.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if gives_back:
        # The handler is the C function alarm() itself, which takes the number of the signal for seconds and then
        # kills: no Python is needed for that. Python's own watching stops the work meanwhile, where it gets to run.
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal(_GONE, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_PDEATHSIG, _GONE if gives_back else signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        os._exit(0)  # it was gone before


class _Starter:
    """The line to whoever started this process, read by a thread that also sees to it that it is still there."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lines, self._out = own_streams()
        self._lock = threading.Lock()
        self._asked, self._ended = 0, False
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self.tasks: SimpleQueue[Message | None] = SimpleQueue()
        """Those that came; None when there will be no more."""

    def put(self, value: Message, *blocks: Any) -> None:
        with self._lock:
            write_line(self._out, value, *blocks)

    def send(self, message: Message) -> None:
        self.put({"message": message})

    def ask(self, message: Message, *blocks: Any) -> Message:
        """Wait for an answer; in one thread at a time. Raises :class:`Interrupted` when nobody can give one."""
        self._asked += 1
        sizes = {"blocks": [len(block) for block in blocks]} if blocks else {}
        self.put({"ask": message, "number": self._asked, **sizes}, *blocks)
        while not self._ended:
            answer = self._answers.get()
            if answer.get("number") == self._asked:  # not one that came after a signal had ended the waiting for it
                value: Message = answer["answer"]
                if "error" in value:
                    raise from_json(value)
                return value
        raise Interrupted("stopped")

    def watch(self) -> None:
        """Wait for tasks and answers, and for the end of stdin or of the starter: one does not imply the other where
        processes were forked."""
        try:
            while not self._lines.ended and self._pid in (0, os.getppid()):
                if ready(_WATCH, self._lines.fd):
                    self._lines.receive()
                for value in self._lines:
                    if "answer" in value:
                        self._answers.put(value)
                        continue
                    self._pid = value["starter"]
                    self.tasks.put(value)
        except MemoryError:  # the main thread would wait for ever
            os._exit(1)
        self._ended = True
        self._answers.put({})
        self.tasks.put(None)  # first: the signal is ignored while an outcome is written
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(AGAIN + 0.1)


def main(starter: int = 0, imports: str = "") -> None:
    """Run the tasks that stdin names, then exit with 0 whatever came of them: the starter reads the outcome.

    ``starter`` is its pid, where it is known before the first task, and ``imports`` a module to load meanwhile.
    """
    line = _Starter(starter)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter decides; it ends our stdin
    try:
        threading.Thread(target=line.watch, daemon=True).start()
    except RuntimeError as error:
        line.put(outcome_of(error))
        os._exit(0)
    if imports:
        importlib.import_module(imports)
    stay = True
    while stay:
        stay = False
        try:
            signal.signal(signal.SIGTERM, _Interrupt())
            task = line.tasks.get()
            if task is None:
                break
            stay = task.get("stay", False)
            outcome = {"result": named(task["target"])(line, **task["arguments"])}
        except Exception as error:  # noqa: BLE001 - a bug must reach the starter as text, not as a silent exit
            outcome = outcome_of(error)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            line.put(outcome)
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more
    os._exit(0)  # no thread of a library may keep the process, or crash it on its way out


def outcome_of(error: BaseException) -> Message:
    """What the starter gets of an error: in its JSON form one of ours, or two lines on a bug, the place of it among
    them."""
    if isinstance(error, MemoryError):
        error = CacheToolError("a worker ran out of memory; use fewer --workers or a smaller --shard-size")
    ours = known_error(error) or error
    if isinstance(ours, CacheToolError):
        return to_json(ours)
    if os.environ.get("CACHETOOL_DEBUG"):
        traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(str(error).split())
    return to_json(
        CacheToolError(
            f"a bug in a worker: {type(error).__name__}: {what} ({os.path.basename(frame.filename)} line"
            f" {frame.lineno})\nCACHETOOL_DEBUG=1 shows where it happened"
        )
    )


class _Interrupt:
    """Stops the work; not again for a while, since the clean-up must not be interrupted in its turn."""

    def __init__(self) -> None:
        self._quiet = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._quiet:
            self._quiet = now + AGAIN
            raise Interrupted("stopped")
