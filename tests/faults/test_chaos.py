"""Everything at once on one cache on a small tmpfs, with KILL, STOP and CONT at random moments.

Pulls, evictions, conversions, merges and splits of shards, verifications, and training that resumes and pulls in the
background run together. The signals hit the programs and their children. Each round runs for some seconds, then
everything is killed, and the remaining files are checked from outside, by SQLite and the formats' own libraries.
``CACHETOOL_CHAOS_SECONDS`` sets the length of the soak (half an hour).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import open_cache
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from tests.faults.conftest import Figures

HERE = Path(__file__).parents[2]
LOADER = Path(__file__).parent / "scripts" / "chaos_loader.py"
UNITS = 2000
CAP = 4_000_000
FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
ROUND = 12.0
"""Seconds of chaos between two checks."""


def x(number: int) -> np.ndarray[Any, Any]:
    return number + np.arange(600) / 1024


def r(number: int) -> np.ndarray[Any, Any]:
    return np.arange(number % 7, dtype="i4") + number


def expect(xs: Any, rs: Any) -> list[int]:
    """Compare every value of these samples, and return their numbers."""
    numbers = [int(values[0]) for values in xs]
    for number, values, ragged in zip(numbers, xs, rs, strict=True):
        np.testing.assert_array_equal(values, x(number))
        np.testing.assert_array_equal(ragged, r(number))
    return numbers


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 16 MB if possible, otherwise use a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", folder], check=False, capture_output=True
    ).returncode
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(UNITS):
        np.save(folder / f"{number:04d}.x.npy", x(number))
        np.save(folder / f"{number:04d}.r.npy", r(number))
    return folder


class Chaos:
    """The programs of a round, and the signals that they get."""

    def __init__(self, root: Path, source: Path, place: Path, rng: random.Random) -> None:
        self.root, self.source, self.place, self.rng = root, source, place, rng
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.counts: Counter[str] = Counter()
        self.bad: list[str] = []
        # A process that loses its parent becomes a child of this process (prctl(2)), which finds it at the end of a
        # round.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._others = set(self.family(os.getpid()))

    def commands(self) -> dict[str, list[str]]:
        """Return a command line for a program of each kind."""
        cache, pick = ["--cache", str(self.root), "-q"], self.rng.choice
        tool = [sys.executable, "-m", "cachetool"]
        pull = [*tool, "pull", str(self.source), "--shard-size", pick(("30kB", "60kB", "120kB")), "--wait", "5s"]
        loader = [sys.executable, str(LOADER), str(self.root)]
        return {
            "pull": [*pull, "--samples", str(self.rng.randint(5, 150)), "--to", pick(FORMATS), *cache],
            "follow": [*pull, "--follow", "--to", pick(FORMATS), *cache],
            "evict": [*tool, "evict", "--max-size", str(self.rng.randint(CAP // 2, CAP)), "--wait", "1s", *cache],
            "convert": [*tool, "convert", "--to", pick(FORMATS), "--wait", "2s", *cache],
            "recut": [
                *tool, "convert", "--to", pick(FORMATS), "--shard-size", pick(("20kB", "50kB", "200kB")),
                "--wait", "2s", *cache,
            ],
            "verify": [*tool, "verify", *cache],
            "repair": [*tool, "verify", "--repair", "--no-repull", *cache],
            "train": [*loader, str(self.place / "train"), "5"],
            "pulling": [*loader, str(self.place / "pulling"), "6", str(self.source)],
        }  # fmt: skip

    def round(self, seconds: float) -> None:
        """Start, stop, continue and kill programs for ``seconds``, then kill all of them."""
        end, stopped = time.monotonic() + seconds, dict[int, float]()
        while (now := time.monotonic()) < end:
            commands = self.commands()
            for name in self.rng.sample(sorted(commands), len(commands)):
                if name not in self.running and len(self.running) < 5:
                    self.start(name, commands[name])
            for name, process in list(self.running.items()):
                if process.poll() is not None:
                    self.ended(name, process)
            for pid in [pid for pid, at in stopped.items() if at <= now]:
                del stopped[pid]
                self.send(pid, signal.SIGCONT)
            # twice a second: most programs start to work before they are hit
            if self.running and self.rng.random() < 0.2:
                pid = self.rng.choice(self.family(self.rng.choice(list(self.running.values())).pid))
                if self.rng.random() < 0.5:
                    self.send(pid, signal.SIGKILL)
                elif pid not in stopped:
                    self.send(pid, signal.SIGSTOP)
                    stopped[pid] = now + self.rng.random() * 2
            time.sleep(self.rng.random() * 0.2)  # the moment of the next fault
        self.end()
        for name, process in list(self.running.items()):
            process.wait()
            self.ended(name, process)

    def end(self) -> None:
        """Kill all processes, also those that were stopped before their parent was killed: no other process continues
        them.
        """
        ours = {process.pid: process for process in self.running.values()}
        # list the processes again after the last one was reaped
        while left := set(self.family(os.getpid())) - self._others:
            for pid in left:
                self.send(pid, signal.SIGKILL, count=False)
            for pid in left:
                with contextlib.suppress(ChildProcessError):  # its own parent still runs
                    ours[pid].poll() if pid in ours else os.waitpid(pid, os.WNOHANG)

    def start(self, name: str, command: list[str]) -> None:
        errors = (self.place / f"{name}.err").open("wb")
        self.running[name] = subprocess.Popen(
            command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CACHETOOL_DEBUG": "1"},
        )  # fmt: skip
        errors.close()
        self.counts[name] += 1

    def ended(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Record a program that ended by itself with output that is not allowed."""
        del self.running[name]
        said = (self.place / f"{name}.err").read_text(errors="replace")
        for word in ("a bug in cachetool", "AssertionError", "Mismatched elements", "Segmentation", "malformed"):
            if word in said:
                self.bad.append(f"{name} (status {process.returncode}): {said[-3000:]}")
        if process.returncode == 0:
            self.counts["ended well"] += 1

    def send(self, pid: int, number: signal.Signals, *, count: bool = True) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.counts[number.name] += count

    @staticmethod
    def family(pid: int) -> list[int]:
        """Return a process and all its descendants."""
        found = [pid]
        for each in found:
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{each}/task"):
                    found += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
        return found


