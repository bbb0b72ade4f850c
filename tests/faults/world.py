"""A small world for faults: samples that follow from their number, processes that pull, evict and recover, and an
oracle outside the cache that knows the acknowledged samples.

The functions in ``ACTIONS`` run in separate processes (see ``zygote.py``), which are killed or whose system calls fail.
All other functions run in the test.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import random
import resource
import signal
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.cache import CacheDir, Facts, Origin, Room, SourceRow, draws, open_cache, policy_names
from cachetool.cache.draws import close_job
from cachetool.cache.own_parts import assign
from cachetool.check.verify import verify
from cachetool.conversion.in_place import replace_groups
from cachetool.core.block import Block
from cachetool.core.errors import CapacityError
from cachetool.core.names import Id
from cachetool.core.permutation import Permutation
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_names, get_format
from cachetool.formats.shard import ShardFiles, open_shard, shard_bound
from cachetool.formats.tfrecord_package import PackageReader
from cachetool.proc.folders import tree_bytes

FORMATS = format_names()
SCHEMA = Schema((Field("x", "<f4", (3, 40)), Field("number", "<i8"), Field("words", "str"), Field("r", "<i2", (None,))))
SOURCE = SourceRow(Id("77" * 8), "/nowhere", {}, "identity", "default", 2**30, 2**30, 7, 0, 0)
PER_SHARD = 12
CAP = 2_500_000
LARGE = 150
"""Samples of a large shard. Such a shard takes at most ``LARGE_BYTES`` on disk in any format, and up to twice that
while it is written.
"""
LARGE_BYTES = 50 * 4096
OWN = 1_200_000
"""Most bytes that a cache of this world is charged without any shard."""


def block(numbers: list[int]) -> Block:
    """Return the samples with these numbers."""
    return Block.from_samples(SCHEMA, [sample(number) for number in numbers])


def expect(found: Block) -> None:
    """Assert that every sample of a block is the one with its number."""
    for index in range(len(found)):
        got = found.sample(index)
        wanted = sample(int(got["number"]))
        assert got["words"] == wanted["words"]
        np.testing.assert_array_equal(got["x"], wanted["x"])
        np.testing.assert_array_equal(got["r"], wanted["r"])


@functools.lru_cache(20_000)
def sample(number: int) -> dict[str, Any]:
    """Return the sample with this number."""
    rng = np.random.default_rng(number)
    return {
        "x": rng.standard_normal((3, 40)).astype("<f4"),
        "number": number,
        "words": f"sample {number} ☂" * (number % 3),
        "r": rng.integers(-9, 9, number % 50).astype("<i2"),
    }


def numbers_of(turn: int, ranges: list[list[int]]) -> list[int]:
    """Return the samples at these positions of a pass."""
    order = Permutation(SOURCE.units, seed=SOURCE.seed, pass_number=turn)
    return [int(n) for start, stop in ranges for n in order[np.arange(start, stop)]]


def make(root: Path, *, cap: int | str = CAP) -> None:
    """Create a new, empty cache that knows the source."""
    with open_cache(root, max_size=cap) as cache, tempfile.TemporaryDirectory() as listing:
        cache.declare("default", SCHEMA)
        (Path(listing) / "listing.json").write_text("{}")
        cache.add_source(SOURCE, Path(listing))


# -- what processes do -----------------------------------------------------------------------------------------------


def acknowledge(ledger: str | None, shard: str, turn: int, numbers: list[int]) -> None:
    """Append one durable line to a file outside the cache: these samples are committed."""
    if ledger is None:
        return
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, json.dumps({"shard": shard, "turn": turn, "numbers": numbers}).encode() + b"\n")
    os.fsync(fd)
    os.close(fd)


def commit_one(
    cache: CacheDir, job: str, *, format: str, ledger: str | None, room: Room | None = None, most: int = PER_SHARD
) -> str | None:
    """Claim, write and commit one shard as a worker of ``pull`` does. Return None if no draw is left."""
    kind = get_format(format)
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        held = draws.claim(connection, job, holder=cache.holder.id, most=most)
    if held is None:
        return None
    numbers = numbers_of(held.pass_number, [[held.start, held.stop]])
    samples = block(numbers)
    bound = shard_bound(kind, SCHEMA, samples.samples, samples.nbytes)
    with cache.stage(dataset="default", schema=SCHEMA, format=format, bound=bound, job=job, room=room) as staging:
        files = ShardFiles(staging.path, kind, SCHEMA, samples=samples.samples, nbytes=samples.nbytes)
        try:
            files.write(samples.slice(0, 5))
            files.write(samples.slice(5, len(samples)))
            facts = files.facts()
        except BaseException:
            files.abort()
            raise
        shard = staging.commit(
            Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files),
            origin=Origin(SOURCE.id, SOURCE.url, held.pass_number, ((held.start, held.stop),)),
            close=lambda connection: draws.finish(
                connection, job, held, held.stop, samples=facts.samples, skipped=0, fetched=facts.payload
            ),
        )
    acknowledge(ledger, shard, held.pass_number, numbers)
    return shard


def pull(
    root: str,
    *,
    format: str = "lmdb",
    ledger: str | None = None,
    shards: int = 1,
    most: int = PER_SHARD,
    evict: bool = False,
    wait: float = 60.0,
    largest_file: int = resource.RLIM_INFINITY,
    then_cut: tuple[str, int] | None = None,
) -> None:
    """Open the cache, commit ``shards`` shards (0: forever) of up to ``most`` samples, and close it.

    ``then_cut`` is a file system, and the kind of power cut that hits it when the last shard is acknowledged.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    room = Room(evict=evict, wait=wait)
    with open_cache(root, create=False) as cache:
        with cache.catalog.write() as connection:
            cache.holder.register(connection)
            job, _ = draws.open_job(connection, SOURCE.id, holder=cache.holder.id, wanted=None, seed=None)
        done = 0
        while done < shards or not shards:
            kind = FORMATS[done % len(FORMATS)] if format == "all" else format
            shard = commit_one(cache, job, format=kind, ledger=ledger, room=room, most=most)
            assert shard is not None, "the source is at its end"
            done += 1
        if then_cut is not None:
            cut_power(*then_cut)
        with cache.catalog.write() as connection:
            draws.give_back(connection, cache.holder.id, job)
            close_job(connection, job)


EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), fs/ext4/ext4.h


def cut_power(disk: str | Path, flag: int) -> None:
    """Stop an ext4 file system as a power cut does: no more bytes reach its disk."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", flag))
    finally:
        os.close(fd)


def evict(root: str, *, size: int, told: str | None = None) -> None:
    """Evict down to ``size`` bytes, and append the result to the file ``told``."""
    with open_cache(root, create=False) as cache:
        removal = cache.evict(size)
    if told is not None:
        with open(told, "a") as file:
            file.write(json.dumps(removal.as_dict()) + "\n")


def fork_many(root: str, *, count: int) -> None:
    """Fork children that all use an open and leased cache, some of them through inherited objects."""
    with open_cache(root, create=False) as cache, cache.snapshot() as mine:
        for number in range(count):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    with cache.snapshot() as theirs:
                        assert theirs.shards == mine.shards
                    mine.release()  # has no effect: the lease belongs to the parent
                    if number % 2:
                        cache.close()
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert status == 0
            assert [row["version"] for row in cache.catalog.rows("SELECT version FROM leases")] == [mine.version]


def evict_for_ever(root: str, *, seed: int, least: int = OWN + LARGE_BYTES, most: int = CAP) -> None:
    """Evict down to one size after another, forever."""
    rng = random.Random(seed)
    with open_cache(root, create=False) as cache:
        while True:
            with contextlib.suppress(CapacityError):  # the other processes may write more than that at this moment
                cache.evict(rng.randrange(least, most), policy=rng.choice(policy_names()))
            time.sleep(0.01)


def read(root: str, *, samples: int, seed: int, library: bool = False, each: int = 256) -> None:
    """Read random samples, ``each`` of every shard of one snapshot after another, and compare them with the expected
    ones.
    """
    rng = np.random.default_rng(seed)
    done = 0
    with open_cache(root, create=False) as cache:
        while done < samples:
            with cache.snapshot() as snapshot:
                for shard in snapshot.shards:
                    with open_shard(shard.path, get_format(shard.format), SCHEMA, library=library) as reader:
                        got = reader.take(rng.integers(reader.samples, size=each))
                    expect(got)
                    done += len(got)
                snapshot.served()


def watch_disk(root: str, *, told: str) -> None:
    """Measure every 5 ms, until SIGTERM, how many bytes of the disk are used, except those of the catalog and the
    history.

    The largest increase over the use at the start, when the cache is empty, is written to the file ``told``.
    """
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    with contextlib.suppress(PermissionError):
        os.nice(-19)  # the observer must not wait for the observed processes
    names = ("catalog.sqlite3", "catalog.sqlite3-journal", "history.jsonl", "history.jsonl.new")

    def left_out() -> int:
        total = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(f"{root}/{name}").st_blocks * 512
        return total

    def taken() -> int:
        before, disk = left_out(), os.statvfs(root)
        return -disk.f_bavail * disk.f_frsize - max(before, left_out())  # a new history file replaces the old one

    first, most, polls, longest = taken(), 0, 0, 0.0
    last = turn = time.monotonic()
    while not stop:
        most = max(most, taken() - first)
        polls += 1
        turn = max(turn + 0.005, last)
        time.sleep(max(0.0, turn - time.monotonic()))
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    Path(told).write_text(json.dumps({"most": most, "polls": polls, "longest": longest}))


def hold(root: str, *, told: str) -> None:
    """Lease the current shards, create the file ``told``, and sleep."""
    with open_cache(root, create=False) as cache, cache.snapshot():
        Path(told).touch()
        time.sleep(600)


def recover(root: str) -> None:
    """Open and close the cache."""
    with open_cache(root, create=False):
        pass


class Quiet:
    """A channel without a listener."""

    def send(self, message: dict[str, Any]) -> None:
        """Drop the message."""


def convert(root: str, *, to: str) -> None:
    """Convert the oldest shard."""
    with open_cache(root, create=False) as cache:
        oldest = cache.shards()[0].id
    _replace(root, [[oldest]], to=to, most=None)


def recut(root: str, *, to: str, most: int) -> None:
    """Merge all shards into one, or split the oldest."""
    with open_cache(root, create=False) as cache:
        shards = [shard.id for shard in cache.shards()]
    _replace(root, [shards if most > 10**6 else shards[:1]], to=to, most=most)


def _replace(root: str, groups: list[list[str]], *, to: str, most: int | None) -> None:
    replace_groups(
        Quiet(),
        root=root,
        dataset="default",
        groups=groups,
        to=to,
        most=most,
        compression=None,
        verify=False,
        wait=0.0,
    )


def repair(root: str) -> None:
    """Verify and repair in this process only: injected faults would also hit the reader of records, which is another
    process.
    """
    PackageReader.check = lambda *_: None  # type: ignore[method-assign, assignment]
    verify(root, repair=True)


def move(root: str) -> None:
    """Release the only part of the source, and take it again."""
    with open_cache(root, create=False) as cache:
        assign(cache, SOURCE.id, 1, {}, (), repart=True, beside=True)
        assign(cache, SOURCE.id, 1, {0: SOURCE.units}, (), repart=True, beside=True)


def create(root: str) -> None:
    """Create a cache."""
    make(Path(root))


ACTIONS: dict[str, Callable[..., None]] = {
    "pull": pull,
    "evict": evict,
    "fork_many": fork_many,
    "evict_for_ever": evict_for_ever,
    "read": read,
    "hold": hold,
    "watch_disk": watch_disk,
    "recover": recover,
    "convert": convert,
    "recut": recut,
    "repair": repair,
    "move": move,
    "create": create,
}


# -- what must then be true -------------------------------------------------------------------------------------------


class Oracle:
    """An oracle that knows every acknowledged sample, from a ledger outside the cache, and every recorded eviction."""

    def __init__(self, root: Path, ledger: Path) -> None:
        self.root, self.ledger = root, ledger
        self._decided: set[str] = set()
        self._ancestors: dict[str, list[str]] = {}
        self._where: dict[tuple[int, int], str] = {}

    def lines(self) -> list[dict[str, Any]]:
        """Return the acknowledged lines."""
        return [json.loads(line) for line in self.ledger.read_text().splitlines()] if self.ledger.exists() else []

    def follow(self) -> None:
        """Record the evictions so far: the event log is bounded, and long runs have more events."""
        with contextlib.closing(sqlite3.connect(self.root / "catalog.sqlite3", timeout=60)) as connection:
            self._decided |= {row[0] for row in connection.execute("SELECT subject FROM events WHERE kind = 'evict'")}

    def check(self, *, deep: bool = True, library: bool = False) -> int:
        """Run the post-check of the fault catalogue. Return the number of visible samples.

        Opening recovers, and afterwards no repair is needed. ``deep`` reads every visible sample and every byte.
        """
        with open_cache(self.root, create=False) as cache:
            rows = cache.catalog.rows("SELECT * FROM shards")
            self.follow()
            assert {row["state"] for row in rows} <= {"ready"}, "nothing half done is left"
            self._folders_are_those_of_rows(cache, {row["id"] for row in rows})
            for row in rows:
                assert row["bytes"] == tree_bytes(cache.layout.shards / row["id"]), "charged is what the disk has"
                about = json.loads((cache.layout.shards / row["id"] / "shard.json").read_bytes())
                self._ancestors[row["id"]] = about.get("ancestors", [])
                self._once(row)
            assert tree_bytes(self.root) <= cache.usage().total <= cache.max_size
            self._acknowledged_is_there(rows)
            if deep:
                for shard in cache.shards():
                    self._readable(shard.path, shard.format, library=library)
                found = verify(self.root, repair=True)
                assert found.problems == [], found.problems
                assert found.checked == len(rows)
            return sum(row["samples"] for row in rows)

    def _folders_are_those_of_rows(self, cache: CacheDir, ids: set[str]) -> None:
        assert set(os.listdir(cache.layout.shards)) == ids
        assert set(os.listdir(cache.layout.holders)) <= {f"{cache.holder.id}.lock"}
        assert set(os.listdir(cache.layout.listings)) <= {SOURCE.id, f"{SOURCE.id}.json"}
        names = {"CACHEDIR.TAG", "cachetool.json", "history.jsonl", "history.jsonl.new"}
        names |= {*(f"catalog.sqlite3{part}" for part in ("", "-journal", "-lock"))}
        assert set(os.listdir(self.root)) - {"holders", "shards", "listings"} <= names

    def _once(self, row: Any) -> None:
        """Assert that no sample of a pass is in two shards, unless one shard replaced the other."""
        for number in numbers_of(row["pass_number"], json.loads(row["draws"])):
            first = self._where.setdefault((row["pass_number"], number), row["lineage"])
            known = {row["lineage"], *self._ancestors.get(row["id"], ())}
            assert first in known, f"sample {number} was committed twice"

    def _acknowledged_is_there(self, rows: list[Any]) -> None:
        here = {row["id"] for row in rows} | {row["lineage"] for row in rows}
        ours = {line["shard"] for line in self.lines()}
        cut = [row for row in rows if row["lineage"] not in ours]  # of shards that were split or merged
        held = {
            (row["pass_number"], number)
            for row in cut
            for number in numbers_of(row["pass_number"], json.loads(row["draws"]))
        }
        for line in self.lines():
            there = line["shard"] in here | self._decided
            there = there or held.issuperset((line["turn"], number) for number in line["numbers"])
            assert there, f"shard {line['shard']} was acknowledged and is lost"

    def _readable(self, path: Path, format: str, *, library: bool) -> None:
        about = json.loads((path / "shard.json").read_bytes())
        numbers = numbers_of(about["pass_number"], about["draws"])
        with open_shard(path, get_format(format), SCHEMA, library=library) as reader:
            assert reader.samples == len(numbers)
            got = reader.read(0, reader.samples)
        assert [got.sample(index)["number"] for index in range(len(got))] == numbers
        expect(got)
