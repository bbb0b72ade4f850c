"""The registry of formats by name. A name maps to a lazy target, so naming a format imports neither it nor its library.

A package adds a format with an entry point in the group ``cachetool.formats``::

    [project.entry-points."cachetool.formats"]
    myformat = "mypackage.myformat:MyFormat"      # a class with the attributes of cachetool.formats.base.Format
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import cast

from cachetool.core.errors import UsageError
from cachetool.core.text import shown
from cachetool.formats.base import Format

__all__ = ["ENTRY_POINTS", "format_for", "format_names", "get_format"]

ENTRY_POINTS = "cachetool.formats"
"""The group of entry points that add formats."""

_BUILT_IN = {
    "lmdb": "cachetool.formats.lmdb:LMDB",
    "hdf5": "cachetool.formats.hdf5:HDF5",
    "zarr": "cachetool.formats.zarr:Zarr",
    "tfrecord": "cachetool.formats.tfrecord:TFRecord",
}
# Suffixes are listed here so that a look-up by suffix imports one format, not all. Each new import costs the start of a
# command: h5py 88 ms, zarr 280 ms. The first suffix is the one that cachetool writes, the others come from other tools.
_SUFFIXES = {
    "lmdb": (".lmdb",),
    "hdf5": (".h5", ".hdf5"),
    "zarr": (".zarr",),
    "tfrecord": (".tfrecord", ".tfrecords"),
}


@functools.cache
def _targets() -> dict[str, str]:
    """Return every format's name and its ``module:Class``."""
    from importlib.metadata import entry_points

    # A search of all installed packages takes 40 ms. Loaders read uncompressed shards by their extents and never come
    # here, so they do not pay for it.
    targets = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    # A name of ours wins over an entry point: a foreign package must not take over how the shards of an existing cache
    # are read.
    return _BUILT_IN | {name: targets[name] for name in sorted(targets) if name not in _BUILT_IN}


def format_names() -> tuple[str, ...]:
    """Return the names of all formats.

    Returns:
        Built-in names first, then those of entry points in alphabetical order.

    Example:
        >>> format_names()[:4]
        ('lmdb', 'hdf5', 'zarr', 'tfrecord')
    """
    return tuple(_targets())


@functools.cache
def get_format(name: str) -> Format:
    """Return the format with this name.

    Args:
        name: Name of a built-in format or of an entry point.

    Returns:
        The format object. Every call in a process returns the same one.

    Raises:
        UsageError: No format has this name, or its module cannot be imported. The message lists the names that exist.

    Example:
        >>> get_format("lmdb").suffix
        '.lmdb'
    """
    # The name may come from a user's keyword or a foreign catalog, so it may be of any type, also one that cannot be
    # hashed.
    target = _targets().get(name) if isinstance(name, str) else None
    if target is None:
        raise UsageError(f"unknown format {shown(name)}; use one of {', '.join(format_names())}")
    module, _, attribute = target.partition(":")
    try:
        format_ = getattr(importlib.import_module(module), attribute)()
    # The entry point belongs to another package. A user must learn which format fails, not only see that package's
    # traceback.
    except (ImportError, AttributeError) as error:
        raise UsageError(f"format {name!r} cannot be loaded from {target}: {error}") from error
    return cast(Format, format_)


def format_for(path: Path | str) -> Format:
    """Return the format of a file by its suffix.

    Args:
        path: Path or name of a data file. Upper and lower case of the suffix are the same.

    Returns:
        The format object. The file is not opened.

    Raises:
        UsageError: No format has this suffix. The message lists the suffixes that exist.

    Example:
        >>> format_for("part-00000.hdf5").name
        'hdf5'
    """
    suffix = Path(path).suffix.lower()
    for name in format_names():
        if suffix and suffix in (_SUFFIXES.get(name) or (get_format(name).suffix,)):
            return get_format(name)
    suffixes = ", ".join(s for name in format_names() for s in _SUFFIXES.get(name, ()))
    raise UsageError(f"unknown suffix of {Path(path).name!r}; choose one of {suffixes}")
