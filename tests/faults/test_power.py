"""Power cuts: a cache on an ext4 image whose disk stops at any moment (5, 6).

The ioctl EXT4_IOC_SHUTDOWN simulates that. With NOLOGFLUSH everything that was not synced is lost. With LOGFLUSH the
journal is written but file contents are not, which creates files of length zero.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Figures
from tests.faults.tracing import Children
from tests.faults.world import Oracle, cut_power, make

LOGFLUSH, NOLOGFLUSH = 1, 2
LONGEST = 0.4
"""Longest time until the power cut, in seconds."""


def mount(image: Path, disk: Path) -> bool:
    return subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("cuts", [pytest.param(4, id="short"), pytest.param(100, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("flag", [NOLOGFLUSH, LOGFLUSH], ids=["nothing flushed", "journal flushed"])
@pytest.mark.timeout(3000)
def test_no_acknowledged_sample_is_lost_in_a_power_cut(
    tmp_path: Path, children: Children, figures: Figures, cuts: int, flag: int
) -> None:
    """Half of the cuts come at a random moment of two pulls and an evictor, half right after an acknowledgement."""
    image, disk, ledger = tmp_path / "image", tmp_path / "disk", tmp_path / "ledger"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(48 * 2**20)
    made = subprocess.run(["mkfs.ext4", "-q", image], capture_output=True, check=False).returncode == 0
    if not (made and mount(image, disk)):
        pytest.skip("an ext4 image cannot be made and mounted here")
    try:
        root = disk / "cache"
        make(root)
        os.sync()  # the state before the first cut is not tested
        oracle = Oracle(root, ledger)
        rng = random.Random(flag)
        for number in range(cuts):
            arguments = {"root": root, "ledger": ledger, "format": "all", "evict": True}
            if number % 2:  # the riskiest moment: one shard was just acknowledged, and nothing was written after it
                shards = rng.randint(1, 4)
                children.run("pull", **arguments, shards=shards, then_cut=(disk, flag))
            else:
                pids = [children.start("pull", **arguments, shards=0) for _ in range(2)]
                pids.append(children.start("evict_for_ever", root=root, seed=number))
                time.sleep(rng.random() * LONGEST)
                cut_power(disk, flag)
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    children.wait(pid)
            subprocess.run(["umount", disk], check=True)
            assert mount(image, disk)
            try:
                oracle.check()
            except AssertionError as error:
                raise AssertionError(f"cut {number}: {error}") from error
        samples = sum(len(line["numbers"]) for line in oracle.lines())
        figures(cuts=cuts, samples_acknowledged=samples, lost=0, corrupt_shards_served=0)
        assert len(oracle.lines()) > cuts // 2
    finally:
        subprocess.run(["umount", disk], check=True)
