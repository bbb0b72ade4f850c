"""``convert`` of a cache in place: new shards replace old ones of the same samples, group by group.

::

    another format          [a] -> [A]
    --shard-size, merging   [a b c] -> [A]       neighbours in the order of commits, each below half of it
    --shard-size, cutting   [a] -> [A B C]

Each group is one transaction: the new shards become visible and the old ones retire. So the cache needs space for one
more group only, and every snapshot has each sample exactly once. Every value is hashed on its way and must have its old
checksum. Draws move with their samples. Groups that are done stay done when a run is killed. A second run finds nothing
to do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
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
from cachetool.cache.snapshots import take, visible
from cachetool.conversion.groups import Piece, Swap, cuts, groups, is_exact, origin_of, way_out
from cachetool.core.block import Block
from cachetool.core.errors import CapBlocked, CapTooSmall, CatalogError, CorruptError
from cachetool.core.progress import Progress, Report
from cachetool.core.ranges import pairs
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.formats.compression import PROBED, chosen, compressed, compression_of
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
    again: bool,
    probe: bool,
    workers: int,
    verify: bool,
    wait: float,
    report: Report,
) -> list[Shard]:
    """Replace the shards of a dataset that have another format than ``kind``, or another size than ``most`` bytes of
    values. With ``again`` shards that have the format already are replaced too. With ``probe`` the first samples decide
    whether the new shards are compressed.

    Return the new shards. Raises :class:`CapTooSmall` or :class:`CapBlocked` when there is no space for one more group,
    and :class:`CorruptError`, naming the shard, when its bytes are not those that were written.
    """
    # Opening the holder applies a new cap (--max-size) before anything is reserved.
    _ = cache.holder
    size = cache.schema(dataset).fixed_nbytes if cache.schema(dataset).is_fixed else 0
    if most is not None and size:
        # A whole number of samples, or halves of a shard that is one sample too large would count as small shards and
        # be merged again.
        most = max(1, most // size) * size
    shards, origins = _shards(cache, dataset), _origins(cache)
    if probe and shards:
        old = next(iter(shards.values()))
        with open_shard(old.path, get_format(old.format), old.schema, digest=old.digest) as reader:
            kind = chosen(kind, [reader.read(0, min(old.samples, PROBED))])
    todo = _groups(shards, origins, kind, most, again)
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
                # Groups are dealt in turn, so neighbours of one origin go to different workers and large shards spread.
                "groups": todo[first::count],
                "to": kind.name,
                "most": most,
                "compression": compression_of(kind),
                "verify": verify,
                "wait": wait,
            },
        )
        for first in range(count)
    ]
    swaps: dict[tuple[str, ...], Swap] = {}

    def foreseen(without: Collection[str]) -> list[Swap]:
        """Return the swaps that remain when some shards are gone."""
        shards, origins = _shards(cache, dataset), _origins(cache)
        left = {id: shard for id, shard in shards.items() if id not in without}
        for ids in (todo := [tuple(ids) for ids in _groups(left, origins, kind, most, again)]):
            if ids not in swaps:
                # Kept in ``swaps``: the bisection in way_out asks for the same groups many times, and sizes of ragged
                # samples are read from disk.
                swap = _Swap(cache, [left[id] for id in ids], kind, most)
                bounds = swap.bounds(origins, swap.ranges(origins))
                block, schema = cache.layout.disk_block, swap.olds[0].schema
                new = sum(bound + folder_bound(schema, bound, block) for bound in bounds)
                swaps[ids] = Swap(sum(old.bytes for old in swap.olds), new)
        return [swaps[ids] for ids in todo]

    try:
        outcomes = LocalEngine().run(tasks, on_message)
    except (CapBlocked, CapTooSmall) as error:
        # The same class, because it decides the exit code, with the way out for the whole conversion and not for one
        # group only.
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
    """Replace these groups one after another. This is the task of one worker process.

    Return ``{"shards": ids of the new ones}``.
    """
    new_ids: list[str] = []
    with CacheDir(Path(root)) as cache:
        for ids in groups:
            here = _shards(cache, dataset, ids)
            if not here.keys() >= set(ids):
                # Another process evicted a shard since the groups were planned.
                continue
            swap = _Swap(cache, [here[id] for id in ids], compressed(to, compression), most)
            new = swap.run(verify=verify, wait=wait)
            if new:
                new_ids += new
                channel.send({"samples": swap.samples, "bytes": sum(old.payload for old in swap.olds)})
    return {"shards": new_ids}


class _Swap:
    """The replacement of one group."""

    def __init__(self, cache: CacheDir, olds: list[Shard], kind: Format, most: int | None) -> None:
        self._cache, self._kind, self._most = cache, kind, most
        self.olds, self._ids = olds, [old.id for old in olds]
        self.samples = sum(old.samples for old in olds)

    def run(self, *, verify: bool, wait: float) -> list[str]:
        """Reserve, write and commit. Return the ids of the new shards.

        Return none when another process evicted or converted a shard of the group meanwhile. The written files are then
        given up.
        """
        try:
            return self._run(verify=verify, wait=wait)
        # These errors are expected if a shard of the group was evicted between two looks at the catalog: while sizes
        # were read, or at the commit. If the whole group still exists, the error is real.
        except (CatalogError, CorruptError, FileNotFoundError):
            if _origins(self._cache, self._ids).keys() >= set(self._ids):
                raise
            return []

    def _run(self, *, verify: bool, wait: float) -> list[str]:
        cache, kind, origins = self._cache, self._kind, _origins(self._cache, self._ids)
        if not origins.keys() >= set(self._ids):
            return []
        first = self.olds[0]
        ranges = self.ranges(origins)
        # All new shards of the group are reserved in one transaction: a part of a group is useless and would only block
        # space.
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
            # The lease is taken only now: held while waiting for space, it would keep the very shards whose deletion
            # makes space.
            # Not by cache.snapshot(), which first looks for dead processes, as the reservation has just done.
            snapshot = stack.enter_context(
                take(
                    cache.catalog, cache.layout, cache.holder, dataset=first.dataset, schema=first.schema, peek=True
                )
            )  # fmt: skip
            if not snapshot.has(self._ids):
                return []
            blocks, parts = _Blocks(self._read()), []
            for staging, (start, stop, nbytes) in zip(stagings, ranges, strict=True):
                facts = self._write(staging, blocks, start, stop, nbytes, verify=verify)
                parts.append((staging, facts, origin_of(origins, self._ids, start, stop, self.samples)))
            # New shards appear and old ones retire in one transaction, so no snapshot sees a sample twice or not at
            # all.
            return commit_together(parts, replaces=self._ids)

    def bounds(self, origins: dict[str, Origin], ranges: list[tuple[int, int, int]]) -> list[int]:
        """Return the most bytes that the files of each new shard take."""
        schema, block = self.olds[0].schema, self._cache.layout.disk_block
        # shard.json lists draws and ancestors, so its size depends on the number of ranges of the old shards.
        record = RANGE_BYTES * (len(self.olds) + len(ranges) + sum(len(origins[id].draws) for id in self._ids))
        return [shard_bound(self._kind, schema, stop - start, nbytes, block) + record for start, stop, nbytes in ranges]

    def ranges(self, origins: dict[str, Origin]) -> list[tuple[int, int, int]]:
        """Return the new shards: first sample, the sample behind the last, bytes of values."""
        payload = sum(old.payload for old in self.olds)
        if self._most is None or payload <= self._most or self.samples < 2:
            return [(0, self.samples, payload)]
        # Skipped draws: nobody knows which sample is which draw, so the shard stays whole.
        if not is_exact(origins[self.olds[0].id], self.samples):
            return [(0, self.samples, payload)]
        upto = np.concatenate([[0], np.cumsum(self._sizes(), dtype=np.int64)])
        at = cuts(upto, self._most)
        return [(start, stop, int(upto[stop] - upto[start])) for start, stop in pairwise(at)]

    def _sizes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of values of each sample, int64 (samples,)."""
        schema = self.olds[0].schema
        if schema.is_fixed:
            return np.full(self.samples, schema.fixed_nbytes, dtype=np.int64)
        # A lease while the sizes are read, or an eviction could delete the files. A peek does not count as an epoch.
        with self._cache.snapshot(dataset=self.olds[0].dataset, peek=True):
            return np.concatenate([run.block.sample_nbytes for run in self._read()])

    def _read(self) -> Iterator[_Run]:
        """Yield all samples of the group in order, with the checksums that they must have."""
        for old in self.olds:
            try:
                # The stored checksums are checked against the content digest first: a damaged list of checksums would
                # accuse good samples.
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

    def _write(self, staging: Staging, blocks: _Blocks, start: int, stop: int, nbytes: int, *, verify: bool) -> Facts:
        schema = self.olds[0].schema
        files = ShardFiles(staging.path, self._kind, schema, samples=stop - start, nbytes=nbytes)
        runs, at = [], 0
        try:
            for run in blocks.take(stop - start):
                files.write(run.block)
                runs.append(run)
            facts = files.facts()
            for run in runs:
                count = run.checksums.shape[1]
                # The writer hashes each value anyway. Comparing its checksums costs less than hashing a second time
                # while reading.
                run.check(facts.written.checksums[:, at : at + count])
                at += count
        except BaseException:
            files.abort()
            raise
        if verify:
            # Before the commit: a shard that its own library cannot read must never replace the old one.
            verify_file(files.path, self._kind, schema, facts.written.checksums)
        return Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)


