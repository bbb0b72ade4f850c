"""Opening of a cache by its folder's name: the root, the cap, and the checks that it may be used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cachetool.cache.catalog import Catalog
from cachetool.cache.layout import Layout, cache_option, place_of, refuse_long, refuse_loose, root_of
from cachetool.cache.marker import check, settings
from cachetool.cache.root import CacheDir
from cachetool.cache.transaction_lock import PATIENCE
from cachetool.cache.usage import least_overhead, measure
from cachetool.core.errors import CapacityError, CapTooSmall, CatalogError, UsageError
from cachetool.core.text import shown
from cachetool.core.units import format_size, parse_flag, parse_size
from cachetool.proc.disk import check_file_system, known_error

__all__ = ["open_cache", "open_root"]

C = TypeVar("C", bound=CacheDir)

_TO_LOOK = 5.0
"""Seconds that a recovery waits for its turn. After that a command that only reads continues without a recovery."""
_FULL_FIRST = "the disk will be full before the cap is reached"


def open_cache(
    root: str | Path | None = None,
    *,
    max_size: int | str | None = None,
    min_free: int | str | None = None,
    create: bool = True,
    notify: Callable[[str], None] | None = None,
) -> CacheDir:
    """Open a cache folder, or prepare a new one, as a :class:`CacheDir` without the commands ``pull`` and ``convert``.

    Arguments and errors are those of :func:`cachetool.open_cache`.
    """
    return open_root(CacheDir, root, max_size=max_size, min_free=min_free, create=create, notify=notify)


def open_root(
    kind: type[C],
    root: str | Path | None,
    *,
    max_size: int | str | None,
    min_free: int | str | None,
    create: bool,
    notify: Callable[[str], None] | None,
) -> C:
    """Open a cache as an object of ``kind``, a class made of :class:`CacheDir`. See :func:`open_cache`."""
    size = None if max_size is None else parse_size(max_size, what="--max-size")
    floor = None if min_free is None else parse_size(min_free, what="--min-free")
    if notify is not None and not callable(notify):
        raise UsageError(f"notify={shown(notify)} cannot be used: it must be a function that takes a line of text")
    create = parse_flag(create, what="create=")
    path = place_of(root_of(root))
    refuse_long(path)
    # Before the catalog is opened: on a network file system its locks cannot be relied on.
    check_file_system(path, notify)
    refuse_loose(path)
    layout = Layout(path)
    exists = check(layout)
    if not exists:
        if not create:
            raise UsageError(f"there is no cache at {path}; fill one with: cachetool pull SOURCE{cache_option(path)}")
        layout.refuse_place()
        size = _left(layout) if size is None else size
    free = layout.free_disk()
    if size is not None and not exists and size > free:
        notify = _explained(notify, f"more than the {format_size(free)} that the disk has free: {_FULL_FIRST}")
    if size is None and not exists:
        size, what = free // 2, f"half of the free disk of {path}"
        notify = _explained(notify, "half of the free disk; --max-size sets another")
    else:
        what = "--max-size"
    if size is not None:
        least = least_overhead(layout)
        if size < least:
            raise CapTooSmall(
                f"{what} is {format_size(size)}, too small for the cache's own files ({format_size(least)}) and one"
                f" shard; {'raise --max-size' if what == '--max-size' else 'free some space'}"
            )
    cache = kind(path, exists=exists, max_size=size, min_free=floor, notify=notify)
    try:
        if exists:
            # Another process may make a cache, fail, and remove it again while this one has it
            # open. Then this one makes it anew with the settings that it had.
            if create and (saved := settings(layout)).keys() == {"max_size", "min_free"}:
                cache.make_again(saved)
            _recover(cache, notify, create=create)
            if size is not None and size != cache.catalog.number("max_size"):
                # Imported here, because a process that only reads never changes a cap.
                from cachetool.cache.capping import refuse

                # A check only: the cap is written with the first use of `cache.holder`. So a
                # command that fails before leaves the cap as it was.
                with cache.catalog.write() as connection:
                    refuse(connection, layout, size)
                    left = size - measure(connection, layout).total
                before = cache.catalog.number("max_size")
                if notify is not None and size < before:
                    notify(f"the cap of {path} is lowered from {format_size(before)} to {format_size(size)}")
                if notify is not None and left > free:
                    more = (
                        f"{format_size(left)} more than the cache uses now, but the disk has {format_size(free)} free"
                    )
                    notify(f"the cap of {path} becomes {format_size(size)}, {more}: {_FULL_FIRST}")
    except BaseException:
        cache.close()
        raise
    return cache


def _left(layout: Layout) -> int | None:
    """Return the cap of a cache whose creation was interrupted and is continued now, or None."""
    if not layout.catalog.exists():
        return None
    with contextlib.suppress(CapacityError, CatalogError), contextlib.closing(Catalog(layout.catalog)) as catalog:
        return catalog.number("max_size")
    return None


def _explained(notify: Callable[[str], None] | None, words: str) -> Callable[[str], None] | None:
    """Return ``notify`` with a few words about the cap added. It is called once the cache is really made."""
    if notify is None:
        return None
    return lambda line: notify(f"{line}: {words}")


def _recover(cache: CacheDir, notify: Callable[[str], None] | None, *, create: bool) -> None:
    try:
        cache.recover(patience=PATIENCE if create else _TO_LOOK)
    except CatalogError as error:
        # A command that only reads continues without the recovery; a writer must not, because
        # reservations of dead processes would count against the cap.
        if create or not error.readable:
            raise
        if notify is not None:
            notify(f"warning: {error}")
    except (CapacityError, OSError) as error:
        # A full or read-only disk: no recovery is possible, but the shards can still be read.
        if notify is not None:
            notify(f"warning: {known_error(error) or error}")
