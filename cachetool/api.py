"""The library's front: a cache with the verbs that the command line has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cachetool.cache import CacheDir, Shard
from cachetool.cache.layout import cache_option
from cachetool.cache.opening import open_root
from cachetool.conversion.options import ConvertCall
from cachetool.core.errors import UsageError
from cachetool.core.nodes import PLACE
from cachetool.core.options import takes
from cachetool.core.text import shown
from cachetool.core.units import parse_choice, parse_text, parse_whole
from cachetool.proc.disk import parse_location
from cachetool.pull.options import PullCall, PullOptions

if TYPE_CHECKING:
    from cachetool.conversion.run import ConvertResult
    from cachetool.pull.run import PullResult

__all__ = ["Cache", "convert", "find_shard", "open_cache", "pull_into", "read_sample", "runs_on_cluster"]


class Cache(CacheDir):
    """A cache folder with its verbs. Made by :func:`open_cache`. A name with ``{node}`` in it stands for one folder on
    each node of a cluster."""

    asked: Mapping[str, Any] = MappingProxyType({"max_size": None, "min_free": None, "notify": None})
    """What it was opened with."""

    @takes(PullCall)
    def pull(self, source: str | os.PathLike[str], options: PullCall) -> PullResult:
        """Draw samples of ``source`` (a folder, or an s3, gs, az or http URL) into this cache.

        Without ``samples``, ``all`` or ``follow`` until the cache is full or the source at its end. The draw is random,
        without repeats, decided by ``seed`` alone. Errors are those of :func:`cachetool.pull.run.pull`. ``on="ray"``
        draws into the caches of all nodes of the Ray cluster at ``address``:
        :func:`cachetool.cluster.pull.pull_over`.
        """
        return pull_into(self, source, options)

    @takes(ConvertCall)
    def convert(self, options: ConvertCall) -> ConvertResult:
        """Replace a dataset's shards by shards in format ``to``; with ``out`` write plain files there instead.

        Options that say how files are read are refused. Errors are those of :func:`cachetool.conversion.run.convert`.
        """
        from cachetool.conversion.run import convert

        return convert(options, cache=self, out=options.folder, report=options.progress)


def pull_into(cache: Cache, source: str | os.PathLike[str], options: PullCall) -> PullResult:
    """Do what :meth:`Cache.pull` is asked for."""
    from cachetool.pull.run import pull, pull_and_follow

    source, call = options.at(parse_location(source, what="source="))
    asked, notify = call.only(PullOptions), cache.asked["notify"] or (lambda line: None)
    if runs_on_cluster(call.on, cache.root, address=call.address, placement=call.placement):
        from cachetool.cluster.pull import pull_over

        if asked.part is not None or asked.listing is not None:
            raise UsageError("--part and --listing are for nodes that draw by themselves; leave out --on ray")
        size = {name: cache.asked[name] for name in ("max_size", "min_free")}
        return pull_over(
            cache.root, source, asked, address=call.address, placement=call.placement or "split", **size,
            report=call.progress, notify=notify,
        )  # fmt: skip
    if asked.follow:
        return pull_and_follow(cache, source, asked, report=call.progress, notify=notify)
    return pull(cache, source, asked, report=call.progress)


def open_cache(
    root: str | Path | None = None,
    *,
    max_size: int | str | None = None,
    min_free: int | str | None = None,
    create: bool = True,
    notify: Callable[[str], None] | None = None,
) -> Cache:
    """Open a cache folder, or prepare a new one; see :func:`cachetool.cache.open_cache` for arguments and errors."""
    cache = open_root(Cache, root, max_size=max_size, min_free=min_free, create=create, notify=notify)
    cache.asked = {"max_size": max_size, "min_free": min_free, "notify": notify}
    return cache


def runs_on_cluster(on: str, cache: str | Path | None, **only: object) -> bool:
    """Whether a verb is to run on the nodes of a cluster; ``only`` are options that have a sense there alone. Raises
    :class:`UsageError` for what goes with neither."""
    parse_choice(on, ("local", "ray"), what="--on")
    if on == "ray":
        if re.search(r"[{}]", str(cache).replace(PLACE, "")):
            raise UsageError(f"cache {cache} has braces that are not those of {PLACE}; name the folder of each node so")
        return True
    for name, value in only.items():
        if value is not None:
            raise UsageError(f"--{name} goes with --on ray; add that, or leave it out")
    if PLACE in str(cache):
        raise UsageError(f"cache {cache} is one folder for each node; add --on ray, or name one folder")
    return False


@takes(ConvertCall)
def convert(source: str | os.PathLike[str], options: ConvertCall) -> ConvertResult:
    """Write the samples of ``source``, a file, a folder or a URL, as plain files into the new folder ``out``.

    No cache is touched: :meth:`Cache.pull` brings samples into one. Errors are those of
    :func:`cachetool.conversion.run.convert`.
    """
    from cachetool.conversion.run import convert

    return convert(options, source=os.fspath(source), out=options.folder, report=options.progress)


def find_shard(cache: CacheDir, name: str) -> Shard:
    """The shard with this id or the only one whose id begins so. Raises :class:`UsageError`."""
    name = parse_text(name, what="shard=")
    matches = [shard for shard in cache.shards() if shard.id.startswith(name)]
    if len(matches) != 1:
        what = "no shard" if not matches else f"{len(matches)} shards"
        raise UsageError(
            f"cache {cache.root} has {what} with an id that begins with {shown(name)};"
            f" see: cachetool ls{cache_option(cache.root)}"
        )
    return matches[0]


def read_sample(cache: CacheDir, shard: str, index: int) -> dict[str, Any]:
    """Sample ``index`` of a shard, named by its id or the beginning of it, its checksum checked.

    Raises :class:`UsageError`, and :class:`CorruptError` naming file, sample and field.
    """
    target, index = find_shard(cache, shard), parse_whole(index, what="index=")
    if not 0 <= index < target.samples:
        raise UsageError(f"shard {target.id} has samples 0 to {target.samples - 1}, not {index}")
    import numpy as np

    from cachetool.formats import get_format
    from cachetool.formats.reading import check_values
    from cachetool.formats.shard import check_content, open_shard

    with cache.snapshot(dataset=target.dataset, peek=True):
        expected, at = check_content(target.path, target.schema, target.content), np.array([index])
        with open_shard(target.path, get_format(target.format), target.schema, digest=target.digest) as reader:
            block = reader.take(at)
            check_values(block, expected[:, at], name=str(target.data), indices=at)
            return block.sample(0)
