"""Processes of cachetool end with the process that started them, even while they compute in C and hold the GIL."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs parent-death signals")

STUCK = """
import os

def main():
    os.write(1, b"begun\\n")
    sum(range(10**14))  # hours in C: no thread of this process gets to run meanwhile
"""

STARTER = """
import os, sys, threading, time
from pathlib import Path
from cachetool.proc.parent import begin

def start():
    children.append(begin("stuck:main()", gives_back=sys.argv[2] == "True"))
    assert children[-1].stdout.readline() == b"begun\\n"
    threads.append(threading.get_native_id())

def in_a_thread():
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{threads[-1]}").exists():
        pass

def computed():
    state, *words = Path(f"/proc/{children[-1].pid}/stat").read_text().rpartition(")")[2].split()
    assert state == "R", state
    return int(words[10])

children, threads = [], []
if sys.argv[1] == "forked":
    in_a_thread()  # whose children are none of the process below
    if os.fork():
        os.wait()
        sys.exit()
start() if sys.argv[1] == "main" else in_a_thread()
before = computed()
while computed() < before + 5:  # it goes on, whatever became of the thread that started it
    pass
print(os.getpid(), children[-1].pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("stuck")
    (found / "stuck.py").write_text(STUCK)
    return found


@pytest.fixture(params=[("main", True), ("main", False), ("thread", True), ("thread", False), ("forked", False)])
def starter(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[int, int]]:
    """Return the pids of a starter and of its computing child. The thread that started the child has ended, if it
    may.
    """
    how, gives_back = request.param
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, how, str(gives_back)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert process.stdout is not None
    with process.stdout:
        parent, child = map(int, process.stdout.readline().split())
        yield parent, child
    process.kill()
    process.wait()


@pytest.mark.timeout(120)
def test_a_child_that_computes_in_c_ends_with_its_parent_and_not_before(starter: tuple[int, int]) -> None:
    parent, child = starter
    handle = os.pidfd_open(child)
    os.kill(parent, signal.SIGKILL)

    assert ended(handle)
    os.close(handle)


def ended(handle: int) -> bool:
    """Wait until a process ends. Return True if it did; the limit only ends a hang."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(60_000))
