"""A process that :mod:`tests.zygote` forks behaves like a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cachetool.proc.parent import started
from tests import zygote

pytestmark = pytest.mark.skipif(
    not zygote._POSSIBLE or zygote.EXEC in os.environ, reason="needs Linux on x86-64, and to be wanted"
)

PROGRAM = """
import json, os, resource, signal, sys, threading, warnings
from pathlib import Path

umask = os.umask(0)
state = {
    "parent": os.getppid(),
    "leads its session": os.getsid(0) == os.getpid(),
    "command": Path("/proc/self/cmdline").read_text().rstrip(chr(0)),
    "descriptors": [fd for fd in range(256) if Path(f"/proc/self/fd/{fd}").exists()],
    "folder": os.getcwd(),
    "umask": umask,
    "environment": {**os.environ, "LC_CTYPE": ""},
    "signals": [str(signal.getsignal(sign)).partition(" at ")[0] for sign in sorted(signal.valid_signals())],
    "blocked": [int(sign) for sign in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "words": sys.argv,
    "name": [__name__, vars(sys.modules["__main__"]) is globals()],
    "threads": threading.active_count(),
    "streams": [(each.encoding, each.errors, each.line_buffering) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "warnings": [sys.warnoptions, warnings.filters[0][0] == "ignore"],
}
given = os.read(GIVEN, 100).decode()
print(json.dumps([state, given, sys.stdin.read(), "numpy" in sys.modules, os.getpid()]))
sys.exit("that is all")
"""


class Ran(NamedTuple):
    """The self-description of a process, and its end."""

    said: dict[str, object]
    read: list[str]
    error: bytes
    code: int | None


def run(flags: list[str], environment: dict[str, str]) -> tuple[Ran, bool]:
    """Return the self-description of a process, and True if it was forked."""
    reader, writer = os.pipe()
    os.write(writer, b"by a descriptor")
    os.close(writer)
    given = os.dup2(reader, 99, inheritable=False)
    os.close(reader)
    command = [sys.executable, *flags, "-c", PROGRAM.replace("GIVEN", "99")]
    process = started(command, env=environment, pass_fds=(given,), stderr=subprocess.PIPE)
    os.close(given)
    out, error = process.communicate(b"by stdin")
    said, *streams, forked, pid = json.loads(out)
    assert pid == process.pid
    return Ran(said, streams, error, process.returncode), forked


@pytest.mark.parametrize("flags", [[], ["-W", "ignore"]])
def test_a_forked_process_has_everything_that_a_real_process_has(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    ignored = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    request.addfinalizer(lambda: (os.umask(before), signal.signal(signal.SIGUSR1, ignored)))
    environment = {**os.environ, "SAID": "größe \udcff"}

    state, forked = run(flags, environment)
    assert forked
    monkeypatch.setenv(zygote.EXEC, "1")
    real, forked = run(flags, environment)
    assert not forked
    for name, value in real.said.items():
        assert state.said[name] == value, name
    assert state == real


def test_another_interpreter_is_started_as_a_real_process() -> None:
    assert not run([], {**os.environ, "PYTHONHASHSEED": "1"})[1]
    assert not run(["-W", "error"], {**os.environ})[1]


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("1 / 0", 1),
    ],
)
def test_a_forked_process_ends_like_a_real_process(code: str, ends: int) -> None:
    process = started([sys.executable, "-c", f"print(1)\nimport sys\nif 'numpy' in sys.modules: print(2)\n{code}"])
    out, _ = process.communicate()
    assert process.returncode == ends
    assert ends == -signal.SIGTERM or out == b"1\n2\n"
