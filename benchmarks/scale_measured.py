"""What :mod:`scale` takes for granted, measured on two nodes of Ray on this machine: ``scale.py FOLDER --measure``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir, Facts, Origin, SourceRow, draws, open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import ShardFiles, shard_bound
from cachetool.sources.keys import Stem
from cachetool.sources.listing import write_listing
from cachetool.sources.options import SourceOptions
from cachetool.stores import Object

KEYS = 100_000
COMMITS = 15
CLAIMS = 50
"""Of each thread that asks."""
ASKING = 64
SLOW = 0.05
"""Seconds that the store of the pull waits before it answers."""
OBJECT = 16 * 1024
SHARD = 1_000_000
REQUESTS = 8
FEWER, MORE = 1000, 5000
"""Samples of two pulls: the difference of their times is free of what a start takes."""


def commits(folder: Path) -> float:
    """Seconds, median: reserve, write, fsync and commit a shard of 1 MB in a cache."""
    schema, kind = Schema((Field("values", "u1", (SHARD // 64,)),)), get_format("lmdb")
    block = Block(schema, {"values": np.zeros((64, SHARD // 64), dtype=np.uint8)})
    times = []
    with open_cache(folder / "commits", max_size="200MB") as cache:
        cache.declare("default", schema)
        for _ in range(COMMITS):
            began = time.perf_counter()
            bound = shard_bound(kind, schema, 64, block.nbytes)
            with cache.stage(dataset="default", schema=schema, format="lmdb", bound=bound) as staging:
                files = ShardFiles(staging.path, kind, schema, samples=64, nbytes=block.nbytes, compression=None)
                files.write(block)
                made = files.facts()
                facts = Facts(made.samples, made.payload, made.content, made.digest, made.data, made.files)
                staging.commit(facts, origin=Origin())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def key_bytes(folder: Path) -> float:
    """Bytes of a listing for each object, where a key is about 30 characters."""
    pages = [[Object(f"train/images/{n // 1000:06d}/{n:012d}.jpg", 131072, f"{n:032x}") for n in range(KEYS)]]
    write_listing(folder / "listing", pages, stem=Stem("first"), url="s3://bucket/")
    return sum(path.stat().st_size for path in (folder / "listing").iterdir()) / KEYS


class _Slow(BaseHTTPRequestHandler):
    """``manifest.txt`` names objects; each is OBJECT bytes, after a while."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.endswith("manifest.txt"):
            body = "".join(f"{n:06d}.bin\n" for n in range(2 * MORE)).encode()
        else:
            time.sleep(SLOW)
            body = self.path[-10:].encode() * (OBJECT // 10) + bytes(OBJECT % 10)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(OBJECT))
        self.send_header("ETag", '"1"')
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def slow_store() -> Iterator[str]:
    """The URL of a manifest of objects that come slowly, all of them as slowly."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    server.request_queue_size = 128
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/manifest.txt"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes, ``a`` and ``b``."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"node_name": "a", "num_cpus": 1})
    try:
        cluster.add_node(node_name="b", num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def pull(address: str, url: str, place: Path, samples: int) -> tuple[float, dict[str, Any]]:
    """Seconds of a pull over both nodes, and what it says."""
    line = ["pull", url, "--samples", str(samples), "--cache", f"{place}/{{node}}", "--max-size", "1GB"]
    line += ["--workers", "1", "--concurrency", str(REQUESTS), "--shard-size", str(SHARD)]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "cachetool", *line, "--on", "ray", "--address", address, "--json", "--quiet"],
        stdout=subprocess.PIPE,
        check=True,
    )
    return time.perf_counter() - began, json.loads(done.stdout)


def pulled(address: str, folder: Path) -> float:
    """Samples a second of two nodes with a worker each, from the slow store."""
    with slow_store() as url:
        times = [pull(address, url, folder / f"pull{count}", count)[0] for count in (FEWER, MORE)]
    return (MORE - FEWER) / (times[1] - times[0])


def claims(address: str, folder: Path) -> tuple[float, float, float, float]:
    """What the coordinator takes for one answer, and to write down all that were given at once; what a claim waits for
    both of its answers when nothing else is asked, in seconds; and the bytes of the catalog for a claim."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cachetool.cluster.engine import connect

    root, listing, objects = folder / "whole", folder / "whole.listing", folder / "objects"
    objects.mkdir()
    write_listing(listing, [[Object(f"{n:012d}.bin", 1) for n in range(KEYS)]], stem=Stem("first"), url=str(objects))
    row = SourceRow("s" * 16, str(objects), {}, "i", "default", KEYS, KEYS, 0, 0, 0)
    with open_cache(root, max_size="200MB") as cache:
        cache.declare("default", Schema((Field("bin", "bytes"),)))
        cache.add_source(row, listing)
        holder = cache.holder
        with cache.catalog.write() as connection:
            holder.register(connection)
            job, _ = draws.open_job(connection, row.id, holder=holder.id, wanted=None, seed=None)
        before = pages_used(cache)
        arguments = {
            "root": str(root),
            "url": str(objects),
            "options": SourceOptions().to_json(),
            "job": job,
            "source": row.id,
            "holder": holder.id,
            "most": 20,
            "follow": False,
        }
        with connect(address) as engine:
            server = engine.serve("cachetool.cluster.coordinator:Coordinator", arguments)
            asking = ray.remote(_ask)
            ray.get(asking.remote(server, "warm", 5))
            tasks = [
                asking.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
                for node in engine.nodes()
            ]
            wait = statistics.median(ray.get(tasks[0].remote(server, "alone", CLAIMS)))
            began = time.perf_counter()
            threads = ASKING // len(tasks)
            ray.get([task.remote(server, f"n{number}", CLAIMS, threads) for number, task in enumerate(tasks)])
            made = CLAIMS * threads * len(tasks)
            each = (time.perf_counter() - began) / (2 * made)
        record = (pages_used(cache) - before) / (made + CLAIMS + 5)
    # each = answer + write / ASKING, and of one that asks alone: wait / 2 = answer + write
    answer = max(0.0, (ASKING * each - wait / 2) / (ASKING - 1))
    return answer, wait / 2 - answer, wait, record


def pages_used(cache: CacheDir) -> int:
    """Bytes of a catalog that hold anything."""
    with cache.catalog.read() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return 4096 * int(pages - free)


def _ask(server: Any, node: str, count: int, threads: int = 1) -> list[float]:
    """In a task: so many threads claim and report, one after another each; gives the seconds of each claim."""
    import ray

    ray.get(server.answer.remote(node, {"what": "enter", "cache": sum(node.encode()), "word": node}))

    def ask(thread: int) -> list[float]:
        waits = []
        for number in range(count):
            began = time.perf_counter()
            token = f"{node} {thread} {number}"
            answer = ray.get(server.answer.remote(node, {"what": "claim", "token": token, "word": node}))
            assert "claim" in answer, answer
            claim = answer["claim"]
            message = {
                "what": "finish",
                "claim": claim,
                "token": token,
                "upto": claim["stop"],
                "ranges": [[claim["start"], claim["stop"]]],
                "draws": claim["stop"] - claim["start"],
                "skipped": 0,
                "vanished": 0,
                "fetched": 10**6,
                "shard": f"{node}-{thread}-{number:012d}",
                "samples": claim["stop"] - claim["start"],
            }
            answer = ray.get(server.answer.remote(node, message))
            assert "error" not in answer, answer
            waits.append(time.perf_counter() - began)
        return waits

    with ThreadPoolExecutor(threads) as pool:
        return [wait for waits in pool.map(ask, range(threads)) for wait in waits]


def measured(world: Any, folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """All of it, beside what the model assumes or says."""
    from scale import queue  # beside this script

    with tempfile.TemporaryDirectory(dir=folder) as name, two_nodes() as address:
        place = Path(name)
        answer, write, wait, record = claims(address, place)
        commit, key = commits(place), key_bytes(place)
        rate = pulled(address, place)
    here = replace(
        world,
        samples=MORE,
        sample_bytes=OBJECT,
        nodes=2,
        workers=1,
        requests=REQUESTS,
        latency=SLOW,
        spread=0.0,
        shard_bytes=SHARD,
        answer=answer,
        write=write,
        commit=commit,
    )
    said = queue(here, 2000)["rate"] * here.per_claim
    rows = [
        ("coordinator: an answer, ms", 1000 * world.answer, 1000 * answer),
        ("coordinator: to write down those of a moment, ms", 1000 * world.write, 1000 * write),
        ("coordinator: claims a second, of 64 that ask", world.most_claims, here.most_claims),
        ("a claim waits for both answers, nobody else asks, ms", 2000 * (world.write + world.answer), 1000 * wait),
        ("coordinator: bytes of its catalog for a claim", world.record, record),
        ("commit of a shard of 1 MB, ms", 1000 * world.commit, 1000 * commit),
        ("listing: bytes an object", world.key, key),
        ("pull of two nodes from a store of 50 ms, samples/s", said, rate),
    ]
    return {
        "measured": [
            {"what": what, "model": round(model, 1), "two nodes here": round(found, 1)} for what, model, found in rows
        ]
    }
