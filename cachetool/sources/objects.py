"""A folder of objects as a source: the objects of one key are one sample and one unit.

::

:class:`Assembler` makes the fields of one sample from its parts: which parts are needed, the names of their fields, and
the fields that are added. It serves objects of a store and members of tar files, and works on values as well as on the
shapes that stand for values.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import AccessDenied, BadObject, Interrupted, NotFound, SourceError, Unreachable, UsageError
from cachetool.core.schema import KEY, MAX_FIELDS, Schema
from cachetool.core.units import format_size
from cachetool.sources.base import Hurry, Probe, Reading, ReadResult, Skipped, unhurried
from cachetool.sources.blame import Blame
from cachetool.sources.classes import folder_of, with_label
from cachetool.sources.decode import MAX_HEADER, Unusable, Value, decode, npy_layout
from cachetool.sources.fetch import Fetcher, Fetching
from cachetool.sources.images import no_images
from cachetool.sources.keys import CONTAINERS, IMAGES, Part, Stem
from cachetool.sources.limits import MAX_VALUE
from cachetool.sources.options import LABEL, SourceOptions
from cachetool.sources.order import PartOrder
from cachetool.sources.segments import SegmentedListing
from cachetool.sources.shapes import Shape, common_schema, majority, names_of, nbytes_of, shape_of
from cachetool.sources.value_format import check_value_format, is_raw
from cachetool.stores import Object, Store
from cachetool.stores.traffic import arrived

__all__ = ["Assembled", "Assembler", "ObjectsSource"]


T = TypeVar("T")
V = TypeVar("V")


@dataclass(slots=True)
class Assembled(Generic[V]):
    """The fields of one sample."""

    key: str
    values: dict[str, V] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Names of all fields that were seen, including those not asked for."""


class Assembler:
    """The rules, taken from a source's options, that make a sample from its parts."""

    def __init__(self, options: SourceOptions, where: str) -> None:
        """``where``: the place of the samples, for messages."""
        self._options, self._where = options, where
        self._wanted = None if options.chosen is None else frozenset(options.chosen)
        self._dropped = options.dropped
        self._numbers = {name: number for number, name in enumerate(options.classes)}

    def takes(self, sample: Assembled[V], part: Part) -> bool:
        """Return True if a part of ``sample`` can hold a field asked for, by its name or because it holds many
        fields."""
        if part.kind in CONTAINERS:
            return True
        name = self._options.rename.get(part.field, part.field)
        if not (wanted := self.wants(name)):
            sample.names.append(name)
        return wanted

    def wants(self, name: str) -> bool:
        """Return True if the field of this name is asked for."""
        return name not in self._dropped if self._wanted is None else name in self._wanted

    def needed(self, sample: Assembled[V], parts: Sequence[tuple[T, Part]]) -> list[tuple[T, Part]]:
        """Return the parts of ``sample`` that can hold a field asked for."""
        taken = [pair for pair in parts if self.takes(sample, pair[1])]
        # A container (npz, json) is fetched only if some field is still missing, because only its contents show its
        # fields.
        named = [pair for pair in taken if pair[1].kind not in CONTAINERS]
        return named if self._wanted is not None and len(named) == len(self._wanted) else taken

    def add(self, sample: Assembled[V], name: str, fields: Iterable[tuple[str, V]]) -> None:
        """Add the fields of the part ``name``. Raises :class:`BadObject` naming the part."""
        try:
            for old, value in fields:
                new = self._options.rename.get(old, old)
                sample.names.append(new)
                if not self.wants(new):
                    continue
                if isinstance(value, Unusable):
                    raise BadObject(f"{old[:100]!r}{value.why}; leave it out with --fields -{new[:100]}")
                _set(sample, new, value)
                if len(sample.values) > MAX_FIELDS:
                    raise BadObject(f"it has more than {MAX_FIELDS} fields; choose some with --fields")
        except BadObject as error:
            raise BadObject(f"{name!r}: {error}") from error.__cause__

    def finish(self, sample: Assembled[V], text: Callable[[str], V], number: Callable[[int], V] | None = None) -> None:
        """Add the label and the key; ``text`` and ``number`` make values of them.

        Raises :class:`BadObject` if a label is wanted and the sample lies in no folder.
        """
        if self._options.label_from_folder:
            folder = folder_of(sample.key)
            if not folder:
                raise BadObject(
                    f"{sample.key!r} is in no folder below {self._where}, so --label-from-folder finds no label"
                )
            _set(sample, LABEL, text(folder) if number is None else number(self._number(folder)))
        if self._options.key:
            sample.values[KEY] = text(sample.key)

    def _number(self, folder: str) -> int:
        if (number := self._numbers.get(folder)) is None:
            raise BadObject(f"folder {folder!r} was added after the folders were numbered, so it has no class")
        return number


