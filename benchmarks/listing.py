"""The listing of many keys: bytes per key, memory, seconds, and the time to the first draw, beside another checkout.

    python benchmarks/listing.py FOLDER [--keys 1e6] [--beside CHECKOUT] [--rounds 1]
    python benchmarks/listing.py FOLDER --workers 1,4,16 [--keys 1e5] [--delay 0.1]

The keys have the names of ImageNet's folders, with a size and an MD5 as ETag, in a manifest on loopback. Each
measurement runs the whole command ``pull --samples 64`` into a new cache. *first draw* is the time until its end,
*CPU s* counts all its processes, *MB* is the memory of the largest process, including the manifest's body. *read* is
the time to read one random unit from a warm file.

``--workers`` instead measures ``--list-workers`` against an S3 server on loopback that waits before each page of a
list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers import key_server

HERE = Path(__file__).parents[1]
CLASS = 1300
"""Keys per folder."""
BODY = bytes(1024)

WORKERS = """
import sys, time
from pathlib import Path
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source

began = time.perf_counter()
list_source("s3://b", Path(sys.argv[1]), SourceOptions(list_workers=int(sys.argv[2])))
print(time.perf_counter() - began)
"""

USAGE = """
import json, resource, subprocess, sys

subprocess.run(sys.argv[1:], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss]))
"""

READ = """
import sys, time
from pathlib import Path
from cachetool.sources.listing import Listing

listing = Listing.open(Path(sys.argv[1]))
steps = range(0, listing.units, max(1, listing.units // 10_000))
order = sorted(steps, key=lambda unit: hash((unit, 1)))
began = time.perf_counter()
for unit in order:
    listing.unit(unit)
print((time.perf_counter() - began) / len(order))
"""


def keys(count: int) -> Iterator[str]:
    """Return names like those of ImageNet, sorted."""
    numbers = random.Random(0)
    for folder in range(-(-count // CLASS)):
        name = f"n{1_440_764 + 613 * folder:08d}"
        size = min(CLASS, count - folder * CLASS)
        for number in sorted(map(str, numbers.sample(range(1, 30_000), size))):
            yield f"train/{name}/{name}_{number}.JPEG"


def write_manifest(path: Path, count: int) -> None:
    """Write a line for each key."""
    numbers = random.Random(1)
    with open(path, "w", encoding="ascii") as file:
        for key in keys(count):
            size, etag = int(numbers.lognormvariate(11.6, 0.5)), f"{numbers.getrandbits(128):032x}"
            file.write(f'{{"key":"{key}","size":{size},"etag":"{etag}"}}\n')


class _Server(BaseHTTPRequestHandler):
    """A server of one manifest. Any other name is an object of the size that the manifest gives."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, manifest: Path, **more: Any) -> None:
        self._manifest = manifest
        super().__init__(*args, **more)

    def do_GET(self) -> None:
        """Answer with the manifest or an object."""
        if not self.path.endswith(".jsonl"):
            line = self._line(self.path.removeprefix("/").encode())
            self._begin(line["size"], line["etag"])
            self.wfile.write(bytes(line["size"]))
            return
        with open(self._manifest, "rb") as file:
            self._begin(os.fstat(file.fileno()).st_size, "manifest")
            shutil.copyfileobj(file, self.wfile, 2**20)

    def _line(self, key: bytes) -> dict[str, Any]:
        """Find a key's line in the manifest by bisection, because the lines are sorted."""
        with open(self._manifest, "rb") as file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while low < high:
                middle = (low + high) // 2
                file.seek(max(0, middle - 1))
                if middle:
                    file.readline()
                line = file.readline()
                if line and json.loads(line)["key"].encode() < key:
                    low = middle + 1
                else:
                    high = middle
            file.seek(max(0, low - 1))
            if low:
                file.readline()
            found: dict[str, Any] = json.loads(file.readline())
            return found

    def _begin(self, nbytes: int, etag: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print no log lines."""


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    """Yield the URL of a server on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def measured(checkout: Path, url: str, place: Path, count: int) -> dict[str, Any]:
    """Return one row for a checkout."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        pull = ["-m", "cachetool", "pull", url, "--samples", "64", "--cache", f"{folder}/cache", "--max-size", "8GB"]
        began = time.perf_counter()
        output = subprocess.run(
            [sys.executable, "-c", USAGE, sys.executable, *pull, "--quiet"],
            stdout=subprocess.PIPE, check=True, cwd=folder, env=env,
        ).stdout  # fmt: skip
        seconds, (cpu, memory) = time.perf_counter() - began, json.loads(output.splitlines()[-1])
        (listing,) = Path(folder, "cache", "listings").iterdir()
        sizes = {path.name: path.stat().st_size / count for path in listing.iterdir()}
        read = subprocess.run(
            [sys.executable, "-c", READ, listing], stdout=subprocess.PIPE, check=True, cwd=folder, env=env
        ).stdout
    return {
        "checkout": checkout.name,
        "bytes a key": round(sum(sizes.values()), 1),
        "first draw, s": round(seconds, 1),
        "CPU s": round(cpu, 1),
        "MB": round(memory / 1e6),
        "read, us": round(1e6 * float(read), 1),
        "of it": {name: round(nbytes, 2) for name, nbytes in sizes.items() if nbytes >= 0.005},
    }


def by_workers(place: Path, count: int, delay: float, workers: list[int]) -> Iterator[dict[str, Any]]:
    """Return a row for each number of threads."""
    with key_server(list(keys(count)), delay=delay) as (env, server):
        for number in workers:
            before = len(server.requests)
            with tempfile.TemporaryDirectory(dir=place) as folder:
                output = subprocess.run(
                    [sys.executable, "-c", WORKERS, f"{folder}/listing", str(number)],
                    stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": str(HERE), **env},
                ).stdout  # fmt: skip
            yield {"workers": number, "requests": len(server.requests) - before, "s": round(float(output), 1)}


def main() -> None:
    """Measure, and print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keys", type=float)
    parser.add_argument("--beside", type=Path, help="another checkout of cachetool")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--delay", type=float, default=0.1, help="seconds before each page, with --workers")
    options = parser.parse_args()
    if options.workers:
        for row in by_workers(options.folder, int(options.keys or 1e5), options.delay, options.workers):
            print(json.dumps(row), flush=True)
        return
    checkouts = [HERE, *([options.beside.resolve()] if options.beside else [])]
    count = int(options.keys or 1e6)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        manifest = Path(name) / "manifest.jsonl"
        write_manifest(manifest, count)
        with serving(partial(_Server, manifest=manifest)) as url:
            for _ in range(options.rounds):
                for checkout in random.sample(checkouts, len(checkouts)):
                    print(json.dumps(measured(checkout, f"{url}/manifest.jsonl", Path(name), count)), flush=True)


if __name__ == "__main__":
    main()
