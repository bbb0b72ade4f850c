"""A loader over many shards: first batch, first wait of the second epoch and samples/s, in a cache and in a folder.

    python benchmarks/many_shards.py FOLDER [--shards 1000,10000,50000,100000] [--rounds 3] [--json]

A shard has 16 samples (an image of 3 x 16 x 16 bytes and a number) in LMDB, about 30 KB with its metadata. The
largest number of shards is written once, in FOLDER, without fsync. Caches and folders of fewer shards consist of
links to them. Each figure comes from its own process, in rounds one after another, and is a median. A shard is
committed to the cache before the second epoch. *samples/s* covers whole epochs after the second one, for two seconds
at least.

*feeder MB* is the private memory of one feeder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir, open_cache
from cachetool.cache.catalog import FIRST_PAGES
from cachetool.cache.layout import SHARD_FILE, Layout
from cachetool.cache.records import seal
from cachetool.core.block import Block
from cachetool.core.extents import Extents
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import ShardFiles, side_folder
from cachetool.proc.folders import tree_bytes

SCHEMA = Schema((Field("image", "|u1", (3, 16, 16)), Field("number", "<i8")))
SAMPLES = 16
TRAIN = """
import json, os, sys, time
from pathlib import Path
from cachetool.loaders.numpy import Loader
from cachetool.proc.folders import tree_bytes
root, workers, grow = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def private(pid):
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(rows[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) / 1e3
def children(pid):
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            yield child
            yield from children(child)
def epoch(loader):
    begin, total, wrong = time.perf_counter(), 0, 0
    for batch in loader:
        if not total:
            first = time.perf_counter() - begin
        total += len(batch["number"])
        wrong += int((batch["image"][:, 0, 0, 0] != batch["number"] % 251).sum())
        del batch
    assert not wrong
    return first, total, time.perf_counter() - begin
found, begin = {}, time.perf_counter()
with Loader(root, batch_size=256, workers=workers) as loader:
    starting = time.perf_counter() - begin
    first, total, spent = epoch(loader)
    found["first"] = starting + first
    found["cold rate"] = total / (spent - first)
    if grow:
        from benchmarks.many_shards import grow_by_one
        grow_by_one(Path(root), Path(grow))
        time.sleep(0.5)
    found["second"] = epoch(loader)[0]
    waits, totals, times = [], [], []
    while sum(times) < 2:
        wait, total, spent = epoch(loader)
        waits.append(wait), totals.append(total), times.append(spent)
    found["other"] = sorted(waits)[len(waits) // 2]
    found["rate"] = sum(totals) / sum(times)
    every = list(children(os.getpid()))
    found["feeder MB"] = max(map(private, every), default=0)
    found["maps"] = max((Path(f"/proc/{pid}/maps").read_text().count(chr(10)) for pid in every), default=0)
print(json.dumps(found))
"""


def block_of(number: int) -> Block:
    numbers = np.arange(number * SAMPLES, (number + 1) * SAMPLES, dtype=np.int64)
    images = np.repeat((numbers % 251).astype(np.uint8), 3 * 16 * 16).reshape(SAMPLES, 3, 16, 16)
    return Block(SCHEMA, {"image": images, "number": numbers})


def make(pool: Path, start: int, stop: int, name: str = "lmdb") -> list[dict[str, Any]]:
    """Write shards ``start`` to ``stop`` below ``pool``, in the layout of a cache. Return their catalog rows."""
    os.fsync = lambda fd: None
    kind, rows = get_format(name), []
    for number in range(start, stop):
        block, id = block_of(number), f"{number:016x}"
        where = pool / id
        where.mkdir(mode=0o700)
        files = ShardFiles(where, kind, SCHEMA, samples=len(block), nbytes=block.nbytes)
        files.write(block)
        facts = files.facts()
        row = {
            "seq": float(number + 1), "lineage": id, "samples": facts.samples, "payload": facts.payload,
            "since": number + 2, "created": 1.8e9, "epochs": 0, "used": 1.8e9, "source": None, "pass_number": None,
            "draws": [], "content": facts.content, "digest": facts.digest,
        }  # fmt: skip
        about = {
            "layout": 1, "id": id, "dataset": "default", "declared": 1.8e9, "format": name, "data": facts.data,
            "schema": SCHEMA.to_json(), "files": facts.files, **row, "url": None, "progress": None,
        }  # fmt: skip
        (where / SHARD_FILE).write_bytes(seal(about))
        rows.append({"id": id, "data": facts.data, "format": name, "bytes": tree_bytes(where), **row})
    return rows


def pool_of(folder: Path, shards: int, name: str = "lmdb") -> list[dict[str, Any]]:
    """Create missing shards in ``folder/pool`` until there are ``shards`` of them. Return their catalog rows."""
    listing = folder / f"rows-{name}.json"
    if listing.exists() and len(rows := json.loads(listing.read_bytes())) >= shards:
        return list(rows[:shards])
    pool = folder / f"pool-{name}"
    if pool.exists():
        shutil.rmtree(pool)
    pool.mkdir(parents=True)
    cuts = np.linspace(0, shards, 65).astype(int).tolist()
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        made = processes.map(make, [pool] * 64, cuts[:-1], cuts[1:], [name] * 64)
        rows = [row for part in made for row in part]
    listing.write_text(json.dumps(rows))
    return rows


def link(pool: Path, row: dict[str, Any], target: Path) -> None:
    """Link the files of a shard into another folder."""
    for path in sorted((pool / row["id"]).rglob("*")):
        to = target / row["id"] / path.relative_to(pool / row["id"])
        if path.is_dir():
            to.mkdir(parents=True, exist_ok=True)
        else:
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(path, to)


def cache_of(pool: Path, rows: list[dict[str, Any]], root: Path) -> None:
    """Create a cache of these shards."""
    with open_cache(root, max_size="100TB") as cache:
        cache.declare("default", SCHEMA)
        cache.recover()
        for row in rows:
            link(pool, row, Layout(root).shards)
        enter(cache, rows)


def enter(cache: CacheDir, rows: list[dict[str, Any]]) -> None:
    """Insert the rows of shards in one transaction."""
    pages = FIRST_PAGES
    while pages * 4096 < 1000 * int(rows[-1]["seq"]):
        pages *= 2
    names = [name for name in rows[0] if name != "data"]
    with cache.catalog.write() as connection:
        connection.execute("UPDATE cache SET pages = max(pages, ?)", (pages,))
        connection.execute(f"PRAGMA max_page_count = {pages}")
        connection.execute("UPDATE datasets SET created = 1.8e9")
        connection.executemany(
            f"INSERT INTO shards (dataset, state, {', '.join(names)})"
            f" VALUES ('default', 'ready', {', '.join(f':{name}' for name in names)})",
            [{**row, "draws": "[]"} for row in rows],
        )
        connection.execute("UPDATE cache SET version = ?", (rows[-1]["since"],))
        connection.execute("UPDATE cache SET next_seq = ?", (int(rows[-1]["seq"]) + 1,))


def folder_of(pool: Path, rows: list[dict[str, Any]], out: Path) -> None:
    """Create a folder of these shards as ``cachetool convert --out`` leaves it."""
    (out / ".extents").mkdir(parents=True)
    parts = []
    for number, row in enumerate(rows):
        name = f"part-{number:05d}{Path(row['data']).suffix}"
        for path in sorted((pool / row["id"]).iterdir()):
            if path.name == row["data"]:
                shutil.copytree(path, out / name, copy_function=os.link) if path.is_dir() else os.link(path, out / name)
            elif path.name != SHARD_FILE:
                side_folder(out / name).mkdir()
                extents = Extents.from_buffer(path.read_bytes(), schema=SCHEMA)
                files = tuple(file.replace(row["data"], name, 1) for file in extents.files)
                (side_folder(out / name) / path.name).write_bytes(replace(extents, files=files).to_bytes())
        parts.append({"file": name, **{key: row[key] for key in ("samples", "payload", "content")}})
    about = {"layout": 1, "format": rows[0]["format"], "compression": None, "schema": SCHEMA.to_json()}
    (out / "dataset.json").write_text(
        json.dumps({**about, "samples": sum(row["samples"] for row in rows), "content": "", "parts": parts}, indent=1)
    )


def grow_by_one(root: Path, pool: Path) -> None:
    """Commit one more shard."""
    with open_cache(root) as cache:
        number = len(cache.shards("default"))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(pool)
        pool.mkdir()
        [row] = make(pool, number, number + 1)
        link(pool, row, Layout(root).shards)
        enter(cache, [row])


def made(folder: Path, where: str, shards: int, name: str = "lmdb") -> Path:
    """Create a cache or folder of ``shards`` shards if it does not exist."""
    rows, root = pool_of(folder, shards, name), folder / f"{where}-{name}-{shards}"
    if not root.exists():
        aside = root.with_name(f"{root.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        (cache_of if where == "cache" else folder_of)(folder / f"pool-{name}", rows, aside)
        aside.rename(root)
    return root


def train(root: Path, *, workers: int = 2, grow: Path | None = None, code: Path | None = None) -> dict[str, float]:
    """Train three epochs in a new process. ``code``: a checkout whose cachetool is imported."""
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{code or here}{os.pathsep}{here}"}
    command = [sys.executable, "-c", TRAIN, str(root), str(workers), str(grow or "")]
    done = subprocess.run(command, cwd=root.parent, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    from tables import finish

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", default="1000,10000,50000,100000")
    parser.add_argument("--where", default="cache,folder")
    parser.add_argument("--format", default="lmdb")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--code", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = [int(each) for each in options.shards.split(",")]
    pool_of(options.folder, max(counts), options.format)
    rows: list[dict[str, Any]] = []
    keys = [(where, count) for where in options.where.split(",") for count in counts]
    roots = {key: made(options.folder, *key, options.format) for key in keys}
    found: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in keys}
    for _ in range(options.rounds):
        for key, root in roots.items():
            grow = options.folder / "grown" if key[0] == "cache" and options.code is None else None
            found[key].append(train(root, workers=options.workers, grow=grow, code=options.code))
            print(key, {name: round(value, 3) for name, value in found[key][-1].items()}, file=sys.stderr)
    for (where, count), each in found.items():
        middle = {name: statistics.median(one[name] for one in each) for name in each[0]}
        rows.append(
            {
                "where": where,
                "shards": f"{count:,}",
                "first batch, s": round(middle["first"], 2),
                "second epoch's first wait, ms": round(1e3 * middle["second"], 1),
                "later ones', ms": round(1e3 * middle["other"], 1),
                "samples/s": int(middle["rate"]),
                "of the first epoch": int(middle["cold rate"]),
                "feeder MB": round(middle["feeder MB"]),
                "maps": round(middle["maps"]),
            }
        )
    finish({"many shards": rows}, as_json=options.json, shards=options.shards, rounds=options.rounds)


if __name__ == "__main__":
    main()
