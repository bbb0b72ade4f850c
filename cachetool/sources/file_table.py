"""The tables of a listing of files: which samples each file holds, where they are, and how they are fetched.

::

    table.json     kind, options that choose fields, distinct layouts, files left out, sizes and ETags that the listing
                   does not tell; written last
    rows.npy       int64 (files,)          samples of each file
    chunk.npy      int64 (files,)          samples in one unit of the file; 0: see cuts.npy
    layout.npy     int32 (files,)          index of the file's layout in table.json
    offsets.npy    int64 (files, fields)   offset of the first row of each field, -1 when a library has to find it;
                                           fields in the order of the first file, which other files need not have
    parts.npy      int64 (parts, 5)        file, first row, object, start and stop of the bytes to fetch for a unit
    cuts.npy       int64 (units of files whose units differ,)   samples of each

Files have the numbers of the listing, which is sorted by key. Samples are numbered file after file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES
from cachetool.core.cf import Packing
from cachetool.core.errors import UsageError
from cachetool.core.schema import Schema
from cachetool.proc.folders import new_file, replacing
from cachetool.sources.byte_source import Seen
from cachetool.sources.kinds import Kind, kind_named
from cachetool.sources.listing import TABLE_FILE, opened
from cachetool.sources.opening import FileFacts
from cachetool.sources.options import SourceOptions
from cachetool.sources.ours import Exported
from cachetool.sources.rows import UNIT_BYTES, Grid

__all__ = ["Layout", "Run", "Table", "write_table"]

IN_ORDER_BYTES = BLOCK_BYTES
"""Bytes of a unit where all rows are read in order."""
_VERSION = 1
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """The facts that all files of one kind of rows have in common."""

    schema: Schema
    stored: tuple[np.dtype[Any], ...]
    """The dtype of each field in the file. Empty if a library has to read the file."""
    names: dict[str, str]
    """Names in the file of fields that have another name, by the name of the field."""
    packing: dict[str, Packing]
    """The CF attributes of fields whose numbers stand for other values. They differ between files of one series."""
    grid: Grid = ()
    """The blocks that are the samples of a file, if rows are not."""

    def named(self, row: int) -> str:
        """Return the part of a sample's key that tells its place in the file: the row, or the first index of the block
        in each dimension that is cut."""
        if not self.grid:
            return str(row)
        at = np.unravel_index(row, [count for _, _, count in self.grid])
        cut = zip(self.grid, at, strict=True)
        return ",".join(f"{name}={step * int(index)}" for (name, step, _), index in cut)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive draws of one unit."""

    first: int
    """Position of the first draw in the array that the caller passed."""
    file: int
    start: int
    stop: int
    """``start`` to ``stop``: rows of the unit in its file."""
    inside: _Numbers
    """int64: the rows that are asked for, counted from ``start``, in the order asked for."""


