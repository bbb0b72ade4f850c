"""The growth of the catalog: opening, snapshot, stats and the plan of an eviction at 200, 2,000 and 20,000 shards.

    python benchmarks/scale_catalog.py [FOLDER] [--shards 200,2000,20000] [--json]

The catalog holds that many shards of 5,000 samples (100 million samples at 20,000 shards). Beside it run 8 other
processes that each lease a snapshot. The cache lies in FOLDER, by default in the folder for temporary files. Figures
are medians of 5 in milliseconds, of wall time and of this process's CPU time, which other processes do not lengthen.
Sizes are bytes on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cachetool.cache import CacheDir, SourceRow, open_cache
from cachetool.cache.catalog import FIRST_PAGES
from cachetool.core.names import Id
from cachetool.core.schema import Field, Schema
from cachetool.report.numbers import figures
from cachetool.report.page import page

SAMPLES = 5000
SCHEMA = Schema(tuple(Field(f"field{number}", "<f4", (64, 64)) for number in range(8)))
HOLDER = """
import sys
from cachetool.cache import open_cache
with open_cache(sys.argv[1]) as cache, cache.snapshot() as snapshot:
    print(len(snapshot.shards), flush=True)
    sys.stdin.read()
"""


def fill(root: Path, shards: int) -> None:
    """Create a cache whose catalog has ``shards`` committed shards without files."""
    with open_cache(root, max_size="100TB") as cache, tempfile.TemporaryDirectory() as listing:
        cache.declare("default", SCHEMA)
        (Path(listing) / "listing.json").write_text("{}")
        units = 2 * shards * SAMPLES
        cache.add_source(
            SourceRow(Id("5" * 16), "s3://bucket/", {}, "i", "default", units, units, 0, 0, 0), Path(listing)
        )
        pages = FIRST_PAGES
        while pages * 4096 < 1000 * shards:
            pages *= 2
        with cache.catalog.write() as connection:
            connection.execute("UPDATE cache SET pages = ?", (pages,))
            connection.execute(f"PRAGMA max_page_count = {pages}")
            connection.executemany(
                "INSERT INTO shards (id, seq, dataset, format, state, samples, payload, bytes, since, created, epochs,"
                " used, source, pass_number, draws, content, digest, lineage, job) VALUES"
                " (?, ?, 'default', 'lmdb', 'ready', ?, 64000000, 64100000, ?, ?, 3, ?, ?, 0, ?, ?, ?, ?, ?)",
                [
                    (
                        id := os.urandom(8).hex(),
                        number,
                        SAMPLES,
                        number + 1,
                        time.time(),
                        time.time(),
                        "5" * 16,
                        json.dumps([[number * SAMPLES, (number + 1) * SAMPLES]]),
                        os.urandom(16).hex(),
                        os.urandom(16).hex(),
                        id,
                        "0123456789ab",
                    )
                    for number in range(shards)
                ],
            )
            connection.execute("UPDATE cache SET version = ?, next_seq = ?", (shards + 1, shards + 2))
            connection.execute("UPDATE parts SET frontier = ?", (shards * SAMPLES,))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return medians of 5 runs in milliseconds: wall time and CPU time."""
    times = []
    for _ in range(5):
        began, cpu = time.perf_counter(), time.process_time()
        work()
        times.append((1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu)))
    clock, cpus = zip(*times, strict=True)
    return statistics.median(clock), statistics.median(cpus)


def opened(root: Path) -> None:
    with open_cache(root):
        pass


def measure(root: Path) -> dict[str, float]:
    """Return the times of operations that a user waits for, and the sizes."""

    def snapshot(cache: CacheDir) -> None:
        cache.snapshot().release()

    found: dict[str, float] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        found[name], found[f"{name}, CPU"] = timed(work)

    note("open", lambda: opened(root))
    with open_cache(root) as cache:
        half = cache.usage().total // 2
        note("snapshot", lambda: snapshot(cache))
        note("shards", cache.shards)
        note("stats", cache.stats)
        note("page of stats --html", lambda: found.update({"bytes of the page": len(page(figures(cache)).encode())}))
        note("plan", lambda: cache.evict(half, dry_run=True))
        with cache.snapshot() as leased:
            note("served", leased.served)
            found["lock files open"] = sum(path.resolve().suffix == ".lock" for path in Path("/proc/self/fd").iterdir())
    for name in ("catalog.sqlite3", "catalog.sqlite3-journal"):
        found[name] = (root / name).stat().st_size
    return found


def main() -> None:
    from tables import finish  # lies beside this script; tests import this module from another folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--shards", default="200,2000,20000")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for shards in map(int, options.shards.split(",")):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            root = Path(folder) / "cache"
            fill(root, shards)
            command = [sys.executable, "-c", HOLDER, str(root)]
            holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(8)]
            try:
                for holder in holders:
                    assert holder.stdout is not None
                    assert int(holder.stdout.readline()) == shards
                for name, value in measure(root).items():
                    found.setdefault(name, {})[f"{shards:,} shards"] = round(value, 1)
            finally:
                for holder in holders:
                    holder.communicate()
    rows = [{"what": name, **values} for name, values in found.items()]
    finish({"scale": rows}, as_json=options.json, shards=options.shards)


if __name__ == "__main__":
    main()
