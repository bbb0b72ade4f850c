"""Files of many samples as a source: draws become runs of one unit, and their bytes are fetched with many requests.

::

    draws asked for -> runs (one unit each) -> batches of about a block -> parts to fetch, neighbours joined
      -> threads: ranged GETs -> bytes, by offsets or through the guarded process -> rows in drawn order -> results

A :class:`Batch` has the runs that become one result, and the requests that fetch their parts: neighbours share one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Block, Column
from cachetool.core.cf import ATTRIBUTES, described
from cachetool.core.errors import AccessDenied, BadObject, NotFound, Unreachable, UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.base import Hurry, Probe, Reading, ReadResult, Skipped, unhurried
from cachetool.sources.blame import Blame
from cachetool.sources.byte_source import Files, fetch_part
from cachetool.sources.classes import LABEL, folder_of, label_field
from cachetool.sources.fetch import Fetcher
from cachetool.sources.file_reading import Reader, Want, reader_of
from cachetool.sources.file_table import Run, Table
from cachetool.sources.images import ImageSurvey, no_images, packed, unpacked, with_images
from cachetool.sources.listing import Listing
from cachetool.sources.options import SourceOptions
from cachetool.sources.order import PartOrder
from cachetool.sources.readers import NOT_ASKED, NOTE, EmptyFile, MisfitRows
from cachetool.sources.rows import joined
from cachetool.sources.shapes import common_of, fitted
from cachetool.stores import Store
from cachetool.stores.traffic import arrived

__all__ = ["Batch", "Body", "Get", "MAX_RUNS", "MOST", "batch_of", "deliver", "open_files_source"]


GAP = 4 * 2**10
"""Largest gap in bytes between two parts that one request fetches, with the gap, instead of two requests."""
MOST = 8 * 2**20
"""Bytes of one request, unless a single part is larger."""
# Runs of a few bytes would otherwise fill a batch by the hundred thousands before it has 8 MiB.
MAX_RUNS = 4096


@dataclass(slots=True)
class Get:
    """One request: the parts of a batch that are neighbours in one object."""

    item: int
    start: int
    stop: int
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Number of the run in the batch, and number of the part in the run."""


@dataclass(slots=True)
class Batch:
    """Runs that become one result."""

    runs: list[Run]
    wants: list[list[Want]]
    gets: list[Get]
    bodies: list[list[memoryview]]
    errors: dict[int, BadObject | NotFound] = field(default_factory=dict)
    misfits: dict[int, MisfitRows] = field(default_factory=dict)
    """Rows that are no samples, by the number of their run. The run's block has the other rows."""
    fetched: int = 0
    missing: int = 0


Body = memoryview | BadObject | NotFound


def batch_of(runs: list[Run], wants: list[list[Want]], errors: dict[int, BadObject | NotFound]) -> Batch:
    """Return the batch of these runs. ``errors`` were known before the fetch. Neighbouring parts become one request."""
    parts = sorted(
        (want.item, want.start, want.stop, number, part)
        for number, run_wants in enumerate(wants)
        for part, want in enumerate(run_wants)
    )
    gets: list[Get] = []
    for item, start, stop, number, part in parts:
        last = gets[-1] if gets else None
        near = last is not None and last.item == item and start - last.stop <= GAP
        # A request costs about as much as 64 KiB of transfer, so up to 4 KiB of gap are fetched along. 8 MiB bound the
        # memory of one request.
        if last is not None and near and max(stop, last.stop) - last.start <= MOST:
            last.stop = max(stop, last.stop)
            last.parts.append((number, part))
        else:
            gets.append(Get(item, start, stop, [(number, part)]))
    bodies = [[memoryview(b"")] * len(run_wants) for run_wants in wants]
    # A batch without parts gets one empty request, because _Batches yields a batch when its last request is answered.
    return Batch(runs, wants, gets or [Get(0, 0, 0)], bodies, errors)


def deliver(batch: Batch, get: Get, body: Body) -> None:
    """Give the answer of a request to the parts that it is for."""
    if isinstance(body, memoryview):
        batch.fetched += len(body)
    for number, part in get.parts:
        if isinstance(body, memoryview):
            want = batch.wants[number][part]
            batch.bodies[number][part] = body[want.start - get.start : want.stop - get.start]
        else:
            batch.errors[number] = body


