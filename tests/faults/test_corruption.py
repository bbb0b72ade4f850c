"""Damaged files of every kind: no wrong sample where a checksum exists, and the calling process lives (57, 58, 82).

:mod:`tests.faults.corruption` states the law and checks every kind of file. In the soak every kind is truncated at 200
places and has 2,000 single bits flipped. The table at the end of the soak shows the outcomes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Figures
from tests.faults.corruption import CACHED, FOREIGN, NAMES, PLAIN

MEMORY = Path("/dev/shm")
MAIN_MIB, GUARD_MIB = 64, 256
"""Memory limits in MiB for reading a small damaged file: in this process, and in the process that reads foreign
files.
"""


def look(tmp_path: Path, names: Sequence[str], *, cuts: int, flips: int) -> Iterator[dict[str, Any]]:
    """Return the outcomes of the cases of each kind."""
    # Thousands of small conversions call fsync, so they run in memory if such a disk exists.
    folder = MEMORY / f"cachetool-{tmp_path.parent.name}-{tmp_path.name}" if MEMORY.is_dir() else tmp_path / "damaged"
    folder.mkdir()
    try:
        command = [sys.executable, "-m", "tests.faults.corruption", folder, str(cuts), str(flips), "57", *names]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2])
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)
    for line, name in zip(done.stdout.splitlines(), names, strict=True):
        found = json.loads(line)
        assert (found["name"], found["cases"]) == (name, cuts + flips)
        yield found


def keeps_the_law(found: dict[str, Any]) -> None:
    """Assert that no promise was broken, no process died or hung, and memory was bounded."""
    assert found["bad"] == [], found["name"]
    assert found["main_mib"] <= MAIN_MIB
    assert found["guard_mib"] <= GUARD_MIB
    assert found["refused"] > 0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(CACHED, id="cache"),
        pytest.param(PLAIN, id="out", marks=pytest.mark.soak),
        pytest.param(FOREIGN, id="foreign", marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(600)
def test_files_damaged_at_a_few_places_keep_the_law(tmp_path: Path, names: Sequence[str]) -> None:
    for found in look(tmp_path, names, cuts=1, flips=2):
        keeps_the_law(found)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(7200)
def test_files_damaged_anywhere_keep_the_law(tmp_path: Path, figures: Figures, name: str) -> None:
    for found in look(tmp_path, [name], cuts=100, flips=700):
        figures(**{key.replace(" ", "_"): value for key, value in found.items() if key not in ("name", "bad")})
        keeps_the_law(found)
