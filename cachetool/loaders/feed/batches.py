"""Making the batches of a plan, one after another: what a feeder does, or the training process by itself.

::

    Mailbox --- plan --------->  work  -- batches of this feeder -->  Sink: slots of a ring, or plain memory
                                  |-- nearly all made --> made(generation)

A feeder makes every ``feeders``-th batch. A plan in whose place another one came is dropped at the next
batch.

Whether values that were gathered are those that were written: by the checksums that lie beside them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import CorruptError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.reading import compare_checksums
from cachetool.formats.runs import Int64s
from cachetool.formats.shard import check_content, stored_checksums
from cachetool.loaders.feed.transform import Transform
from cachetool.loaders.order import RUN_BYTES, EpochOrder
from cachetool.loaders.read.gather import gather, new_array
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.read.readahead import NEAR
from cachetool.loaders.selection import selection
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.view import ShardFile, View
from cachetool.proc.lines import described

__all__ = ["Checks", "Mailbox", "Maker", "Sink", "announced", "work"]


class Checks:
    """Keeps the checksums of the parts of one view, 8 bytes a value, those that were needed so far."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._checksums: dict[str, npt.NDArray[np.uint64]] = {}

    def check(self, view: View, indices: Int64s, block: Block) -> None:
        """Compare the samples ``indices`` of ``view``, of some or all of its fields.

        Raises :class:`CorruptError` naming file, sample and field.
        """
        if view is not self._view:
            parts = {part.id for part in view.parts}
            self._checksums = {id: values for id, values in self._checksums.items() if id in parts}
            self._view = view
        computed = checksums(block)
        rows = np.array([view.schema.names.index(name) for name in block.schema.names], dtype=np.int64)
        numbers, within = view.find(indices)
        for number in np.unique(numbers).tolist():
            part, here = view.parts[number], np.flatnonzero(numbers == number)
            expected = self._of(part, view)[np.ix_(rows, within[here])]
            compare_checksums(computed[:, here], expected, block.schema, name=str(_file(part)), indices=within[here])

    def _of(self, part: ShardFile, view: View) -> npt.NDArray[np.uint64]:
        expected = self._checksums.get(part.id)
        if expected is None:
            side = part.extents.parent
            stored = check_content(side, view.schema, part.content, links=part.links) if part.content else None
            expected = np.array(stored_checksums(side, view.schema, links=part.links) if stored is None else stored)
            if expected.shape[1] != part.samples:
                raise CorruptError(f"{side} has checksums of {expected.shape[1]} samples, not of {part.samples}")
            self._checksums[part.id] = expected
        return expected


def _file(part: ShardFile) -> Path:
    return part.folder / (part.file or f"data{get_format(part.format).suffix}")


_AHEAD = 2**14  # samples whose order is computed at once: its arrays stay in the L2 cache
_DENSE = 8  # of so many samples one is read, at least, where all that lies between them is read as well


