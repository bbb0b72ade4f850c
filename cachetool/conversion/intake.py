"""``convert INPUT`` without ``--out``: any input's samples into the cache, claimed and committed like draws.

The input is a source whose draws are its samples in order, so an interrupted run goes on where it stopped and a second
run of the same input adds nothing. What came from a file cannot be pulled again: its shards are marked, and eviction
leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cachetool.cache import CacheDir, Claim, Facts, Origin, Room, SourceRow, draws
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import close_job
from cachetool.cache.history import edged
from cachetool.cache.unmaking import leaving_nothing, withdraw_unused
from cachetool.conversion.inputs import Input, Survey, identity, open_input, survey
from cachetool.conversion.to_files import sized
from cachetool.core.errors import CapBlocked
from cachetool.core.names import Id
from cachetool.core.progress import Progress, Report
from cachetool.formats import get_format
from cachetool.formats.base import Format
from cachetool.formats.shard import ShardFiles, shard_bound, verify_file
from cachetool.proc.folders import make_folder
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import listing_scratch
from cachetool.proc.task import Channel, Message, Task
from cachetool.pull.prepare import refuse_cap

__all__ = ["ShardOptions", "take_in", "write_shards"]


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How the samples of an input are written into a cache."""

    dataset: str
    kind: Format
    compression: str | None
    verify: bool
    wait: float
    """Seconds to wait for room that readers hold."""

    def to_json(self) -> Message:
        """Plain values for the arguments of a task."""
        return {
            "dataset": self.dataset,
            "to": self.kind.name,
            "compression": self.compression,
            "verify": self.verify,
            "wait": self.wait,
        }

    @classmethod
    def from_json(cls, value: Message) -> ShardOptions:
        """What :meth:`to_json` gave."""
        return cls(value["dataset"], get_format(value["to"]), value["compression"], value["verify"], value["wait"])


def take_in(
    cache: CacheDir,
    description: Message,
    options: ShardOptions,
    *,
    part_bytes: Callable[[int], int],
    step: Callable[[Survey, int], int],
    workers: int,
    report: Report,
) -> tuple[Survey, list[tuple[int, int]]]:
    """Commit all samples of the input that ``description`` opens, less those that are there; gives what it holds, and
    samples and bytes on disk of each shard that was committed by this and by nobody beside it.

    Raises :class:`UsageError` when the dataset has another schema, :class:`CapTooSmall` and :class:`CapBlocked` when
    the input does not fit; what was committed stays. ``part_bytes`` gives the bytes of values in a shard for a cap,
    ``step`` the samples.
    """
    with ExitStack() as stack:
        stack.enter_context(leaving_nothing(cache))
        contents = survey(description, part_bytes(cache.max_size))
        id, place = identity(description)[:16], description.get("shown") or f"file://{description['path']}"
        make_folder(listing := stack.enter_context(listing_scratch()) / "listing")
        new = listing if cache.source(id) is None else None
        _refuse_small_cap(cache, contents, options.kind, part_bytes, step, new)
        cache.check_schema(options.dataset, contents.schema)
        if new is not None:
            stack.callback(withdraw_unused, cache, options.dataset, id)
        cache.declare(options.dataset, contents.schema)
        if new is not None:
            row = SourceRow(
                id=Id(id),
                url=place,
                options={},
                identity=id,
                dataset=options.dataset,
                units=contents.samples,
                samples=contents.samples,
                seed=0,
                pass_number=0,
                frontier=0,
                skipped=0,
            )
            cache.add_source(row, new)
        samples_per_shard = step(contents, cache.max_size)
        shard_sizes = _take_in(
            cache, description, contents, id, options, step=samples_per_shard, workers=workers, report=report
        )
    return contents, shard_sizes


def _refuse_small_cap(
    cache: CacheDir, contents: Survey, kind: Format, part_bytes: Callable[[int], int],
    step: Callable[[Survey, int], int], listing: Path | None,
) -> None:  # fmt: skip
    schema = contents.schema

    def one(cap: int) -> tuple[int, int]:
        most = part_bytes(cap)
        samples = step(contents, cap)
        nbytes = samples * schema.fixed_nbytes if schema.is_fixed else most
        return nbytes, shard_bound(kind, schema, samples, nbytes, cache.layout.disk_block)

    refuse_cap(cache, one, schema, kind, listing=listing)


