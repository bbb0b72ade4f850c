"""The CPU time of reading a tar archive of many small members, and of listing a folder of a million files.

The archive has 40,000 members of WebDataset's kind, a JPEG's 3,000 bytes and a class by turns. Whole commands are
measured, ``pull --all`` and ``convert``, all their processes together. The peer is a bare walk: a loop over
:mod:`tarfile` that reads the bytes of each member, without the start of Python.

The folder has 1e6 empty files, 1,000 in each folder, with names as in ImageNet. The peer is a bare walk, too:
:func:`os.scandir` with ``entry.stat()``. The last row is the wall time from the start of ``pull --start-early`` until
the first committed shard. The system must have a million free inodes.
"""

from __future__ import annotations

import io
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parents[2]
MEMBERS, JPEG = 40_000, 3000
FOLDERS, FILES = 1000, 1000
AT_MOST = 60.0
"""Seconds after which the first sample is no longer waited for."""

LIST = """
import sys
from pathlib import Path
from cachetool.sources.registry import list_source
print(list_source(sys.argv[1], Path(sys.argv[2])).objects)
"""


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each case: CPU seconds beside a bare walk, and seconds until the first sample."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return [*_tar(Path(scratch), rounds), *_files(Path(scratch), rounds)]


def _tar(scratch: Path, rounds: int) -> list[dict[str, str | float]]:
    archive, out = scratch / "members.tar", scratch / "out"
    numbers = random.Random(0)
    with tarfile.open(archive, "w") as file:
        for number in range(MEMBERS // 2):
            for end, body in (("jpg", numbers.randbytes(JPEG)), ("cls", str(number % 1000).encode())):
                info = tarfile.TarInfo(f"{number:08d}.{end}")
                info.size = len(body)
                file.addfile(info, io.BytesIO(body))
    ways: dict[str, Callable[[], float]] = {
        "tarfile": lambda: _own(lambda: _walk_tar(archive)),
        "pull": lambda: _cpu(_command("pull", archive, "--all", "--cache", out, "--max-size", "4GB"), out),
        "convert": lambda: _cpu(_command("convert", archive, "--to", "lmdb", "--out", out), out),
    }
    seconds = _interleaved(ways, rounds)
    return [
        _row(f"{way} of a tar of {MEMBERS} members", seconds[way], "tarfile", seconds, 2.5) for way in list(ways)[1:]
    ]


def _files(scratch: Path, rounds: int) -> list[dict[str, str | float]]:
    place, out = scratch / "files", scratch / "out"
    numbers = random.Random(0)
    for folder in range(FOLDERS):
        name = f"n{1_440_764 + 613 * folder:08d}"
        (place / name).mkdir(parents=True)
        for number in numbers.sample(range(1, 30_000), FILES):
            (place / name / f"{name}_{number}.JPEG").touch()
    ways: dict[str, Callable[[], float]] = {
        "scandir and stat": lambda: _own(lambda: _walk_files(str(place))),
        "list": lambda: _cpu([sys.executable, "-c", LIST, place, out], out),
    }
    seconds = _interleaved(ways, rounds)
    rows = [_row(f"listing of {FOLDERS * FILES} local files", seconds["list"], "scandir and stat", seconds, 3.0)]
    first = statistics.median([_first_sample(place, out) for _ in range(rounds)])
    rows.append(
        {
            "case": f"first shard of {FOLDERS * FILES} local files, --start-early",
            "ours": round(first, 2),
            "peer": "",
            "ratio": round(first / 5, 2),
            "unit": "of 5 s",
            "target": 1.0,
        }
    )
    return rows


def _row(
    case: str, ours: Sequence[float], peer: str, seconds: dict[str, list[float]], target: float
) -> dict[str, str | float]:
    mine, other = statistics.median(ours), statistics.median(seconds[peer])
    return {
        "case": case, "ours": round(mine, 2), "peer": f"{peer}: {other:.2f} s", "ratio": round(mine / other, 2),
        "unit": "CPU s of the peer", "target": target,
    }  # fmt: skip


def _interleaved(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(list(ways), len(ways)):
            seconds[way].append(ways[way]())
    return seconds


def _command(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "cachetool", *words, "--quiet"]


def _cpu(command: Sequence[str | Path], out: Path) -> float:
    """Return the CPU seconds of a command and its children."""
    shutil.rmtree(out, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(HERE)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _own(walk: Callable[[], int]) -> float:
    before = time.process_time()
    walk()
    return time.process_time() - before


def _walk_tar(path: Path) -> int:
    nbytes = 0
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                nbytes += len(file.read())
    return nbytes


def _walk_files(root: str) -> int:
    count, folders = 0, [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    entry.stat()
                    count += 1
    return count


def _first_sample(place: Path, out: Path) -> float:
    """Return the seconds until a pull has committed its first shard."""
    shutil.rmtree(out, ignore_errors=True)
    command = _command("pull", place, "--all", "--start-early", "--first-shard-after", "0.5s", "--cache", out)
    began = time.monotonic()
    with subprocess.Popen(
        [*command, "--max-size", "4GB"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    ) as pull:  # fmt: skip
        while pull.poll() is None and time.monotonic() - began < AT_MOST:
            if any((out / "shards").glob("*/shard.json")):
                break
            time.sleep(0.05)
        seconds = time.monotonic() - began
        pull.terminate()
    return seconds
