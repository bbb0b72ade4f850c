"""``convert`` of a cache in place: shards give way to others of the same samples, group by group.

::

    another format          [a] -> [A]
    --shard-size, merging   [a b c] -> [A]       neighbours in the order of commits, each below half of it
    --shard-size, cutting   [a] -> [A B C]

Each group in one transaction: the new shards become visible and the old ones retire, so the cache needs room for one
group more, and no snapshot sees a sample twice or not at all. Every value is hashed on its way and must have the
checksum it had. Draws go with their samples. What was done stays done when a run is killed, and a second run over what
is as it was asked to be does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Facts, Origin, Room, Shard, Staging, commit_together
from cachetool.cache.catalog import Row
from cachetool.cache.commit import folder_bound
from cachetool.cache.layout import cache_option
from cachetool.cache.records import RANGE_BYTES
from cachetool.conversion.groups import Piece, Swap, cuts, groups, is_exact, origin_of, way_out
from cachetool.core.block import Block
from cachetool.core.errors import CapBlocked, CapTooSmall, CatalogError, CorruptError
from cachetool.core.progress import Progress, Report
from cachetool.core.ranges import pairs
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.formats.shard import ShardFiles, check_content, check_samples, open_shard, shard_bound, verify_file
from cachetool.proc.parent import LocalEngine
from cachetool.proc.task import Channel, Message, Task
from cachetool.sources.file_opening import run_of_blocks

__all__ = ["replace_groups", "replace_shards"]


def replace_shards(
    cache: CacheDir,
    dataset: str,
    *,
    kind: Format,
    most: int | None,
    compression: str | None,
    workers: int,
    verify: bool,
    wait: float,
    report: Report,
) -> list[Shard]:
    """Replace the shards of a dataset that are in another format than ``kind``, or of another size than ``most`` bytes
    of values; gives the new ones.

    With ``compression`` also those that are in it already. Raises :class:`CapTooSmall` or :class:`CapBlocked` when
    there is no room for one group more, :class:`CorruptError` naming a shard whose bytes are not what was written.
    """
    _ = cache.holder  # a new cap takes effect
    size = cache.schema(dataset).fixed_nbytes if cache.schema(dataset).is_fixed else 0
    if most is not None and size:
        most = max(1, most // size) * size  # so that halves of what is one sample too large are no small shards
    shards, origins = _shards(cache, dataset), _origins(cache)
    todo = _groups(shards, origins, kind, most, compression)
    total = sum(shards[id].samples for group in todo for id in group)
    done = moved = 0

    def on_message(_: int, message: Message) -> None:
        nonlocal done, moved
        done += message["samples"]
        moved += message["bytes"]
        report(Progress("convert", done, total, moved))

    count = min(workers, len(todo))
    tasks = [
        Task(
            "cachetool.conversion.in_place:replace_groups",
            {
                "root": str(cache.root.resolve()),
                "dataset": dataset,
                "groups": todo[first::count],
                "to": kind.name,
                "most": most,
                "compression": compression,
                "verify": verify,
                "wait": wait,
            },
        )
        for first in range(count)
    ]
    swaps: dict[tuple[str, ...], Swap] = {}

    def foreseen(without: Collection[str]) -> list[Swap]:
        """The swaps that are still to be made when some shards are gone."""
        shards, origins = _shards(cache, dataset), _origins(cache)
        left = {id: shard for id, shard in shards.items() if id not in without}
        for ids in (todo := [tuple(ids) for ids in _groups(left, origins, kind, most, compression)]):
            if ids not in swaps:
                swap = _Swap(cache, [left[id] for id in ids], kind, most)
                bounds = swap.bounds(origins, swap.ranges(origins))
                block, schema = cache.layout.disk_block, swap.olds[0].schema
                new = sum(bound + folder_bound(schema, bound, block) for bound in bounds)
                swaps[ids] = Swap(sum(old.bytes for old in swap.olds), new)
        return [swaps[ids] for ids in todo]

    try:
        outcomes = LocalEngine().run(tasks, on_message)
    except (CapBlocked, CapTooSmall) as error:
        raise type(error)(f"{error};\n{way_out(cache, foreseen)}") from error
    written = {id for outcome in outcomes for id in outcome["shards"]}
    return [shard for shard in cache.shards(dataset) if shard.id in written]


def replace_groups(
    channel: Channel,
    *,
    root: str,
    dataset: str,
    groups: list[list[str]],
    to: str,
    most: int | None,
    compression: str | None,
    verify: bool,
    wait: float,
) -> Message:
    """The task of one worker: replace these groups one after another. Gives ``{"shards": ids of the new ones}``."""
    new_ids: list[str] = []
    with CacheDir(Path(root)) as cache:
        for ids in groups:
            here = _shards(cache, dataset)
            if not here.keys() >= set(ids):
                continue  # one of them was evicted
            swap = _Swap(cache, [here[id] for id in ids], get_format(to), most)
            new = swap.run(compression=compression, verify=verify, wait=wait)
            if new:
                new_ids += new
                channel.send({"samples": swap.samples, "bytes": sum(old.payload for old in swap.olds)})
    return {"shards": new_ids}


class _Swap:
    """One group on its way."""

    def __init__(self, cache: CacheDir, olds: list[Shard], kind: Format, most: int | None) -> None:
        self._cache, self._kind, self._most = cache, kind, most
        self.olds, self._ids = olds, [old.id for old in olds]
        self.samples = sum(old.samples for old in olds)

    def run(self, *, compression: str | None, verify: bool, wait: float) -> list[str]:
        """Reserve, write, commit; gives the new shards, or none when one of the group was evicted or converted by
        somebody else meanwhile: then what was written is given up."""
        try:
            return self._run(compression=compression, verify=verify, wait=wait)
        except (CatalogError, CorruptError, FileNotFoundError):
            if _origins(self._cache).keys() >= set(self._ids):
                raise
            return []  # it went between two looks at the catalog: while sizes were read, or at the commit

    def _run(self, *, compression: str | None, verify: bool, wait: float) -> list[str]:
        cache, kind, origins = self._cache, self._kind, _origins(self._cache)
        if not origins.keys() >= set(self._ids):
            return []
        first = self.olds[0]
        ranges = self.ranges(origins)
        stagings = cache.stage_together(
            dataset=first.dataset,
            schema=first.schema,
            format=kind.name,
            bounds=self.bounds(origins, ranges),
            room=Room(wait=wait, advise=False),
        )
        with ExitStack() as stack:
            for staging in stagings:
                stack.enter_context(staging)
            # Leased only now: a lease held while waiting for room would keep the very shards whose end makes room.
            snapshot = stack.enter_context(cache.snapshot(dataset=first.dataset, peek=True))
            if not {old.id for old in self.olds} <= {shard.id for shard in snapshot.shards}:
                return []
            blocks, parts = _Blocks(self._read()), []
            for staging, (start, stop, nbytes) in zip(stagings, ranges, strict=True):
                facts = self._write(staging, blocks, start, stop, nbytes, compression=compression, verify=verify)
                parts.append((staging, facts, origin_of(origins, self._ids, start, stop, self.samples)))
            return commit_together(parts, replaces=self._ids)

    def bounds(self, origins: dict[str, Origin], ranges: list[tuple[int, int, int]]) -> list[int]:
        """The most bytes that the files of each new shard take."""
        schema, block = self.olds[0].schema, self._cache.layout.disk_block
        record = RANGE_BYTES * (len(self.olds) + len(ranges) + sum(len(origins[id].draws) for id in self._ids))
        return [shard_bound(self._kind, schema, stop - start, nbytes, block) + record for start, stop, nbytes in ranges]

    def ranges(self, origins: dict[str, Origin]) -> list[tuple[int, int, int]]:
        """The new shards: first sample, the one after the last, bytes of values."""
        payload = sum(old.payload for old in self.olds)
        if self._most is None or payload <= self._most or self.samples < 2:
            return [(0, self.samples, payload)]
        if not is_exact(origins[self.olds[0].id], self.samples):
            return [(0, self.samples, payload)]
        upto = np.concatenate([[0], np.cumsum(self._sizes(), dtype=np.int64)])
        at = cuts(upto, self._most)
        return [(start, stop, int(upto[stop] - upto[start])) for start, stop in pairwise(at)]

    def _sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of values of each sample."""
        schema = self.olds[0].schema
        if schema.is_fixed:
            return np.full(self.samples, schema.fixed_nbytes, dtype=np.int64)
        with self._cache.snapshot(dataset=self.olds[0].dataset, peek=True):
            return np.concatenate([run.block.sample_nbytes for run in self._read()])

    def _read(self) -> Iterator[_Run]:
        """All samples in order."""
        for old in self.olds:
            try:
                expected = check_content(old.path, old.schema, old.content)
                at = 0
                with open_shard(old.path, get_format(old.format), old.schema, digest=old.digest) as reader:
                    for block in run_of_blocks(reader, 0, reader.samples):
                        yield _Run(block, expected[:, at : at + len(block)], old, at)
                        at += len(block)
                if at != old.samples:
                    raise CorruptError(f"{old.data}: {at} samples were read, {old.samples} were written")
            except CorruptError as error:
                raise _left(old, error) from error

    def _write(
        self, staging: Staging, blocks: _Blocks, start: int, stop: int, nbytes: int, *, compression: str | None,
        verify: bool,
    ) -> Facts:  # fmt: skip
        schema = self.olds[0].schema
        files = ShardFiles(
            staging.path, self._kind, schema, samples=stop - start, nbytes=nbytes, compression=compression
        )
        runs, at = [], 0
        try:
            for run in blocks.take(stop - start):
                files.write(run.block)
                runs.append(run)
            facts = files.facts()
            for run in runs:
                count = run.checksums.shape[1]
                run.check(facts.written.checksums[:, at : at + count])
                at += count
        except BaseException:
            files.abort()
            raise
        if verify:
            verify_file(files.path, self._kind, schema, facts.written.checksums)
        return Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)


