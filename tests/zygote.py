"""Processes of cachetool in tests, forked from a process that has imported what they need.

The tests start some thousand processes. Each would otherwise spend 0.15 to 0.25 s of CPU time on importing NumPy and
cachetool.

A *zygote* is a process with one thread that has imported much and used nothing. In the tests, each process that
starts others by :mod:`cachetool.proc.parent` (a pytest process, a command of :mod:`tests.commands`, or a worker of
one) asks its own zygote for each of them::

    starter --- the program, environment, folder, descriptors ---> zygote --- clone(CLONE_PARENT) ---> process
            <-- its pid --------------------------------------------

The new process must be a child of the *starter*: the starter waits for it, and the kernel tells the child when the
starter has ended. A fork of the zygote would be the zygote's child. With ``CLONE_PARENT`` it becomes a child of the
zygote's parent, so each starter has its own zygote as a child. pytest's zygote is a separate program, because pytest
has imported and done too much to be forked. The zygote of a command or worker is a fork that it makes before it does
anything else, in some milliseconds.

The new process then has everything that a new program would have: session, folder, mask, environment, signals,
descriptors, ``__main__``. It differs only in settings that an interpreter or a C library reads at its start, in
``/proc/.../environ``, and in modules that are imported already. A start with another ``PYTHON...`` or ``LANG``, with
flags, limits or another user is therefore a real one. Tests of such things use the fixture ``real_processes``;
``TESTS_EXEC=1 pytest`` starts all processes as users do.
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
"""The variable that requests real processes."""

_CLONE, _GET_ROBUST_LIST, _SET_ROBUST_LIST = 56, 274, 273  # of x86-64
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40
_POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_PYTHON = sys.executable  # a test may replace it
_NO_MATTER = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
"""Variables that need no real process: the first is part of the program, the second is for streams that cachetool does
not write to, the third is read later.
"""
_python = ctypes.PyDLL(None)
"""The interpreter and the C library, called without releasing the GIL, because a fork of Python must hold it."""


def import_all() -> None:
    """Import the modules that most processes need, except obstore and pyarrow: they start threads, which forks lack."""
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
    gc.freeze()  # otherwise the first garbage collection in each fork would touch, and so copy, all of it


class _Zygote:
    """The zygote of this process, as its starter sees it."""

    def __init__(self, line: socket.socket) -> None:
        self.owner, self._line, self._lock = os.getpid(), line, threading.Lock()
        self._fixed = _fixed(os.environ)

    def start(self, flags: list[str], code: str, fds: dict[int, int], env: dict[str, str]) -> int:
        """Return the pid of a process that runs ``code`` with these descriptors under their numbers there. Return 0 if
        the zygote cannot make an equivalent of a real process.
        """
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
        # the zygote has ended, or a folder or descriptor is invalid: a real process reports the problem
        except OSError:
            return 0


_zygote: _Zygote | None = None


def _fixed(env: Any) -> tuple[Any, ...]:
    """Return the settings that a running process cannot fully adopt from its starter."""
    begins = ("PYTHON", "LD_", "LC_", "LANG")
    names = {name: env[name] for name in env if name.startswith(begins) and name not in _NO_MATTER}
    return names, os.getresuid(), os.getresgid(), [resource.getrlimit(limit) for limit in _LIMITS]


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


class _Popen(subprocess.Popen[bytes]):
    """A ``Popen`` whose process the zygote makes if possible."""

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
    """Make this process start others from its zygote, which starts with the first of them."""
    if _POSSIBLE and EXEC not in os.environ:
        ours = types.ModuleType("subprocess")
        vars(ours).update(vars(subprocess), Popen=_Popen)
        vars(parent)["subprocess"] = ours


def _ready() -> _Zygote | None:
    """Return the zygote of this process. If necessary the main thread starts it, because the kernel treats the end of
    the thread that started a process as the end of its starter.
    """
    global _zygote
    if _zygote is None and threading.get_native_id() == os.getpid():
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(its.fileno()), str(os.getpid()), " " * 8000],
                pass_fds=[its.fileno()],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not exist in a fork
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        _zygote = _Zygote(ours)
    return _zygote


def fork_zygote() -> None:
    """Make this process, which has done nothing yet, start others from a fork of itself."""
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
    """Make processes until the starter has ended. In a new process, return only through its end."""
    _python.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != starter or len(os.listdir("/proc/self/task")) > 1:
        os._exit(0)
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(sign, signal.SIG_IGN)  # a signal that ends the starter is meant for the starter
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
    """Fork like ``os.fork()``, but as a child of this process's parent.

    As the C library's own fork does, tell the kernel where the process keeps its thread id and its list of robust
    locks. By that list, the next holder of an LMDB lock learns that the last holder died.
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
    """Become ``python -c`` until it exits, as any program does."""
    os.setsid()
    os.fchdir(received[0])
    os.umask(asked["umask"])
    above = max(asked["numbers"]) + 1
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in received[1:]]
    for fd, number in zip(fds, asked["numbers"], strict=True):
        os.dup2(fd, number)
    _close_all_but({*asked["numbers"]})
    for sign in signal.valid_signals():
        with contextlib.suppress(OSError):  # two signals that cannot be changed
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
        # A worker may start processes in its turn, which read foreign files.
        fork_zygote()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(asked["code"], vars(main))
    sys.exit()


def _tell(command: list[str]) -> None:
    """Make ``/proc`` show this command line, as far as space allows, instead of the zygote's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])  # proc(5): arg_start, arg_end
    words = "\0".join(command).encode(errors="surrogateescape")[: end - begin - 1]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


def _close_all_but(numbers: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in numbers:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)


if __name__ == "__main__":
    end, pid = map(int, sys.argv[1:3])  # and blanks, as space for the command lines of its processes
    import_all()
    _serve(socket.socket(fileno=end), pid)
