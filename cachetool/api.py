"""The library's front: a cache with the verbs that the command line has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cachetool.cache import CacheDir, Shard
from cachetool.cache.layout import cache_option
from cachetool.cache.opening import open_root
from cachetool.core.errors import UsageError
from cachetool.core.nodes import PLACE
from cachetool.core.progress import Report, silent
from cachetool.core.text import shown
from cachetool.core.units import parse_choice, parse_text, parse_whole
from cachetool.proc.disk import parse_location
from cachetool.proc.task import Engine

if TYPE_CHECKING:
    from cachetool.conversion.run import ConvertResult
    from cachetool.pull.run import PullResult

__all__ = ["Cache", "convert", "find_shard", "open_cache", "read_sample", "runs_on_cluster"]


class Cache(CacheDir):
    """A cache folder with its verbs. Made by :func:`open_cache`. A name with ``{node}`` in it stands for one folder on
    each node of a cluster."""

    asked: Mapping[str, Any] = MappingProxyType({"max_size": None, "min_free": None, "notify": None})
    """What it was opened with."""

    def pull(
        self,
        source: str | os.PathLike[str],
        *,
        to: str | None = None,
        samples: int | None = None,
        everything: bool = False,
        follow: bool = False,
        dataset: str = "default",
        seed: int | None = None,
        order: str | None = None,
        refresh: bool = False,
        start_early: bool = False,
        workers: int = 2,
        max_rate: int | str | None = None,
        shard_size: int | str | None = None,
        first_shard_after: float | str | None = 10.0,
        policy: str = "oldest",
        min_epochs: int = 0,
        on_error: str = "error",
        wait: float | str = 60.0,
        renew: float | str = 0.1,
        fields: Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        stem: str | None = None,
        decode: str | None = None,
        resize: int | str | tuple[int, int] | None = None,
        label_from_folder: bool | str = False,
        read_as: str | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        key: bool = True,
        value_format: str | None = None,
        follow_links: bool = False,
        concurrency: int | None = None,
        on: str = "local",
        address: str | None = None,
        placement: str | None = None,
        progress: Report = silent,
    ) -> PullResult:
        """Draw samples of ``source`` (a folder, or an s3, gs, az or http URL) into this cache.

        Without ``samples``, ``everything`` or ``follow`` until the cache is full or the source at its end. The draw is
        random, without repeats, decided by ``seed`` alone. Arguments are those of ``cachetool pull``; errors are those
        of :func:`cachetool.pull.run.pull`. ``on="ray"`` draws into the caches of all nodes of the Ray cluster at
        ``address``: :func:`cachetool.cluster.pull.pull_over`.
        """
        from cachetool.pull.options import PullOptions
        from cachetool.pull.run import pull, pull_and_follow

        options = PullOptions.of(
            to=to, samples=samples, everything=everything, follow=follow, dataset=dataset, seed=seed, order=order,
            refresh=refresh, start_early=start_early, workers=workers, max_rate=max_rate, shard_size=shard_size,
            first_shard_after=first_shard_after, policy=policy, min_epochs=min_epochs, on_error=on_error, wait=wait,
            renew=renew, fields=fields, rename=rename, stem=stem, decode=decode, resize=resize,
            label_from_folder=label_from_folder, read_as=read_as, include=include, exclude=exclude, key=key,
            value_format=value_format, follow_links=follow_links, concurrency=concurrency,
        )  # fmt: skip
        source, options = options.at(parse_location(source, what="source="))
        if runs_on_cluster(on, self.root, address=address, placement=placement):
            from cachetool.cluster.pull import pull_over

            notify = self.asked["notify"] or (lambda line: None)
            size = {name: self.asked[name] for name in ("max_size", "min_free")}
            return pull_over(
                self.root, source, options, address=address, placement=placement or "split", **size,
                report=progress, notify=notify,
            )  # fmt: skip
        if options.follow:
            notify = self.asked["notify"] or (lambda line: None)
            return pull_and_follow(self, source, options, report=progress, notify=notify)
        return pull(self, source, options, report=progress)

    def convert(
        self,
        source: str | Path | None = None,
        *,
        to: str,
        out: str | Path | None = None,
        dataset: str | None = None,
        shard_size: int | str | None = None,
        compression: str | None = None,
        workers: int = 2,
        verify: bool = False,
        wait: float | str = 60.0,
        on_error: str = "error",
        progress: Report = silent,
        **files: Any,
    ) -> ConvertResult:
        """Replace a dataset's shards by shards in format ``to``; with ``out`` write plain files there instead.

        ``source``, a file, a folder or a URL, needs ``out``: the plain files are then made of it instead of the
        cache's shards. ``files`` are the fields of :class:`~cachetool.sources.SourceOptions`: fields, rename, stem,
        decode, resize, label_from_folder, key, read_as, include, exclude, value_format, follow_links; and ``samples``,
        the first dimension of the arrays to take. Errors are those of :func:`cachetool.conversion.run.convert`.
        """
        import cachetool.conversion.run as conversion

        options = conversion.ConvertOptions(
            to,
            dataset=dataset,
            shard_size=shard_size,
            compression=compression,
            workers=workers,
            verify=verify,
            wait=wait,
            on_error=on_error,
            files=conversion.source_options(**files),
        )
        return conversion.convert(
            options, cache=self, source=source, out=conversion.output_folder(out), report=progress
        )


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
        return True
    for name, value in only.items():
        if value is not None:
            raise UsageError(f"--{name} goes with --on ray; add that, or leave it out")
    if PLACE in str(cache):
        raise UsageError(f"cache {cache} is one folder for each node; add --on ray, or name one folder")
    return False


def convert(
    source: str | Path | None = None,
    *,
    to: str,
    cache: str | Path | None = None,
    out: str | Path | None = None,
    max_size: int | str | None = None,
    notify: Callable[[str], None] | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> ConvertResult:
    """Convert files into files, or open ``cache``, which must exist, and do what :meth:`Cache.convert` does.

    With ``source`` and ``out`` no cache is touched, and none may be named; the files are then written by ``engine``,
    or by processes here. ``source`` without ``out`` is refused: ``Cache.pull`` brings samples into a cache.
    ``max_size`` is the cap of the cache from now on; ``notify`` hears that which a new cache got. Raises
    :class:`UsageError` for a cache beside ``out``; otherwise errors are those of
    :func:`cachetool.conversion.run.convert`.
    """
    if source is not None and out is not None:
        if cache is not None or max_size is not None:
            name = "--max-size" if cache is None else "--cache"
            raise UsageError(
                f"{name} has no part in INPUT with --out, which makes plain files of it; leave one of the two out"
            )
        plain_options = {name: options.pop(name) for name in _PLAIN if name in options}
        report = options.pop("progress", silent)
        import cachetool.conversion.run as conversion

        made_of = conversion.source_options(**options)
        conversion_options = conversion.ConvertOptions(to, files=made_of, **plain_options)
        return conversion.convert(
            conversion_options, source=source, out=conversion.output_folder(out), report=report, engine=engine
        )
    if source is not None:
        from cachetool.conversion.run import needs_out

        raise needs_out(source, cache)
    if out is not None and max_size is not None:
        raise UsageError("--max-size has no part in --out, which takes nothing into a cache; leave it out")
    with open_cache(cache, max_size=max_size, create=False, notify=notify) as opened:
        return opened.convert(to=to, out=out, **options)


_PLAIN = ("dataset", "shard_size", "compression", "workers", "verify", "wait", "on_error")


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
