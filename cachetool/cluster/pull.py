"""``pull`` into the caches of all nodes of a Ray cluster::

    look at every cache -> list and probe here (pull.run) -> the nodes draw (placement) -> result

The catalog of the whole is a cache without shards, where the command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cachetool.cache import CacheDir, SourceRow, draws, open_cache, placing
from cachetool.cache.bound import PLACEMENTS, bind, refuse_other, unbind
from cachetool.cache.catalog import Connection
from cachetool.cache.draws import close_job
from cachetool.cache.history import edged
from cachetool.cache.layout import root_of
from cachetool.cluster.crew import Crew
from cachetool.cluster.engine import connect
from cachetool.cluster.placement import Replicate, Split
from cachetool.core.errors import CacheToolError, Interrupted, UsageError
from cachetool.core.nodes import driver_cache
from cachetool.core.progress import Report, silent
from cachetool.core.schema import Schema
from cachetool.proc.folders import make_folder
from cachetool.proc.task import Message
from cachetool.pull.job import PullJob, PullResult
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import source_id
from cachetool.pull.run import pull
from cachetool.sources.registry import check_place
from cachetool.stores import redact

__all__ = ["PLACEMENTS", "pull_over"]


def pull_over(
    cache: str | Path | None,
    url: str,
    options: PullOptions,
    *,
    address: str | None = None,
    placement: str = "split",
    max_size: int | str | None = None,
    min_free: int | str | None = None,
    report: Report = silent,
    notify: Callable[[str], None] = lambda line: None,
) -> PullResult:
    """Draw samples of ``url`` into the caches of all nodes of a Ray cluster; ``cache`` as in
    :mod:`cachetool.core.nodes`, caps for each of them.

    Raises what :func:`cachetool.cluster.engine.connect` and :func:`cachetool.pull.run.pull` raise.
    """
    if placement not in PLACEMENTS:
        raise UsageError(f"--placement is {' or '.join(PLACEMENTS)}, got {placement!r}")
    if options.start_early:
        raise UsageError("--start-early goes with one machine; with --on ray leave it out")
    check_place(url)
    if "://" not in url:
        url = str(Path(url).absolute())  # nodes are elsewhere
    template = str(root_of(cache).absolute())
    with connect(address, notify) as engine, open_cache(driver_cache(template)) as driver:
        size = {"max_size": max_size, "min_free": min_free}
        about = {**size, "source": source_id(url, options), "dataset": options.dataset}
        crew = Crew(engine, template, about, notify=notify)
        other_caches = _Placement(crew, size, replicate=placement == "replicate")
        return pull(driver, url, options, report=report, nodes=other_caches)


class _Placement:
    """What :class:`cachetool.pull.job.NodeCaches` is here."""

    def __init__(self, crew: Crew, size: Message, *, replicate: bool) -> None:
        self._crew, self._size, self._replicate = crew, size, replicate
        self.cap, self.format = crew.cap, crew.format

    def source(self) -> SourceRow | None:
        """The source as the node knows it that is farthest with it."""
        return max(
            (row for row, _ in self._crew.source_rows()), key=lambda row: (row.pass_number, row.frontier), default=None
        )

    def refuse(self, cache: CacheDir, id: str, url: str) -> None:
        """Raise :class:`UsageError` while another command draws from the same source into the same caches, or when they
        were filled with the other placement."""
        for node in self._crew.nodes:  # they know it, whatever became of the catalog of the whole
            refuse_other(redact(url), node.looked["replicate"], self._replicate)
        if cache.exists:
            with cache.catalog.read() as connection:
                _refuse_another(connection, id, redact(url))

    def restore(self, cache: CacheDir, id: str, scratch: Path) -> None:
        """Take the source from the node that is farthest with it, where it has grown: listed again it would have other
        numbers."""
        has = [node for node in self._crew.nodes if node.looked["segments"]]
        if not has:
            return
        first = max(has, key=lambda node: (node.looked["source"]["units"], node.looked["source"]["pass_number"]))
        row = SourceRow.from_json(first.looked["source"])
        make_folder(listing := scratch / "listing")
        self._crew.fetch_listing(first, id, listing)
        cache.declare(row.dataset, Schema.from_json(first.looked["schema"]))
        cache.add_source(replace(row, parts=(), skipped=0), listing, new=True)

    def draw(self, cache: CacheDir, pull_job: PullJob, report: Report) -> PullResult:
        """Open the job in the catalog of the whole, run it on all nodes, close it."""
        holder, options = cache.holder, pull_job.options

        def begin(connection: Connection) -> tuple[str, SourceRow]:
            holder.register(connection)
            _refuse_another(connection, pull_job.id, pull_job.prepared.url)  # that began meanwhile
            bind(connection, pull_job.id, pull_job.prepared.url, replicate=self._replicate)
            # Those that are not here are lost.
            placing.lose_others(connection, pull_job.id, [node.name for node in self._crew.nodes])
            wanted, room = pull_job.wanted, options.room
            return draws.open_job(
                connection, pull_job.id, holder=holder.id, wanted=wanted, seed=None, room=room, next_pass=False
            )  # fmt: skip

        job, source = edged(cache.catalog, cache.layout, begin)
        kind = Replicate if self._replicate else Split
        work = kind(self._crew, cache, pull_job, job, source, self._size, report)
        try:
            return work.run()
        except Interrupted:
            raise
        except CacheToolError as error:
            cache.catalog.note_error(source.url, f"{type(error).__name__}: {error}", dataset=options.dataset)
            raise
        finally:
            self._crew.stop()
            with cache.catalog.write() as connection:
                placing.release(connection, job)
                if not any(node.tally.samples or node.looked["drawn"] for node in self._crew.all):
                    unbind(connection, pull_job.id)
            edged(cache.catalog, cache.layout, lambda connection: close_job(connection, job))


def _refuse_another(connection: Connection, id: str, url: str) -> None:
    if connection.execute("SELECT 1 FROM jobs WHERE source = ?", (id,)).fetchone():
        raise UsageError(f"another pull over these nodes draws from {url} at this moment; wait for its end")
