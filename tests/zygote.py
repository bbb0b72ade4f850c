"""Processes of ours that fork from one that has imported what they need: some thousand are started by the tests, and
each would spend 0.15 to 0.25 s of processor on NumPy and on our own modules before it does anything.

A *zygote* is a process that has one thread, has imported much and used nothing. Whoever starts processes by
:mod:`cachetool.proc.parent` in the tests, which is a pytest process, a command of :mod:`tests.commands` or a worker of
one, asks its own zygote for each::

    starter --- the program, environment, folder, descriptors ---> zygote --- clone(CLONE_PARENT) ---> process
            <-- its pid --------------------------------------------

The new process has to be a child of the *starter*: that waits for it, and the kernel tells it when the starter is
gone. A fork of the zygote would be the zygote's child; with ``CLONE_PARENT`` it is one of the zygote's parent, so each
starter has a zygote that it started itself. pytest's is a program, as pytest has imported and done too much to fork
from; that of a command or a worker is a fork that it makes before it does anything else, for some milliseconds.

It then has what a new program would: session, folder, mask, environment, signals, descriptors, ``__main__``. It differs
in what an interpreter or a C library reads when it begins (so a start with another ``PYTHON...`` or ``LANG``, or with
flags, limits or a user of its own, is a real one), in ``/proc/.../environ``, and in modules that are there unasked.
Tests of such things have the fixture ``real_processes``; ``TESTS_EXEC=1 pytest`` starts all processes as users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from cachetool.proc import parent

__all__ = ["EXEC", "fork_zygote", "import_all", "use_zygote"]

EXEC = "TESTS_EXEC"
"""The variable that asks for real processes."""

_CLONE, _GET_ROBUST_LIST, _SET_ROBUST_LIST = 56, 274, 273  # of x86-64
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40
_POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_PYTHON = sys.executable  # a test may put another one there
_NO_MATTER = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
"""The first is in the program, the second is for streams that ours do not write to, the third is looked at later."""
_python = ctypes.PyDLL(None)
"""The interpreter and the C library, called without giving the GIL away: what forks Python has to hold it."""


def import_all() -> None:
    """Import what most processes need. obstore and pyarrow are left out: they start threads, which forks lack."""
    for module in (
        "h5py",
        "lmdb",
        "zarr",
        "cachetool.conversion.run",
        "cachetool.formats.hdf5",
        "cachetool.formats.lmdb",
        "cachetool.formats.tfrecord",
        "cachetool.formats.zarr",
        "cachetool.loaders.feed.feeder",
        "cachetool.loaders.feed.leader",
        "cachetool.proc.child",
        "cachetool.pull.listing",
        "cachetool.pull.worker",
        "cachetool.sources.guarded",
        "cachetool.stores.http",
    ):
        import_module(module)
    gc.collect()
    gc.freeze()  # else the first collection in each fork looks at, and so copies, all of it


class _Zygote:
    """The zygote of this process, as far as it is known to the starter."""

    def __init__(self, line: socket.socket) -> None:
        self.owner, self._line, self._lock = os.getpid(), line, threading.Lock()
        self._fixed = _fixed(os.environ)

    def start(self, flags: list[str], code: str, fds: dict[int, int], env: dict[str, str]) -> int:
        """The pid of a process that runs ``code`` with these descriptors by their numbers there; 0 where the zygote
        cannot make what a real one would be."""
        if os.getpid() != self.owner or _fixed(env) != self._fixed:
            return 0
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        asked = {"flags": flags, "code": code, "numbers": [*fds], "env": env, "ignored": ignored, "umask": _umask()}
        try:
            with self._lock:
                here = os.open(".", os.O_PATH)
                try:
                    socket.send_fds(self._line, [json.dumps(asked).encode()], [here, *fds.values()])
                finally:
                    os.close(here)
                return int(self._line.recv(100) or b"0")
        except OSError:  # it is gone; or the folder, a descriptor: a real process says what is wrong
            return 0


_zygote: _Zygote | None = None


def _fixed(env: Any) -> tuple[Any, ...]:
    """What a running process cannot take over from its starter, or not all of it."""
    begins = ("PYTHON", "LD_", "LC_", "LANG")
    names = {name: env[name] for name in env if name.startswith(begins) and name not in _NO_MATTER}
    return names, os.getresuid(), os.getresgid(), [resource.getrlimit(limit) for limit in _LIMITS]


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


class _Popen(subprocess.Popen[bytes]):
    """A ``Popen`` whose process the zygote makes, where it can."""

    def _execute_child(self, args: Any, *how: Any) -> None:
        _, before, _, pass_fds, cwd, env, _, _, shell, *pipes = how[:15]
        *_, session, group = how
        python, *flags, option, code = args if len(args) > 2 else ("", "", "")
        if (
            (python, option) == (_PYTHON, "-c")
            and flags in ([], ["-W", "ignore"])
            and session
            and group == -1
            and not (before or cwd or shell or EXEC in os.environ)
            and (zygote := _ready()) is not None
        ):
            fds = {0: pipes[0], 1: pipes[3], 2: 2 if pipes[5] == -1 else pipes[5], **{fd: fd for fd in pass_fds}}
            if pid := zygote.start(flags, code, fds, dict(os.environ if env is None else env)):
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(args, *how)  # type: ignore[misc]


def use_zygote() -> None:
    """Have this process start others from its zygote, which begins when the first is started."""
    if _POSSIBLE and EXEC not in os.environ:
        ours = types.ModuleType("subprocess")
        vars(ours).update(vars(subprocess), Popen=_Popen)
        vars(parent)["subprocess"] = ours


def _ready() -> _Zygote | None:
    """The zygote of this process; begun, if need be, by its main thread, since the kernel takes the end of the thread
    that started a process for that of its starter."""
    global _zygote
    if _zygote is None and threading.get_native_id() == os.getpid():
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(its.fileno()), str(os.getpid()), " " * 8000],
                pass_fds=[its.fileno()],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not be in a fork
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        _zygote = _Zygote(ours)
    return _zygote


def fork_zygote() -> None:
    """Have this process, which has done nothing yet, start others from a fork of itself."""
    global _zygote
    use_zygote()
    if not _POSSIBLE or EXEC in os.environ:
        return
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(its, starter)
    its.close()
    _zygote = _Zygote(ours)


def _serve(line: socket.socket, starter: int) -> NoReturn:
    """Make processes until the starter is gone; return in none of them but by their end."""
    _python.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != starter or len(os.listdir("/proc/self/task")) > 1:
        os._exit(0)
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(sign, signal.SIG_IGN)  # what ends the starter is for it
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    _close_all_but({0, 1, 2, line.fileno()})
    while True:
        data, fds, _, _ = socket.recv_fds(line, 2**20, 250)
        if not data:
            os._exit(0)
        pid = _fork_beside()
        if pid == 0:
            _become(json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        line.send(str(max(pid, 0)).encode())


def _fork_beside() -> int:
    """``os.fork()``, but for whose child it makes.

    As the C library does in its own fork, the kernel is told where a process keeps its number and its list of locks,
    by which the next holder of an LMDB lock learns that the last one died.
    """
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    number, locks, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    if _python.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(number), 0, 0, 0):
        return -1
    _python.syscall(_GET_ROBUST_LIST, 0, ctypes.byref(locks), ctypes.byref(size))
    _python.PyOS_BeforeFork()
    pid: int = _python.syscall(_CLONE, ctypes.c_long(flags), None, None, number, None)
    if pid == 0:
        _python.syscall(_SET_ROBUST_LIST, locks, size)
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    return pid


def _become(asked: dict[str, Any], received: list[int]) -> NoReturn:
    """Be ``python -c`` until it exits, as any program does."""
    os.setsid()
    os.fchdir(received[0])
    os.umask(asked["umask"])
    above = max(asked["numbers"]) + 1
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in received[1:]]
    for fd, number in zip(fds, asked["numbers"], strict=True):
        os.dup2(fd, number)
    _close_all_but({*asked["numbers"]})
    for sign in signal.valid_signals():
        with contextlib.suppress(OSError):  # two that nobody may set
            ignores = sign in asked["ignored"] or sign in (signal.SIGPIPE, signal.SIGXFSZ)
            signal.signal(sign, signal.SIG_IGN if ignores else signal.SIG_DFL)
    if signal.SIGINT not in asked["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["env"])
    time.tzset()
    tempfile.tempdir, sys.dont_write_bytecode = None, "PYTHONDONTWRITEBYTECODE" in os.environ
    if asked["flags"]:
        sys.warnoptions[:] = ["ignore"]
        warnings.simplefilter("ignore")
    sys.argv[:] = ["-c"]
    _tell([sys.executable, *asked["flags"], "-c", asked["code"]])
    if "cachetool.proc.child import main" in asked["code"] and not asked["flags"]:
        # A worker: it may start processes in its turn, which read files of others.
        fork_zygote()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(asked["code"], vars(main))
    sys.exit()


def _tell(command: list[str]) -> None:
    """Have ``/proc`` show this command line, or as much as there is room for, instead of the zygote's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])  # proc(5): arg_start, arg_end
    words = "\0".join(command).encode(errors="surrogateescape")[: end - begin - 1]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


def _close_all_but(numbers: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in numbers:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(fd)


if __name__ == "__main__":
    end, pid = map(int, sys.argv[1:3])  # and blanks: the room for the command lines of what it makes
    import_all()
    _serve(socket.socket(fileno=end), pid)