class Sink(Protocol):
    """Where batches go."""

    def open(self, over: Callable[[], bool]) -> bool:
        """Wait for room for one batch; False, and none is taken, when it is ``over``."""
        ...

    def begin(self, schema: Schema) -> None:
        """Say which fields the batch has."""
        ...

    def values(self, field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Memory for the values of a field; to be filled before the next is asked for."""
        ...

    def commit(self, generation: int, step: int, columns: Mapping[str, Column]) -> None:
        """Hand the batch over."""
        ...

    def fail(self, generation: int, step: int, error: Mapping[str, Any]) -> None:
        """Hand an error over in place of the batch."""
        ...


class Mailbox:
    """Plans that wait for their turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._plans: deque[EpochPlan] = deque()
        self._least = self._newest = 0

    def put(self, plan: EpochPlan) -> None:
        """Add a plan; unless it only follows those before, they are over. The newest may come again to say so."""
        with self._changed:
            if not plan.follows:
                self._least = plan.generation
                while self._plans and self._plans[0].generation < self._least:
                    self._plans.popleft()
            if plan.generation > self._newest:
                self._plans.append(plan)
                self._newest = plan.generation
            self._changed.notify_all()

    def is_over(self, plan: EpochPlan) -> bool:
        """Whether another plan came in its place."""
        return plan.generation < self._least

    def get(self) -> EpochPlan:
        """The next plan, waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._plans)
            return self._plans.popleft()


def work(
    settings: Settings,
    mailbox: Mailbox,
    sink: Sink,
    places: MappedParts,
    *,
    transform: Transform | None,
    number: int,
    feeders: int,
    made: Callable[[int], None],
    soon: float,
) -> NoReturn:
    """Make the batches of feeder ``number`` of ``feeders``, plan after plan.

    ``made`` is called when about ``soon`` seconds of work are left of a plan, at the latest when its last batch was
    made. It must not fail.
    """
    maker = Maker(settings, sink, places, transform)
    while True:
        plan = mailbox.get()
        if plan.view is None:
            places.close()
            continue
        places.keep(plan.view)
        reported, began = False, time.perf_counter()
        over = functools.partial(mailbox.is_over, plan)
        for committed, left in maker.make(plan, plan.view, number=number, feeders=feeders, over=over):
            # In the last quarter only: the first ones are made faster than they are taken.
            if not reported and 3 * left <= committed:
                seconds = time.perf_counter() - began
                if seconds * left <= soon * committed:
                    reported = True
                    made(plan.generation)


class Maker:
    """Makes batches, and hands them to ``sink``."""

    def __init__(self, settings: Settings, sink: Sink, places: MappedParts, transform: Transform | None) -> None:
        self._settings, self._sink, self._places, self._transform = settings, sink, places, transform
        self._selection = selection(settings)
        self._checks = Checks() if settings.verify else None
        self._view_schema: Schema | None = None
        self._fields: Schema | None = None

    def _schema(self, view: View) -> Schema:
        """The fields asked for: one object for as long as the dataset has the same ones."""
        if self._fields is None or view.schema != self._view_schema:
            self._view_schema = view.schema
            self._fields = view.schema if self._settings.fields is None else view.schema.select(self._settings.fields)
        return self._fields

    def make(
        self, plan: EpochPlan, view: View, *, number: int = 0, feeders: int = 1, over: Callable[[], bool]
    ) -> Iterator[tuple[int, int]]:
        """Make every ``feeders``-th batch of a plan, but no more once it is ``over`` or an error was handed over.

        Yield after each batch how many were made, and how many are left.
        """
        step, opened = number, False
        try:
            count = plan.steps(self._settings).count
            schema = self._schema(view)
            direct = self._transform is None and self._checks is None
            empty = self._sink.values if direct else new_array
            chosen = None if self._selection is None else self._selection.chosen(view)
            steps = np.arange(number, count, feeders, dtype=np.int64)
            for numbers, indices in announced(
                plan, self._settings, steps, self._places, schema, feeders=feeders, chosen=chosen
            ):
                gathered = self._places.batches(view, indices, schema, empty=empty)
                for step, at in zip(numbers, indices, strict=True):
                    columns: Mapping[str, Column]
                    opened = self._sink.open(over)
                    if not opened:
                        return
                    if direct:
                        self._sink.begin(schema)
                        columns = next(gathered)
                    else:
                        columns = self._handed(plan, view, at, Block(schema, next(gathered)))
                    self._sink.commit(plan.generation, step, columns)
                    opened = False
                    committed = step // feeders + 1
                    yield committed, len(steps) - committed
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach whoever waits for this batch
            if opened or self._sink.open(over):
                self._sink.fail(plan.generation, step, described(error))

    def _handed(self, plan: EpochPlan, view: View, indices: Int64s, block: Block) -> Mapping[str, Column]:
        """What becomes of samples that were gathered into memory of ours, copied into the sink."""
        if self._checks is not None:
            self._checks.check(view, indices, block)
        if self._transform is not None:
            block = self._transformed(self._transform, plan, view, indices, block)
        self._sink.begin(block.schema)
        for field in block.schema:
            column = block.columns[field.name]
            values = column.values if isinstance(column, Ragged) else column
            self._sink.values(field, values.shape)[...] = values
        return block.columns

    def _transformed(self, transform: Transform, plan: EpochPlan, view: View, indices: Int64s, block: Block) -> Block:
        if len(indices):
            return transform(block, epoch=plan.epoch, indices=indices)
        # Other ranks have the last samples: this one's batch is empty, and one of another's says which fields it has.
        if (nothing := transform.nothing()) is None:
            other = np.zeros(1, dtype=np.int64)
            one = Block(block.schema, gather(view, other, self._places, block.schema))
            nothing = transform(one, epoch=plan.epoch, indices=other).take([])
        return nothing


def _indices_of_steps(
    plan: EpochPlan, settings: Settings, order: EpochOrder | Int64s, steps: Int64s, chosen: Int64s | None
) -> Iterator[tuple[list[int], list[Int64s]]]:
    """Some of these steps of a plan at a time, and the indices of the samples of each."""
    cut = plan.steps(settings)
    most = max(1, _AHEAD // settings.batch_size)
    at = 0
    ahead = most if plan.follows else 1  # else the first batches are waited for: little is computed ahead of them
    while at < len(steps):
        now = steps[at : at + ahead]
        starts, stops = cut.bounds(now)
        sizes = stops - starts
        ends = np.cumsum(sizes)
        positions = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1], dtype=np.int64)
        indices = order[positions]
        if chosen is not None:
            indices = chosen[indices]
        yield now.tolist(), np.split(indices, ends[:-1])
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
    chosen: Int64s | None = None,
) -> Iterator[tuple[list[int], list[Int64s]]]:
    """Some of these steps of a plan at a time, and the indices of the samples of each. Before it gives them it tells
    ``places`` what they need, which then reads ahead.

    ``steps``: those of one feeder, every ``feeders``-th from its number on, or the last of them. ``chosen``: the
    indices of the samples that take part, where it is not all of them.
    """
    view = plan.view
    assert view is not None
    order: EpochOrder | Int64s = plan.left(settings)[1] if plan.lost else plan.order(settings)
    chunks = _indices_of_steps(plan, settings, order, steps, chosen)
    if not len(steps):
        yield from chunks
        return
    small = view.schema.fixed_nbytes * settings.place(view)[1] <= NEAR and all(
        field.kind == "fixed" or field.name == KEY for field in view.schema
    )
    # Of a small side of a split, most of what lies between its samples is nobody's.
    dense = chosen is None or _DENSE * len(chosen) >= view.samples
    if isinstance(order, EpochOrder) and order.window and small and dense:
        # All that lies between the samples of a window is read, by whichever feeder.
        cut = plan.steps(settings)
        sharers = min(feeders, cut.count)
        feeder = int(steps[0]) % feeders
        start, stop = int(cut.bounds(steps[:1] - feeder)[0][0]), cut.reached(cut.count)
        # As far as the others are with the same batch of theirs, and two windows; with the last one, all.
        reached = np.minimum(cut.bounds((steps // feeders + 1) * feeders)[0] + 2 * order.window, stop)
        reached[-1] = stop
        # Windows are numbered from the order's beginning, as by a feeder that goes on from another step of its own.
        windows = (
            (count, (rows if chosen is None else chosen[rows])[(feeder + number) % sharers :: sharers])
            for number, (count, rows) in enumerate(order.runs(start, stop), start // order.window)
        )
        places.expect_windows(view, windows, schema, reached - start)
        yield from chunks
        return
    # Of samples of other sizes in a window as well others need what is near, or this feeder a little later.
    near = RUN_BYTES if settings.shuffle == "window" and dense else NEAR
    before: tuple[list[int], list[Int64s]] | None = None
    for chunk in chunks:
        places.expect(view, chunk[1], schema, first=before is None, near=near)
        if before is not None:
            yield before
        before = chunk
    if before is not None:
        yield before
