"""Making the batches of a plan, one after another, in a feeder or in the training process itself.

::

    Mailbox --- plan --------->  work  -- batches of this feeder -->  Sink: slots of a ring, or plain memory
                                  |-- nearly all made --> made(generation)

A feeder makes every ``feeders``-th batch. When another plan replaces the current one, the feeder drops the current plan
at the next batch.

With ``verify=True`` the values are compared with the checksums that each shard stores beside them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import CorruptError
from cachetool.core.schema import KEY, Field, Schema, same_notes
from cachetool.core.text import shown
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.reading import compare_checksums
from cachetool.formats.runs import Int64s
from cachetool.formats.shard import check_content, stored_checksums
from cachetool.loaders.feed.cut import Cut
from cachetool.loaders.feed.decoders import Decoders, Named
from cachetool.loaders.feed.transform import Functions, Transform
from cachetool.loaders.items import Items, Numbers
from cachetool.loaders.mixture import DATASET, MixedOrder
from cachetool.loaders.order import RUN_BYTES, EpochOrder
from cachetool.loaders.padding import Layout
from cachetool.loaders.read.gather import Empty, gather, new_array
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.readahead import NEAR
from cachetool.loaders.ring.batch_times import DECODE, FIND, START, TRANSFORM, BatchTimes
from cachetool.loaders.sample_weights import WEIGHT, WeightedOrder
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.view import ShardFile, View
from cachetool.proc.lines import described

__all__ = ["Checks", "Mailbox", "Maker", "Sink", "announced", "work"]


class Checks:
    """The checksums of the shards of one view, 8 bytes a value, as far as they were needed."""

    def __init__(self, places: MappedParts) -> None:
        self._places = places
        self._view: View | None = None
        self._checksums: dict[str, npt.NDArray[np.uint64]] = {}
        self._checked: dict[str, npt.NDArray[np.bool_]] = {}
        """The samples of each shard that :meth:`check_once` has checked."""

    def check(self, view: View, indices: Int64s, block: Block) -> None:
        """Compare the samples ``indices`` of ``view``, of some or all of its fields, with their checksums.

        Raises :class:`CorruptError`, which names file, sample and field.
        """
        # Checksums of shards that left the view are dropped: they take 8 bytes a value.
        if view is not self._view:
            parts = {part.id for part in view.parts}
            self._checksums = {id: values for id, values in self._checksums.items() if id in parts}
            self._checked = {id: values for id, values in self._checked.items() if id in parts}
            self._view = view
        computed = checksums(block)
        numbers, within = view.find(indices)
        for number in np.unique(numbers).tolist():
            part, here, schema = view.parts[number], np.flatnonzero(numbers == number), view.schema_of(number)
            rows = np.array([schema.names.index(name) for name in block.schema.names], dtype=np.int64)
            expected = self._of(part, schema)[np.ix_(rows, within[here])]
            compare_checksums(computed[:, here], expected, block.schema, name=str(_file(part)), indices=within[here])

    def check_once(self, view: View, indices: Int64s, schema: Schema) -> None:
        """Check those of the samples ``indices``, each given once, that were not checked before, one after another.

        Raises :class:`CorruptError`.
        """
        parts, within = view.find(indices)
        for index, number, inside in zip(indices.tolist(), parts.tolist(), within.tolist(), strict=True):
            part = view.parts[number]
            done = self._checked.setdefault(part.id, np.zeros(part.samples, dtype=np.bool_))
            if not done[inside]:
                one = np.array([index], dtype=np.int64)
                self.check(view, one, Block(schema, gather(view, one, self._places, schema)))
                done[inside] = True

    def _of(self, part: ShardFile, schema: Schema) -> npt.NDArray[np.uint64]:
        expected = self._checksums.get(part.id)
        if expected is None:
            side = part.extents.parent
            stored = check_content(side, schema, part.content, links=part.links) if part.content else None
            expected = np.array(stored_checksums(side, schema, links=part.links) if stored is None else stored)
            if expected.shape[1] != part.samples:
                raise CorruptError(f"{side} has checksums of {expected.shape[1]} samples, not of {part.samples}")
            self._checksums[part.id] = expected
        return expected


def _file(part: ShardFile) -> Path:
    return part.folder / (part.file or f"data{get_format(part.format).suffix}")


def extra_fields(settings: Settings) -> tuple[Field, ...]:
    """Return the fields that tell how samples were drawn, which stand behind all others."""
    weighted = settings.mixture is not None and settings.mixture.sample_weights
    dataset = [Field(DATASET, "<i8")] if settings.has_dataset_field else []
    return (*dataset, *([Field(WEIGHT, "<f4")] if weighted else []))


# Samples whose order is computed at once: arrays of this size stay in the processor's L2 cache.
_AHEAD = 2**14
_DENSE = 8
"""A number of samples: if one of so many or more is read, everything between the samples is read as well."""


class Sink(Protocol):
    """The receiver of batches."""

    def open(self, over: Callable[[], bool]) -> bool:
        """Wait for room for one batch. Return False, and take no space, when ``over()`` is true."""
        ...

    def begin(self, schema: Schema) -> None:
        """Begin a batch with these fields."""
        ...

    def values(self, field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return memory for the values of a field. Fill it before asking for the next one."""
        ...

    def commit(self, generation: int, step: int, columns: Mapping[str, Column]) -> None:
        """Hand the batch over."""
        ...

    def fail(self, generation: int, step: int, error: Mapping[str, Any]) -> None:
        """Hand an error over in place of the batch."""
        ...


