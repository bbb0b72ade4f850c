"""Windows of three time steps out of a Zarr of 200 GB, while a pull fills and renews a cache of 2 GB.

    python benchmarks/windows.py FOLDER [--epochs 10] [--rate 100MB/s] [--json]

A server on 127.0.0.1 answers as a Zarr of four variables of (12048, 721, 1440) float32, one chunk a time step: the
grid of ERA5 with 0.25 degrees. It computes the values, so nothing of the 200 GB is stored. A ``BackgroundPull`` draws
runs of 32 steps. Two ranks train on the cache with ``offsets=(-1, 0, 1)`` of all four variables; each compares every
value of each window with what the server computes, and takes RATE. *wait* is the time that a rank waited for batches,
as a fraction of its time from its first batch on. *most on disk* is the largest size of the cache's folder, looked at
every 0.2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cachetool
from cachetool.core.units import parse_rate, parse_size
from cachetool.loaders.numpy import Loader

VARIABLES = ("t2m", "u10", "v10", "msl")
STEPS, GRID = 12_048, (721, 1440)
CHUNK = 4 * GRID[0] * GRID[1]
CAP = "2GB"
OFFSETS = (-1, 0, 1)
RUNS = 32
RANKS = 2


def step_of(variable: str, step: int | np.ndarray) -> np.ndarray:
    """Return the values of one variable at one step; exact in float32, and others for each variable and step."""
    return _ground(variable) + np.float32(step)


_grounds: dict[str, np.ndarray] = {}


def _ground(variable: str) -> np.ndarray:
    if variable not in _grounds:
        rng = np.random.default_rng(VARIABLES.index(variable))
        _grounds[variable] = (rng.integers(0, 1024, GRID) / 1024).astype("<f4")
    return _grounds[variable]


def _metadata() -> bytes:
    def array(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> dict[str, Any]:
        return {
            "zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "compressor": None, "fill_value": None,
            "filters": None, "order": "C",
        }  # fmt: skip

    found: dict[str, Any] = {".zgroup": {"zarr_format": 2}, ".zattrs": {}}
    for name in VARIABLES:
        found[f"{name}/.zarray"] = array((STEPS, *GRID), (1, *GRID), "<f4")
        found[f"{name}/.zattrs"] = {"_ARRAY_DIMENSIONS": ["time", "latitude", "longitude"]}
    return json.dumps({"zarr_consolidated_format": 1, "metadata": found}).encode()


class Era5(http.server.BaseHTTPRequestHandler):
    """The files of ``era5.zarr``, computed when they are asked for."""

    protocol_version = "HTTP/1.1"
    metadata = _metadata()

    def _index(self, folder: str) -> bytes | None:
        """Return a folder as nginx lists it."""
        if not folder:
            files = [{"name": ".zmetadata", "type": "file", "size": len(self.metadata)}]
            return json.dumps(files + [{"name": name, "type": "directory"} for name in VARIABLES]).encode()
        if folder not in VARIABLES:
            return None
        # In the order of their names, as nginx lists them.
        names = sorted(f"{step}.0.0" for step in range(STEPS))
        return json.dumps([{"name": name, "type": "file", "size": CHUNK} for name in names]).encode()

    def do_GET(self) -> None:
        """Answer with a file, with the range of it that was asked for, or with a folder's index."""
        name = self.path.removeprefix("/era5.zarr/")
        chunk = re.fullmatch(r"(\w+)/(\d+)\.0\.0", name)
        document = None
        if name == ".zmetadata":
            document = self.metadata
        elif name.endswith("/") or not name:
            document = self._index(name.rstrip("/"))
        elif not chunk:
            with contextlib.suppress(KeyError):
                document = json.dumps(json.loads(self.metadata)["metadata"][name]).encode()
        if chunk is None and document is None:
            self._answer(404)
            return
        size = CHUNK if chunk else len(document or b"")
        first, last = 0, size - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(last, int(asked[2] or last))
        headers = {"ETag": '"1"', "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        # The server would need more processor time than the pull if it computed a chunk to answer with its size.
        body = step_of(chunk[1], int(chunk[2])).tobytes() if chunk and last > first else document or bytes(1)
        self._answer(206 if asked else 200, memoryview(body)[first : last + 1], headers)

    def _answer(self, status: int, body: bytes | memoryview = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """A server for many connections at once."""

    # The default of 5 is too short: the kernel would reset some of the connections that a pull opens at once.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a process of the pull that ends resets its connections."""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run the server in a process of its own, and give its address."""
    command = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/era5.zarr"
    finally:
        process.terminate()
        process.wait()


def serve() -> None:
    """Serve until this process is ended. Print the port."""
    with Server(("127.0.0.1", 0), Era5) as found:
        print(found.server_address[1], flush=True)
        found.serve_forever()


def train(root: Path, rank: int, epochs: int, rate: float) -> dict[str, Any]:
    """Train as one rank. Return what it waited for and saw."""
    waited, windows, wrong, first = 0.0, [], [], None
    seen: set[int] = set()
    with Loader(
        root, batch_size=1, workers=1, fields=["__key__", *VARIABLES], offsets=dict.fromkeys(VARIABLES, OFFSETS),
        rank=rank, world_size=RANKS, run="windows", min_samples=RUNS,
    ) as loader:  # fmt: skip
        for _ in range(epochs):
            count, asked = 0, time.perf_counter()
            for batch in loader:
                got = time.perf_counter()
                if first is None:
                    first = asked = got
                waited += got - asked
                # The last batch of a rank is empty if the windows do not divide.
                for row, key in enumerate(batch["__key__"]):
                    step = int(key.rpartition("#")[2])
                    for name in VARIABLES:
                        for at, offset in enumerate(OFFSETS):
                            if not np.array_equal(batch[name][row, at], step_of(name, step + offset)):
                                wrong.append((step, name, offset))
                    seen.add(step)
                    count += 1
                taken = sum(batch[name].nbytes for name in VARIABLES)
                time.sleep(max(0.0, got + taken / rate - time.perf_counter()))
                asked = time.perf_counter()
            windows.append(count)
    assert first is not None
    spent = time.perf_counter() - first
    return {"waited": waited, "spent": spent, "windows": windows, "wrong": wrong, "steps": len(seen)}


def size_of(folder: Path) -> int:
    """Return the bytes of the disk that a folder takes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def run(folder: Path, epochs: int, rate: str) -> dict[str, Any]:
    """Return the figures of one run."""
    root, most, ended = folder / "cache", 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.2):
            most = max(most, size_of(root))

    watcher = threading.Thread(target=look)
    with (
        server() as url,
        cachetool.open_cache(root, max_size=CAP) as cache,
        cachetool.BackgroundPull(cache, url, runs=RUNS) as pull,
    ):
        watcher.start()
        try:
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, str(root), "--rank", str(rank), "--epochs", str(epochs), "--rate", rate],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(RANKS)
            ]
            answers = [process.communicate()[0] for process in ranks]
            pull.check()
        finally:
            ended.set()
            watcher.join()
        fetched = pull.progress()
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return {
        "wait": round(max(rank["waited"] / rank["spent"] for rank in found), 4),
        "wrong": sum(len(rank["wrong"]) for rank in found),
        "windows of each epoch": [sum(counts) for counts in zip(*(rank["windows"] for rank in found), strict=True)],
        "distinct steps": sum(rank["steps"] for rank in found),
        "seconds": round(max(rank["spent"] for rank in found), 1),
        "most on disk": most,
        "cap": parse_size(CAP),
        "pull": str(fetched),
    }


def main() -> None:
    """Run the program that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", default="100MB/s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.rank is not None:
        print(json.dumps(train(options.folder, options.rank, options.epochs, parse_rate(options.rate))))
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            found = run(Path(place), options.epochs, options.rate)
        print(json.dumps(found) if options.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
