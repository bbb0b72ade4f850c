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
    """A cache folder: pull samples into it, convert, evict and inspect them. Made by :func:`open_cache`.

    A cache is a context manager. Threads may share it, and a forked child may use it. A name of a folder with
    ``{node}`` in it stands for one folder on each node of a Ray cluster. A new cache is written to disk at the first
    use of its catalog, so a call that fails before leaves nothing behind.

    Example:
        >>> import cachetool
        >>> with cachetool.open_cache("data/new", max_size="20MB") as cache:
        ...     result = cache.pull("s3://bucket/volumes/", samples=100)
        ...     cache.stats().samples
        100
    """

    asked: Mapping[str, Any] = MappingProxyType({"max_size": None, "min_free": None, "notify": None})
    """The arguments with which the cache was opened."""

    @takes(PullCall)
    def pull(self, source: str | os.PathLike[str], options: PullCall) -> PullResult:
        """Draw samples from a source into this cache.

        Without ``samples``, ``all`` or ``follow`` the pull ends when the cache is full or the source is at its end. The
        draw is random and without repeats; ``seed`` decides its order. Options and their defaults are those of
        ``cachetool pull``.

        Args:
            source: A folder, a file, or a URL: ``s3://``, ``gs://``, ``az://``, ``https://``, ``sftp://``, ``hf://``.

        Returns:
            A :class:`~cachetool.pull.job.PullResult`: the number of samples, shards and bytes, and why the pull
            stopped.

        Raises:
            UsageError: An option cannot be used, or does not fit the cache or the dataset.
            SourceError: The store, the listing or an object cannot be read (:class:`NotFound`, :class:`AccessDenied`,
                :class:`Unreachable`, :class:`BadObject`).
            CapTooSmall: The cap cannot hold one shard; raised before anything is fetched.
            CapBlocked: Fewer samples than asked for fit, because readers hold the room.
            CapacityError: The disk is full.
            Interrupted: The pull was stopped by Ctrl-C or SIGTERM; committed shards stay.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/new", max_size="20MB") as cache:
            ...     result = cache.pull("s3://bucket/volumes/", samples=100, to="hdf5")
            >>> result.samples, result.format
            (100, 'hdf5')
        """
        return pull_into(self, source, options)

    @takes(ConvertCall)
    def convert(self, options: ConvertCall) -> ConvertResult:
        """Write the shards of a dataset in another format, bit for bit: in place, or with ``out`` as plain files.

        Options that say how files are read are refused, because the samples of a cache are taken as they are.

        Returns:
            A :class:`~cachetool.conversion.run.ConvertResult`: the number of shards, samples and bytes, and the digest.

        Raises:
            UsageError: An option cannot be used, or there is no such dataset.
            CapacityError: There is no space for the new shards (:class:`CapBlocked`: readers hold it).
            CorruptError: A shard is damaged; the message names it.

        Example:
            >>> import cachetool
            >>> with cachetool.open_cache("data/cache") as cache:
            ...     result = cache.convert(to="zarr")
            >>> result.samples, result.to
            (24, 'zarr')
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
            raise UsageError("--part and --listing are for nodes that pull without a cluster; leave out --on ray")
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
    """Open a cache folder, or prepare a new one.

    Unfinished work of dead processes is completed first.

    Args:
        root: The folder. Default: ``$CACHETOOL_CACHE``, otherwise the cache folder of this user on this platform.
        max_size: The cap: most bytes that the cache folder may take, a number or text such as ``"50GB"``. Another cap
            for an existing cache takes effect with the first write. Default: the cap that the cache has; half of the
            free disk for a new cache.
        min_free: Bytes of the disk that pulls leave free, a number or text. Default: the value that the cache has; 0
            for a new cache.
        create: False: raise an error if there is no cache. Default: True.
        notify: A function that gets one line of text for the user, such as the cap of a new cache. Default: no lines.

    Returns:
        A :class:`Cache`.

    Raises:
        UsageError: The folder is not a cache, or others may write to it; there is no cache and ``create`` is False; or
            another process uses the cache, so that the cap cannot change.
        CatalogError: A newer version of cachetool made the cache, or the cache lost files of its own.
        CapTooSmall: The cap is too small for the cache's own files, or below the bytes in use.

    Example:
        >>> import cachetool
        >>> with cachetool.open_cache("data/new", max_size="50GB") as cache:
        ...     cache.max_size
        50000000000
    """
    cache = open_root(Cache, root, max_size=max_size, min_free=min_free, create=create, notify=notify)
    cache.asked = {"max_size": max_size, "min_free": min_free, "notify": notify}
    return cache


def runs_on_cluster(on: str, cache: str | Path | None, **only: object) -> bool:
    """Return True if a command is to run on the nodes of a cluster.

    ``only`` are options that need a cluster. Raises :class:`UsageError` for a combination that cannot be used.
    """
    parse_choice(on, ("local", "ray"), what="--on")
    if on == "ray":
        if re.search(r"[{}]", str(cache).replace(PLACE, "")):
            raise UsageError(f"cache {cache} has braces other than {PLACE}; use {PLACE} for the name of each node")
        return True
    for name, value in only.items():
        if value is not None:
            raise UsageError(f"--{name} needs --on ray; add --on ray, or leave out --{name}")
    if PLACE in str(cache):
        raise UsageError(f"cache {cache} is one folder for each node; add --on ray, or name one folder")
    return False


@takes(ConvertCall)
def convert(source: str | os.PathLike[str], options: ConvertCall) -> ConvertResult:
    """Write the samples of a file, a folder or a URL as plain files into a new folder.

    No cache is involved; to bring samples into a cache, use :meth:`Cache.pull`.

    Args:
        source: A file, a folder or a URL, as for :meth:`Cache.pull`.

    Returns:
        A :class:`~cachetool.conversion.run.ConvertResult`: the number of files, samples and bytes, and the digest.

    Raises:
        UsageError: An option cannot be used, or ``out`` is missing.
        SourceError: The input cannot be read (:class:`BadObject`: a file is damaged).
        CapacityError: The disk is full.

    Example:
        >>> import cachetool
        >>> result = cachetool.convert("s3://bucket/run7.h5", to="zarr", out="run7")
        >>> result.samples
        120
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
