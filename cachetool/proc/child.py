"""The main function of a worker process: tasks in on stdin, messages out on stdout.

::

    stdin    {"target": "cachetool.pull.worker:draw", "arguments": {...}, "starter": pid, "stay": false}
    stdout   {"message": {...}} ...                                   then {"result": {...}} or {"error": ...}
             {"ask": {...}, "number": n}     and on stdin {"answer": {...}, "number": n}, before the task goes on

After a task that says ``stay`` another one may come; it begins with all that is imported. When stdin ends, at SIGTERM,
or when the starter is not the parent any more, the work is to stop: :class:`Interrupted` is raised in the main thread,
so that ``with`` blocks give back what they hold. Anything that a library prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import threading
import time
import traceback
from queue import SimpleQueue
from types import FrameType

from cachetool.core.errors import CacheToolError, Interrupted, from_json, to_json
from cachetool.proc.disk import known_error
from cachetool.proc.streams import keep_standard_streams
from cachetool.proc.task import Message

__all__ = ["bug", "main"]

_WATCH = 0.5
"""Seconds until a child notices at the latest that its starter is gone."""
AGAIN = 30.0
"""Seconds that the clean-up may take before the work is stopped once more: something may have caught the first
:class:`Interrupted`, such as a finaliser that ran just then."""


class _Pipe:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._asked, self._ended = 0, False
        self._answers: SimpleQueue[Message] = SimpleQueue()

    def put(self, value: Message) -> None:
        data = memoryview(json.dumps(value).encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def send(self, message: Message) -> None:
        self.put({"message": message})

    def ask(self, message: Message) -> Message:
        """Wait for an answer; in one thread at a time. Raises :class:`Interrupted` when nobody can give one."""
        self._asked += 1
        self.put({"ask": message, "number": self._asked})
        while not self._ended:
            answer = self._answers.get()
            if answer.get("number") == self._asked:  # not one that came after a signal had ended the waiting for it
                value: Message = answer["answer"]
                if "error" in value:
                    raise from_json(value)
                return value
        raise Interrupted("stopped")

    def answer(self, value: Message | None) -> None:
        """Hand an answer to whoever waits; None says that there will be no more."""
        self._ended = self._ended or value is None
        self._answers.put(value or {})


def main(starter: int = 0, imports: str = "") -> None:
    """Run the tasks that stdin names, then exit with 0 whatever came of them: the starter reads the outcome.

    ``starter`` is its pid, where it is known before the first task, and ``imports`` a module to load meanwhile.
    """
    keep_standard_streams()
    out = os.dup(1)
    os.dup2(2, 1)
    pipe = _Pipe(out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter decides; it ends our stdin
    tasks = _Tasks(starter, pipe)
    try:
        threading.Thread(target=tasks.watch, daemon=True).start()
    except RuntimeError as error:
        pipe.put(to_json(known_error(error) or bug(error)))
        os._exit(0)
    if imports:
        importlib.import_module(imports)
    stay = True
    while stay:
        stay = False
        try:
            signal.signal(signal.SIGTERM, _Interrupt())
            task = tasks.next()
            if task is None:
                break
            stay = task.get("stay", False)
            outcome = {"result": _call(task, pipe)}
        except CacheToolError as error:
            outcome = to_json(known_error(error) or error)
        except MemoryError:
            outcome = to_json(
                CacheToolError("a worker ran out of memory; use fewer --workers or a smaller --shard-size")
            )
        except Exception as error:  # noqa: BLE001 - a bug must reach the starter as text, not as a silent exit
            if os.environ.get("CACHETOOL_DEBUG"):
                traceback.print_exc()
            outcome = to_json(known_error(error) or bug(error))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            pipe.put(outcome)
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more
    os._exit(0)  # no thread of a library may keep the process, or crash it on its way out


def bug(error: Exception) -> CacheToolError:
    """What a user sees of a bug: two lines, the place of it among them."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(str(error).split())
    return CacheToolError(
        f"a bug in a worker: {type(error).__name__}: {what} ({os.path.basename(frame.filename)} line {frame.lineno})\n"
        "CACHETOOL_DEBUG=1 shows where it happened"
    )


def _call(task: Message, pipe: _Pipe) -> Message:
    module, _, name = task["target"].partition(":")
    if not module.startswith("cachetool."):
        raise CacheToolError(f"not a task of cachetool: {task['target']}")
    result: Message = getattr(importlib.import_module(module), name)(pipe, **task["arguments"])
    return result


class _Tasks:
    """What comes in on stdin, taken by the main thread while another watches."""

    def __init__(self, starter: int, pipe: _Pipe) -> None:
        self._starter, self._pipe = starter, pipe
        self._queue: SimpleQueue[Message | None] = SimpleQueue()

    def next(self) -> Message | None:
        """The next task; None when there will be none."""
        return self._queue.get()

    def watch(self) -> None:
        """Wait for tasks, and for the end of stdin or of the starter: one does not imply the other where processes
        were forked."""
        partial = b""
        while not self._starter or os.getppid() == self._starter:
            if not select.select([0], [], [], _WATCH)[0]:
                continue
            if not (data := os.read(0, 2**16)):
                break
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                task = json.loads(line)
                if "answer" in task:
                    self._pipe.answer(task)
                    continue
                self._starter = task["starter"]
                self._queue.put(task)
        self._pipe.answer(None)
        self._queue.put(None)  # first: the signal is ignored while an outcome is written
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(AGAIN + 0.1)


class _Interrupt:
    """Stops the work; not again for a while, since the clean-up must not be interrupted in its turn."""

    def __init__(self) -> None:
        self._quiet = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._quiet:
            self._quiet = now + AGAIN
            raise Interrupted("stopped")
