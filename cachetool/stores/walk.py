"""What a walk through the folders of a file system leaves out, and counts; and what of a Zarr it must not leave out.

A chunk of a Zarr that is not there is read as fill values, so a link in the place of one is an error: nobody would
notice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from cachetool.core.errors import AccessDenied, BadObject, NotFound
from cachetool.stores.base import ZARR_METADATA, LeftOut, Store

__all__ = ["FOLLOW", "Walk"]

FOLLOW = "--follow-links follows"
"""The option that has links read wherever they lead."""
_ZARR = ("zarr.json", ".zarray", ".zgroup")
"""One of them lies in each folder of a Zarr that is a group or an array."""

_CHUNK = re.compile(r"(c|\d+)([./]\d+)*")
"""Below its array, in versions 2 and 3: https://zarr-specs.readthedocs.io/en/latest/v3/chunk-key-encodings/."""

_MOST = 2**20
"""Bytes of metadata; an array has fewer."""


class Walk:
    """The rules of one walk; keys as a store has them, folders ``""`` or with a ``/`` at their end."""

    def __init__(self, store: Store, there: Callable[[str], bool]) -> None:
        """``there``: whether the store has this key; asked where :meth:`enter` was not told."""
        self._store, self._there = store, there
        self._entered: dict[str, frozenset[str]] = {}
        self._arrays: dict[str, bool] = {}
        self.left_out = LeftOut()

    def enter(self, folder: str, names: Iterable[str]) -> None:
        """What lies in a folder, where all of it is known at once: it is then not asked for."""
        self._entered[folder] = frozenset(_ZARR).intersection(names)

    def hides(self, key: str, *, folder: bool) -> bool:
        """Whether this is left out for its name: what begins with a dot, but for groups and arrays of a Zarr."""
        above, name = _split(key)
        if not name.startswith(".") or name in ZARR_METADATA:
            return False
        if folder and self._in_zarr(above) and self._in_zarr(f"{key}/"):
            return False
        self.left_out["hidden"] += 1
        return True

    def leave_out(self, key: str, reason: str, why: str) -> None:
        """Count and name what is no file. Raises :class:`BadObject` in the place of a chunk."""
        folder = _split(key)[0]
        while True:
            if self._is_array(folder) and _CHUNK.fullmatch(key.removeprefix(folder)):
                raise BadObject(
                    f"{self._store.url}: {key!r} is one of {reason}, which are left out, but a chunk that is not"
                    " there is read as fill values;\nput the file itself there (cp -rL copies what links lead to)"
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
        except (AccessDenied, BadObject, NotFound, ValueError, AttributeError, RecursionError):
            return None  # nobody can read it as metadata


def _split(key: str) -> tuple[str, str]:
    above, slash, name = key.rpartition("/")
    return above + slash, name
