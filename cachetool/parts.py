"""Files of ours outside of any cache: a folder that ``convert --out`` wrote, or one such file wherever it came from.

Nobody vouches for them: whoever made a file could have made a digest that fits. So no library opens one in this
process. A part is read by its extents, every number of which is checked; one without extents, and a file alone, by its
format's library in a process of its own (:mod:`cachetool.sources.guard`). Against accidents the checksums beside each
part must be those that ``dataset.json`` says, and the samples must have these checksums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.errors import CorruptError
from cachetool.extents import EXTENTS_FILE
from cachetool.folders import read_json
from cachetool.formats import format_for, get_format
from cachetool.formats.base import Format, Reader
from cachetool.formats.files import map_file
from cachetool.formats.lmdb_file import is_ours as is_our_lmdb
from cachetool.formats.shard import check_content, open_plain, side_folder, stored_checksums
from cachetool.names import Name
from cachetool.schema import Schema
from cachetool.sources.filebase import FileOptions
from cachetool.sources.guard import GuardedFile
from cachetool.sources.ours import OurFile

__all__ = ["DATASET_FILE", "LAYOUT", "PartFile", "is_ours", "open_alone", "open_here", "read_parts"]

DATASET_FILE = "dataset.json"
LAYOUT = 1
"""Of :data:`DATASET_FILE` and the folder around it."""
_HEAD = 2**18
_MOST_METADATA = 16 * 2**20


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a folder that ``convert --out`` wrote."""

    path: Path
    kind: Format
    schema: Schema
    samples: int
    content: str | None
    """Content digest; None in a folder that was made without."""

    def open(self) -> Reader | GuardedFile:
        """Read it. Raises :class:`CorruptError` naming the file when it is not what the folder says."""
        if (side_folder(self.path) / EXTENTS_FILE).exists():
            found: Reader | GuardedFile = open_plain(self.path, self.kind, self.schema)
        else:
            found = open_alone(self.path)
        if found.samples != self.samples or found.schema != self.schema:
            found.close()
            raise CorruptError(f"{self.path} does not hold the {self.samples} samples that {DATASET_FILE} says")
        return found

    def checksums(self) -> npt.NDArray[np.uint64]:
        """What its samples must hash to, (fields, samples). Raises :class:`CorruptError` naming the file."""
        side = side_folder(self.path)
        if self.content is None:
            return stored_checksums(side, self.schema, links=True)
        return check_content(side, self.schema, self.content, links=True)


def read_parts(folder: Path) -> tuple[Schema, list[PartFile]]:
    """The schema and the parts of a folder. Raises :class:`CorruptError` when its list of parts cannot be read."""
    about = folder / DATASET_FILE
    try:
        value = json.loads(read_json(about, links=True))
        layout = int(value.get("layout", LAYOUT))
        if layout > LAYOUT:
            raise CorruptError(f"{about} has layout {layout}, this cachetool reads layout {LAYOUT}; update cachetool")
        schema, kind = Schema.from_json(value["schema"]), get_format(value["format"])
        parts = []
        for part in value["parts"]:
            file, samples, content = str(part["file"]), int(part["samples"]), part.get("content")
            plain = Name.fits(file) and not file.startswith(".") and file.endswith(kind.suffix)
            if not plain or samples < 0 or not isinstance(content, str | None):
                raise ValueError(f"a part called {file!r} of {samples} samples")
            parts.append(PartFile(folder / file, kind, schema, samples, content))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptError(f"{about} is not what cachetool convert writes: {error}") from error
    return schema, parts


def is_ours(path: Path) -> bool:
    """Whether a file carries the mark of our layout: then it is read as that, and a damaged one is an error."""
    if path.suffix in (".h5", ".hdf5") and path.is_file():
        with path.open("rb") as file:
            return b"cachetool" in file.read(_HEAD)
    if path.suffix == ".zarr" and (path / "zarr.json").is_file():
        with (path / "zarr.json").open("rb") as file:
            return b'"cachetool"' in file.read(_MOST_METADATA)
    return path.suffix == ".lmdb" and path.is_file() and is_our_lmdb(map_file(path))


def open_alone(path: Path) -> GuardedFile:
    """Read one file of ours through its format's library, in a process of its own.

    Raises :class:`CorruptError` or :class:`BadObject` naming it when it is damaged, whatever that does to the process.
    """
    return GuardedFile(path, FileOptions(), opener=f"{__name__}:{open_here.__name__}")


def open_here(path: Path, options: FileOptions, *, notice: Callable[[Path], None]) -> OurFile:
    """In that process: open the file. Its schema comes from the folder around it, or, without one, from itself."""
    notice(path)
    about = path.parent / DATASET_FILE
    schema = None
    if about.is_file():
        found, parts = read_parts(path.parent)
        schema = found if path.name in [part.path.name for part in parts] else None
    return OurFile(path, format_for(path), options, schema=schema)
