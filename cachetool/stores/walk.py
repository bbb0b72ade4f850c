"""What a walk through the folders of a file system leaves out, and counts; and what of a Zarr it must not leave out.

Of a Zarr a chunk that is not there is read as fill values, so a link in one is an error: nobody would notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cachetool.errors import BadObject
from cachetool.stores.base import ZARR_METADATA

__all__ = ["Walk"]

_ZARR = ("zarr.json", ".zarray", ".zgroup")


class Walk:
    """The rules of one walk; keys as a store has them, folders ``""`` or with a ``/`` at their end."""

    def __init__(self, url: str, there: Callable[[str], bool]) -> None:
        """``there``: whether something has this key, a link to nothing too."""
        self._url, self._there = url, there
        self._zarr: dict[str, bool] = {}
        self.left_out: Counter[str] = Counter()

    def hides(self, key: str, *, folder: bool) -> bool:
        """Whether this is left out for its name: what begins with a dot, but for the parts of a Zarr."""
        above, slash, name = key.rpartition("/")
        if not name.startswith(".") or name in ZARR_METADATA:
            return False
        if folder and self._has_metadata(f"{key}/") and self._in_zarr(above + slash):
            return False
        self.left_out["hidden"] += 1
        return True

    def leave_out(self, key: str, reason: str) -> None:
        """Count what is no file. Raises :class:`BadObject` where it lies in a Zarr."""
        above, slash, _ = key.rpartition("/")
        if self._in_zarr(above + slash):
            raise BadObject(
                f"{self._url}: {key!r}, in a Zarr, is one of {reason}, which are left out: its values would be read as"
                " fill values;\ncopy the Zarr with what its links lead to: cp -rL"
            )
        self.left_out[reason] += 1

    def _in_zarr(self, folder: str) -> bool:
        if folder not in self._zarr:
            above, slash, _ = folder.rstrip("/").rpartition("/")
            self._zarr[folder] = self._has_metadata(folder) or (bool(folder) and self._in_zarr(above + slash))
        return self._zarr[folder]

    def _has_metadata(self, folder: str) -> bool:
        return any(self._there(folder + name) for name in _ZARR)