@contextlib.contextmanager
def watched(root: Path) -> Iterator[list[int]]:
    """Yield a list whose only element is the peak size of the folder, as ``du`` counts it."""
    most, over = [0], threading.Event()

    def taken(folder: str) -> int:
        total = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            total = os.lstat(folder).st_blocks * 512
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        total += taken(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], taken(str(root)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def check(root: Path, chaos: Chaos) -> tuple[int, bool]:
    """Check all invariants after every process died and the cache was opened again. Return the compared samples, and
    True if the first pass is still running.
    """
    with open_cache(root, create=False) as cache:
        own = cache.holder.id
    names = {
        "CACHEDIR.TAG",
        "cachetool.json",
        "history.jsonl",
        *(f"catalog.sqlite3{part}" for part in ("", "-journal", "-lock")),
    }
    assert set(os.listdir(root)) - {"holders", "shards", "listings"} <= names, "left over in the cache"
    assert set(os.listdir(root / "holders")) <= {f"{own}.lock"}, "lock files left over"
    assert os.listdir(root.parent) == [root.name], "left over beside the cache"
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite3")) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("SELECT * FROM shards").fetchall()
        (source,) = connection.execute("SELECT * FROM sources JOIN parts ON source = id").fetchall()
        evicted = connection.execute("SELECT coalesce(sum(samples), 0) FROM evictions").fetchone()[0]
        open_ = connection.execute("SELECT * FROM claims").fetchall()
        schema = connection.execute("SELECT schema FROM datasets").fetchone()[0]
        assert connection.execute("SELECT count(*) FROM leases").fetchone()[0] == 0
        assert connection.execute("SELECT count(*) FROM jobs").fetchone()[0] == 0
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert {row["state"] for row in rows} <= {"ready"}, "half done"
    assert set(os.listdir(root / "shards")) == {row["id"] for row in rows}, "folders without rows, or the reverse"

    from cachetool.core.schema import Schema

    parsed, compared, drawn = Schema.from_json(json.loads(schema)), 0, list[tuple[int, int]]()
    for row in rows:
        with open_shard(root / "shards" / row["id"], get_format(row["format"]), parsed, library=True) as reader:
            block = reader.read(0, reader.samples)
        samples = [block.sample(index) for index in range(len(block))]
        assert len(samples) == row["samples"]
        numbers = expect([each["x"] for each in samples], [each["r"] for each in samples])
        assert len(set(numbers)) == len(numbers), "twice in a shard"
        drawn += [(row["pass_number"], at) for start, stop in json.loads(row["draws"]) for at in range(start, stop)]
        compared += len(samples)
    pending = [(row["pass_number"], at) for row in open_ for at in range(row["start"], row["stop"])]
    assert len(set(drawn)) == len(drawn), "drawn twice"
    assert not set(drawn) & set(pending), "open and drawn"
    # Each claimed position is in the cache, evicted, or open again: none is lost, and none counts twice. A later pass
    # skips the samples of earlier passes that are still in the cache, which an outside check cannot count.
    done, first = len(drawn) + evicted + len(pending), source["pass_number"] == 0
    assert done == source["frontier"] or not first, (len(drawn), evicted, len(pending), source["frontier"])
    for name in ("train", "pulling"):
        for ledger in (chaos.place / name).glob("ledger*"):
            _once_an_epoch(ledger)
    return compared, first


def _once_an_epoch(ledger: Path) -> None:
    """Check that no sample occurred twice in one epoch, across all kills and resumes."""
    seen: dict[int, set[int]] = {}
    for line in ledger.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a program that was killed while it wrote
            value = json.loads(line)
            if "numbers" in value:
                already = seen.setdefault(value["epoch"], set())
                assert not already & set(value["numbers"]), f"{ledger}: twice in epoch {value['epoch']}"
                already |= set(value["numbers"])


def begin(root: Path, source: Path, place: Path) -> None:
    """Create a new cache with some samples, and training without a state."""
    for name in ("train", "pulling"):
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).mkdir()
    with cachetool.open_cache(root, max_size=CAP) as cache:
        cache.pull(source, samples=40, shard_size="60kB", workers=1)


