"""Ten bottlenecks, injected one after another, and the names that the report of the loader or of the pull, the metrics
and ``doctor --live`` give them: ``python benchmarks/bottlenecks.py FOLDER``. It takes some minutes.

A slow disk needs root and cgroups of version 1. FOLDER must be on a disk, not in memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import cachetool
from cachetool.bench.samples import fill
from cachetool.check.live import watched
from cachetool.core.block import Block
from cachetool.core.causes import CAUSES, PULL_CAUSES
from cachetool.core.schema import Field, Schema
from cachetool.report.metrics import metrics
from tests.servers import Scripted, scripted_server

PROGRAM = [sys.executable, "-m", "cachetool"]
SIZE, COUNT = 2**20, 256
TRAINING = """
import os, sys, threading, time
from cachetool.loaders.numpy import Loader

root, what, group = sys.argv[1:]
if group:
    open(group, "w").write(str(os.getpid()))

def slow(sample):
    time.sleep(0.01)
    return sample

def busy():
    while True:
        sum(range(1000))

def forget():
    for folder, _, names in os.walk(root):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

if what == "gil":
    threading.Thread(target=busy, daemon=True).start()
options = {"transform": slow} if what == "transform" else {"workers": 1} if what == "feeders" else {}
if what == "page_cache":
    options["workers"] = 0
with Loader(root, batch_size=2, **options) as loader:
    while True:
        if what in ("page_cache", "disk"):
            forget()
        for batch in loader:
            if what == "nothing":
                time.sleep(0.05)
        print(loader.report().cause, flush=True)
"""


@contextlib.contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[str]]:
    """Run a program beside the ``with`` block."""
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def named(rows: list[dict[str, Any]], metric: str, label: str, cache: Any) -> tuple[str, str]:
    """Return the main cause of the first of ``rows``, and that of the metrics."""
    causes = rows[0]["causes"]
    values = next(each.values for each in metrics(cache.stats().as_dict()) if each.name == metric)
    return max(causes, key=causes.get), max(values, key=lambda pair: pair[1])[0][label]


def of_sentence(sentence: str) -> str:
    """Return the name of the cause that a sentence of the doctor tells of."""
    if sentence.startswith("nothing is late"):
        return "nothing"
    found = [name for table in (CAUSES, PULL_CAUSES) for name, cause in table.items() if cause.late in sentence]
    return found[0] if found else "?"


def training(root: Path, what: str, *, group: Path | None = None) -> tuple[str, str, str]:
    """Return the names that the loader's report, the metrics and the doctor give to what slows a training down."""
    program = [sys.executable, "-c", TRAINING, root, what, "" if group is None else group / "cgroup.procs"]
    with running(*program) as process, cachetool.open_cache(root) as cache:
        assert process.stdout is not None
        if what != "disk":
            # The first epoch starts the feeders.
            process.stdout.readline()
        sentence = watched(cache, 14)[0]
        rows = cache.stats().trainers
        metric = named(rows, "cachetool_epoch_wait_seconds", "cause", cache)[1]
        report = rows[0]["cause"] or "nothing" if what == "disk" else process.stdout.readline().strip()
    doctor = of_sentence(sentence)
    # Waits of less than two hundredths of the time are no bottleneck, whatever the largest is.
    if report == "None" and doctor == "nothing":
        return "nothing", "nothing", "nothing"
    return report, metric, doctor


def pull(url: str, root: Path, *options: object) -> tuple[str, str, str]:
    """Return the names that the pull's own row, the metrics and the doctor give to what slows a pull down."""
    command = [*PROGRAM, "pull", url, "--cache", root, "--max-size", "3MB", *options]
    with running(*command), cachetool.open_cache(root, max_size="3MB") as cache:
        deadline = time.monotonic() + 60
        while not (rows := cache.stats().pulling) or sum(rows[0]["causes"].values()) < 5:
            if time.monotonic() > deadline:
                return "?", "?", "?"
            time.sleep(0.2)
        sentence = watched(cache, 8)[0]
        return *named(cache.stats().pulling, "cachetool_pull_step_seconds", "step", cache), of_sentence(sentence)


