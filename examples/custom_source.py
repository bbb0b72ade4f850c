"""A source of somebody's own, as one file of a package: a database, an instrument, a service with an API.

Whatever can name its objects and give their bytes becomes a source by a file system of fsspec: three methods. This one
is the handwritten digits of scikit-learn, ``digits://train/0007.image.npy`` and ``0007.json``, made when asked for.

Put it into a package beside a ``pyproject.toml`` with these lines and install that; nothing else is needed::

    [project]
    name = "cachetool-digits"
    version = "1.0"
    dependencies = ["cachetool", "fsspec", "scikit-learn"]

    [project.entry-points."fsspec.specs"]
    digits = "custom_source:Digits"

From then on ``cachetool pull digits://train/ --samples 100``, ``convert`` and ``BackgroundPull`` know it, with drawing,
resuming and coverage as for any other source. Objects whose names agree up to the first dot are one sample; names and
sizes must be the same each time they are listed.
"""

from __future__ import annotations

import functools
import io
import json
from typing import Any, ClassVar

import fsspec
import numpy as np

__all__ = ["Digits"]


@functools.cache
def _digits() -> Any:
    """Each process that pulls loads them once; here a client would open its connection."""
    from sklearn.datasets import load_digits

    return load_digits()


class Digits(fsspec.AbstractFileSystem):
    """``train`` has the first 1,500 digits, ``test`` the others."""

    protocol = "digits"
    _parts: ClassVar = {"train": range(1500), "test": range(1500, 1797)}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies in a folder: names, and sizes in bytes (None where listing does not tell)."""
        place = self._strip_protocol(path)
        if not place:
            found = [{"name": part, "size": 0, "type": "directory"} for part in self._parts]
        elif place in self._parts:
            names = [f"{place}/{n:04d}.{kind}" for n in self._parts[place] for kind in ("image.npy", "json")]
            found = [{"name": name, "size": None, "type": "file"} for name in names]
        else:
            raise FileNotFoundError(path)
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """One object, or folder."""
        place = self._strip_protocol(path)
        if place in ("", *self._parts):
            return {"name": place, "size": 0, "type": "directory"}
        return {"name": place, "size": len(self.cat_file(path)), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of an object, or some of them. Called by many threads at once."""
        name, _, kind = self._strip_protocol(path).rpartition("/")[2].partition(".")
        if kind == "json":
            return json.dumps({"label": int(_digits().target[int(name)])}).encode()[start:end]
        file = io.BytesIO()
        np.save(file, _digits().images[int(name)].astype(np.float32) / 16)
        return file.getvalue()[start:end]
