"""One range of addresses that contains many mapped files."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachetool.loaders.read.arena import Arena, open_arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux maps files side by side")


def files(folder: Path, *sizes: int) -> list[Path]:
    made = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.bin"
        path.write_bytes(np.random.default_rng(number).bytes(size))
        made.append(path)
    return made


def mapped(path: Path) -> bool:
    return any(line.endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


def test_files_lie_side_by_side_in_one_array(tmp_path: Path) -> None:
    arena = open_arena()
    assert arena is not None
    paths = files(tmp_path, 10, 0, 3 * 2**20 + 1, mmap.PAGESIZE, 1)
    places = [arena.map(path) for path in paths]

    for path, place in zip(paths, places, strict=True):
        assert place is not None
        at, size = place
        assert arena.bytes[at : at + size].tobytes() == path.read_bytes()
        assert arena.position(arena.bytes[at + 1 :]) == at + 1
    assert len({place[0] for place in places if place}) == len(paths)
    assert arena.files == len(paths)
    assert not arena.bytes.flags.writeable


def test_a_reserved_range_takes_no_memory() -> None:
    before = resident()
    arenas = [open_arena() for _ in range(4)]

    assert all(arena is not None and len(arena.bytes) >= 2**36 for arena in arenas)
    assert resident() - before < 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_an_unmapped_file_is_released_and_the_others_stay(tmp_path: Path) -> None:
    arena = Arena(2**30)
    one, two = files(tmp_path, 5000, 5000)
    first, second = arena.map(one), arena.map(two)
    assert first is not None
    assert second is not None
    assert mapped(one)
    arena.unmap(first[0])

    assert not mapped(one)
    assert arena.files == 1
    assert arena.bytes[second[0] : second[0] + 5000].tobytes() == two.read_bytes()


def test_the_range_is_unmapped_with_the_last_array_that_points_into_it(tmp_path: Path) -> None:
    arena = Arena(2**30)
    [path] = files(tmp_path, 5000)
    place = arena.map(path)
    assert place is not None
    kept = arena.bytes[place[0] : place[0] + 5000]
    del arena

    assert kept.tobytes() == path.read_bytes()
    del kept
    assert not mapped(path)


def test_a_full_range_maps_no_more_files_and_reports_that_it_is_used_up(tmp_path: Path) -> None:
    arena = Arena(18 * 2**20)
    [path] = files(tmp_path, 3 * 2**20)
    places = [arena.map(path) for _ in range(5)]

    assert [place is not None for place in places] == [True, True, True, True, False]
    assert not arena.spent
    for place in places:
        if place is not None:
            arena.unmap(place[0])
    assert arena.spent
    assert arena.map(path) is None


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Arena(2**30).map(tmp_path / "nothing")


def test_a_map_leaves_no_descriptor_open(tmp_path: Path) -> None:
    arena, paths = Arena(2**30), files(tmp_path, 10, 20)
    before = os.listdir("/proc/self/fd")
    assert all(arena.map(path) for path in paths)

    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("limit", "expected"), [(2**40, "True"), (2**34, "False")])
def test_under_a_limit_on_addresses_a_smaller_range_or_none_is_reserved(limit: int, expected: str) -> None:
    """The test runs in a separate process, as under ``ulimit -v``."""
    script = """
from cachetool.loaders.read.arena import open_arena
arena = open_arena()
print(2**36 <= len(arena.bytes) < 2**40)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.stdout.strip() == expected
