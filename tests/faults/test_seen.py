"""Isolation of the processes that parse foreign files from their starter, and operation in a narrow sandbox."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cachetool.sources import guard
from tests.sources.files import open_files

REPOSITORY = Path(__file__).parents[2]
CANARY = "canary-1f3d5b"
SECRETS = [
    "AWS_SECRET_ACCESS_KEY", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_ID",
    "HF_TOKEN", "GITHUB_TOKEN", "GH_PAT", "WANDB_API_KEY", "KUBECONFIG", "SSH_AUTH_SOCK", "DATABASE_URL", "PGPASSWORD",
    "PGPASSFILE", "MYSQL_PWD", "REDIS_URL", "SENTRY_DSN", "SLACK_WEBHOOK", "NETRC", "DOCKER_CONFIG", "NPM_CONFIG__AUTH",
    "PIP_INDEX_URL", "https_proxy", "RAY_AUTH_TOKEN", "CACHETOOL_ALLOW_HOSTS", "DBUS_SESSION_BUS_ADDRESS", "GPG_TTY",
    "BORG_PASSPHRASE", "VAULT_ADDR", "ANSIBLE_VAULT", "MY_COMPANY_LOGIN", "pass", "x",
    # names that begin like variables that are passed on
    "PYTHON_KEYRING_BACKEND", "PYTHONPATH_TOKEN", "LC_GITHUB", "HDF5_DRIVER_CONFIG", "LD_AUTH", "PATH2",
]  # fmt: skip


def h5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(12.0).reshape(6, 2), chunks=(2, 2))
    return path


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_processes: None) -> Any:
    """Return the pid of a process that has a foreign file open. All ``SECRETS`` are in this process's environment."""
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("HDF5_PLUGIN_PATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    with open_files(h5(tmp_path / "x.h5")) as source:
        source.read(0, 1)
        yield source.reader


def test_a_reader_of_foreign_files_gets_only_listed_environment_variables(reader: int) -> None:
    told = dict(line.split("=", 1) for line in Path(f"/proc/{reader}/environ").read_text().split("\0") if line)

    assert not set(told) & set(SECRETS)
    assert set(told) <= guard._PASSED | {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert (told["TZ"], told["OMP_NUM_THREADS"]) == ("Asia/Tokyo", "1")
    assert "HDF5_PLUGIN_PATH" in told
    assert CANARY not in Path(f"/proc/{reader}/cmdline").read_text()


def test_a_reader_of_foreign_files_inherits_no_file_and_no_terminal(reader: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(CANARY)
    with (tmp_path / "secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        with open_files(h5(tmp_path / "y.h5")) as source:
            source.read(0, 1)
            pid = source.reader
            fds = {int(fd.name): os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}

    assert str(tmp_path / "secret") not in fds.values()
    assert fds[0] == "/dev/null"
    assert fds[2] == "/dev/null"
    here = str(tmp_path / "y.h5")  # and the file that it reads
    assert all(name.startswith(("pipe:", "socket:", "/dev/null")) or name == here for name in fds.values()), fds


# -- sandboxes that forbid a call --------------------------------------------------------------------------------------

DENY = """
import ctypes, os, struct, sys

NUMBERS = {"x86_64": {"setsid": 112, "memfd_create": 319}, "aarch64": {"setsid": 157, "memfd_create": 279}}

def deny(name, keep_running=True):
    number = NUMBERS[os.uname().machine][name]
    load, jump, give = 0x20, 0x15, 0x06
    rules = [(load, 0, 0, 0), (jump, 0, 1, number), (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    place = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(place))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0):
        print("no seccomp here")
        sys.exit(77)
"""


def sandboxed(call: str, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process where the kernel answers ``call`` with EPERM."""
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("numbers of system calls are known here for x86-64 and ARM64")
    done = subprocess.run(
        [sys.executable, "-c", f"{DENY}\ndeny({call!r})\n{program}", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this kernel or container takes no seccomp filter")
    return done


PULL = """
import cachetool
from cachetool.loaders.numpy import Loader
with cachetool.open_cache(sys.argv[2], max_size="20MB") as cache:
    print(cache.pull(sys.argv[1], workers=1).samples)
    for workers in map(int, sys.argv[3:]):
        try:
            with Loader(cache, batch_size=3, workers=workers) as loader:
                print(sum(len(batch["x"]) for batch in loader))
        except cachetool.UsageError as error:
            print(error)
"""


def tar(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for number in range(6):
            body = io.BytesIO()
            np.save(body, np.full(2, number))
            info = tarfile.TarInfo(f"{number}.x.npy")
            info.size = body.tell()
            body.seek(0)
            archive.addfile(info, body)
    return path


@pytest.mark.parametrize(("call", "write"), [("setsid", h5), ("memfd_create", tar)])
def test_a_forbidden_system_call_is_worked_around_or_reported_in_one_line(
    call: str, write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Archives are read in anonymous memory, or in a temporary file if that is forbidden."""
    done = sandboxed(call, PULL, write(tmp_path / f"x.{write.__name__}"), tmp_path / "cache", 0, 1)

    assert "Traceback" not in done.stderr, done.stderr
    pulled, inline, fed = done.stdout.splitlines()
    assert (pulled, inline) == ("6", "6")
    if call == "setsid":
        assert fed == "6"
    else:
        assert fed.startswith("feeder processes need memfd_create()")
        assert fed.endswith("use workers=0")


def test_a_process_that_cannot_be_started_is_reported_in_one_line(tmp_path: Path) -> None:
    h5(tmp_path / "x.h5")
    program = """
import sys
sys.executable = "/proc/nothing"
import cachetool
try:
    with cachetool.open_cache(sys.argv[2], max_size="20MB") as cache:
        cache.pull(sys.argv[1], workers=1)
except cachetool.UsageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x.h5"), str(tmp_path / "cache")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip

    assert done.stdout.startswith("a process cannot be started: No such file or directory; allow fork"), done
    assert len(done.stdout.splitlines()) == 1
