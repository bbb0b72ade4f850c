"""How a process of ours begins, as ``python -c``, so that the user's program is not run again in it; and how it ends
with the one that started it.

The kernel is asked for a signal when the starter is gone: a thread that watches would need the GIL, which a library
that computes may keep for minutes. Such a signal comes when the *thread* that started the process ends, so all are
started by the main thread or by one that stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from cachetool.core.errors import UsageError

__all__ = ["begin", "boot", "end_with", "started"]

_PDEATHSIG = 1  # linux/prctl.h
_GONE = signal.SIGQUIT
"""Says that the starter is gone. Its number is also how many seconds are left then."""


def boot(module: str, call: str = "main()", *, named: bool = True) -> str:
    """The program of a process that imports from where this one does and calls ``call`` of ``module``.

    A ``Path`` in ``sys.path``, which Python passes over, is left out. ``named``: it knows the first words of the
    command line, by which the cache calls who uses it; a process that reads files of others is told nothing.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    words = sys.argv[:2] if named else ["-c"]
    name = call.partition("(")[0]
    return f"import sys; sys.path[:] = {path!r}; sys.argv[:] = {words!r}; from {module} import {name}; {call}"


def begin(
    module: str,
    call: str = "main()",
    *,
    gives_back: bool,
    named: bool = True,
    flags: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that runs :func:`boot`'s program, with pipes to and from it and apart from the terminal, whose
    Ctrl-C reaches this process alone. It ends with this one, however that goes.

    ``gives_back``: it may hold what it should give back first, and has :data:`_GONE` seconds for that; else it is
    killed at once. ``flags`` are Python's. Raises what :func:`started` does.
    """
    ends = boot("cachetool.proc.boot", f"end_with({os.getpid()}, gives_back={gives_back})", named=False)
    command = [sys.executable, *flags, "-c", f"{ends}; {boot(module, call, named=named)}"]

    def start() -> subprocess.Popen[bytes]:
        return started(command, env=env, stderr=stderr)

    return start() if threading.get_native_id() == os.getpid() else _lasting(start)


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


def end_with(starter: int, *, gives_back: bool) -> None:
    """Have the kernel end this process when the process ``starter`` is gone; see :func:`begin`."""
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