def _take_in(
    cache: CacheDir,
    description: Message,
    contents: Survey,
    id: str,
    options: ShardOptions,
    *,
    step: int,
    workers: int,
    report: Report,
) -> list[tuple[int, int]]:
    """Open the job, run the workers, close it; gives samples and bytes on disk of each shard."""
    room = Room(wait=options.wait)
    holder = cache.holder  # before the transaction: a new cap takes effect in one of its own

    def begin(connection: Connection) -> str:
        holder.register(connection)
        return draws.open_job(connection, id, holder=holder.id, wanted=None, seed=None, room=room)[0]

    job = edged(cache.catalog, cache.layout, begin)
    task = Task(
        "cachetool.conversion.intake:write_shards",
        {
            "root": str(cache.root.resolve()),
            "description": description,
            "job": job,
            "source": id,
            "step": step,
            "options": options.to_json(),
        },
    )
    shard_sizes: list[tuple[int, int]] = []
    committed = moved = 0

    def on_message(_: int, message: Message) -> None:
        nonlocal committed, moved
        shard_sizes.append((message["samples"], message["on_disk"]))
        committed += message["samples"]
        moved += message["bytes"]
        report(Progress("convert", committed, contents.samples, moved))

    try:
        LocalEngine().run([task] * (min(workers, -(-contents.samples // step)) if contents.random else 1), on_message)
    except CapBlocked as error:
        raise CapBlocked(f"stopped at the cap with {committed} of {contents.samples} samples: {error}") from error
    finally:
        edged(cache.catalog, cache.layout, lambda connection: close_job(connection, job))
    return shard_sizes


def write_shards(
    channel: Channel,
    *,
    root: str,
    description: Message,
    job: str,
    source: str,
    step: int,
    options: Message,
) -> Message:
    """The task of one worker: claim runs of samples and commit a shard for each, until none is left."""
    shard_options, samples = ShardOptions.from_json(options), open_input(description)
    with CacheDir(Path(root)) as cache:
        try:
            while True:
                with cache.catalog.write() as connection:
                    cache.holder.register(connection)
                    claim = draws.claim(connection, job, holder=cache.holder.id, most=step)
                if claim is None:
                    return {}
                shard = _Shard(cache, samples, claim, shard_options, job=job, source=source)
                channel.send(shard.write())
        finally:
            samples.close()
            with cache.catalog.write() as connection:
                draws.give_back(connection, cache.holder.id, job)


class _Shard:
    """One claimed run on its way into one shard."""

    def __init__(
        self, cache: CacheDir, samples: Input, claim: Claim, options: ShardOptions, *, job: str, source: str
    ) -> None:
        self._cache, self._input, self._claim, self._options, self._job = cache, samples, claim, options, job
        row = cache.source(source)
        self._origin = Origin(source, row.url if row else None, claim.pass_number, ((claim.start, claim.stop),))

    def write(self) -> Message:
        """Reserve, write, commit; gives samples, bytes of values, and bytes on disk."""
        options, kind = self._options, self._options.kind
        schema, count = self._input.schema, self._claim.stop - self._claim.start
        blocks, nbytes = sized(self._input, self._claim.start, self._claim.stop)
        staging = self._cache.stage(
            dataset=options.dataset,
            schema=schema,
            format=kind.name,
            bound=shard_bound(kind, schema, count, nbytes, self._cache.layout.disk_block),
            job=self._job,
            room=Room(wait=options.wait),
        )
        with staging:
            files = ShardFiles(
                staging.path, kind, schema, samples=count, nbytes=nbytes, compression=options.compression
            )
            try:
                for block in blocks:
                    files.write(block)
                facts = files.facts()
                self._input.check(self._claim.start, facts.written.checksums)
            except BaseException:
                files.abort()
                raise
            if options.verify:
                verify_file(files.path, kind, schema, facts.written.checksums)
            staging.commit(
                Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files),
                origin=self._origin,
                close=lambda connection: draws.finish(
                    connection, self._job, self._claim, self._claim.stop, samples=count, skipped=0
                ),
            )
        return {"samples": count, "bytes": nbytes, "on_disk": staging.nbytes}
