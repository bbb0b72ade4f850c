"""A fifth format, in one file of its own package. A shard is a folder of ``.npy`` files that NumPy can open directly.

::

    part-00000.npydir/
      x.npy                            (n, 3, 4) float32      np.load("x.npy", mmap_mode="r")[17]
      text.npy, text.offsets.npy       text of sample i: text[offsets[i] : offsets[i + 1]]
      mask.npy, mask.offsets.npy, mask.shapes.npy             the same, in the shape shapes[i]
      cachetool.json                   schema and number of samples; written last

Put the file into a package with these lines in its ``pyproject.toml``, and install the package::

    [project]
    name = "cachetool-npydir"
    version = "1.0"
    dependencies = ["cachetool", "numpy"]

    [project.entry-points."cachetool.formats"]
    npydir = "custom_format:NpyFolder"

After that ``cachetool pull --to npydir``, ``cachetool convert --to npydir``, the loaders, ``verify`` and the cap
work with the format. ``pytest tests/contracts/test_formats.py -k npydir`` in a clone of cachetool tests the format
as it tests the four others.

``cachetool/formats/base.py`` says what a format must do. This format uses the base classes that HDF5 and Zarr share.
The base classes turn blocks of samples into rows of plain arrays and back, and keep checksums and extents. This
module only says in which file each array lies. A shard stays in memory until all its samples have arrived. Meanwhile
a file of the same size reserves the bytes on the disk, so the last write cannot run out of space.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Schema
from cachetool.formats.base import Reader, Writer
from cachetool.formats.columnar import (
    ArrayPlan,
    ColumnarReader,
    ColumnarWriter,
    Held,
    Place,
    array_plans,
    corrupt_errors,
    header,
    parse_header,
)
from cachetool.formats.files import BulkFile, allocated_bound, fsync_folder, write_durably
from cachetool.proc.disk import DISK_BLOCK

__all__ = ["NpyFolder"]

ABOUT = "cachetool.json"
HELD = "held"
"""A file that reserves the shard's bytes on the disk while the shard is in memory."""
NPY_HEADER = 4096
"""Upper bound of the header of a ``.npy`` file, in bytes."""


class NpyFolder:
    """The format ``npydir``. All threads and processes share one object, so the object has no state."""

    name = "npydir"
    suffix = ".npydir"
    compressions: tuple[str, ...] = ()

    def bound(
        self,
        schema: Schema,
        samples: int,
        nbytes: int,
        disk_block: int = DISK_BLOCK,
        *,
        compression: str | None = None,
    ) -> int:
        """Return the upper bound of the bytes on disk: all files in whole blocks, and the folder."""
        files = len(array_plans(schema)) + 2
        data = allocated_bound(_total(schema, samples, nbytes) + 256 * files, disk_block)
        return data + files * allocated_bound(0, disk_block) + disk_block

    def create(
        self, path: Path, schema: Schema, *, samples: int, nbytes: int, compression: str | None = None
    ) -> Writer:
        """Begin a shard of at most ``samples`` samples and ``nbytes`` bytes of values; the path must not exist."""
        if compression is not None:
            raise UsageError(f"npydir has no compression {compression!r}; it has none")
        return _Writer(path, schema, samples=samples, nbytes=nbytes)

    def open(self, path: Path, *, schema: Schema | None = None) -> Reader:
        """Open a shard. Its ``cachetool.json`` has the schema and the number of samples."""
        with corrupt_errors(str(path)):
            about = json.loads((path / ABOUT).read_bytes())
        return _Reader(path, *parse_header(about, path=path, schema=schema))


def _total(schema: Schema, samples: int, nbytes: int) -> int:
    """Return the upper bound of the bytes of all files."""
    plans = array_plans(schema)
    index = sum(plan.rows(samples) * plan.row_nbytes for plan in plans if plan.role != "values")
    return nbytes + index + NPY_HEADER * len(plans) + len(json.dumps(header(schema, samples)))


def _file(plan: ArrayPlan) -> str:
    """Return the file name of an array. A comma, which no field name has, replaces the slash of ``a/b``."""
    return plan.name.replace("/", ",") + ".npy"


class _Writer(ColumnarWriter):
    def __init__(self, path: Path, schema: Schema, *, samples: int, nbytes: int) -> None:
        super().__init__(path, schema, samples=samples, nbytes=nbytes)
        try:
            path.mkdir()
        except FileExistsError as error:
            raise UsageError(f"{path} exists already; it is never overwritten") from error
        try:
            self._room = BulkFile.create(path / HELD, _total(schema, samples, nbytes))
        except BaseException:
            shutil.rmtree(path)
            raise
        self._rows = Held()

    def _append(self, plan: ArrayPlan, rows: npt.NDArray[Any]) -> None:
        self._rows.add(plan.name, rows)

    def _complete(self, index: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Place]:
        """Write every array, then ``cachetool.json``. Return the file and offset at which each field's values begin."""
        self._abort()
        (self.path / HELD).unlink()
        places: dict[str, Place] = {}
        for plan in self.plans:
            count = self.rows(plan)
            start = io.BytesIO()
            about = {"descr": plan.dtype.str, "fortran_order": False, "shape": (count, *plan.row)}
            np.lib.format.write_array_header_1_0(start, about)
            values = [index[plan.name]] if plan.is_index else self._rows.pop(plan.name)
            file = BulkFile.create(self.path / _file(plan), start.tell() + count * plan.row_nbytes)
            try:
                file.append(start.getvalue(), *values)
                file.finish()
            finally:
                file.close()
            places[plan.name] = Place(f"{self.path.name}/{_file(plan)}", start.tell())
        write_durably(self.path / ABOUT, json.dumps(header(self.schema, self.samples)).encode())
        fsync_folder(self.path)
        return {plan.name: places[plan.name] for plan in self.plans if plan.role == "values" and not plan.is_index}

    def _abort(self) -> None:
        self._room.close()


class _Reader(ColumnarReader):
    """A reader that uses ``pread``: with a memory map, a file that is cut short would kill the process with SIGBUS."""

    gap_bytes = 4096

    def __init__(self, path: Path, schema: Schema, samples: int) -> None:
        super().__init__(path, schema, samples)
        self._starts: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        for plan in self.plans.values():
            with corrupt_errors(str(path / _file(plan))), (path / _file(plan)).open("rb") as file:
                self._check(plan, file)
        self._check_lengths()

    def _check(self, plan: ArrayPlan, file: Any) -> None:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it is of another version of .npy")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        if fortran or dtype != plan.dtype or len(shape) != 1 + len(plan.row) or shape[1:] != plan.row:
            raise ValueError(f"it holds {dtype} {shape}")
        if size != start + shape[0] * plan.row_nbytes:
            raise ValueError(f"it has {size} bytes and says {start + shape[0] * plan.row_nbytes}")
        self._starts[plan.name], self._lengths[plan.name] = start, shape[0]

    def _length(self, plan: ArrayPlan) -> int:
        return self._lengths[plan.name]

    def _fetch(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        path, rows = self.path / _file(plan), np.empty((stop - start, *plan.row), dtype=plan.dtype)
        with corrupt_errors(str(path)), path.open("rb", buffering=0) as file:
            file.seek(self._starts[plan.name] + start * plan.row_nbytes)
            view = rows.reshape(-1).view(np.uint8).data
            while view and (count := file.readinto(view)):
                view = view[count:]
            if view:
                raise CorruptError(f"{path} is cut short")
        return rows

    def close(self) -> None:
        """Do nothing: no file stays open between two calls."""
