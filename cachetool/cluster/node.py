"""Tasks of a pull over several nodes, on a node: targets of :mod:`cachetool.proc`.

::

    look      the cap of the cache, and what it holds of the source       changes nothing
    listing   the files of the listing of a source, in pieces
    assign    the parts that the cache draws, while a pull draws them
    draw      a pull into the cache, as on one machine
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cachetool.cache import CacheDir, SourceRow, draws, open_cache, own_parts
from cachetool.cache.growth import grow_source
from cachetool.cache.listings import segments
from cachetool.cluster.verbs import reporting
from cachetool.core.errors import UsageError
from cachetool.proc.task import Channel, Message
from cachetool.pull.options import PullOptions
from cachetool.pull.prepare import format_of
from cachetool.pull.run import pull_within
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import open_source
from cachetool.sources.segments import SegmentedListing, segment_name

__all__ = ["assign", "draw", "listing", "look"]

_PIECE = 2**20


def look(
    channel: Channel,
    *,
    root: str,
    max_size: int | str | None,
    min_free: int | str | None,
    source: str,
    dataset: str,
) -> Message:
    """What there is. Raises what :func:`cachetool.cache.open_cache` raises."""
    with open_cache(root, max_size=max_size, min_free=min_free) as cache:
        found: Message = {
            "cap": cache.max_size,
            "format": format_of(cache, dataset),
            "place": _place(Path(root)),
            "identity": None,
            "source": None,
        }
        if not cache.exists:
            return found
        with cache.catalog.read() as connection:
            found["identity"] = connection.execute("SELECT identity FROM cache").fetchone()[0]
            row = draws.source_row(connection, source)
            if row is None or not cache.listing(source).exists():
                return found
            held = own_parts.held(connection, row)
        return found | {
            "source": row.to_json(),
            "segments": segments(cache.listing(source)),
            "schema": cache.schema(dataset).to_json(),
            "parts": [[part, samples, done] for part, (samples, done) in held.items()],
        }


def listing(channel: Channel, *, root: str, source: str) -> Message:
    """Send the files of a listing: {"name", "at", "piece"}, the last of these in base 64."""
    with CacheDir(Path(root)) as cache:
        folder = cache.listing(source)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                for at in range(0, max(1, path.stat().st_size), _PIECE):
                    piece = base64.b64encode(file.read(_PIECE)).decode()
                    channel.send({"name": str(path.relative_to(folder)), "at": at, "piece": piece})
    return {}


def assign(channel: Channel, *, root: str, url: str, source: str, parts: Sequence[int]) -> Message:
    """Have the cache draw these parts of a source and no other; gives how many samples of others went."""
    with CacheDir(Path(root)) as cache:
        row = cache.source(source)
        assert row is not None
        options = SourceOptions.from_json(row.options)
        with closing(open_source(url, cache.listing(source), options, units=row.units)) as opened:
            sizes = {
                part: len(opened.order(seed=row.seed, pass_number=0, sequential=row.sequential, part=part, cut=row.cut))
                for part in parts
            }
            released = own_parts.assign(cache, source, row.cut, sizes, opened.segments, repart=True, beside=True)
    return {"released": released}


def draw(
    channel: Channel,
    *,
    root: str,
    max_size: int | str | None,
    min_free: int | str | None,
    url: str,
    source: str,
    options: Message,
    next_pass: bool,
    pace: str | None,
    seconds: float,
) -> Message:
    """Pull into the cache of this node; reports are ``seconds`` apart.

    Gives ``result``, the fields of :class:`~cachetool.pull.job.PullResult`, and ``full``: why there is no room for
    more, empty while there is.
    """
    parsed = PullOptions.from_json(options)
    assert parsed.listing is not None
    with open_cache(
        root, max_size=max_size, min_free=min_free, notify=lambda line: channel.send({"line": line})
    ) as cache:
        row = cache.source(source)
        if row is not None and cache.listing(source).exists():
            _grow(cache, row, Path(parsed.listing, source))
        result, blocked = pull_within(
            cache, url, parsed, report=reporting(channel, seconds=seconds), next_pass=next_pass,
            pace_file=None if pace is None else Path(pace),
        )  # fmt: skip
    full = result.reason if result.reason == "cache full" else ""
    if blocked is not None:
        full = str(blocked).partition("\n")[0].partition(": ")[2].rstrip(";")
    return {"result": result.as_dict(), "full": full}


def _grow(cache: CacheDir, row: SourceRow, listing: Path) -> None:
    """Take in the segments that a listing has beyond that of the cache. Raises :class:`UsageError` when the others
    differ: the numbers of what was drawn would mean something else."""
    theirs, own = SegmentedListing.open(listing).parts, SegmentedListing.open(cache.listing(row.id), units=row.units)
    if [part.identity for part in own.parts] != [part.identity for part in theirs[: len(own.parts)]]:
        raise UsageError(
            f"the cache {cache.root} has another listing of {row.url} than the others; give it an empty folder, or"
            " draw into another --dataset"
        )
    for number in range(len(own.parts), len(theirs)):
        grown = SegmentedListing(theirs[: number + 1])
        row = grow_source(
            cache, row, listing / segment_name(number), segment_name(number),
            units=grown.units, identity=grown.identity, complete=True,
        )  # fmt: skip


def _place(root: Path) -> list[object]:
    """By which a folder that may not be there yet is known: two nodes that name the same one share it."""
    there = next(path for path in (root, *root.parents) if path.exists())
    status = os.stat(there)
    return [socket.gethostname(), status.st_dev, status.st_ino, str(root.relative_to(there))]