AHEAD = 128 * 2**20
"""Bytes that may be in flight or wait for their turn."""
_PROBED = 8
# Runs in the first batch of a caller that waits for samples. Later batches double, so the first samples arrive soon and
# requests stay large.
_FIRST_RUNS = 8
_PROBED_BYTES = 64 * 2**20

_Numbers = npt.NDArray[np.int64]


def open_files_source(
    store: Store, folder: Path, options: SourceOptions, *, url: str, local: Path | None = None, number: bool = True
) -> FilesSource:
    """Return the source whose files were listed into ``folder``. It takes over ``store``.

    ``url`` is the source's name in messages, and ``local`` its folder on this machine or None. ``number``: give
    samples without a key one made of file and row.
    """
    table = Table.open(folder)
    table.refuse_others(options, url)
    listing = Listing.open(folder)
    return FilesSource(Files(store, listing, table.seen, folder=local), table, options, url, number=number)


class FilesSource:
    """A source of files of many samples; see :class:`cachetool.sources.base.Source`."""

    def __init__(self, files: Files, table: Table, options: SourceOptions, url: str, *, number: bool = True) -> None:
        """Create the source. Call :func:`open_files_source` instead."""
        listing, store = files.listing, files.store
        self._store, self._table, self._options, self._files = store, table, options, files
        self._blame = Blame(store, files.item, listing.objects)
        kind = table.kind.name
        # Members of tar files say by their names what they are, and values of a database may be declared to be images.
        # Both are decoded by their readers.
        self._images = options.decodes_images and kind != "tar" and options.value_format != "image"
        self._sparse = kind == "tfrecord" and table.ours is None
        self._number = options.key and number
        self.url = url
        sizes = table.unit_sizes()
        self._sizes = sizes
        self.left_out_counts = dict(listing.left_out)
        self.units = self.samples = sizes if isinstance(sizes, int) else int(sizes.sum())
        facts = [listing.identity, kind, table.chosen]
        self.identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self._reader: Reader = reader_of(self._files, table, options)
        self._fetcher: Fetcher[Get, Body] = Fetcher(self._fetch, options.concurrency or store.concurrency)
        self._order = functools.lru_cache(maxsize=64)(functools.partial(PartOrder, self._sizes))
        self.vanished = np.zeros(0, dtype=np.int64)
        self.segments: tuple[int, ...] = ()

    def order(
        self,
        *,
        seed: int,
        pass_number: int,
        segments: Sequence[int] = (),
        sequential: bool = False,
        part: int = 0,
        cut: int = 1,
    ) -> PartOrder:
        """Return the units in a seeded order, then the rows of each unit. Files do not grow, so ``segments`` is
        ignored."""
        in_rows = self._options.runs is not None
        return self._order(
            seed=seed, pass_number=pass_number, sequential=sequential, part=part, cut=cut, in_rows=in_rows
        )  # fmt: skip

    def probe(self, units: _Numbers, *, skip_bad: bool = False) -> Probe:
        """Return the schema that all files share. The size of samples, and the fields of archives, are taken from a few
        units."""
        probe = self._looked(np.asarray(units, dtype=np.int64), skip_bad=skip_bad)
        skipped = (*self.skipped, *self._reader.skipped.listed())
        left_out = tuple(entry for entry in skipped if entry[1] != NOT_ASKED)
        return replace(probe, left_out=left_out, left_out_counts=self.left_out_counts)

    def _looked(self, units: _Numbers, *, skip_bad: bool) -> Probe:
        if self._options.decode == "cf" and not any(layout.packing for layout in self._table.layouts):
            raise UsageError(
                f"--decode cf finds nothing to decode in {self.url}: no chosen field has the attributes"
                f" {', '.join(ATTRIBUTES[1:])} of HDF5, netCDF or Zarr;\nleave --decode out"
            )
        if self._table.layouts and (self._table.in_order or not self._table.kind.records):
            # The first file of each layout, for messages: write_table numbered the layouts in the order in which they
            # first occur.
            firsts = np.flatnonzero(np.diff(np.maximum.accumulate(self._table.layout), prepend=-1))
            layouts = zip(firsts.tolist(), self._table.layouts, strict=True)
            by_name = [(self._called(file), layout.schema) for file, layout in layouts]
            schema = self._schema(common_of(by_name, sparse=self._sparse))
            if self._images and schema.is_fixed and len(units):
                raise self._no_images(schema)
            if schema.is_fixed or not len(units):
                return Probe(schema, max(1, schema.fixed_nbytes))
            # A conversion writes all samples under one schema, so every image is looked at. A pull draws at random and
            # looks at a few.
            if self._images and self._table.in_order:
                return self._all_images(schema)
            if self._table.mean:
                return Probe(schema, self._table.mean)
            return self._probed(schema, self._some(units, schema, skip_bad=skip_bad), 1, skip_bad=skip_bad)
        blocks: list[Block] = []
        names: list[str] = []
        first_error: Exception | None = None
        looked = fetched = 0
        # A unit that is an archive may have gigabytes, so eight of them, or 64 MiB, must be enough.
        for unit in units[: _PROBED if self._table.file_is_unit else len(units)]:
            for batch in self._fetched(np.array([unit])):
                run_blocks = self._blocks(batch)
                error = batch.errors.get(0)
                if error is not None and not skip_bad:
                    raise error
                first_error = first_error or error
                names += [
                    self._called(run.file) for run, block in zip(batch.runs, run_blocks, strict=True) if len(block)
                ]
                blocks += [block for block in run_blocks if len(block)]
                looked, fetched = looked + 1, fetched + batch.fetched
            if blocks and fetched >= _PROBED_BYTES:
                break
        if not blocks:
            raise first_error or NotFound(f"no samples under {self.url}")
        by_name = [(name, block.schema) for name, block in zip(names, blocks, strict=True)]
        schema = common_of(by_name, sparse=self._sparse)
        return self._probed(schema, blocks, max(1, sum(map(len, blocks)) // looked), skip_bad=skip_bad)

    def _all_images(self, schema: Schema) -> Probe:
        """Return the schema that holds the images of all samples, after looking at them block after block."""
        images, nbytes = ImageSurvey(schema, self._options.pixels), 0
        with contextlib.closing(self._fetched(np.arange(self.units, dtype=np.int64))) as batches:
            for piece in self._pieces(batches, schema, skip_bad=False):

                def called(index: int, draws: _Numbers = piece.draws) -> str:
                    return self._row_name(int(draws[index]))

                nbytes += images.add(piece.block, called)
        if images.schema == schema:
            raise self._no_images(schema)
        return Probe(images.schema, -(-nbytes // max(1, self.units)))

    def _some(self, units: _Numbers, schema: Schema, *, skip_bad: bool) -> list[Block]:
        """Return the first samples of ``units``: eight of them, or all if images are to be looked at, up to 64 MiB."""
        blocks, nbytes = [], 0
        with contextlib.closing(self._fetched(units if self._images else units[:_PROBED])) as batches:
            for piece in self._pieces(batches, schema, skip_bad=skip_bad):
                blocks.append(piece.block)
                nbytes += piece.block.nbytes
                if nbytes >= _PROBED_BYTES:
                    break
        return blocks

    def _probed(self, schema: Schema, blocks: list[Block], per_unit: int, *, skip_bad: bool) -> Probe:
        nbytes, count = sum(block.nbytes for block in blocks), sum(map(len, blocks))
        if self._images:
            stored = schema
            schema, nbytes = with_images(stored, blocks, self._options.pixels, skip_bad=skip_bad)
            if schema == stored and count:
                raise self._no_images(schema)
        return Probe(schema, -(-nbytes // max(1, count)), per_unit)

    def _no_images(self, schema: Schema) -> UsageError:
        why = "no field of bytes begins like a JPEG, PNG, WebP, GIF or TIFF"
        return no_images(self.url, self._options.decode, schema, why)

    def read(
        self,
        units: _Numbers,
        *,
        schema: Schema,
        skip_bad: bool = False,
        block_bytes: int = BLOCK_BYTES,
        hurry: Hurry = unhurried,
    ) -> Reading:
        """Return the samples of ``units`` in that order; see :meth:`cachetool.sources.base.Source.read`."""
        numbers, growing = np.asarray(units, dtype=np.int64), hurry() is not None
        batches = _Batches(self._fetcher, self._batches(numbers, block_bytes, growing=growing))
        pieces = self._pieces(batches, schema, skip_bad=skip_bad)
        if self._images:
            pieces = unpacked(
                pieces, schema, self._options.pixels, skip_bad=skip_bad, block_bytes=block_bytes,
                name=lambda draw: self._row_name(int(numbers[draw])),
            )  # fmt: skip
        return Reading(batches.fetching, pieces)

    def _pieces(self, batches: Iterable[Batch], schema: Schema, *, skip_bad: bool) -> Generator[ReadResult]:
        """Yield the samples as they are read. Images are still encoded bytes."""
        for batch in batches:
            blocks: list[Block] = []
            draws, skipped = [], []
            run_blocks = self._blocks(batch)
            done = batch.runs[-1].first + len(batch.runs[-1].inside)
            failed: BadObject | NotFound | None = None
            for number, (run, block) in enumerate(zip(batch.runs, run_blocks, strict=True)):
                error = batch.errors.get(number)
                # A file without samples has no schema that could fit the dataset's.
                if error is None and self._table.file_is_unit and not len(block):
                    continue
                misfits = _asked(run, batch.misfits.get(number))
                if misfits is not None and not skip_bad:
                    error = misfits
                if error is None:
                    try:
                        wanted = packed(schema, block.schema) if self._images else schema
                        blocks.append(fitted(block, wanted, self._called(run.file), sparse=self._sparse))
                    except BadObject as misfit:
                        error = misfit
                if error is not None and not skip_bad:
                    failed, done = error, run.first
                    break
                if error is not None:
                    reason = " ".join(str(error).split("\n"))
                    keys = self._keys(run)
                    skipped += [Skipped(run.first + at, key, reason) for at, key in enumerate(keys)]
                else:
                    first = np.arange(run.first, run.first + len(run.inside))
                    if misfits is not None:
                        bad = np.flatnonzero(is_misfit := _is_misfit(run, misfits)).tolist()
                        keys, rows = self._keys(run), (run.start + run.inside).tolist()
                        skipped += [Skipped(run.first + at, keys[at], misfits.misfits[rows[at]]) for at in bad]
                        first = first[~is_misfit]
                    draws.append(np.repeat(first, len(block)) if self._table.file_is_unit else first)
            block = Block.concat(blocks) if blocks else Block.from_samples(schema, [])
            at = np.concatenate(draws) if draws else np.zeros(0, np.int64)
            # The samples before the error are returned first. The caller can so commit them before the pull ends.
            if blocks or failed is None:
                yield ReadResult(block, at, done, tuple(skipped), batch.fetched)
            if failed is not None:
                raise failed

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """Data of the files that is in no sample: name and reason."""
        note = "" if self._options.decode == "cf" else described([layout.packing for layout in self._table.layouts])
        return ((NOTE, note), *self._table.skipped) if note else self._table.skipped

    @property
    def in_order(self) -> bool:
        """True if reading is fast only from the first sample to the last."""
        return self._reader.in_order

    def check(self, start: int, checksums: npt.NDArray[np.uint64]) -> None:
        """Compare the checksums of samples with those that were stored beside exported files.

        ``checksums``, uint64 (fields, samples), are of the samples from ``start`` on. Raise :class:`CorruptError`
        that names file, sample and field.
        """
        ours, starts = self._table.ours, self._table.starts
        # The stored checksums are of all fields, as they were written. With chosen, renamed or decoded fields there is
        # nothing to compare.
        chosen = self._options.fields is None and not self._options.rename and self._options.decode is None
        if ours is None or not chosen or len(checksums) != len(ours.schema):
            return
        done = 0
        while done < checksums.shape[1]:
            file = int(np.searchsorted(starts, start + done, side="right")) - 1
            count = min(checksums.shape[1] - done, int(starts[file + 1]) - start - done)
            part = checksums[:, done : done + count]
            ours.check(self._store, self._called(file), start + done - int(starts[file]), part)
            done += count

    def close(self) -> None:
        """Close threads, processes and connections."""
        self._fetcher.close()
        self._reader.close()
        self._store.close()

    def _fetched(self, units: _Numbers) -> _Batches:
        return _Batches(self._fetcher, self._batches(units, BLOCK_BYTES))

    def _batches(self, units: _Numbers, block_bytes: int, *, growing: bool = False) -> Iterator[Batch]:
        """Yield runs put together in batches. ``growing``: begin with a small batch and double, so that the first
        samples arrive soon."""
        most = min(block_bytes, MOST)
        together = _FIRST_RUNS if growing else MAX_RUNS
        runs: list[Run] = []
        wants: list[list[Want]] = []
        errors: dict[int, BadObject | NotFound] = {}
        total = 0
        for run in self._table.runs(units):
            want, nbytes, error = self._wanted(run)
            # A file that is one unit is a batch by itself: it may have gigabytes, and its samples must be in one block.
            if runs and (total + nbytes > most or len(runs) >= together or self._table.file_is_unit):
                yield batch_of(runs, wants, errors)
                together = min(MAX_RUNS, 2 * together)
                runs, wants, errors, total = [], [], {}, 0
            if error is not None:
                errors[len(runs)] = error
            runs.append(run)
            wants.append(want)
            total += nbytes
        if runs:
            yield batch_of(runs, wants, errors)

    def _wanted(self, run: Run) -> tuple[list[Want], int, BadObject | NotFound | None]:
        """Return the parts to fetch for a run and their bytes in memory, or an error. The store may be asked for the
        file's size, and may refuse."""
        try:
            return self._reader.wants(run), self._reader.nbytes(run), None
        except (BadObject, NotFound) as error:
            return [], 0, error
        except (AccessDenied, Unreachable) as error:
            return [], 0, self._blame.of(error)

    def _fetch(self, get: Get, stop: threading.Event) -> Body:
        # After an error the results of later requests are not needed, so those that have not begun are not sent.
        if get.stop <= get.start or stop.is_set():
            return memoryview(b"")
        try:
            body = fetch_part(self._store, self._files.item(get.item), get.start, get.stop)
        except (BadObject, NotFound) as error:
            return error
        except (AccessDenied, Unreachable) as error:
            return self._blame.of(error)
        self._blame.came(self._files.item(get.item))
        arrived(len(body))
        return body

    def _blocks(self, batch: Batch) -> list[Block]:
        """Return the samples of each run, with an empty block for a run that failed."""
        out = []
        fetched = self._reader.fetched
        for number, run in enumerate(batch.runs):
            block: Block | None = None
            if number not in batch.errors:
                try:
                    try:
                        block = self._reader.block(run, batch.bodies[number])
                    except MisfitRows as error:
                        batch.misfits[number], block = error, error.block
                    if not self._table.file_is_unit and not _in_order(run):
                        block = block.take(run.inside)
                    # Labels and keys are added while the rows of misfits are still there: keys are counted by the run's
                    # draws.
                    block = self._completed(run, block)
                    if number in batch.misfits:
                        block = block.take(np.flatnonzero(~_is_misfit(run, batch.misfits[number])))
                except EmptyFile as error:
                    if len(self._table.rows) == 1:
                        batch.errors[number] = BadObject(str(error))
                except (BadObject, NotFound) as error:
                    batch.errors[number] = error
            out.append(Block.from_samples(_NOTHING, []) if block is None or number in batch.errors else block)
            # The fetched bytes of this run are released before the next one is decoded.
            batch.bodies[number] = []
        batch.fetched += self._reader.fetched - fetched
        return out

    def _completed(self, run: Run, block: Block) -> Block:
        """Return the block with label and key."""
        columns: dict[str, Column] = dict(block.columns)
        fields = list(block.schema)
        if self._options.label_from_folder and not self._reader.labels:
            folder = folder_of(self._files.name(self._object(run.file)))
            if not folder:
                raise BadObject(f"{self._called(run.file)!r} is in no folder, so --label-from-folder finds no label")
            if self._options.label_from_folder == "int":
                columns[LABEL] = np.full(len(block), self._options.classes.index(folder), dtype="<i8")
            else:
                columns[LABEL] = joined([folder.encode("utf-8", "surrogateescape")] * len(block))
            fields.append(label_field(self._options))
        if self._number and KEY not in block.schema:
            keys = self._keys(run, len(block))
            columns[KEY] = joined([key.encode("utf-8", "surrogateescape") for key in keys])
            fields.append(Field(KEY, "str"))
        return Block(Schema(tuple(fields)), columns)

    def _schema(self, rows: Schema) -> Schema:
        more = [label_field(self._options)] if self._options.label_from_folder and not self._reader.labels else []
        if self._number and KEY not in rows:
            more.append(Field(KEY, "str"))
        self._refuse_unknown(rows)
        for name in self._options.chosen or ():
            if name not in rows and name != LABEL:
                for file, why in self._table.skipped:
                    if file == name or file.endswith(f": {name}"):
                        raise UsageError(f"field {name!r} cannot be read: {why}")
                raise UsageError(f"unknown field {name!r}; choose one of {', '.join(rows.names)}")
        return Schema((*rows, *more))

    def _refuse_unknown(self, rows: Schema) -> None:
        """Raise :class:`UsageError` for a field to leave out that is in no file. Tar files check this themselves."""
        if self._table.kind.name == "tar":
            return
        skipped = [name for name, _ in self._table.skipped]
        old = {new: name for name, new in self._options.rename.items()}
        for new in sorted(self._options.dropped if "..." not in skipped else ()):
            name = old.get(new, new)
            # ``a`` may stand for all of the columns ``a.b``, as Parquet names the fields of a structure.
            if not any(f"{entry}.".startswith(f"{name}.") or f": {name}." in f"{entry}." for entry in skipped):
                raise UsageError(f"unknown field {new!r} to leave out; choose one of {', '.join(rows.names)}")

    def _object(self, file: int) -> int:
        return 0 if self._table.roots else file

    def _called(self, file: int) -> str:
        if self._table.roots:
            return self._table.roots[file].rstrip("/") or self.url.rstrip("/").rpartition("/")[2]
        return self._files.name(file)

    def _row_name(self, sample: int) -> str:
        """Return a name for a sample that has no key: file and row."""
        file = int(np.searchsorted(self._table.starts, sample, side="right")) - 1
        return f"{self._called(file)}#{self._placed(file, sample - int(self._table.starts[file]))}"

    def _placed(self, file: int, row: int) -> str:
        """Return the place of a sample in its file, for its key."""
        layouts = self._table.layouts
        return layouts[self._table.layout[file]].named(row) if layouts else str(row)

    def _keys(self, run: Run, count: int = 1) -> list[str]:
        name = self._called(run.file)
        if self._table.file_is_unit:
            return [name] if count == 1 and not self._reader.numbered else [f"{name}#{at}" for at in range(count)]
        return [f"{name}#{self._placed(run.file, run.start + at)}" for at in run.inside.tolist()]


class _Batches:
    """An iterator over batches whose parts are fetched. The first requests are made when it is created."""

    def __init__(self, fetcher: Fetcher[Get, Body], batches: Iterator[Batch]) -> None:
        self._begun: deque[Batch] = deque()
        self.fetching = fetcher.run(self._gets(batches), ahead=AHEAD, size=lambda get: get.stop - get.start)

    def _gets(self, batches: Iterator[Batch]) -> Iterator[Get]:
        for batch in batches:
            self._begun.append(batch)
            batch.missing = len(batch.gets)
            yield from batch.gets

    def __iter__(self) -> Iterator[Batch]:
        for body in self.fetching:
            # Answers arrive in the order of the requests, so the next answer always belongs to the first batch that is
            # not complete.
            batch = self._begun[0]
            deliver(batch, batch.gets[len(batch.gets) - batch.missing], body)
            batch.missing -= 1
            if not batch.missing:
                yield self._begun.popleft()

    def close(self) -> None:
        """Cancel the requests in flight."""
        self.fetching.close()


_NOTHING = Schema((Field("nothing", "bytes"),))


def _is_misfit(run: Run, error: MisfitRows) -> npt.NDArray[np.bool_]:
    """Return a mask of the draws of a run that are no samples."""
    return np.isin(run.start + run.inside, list(error.misfits))


def _asked(run: Run, error: MisfitRows | None) -> MisfitRows | None:
    """Return the error for the rows of a run that are asked for, or None if these rows are good."""
    if error is None or not (is_misfit := _is_misfit(run, error)).any():
        return None
    return error.of((run.start + run.inside[is_misfit]).tolist())


def _in_order(run: Run) -> bool:
    return len(run.inside) == run.stop - run.start and bool((np.diff(run.inside) == 1).all())