def _set(sample: Assembled[V], name: str, value: V) -> None:
    if name in sample.values or name == KEY:
        raise BadObject(
            f"sample {sample.key!r} has field {name[:100]!r} twice; rename one with --rename, or cut names"
            " differently with --stem"
        )
    sample.values[name] = value


AHEAD = 64 * 2**20
"""Most bytes of requests in flight and of results that wait for their turn."""
# Several small units share a task, so that they share the cost of passing a task to a thread and its result back.
_TASK_BYTES = 128 * 2**10
_TASK_UNITS = 32
_PROBED_BYTES, _PROBED_LEAST = 64 * 2**20, 8
"""Most bytes of samples that must be fetched completely for the schema. The smallest are fetched first, at least 8."""
_HEADS = 256 * 2**10
"""Bytes of an array or of bytes above which only the beginning is read for the schema: the header or the size is
enough."""
_GUESS = 256 * 2**10
"""Assumed bytes of an object whose size the listing does not tell."""
_PIECE_SAMPLES = 2**14
_DRAIN = 1.0
"""Seconds that requests in flight get to finish when reading ends with an error."""
_LINGER, _LINGER_MOST = 0.2, 1.0
"""Seconds without a result, and seconds in total, after which waiting samples are handed out to a reader in a hurry."""

_Units = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Sample(Assembled[Value]):
    """One fetched unit: its values, or the reason why it has none."""

    fetched: int = 0
    nbytes: int = 0
    has_image: bool = False
    error: BadObject | NotFound | None = None
    failure: SourceError | None = None
    """The error of the store, after which no more samples come."""


