"""The assumptions of :mod:`scale`, measured on this machine by ``scale.py FOLDER --measure``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cachetool.cache import Facts, Origin, SourceRow, draws, open_cache
from cachetool.cache.draws import Part
from cachetool.core.block import Block
from cachetool.core.names import Id
from cachetool.core.nodes import Node
from cachetool.core.progress import Progress
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import ShardFiles, shard_bound
from cachetool.pull.job import PullResult
from cachetool.pull.options import PullOptions
from cachetool.sources.keys import Stem
from cachetool.sources.listing import write_listing
from cachetool.stores import Object

KEYS = 100_000
COMMITS = 15
CLAIMS = 50
MANY = 1000
DRAWING = 90.0
"""Seconds that one of these simulated nodes draws."""
SLOW = 0.05
"""Seconds that the store waits before each answer."""
OBJECT = 16 * 1024
SHARD = 1_000_000
REQUESTS = 8
FEWER, MORE = 1000, 5000
"""Samples of two pulls. The difference of their times does not include the start."""


def commits(folder: Path) -> float:
    """Return the median seconds to reserve, write, fsync and commit a shard of 1 MB in a cache."""
    schema, kind = Schema((Field("values", "u1", (SHARD // 64,)),)), get_format("lmdb")
    block = Block(schema, {"values": np.zeros((64, SHARD // 64), dtype=np.uint8)})
    times = []
    with open_cache(folder / "commits", max_size="200MB") as cache:
        cache.declare("default", schema)
        for _ in range(COMMITS):
            began = time.perf_counter()
            bound = shard_bound(kind, schema, 64, block.nbytes)
            with cache.stage(dataset="default", schema=schema, format="lmdb", bound=bound) as staging:
                files = ShardFiles(staging.path, kind, schema, samples=64, nbytes=block.nbytes)
                files.write(block)
                made = files.facts()
                facts = Facts(made.samples, made.payload, made.content, made.digest, made.data, made.files)
                staging.commit(facts, origin=Origin())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


class _Slow(BaseHTTPRequestHandler):
    """A server whose ``manifest.txt`` names objects. Each object has OBJECT bytes and arrives after a delay."""

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
        """Print no log lines."""


@contextmanager
def slow_store() -> Iterator[str]:
    """Yield the URL of a manifest whose objects all arrive with the same delay."""
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
    """Yield the address of a cluster of two nodes, ``a`` and ``b``."""
    here = Path(__file__).parent
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"node_name": "a", "num_cpus": 1})
    try:
        cluster.add_node(node_name="b", num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def pull(address: str, url: str, place: Path, samples: int) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a pull over both nodes, and its result."""
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
    """Return the samples per second of two nodes with a worker each, from the slow store."""
    with slow_store() as url:
        times = [pull(address, url, folder / f"pull{count}", count)[0] for count in (FEWER, MORE)]
    return (MORE - FEWER) / (times[1] - times[0])