class Mailbox:
    """The plans that a feeder has received and not begun.

    ``prepare`` is called with the view of a plan that follows another one, in a thread of its own.
    """

    def __init__(self, prepare: Callable[[View], None]) -> None:
        self._prepare = prepare
        self._changed = threading.Condition()
        self._plans: deque[EpochPlan] = deque()
        self._least = self._newest = 0

    def put(self, plan: EpochPlan) -> None:
        """Add a plan. Unless the plan follows the plans before it, those are over."""
        with self._changed:
            # A plan that follows is made behind the others. Only a plan that iter() asked for
            # replaces those being made: a feeder that started late would otherwise skip an epoch.
            if not plan.follows:
                self._least = plan.generation
                while self._plans and self._plans[0].generation < self._least:
                    self._plans.popleft()
            # The same plan may come a second time, to say that it no longer follows: what is left
            # of the epoch before it need not be made any more.
            if plan.generation > self._newest:
                self._plans.append(plan)
                self._newest = plan.generation
                if plan.follows and plan.view is not None:
                    # In a thread, because the caller listens for further messages.
                    threading.Thread(target=self._prepare, args=(plan.view,), daemon=True).start()
            self._changed.notify_all()

    def is_over(self, plan: EpochPlan) -> bool:
        """Return True if another plan replaced this one."""
        return plan.generation < self._least

    def get(self) -> EpochPlan:
        """Wait for the next plan and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._plans)
            return self._plans.popleft()


def work(
    settings: Settings,
    mailbox: Mailbox,
    sink: Sink,
    places: MappedParts,
    times: BatchTimes,
    *,
    functions: Functions,
    number: int,
    feeders: int,
    made: Callable[[int], None],
    soon: Callable[[], float],
) -> NoReturn:
    """Make the batches of feeder ``number`` of ``feeders``, plan after plan.

    ``made`` is called when about ``soon()`` seconds of work are left of a plan, and at the latest after its last batch.
    It must not fail.
    """
    maker = Maker(settings, sink, places, functions, times)
    while True:
        plan = mailbox.get()
        times.resumed()
        # A plan without a view: the loader is idle. Open files would keep deleted shards on the
        # disk.
        if plan.view is None:
            places.close()
            continue
        places.keep(plan.view)
        reported, began = False, time.perf_counter()
        over = functools.partial(mailbox.is_over, plan)
        for committed, left in maker.make(plan, plan.view, number=number, feeders=feeders, over=over):
            # Only in the last quarter of a plan. The first batches are made faster than training
            # takes them, so their rate says little about the seconds that are left.
            if not reported and 3 * left <= committed:
                seconds = time.perf_counter() - began
                if seconds * left <= soon() * committed:
                    reported = True
                    made(plan.generation)


class Maker:
    """A maker of batches, which hands them to ``sink``."""

    def __init__(
        self, settings: Settings, sink: Sink, places: MappedParts, functions: Functions, times: BatchTimes
    ) -> None:
        self._settings, self._sink, self._places, self._times = settings, sink, places, times
        self._transform = None if functions.transform is None else Transform(functions.transform, settings)
        self._items = Items(settings, functions.weights)
        self._extra = extra_fields(settings)
        cuts = settings.crop is not None or settings.offsets
        self._cut = Cut(settings, functions.corner) if cuts else None
        self._checks = Checks(places) if settings.verify else None
        self._decoders = Decoders(settings.decode, seed=settings.seed) if settings.decode else None
        laid_out = settings.pad or settings.varlen
        self._layout = Layout(settings.pad, settings.varlen, sink.values) if laid_out else None
        self._with_extra: tuple[Schema, Schema] | None = None
        self._view_schema: Schema | None = None
        self._fields: Schema | None = None

    def _schema(self, view: View) -> Schema:
        """Return the fields asked for: the same object as long as the dataset has the same fields."""
        # The same object, because sink and tables of positions compare schemas by identity for each
        # batch.
        # The facts beside the schema are compared too, because decoders use them.
        known = self._view_schema
        if self._fields is None or known is None or view.schema != known or not same_notes(view.schema, known):
            self._view_schema = view.schema
            fields = self._settings.stored_fields
            self._fields = view.schema if fields is None else view.schema.select(fields)
        return self._fields

    def _extended(self, schema: Schema) -> Schema:
        """Return the fields of a batch with those that tell how samples were drawn: the same object for the same
        ``schema`` object."""
        if not self._extra:
            return schema
        if self._with_extra is None or self._with_extra[0] is not schema:
            self._with_extra = schema, Schema((*schema, *self._extra))
        return self._with_extra[1]

    def _extra_values(self, view: View, codes: Int64s) -> dict[str, npt.NDArray[Any]]:
        """Return the values of the fields that tell how items were drawn, (k,)."""
        found: dict[str, npt.NDArray[Any]] = {}
        if not self._extra:
            return found
        numbers = self._items.of(view)
        samples = numbers.samples(codes)
        for field in self._extra:
            if field.name == DATASET:
                edges = view.starts[np.cumsum(view.members)]
                found[DATASET] = np.searchsorted(edges, samples, side="right").astype(np.int64)
            else:
                assert numbers.weights is not None
                assert numbers.ends is not None
                mean = numbers.ends[-1] / numbers.total
                found[WEIGHT] = (mean / numbers.weights[samples]).astype(np.float32)
        return found

    def make(
        self, plan: EpochPlan, view: View, *, number: int = 0, feeders: int = 1, over: Callable[[], bool]
    ) -> Iterator[tuple[int, int]]:
        """Make every ``feeders``-th batch of a plan. Stop when ``over()`` is true or after an error was handed over.

        Yield after each batch how many were made and how many are left.
        """
        step, opened, times = number, False, self._times
        try:
            count = plan.steps(self._settings).count
            numbers, cut = self._items.of(view), self._cut
            stored = schema = self._schema(view)
            if cut is not None:
                schema = cut.begin(view, numbers, stored=schema, epoch=plan.epoch)
                stored = cut.located
            decoders, layout, given = self._decoders, self._layout, schema
            if decoders is not None and count:
                given = decoders.schema(schema, functools.partial(self._first, view, schema, numbers))
            # Without a transform and without checks values are copied, decoded or laid out once,
            # straight into the sink. Otherwise they need memory of their own first. Crops are checked by their samples.
            unchecked = self._checks is None or cut is not None
            direct = self._transform is None and unchecked and (decoders is None or layout is None)
            empty: Empty = self._sink.values if direct else new_array
            if direct and decoders is not None:
                empty = decoders.stored_in(empty)
            elif direct and layout is not None:
                empty = layout
            steps = np.arange(number, count, feeders, dtype=np.int64)
            times.ended(START)
            for those, codes in announced(
                plan, self._settings, steps, self._places, stored, feeders=feeders, numbers=numbers, cut=cut
            ):
                gathered = self._places.batches(view, codes, stored, empty=empty, cut=cut)
                for step, at in zip(those, codes, strict=True):
                    columns: Mapping[str, Column]
                    times.ended(FIND)
                    opened = self._sink.open(over)
                    # The time of a feeder that waits for a slot is left out: it is ahead of training.
                    times.resumed()
                    times.reading()
                    if not opened:
                        return
                    if cut is not None and self._checks is not None:
                        self._checks.check_once(view, cut.samples(at), stored)
                    if direct:
                        begun = given if layout is None else layout.begin(schema, numbers.samples(at))
                        self._sink.begin(self._extended(begun))
                        columns = next(gathered)
                        times.read()
                        if layout is not None:
                            columns = layout.complete(columns)
                        elif decoders is not None:
                            columns = self._decoded(plan, view, at, columns, empty=self._sink.values)
                            times.ended(DECODE)
                        for field, values in zip(self._extra, self._extra_values(view, at).values(), strict=True):
                            column = self._sink.values(field, values.shape)
                            column[...] = values
                            columns = {**columns, field.name: column}
                    else:
                        block = Block(schema, next(gathered))
                        times.read()
                        columns = self._handed(plan, view, at, block)
                    self._sink.commit(plan.generation, step, columns)
                    opened = False
                    committed = step // feeders + 1
                    yield committed, len(steps) - committed
        # Any error: the training process waits for this batch, and must get the error in its place.
        except Exception as error:  # noqa: BLE001
            # The slot of the failed batch takes the error. Without one, a slot must be waited for.
            if opened or self._sink.open(over):
                self._sink.fail(plan.generation, step, described(error))

    def _handed(self, plan: EpochPlan, view: View, indices: Int64s, block: Block) -> Mapping[str, Column]:
        """Check, decode and transform samples that were gathered into plain memory, and copy the result into the
        sink."""
        if self._checks is not None and self._cut is None:
            # Before the transform: the checksums are of the values as they were written.
            self._checks.check(view, indices, block)
            self._times.ended(DECODE)
        if self._extra:
            block = Block(self._extended(block.schema), {**block.columns, **self._extra_values(view, indices)})
        if self._transform is not None:
            block = self._transformed(self._transform, plan, view, indices, block)
            self._times.ended(TRANSFORM)
        else:
            block = self._unpacked(plan, view, indices, block)
            self._times.ended(DECODE)
        layout = self._layout
        self._sink.begin(
            block.schema if layout is None else layout.begin(block.schema, self._items.of(view).samples(indices))
        )
        for field in block.schema:
            if layout is not None and field.name in layout.fields:
                continue
            column = block.columns[field.name]
            values = column.values if isinstance(column, Ragged) else column
            self._sink.values(field, values.shape)[...] = values
        return block.columns if layout is None else layout.complete(block.columns)

    def _transformed(self, transform: Transform, plan: EpochPlan, view: View, indices: Int64s, block: Block) -> Block:
        if len(indices):
            samples = self._items.of(view).samples(indices)
            block = self._unpacked(plan, view, indices, block)
            self._times.ended(DECODE)
            return transform(block, epoch=plan.epoch, indices=indices, samples=samples)
        # The last samples went to other ranks, so this batch is empty. A transform must not be
        # called with no samples; one sample of another rank shows which fields it returns.
        if (nothing := transform.nothing()) is None:
            other = self._items.of(view).codes(np.zeros(1, dtype=np.int64))
            stored = Schema(tuple(field for field in block.schema if field not in self._extra))
            one = Block(block.schema, {**self._gathered(view, other, stored), **self._extra_values(view, other)})
            one = self._unpacked(plan, view, other, one)
            nothing = transform(one, epoch=plan.epoch, indices=other, samples=self._items.of(view).samples(other)).take(
                []
            )
        return nothing

    def _unpacked(self, plan: EpochPlan, view: View, indices: Int64s, block: Block) -> Block:
        """Return the samples with decoded values, in plain memory."""
        if self._decoders is None:
            return block
        columns = self._decoded(plan, view, indices, block.columns, empty=new_array)
        return Block(
            self._decoders.schema(
                block.schema, functools.partial(self._first, view, block.schema, self._items.of(view))
            ),
            columns,
        )

    def _decoded(
        self, plan: EpochPlan, view: View, indices: Int64s, columns: Mapping[str, Column], *, empty: Empty
    ) -> dict[str, Column]:
        assert self._decoders is not None
        named = self._named(view, indices)
        return self._decoders.decoded(columns, epoch=plan.epoch, indices=indices, named=named, empty=empty)

    def _first(self, view: View, schema: Schema, numbers: Numbers) -> tuple[Block, Named]:
        """Return the first item of an epoch, the same for all feeders and ranks, and its name."""
        code = numbers.codes(np.zeros(1, dtype=np.int64))
        return Block(schema, self._gathered(view, code, schema)), self._named(view, code)

    def _gathered(self, view: View, codes: Int64s, schema: Schema) -> Mapping[str, Column]:
        """Return the columns of a few items, in plain memory."""
        if self._cut is None:
            return gather(view, codes, self._places, schema)
        return self._cut.chunk(self._places, codes).take(0, len(codes), empty=new_array)

    def _named(self, view: View, indices: Int64s) -> Named:
        """Return a function that names one of these samples for a message: by file, number and key."""

        def name(at: int) -> str:
            index = self._items.of(view).samples(indices[at : at + 1])
            numbers, within = view.find(index)
            key = ""
            if KEY in view.schema:
                schema = view.schema.select([KEY])
                columns = gather(view, index, self._places, schema)
                key = f" ({shown(Block(schema, columns).sample(0)[KEY])})"
            return f"{_file(view.parts[int(numbers[0])])}: sample {int(within[0])}{key}"

        return name


_Order: TypeAlias = EpochOrder | MixedOrder | WeightedOrder | Int64s


def _codes_of_steps(
    plan: EpochPlan, settings: Settings, order: _Order, steps: Int64s, items: Numbers
) -> Iterator[tuple[list[int], list[Int64s]]]:
    """Yield some of these steps at a time, and the codes of the items of each step."""
    cut = plan.steps(settings)
    most = max(1, _AHEAD // settings.batch_size)
    at = 0
    # Training waits for the first batches of a plan that does not follow another: so little of the
    # order is computed before them, and more each time.
    ahead = most if plan.follows else 1
    while at < len(steps):
        now = steps[at : at + ahead]
        starts, stops = cut.bounds(now)
        sizes = stops - starts
        ends = np.cumsum(sizes)
        positions = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1], dtype=np.int64)
        yield now.tolist(), np.split(items.codes(order[positions]), ends[:-1])
        at += len(now)
        ahead = min(4 * ahead, most)


def announced(
    plan: EpochPlan,
    settings: Settings,
    steps: Int64s,
    places: MappedParts,
    schema: Schema,
    *,
    feeders: int,
    numbers: Numbers,
    cut: Cut | None = None,
) -> Iterator[tuple[list[int], list[Int64s]]]:
    """Announce the items of some steps to ``places``, which reads ahead, then yield the steps and the codes of their
    items.

    Args:
        plan: The plan of the epoch.
        settings: The settings of the loader.
        steps: The steps of one feeder, every ``feeders``-th from its number on, or the last of these.
        places: Finds and reads the samples.
        schema: The stored fields to read.
        feeders: Number of feeders that read the epoch.
        numbers: The items of the view.
        cut: Finds crops and windows; None if items are samples.

    Yields:
        Some of the steps, and for each step the codes of its items, int64 (k,).
    """
    view = plan.view
    assert view is not None
    order = plan.left(settings)[1] if plan.lost else plan.order(settings, numbers.groups, numbers.ends)
    chunks = _codes_of_steps(plan, settings, order, steps, numbers)
    chosen = numbers.chosen
    if not len(steps):
        yield from chunks
        return
    small = view.schema.fixed_nbytes * settings.place(view)[1] <= NEAR and all(
        field.kind == "fixed" or field.name == KEY for field in view.schema
    )
    # On a small side of a split most bytes between two samples belong to the other side, so they
    # are not read.
    dense = chosen is None or _DENSE * len(chosen) >= view.samples
    if isinstance(order, EpochOrder) and order.window and small and dense:
        # Everything between the samples of a window is read once, by one of the feeders.
        divided = plan.steps(settings)
        sharers = min(feeders, divided.count)
        feeder = int(steps[0]) % feeders
        start, stop = int(divided.bounds(steps[:1] - feeder)[0][0]), divided.reached(divided.count)
        # Up to where the other feeders are with their batch of the same number, plus two windows;
        # with the last batch, up to the end.
        reached = np.minimum(divided.bounds((steps // feeders + 1) * feeders)[0] + 2 * order.window, stop)
        reached[-1] = stop
        # Windows are numbered from the beginning of the order, so that a feeder that resumes at a
        # step of its own numbers them as the others do.
        windows = (
            (count, numbers.samples(numbers.codes(rows[(feeder + number) % sharers :: sharers])))
            for number, (count, rows) in enumerate(order.runs(start, stop), start // order.window)
        )
        places.expect_windows(view, windows, schema, reached - start)
        yield from chunks
        return
    # Samples of other sizes in a window: the bytes near a sample are needed by other feeders, or by
    # this one a little later, so larger gaps are read.
    near = RUN_BYTES if settings.shuffle == "window" and dense else NEAR
    before: tuple[list[int], list[Int64s]] | None = None
    for chunk in chunks:
        # A chunk is announced before the one ahead of it is yielded, so the disk reads while
        # batches of that are copied.
        places.expect(view, chunk[1], schema, first=before is None, near=near, cut=cut)
        if before is not None:
            yield before
        before = chunk
    if before is not None:
        yield before