@dataclass(slots=True)
class _Task:
    """Units that one thread fetches one after another."""

    start: int
    """Position of the first unit."""
    units: _Units
    nbytes: int
    samples: list[_Sample] = field(default_factory=list)
    """Samples fetched so far."""


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The facts about a sample that :meth:`ObjectsSource.probe` keeps."""

    key: str
    shapes: Mapping[str, Shape]
    nbytes: int
    names: tuple[str, ...]
    has_image: bool
    error: BadObject | NotFound | None
    fetched: int


class ObjectsSource:
    """Samples made of objects; see :class:`cachetool.sources.base.Source`."""

    def __init__(self, store: Store, listing: SegmentedListing, options: SourceOptions) -> None:
        """Take ownership of ``store``. Created by :func:`cachetool.sources.registry.open_source`."""
        self._store, self._listing, self._options = store, listing, options
        self._blame = Blame(store, lambda unit: listing.unit(unit)[0], listing.units)
        self._stem = Stem(listing.stem)
        self.url = store.url
        self._assembler = Assembler(options, store.url)
        self.units = self.samples = listing.units
        self.identity = listing.identity
        self.vanished = listing.vanished
        self.segments = listing.segments
        self.skipped = listing.names
        """Names that are in no sample, and notes on how the objects are read."""
        self.left_out_counts = dict(listing.left_out)
        threads = options.concurrency or store.concurrency
        self._reading: Fetcher[_Task, list[_Sample]] = Fetcher(self._read_task, threads)
        self._probing: Fetcher[_Task, list[_Shapes]] = Fetcher(self._probe_task, threads)

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
        """Return the order of a pass; every unit is one sample."""
        return PartOrder(
            self.units, seed=seed, pass_number=pass_number, segments=segments, home=self.segments, part=part, cut=cut,
            sequential=sequential,
        )  # fmt: skip

    def probe(self, units: _Units, *, skip_bad: bool = False) -> Probe:
        """Return the schema and mean size of the samples of ``units``. ``skip_bad`` leaves out samples that do not fit
        the majority."""
        if self._options.decode == "cf":
            raise UsageError(
                f"--decode cf is for HDF5, netCDF and Zarr, but {self.url} is a folder of objects; leave it out"
            )
        samples: list[_Shapes] = []
        first_error: Exception | None = None
        fetched = 0
        units = np.asarray(units, dtype=np.int64)
        sizes, wanted = self._listing.unit_bytes(units, unknown=_GUESS), self._to_probe(units)
        for some in (units[wanted], units[~wanted]):
            if samples:
                # The second group is read only if the first has no good sample.
                break
            tasks = self._tasks(some, self._probing.threads)
            with contextlib.closing(self._probing.run(tasks, ahead=AHEAD, size=_size)) as fetching:
                for sample in itertools.chain.from_iterable(fetching):
                    if sample.error is None:
                        samples.append(sample)
                    elif not skip_bad:
                        raise sample.error
                    first_error = first_error or sample.error
                    fetched += sample.fetched
                    if fetched > _PROBED_BYTES and len(samples) >= _PROBED_LEAST:
                        # A server without ranges sends the whole object instead of its beginning, so the bytes that
                        # arrived are counted too.
                        break
        if not samples:
            raise first_error or NotFound(f"no samples under {self.url}")
        self._check_value_format(units)
        pairs = [(sample.key, sample.shapes) for sample in samples]

        def objects(key: str) -> list[str]:
            groups = map(self._listing.unit, units.tolist())
            return next(([item.key for item in group] for group in groups if self._part(group[0]).sample == key), [])

        schema = common_schema(majority(pairs) if skip_bad else pairs, self._options.chosen, objects=objects)
        schema = with_label(schema, self._options)
        if self._options.decodes_images and not any(sample.has_image for sample in samples):
            why = f"no object has the extension of an image ({', '.join(sorted(IMAGES))})"
            raise no_images(self.url, self._options.decode, schema, why)
        names = {name for sample in samples for name in sample.names}
        for name in (*(self._options.chosen or ()), *sorted(self._options.dropped)):
            if name not in schema and name not in names:
                raise UsageError(
                    f"unknown field {name!r}; the samples have {names_of(self._names(samples[0], int(units[0])))}"
                )
        for old, new in self._options.rename.items():
            if new not in schema and self._options.wants(new):
                raise UsageError(
                    f"--rename {old}={new}: unknown field {old!r};"
                    f" the samples have {names_of(self._names(samples[0], int(units[0])))}"
                )
        # Only the smallest samples were fetched. The sizes in the listing correct the mean for the larger ones.
        mean = sum(sample.nbytes for sample in samples) / len(samples)
        if wanted.any() and sizes[wanted].any():
            mean *= sizes.mean() / sizes[wanted].mean()
        return Probe(schema, math.ceil(mean), left_out=self.skipped, left_out_counts=self.left_out_counts)

    def _check_value_format(self, units: _Units) -> None:
        """Raise :class:`UsageError` for a value format that fits no object of these units."""
        if self._options.value_format is None:
            return
        kinds = {self._part(item).kind for unit in units.tolist() for item in self._listing.unit(unit)}
        if "bytes" not in kinds:
            raise UsageError(
                f"--value-format is for objects of bytes, but {self.url} has {', '.join(sorted(kinds))}; leave it out"
            )

    def _to_probe(self, units: _Units) -> npt.NDArray[np.bool_]:
        """Return a mask of the units to fetch for the schema: all, unless they have too many bytes."""
        need = np.array([sum(map(self._to_read, self._listing.unit(unit))) for unit in units.tolist()], dtype=np.int64)
        order = np.argsort(need, kind="stable")
        few = max(_PROBED_LEAST, int(np.searchsorted(np.cumsum(need[order]), _PROBED_BYTES, side="right")))
        wanted = np.zeros(len(units), dtype=np.bool_)
        wanted[order[:few]] = True
        return wanted

    def _to_read(self, item: Object) -> int:
        """Return the bytes that probing fetches of an object."""
        size = item.size if item.size >= 0 else _GUESS
        return min(size, MAX_HEADER) if size > _HEADS and self._part(item).kind in ("npy", "bytes") else size

    def read(
        self,
        units: _Units,
        *,
        schema: Schema,
        skip_bad: bool = False,
        block_bytes: int = BLOCK_BYTES,
        hurry: Hurry = unhurried,
    ) -> Reading:
        """Return the samples of ``units`` in that order; see :meth:`cachetool.sources.base.Source.read`."""
        tasks = self._tasks(units, self._reading.threads, growing=hurry() is not None)
        fetching = self._reading.run(tasks, ahead=AHEAD, size=_size)
        return Reading(fetching, _pieces(fetching, schema, skip_bad=skip_bad, block_bytes=block_bytes, hurry=hurry))

    def close(self) -> None:
        """Close threads and connections."""
        self._reading.close()
        self._probing.close()
        self._store.close()

    def _tasks(self, units: _Units, threads: int, *, growing: bool = False) -> Iterator[_Task]:
        """Yield the units cut into tasks: small units share a task, but there are enough tasks to keep every thread
        busy.

        ``growing``: the first tasks have one unit each, so that the first samples arrive soon.
        """
        units = np.asarray(units, dtype=np.int64)
        sizes = self._listing.unit_bytes(units, unknown=_GUESS).tolist()
        # At least four tasks a thread: one slow task at the end must not leave the other threads idle.
        most = min(_TASK_UNITS, max(1, len(units) // (4 * threads)))
        start = total = 0
        for stop, size in enumerate(sizes):
            together = min(most, 1 + start // (4 * threads)) if growing else most
            if stop > start and (stop - start >= together or total + size > _TASK_BYTES):
                yield _Task(start, units[start:stop], total)
                start, total = stop, 0
            total += size
        if len(units):
            yield _Task(start, units[start:], total)

    def _read_task(self, task: _Task, stop: threading.Event) -> list[_Sample]:
        try:
            for unit in task.units:
                if not stop.is_set():
                    task.samples.append(self._sample(int(unit)))
        except SourceError as error:
            # The error of the store. Samples fetched before it are kept: they must not be fetched again.
            task.samples.append(_Sample("", failure=error))
        return task.samples

    def _probe_task(self, task: _Task, stop: threading.Event) -> list[_Shapes]:
        return [
            _Shapes(
                s.key,
                {name: shape_of(value) for name, value in s.values.items()},
                s.nbytes,
                tuple(s.names),
                s.has_image,
                s.error,
                s.fetched,
            )
            for s in [self._sample(int(unit), heads=True) for unit in task.units if not stop.is_set()]
        ]

    def _sample(self, unit: int, *, heads: bool = False) -> _Sample:
        """Fetch and decode one unit. With ``heads`` large arrays and bytes are placeholders without memory.

        The error of a bad or missing object is kept in the sample; an error of the store is raised.
        """
        objects = self._listing.unit(unit)
        pairs = [(item, self._part(item)) for item in objects]
        sample = _Sample(pairs[0][1].sample)
        try:
            for item, part in self._assembler.needed(sample, pairs):
                if item.size > MAX_VALUE:
                    raise BadObject(
                        f"object {item.key!r} has {format_size(item.size)}, but at most {format_size(MAX_VALUE)} can"
                        " be read; skip it with --on-error skip"
                    )
                fields: Iterable[tuple[str, Value]] | None = None
                if heads and item.size > _HEADS:
                    fields = self._by_head(item, part)
                if fields is None:
                    data = self._store.get(item)
                    # Remembered, so that after a refused object this one can show whether the store or only that object
                    # fails.
                    self._blame.came(item if item.size >= 0 else replace(item, size=len(data)))
                    sample.fetched += len(data)
                    arrived(len(data))
                    sample.has_image = sample.has_image or part.kind == "image"
                    options = self._options
                    fields = decode(
                        part, data, images=options.decodes_images, pixels=options.pixels, values=options.value_format
                    )
                self._assembler.add(sample, item.key, fields)
            self._assembler.finish(sample, str, int if self._options.label_from_folder == "int" else None)
        except (BadObject, NotFound) as error:
            sample.error = error
        except (AccessDenied, Unreachable) as error:
            # One object may be lost or archived while the store works. Blame asks for another object: if it comes, the
            # error is this object's; otherwise Blame raises the store's error.
            sample.error = self._blame.of(error)
        sample.nbytes = sum(map(nbytes_of, sample.values.values()))
        return sample

    def _by_head(self, item: Object, part: Part) -> list[tuple[str, Value]] | None:
        """Return the fields of a large object as placeholders; None if only the complete object tells its fields.

        A placeholder is an array of the right shape that repeats one value, so it takes no memory.
        """
        values = self._options.value_format if part.kind == "bytes" else None
        if values is not None and is_raw(values):
            described = check_value_format(values)
            assert described is not None
            field, _ = described
            # If the size differs, the complete object is fetched, whose error says what is wrong.
            fits = field.nbytes == item.size
            return [(part.field, np.broadcast_to(np.zeros((), field.numpy), field.sizes))] if fits else None
        if values == "image":
            return None
        if part.kind == "bytes" and values != "npy":
            return [(part.field, np.broadcast_to(np.uint8(0), (item.size,)).data)]
        if part.kind != "npy" and values != "npy":
            return None
        try:
            dtype, _, shape, start = npy_layout(self._store.get_range(item, 0, min(item.size, MAX_HEADER + 12)))
        except SourceError:
            return None
        # A header that does not fit the object's size is not believed: the complete object then gives the error.
        complete = start + math.prod(shape) * dtype.itemsize == item.size
        return [(part.field, np.broadcast_to(np.zeros((), dtype), shape))] if complete else None

    def _names(self, sample: _Shapes, unit: int) -> list[str]:
        """Return the names of the fields of a sample, including those whose objects were not fetched."""
        parts = map(self._part, self._listing.unit(unit))
        rename = self._options.rename
        unread = [rename.get(part.field, part.field) for part in parts if part.kind not in CONTAINERS]
        return list(dict.fromkeys((*sample.names, *unread)))

    def _part(self, item: Object) -> Part:
        part = self._stem.split(item.key)
        assert not isinstance(part, str), f"{item.key!r} was listed as part of a sample"
        return part


def _size(task: _Task) -> int:
    return task.nbytes


def _pieces(
    fetching: Fetching[_Task, list[_Sample]], schema: Schema, *, skip_bad: bool, block_bytes: int, hurry: Hurry
) -> Generator[ReadResult]:
    """Yield the samples as they arrive in order, in blocks of about ``block_bytes``."""
    names = set(schema.names)
    pending: list[tuple[int, _Sample]] = []
    pending_bytes = position = 0

    def gathered() -> ReadResult:
        nonlocal pending, pending_bytes
        piece = _piece(pending, schema, position, skip_bad=skip_bad)
        # Emptied before the piece is handed out: if the consumer ends the generator at the yield, no sample may come
        # twice.
        pending, pending_bytes = [], 0
        return piece

    try:
        news = True
        while True:
            # A training process may wait for the first samples. Then a partial block is handed out as soon as no result
            # arrives for _LINGER seconds.
            left = hurry()
            if left is not None and news:
                late = bool(pending) and left < -_LINGER_MOST
                if late or not fetching.wait(max(_LINGER, left)):
                    yield gathered()
                    news = False
                    continue
            news = True
            if (samples := next(fetching, None)) is None:
                break
            for sample in samples:
                if sample.failure is not None:
                    raise sample.failure
                if sample.error is None and sample.values.keys() != names:
                    sample.error = _misfit(sample, schema)
                if sample.error is not None and not skip_bad:
                    raise sample.error
                pending.append((position, sample))
                position += 1
                pending_bytes += sample.nbytes
                if pending_bytes >= block_bytes or len(pending) >= _PIECE_SAMPLES:
                    yield gathered()
    except (SourceError, Interrupted):
        # Samples before the error are acknowledged as done, so a later pull does not fetch them again.
        if pending:
            yield gathered()
        if (piece := _out_of_order(fetching, schema, position)) is not None:
            yield piece
        raise
    if pending:
        yield gathered()


def _out_of_order(fetching: Fetching[_Task, list[_Sample]], schema: Schema, position: int) -> ReadResult | None:
    """Return the good samples from ``position`` on that arrived while an earlier sample failed or was still missing."""
    names = set(schema.names)
    good = [
        (at, sample)
        for task in fetching.drain(_DRAIN)
        for at, sample in enumerate(list(task.samples), task.start)
        if sample.error is None and sample.failure is None and sample.values.keys() == names and at >= position
    ]
    if not good:
        return None
    piece = _piece(good, schema, good[-1][0] + 1, skip_bad=True)
    # Bad samples among them are not reported as skipped: their draws stay open and are tried again.
    return replace(piece, skipped=(), gaps=np.setdiff1d(np.arange(position, piece.done), piece.draws))


def _misfit(sample: _Sample, schema: Schema) -> BadObject:
    return BadObject(
        f"sample {sample.key!r} has the fields {names_of(list(sample.values))}, but the dataset has"
        f" {names_of(schema.names)};\ncut names differently with --stem, or skip the sample with --on-error skip"
    )


def _piece(pending: Sequence[tuple[int, _Sample]], schema: Schema, done: int, *, skip_bad: bool) -> ReadResult:
    """Return the samples that fit as columns. The others are skipped, or the first of them is raised."""
    fetched = sum(sample.fetched for _, sample in pending)
    good = [(position, sample) for position, sample in pending if sample.error is None]
    try:
        block = Block.from_samples(schema, [sample.values for _, sample in good], exact=True)
    except UsageError:
        # The fast path builds all columns at once and does not say which sample failed. It fails rarely, so samples are
        # checked one by one only then.
        for _, sample in good:
            try:
                Block.from_samples(schema, [sample.values], exact=True)
            except UsageError as error:
                sample.error = BadObject(f"sample {sample.key!r}: {error}")
                if not skip_bad:
                    raise sample.error from None
        good = [(position, sample) for position, sample in good if sample.error is None]
        block = Block.from_samples(schema, [sample.values for _, sample in good], exact=True)
    skipped = tuple(
        Skipped(position, sample.key, _line(sample.error)) for position, sample in pending if sample.error is not None
    )
    draws = np.fromiter((position for position, _ in good), dtype=np.int64, count=len(good))
    return ReadResult(block, draws, done, skipped, fetched)


def _line(error: Any) -> str:
    return " ".join(str(error).split("\n"))
