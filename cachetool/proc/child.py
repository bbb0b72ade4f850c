"""The main function of a worker process: tasks in on stdin, messages out on stdout.

::

    stdin    {"target": "cachetool.pull.worker:draw", "arguments": {...}, "starter": pid, "stay": false}
    stdout   {"message": {...}} ...                                   then {"result": {...}} or {"error": ...}
             {"ask": {...}, "number": n}     and on stdin {"answer": {...}, "number": n}, before the task continues
             {"ask": {...}, "number": n, "blocks": [size, ...]}       and so many bytes behind it

After a task with ``stay`` another task may come, which begins with everything imported. The work stops when stdin ends,
at SIGTERM, or when the starter is no longer the parent: :class:`Interrupted` is raised in the main thread, so that
``with`` blocks give back what they hold. Anything that a library prints goes to stderr.
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

# PR_SET_PDEATHSIG of linux/prctl.h, which Python has no name for.
_PDEATHSIG = 1
_GONE = signal.SIGQUIT
"""The signal that tells this process that its starter has ended. Its number is also the seconds that are left then."""
_WATCH = 0.5
"""Maximum of seconds until a child notices that its starter has ended."""
# Something may have caught the first Interrupted, such as a finalizer that ran at that moment.
AGAIN = 30.0
"""Seconds that the clean-up may take before the work is interrupted once more."""


def end_with(starter: int, *, gives_back: bool) -> None:
    """Let the kernel end this process when the process ``starter`` ends; see :func:`cachetool.proc.parent.begin`."""
    if sys.platform != "linux":
        return
    # The kernel rather than a thread that watches: a thread needs the GIL, which a library that
    # computes may keep for minutes.
    libc = ctypes.CDLL(None)
    if gives_back:
        # The handler is the C function alarm() itself. It takes the signal's number for seconds and
        # kills the process after these, without any Python. Meanwhile Python's own watching stops
        # the work, if it gets to run.
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal(_GONE, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_PDEATHSIG, _GONE if gives_back else signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        # The starter ended before prctl(), so the kernel sends no signal.
        os._exit(0)


class _Starter:
    """The connection to the process that started this one. A thread reads it, and watches whether the starter still
    lives."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lines, self._out = own_streams()
        self._lock = threading.Lock()
        self._asked, self._ended = 0, False
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self.tasks: SimpleQueue[Message | None] = SimpleQueue()
        """The tasks that came; None after the last one."""

    def put(self, value: Message, *blocks: Any) -> None:
        # Messages of several threads must not be mixed: a line and its blocks are one write after
        # another.
        with self._lock:
            write_line(self._out, value, *blocks)

    def send(self, message: Message) -> None:
        self.put({"message": message})

    def ask(self, message: Message, *blocks: Any) -> Message:
        """Ask the starter and wait for its answer; one thread at a time. Raises :class:`Interrupted` when no answer can
        come."""
        self._asked += 1
        sizes = {"blocks": [len(block) for block in blocks]} if blocks else {}
        self.put({"ask": message, "number": self._asked, **sizes}, *blocks)
        while not self._ended:
            answer = self._answers.get()
            # An answer to an earlier question may come after a signal had ended the wait for it.
            if answer.get("number") == self._asked:
                value: Message = answer["answer"]
                if "error" in value:
                    raise from_json(value)
                return value
        raise Interrupted("stopped")

    def watch(self) -> None:
        """Wait for tasks and answers, and for the end of stdin or of the starter."""
        try:
            # Both are watched: where processes were forked, another one may hold the end of stdin
            # open after the starter has ended.
            while not self._lines.ended and self._pid in (0, os.getppid()):
                if ready(_WATCH, self._lines.fd):
                    self._lines.receive()
                for value in self._lines:
                    if "answer" in value:
                        self._answers.put(value)
                        continue
                    self._pid = value["starter"]
                    self.tasks.put(value)
        # Without this thread the main thread would wait for a task or an answer for ever.
        except MemoryError:
            os._exit(1)
        self._ended = True
        self._answers.put({})
        # First, because the signal is ignored while an outcome is written, and the main thread must
        # find the end of the tasks afterwards.
        self.tasks.put(None)
        # Sent again and again: code of a library may catch the exception that the signal raises.
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(AGAIN + 0.1)


def main(starter: int = 0, imports: str = "") -> None:
    """Run the tasks that stdin names, then exit with 0 whatever their outcome: the starter reads that.

    ``starter`` is the starter's pid if it is known before the first task. ``imports`` is a module to import meanwhile.
    """
    line = _Starter(starter)
    # Ctrl-C reaches all processes of a terminal. The starter decides about it, and ends stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        threading.Thread(target=line.watch, daemon=True).start()
    except RuntimeError as error:
        # The limit of threads was met. The starter gets that as an error, rather than a worker that
        # is silent.
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
        # Any error: a bug must reach the starter as text, not as an exit without a word.
        except Exception as error:  # noqa: BLE001
            outcome = outcome_of(error)
        # Ignored while the outcome is written: half of a line would be no outcome at all.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            line.put(outcome)
        except BrokenPipeError:
            # The starter has ended, so nobody needs the outcome.
            os._exit(1)
    # Not by the usual way out: a thread of a library may keep the process, or crash it at its end.
    os._exit(0)


def outcome_of(error: BaseException) -> Message:
    """Return what the starter gets of an error: one of our errors in its JSON form, or two lines on a bug and its
    place."""
    if isinstance(error, MemoryError):
        # The text of a MemoryError is empty, so the message says what to do.
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
    """The handler of SIGTERM: stops the work, but not again within :data:`AGAIN` seconds."""

    def __init__(self) -> None:
        self._quiet = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # The clean-up of the first Interrupted must not be interrupted in its turn: it gives leases
        # and reservations back.
        if now >= self._quiet:
            self._quiet = now + AGAIN
            raise Interrupted("stopped")
