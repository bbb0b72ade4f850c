"""``cachetool.json``: the file that marks a folder as a cache, with its layout version and its cap.

::

    missing, and the folder is empty or an unfinished new cache   ->  no cache yet: it may be made
    missing, and the folder is full of other things               ->  refused, never touched
    missing or garbled, and shards or a catalog beside it         ->  a cache that lost the file: refused, and
                                                                      made again by `verify --repair`

The file is written last when a cache is made. The catalog's cap is the valid one; the cap in this file is for a lost
catalog.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection

from cachetool.cache.catalog import Catalog
from cachetool.cache.layout import LAYOUT_VERSION, SHARD_FILE, Layout, cache_option
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.names import Id
from cachetool.proc.disk import permission_denied
from cachetool.proc.folders import fsync_folder, read_json, write_durable

__all__ = ["check", "look", "mark", "settings"]

_SHARD = re.compile(r"[0-9a-f]{16}")


def check(layout: Layout) -> bool:
    """Return True if a usable cache is here, False if nothing is. Changes nothing.

    Raises the errors of :func:`look`, and :class:`CatalogError` for a cache that lost its ``cachetool.json``.
    """
    there, wrong = look(layout)
    refuse_links(layout)
    if wrong is not None:
        raise CatalogError(f"{layout.marker} {wrong}; run: cachetool verify --repair{cache_option(layout.root)}")
    return there


def refuse_links(layout: Layout) -> None:
    """Raise :class:`CatalogError` for a cache whose folders are links."""
    for folder in layout.folders:
        # Shards would be written to, and deleted from, a place outside of the cache.
        if folder.is_symlink():
            raise CatalogError(
                f"cache {layout.root} is refused: its folder {folder.name} is a link to {os.readlink(folder)};"
                " replace the link by the folder itself, or pull into another cache"
            )


def look(layout: Layout) -> tuple[bool, str | None]:
    """Return whether a cache is here, and what is wrong with its ``cachetool.json`` (None if nothing is).

    Raises :class:`UsageError` for a file or for a folder of other things, and :class:`CatalogError` for a newer layout
    or a folder that this user may not use.
    """
    try:
        entries = os.listdir(layout.root)
    except FileNotFoundError:
        if layout.root.is_symlink():
            raise UsageError(
                f"cache {layout.root} is a link to {os.readlink(layout.root)}, which does not exist; make that folder,"
                " or choose another one with --cache"
            ) from None
        return False, None
    except NotADirectoryError:
        what = "is a file" if layout.root.exists() else "lies below a file"
        raise UsageError(f"cache {layout.root} {what}; name a folder with --cache") from None
    except PermissionError as error:
        raise permission_denied(layout.root, layout.root) from error
    except OSError as error:
        raise UsageError(f"cache {layout.root} cannot be read: {error.strerror}") from error
    # This user may list the folder but not open anything in it.
    if not os.access(layout.root, os.X_OK):
        raise permission_denied(layout.root, layout.root)
    if layout.marker.name in entries:
        wrong = _wrong(layout)
        if wrong is None or _evidence(layout, entries):
            return True, wrong
    elif not entries or _half_made(layout, entries):
        return False, None
    elif _evidence(layout, entries):
        # Another process may have been making this cache while the folder was read. Then the marker
        # exists by now.
        return True, None if layout.marker.exists() else "is missing, although its folder holds a cache"
    raise UsageError(
        f"folder {layout.root} is not a cache and not empty; choose a cache with --cache, or an empty or new folder for"
        " a new cache"
    )


def _wrong(layout: Layout) -> str | None:
    try:
        version = json.loads(read_json(layout.marker))["layout"]
        newer = bool(version > LAYOUT_VERSION)
    except IsADirectoryError:
        remedy = f"cachetool verify --repair{cache_option(layout.root)}"
        raise CatalogError(f"{layout.marker} is a folder; remove it, then run: {remedy}") from None
    except PermissionError as error:
        raise permission_denied(layout.marker, layout.root) from error
    except OSError as error:
        raise CatalogError(f"{layout.marker} cannot be read: {error.strerror}; is the disk failing?") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        # Anything may stand in a file of somebody else; deep brackets raise RecursionError.
        return "is damaged, or was not written by cachetool"
    if newer:
        raise CatalogError(
            f"cache {layout.root} was written by a newer cachetool (layout {version}, this one knows {LAYOUT_VERSION});"
            " upgrade cachetool"
        )
    return None


def _half_made(layout: Layout, entries: Collection[str]) -> bool:
    """Return True if this is a cache whose creation was interrupted or is in progress, without any data of a user."""
    own_names = (
        layout.tag.name,
        layout.catalog.name,
        f"{layout.marker.name}.",
        *(path.name for path in layout.folders),
    )
    return (
        layout.tag.name in entries
        and all(entry.startswith(own_names) for entry in entries)
        and not any(path.is_dir() and any(path.iterdir()) for path in (layout.shards, layout.listings))
        and Catalog(layout.catalog).untouched()
    )


def _evidence(layout: Layout, entries: Collection[str]) -> bool:
    """Return True if cachetool made the folder's contents: its tag beside a catalog or a listing, or a shard."""
    listed = layout.listings.is_dir() and any(layout.listings.iterdir())
    # The tag alone proves nothing, since other programs write CACHEDIR.TAG too.
    if layout.tag.name in entries and (layout.catalog.name in entries or listed):
        return True
    return layout.shards.is_dir() and any(
        Id.fits(path.name) and (path / SHARD_FILE).is_file() for path in layout.shards.iterdir()
    )


def mark(layout: Layout, **settings: int) -> None:
    """Write the marker with the settings ``max_size`` and ``min_free`` of a complete cache. Call this under the
    catalog's lock."""
    # The file beside has one name for all processes; the caller's lock keeps them apart, and a
    # killed one may have left it.
    layout.remove(layout.marker_aside)
    write_durable(layout.marker_aside, json.dumps({"layout": LAYOUT_VERSION, **settings}).encode())
    # A rename replaces the marker at once: without it a killed process could leave half a file, and
    # the cache would be refused.
    os.replace(layout.marker_aside, layout.marker)
    fsync_folder(layout.root)


def settings(layout: Layout) -> dict[str, int]:
    """Return the settings that :func:`mark` last wrote, as far as the file can be read."""
    try:
        values = json.loads(read_json(layout.marker))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: values[name] for name in ("max_size", "min_free") if isinstance(values.get(name), int)}