@dataclass(frozen=True, slots=True)
class _Run:
    """Samples as they were read, with their shard, the number of the first one in it, and their stored checksums."""

    block: Block
    checksums: npt.NDArray[np.uint64]
    shard: Shard
    first: int

    def part(self, start: int, stop: int) -> _Run:
        """Return samples ``start`` to ``stop - 1`` of this run."""
        return _Run(self.block.slice(start, stop), self.checksums[:, start:stop], self.shard, self.first + start)

    def check(self, written: npt.NDArray[np.uint64]) -> None:
        """Raise :class:`CorruptError` when the ``written`` checksums differ from the stored ones."""
        try:
            check_samples(
                written, self.checksums, self.shard.schema, name=str(self.shard.data), first=self.first
            )  # fmt: skip
        except CorruptError as error:
            raise _left(self.shard, error) from error


def _left(shard: Shard, error: CorruptError) -> CorruptError:
    """Return the error of a damaged shard, with the command that repairs it."""
    command = f"cachetool verify --repair{cache_option(shard.folder.parent)}"
    return CorruptError(f"{error};\nshard {shard.id} was not converted; repair it with: {command}")


class _Blocks:
    """A stream of blocks that is handed out by numbers of samples."""

    def __init__(self, runs: Iterator[_Run]) -> None:
        self._runs = runs
        self._remaining: _Run | None = None

    def take(self, count: int) -> Iterator[_Run]:
        """Yield the next ``count`` samples."""
        while count:
            run = self._remaining or next(self._runs)
            size = len(run.block)
            fit = min(count, size)
            self._remaining = run.part(fit, size) if fit < size else None
            count -= fit
            yield run.part(0, fit)


