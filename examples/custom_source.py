"""A source of your own, in one file of its own package: a database, an instrument, a service with an API.

A file system for fsspec with three methods is enough: the methods list objects and return their bytes. This example
serves the handwritten digits of scikit-learn as ``digits://train/0007.image.npy`` and ``0007.json``. It generates each
object on request.

Put the file into a package with these lines in its ``pyproject.toml``, and install the package::

    [project]
    name = "cachetool-digits"
    version = "1.0"
    dependencies = ["cachetool", "fsspec", "scikit-learn"]

    [project.entry-points."fsspec.specs"]
    digits = "custom_source:Digits"

After that ``cachetool pull digits://train/ --samples 100``, ``convert`` and ``BackgroundPull`` read from it. Drawing,
resuming and coverage work as for any other source. Objects whose names agree up to the first dot form one sample. Names
and sizes must be the same in every listing.
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
    """Load the digits, once in each process that pulls. A real client would open its connection here."""
    from sklearn.datasets import load_digits

    return load_digits()


class Digits(fsspec.AbstractFileSystem):
    """A file system with two folders: ``train`` holds the first 1,500 digits, ``test`` the others."""

    protocol = "digits"
    _parts: ClassVar = {"train": range(1500), "test": range(1500, 1797)}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder: names, and sizes in bytes (None if a listing does not know them)."""
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
        """Describe one object or folder."""
        place = self._strip_protocol(path)
        if place in ("", *self._parts):
            return {"name": place, "size": 0, "type": "directory"}
        return {"name": place, "size": len(self.cat_file(path)), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return the bytes of an object, or a range of them. Several threads call this method at the same time."""
        name, _, kind = self._strip_protocol(path).rpartition("/")[2].partition(".")
        if kind == "json":
            return json.dumps({"label": int(_digits().target[int(name)])}).encode()[start:end]
        file = io.BytesIO()
        np.save(file, _digits().images[int(name)].astype(np.float32) / 16)
        return file.getvalue()[start:end]
