"""The listing of files of many samples: each file is looked at once, to learn its rows and where they are.

``survey="probe"`` looks only at what this needs. Then each archive or file of records without an index beside it is
one unit, because nobody has counted its samples. ``survey="all"`` reads these files completely, so that all samples
are counted and the schema holds all of them. It also announces that rows will be read from first to last.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cachetool.core.errors import BadObject, CorruptError, NotFound, UsageError
from cachetool.core.schema import KEY, Schema
from cachetool.formats.exported import DATASET_FILE
from cachetool.sources.byte_source import Files, SourceFile, StoreRanges
from cachetool.sources.fetch import Fetcher
from cachetool.sources.file_opening import MAX_WHOLE, OpenedRows, WholeFile, rows_options
from cachetool.sources.file_table import write_table
from cachetool.sources.index import IndexSeen, index_facts
from cachetool.sources.kinds import EachFile, Kind, is_ours
from cachetool.sources.listing import Listing, write_listing
from cachetool.sources.ome import images_of
from cachetool.sources.opening import FileFacts, facts_of_records, facts_of_rows
from cachetool.sources.options import SourceOptions
from cachetool.sources.ours import Exported
from cachetool.sources.readers import EmptyFile, LeftOut, bounded, of_file
from cachetool.sources.rows import UNIT_BYTES
from cachetool.stores import Store
from cachetool.stores.base import Batch

__all__ = ["Survey", "list_files"]

Survey = Literal["probe", "all"]
_HEADER = 4096
_MAX_METADATA = 16 * 2**20
_WITH_BLOCKS = ("zarr", "hdf5", "netcdf3", "npy")
_IN_ORDER = 2**20
"""Bytes of a unit of records that are read in order. All of a unit is read if one of its records is."""


def list_files(
    store: Store,
    folder: Path,
    pages: Iterable[Batch],
    kind: Kind,
    options: SourceOptions,
    *,
    progress: Callable[[int], None] | None = None,
    alone: bool = False,
    survey: Survey = "probe",
    local: Path | None = None,
    left_out: Callable[[], Mapping[str, int]] = dict,
    learned: Mapping[str, Kind] | None = None,
) -> Listing:
    """Write the listing of the files among ``pages``, and the tables of what they hold, into ``folder``.

    Args:
        store: The store of the files.
        folder: The folder to write into.
        pages: The objects of the place, in pages.
        kind: The kind of the files.
        options: The options of the source.
        progress: Called now and then with the number of objects listed so far.
        alone: True for one file, beside which nothing was listed.
        survey: How much of the files to look at; see above.
        local: The store's folder on this machine, or None.
        left_out: Returns the number of objects left out, by reason, as for
            :func:`~cachetool.sources.listing.write_listing`.
        learned: The kinds of files by extensions that no kind has.

    Raises:
        BadObject: A file cannot be read, or two files have no schema in common.
        UsageError: Nothing in the files can be taken.
    """
    if options.block and kind.name not in _WITH_BLOCKS:
        raise UsageError(
            f"--block needs arrays in Zarr, HDF5, netCDF or .npy files, but {store.url} holds {kind.name} files;"
            " leave it out"
        )
    seen, stem = IndexSeen(store), EachFile(kind, alone=alone, learned=learned or {})
    listing = write_listing(
        folder, seen.note(pages), stem=stem, url=store.url,
        left_out=left_out, progress=progress,
    )  # fmt: skip
    if not listing.objects:
        return listing
    files = Files(store, listing, folder=local)
    place = repr(files.name(0)) if alone else store.url
    if options.decodes_images and kind.name == "npy":
        raise UsageError(
            f"--decode {options.decode} needs fields of bytes, but the rows of .npy files are numbers: {place};"
            " leave it out"
        )
    if options.value_format is not None and kind.name not in ("lmdb", "raw"):
        holds = f"is a {kind.name} file" if alone else f"holds {kind.name} files"
        raise UsageError(f"--value-format is for lmdb files and objects of bytes, but {place} {holds}; leave it out")
    if alone and local is not None:
        seen.ask_ours()
    others = (*listing.left_out.listed(), *stem.others.listed())
    facts = _Look(files, folder, kind, options, seen, survey, others).write(alone=alone)
    if options.runs is not None and not facts:
        raise UsageError(
            f"--runs draws neighbouring rows, but each {kind.name} file is drawn as a whole, in its order; leave --runs"
            " out"
        )
    if facts and not any(file_facts.rows for file_facts in facts):
        where = "the file has no rows" if len(facts) == 1 else f"none of its {len(facts)} files has rows"
        raise NotFound(f"no samples {'in' if alone else 'under'} {place}: {where}")
    return listing


class _Look:
    """A look at all files of a listing, to find out what they hold."""

    def __init__(
        self,
        files: Files,
        folder: Path,
        kind: Kind,
        options: SourceOptions,
        seen: IndexSeen,
        survey: Survey,
        others: tuple[tuple[str, str], ...],
    ) -> None:
        """Create the look. ``others`` names what is beside the files, and why it is left out."""
        self._files, self._folder, self._kind, self._options, self._seen = files, folder, kind, options, seen
        self._in_order = survey == "all"
        self._numbers = range(files.listing.objects)
        self._skipped: list[tuple[str, str]] = []
        self._others = others
        self._mean = 0

    def write(self, *, alone: bool) -> list[FileFacts]:
        """Write the tables. Return the facts about each file, or nothing if each file is one unit."""
        if self._kind.marks and not self._kind.by_path:
            return self._folders()
        ours = self._seen.exported(self._kind, map(self._files.name, self._numbers), alone=alone)
        if self._kind.records:
            facts = self._records(ours, alone=alone)
        elif self._kind.guarded:
            return self._guarded(ours)
        else:
            facts = self._rows()
        self._table(facts, ours)
        return facts

    def _table(self, facts: list[FileFacts], ours: Exported | None, **more: Any) -> None:
        if ours is not None and self._options.fields is None and not self._options.rename:
            written = [field for field in ours.schema if field.name != KEY or self._options.key]
            # The digest of an exported folder covers values and not the names of fields, so a file with renamed fields
            # would pass it.
            for name, file_facts in zip(ours.contents, facts, strict=False):
                if file_facts.schema and list(Schema.from_json(file_facts.schema)) != written:
                    raise CorruptError(f"{name}: its fields differ from those in {DATASET_FILE}")
        parts = [part for number, file_facts in enumerate(facts) for part in _placed(self._files, number, file_facts)]
        skipped = tuple(self._skipped) if len(facts) == 1 else bounded(self._skipped)
        write_table(
            self._folder, self._kind, self._options, facts, files=len(facts) or len(self._numbers), parts=parts,
            seen=self._files.seen(), mean=self._mean, in_order=self._in_order, ours=ours,
            **(more | {"skipped": (*self._others, *more.get("skipped", skipped))}),
        )  # fmt: skip

    def _rows(self) -> list[FileFacts]:
        """Return the facts about files that need no guarded process. Many files are read at once."""
        ranges, options = StoreRanges(self._files), rows_options(self._options)

        def look(number: int, _: object) -> tuple[FileFacts, tuple[tuple[str, str], ...]]:
            item, single = self._files.item(number), len(self._numbers) == 1
            file = SourceFile(Path(item.key), item.size, ranges, number, alone=single, in_order=self._in_order)
            opened = self._kind.opened(file, options)
            skipped = opened.skipped if single else tuple(of_file(item.key, opened.skipped))
            return facts_of_rows(opened, item.size), skipped

        fetcher: Fetcher[int, Any] = Fetcher(look, self._files.store.concurrency)
        try:
            # Only headers are fetched, of unknown size. 4 KiB each is a guess, so the pool's threads limit the requests
            # and not the bytes.
            looked = list(fetcher.run(self._numbers, ahead=2**30, size=lambda _: _HEADER))
        finally:
            fetcher.close()
        self._skipped += [entry for _, skipped in looked for entry in skipped]
        return [facts for facts, _ in looked]

    def _folders(self) -> list[FileFacts]:
        folders, roots = self._files.mark_folders(self._kind.marks)
        if not roots:
            raise NotFound(f"no {self._kind.name} in {self._files.store.url}")
        outer = roots
        if self._options.block:
            roots = images_of(roots, folders, self._metadata)
        beside = LeftOut()
        for number in self._numbers if outer != ("",) else ():
            key = self._files.listing.object(number).key
            # A linear search would compare a million keys with every root. The roots are sorted and none contains
            # another, so one candidate is left.
            at = bisect.bisect_right(outer, key)
            if not (at and key.startswith(outer[at - 1])) and not is_ours(key):
                beside.add(key, f"not inside of a {self._kind.name}")
        self._others += beside.listed()
        ours = self._seen.exported(self._kind, [root.rstrip("/") for root in roots], alone=roots == ("",))
        return self._guarded(ours, roots, folders)

    def _metadata(self, key: str) -> bytes | None:
        """Return the metadata of a Zarr, or None if there are none."""
        item = self._files.find(key)
        if item is None or item.size > _MAX_METADATA:
            return None
        return bytes(self._files.store.get(item))

    def _guarded(
        self, ours: Exported | None, roots: tuple[str, ...] = (), folders: tuple[str, ...] = ()
    ) -> list[FileFacts]:
        """Return the facts about files that the guarded process opens one after another."""
        with OpenedRows(
            self._files, self._kind, self._options, roots=roots, folders=folders, in_order=self._in_order
        ) as opened:
            facts = [FileFacts(**file_facts) for file_facts in opened.facts]
            # The facts come from a process that a hostile file may control. They decide which bytes are fetched and how
            # they are read, so they are checked before they are written.
            _check(self._files, self._kind, facts)
            self._measure(opened, facts)
            self._table(facts, ours, roots=roots, folders=folders, skipped=opened.skipped)
        return facts

    def _measure(self, opened: OpenedRows | WholeFile, facts: list[FileFacts]) -> None:
        """Measure the first sample while a process has its file open. Its size stands for all samples where sizes
        differ."""
        if any(file_facts.grid for file_facts in facts):
            rows = max(1, sum(file_facts.rows for file_facts in facts))
            self._mean = max(1, sum(file_facts.row * file_facts.rows for file_facts in facts) // rows)
        fixed = all(Schema.from_json(file_facts.schema).is_fixed for file_facts in facts)
        if self._in_order and not self._mean and not fixed and any(file_facts.rows for file_facts in facts):
            self._mean = max(1, opened.read(0, 1).nbytes)

    def _records(self, ours: Exported | None, *, alone: bool) -> list[FileFacts]:
        files = self._files
        if not self._kind.by_path:
            if alone:
                self._seen.ask(files.name(0))
            indexes = [self._seen.of(files.name(number)) for number in self._numbers]
            present = [index for index in indexes if index is not None]
            # An index tells where each record is, so records can be drawn one by one. A read in order takes the files
            # from the start and needs no index.
            if len(present) == len(indexes) and not self._in_order:
                get = files.store.get
                return [index_facts(self._kind, files.identified(at), index, get) for at, index in enumerate(present)]
        # Files up to 4 GiB are drawn as one unit, without a look into them: that would fetch each of them twice.
        if not self._in_order and all(self._size(number, alone=alone) <= MAX_WHOLE for number in self._numbers):
            return []
        facts = [self._record_file(number, ours) for number in self._numbers]
        # A file without samples has no schema of its own. It gets the one of the other files, so that all fit one
        # dataset.
        like = next((one for one in facts if one.rows), None)
        if like is not None:
            facts = [one if one.rows else replace(one, schema=like.schema, names=like.names) for one in facts]
        return facts

    def _size(self, number: int, *, alone: bool) -> int:
        """Return the size of a file in bytes, as far as the listing tells. Files of unknown size are asked for when
        they are read, and may then be refused."""
        return self._files.item(number).size if alone else self._files.listing.object(number).size

    def _record_file(self, number: int, ours: Exported | None) -> FileFacts:
        """Return the facts about one file, after looking at all of its records."""
        files = self._files
        with WholeFile(files, number, self._kind, self._options, ours) as whole:
            try:
                opened = whole.opened()
            except EmptyFile as error:
                if len(self._numbers) == 1:
                    raise BadObject(str(error)) from None
                self._skipped.append((files.name(number), "no samples in it"))
                return FileFacts(rows=0, chunk=1, piece=0, schema=[], offsets={}, stored={}, cuts=[])
            single = len(self._numbers) == 1
            self._skipped += opened.skipped if single else of_file(files.name(number), opened.skipped)
            unit_bytes = _IN_ORDER if self._in_order else UNIT_BYTES
            facts = facts_of_records(opened, files.item(number).size, unit_bytes)
            if self._kind.guarded:
                self._measure(whole, [facts])
        # Without places of records the file must be unpacked from its start for each draw. Above 4 GiB it is not kept
        # in memory either.
        if not self._in_order and not facts.parts and hasattr(opened, "places"):
            raise BadObject(
                f"{files.name(number)!r} is compressed and too large to be read in random order; decompress it, or"
                " write its samples into other files first: cachetool convert FILE --to lmdb --out DIR"
            )
        return facts


def _check(files: Files, kind: Kind, facts: list[FileFacts]) -> None:
    """Raise :class:`BadObject` if rows that the guarded process reports are not inside their file.

    The process may be under the control of a hostile file.
    """
    for number, file_facts in enumerate(facts):
        schema = Schema.from_json(file_facts.schema)
        for field in schema:
            offset = file_facts.offsets[field.name]
            if offset < 0:
                continue
            stored = np.dtype(file_facts.stored[field.name])
            # Rows at a stated offset are read here without a library, as `stored` says. A dtype that differs in more
            # than byte order would reinterpret the bytes.
            same = stored.newbyteorder("<") == field.numpy.newbyteorder("<") and not kind.marks
            if not same or offset + file_facts.rows * field.nbytes > files.item(number).size:
                raise BadObject(f"{files.item(number).key!r}: field {field.name!r} extends past the end of the file")
        good = file_facts.rows >= 0 and file_facts.chunk >= 1
        packing = file_facts.packing
        good = good and isinstance(packing, dict) and all(isinstance(one, dict) for one in packing.values())
        for name, step, count in file_facts.grid:
            good = good and isinstance(name, str) and min(step, count) >= 0
        if file_facts.grid:
            good = good and math.prod(count for _, _, count in file_facts.grid) == file_facts.rows
        if file_facts.cuts is not None:
            good = (
                good
                and bool((np.diff([0, *file_facts.cuts]) > 0).all())
                and (not file_facts.cuts or file_facts.cuts[-1] == file_facts.rows)
            )
        if not good:
            raise BadObject(f"{files.name(number)!r}: the process that reads it returned invalid data")


def _placed(files: Files, number: int, facts: FileFacts) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (file, first row, object, start, stop) of every part that exists. Bytes outside of the file are left
    out."""
    for row, start, nbytes, key in facts.parts:
        if not key:
            if start >= 0 and 0 < nbytes <= files.item(number).size - start:
                yield number, int(row), number, int(start), int(start + nbytes)
        elif (index := files.index(str(key))) is not None and (size := files.item(index).size):
            if not nbytes:
                yield number, int(row), index, 0, size
            elif start >= 0 and 0 < nbytes <= size - start:
                yield number, int(row), index, int(start), int(start + nbytes)