def locked(folder: Path) -> float:
    """Return the median seconds that a shard of a divided source locks its catalog: for its claim and its commit."""
    listing, row = folder / "locked.listing", SourceRow(Id("5" * 16), "/none", {}, "i", "default", KEYS, KEYS, 0, 0, 0)
    write_listing(listing, [[Object(f"{n:012d}.bin", 1) for n in range(KEYS)]], stem=Stem("first"), url="/none")
    parts = tuple(Part(part, 0, KEYS // 1600) for part in range(16))
    times = []
    with open_cache(folder / "locked", max_size="200MB") as cache:
        cache.declare("default", Schema((Field("bin", "bytes"),)))
        cache.add_source(replace(row, cut=1600, parts=parts), listing, new=True)
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            job, _ = draws.open_job(connection, row.id, holder=cache.holder.id, wanted=None, seed=None)
        for _ in range(CLAIMS):
            began = time.perf_counter()
            with cache.catalog.write() as connection:
                claim = draws.claim(connection, job, holder=cache.holder.id, most=10)
            assert claim is not None
            with cache.catalog.write() as connection:
                draws.finish(connection, job, claim, claim.stop, samples=10, skipped=0)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


class _Many:
    """The agents of many nodes in one actor. Their caches are empty, and their pulls take ``DRAWING`` seconds."""

    def __init__(self, drawing: float) -> None:
        self._said: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self._drawn: dict[str, dict[str, Any]] = {}
        self._drawing, self._news = drawing, asyncio.Condition()

    async def begin(self, name: str, number: int, target: str, arguments: dict[str, Any], _: str) -> None:
        """Answer a task after the time that it takes."""
        if target.endswith(":look"):
            place = ["", 0, 0, arguments["root"]]
            found = {"cap": 10**12, "format": None, "place": place, "identity": None, "source": None}
            await self._say(name, number, {"result": found | self._drawn.get(name, {})})
            return
        result = PullResult("/none", "default", "lmdb", 0, 10, 0, (), 10, 10, 1, 0, 1.0, True, "source at its end")
        asyncio.get_running_loop().create_task(
            self._draw(name, number, arguments["seconds"], arguments["options"]["part"], asdict(result))
        )

    async def _draw(self, name: str, number: int, seconds: float, part: str, result: dict[str, Any]) -> None:
        until = time.monotonic() + self._drawing
        await asyncio.sleep(seconds * random.random())
        while time.monotonic() < until:
            await self._say(name, number, {"message": asdict(Progress("pull", 5, 10))})
            await asyncio.sleep(seconds)
        parts, cut = part.split("/")
        own = tuple(Part(int(each), 1, 1) for each in parts.split(","))
        row = SourceRow(Id("5" * 16), "/none", {}, "i", "default", 100, 100, 0, 0, 0, cut=int(cut), parts=own)
        drawn = [[each.number, 1, 1] for each in own]
        self._drawn[name] = {"source": row.to_json(), "segments": [], "parts": drawn, "identity": name}
        await self._say(name, number, {"result": {"result": result, "full": ""}})

    async def _say(self, name: str, number: int, value: dict[str, Any]) -> None:
        async with self._news:
            self._said.setdefault(name, []).append((number, value))
            self._news.notify_all()

    async def hear(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """Stand in for the agent's method."""
        async with self._news:
            await self._news.wait_for(lambda: self._said.get(name))
            return self._said.pop(name)

    async def place(self, name: str) -> str:
        """Stand in for the agent's method, without writing a file."""
        return f"/{name}"

    async def write(self, *_: Any) -> None:
        """Do nothing."""

    async def end(self, *_: Any) -> None:
        """Do nothing."""


class _Agent:
    """One simulated agent, with the interface that the driver uses."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *values: getattr(self._actor, method).remote(self._name, *values))


def driver(address: str, folder: Path, nodes: int, drawing: float) -> tuple[float, float, float]:
    """Measure the driver of a pull over ``nodes`` nodes whose agents all live in one process.

    Return the CPU seconds of a report, the share of a processor while the nodes draw, and the seconds until all
    nodes draw.
    """
    import ray

    from cachetool.cluster import engine as engines
    from cachetool.cluster import pull as pulls

    (folder / "numbers").mkdir()
    for number in range(100):
        np.save(folder / "numbers" / f"{number}.npy", np.zeros(4))
    found: dict[str, float] = {}
    with engines.connect(address) as engine:
        actor = ray.remote(_Many).options(num_cpus=0, max_concurrency=4 * nodes).remote(drawing)
        hosts = [Node(f"id{number}", f"n{number:04d}", "127.0.0.1") for number in range(nodes)]
        for host in hosts:
            engine._lines[host.id] = engines._Line(host, _Agent(actor, host.name))
        engine.nodes = lambda *, strict=True: hosts  # type: ignore[method-assign]
        began = time.monotonic()

        def report(progress: Progress) -> None:
            if progress.phase == "pull" and "cpu" not in found:
                found["start"], found["cpu"], found["at"] = (
                    time.monotonic() - began,
                    time.process_time(),
                    time.monotonic(),
                )
            found["last"], found["spent"] = time.monotonic(), time.process_time()

        connect = engines.connect
        engines.connect = lambda address, notify=None: nullcontext(engine)  # type: ignore[assignment]
        try:
            pulls.pull_over(folder / "{node}", str(folder / "numbers"), PullOptions(all=True), report=report)
        finally:
            engines.connect = connect
            engine._lines.clear()
    busy = (found["spent"] - found["cpu"]) / (found["last"] - found["at"])
    return busy / min(50, 5 * nodes), busy, found["start"]


def measured(world: Any, folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Return all measurements, beside the assumptions and predictions of the model."""
    with tempfile.TemporaryDirectory(dir=folder) as name, two_nodes() as address:
        place = Path(name)
        report, busy, start = driver(address, place, MANY, DRAWING)
        commit, lock = commits(place), locked(place)
        rate = pulled(address, place)
    here = replace(
        world, samples=MORE, sample_bytes=OBJECT, nodes=2, workers=1, requests=REQUESTS, latency=SLOW, spread=0.0,
        shard_bytes=SHARD, commit=commit,
    )  # fmt: skip
    said = here.all_workers * here.per_claim / here.shard_seconds
    rows = [
        (f"driver of {MANY} nodes: busy, %", 100 * world.reports * world.report, 100 * busy),
        (f"driver of {MANY} nodes: a report, ms", 1000 * world.report, 1000 * report),
        (f"driver of {MANY} nodes: seconds until all draw", None, start),
        ("catalog of a node: lock for a shard, ms", 1000 * world.lock, 1000 * lock),
        ("commit of a shard of 1 MB, ms", 1000 * world.commit, 1000 * commit),
        ("pull of two nodes from a store of 50 ms, samples/s", said, rate),
    ]
    return {
        "measured": [
            {"what": what, "model": None if model is None else round(model, 1), "here": round(found, 1)}
            for what, model, found in rows
        ]
    }