@dataclass(frozen=True, slots=True)
class _Run:
    """Samples as they were read: out of which shard, from which one on, and the checksums that they must have."""

    block: Block
    checksums: npt.NDArray[np.uint64]
    shard: Shard
    first: int

    def part(self, start: int, stop: int) -> _Run:
        """Some of them."""
        return _Run(self.block.slice(start, stop), self.checksums[:, start:stop], self.shard, self.first + start)

    def check(self, written: npt.NDArray[np.uint64]) -> None:
        """Raise :class:`CorruptError` when other bytes were written than there should be."""
        try:
            check_samples(
                written, self.checksums, self.shard.schema, name=str(self.shard.data), first=self.first
            )  # fmt: skip
        except CorruptError as error:
            raise _left(self.shard, error) from error


def _left(shard: Shard, error: CorruptError) -> CorruptError:
    command = f"cachetool verify --repair{cache_option(shard.folder.parent)}"
    return CorruptError(f"{error};\nshard {shard.id} was left as it is: {command}")


class _Blocks:
    """Blocks handed out by numbers of samples."""

    def __init__(self, runs: Iterator[_Run]) -> None:
        self._runs = runs
        self._remaining: _Run | None = None

    def take(self, count: int) -> Iterator[_Run]:
        """The next ``count`` samples."""
        while count:
            run = self._remaining or next(self._runs)
            size = len(run.block)
            fit = min(count, size)
            self._remaining = run.part(fit, size) if fit < size else None
            count -= fit
            yield run.part(0, fit)