def store(get: Callable[[Scripted], bool]) -> Callable[[Scripted], None]:
    """Return the script of a web server of 400 files, of which ``get`` may answer a request itself."""
    file = io.BytesIO()
    np.save(file, np.zeros(500, np.float32))

    def script(handler: Scripted) -> None:
        if handler.path == "/":
            links = "".join(f'<a href="s{number:03d}.x.npy">s</a>' for number in range(400))
            handler.answer(200, links.encode(), Content_Type="text/html")
        elif not get(handler):
            handler.answer(200, file.getvalue(), ETag='"1"')

    return script


def late(_: Scripted) -> bool:
    time.sleep(1.0)
    return False


def refused() -> Callable[[Scripted], bool]:
    asked: dict[str, int] = {}

    def get(handler: Scripted) -> bool:
        number = asked[handler.path] = asked.get(handler.path, 0) + 1
        if number <= 4:
            handler.answer(429, Retry_After="1")
        return number <= 4

    return get


@contextlib.contextmanager
def throttled(folder: Path) -> Iterator[Path | None]:
    """Yield a group of processes that reads 20 MB/s from the disk of ``folder``; None where there can be none."""
    number = os.stat(folder).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    group = Path(f"/sys/fs/cgroup/blkio/cachetool-{os.getpid()}")
    if not group.parent.exists() or not disk.exists():
        yield None
        return
    disk = disk.resolve().parent if (disk / "partition").exists() else disk
    group.mkdir()
    try:
        (group / "blkio.throttle.read_bps_device").write_text(f"{(disk / 'dev').read_text().strip()} 20000000")
        yield group
    finally:
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()


def readers(folder: Path) -> tuple[str, str, str]:
    from cachetool.loaders.numpy import Loader

    (folder / "files").mkdir()
    for number in range(300):
        np.save(folder / f"files/s{number:03d}.x.npy", np.zeros(2500, np.float32))
    root = folder / "readers"
    command = [*PROGRAM, "pull", folder / "files", "--samples", "40", "--max-size", "3MB", "--cache", root, "--quiet"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    with Loader(root, batch_size=4, workers=0) as first, Loader(root, batch_size=4, workers=0) as second:
        for _ in first:
            pass
        follow = [*PROGRAM, "pull", folder / "files", "--follow", "--renew", "90%", "--cache", root]
        with running(*follow), cachetool.open_cache(root) as cache:
            reading = iter(first)
            next(reading)
            time.sleep(8)
            next(iter(second))
            time.sleep(12)
            sentence = watched(cache, 8)[0]
            return *named(cache.stats().pulling, "cachetool_pull_step_seconds", "step", cache), of_sentence(sentence)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as name:
        folder = Path(name)
        root = folder / "cache"
        values = np.random.default_rng(0).integers(0, 255, (COUNT, SIZE), dtype=np.uint8)
        with cachetool.open_cache(root, max_size="1GB") as cache:
            fill(cache, "hdf5", Block(Schema((Field("x", "|u1", (SIZE,)),)), {"x": values}), 4)
        rows: list[tuple[str, tuple[str, str, str]]] = []
        with scripted_server(store(late)) as server:
            rows.append(("store", pull(f"{server.url}/", folder / "slow", "--samples", 300)))
        with scripted_server(store(refused())) as server:
            rows.append(("throttling", pull(f"{server.url}/", folder / "busy", "--samples", 300)))
        with throttled(folder) as group:
            if group is not None:
                rows.append(("disk", training(root, "disk", group=group)))
        rows += [(what, training(root, what)) for what in ("page_cache", "transform", "feeders", "gil")]
        with scripted_server(store(lambda _: False)) as server:
            rows.append(("room", pull(f"{server.url}/", folder / "small", "--follow", "--shard-size", "50kB")))
        rows.append(("readers", readers(folder)))
        rows.append(("nothing", training(root, "nothing")))
    print(f"{'injected':12} {'report':12} {'metrics':12} {'doctor':12}")
    for what, names in rows:
        right = "" if set(names) == {what} else "  <- wrong"
        print(f"{what:12} {names[0]:12} {names[1]:12} {names[2]:12}{right}")


if __name__ == "__main__":
    main()
