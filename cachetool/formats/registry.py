"""Formats by name. Names map to lazy targets, so that naming a format imports neither it nor its library.

A package of its own adds a format with an entry point in the group ``cachetool.formats``::

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
"""The entry point group that adds formats."""

_BUILT_IN = {
    "lmdb": "cachetool.formats.lmdb:LMDB",
    "hdf5": "cachetool.formats.hdf5:HDF5",
    "zarr": "cachetool.formats.zarr:Zarr",
    "tfrecord": "cachetool.formats.tfrecord:TFRecord",
}
# Suffixes are listed here so that a look-up by suffix imports one format, not all; the first is the one we write.
_SUFFIXES = {
    "lmdb": (".lmdb",),
    "hdf5": (".h5", ".hdf5"),
    "zarr": (".zarr",),
    "tfrecord": (".tfrecord", ".tfrecords"),
}


@functools.cache
def _targets() -> dict[str, str]:
    """Every name and its ``module:Class``; a name of ours cannot be taken by somebody else's entry point."""
    from importlib.metadata import entry_points  # 40 ms, which loaders of uncompressed shards do without

    targets = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return _BUILT_IN | {name: targets[name] for name in sorted(targets) if name not in _BUILT_IN}


def format_names() -> tuple[str, ...]:
    """The names of all formats that can be asked for, ours first."""
    return tuple(_targets())


@functools.cache
def get_format(name: str) -> Format:
    """The format called ``name``. Raises :class:`UsageError` listing the known names for an unknown one."""
    target = _targets().get(name) if isinstance(name, str) else None
    if target is None:
        raise UsageError(f"unknown format {shown(name)}; use one of {', '.join(format_names())}")
    module, _, attribute = target.partition(":")
    try:
        format_ = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"format {name!r} cannot be loaded from {target}: {error}") from error
    return cast(Format, format_)


def format_for(path: Path | str) -> Format:
    """The format that files called like ``path`` are in, by suffix. Raises :class:`UsageError` when none is."""
    suffix = Path(path).suffix.lower()
    for name in format_names():
        if suffix and suffix in (_SUFFIXES.get(name) or (get_format(name).suffix,)):
            return get_format(name)
    suffixes = ", ".join(s for name in format_names() for s in _SUFFIXES.get(name, ()))
    raise UsageError(f"cannot tell the format of {Path(path).name!r} by its suffix; known are {suffixes}")
