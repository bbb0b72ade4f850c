"""Other file systems, really mounted: clusters of 64 KiB, huge pages, block lists, compression, FUSE. On each of them
``du`` never exceeds the cap, and pulls, evictions and conversions succeed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cachetool.api import open_cache
from cachetool.cache.layout import Layout
from cachetool.cache.usage import least_overhead
from cachetool.check.doctor import examine
from cachetool.check.verify import verify
from cachetool.core.errors import CapTooSmall
from cachetool.proc.disk import ALLOW, DISK_BLOCK, disk_block
from cachetool.proc.folders import tree_bytes
from tests.faults.world import FORMATS

MiB = 2**20


@dataclass(frozen=True)
class Disk:
    """A file system to mount."""

    make: str = ""
    """The command that creates it in an image file; empty if it needs none."""
    options: str = "loop"
    kind: str = ""
    program: str = ""
    """The FUSE program that mounts the image or mirrors the underlying folder."""
    block: int = DISK_BLOCK
    cap: int = 34 * 10**5


@dataclass(frozen=True)
class Mounted:
    """A mounted file system."""

    disk: Disk
    folder: Path


QUICK = {
    "ext4 with clusters of 64 KiB": Disk("mkfs.ext4 -q -F -O bigalloc -C 65536", block=65536, cap=95 * 10**5),
    "tmpfs of huge pages": Disk(options="huge=always,size=1g", kind="tmpfs", block=2 * MiB, cap=180 * 10**6),
}
OTHERS = {
    "ext4 with clusters of 1 MiB": Disk("mkfs.ext4 -q -F -O bigalloc -C 1048576", block=MiB, cap=125 * 10**6),
    "ext4 with clusters and data in inodes": Disk(
        "mkfs.ext4 -q -F -O bigalloc,inline_data -C 65536", block=65536, cap=95 * 10**5
    ),
    "ext4 with blocks of 1 KiB": Disk("mkfs.ext4 -q -F -b 1024"),
    "ext3 with blocks of 1 KiB": Disk("mkfs.ext3 -q -F -b 1024"),
    "ext2": Disk("mkfs.ext2 -q -F"),
    "xfs": Disk("mkfs.xfs -q -f"),
    "xfs with blocks of 64 KiB": Disk("mkfs.xfs -q -f -b size=65536", block=65536, cap=95 * 10**5),
    "xfs with folders of 64 KiB": Disk("mkfs.xfs -q -f -n size=65536", block=65536, cap=72 * 10**5),
    "xfs with extents of 256 KiB": Disk("mkfs.xfs -q -f -d extszinherit=64", block=2**18, cap=17 * 10**6),
    "btrfs": Disk("mkfs.btrfs -q -f"),
    "btrfs with nodes of 64 KiB, compressed": Disk("mkfs.btrfs -q -f -n 65536", options="loop,compress-force=zstd"),
    "btrfs of mixed groups": Disk("mkfs.btrfs -q -f -M"),
    "tmpfs of huge pages within the size": Disk(options="huge=within_size,size=1g", kind="tmpfs"),
    "fuse2fs": Disk("mkfs.ext4 -q -F", program="fuse2fs -o fakeroot {image} {folder}"),
    "fuse2fs with clusters of 64 KiB": Disk(
        "mkfs.ext4 -q -F -O bigalloc -C 65536",
        program="fuse2fs -o fakeroot {image} {folder}",
        block=65536,
        cap=95 * 10**5,
    ),
    "bindfs": Disk(program="bindfs {below} {folder}"),
    "ntfs-3g": Disk("mkfs.ntfs -q -F -Q", program="ntfs-3g -o umask=077 {image} {folder}"),
    "ntfs-3g with clusters of 64 KiB": Disk(
        "mkfs.ntfs -q -F -Q -c 65536", program="ntfs-3g -o umask=077 {image} {folder}", block=65536, cap=95 * 10**5
    ),
}
EACH = [
    *(pytest.param(disk, id=name) for name, disk in QUICK.items()),
    *(pytest.param(disk, id=name, marks=pytest.mark.soak) for name, disk in OTHERS.items()),
]


@pytest.fixture
def mounted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mounted]:
    """Mount the empty disk of this test. Skip the test if that is impossible."""
    disk: Disk = request.param
    monkeypatch.setenv(ALLOW, "1")  # FUSE
    folder, image, below = tmp_path / "disk", tmp_path / "image", tmp_path / "below"
    folder.mkdir()
    below.mkdir()
    commands = []
    if disk.make:
        with open(image, "wb") as file:
            file.truncate(600 * MiB)
        commands.append([*disk.make.split(), str(image)])
    if disk.program:
        commands.append([word.format(image=image, folder=folder, below=below) for word in disk.program.split()])
    else:
        kind = ["-t", disk.kind] if disk.kind else []
        commands.append(["mount", *kind, "-o", disk.options, str(image) if disk.make else "none", str(folder)])
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"{error.filename} is not installed")
        if done.returncode:
            pytest.skip(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-200:]}")
    try:
        yield Mounted(disk, folder)
    finally:
        subprocess.run(["umount", folder], check=True)
        image.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    for number in range(240):
        np.save(folder / f"{number:03d}.npy", np.full(1000, number, "f8"))
    return folder


def du(root: Path) -> int:
    """Return the larger of the two counts of ``du``. Files may appear and disappear meanwhile."""
    allocated = apparent = 0
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                allocated += status.st_blocks * 512
                apparent += status.st_size
    return max(allocated, apparent)


class Watch(threading.Thread):
    """A thread that measures ``du`` all the time."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._root, self._ended = root, threading.Event()
        self.most = self.looks = 0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Keep the largest measurement."""
        while not self._ended.wait(0.002):
            self.most = max(self.most, du(self._root))
            self.looks += 1


@pytest.mark.parametrize("mounted", EACH, indirect=True)
@pytest.mark.timeout(600)
def test_du_never_exceeds_the_cap_while_formats_are_pulled_converted_and_evicted(
    mounted: Mounted, objects: Path
) -> None:
    disk, root = mounted.disk, mounted.folder / "cache"
    assert disk_block(mounted.folder) == disk.block
    with Watch(root) as watch, open_cache(root, max_size=disk.cap) as cache:
        for format in FORMATS:
            cache.pull(str(objects), to=format, dataset=format, samples=75, shard_size=200_000, workers=2)
            assert sum(shard.samples for shard in cache.shards(format)) == 75
            assert du(root) <= cache.usage().total <= disk.cap
        assert cache.stats().evicted > 0
        cache.evict(disk.cap // 2)
        cache.convert(to="zarr", dataset=FORMATS[-1], workers=2)
        shards = [shard for dataset in cache.datasets() for shard in cache.shards(dataset)]
        assert all(shard.bytes >= tree_bytes(shard.path) for shard in shards)
    assert watch.looks > 20
    assert disk.cap // 8 < watch.most <= disk.cap
    assert verify(root).problems == []
    assert [
        found for found in examine(root) if found.state == "bad" and found.what not in ("file system", "disk")
    ] == []


@pytest.mark.soak
@pytest.mark.parametrize("mounted", EACH, indirect=True)
def test_the_minimum_cap_in_an_error_is_sufficient(mounted: Mounted, objects: Path) -> None:
    root = mounted.folder / "cache"
    own = least_overhead(Layout(root))
    for format in FORMATS:
        with pytest.raises(CapTooSmall) as refused, open_cache(root, max_size=own) as cache:
            cache.pull(str(objects), to=format, shard_size=200_000, workers=1, samples=20)
        assert not root.exists()
        least = int(str(refused.value).split("the minimum is ")[1].split()[0])
        with open_cache(root, max_size=least) as cache:
            cache.pull(str(objects), to=format, shard_size=200_000, workers=1, samples=20)
            assert du(root) <= cache.usage().total <= least
        shutil.rmtree(root)


@pytest.mark.parametrize("mounted", EACH[:1], indirect=True)
def test_a_cache_copied_to_a_disk_with_larger_blocks_is_charged_the_bytes_it_takes_there(
    mounted: Mounted, objects: Path, tmp_path: Path
) -> None:
    before, root = tmp_path / "cache", mounted.folder / "cache"
    with open_cache(before, max_size=10**7) as cache:
        cache.pull(str(objects), to="zarr", shard_size=80_000, samples=60, workers=1)
        shards = cache.usage().shards
    shutil.copytree(before, root)
    assert [found.text for found in examine(root) if found.what == "cap"][1:] == [
        "the cache was copied from a disk with another block size; the next command that uses it counts its bytes again"
    ]

    with open_cache(root) as cache:
        assert cache.usage().shards > 2 * shards
        assert du(root) <= cache.usage().total
        cache.pull(str(objects), to="zarr", shard_size=80_000, samples=30, workers=1)
        assert cache.stats().evicted > 0
        assert du(root) <= cache.usage().total <= 10**7
    assert verify(root).problems == []
    assert "file system: ext4, where the smallest file takes 65.5 kB" in [f"{f.what}: {f.text}" for f in examine(root)]
