"""Commands of cachetool in forks of a process that has imported everything they need.

Each import costs half a second of CPU time, and the tests run some hundred commands. Each command is a separate
process, with the streams, folder and environment that a shell would give it. Tests that depend on the start of an
interpreter run ``python -m cachetool`` instead. Run as ``python -m tests.commands``::

    stdin    {"words": [...], "folder": "/", "environment": {...}, "out": "/a/file", "error": "/a/file",
              "powerless": false}
    stdout   {"code": 0}
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tests.zygote import fork_zygote, import_all

__all__ = ["drop_powers", "run_command"]

_started: list[subprocess.Popen[str]] = []


def run_command(
    *words: object,
    folder: Path | str,
    environment: Mapping[str, str] | None = None,
    seconds: float = 120,
    powerless: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command, without ``python -m cachetool`` in ``words``, as ``subprocess.run`` with captured output does.

    ``powerless``: run it without root's access to all files.
    """
    if not _started or _started[0].poll() is not None:
        _started[:] = [_server()]
        atexit.register(_started[0].communicate)  # the process ends when its stdin is closed
    server, line = _started[0], [str(word) for word in words]
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        out, error = Path(place, "out"), Path(place, "error")
        told = {"words": line, "folder": str(folder), "out": str(out), "error": str(error), "powerless": powerless}
        told["environment"] = {**(os.environ if environment is None else environment)}
        server.stdin.write(json.dumps(told) + "\n")
        server.stdin.flush()
        timer = threading.Timer(seconds, lambda: os.killpg(server.pid, signal.SIGKILL))
        timer.start()
        said = server.stdout.readline()
        timer.cancel()
        if not said:
            raise subprocess.TimeoutExpired(line, seconds, out.read_bytes(), error.read_bytes())
        return subprocess.CompletedProcess(line, json.loads(said)["code"], out.read_text(), error.read_text())


def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.commands"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )


def main() -> None:
    import pkgutil
    from importlib import import_module

    import h5py  # noqa: F401
    import lmdb  # noqa: F401
    import rich.table  # noqa: F401
    import zarr  # noqa: F401

    import cachetool.__main__
    import cachetool.cache
    import cachetool.check.doctor
    import cachetool.check.one_shard
    import cachetool.check.verify
    import cachetool.cli
    import cachetool.conversion.run
    import cachetool.conversion.to_files
    import cachetool.formats
    import cachetool.proc.parent
    import cachetool.pull.run
    import cachetool.sources.files

    for package in (cachetool.cli, cachetool.cache, cachetool.formats):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            import_module(found.name)
    with contextlib.suppress(ModuleNotFoundError):
        import_module("typer._adapters")  # Typer checks the first value that it converts with this module
    import_all()
    for line in iter(sys.stdin.readline, ""):
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(told)
        print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


def _become(told: dict[str, object]) -> NoReturn:
    """Become the command until it exits, as any program does."""
    from cachetool import __main__ as program

    for path, fd in ((os.devnull, 0), (told["out"], 1), (told["error"], 2)):
        opened = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(str(told["folder"]))
    os.environ.clear()
    os.environ.update(told["environment"])  # type: ignore[call-overload]
    sys.argv[:] = [str(program.__file__), *told["words"]]  # type: ignore[misc]
    if told["powerless"]:
        drop_powers()
    fork_zygote()
    program.main()


def drop_powers() -> None:
    """Give up root's power over other users' files for good: capabilities(7)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_CAPABILITIES):
        # fails if this process has fewer capabilities, or after the last one
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


_PR_CAPBSET_DROP, _CAPABILITIES, _CAPABILITY_VERSION = 24, 64, 0x20080522

if __name__ == "__main__":
    main()
