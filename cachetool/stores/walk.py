"""Rules for walking through the folders of a file system: what a listing leaves out and counts.

A Zarr reads a missing chunk as fill values, and nobody would notice. So a link in the place of a chunk is an error,
while other links are only left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from cachetool.core.errors import AccessDenied, BadObject, NotFound
from cachetool.stores.base import ZARR_METADATA, LeftOut, Store

__all__ = ["FOLLOW", "Walk"]

FOLLOW = "--follow-links follows"
"""The option that follows links wherever they lead."""
_ZARR = ("zarr.json", ".zarray", ".zgroup")
"""Metadata files of a Zarr. Each folder that is a group or an array has one of them."""

_CHUNK = re.compile(r"(c|\d+)([./]\d+)*")
"""Names of chunks below their array, in versions 2 and 3:
https://zarr-specs.readthedocs.io/en/latest/v3/chunk-key-encodings/."""

_MOST = 2**20
"""Most bytes of an array's metadata that are read; an array has fewer."""


class Walk:
    """The rules of one walk. Keys are those of the store; a folder is ``""`` or ends with a ``/``.

    ``there(key)`` returns True if the store has this key. It is called for folders that :meth:`enter` was not called
    for.
    """

    def __init__(self, store: Store, there: Callable[[str], bool]) -> None:
        self._store, self._there = store, there
        self._entered: dict[str, frozenset[str]] = {}
        self._arrays: dict[str, bool] = {}
        self.left_out = LeftOut()

    def enter(self, folder: str, names: Iterable[str]) -> None:
        """Remember the names in a folder if all are known at once, so that the store is not asked for them."""
        self._entered[folder] = frozenset(_ZARR).intersection(names)

    def hides(self, key: str, *, folder: bool) -> bool:
        """Return True if the name begins with a dot and is no group or array of a Zarr. Such names are left out."""
        above, name = _split(key)
        if not name.startswith(".") or name in ZARR_METADATA:
            return False
        # A group or array of a Zarr may have any name, also one with a dot. Left out, its chunks would be read as fill
        # values.
        if folder and self._in_zarr(above) and self._in_zarr(f"{key}/"):
            return False
        self.left_out["hidden"] += 1
        return True

    def leave_out(self, key: str, reason: str, why: str) -> None:
        """Count and name something that is no file. Raise :class:`BadObject` if it is in the place of a chunk."""
        folder = _split(key)[0]
        # A chunk of version 3 lies in nested folders (c/0/1), so the array may be any of the folders above, not only
        # the next one.
        while True:
            if self._is_array(folder) and _CHUNK.fullmatch(key.removeprefix(folder)):
                raise BadObject(
                    f"{self._store.url}: chunk {key!r} would be left out ({reason}), and a missing chunk is read as"
                    " fill values;\nreplace it by a regular file (cp -rL copies the targets of links)"
                    + (f", or {FOLLOW} it" if why.endswith(f"{FOLLOW} it") else "")
                )
            if not folder:
                break
            folder = _split(folder[:-1])[0]
        self.left_out.add(key, reason, why)

    def _is_array(self, folder: str) -> bool:
        if folder not in self._arrays:
            self._arrays[folder] = self._holds(folder, ".zarray") or (
                self._holds(folder, "zarr.json") and self._node_type(f"{folder}zarr.json") == "array"
            )
        return self._arrays[folder]

    def _in_zarr(self, folder: str) -> bool:
        return any(self._holds(folder, name) for name in _ZARR)

    def _holds(self, folder: str, name: str) -> bool:
        names = self._entered.get(folder)
        return self._there(folder + name) if names is None else name in names

    def _node_type(self, key: str) -> object:
        try:
            item = self._store.find(key)
            return json.loads(bytes(self._store.get_range(item, 0, min(item.size, _MOST)))).get("node_type")
        # Safe to suppress: metadata that cannot be read names no array that any reader could open. RecursionError comes
        # from JSON with thousands of nested brackets.
        except (AccessDenied, BadObject, NotFound, ValueError, AttributeError, RecursionError):
            return None


def _split(key: str) -> tuple[str, str]:
    above, slash, name = key.rpartition("/")
    return above + slash, name
