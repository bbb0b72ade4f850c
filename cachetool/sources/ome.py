"""OME-Zarr: images in several resolutions, labels, plates and series, for ``--block``.

::

    image.zarr/   0, 1, 2           multiscales: the same image in falling resolution; one level is read
                  labels/nuclei/0   labels of the image, in the same levels
    plate.zarr/   A/1/0             plate: row, column and field; each field is an image
    series.zarr/  0, 1              bioformats2raw.layout: each series is an image

See https://ngff.openmicroscopy.org. Versions up to 0.4 are Zarr v2. Version 0.5 is Zarr v3, and has its metadata under
``ome``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["IMAGE", "Level", "images_of", "levels_of"]

IMAGE = "image"
"""The name of the field of an image that is the root of its Zarr."""
_OLD_AXES = ("t", "c", "z", "y", "x")
"""The axes of versions 0.1 and 0.2, which do not name them."""


@dataclass(frozen=True, slots=True)
class Level:
    """One resolution of an image or of labels."""

    number: int
    """0: the full resolution."""
    levels: int
    name: str
    """The name of the field."""
    axes: tuple[str, ...]


def levels_of(group: str, attributes: Mapping[str, Any]) -> dict[str, Level]:
    """Return the levels of the image in ``group``, by the names of their arrays; nothing if the group is no image."""
    scales = _of_ome(attributes).get("multiscales")
    scale = scales[0] if isinstance(scales, list) and scales else None
    datasets = scale.get("datasets") if isinstance(scale, dict) else None
    if not isinstance(scale, dict) or not isinstance(datasets, list):
        return {}
    axes = scale.get("axes", _OLD_AXES)
    names = (
        [axis.get("name") if isinstance(axis, dict) else axis for axis in axes] if isinstance(axes, Sequence) else []
    )
    paths = [one.get("path") for one in datasets if isinstance(one, dict)]
    return {
        f"{group}/{path}" if group else path: Level(
            number, len(paths), group or IMAGE, tuple(name if isinstance(name, str) else "" for name in names)
        )
        for number, path in enumerate(paths)
        if isinstance(path, str)
    }


def images_of(roots: Sequence[str], folders: Sequence[str], metadata: Callable[[str], bytes | None]) -> tuple[str, ...]:
    """Return the folders of images: those of each plate or series among ``roots``, and the other roots themselves.

    A folder is ``""`` or ends with ``/``. ``metadata`` returns an object by its key, None if it does not exist.
    """
    images: list[str] = []
    for root in roots:
        about = _of_ome(_attributes(root, metadata))
        inside = [folder[len(root) :].rstrip("/") for folder in folders if folder != root and folder.startswith(root)]
        plate = about.get("plate")
        wells = plate.get("wells") if isinstance(plate, dict) else None
        if isinstance(wells, list):
            paths = {str(well.get("path")).strip("/") for well in wells if isinstance(well, dict)}
            found = [path for path in inside if path.rpartition("/")[0] in paths]
        elif "bioformats2raw.layout" in about:
            found = [path for path in inside if "/" not in path and path != "OME"]
        else:
            found = []
        images += [f"{root}{path}/" for path in found] or [root]
    return tuple(sorted(images))


def _attributes(root: str, metadata: Callable[[str], bytes | None]) -> Mapping[str, Any]:
    for name in ("zarr.json", ".zattrs"):
        raw = metadata(root + name)
        if raw is None:
            continue
        try:
            about = json.loads(raw)
        except (ValueError, RecursionError):
            # The reader of the file reports damaged metadata by their name.
            return {}
        attributes = about.get("attributes") if name == "zarr.json" and isinstance(about, dict) else about
        return attributes if isinstance(attributes, dict) else {}
    return {}


def _of_ome(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of OME among the attributes of a group."""
    ome = attributes.get("ome")
    return ome if isinstance(ome, dict) else attributes