def _shards(cache: CacheDir, dataset: str) -> dict[str, Shard]:
    """The shards of a dataset by id, in the order of commits."""
    return {shard.id: shard for shard in cache.shards(dataset)}


def _groups(
    shards: dict[str, Shard], origins: dict[str, Origin], kind: Format, most: int | None, compression: str | None
) -> list[list[str]]:
    """Which of ``shards`` are replaced together."""
    pieces = [
        Piece(
            id=shard.id,
            samples=shard.samples,
            payload=shard.payload,
            origin=(origins[shard.id].source, origins[shard.id].part, origins[shard.id].pass_number),
            exact=is_exact(origins[shard.id], shard.samples),
            done=shard.format == kind.name and compression is None,
        )
        for shard in shards.values()
        if shard.id in origins  # else it was evicted between two readings
    ]
    return groups(pieces, most)


def _origins(cache: CacheDir) -> dict[str, Origin]:
    """Where the samples of all ready shards came from, by id."""
    rows = cache.catalog.rows(
        "SELECT s.id, s.source, s.part, s.pass_number, s.draws, o.url"
        " FROM shards s LEFT JOIN sources o ON o.id = s.source WHERE s.state = 'ready'"
    )
    return {row["id"]: _origin(row) for row in rows}


def _origin(row: Row) -> Origin:
    draws = pairs(json.loads(row["draws"] or "[]"))
    return Origin(row["source"], row["url"], row["pass_number"], draws, row["part"])
