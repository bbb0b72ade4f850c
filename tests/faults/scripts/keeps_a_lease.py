"""A program that leases a snapshot, then does something that loses locks or outlives it, by its argument, and waits."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from cachetool.cache import open_cache

ROOT, ASIDE = Path(sys.argv[1]), Path(sys.argv[2])
FILES = [path for path in ROOT.rglob("*") if path.is_file()]


def outlive() -> None:
    """Become a child that survives its parent until its process group is killed."""
    time.sleep(600)


def copy() -> None:
    shutil.copytree(ROOT, ASIDE / "copy")


def digest() -> None:
    for path in ROOT.rglob("*"):
        if path.is_file():
            hashlib.sha256(path.read_bytes())


def archive() -> None:
    with tarfile.open(ASIDE / "cache.tar", "w") as file:
        file.add(ROOT)


def open_to_write() -> None:
    for path in (ROOT / "holders").iterdir():
        os.close(os.dup(os.open(path, os.O_RDWR)))
        path.open("r+b").close()


def daemonize() -> None:
    os.closerange(3, 4096)


def fork() -> None:
    if os.fork() == 0:
        outlive()


def fork_in_c() -> None:
    if ctypes.CDLL(None).fork() == 0:
        outlive()


def fork_by_multiprocessing() -> None:
    multiprocessing.get_context("fork").Process(target=outlive).start()


def inherit_all() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)


def fork_in_a_transaction() -> None:
    with open_cache(ROOT) as other, other.catalog.write():
        fork()
        print("ready", flush=True)
        outlive()


with open_cache(ROOT) as cache:
    snapshot = cache.snapshot()
    for name in sys.argv[3:]:
        globals()[name]()
    print("ready", flush=True)
    outlive()