def harvest(place: Path) -> int:
    """Return the number of samples that the training has read."""
    lines = [line for path in place.glob("*/ledger*") for line in path.read_text().splitlines()]
    return sum(len(json.loads(line).get("numbers", ())) for line in lines if line.endswith("}"))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(ROUND, id="one round"),
        pytest.param(float(os.environ.get("CACHETOOL_CHAOS_SECONDS", "1800")), id="all", marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(4000)
def test_chaos_loses_and_duplicates_no_sample_and_leaves_no_files(
    disk: Path, source: Path, tmp_path: Path, figures: Figures, seconds: float
) -> None:
    root, place = disk / "cache", tmp_path / "place"
    place.mkdir()
    begin(root, source, place)
    seed = random.SystemRandom().randrange(10**6)
    chaos, end = Chaos(root, source, place, random.Random(seed)), time.monotonic() + seconds
    compared = rounds = trained = 0
    try:
        with watched(disk) as most:
            while rounds == 0 or time.monotonic() < end:
                chaos.round(min(ROUND, seconds))
                more, first = check(root, chaos)
                compared, rounds = compared + more, rounds + 1
                assert chaos.bad == []
                if not first:
                    trained += harvest(place)
                    shutil.rmtree(root)
                    begin(root, source, place)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, round {rounds}: {error}") from error
    figures(
        rounds=rounds, compared=compared, trained=trained + harvest(place), most_bytes=most[0], cap=CAP,
        **{name.replace(" ", "_"): count for name, count in sorted(chaos.counts.items())},
    )  # fmt: skip
    assert most[0] <= CAP
    assert chaos.counts["SIGKILL"] > 0
