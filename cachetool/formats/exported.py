"""The exported folder, which ``convert --out`` writes: the names in it, and the parser of its ``dataset.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass

from cachetool.core.errors import CorruptError
from cachetool.core.names import Name
from cachetool.core.schema import Schema

__all__ = ["DATASET_FILE", "LAYOUT", "SIDE_FOLDER", "DataFile", "Dataset", "parse_dataset"]

DATASET_FILE = "dataset.json"
SIDE_FOLDER = ".extents"
"""Name of the folder that holds the extents or checksums of the data files."""
LAYOUT = 1
"""Version of :data:`DATASET_FILE` and of the folder around it."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of an exported folder."""

    name: str
    samples: int
    content: str
    """Content digest, or empty if the folder was written without digests."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The description of an exported folder."""

    format: str
    schema: Schema
    files: tuple[DataFile, ...]


def parse_dataset(raw: bytes) -> Dataset:
    """Parse a ``dataset.json``.

    Raises ``ValueError`` for content that ``convert`` does not write, and :class:`CorruptError` for a newer layout.
    """
    try:
        value = json.loads(raw)
        # A newer cachetool may have changed what the other entries mean, so the version is compared before they are
        # read.
        if int(value.get("layout", LAYOUT)) > LAYOUT:
            raise CorruptError(
                f"{DATASET_FILE} has layout {value['layout']}, this cachetool reads layout {LAYOUT}; update cachetool"
            )
        files = [DataFile(_name(v["file"]), int(v["samples"]), str(v.get("content") or "")) for v in value["parts"]]
        return Dataset(value["format"], Schema.from_json(value["schema"]), tuple(files))
    # The file may come from anybody. OverflowError: a number of JSON like 1e999. RecursionError: thousands of nested
    # lists.
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _name(file: object) -> str:
    """Return the name of a data file. Raises ValueError for a path: it could lead out of the folder."""
    # A foreign dataset.json may name ../../thesis.
    if not Name.fits(file):
        raise ValueError(f"{file!r} is not the name of a file")
    return str(file)
