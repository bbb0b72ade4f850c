"""Listing files of many samples: each is looked at once, to know its rows and where they lie.

``survey="probe"`` looks at no more than that takes: of archives and records, whose samples nobody has counted,
each file is one unit, unless an index lies beside it. ``survey="all"`` reads these through, so that all samples are
counted and the schema holds all of them; and rows will be read from the first to the last.
"""

from __future__ import annotations

import bisect
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
from cachetool.sources.opening import FileFacts, facts_of_records, facts_of_rows
from cachetool.sources.options import SourceOptions
from cachetool.sources.ours import Exported
from cachetool.sources.readers import EmptyFile, LeftOut, bounded, of_file
from cachetool.sources.rows import UNIT_BYTES
from cachetool.stores import Object, Store

__all__ = ["Survey", "list_files"]

Survey = Literal["probe", "all"]
_HEADER = 4096
_IN_ORDER = 2**20
"""Records that are read in order share a unit of so many bytes, all of which is read if one is."""


def list_files(
    store: Store,
    folder: Path,
    pages: Iterable[list[Object]],
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
    """Write the listing of the files among ``pages`` and what they hold into ``folder``. ``alone``: of one file, beside
    which nothing was looked for; ``local``: where the store lies on this machine, if it does; ``left_out`` as for
    :func:`~cachetool.sources.listing.write_listing`; ``learned``: kinds of files by extensions that no kind has.

    Raises :class:`BadObject` for a file that cannot be read, or two that have no schema in common,
    :class:`UsageError` when nothing in them can be taken.
    """
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
        what = f"--decode {options.decode} is for fields of bytes"
        raise UsageError(f"{what}; the rows of .npy files are numbers: {place}")
    if options.value_format is not None and kind.name not in ("lmdb", "raw"):
        holds = f"is a {kind.name} file" if alone else f"holds {kind.name} files"
        raise UsageError(f"--value-format is for lmdb files and objects of bytes; {place} {holds}")
    if alone and local is not None:
        seen.ask_ours()
    others = (*listing.left_out.listed(), *stem.others.listed())
    facts = _Look(files, folder, kind, options, seen, survey, others).write(alone=alone)
    if facts and not any(file_facts.rows for file_facts in facts):
        where = "it" if len(facts) == 1 else f"any of {len(facts)} files"
        raise NotFound(f"no samples {'in' if alone else 'under'} {place}: no rows in {where}")
    return listing


class _Look:
    """Finds out what the files of a listing hold."""

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
        """``others``: what lies beside the files, and why it is left out."""
        self._files, self._folder, self._kind, self._options, self._seen = files, folder, kind, options, seen
        self._in_order = survey == "all"
        self._numbers = range(files.listing.objects)
        self._skipped: list[tuple[str, str]] = []
        self._others = others
        self._mean = 0

    def write(self, *, alone: bool) -> list[FileFacts]:
        """Write the tables; gives what each file is, or nothing where each is one unit."""
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
            for name, file_facts in zip(ours.contents, facts, strict=False):  # no checksum is over the names of fields
                if file_facts.schema and list(Schema.from_json(file_facts.schema)) != written:
                    raise CorruptError(f"{name}: its fields are not those that {DATASET_FILE} says")
        parts = [part for number, file_facts in enumerate(facts) for part in _placed(self._files, number, file_facts)]
        skipped = tuple(self._skipped) if len(facts) == 1 else bounded(self._skipped)
        write_table(
            self._folder, self._kind, self._options, facts, files=len(facts) or len(self._numbers), parts=parts,
            seen=self._files.seen(), mean=self._mean, in_order=self._in_order, ours=ours,
            **(more | {"skipped": (*self._others, *more.get("skipped", skipped))}),
        )  # fmt: skip

    def _rows(self) -> list[FileFacts]:
        """Of files that need no process of their own: many at once."""
        ranges, options = StoreRanges(self._files), rows_options(self._options)

        def look(number: int, _: object) -> tuple[FileFacts, tuple[tuple[str, str], ...]]:
            item, single = self._files.item(number), len(self._numbers) == 1
            file = SourceFile(Path(item.key), item.size, ranges, number, alone=single, in_order=self._in_order)
            opened = self._kind.opened(file, options)
            skipped = opened.skipped if single else tuple(of_file(item.key, opened.skipped))
            return facts_of_rows(opened, item.size), skipped

        fetcher: Fetcher[int, Any] = Fetcher(look, self._files.store.concurrency)
        try:
            looked = list(fetcher.run(self._numbers, ahead=2**30, size=lambda _: _HEADER))
        finally:
            fetcher.close()
        self._skipped += [entry for _, skipped in looked for entry in skipped]
        return [facts for facts, _ in looked]

    def _folders(self) -> list[FileFacts]:
        folders, roots = self._files.mark_folders(self._kind.marks)
        if not roots:
            raise NotFound(f"{self._files.store.url}: no {self._kind.name} in it")
        beside = LeftOut()
        for number in self._numbers if roots != ("",) else ():
            key = self._files.listing.object(number).key
            at = bisect.bisect_right(roots, key)
            if not (at and key.startswith(roots[at - 1])) and not is_ours(key):
                beside.add(key, f"in no {self._kind.name}")
        self._others += beside.listed()
        ours = self._seen.exported(self._kind, [root.rstrip("/") for root in roots], alone=roots == ("",))
        return self._guarded(ours, roots, folders)

    def _guarded(
        self, ours: Exported | None, roots: tuple[str, ...] = (), folders: tuple[str, ...] = ()
    ) -> list[FileFacts]:
        """Have the guarded process open every file, for what it is."""
        with OpenedRows(
            self._files, self._kind, self._options, roots=roots, folders=folders, in_order=self._in_order
        ) as opened:
            facts = [FileFacts(**file_facts) for file_facts in opened.facts]
            _check(self._files, self._kind, facts)
            self._measure(opened, facts)
            self._table(facts, ours, roots=roots, folders=folders, skipped=opened.skipped)
        return facts

    def _measure(self, opened: OpenedRows | WholeFile, facts: list[FileFacts]) -> None:
        """Look at the first sample, whose size stands for all where they differ, while a process has its file open."""
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
            if len(present) == len(indexes) and not self._in_order:
                get = files.store.get
                return [index_facts(self._kind, files.identified(at), index, get) for at, index in enumerate(present)]
        if not self._in_order and all(self._size(number, alone=alone) <= MAX_WHOLE for number in self._numbers):
            return []
        facts = [self._record_file(number, ours) for number in self._numbers]
        like = next((one for one in facts if one.rows), None)
        if like is not None:  # a file without samples has no schema of its own
            facts = [one if one.rows else replace(one, schema=like.schema, names=like.names) for one in facts]
        return facts

    def _size(self, number: int, *, alone: bool) -> int:
        """Bytes of a file; one of many whose listing does not tell is asked for when it is read, and may be refused."""
        return self._files.item(number).size if alone else self._files.listing.object(number).size

    def _record_file(self, number: int, ours: Exported | None) -> FileFacts:
        """What one file is, all of whose records are looked at."""
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
        if not self._in_order and not facts.parts and hasattr(opened, "places"):
            raise BadObject(
                f"{files.name(number)!r} is packed as a whole and larger than can be read at random; unpack it, or"
                " write its samples into other files first: cachetool convert"
            )
        return facts


def _check(files: Files, kind: Kind, facts: list[FileFacts]) -> None:
    """Rows that the guarded process says to lie in a file must lie in it: it may be under a hostile file's command."""
    for number, file_facts in enumerate(facts):
        schema = Schema.from_json(file_facts.schema)
        for field in schema:
            offset = file_facts.offsets[field.name]
            if offset < 0:
                continue
            stored = np.dtype(file_facts.stored[field.name])
            same = stored.newbyteorder("<") == field.numpy.newbyteorder("<") and not kind.marks
            if not same or offset + file_facts.rows * field.nbytes > files.item(number).size:
                raise BadObject(f"{files.item(number).key!r}: field {field.name!r} reaches past the end of the file")
        good = file_facts.rows >= 0 and file_facts.chunk >= 1
        packing = file_facts.packing
        good = good and isinstance(packing, dict) and all(isinstance(one, dict) for one in packing.values())
        if file_facts.cuts is not None:
            good = (
                good
                and bool((np.diff([0, *file_facts.cuts]) > 0).all())
                and (not file_facts.cuts or file_facts.cuts[-1] == file_facts.rows)
            )
        if not good:
            raise BadObject(f"{files.name(number)!r}: its reader talks nonsense")


def _placed(files: Files, number: int, facts: FileFacts) -> Iterator[tuple[int, int, int, int, int]]:
    """File, first row, object, and where in it, of every part that is there."""
    for row, start, nbytes, key in facts.parts:
        if not key:
            if start >= 0 and 0 < nbytes <= files.item(number).size - start:
                yield number, int(row), number, int(start), int(start + nbytes)
        elif (index := files.index(str(key))) is not None and files.item(index).size:
            yield number, int(row), index, 0, files.item(index).size
