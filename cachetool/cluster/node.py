"""Tasks of a pull over several nodes that run on a node, as targets of :mod:`cachetool.proc`.

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

# Bytes of a piece, which travels as base 64 in one message of a child, not as an object of Ray.
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
    """Return the cap of the cache and what it holds of the source. Raises the errors of
    :func:`cachetool.cache.open_cache`."""
    with open_cache(root, max_size=max_size, min_free=min_free) as cache:
        found: Message = {
            "cap": cache.max_size,
            "format": format_of(cache, dataset),
            "place": _place(Path(root)),
            "identity": None,
            "source": None,
        }
        # Any use of the catalog would put a new cache on disk, and a look must change nothing.
        if not cache.exists:
            return found
        with cache.catalog.read() as connection:
            found["identity"] = connection.execute("SELECT identity FROM cache").fetchone()[0]
            row = draws.source_row(connection, source)
            # Without its listing the row's positions mean nothing, so the node counts as one
            # without the source.
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
    """Send the files of a listing: {"name", "at", "piece"}, with the piece in base 64."""
    with CacheDir(Path(root)) as cache:
        folder = cache.listing(source)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                # At least one piece, so that an empty file arrives as well.
                for at in range(0, max(1, path.stat().st_size), _PIECE):
                    piece = base64.b64encode(file.read(_PIECE)).decode()
                    channel.send({"name": str(path.relative_to(folder)), "at": at, "piece": piece})
    return {}


def assign(channel: Channel, *, root: str, url: str, source: str, parts: Sequence[int]) -> Message:
    """Let the cache draw these parts of a source and no others; return the number of samples that are lost."""
    with CacheDir(Path(root)) as cache:
        row = cache.source(source)
        assert row is not None
        options = SourceOptions.from_json(row.options)
        with closing(open_source(url, cache.listing(source), options, units=row.units)) as opened:
            sizes = {
                part: len(opened.order(seed=row.seed, pass_number=0, sequential=row.sequential, part=part, cut=row.cut))
                for part in parts
            }
            # The driver has dealt these parts with a view of all caches. So samples of other parts
            # may go (`repart`), also while a pull draws here (`beside`), which meets ClaimGone and
            # claims again.
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
    """Pull into the cache of this node. Reports are ``seconds`` apart.

    Returns ``result``, the fields of :class:`~cachetool.pull.job.PullResult`, and ``full``: the reason why the cache
    has no space for more, empty while it has room.
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
        # Only the middle of the message: the driver puts the name of the node before it, and its
        # own advice behind it.
        full = str(blocked).partition("\n")[0].partition(": ")[2].rstrip(";")
    return {"result": result.as_dict(), "full": full}


def _grow(cache: CacheDir, row: SourceRow, listing: Path) -> None:
    """Add the segments that a listing has beyond the cache's own listing. Raises :class:`UsageError` when the common
    segments differ."""
    theirs, own = SegmentedListing.open(listing).parts, SegmentedListing.open(cache.listing(row.id), units=row.units)
    # In another listing the same positions mean other units, so the draws that this cache has done
    # would be counted for the wrong samples.
    if [part.identity for part in own.parts] != [part.identity for part in theirs[: len(own.parts)]]:
        raise UsageError(
            f"the cache {cache.root} has another listing of {row.url} than the other nodes; give this node an"
            " empty cache folder, or pull into another --dataset"
        )
    # One segment at a time, because each one is a transaction and the units of the next one come
    # behind it.
    for number in range(len(own.parts), len(theirs)):
        grown = SegmentedListing(theirs[: number + 1])
        row = grow_source(
            cache, row, listing / segment_name(number), segment_name(number),
            units=grown.units, identity=grown.identity, complete=True,
        )  # fmt: skip


def _place(root: Path) -> list[object]:
    """Return an identification of a folder that may not exist yet. Two nodes with the same one share the folder."""
    # By host, device and inode of the nearest folder that exists, because two paths may lead to one
    # folder.
    there = next(path for path in (root, *root.parents) if path.exists())
    status = os.stat(there)
    return [socket.gethostname(), status.st_dev, status.st_ino, str(root.relative_to(there))]
