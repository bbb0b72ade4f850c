"""A pull of objects of 16 MiB from an S3 server on loopback, beside s5cmd.

Whole commands are measured, each into an empty folder on the disk of FOLDER, as :mod:`benchmarks.pull` does: s5cmd ends
with ``sync -f``, because a pull leaves durable data too. The server is ``rclone serve s3``. FOLDER needs 9 GB.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from pull import MIB, Case, check, commands, make, run

from tests.servers import rclone_s3

CASES = (Case(64, 16 * MIB, 0.9), Case(256, 16 * MIB, 0.9))
TOOLS = ("cachetool", "s5cmd")


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each number of objects: seconds, and objects per second beside s5cmd."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            make(Path(scratch, "served", "large"), case)
            seconds = _seconds(Path(scratch), case, rounds)
        ours, peer = (statistics.median(seconds[tool]) for tool in TOOLS)
        row: dict[str, str | float] = {
            "case": f"{case.count} objects of 16 MiB", "ours": round(ours, 2), "peer": f"s5cmd: {peer:.2f} s",
            "ratio": round(peer / ours, 2), "unit": "objects/s of s5cmd", "target": case.target,
        }  # fmt: skip
        rows.append(row)
    return rows


def _seconds(scratch: Path, case: Case, rounds: int) -> dict[str, list[float]]:
    target = scratch / "target"
    seconds: dict[str, list[float]] = {tool: [] for tool in TOOLS}
    with rclone_s3(scratch / "served") as keys:
        env = {**os.environ, **keys, "PYTHONPATH": str(Path(__file__).parents[2])}
        known = commands("large", target, 2, keys["AWS_ENDPOINT_URL"], sys.executable)
        # The first copy does not count: the server hashes each object at its first request.
        for number in range(-1, rounds):
            for tool in random.sample(TOOLS, len(TOOLS)) if number >= 0 else ("s5cmd",):
                shutil.rmtree(target, ignore_errors=True)
                os.sync()
                spent, _ = run(tool, known[tool], target, env)
                check(tool, target, case)
                if number >= 0:
                    seconds[tool].append(spent)
    return seconds
