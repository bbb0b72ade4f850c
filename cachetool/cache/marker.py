"""``cachetool.json``: the file that says that a folder is a cache, of which layout, and under which cap.

::

    not there, and the folder empty, or of a cache whose making was cut off    ->  no cache yet: it may be made
    not there, and the folder full of other things                             ->  refused, never touched
    not there or garbled, and shards or a catalog beside it                    ->  a cache that lost it: refused, and
                                                                                   made again by `verify --repair`
It is written last when a cache is made. The cap that counts is the catalog's; this one is for when the catalog is lost.
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
    """Whether a usable cache is here; False when nothing is. Changes nothing.

    Raises what :func:`look` raises, and :class:`CatalogError` for a cache that lost its ``cachetool.json``.
    """
    there, wrong = look(layout)
    refuse_links(layout)
    if wrong is not None:
        raise CatalogError(f"{layout.marker} {wrong}; run: cachetool verify --repair{cache_option(layout.root)}")
    return there


def refuse_links(layout: Layout) -> None:
    """Raise :class:`CatalogError` for a cache whose folders are links: what is written and removed there would lie
    outside of it."""
    for folder in layout.folders:
        if folder.is_symlink():
            raise CatalogError(
                f"cache {layout.root} is refused: its {folder.name} is a link to {os.readlink(folder)}, which is no"
                " part of the cache; put the folder itself in its place, or pull into another cache"
            )


def look(layout: Layout) -> tuple[bool, str | None]:
    """Whether a cache is here, and what is wrong with its ``cachetool.json``: None when that is as it should be.

    Raises :class:`UsageError` for a file or a folder of other things, :class:`CatalogError` for a newer layout or a
    folder that this user may not use.
    """
    try:
        entries = os.listdir(layout.root)
    except FileNotFoundError:
        if layout.root.is_symlink():
            raise UsageError(
                f"cache {layout.root} is a link to {os.readlink(layout.root)}, which is not there; make that folder, or"
                " name another with --cache"
            ) from None
        return False, None
    except NotADirectoryError:
        what = "is a file" if layout.root.exists() else "lies below a file"
        raise UsageError(f"cache {layout.root} {what}; name a folder with --cache") from None
    except PermissionError as error:
        raise permission_denied(layout.root, layout.root) from error
    except OSError as error:
        raise UsageError(f"cache {layout.root} cannot be read: {error.strerror}") from error
    if not os.access(layout.root, os.X_OK):  # it may be listed, and no more
        raise permission_denied(layout.root, layout.root)
    if layout.marker.name in entries:
        wrong = _wrong(layout)
        if wrong is None or _evidence(layout, entries):
            return True, wrong
    elif not entries or _half_made(layout, entries):
        return False, None
    elif _evidence(layout, entries):
        # A cache that was being made while the folder was read has its marker by now.
        return True, None if layout.marker.exists() else "is missing, though there is a cache beside it"
    raise UsageError(
        f"folder {layout.root} holds other things and is no cache; name one with --cache, or an empty or new folder for"
        " a new one"
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
        return "is not what cachetool writes"
    if newer:
        raise CatalogError(
            f"cache {layout.root} was written by a newer cachetool (layout {version}, this one knows {LAYOUT_VERSION});"
            " upgrade cachetool"
        )
    return None


def _half_made(layout: Layout, entries: Collection[str]) -> bool:
    """Whether this is a cache whose making was cut off, or is under way: nothing of a user's is in it yet."""
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
    """Whether what lies in the folder is of our making: our tag beside a catalog or a listing, or a shard."""
    listed = layout.listings.is_dir() and any(layout.listings.iterdir())
    if layout.tag.name in entries and (layout.catalog.name in entries or listed):
        return True
    return layout.shards.is_dir() and any(
        Id.fits(path.name) and (path / SHARD_FILE).is_file() for path in layout.shards.iterdir()
    )


def mark(layout: Layout, **settings: int) -> None:
    """Say that a whole cache is here, with the settings (``max_size``, ``min_free``) that it has; under the catalog's
    lock: the file beside is one for all."""
    layout.remove(layout.marker_aside)
    write_durable(layout.marker_aside, json.dumps({"layout": LAYOUT_VERSION, **settings}).encode())
    os.replace(layout.marker_aside, layout.marker)
    fsync_folder(layout.root)


def settings(layout: Layout) -> dict[str, int]:
    """What :func:`mark` was last told; as far as it can be read."""
    try:
        values = json.loads(read_json(layout.marker))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: values[name] for name in ("max_size", "min_free") if isinstance(values.get(name), int)}
