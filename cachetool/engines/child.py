"""The main function of a worker process: one task in on stdin, messages out on stdout.

::

    stdin    {"target": "cachetool.sampler:draw", "arguments": {...}, "starter": pid}     then nothing until its end
    stdout   {"message": {...}} ...                                   then {"result": {...}} or {"error": ...}

When stdin ends, at SIGTERM, or when the starter is not the parent any more, the work is to stop: :class:`Interrupted`
is raised in the main thread, so that ``with`` blocks give back what they hold. Anything that a library prints goes to
stderr.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import traceback
from types import FrameType

from cachetool.disk import disk_error
from cachetool.engines.task import Message
from cachetool.errors import CacheToolError, Interrupted, to_json

__all__ = ["main"]

WATCH = 0.5
"""Seconds until a child notices at the latest that its starter is gone."""


class _Pipe:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def put(self, value: Message) -> None:
        data = memoryview(json.dumps(value).encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def send(self, message: Message) -> None:
        self.put({"message": message})


def main() -> None:
    """Run the task that stdin names, then exit with 0 whatever came of it: the starter reads the outcome."""
    out = os.dup(1)
    os.dup2(2, 1)
    pipe = _Pipe(out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter decides; it ends our stdin
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        task = json.loads(sys.stdin.buffer.readline())
        threading.Thread(target=_watch, args=(task["starter"],), daemon=True).start()
        outcome = {"result": _call(task, pipe)}
    except CacheToolError as error:
        outcome = to_json(disk_error(error) or error)
    except MemoryError:
        outcome = to_json(CacheToolError("a worker ran out of memory; use fewer --workers or a smaller --shard-size"))
    except Exception as error:  # noqa: BLE001 - a bug must reach the starter as text, not as a silent exit
        if os.environ.get("CACHETOOL_DEBUG"):
            traceback.print_exc()
        outcome = to_json(disk_error(error) or _bug(error))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        pipe.put(outcome)
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more
    os._exit(0)  # no thread of a library may keep the process, or crash it on its way out


def _bug(error: Exception) -> CacheToolError:
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
    import importlib

    result: Message = getattr(importlib.import_module(module), name)(pipe, **task["arguments"])
    return result


def _watch(starter: int) -> None:
    """Wait for the end of stdin or of the starter: one does not imply the other where processes were forked."""
    while os.getppid() == starter:
        if select.select([0], [], [], WATCH)[0] and not os.read(0, 4096):
            break
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the clean-up must not be interrupted in its turn
    raise Interrupted("stopped")