@dataclass(frozen=True)
class Table:
    """The tables of a folder, mapped into memory."""

    kind: Kind
    chosen: dict[str, Any]
    roots: tuple[str, ...]
    """The folder of each Zarr. Empty for other kinds, whose files are the objects of the listing."""
    folders: tuple[str, ...]
    """All folders that hold metadata of Zarr."""
    file_is_unit: bool
    """True if each file is one unit, and its samples were not counted."""
    layouts: tuple[Layout, ...]
    """The layouts of files of rows. Empty for archives and records, whose fields are known only when they are read."""
    piece: int
    mean: int
    """Bytes of the values of the first sample. 0: no sample was looked at."""
    in_order: bool
    """True if the files were listed to be read from the first row to the last."""
    skipped: tuple[tuple[str, str], ...]
    ours: Exported | None
    """The contents of files that ``cachetool convert --out`` wrote. None for other files."""
    seen: Seen
    """Size and ETag of the objects that the tables describe, where the listing does not tell them."""
    rows: _Numbers
    chunk: _Numbers
    layout: npt.NDArray[np.int32]
    offsets: _Numbers
    cuts: _Numbers
    parts: _Numbers
    starts: _Numbers
    """int64 (files + 1,): the number of the first sample of each file, and the number of all samples."""
    cut_bounds: _Numbers
    """int64 (files, 2): index of the first entry of each file in ``cuts``, and the index behind its last entry."""

    @classmethod
    def open(cls, folder: Path) -> Table:
        """Map the tables in ``folder``. Raise :class:`CorruptError` if they are damaged or missing."""
        names = ("rows", "chunk", "layout", "offsets", "cuts", "parts")
        with opened("table", folder / TABLE_FILE, names, version=_VERSION) as (about, arrays):
            layouts = tuple(
                Layout(
                    Schema.from_json(layout["schema"]),
                    tuple(map(np.dtype, layout["stored"])),
                    layout["names"],
                    layout.get("packing", {}),
                    tuple((str(name), int(step), int(count)) for name, step, count in layout.get("grid", ())),
                )
                for layout in about["layouts"]
            )
        # Only files with chunk 0 have entries in cuts.npy. Their bounds are found from the sums of samples, so no index
        # is stored.
        counts = np.where(arrays["chunk"] == 0, arrays["rows"], 0)
        return cls(
            kind=kind_named(about["kind"]),
            chosen=about["chosen"],
            roots=tuple(about["roots"]),
            folders=tuple(about["folders"]),
            file_is_unit=about["whole"],
            layouts=layouts,
            piece=about["piece"],
            mean=about["mean"],
            in_order=about["in_order"],
            skipped=tuple((str(name), str(why)) for name, why in about["skipped"]),
            ours=Exported.from_json(about["ours"]) if about["ours"] is not None else None,
            seen={int(number): (int(size), etag) for number, size, etag in about["seen"]},
            **arrays,
            starts=np.concatenate([[0], np.cumsum(arrays["rows"])]),
            cut_bounds=np.searchsorted(
                np.cumsum(arrays["cuts"]),
                np.stack([np.cumsum(counts) - counts, np.cumsum(counts)], axis=1),
                side="right",
            ),
        )

    def refuse_others(self, options: SourceOptions, url: str) -> None:
        """Raise :class:`UsageError` for options that would choose other fields than these tables hold."""
        if chosen(options) != self.chosen:
            raise UsageError(
                f"{url} was listed with other --fields, --rename, --decode, --value-format, --block,"
                " --edges or --runs; give the same options, or use another --dataset or cache"
            )

    def unit_sizes(self) -> _Numbers | int:
        """Return the number of samples of each unit that is drawn, or the number of units if each unit is one sample.

        With ``--runs`` a unit is a run of rows, which is fetched in the parts that are stored together.
        """
        if self.file_is_unit:
            return len(self.rows)
        if (run := self.chosen.get("runs")) is not None:
            return np.concatenate([self._run_sizes(file, int(run)) for file in range(len(self.rows))])
        # Units of one sample need no array of sizes, and their order is then computed instead of stored.
        if not len(self.cuts) and (self.chunk == 1).all():
            return int(self.starts[-1])
        parts = []
        for file in range(len(self.rows)):
            rows, chunk = int(self.rows[file]), int(self.chunk[file])
            if chunk == 0:
                sizes = self._cuts_of(file)
            else:
                sizes = np.full(-(-rows // chunk), chunk, dtype=np.int64)
                if rows % chunk:
                    sizes[-1] = rows % chunk
            parts.append(sizes)
        return np.concatenate(parts)

    def _run_sizes(self, file: int, run: int) -> _Numbers:
        """Return the number of samples of each run of a file: at least ``run``, and whole parts that are stored
        together; the last run may be shorter."""
        rows, chunk = int(self.rows[file]), int(self.chunk[file])
        if chunk:
            unit = -(-run // chunk) * chunk
            sizes = np.full(-(-rows // unit), unit, dtype=np.int64)
            if rows % unit:
                sizes[-1] = rows % unit
            return sizes
        ends = np.cumsum(self._cuts_of(file))
        stops, start = list[int](), 0
        while start < rows:
            start = int(ends[min(int(np.searchsorted(ends, start + run)), len(ends) - 1)])
            stops.append(start)
        bounds = np.array([0, *stops], dtype=np.int64)
        return bounds[1:] - bounds[:-1]

    def _cuts_of(self, file: int) -> _Numbers:
        """Return the number of samples of each unit of a file whose units differ."""
        first, last = self.cut_bounds[file]
        return self.cuts[first:last]

    def parts_of(self, run: Run) -> _Numbers:
        """Return object, start and stop of the known bytes to fetch for a run, int64 (parts, 3)."""
        # write_table sorted the parts by file and row, so two binary searches find them among up to 2^19 parts a file.
        first, last = np.searchsorted(self.parts[:, 0], [run.file, run.file + 1])
        rows = self.parts[first:last, 1]
        a, b = np.searchsorted(rows, [run.start, run.stop])
        return self.parts[first + a : first + b, 2:]

    def offset(self, file: int, name: str) -> int:
        """Return the offset in bytes of the first row of a field in its file."""
        return int(self.offsets[file, self.layouts[0].schema.names.index(name)])

    def runs(self, samples: _Numbers) -> list[Run]:
        """Return ``samples`` in the given order as runs, with a cut wherever the unit changes."""
        if self.file_is_unit:
            return [Run(at, int(file), 0, 0, np.zeros(1, np.int64)) for at, file in enumerate(samples)]
        files = np.searchsorted(self.starts, samples, side="right") - 1
        rows = samples - self.starts[files]
        chunks = self.chunk[files]
        start = rows // np.maximum(chunks, 1) * chunks
        stop = np.minimum(start + chunks, self.rows[files])
        for file in sorted(set(files[chunks == 0].tolist())):
            in_file = files == file
            sizes = self._cuts_of(file)
            ends = np.cumsum(sizes)
            at = np.searchsorted(ends, rows[in_file], side="right")
            stop[in_file] = ends[at]
            start[in_file] = ends[at] - sizes[at]
        changes = np.flatnonzero((np.diff(files) != 0) | (np.diff(start) != 0)) + 1
        firsts = [0, *changes.tolist()] if len(samples) else []
        lasts = [*changes.tolist(), len(samples)]
        if self.in_order and not (self.kind.records and len(self.parts)):
            # The process that reads in order reads every row once, so a run has only its own rows. Whole units would be
            # read again by the next run.
            start, stop = rows.copy(), rows.copy()
            for a, b in zip(firsts, lasts, strict=False):
                start[a], stop[a] = rows[a:b].min(), rows[a:b].max() + 1
        return [
            Run(a, int(files[a]), int(start[a]), int(stop[a]), rows[a:b] - start[a])
            for a, b in zip(firsts, lasts, strict=False)
        ]


def chosen(options: SourceOptions) -> dict[str, Any]:
    """Return the options that decide which rows and fields there are, as plain values."""
    fields = None if options.fields is None else list(options.fields)
    # The tables depend on --decode only for cf. Images are decoded after the read, so other values must not make the
    # tables unusable.
    decoded = {"decode": "cf"} if options.decode == "cf" else {}
    facts = {"fields": fields, "rename": dict(options.rename), "values": options.value_format, "rows": options.rows}
    cut = {"block": dict(options.block), "edges": options.edges, "level": options.level or 0} if options.block else {}
    together = {"runs": options.runs} if options.runs is not None else {}
    return facts | decoded | cut | together


def write_table(
    folder: Path,
    kind: Kind,
    options: SourceOptions,
    facts: list[FileFacts],
    *,
    files: int,
    roots: tuple[str, ...] = (),
    folders: tuple[str, ...] = (),
    skipped: tuple[tuple[str, str], ...] = (),
    parts: Sequence[tuple[int, int, int, int, int]] = (),
    ours: Exported | None = None,
    seen: Seen | None = None,
    mean: int = 0,
    in_order: bool = False,
) -> None:
    """Write the tables of ``files`` files into the folder of their listing. Without ``facts`` each file is one unit."""
    layouts: dict[str, int] = {}
    layout, chunk, cuts = [], [], []
    names = Schema.from_json(facts[0].schema).names if facts and facts[0].schema else ()
    for file_facts in facts:
        stored = list(file_facts.stored.values()) if len(file_facts.stored) == len(file_facts.schema) else []
        if file_facts.schema:
            about_rows = {"schema": file_facts.schema, "stored": stored}
            # Many files share a layout. Its JSON text is the key by which equal layouts are stored once.
            about_rows |= {"names": file_facts.names, "packing": file_facts.packing}
            text = json.dumps(about_rows | ({"grid": file_facts.grid} if file_facts.grid else {}))
            layout.append(layouts.setdefault(text, len(layouts)))
        if file_facts.cuts is not None:
            chunk.append(0)
            cuts += [stop - start for start, stop in zip([0, *file_facts.cuts], file_facts.cuts, strict=False)]
        else:
            chunk.append(_unit_rows(file_facts, IN_ORDER_BYTES if in_order else UNIT_BYTES))
    arrays: dict[str, npt.NDArray[Any]] = {
        "rows": np.array([file_facts.rows for file_facts in facts] if facts else [1] * files, dtype=np.int64),
        "chunk": np.array(chunk if facts else [1] * files, dtype=np.int64),
        "layout": np.array(layout, dtype=np.int32),
        "offsets": np.array([[one.offsets.get(name, -1) for name in names] for one in facts], dtype=np.int64),
        "cuts": np.array(cuts, dtype=np.int64),
        "parts": np.array(sorted(parts), dtype=np.int64).reshape(-1, 5),
    }
    for name, array in arrays.items():
        with new_file(folder / f"{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
    about = {
        "version": _VERSION,
        "kind": kind.name,
        "chosen": chosen(options),
        "roots": roots,
        "folders": folders,
        "whole": not facts,
        "layouts": [json.loads(encoded) for encoded in layouts],
        "piece": max((file_facts.piece for file_facts in facts), default=0),
        "mean": mean,
        "in_order": in_order,
        "skipped": skipped,
        "ours": None if ours is None else ours.to_json(),
        "seen": [[number, *identity] for number, identity in (seen or {}).items()],
    }
    # Written last, by a rename: a folder with this file has all other tables. No fsync, because a listing that a power
    # cut destroys is made again.
    with replacing(folder / TABLE_FILE, durable=False) as file:
        file.write(json.dumps(about).encode())


def _unit_rows(facts: FileFacts, unit_bytes: int) -> int:
    # A damaged chunk loses its block alone, because each block is a unit.
    if facts.grid:
        return 1
    schema = Schema.from_json(facts.schema)
    row = schema.fixed_nbytes if schema.is_fixed else max(schema.fixed_nbytes, facts.row)
    # A unit is whole chunks, because a chunk is always fetched completely.
    return facts.chunk * max(1, unit_bytes // max(1, facts.chunk * row)) if row else facts.chunk