def _shards(cache: CacheDir, dataset: str, ids: Sequence[str] | None = None) -> dict[str, Shard]:
    """Return all shards of a dataset, or those of ``ids``, by id, in the order of commits."""
    with cache.catalog.read() as connection:
        return {shard.id: shard for shard in visible(connection, cache.layout, dataset, None, ids=ids)}


def _groups(
    shards: dict[str, Shard], origins: dict[str, Origin], kind: Format, most: int | None, again: bool
) -> list[list[str]]:
    """Return the groups of ``shards`` that are replaced together."""
    pieces = [
        Piece(
            id=shard.id,
            samples=shard.samples,
            payload=shard.payload,
            origin=(origins[shard.id].source, origins[shard.id].part, origins[shard.id].pass_number),
            exact=is_exact(origins[shard.id], shard.samples),
            done=shard.format == kind.name and not again,
        )
        for shard in shards.values()
        # A shard without origin was evicted between the two readings of the catalog.
        if shard.id in origins
    ]
    return groups(pieces, most)


def _origins(cache: CacheDir, ids: Sequence[str] | None = None) -> dict[str, Origin]:
    """Return the origin of the samples of all ready shards, or of those of ``ids``, by id."""
    # All rows take 2 ms for 1,000 shards. Read for each group, they were most of the time of a conversion.
    some = "" if ids is None else " AND s.id IN (SELECT value FROM json_each(?))"
    rows = cache.catalog.rows(
        "SELECT s.id, s.source, s.part, s.pass_number, s.draws, o.url"
        f" FROM shards s LEFT JOIN sources o ON o.id = s.source WHERE +s.state = 'ready'{some}",
        () if ids is None else (json.dumps(list(ids)),),
    )
    return {row["id"]: _origin(row) for row in rows}


def _origin(row: Row) -> Origin:
    draws = pairs(json.loads(row["draws"] or "[]"))
    return Origin(row["source"], row["url"], row["pass_number"], draws, row["part"])
