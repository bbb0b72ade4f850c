"""A batch as bytes in a slot of a ring: written by a feeder, read by the training process, copied by neither.

::

    int64: bytes of text | arrays | offset, length | offset, length | ...
    text: {"fields": schema} or {"error": ...}
    array | array | ...             each at another multiple of 64, one of more than a page in the middle of one

Each field has one array of values. Fields of bytes, str and ragged values have a second one, with the offset at which
each sample begins. Ragged fields have a third one, with the shapes.

Everything before the arrays is the form of the batch. When a slot is filled with a batch of the form that it had
before, the feeder does not write the form again, and the entry in the ring's queue has the same number. Then the
training process reads nothing but the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats.runs import Bytes, Int64s
from cachetool.loaders.ring.batch_times import BatchTimes
from cachetool.loaders.ring.ring import Ring, RingWriter, Slot
from cachetool.proc.lines import rebuilt

__all__ = ["Batch", "SlotReader", "SlotWriter"]

# The size of a cache line, so that no two arrays share one.
_ALIGN = 64
# Not the page size of the machine: processors compare the last twelve bits of two addresses first,
# whatever the size of a page.
_PAGE = 4096
_NUMBERS = 2
# The largest int32, in which the ring's queue holds the number of a form. Numbers begin again at 1.
_FORMS = 2**31 - 1
# A busy consumer comes for its batches only once in 5 to 10 ms, when its thread gets the GIL. A
# steady training step needs a quarter of this (docs/explanation/decisions.md).
_READY_BYTES = 384 * 2**20
"""Maximum of bytes that all feeders of a loader keep ready together, for a consumer that takes batches as fast as it
can."""
_LEAST_READY_BYTES = 48 * 2**20
_LEAST, MOST = 2, 128


class Batch(NamedTuple):
    """A batch that a feeder made for one step of a plan."""

    generation: int
    """The generation of the plan that the batch belongs to."""
    step: int
    schema: Schema
    columns: Mapping[str, Column]
    """The values of each field. The memory belongs to this batch alone as long as any of these arrays is in use."""


def _start(used: int, nbytes: int) -> int:
    """Return the offset of an array of ``nbytes`` bytes that follows ``used`` bytes."""
    if nbytes <= _PAGE:
        return -(-used // _ALIGN) * _ALIGN
    # A large array begins in the middle of a page. Files have large values at the beginning of a
    # page, or 16 bytes behind it. If source and target have nearly the same last 12 bits of their
    # address, loads wait for stores to other pages and memcpy goes backwards. Samples of 1 MiB then
    # came at a third to a half of the rate on one machine (docs/explanation/decisions.md).
    return -(-(used - _PAGE // 2) // _PAGE) * _PAGE + _PAGE // 2


def _parts(field: Field) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dtype and the inner shape of each array of a field."""
    if field.kind == "fixed":
        return [(field.numpy.str, field.sizes)]
    values: list[tuple[str, tuple[int, ...]]] = [(field.numpy.str, ()), ("<i8", ())]
    return [*values, ("<i8", (field.rank,))] if field.kind == "ragged" else values


class _Filled:
    """The contents of a filled slot, for the next batch: mostly it has the same form, and only its values are
    written."""

    __slots__ = ("arrays", "form", "memory", "numbers", "stop", "text")

    def __init__(self, text: bytes, memory: Bytes, numbers: Int64s, stop: int) -> None:
        self.text, self.memory = text, memory
        self.numbers, self.stop = numbers, stop
        """The numbers at the beginning of the slot, and the offset at which the head ends."""
        self.arrays: list[tuple[tuple[int, int], npt.NDArray[Any], int]] = []
        """The offset and length of each array, the array itself, and the offset at which it ends."""
        self.form = 0
        """The number of the form in the head; 0 if it has none yet."""


class SlotWriter:
    """The sink of a feeder, which fills one slot after another (see :class:`~cachetool.loaders.feed.batches.Sink`).

    ``ready`` is the number of batches that may wait for the consumer or be in use there, at least 2. With None the
    feeders share 96 MiB, but each has at least 12 MiB and 2 batches, and at most 128 batches. The bytes are doubled
    whenever the consumer waits repeatedly although no slot was free to fill, up to four times of the first value.
    """

    def __init__(
        self, ring: RingWriter, *, ready: int | None, feeders: int = 1, times: BatchTimes | None = None
    ) -> None:
        self._ring, self._times = ring, times
        self._wanted, self._permitted = ready, _LEAST
        self._most_bytes = max(_LEAST_READY_BYTES, _READY_BYTES // max(2, feeders))
        # A quarter to begin with: a steady training step needs no more, and memory that is never
        # needed would be taken from the user's program.
        self._bytes = self._most_bytes // 4
        ring.permit(self._permitted)
        self._schema: Schema | None = None
        self._text, self._arrays = b"", 0
        self._kept: dict[int, _Filled] = {}
        self._forms = 0
        self._largest = 0

    def open(self, over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a free slot. Return False when ``over()`` is true before there is one."""
        slot = self._ring.acquire(over)
        if slot is None:
            return False
        self._slot = slot
        return True

    def begin(self, schema: Schema) -> None:
        """Begin a batch with these fields."""
        # By identity: a feeder has one schema object for all batches of a dataset, and comparing
        # fields for each batch would cost more than the rest of this function.
        if schema is not self._schema:
            self._schema = schema
            self._text = json.dumps({"fields": schema.to_json()}).encode()
            self._arrays = sum(len(_parts(field)) for field in schema)
        self._head(self._text, self._arrays)

    def _head(self, text: bytes, arrays: int) -> None:
        self._taken = 0
        self._places: dict[str, tuple[int, int]] = {}
        kept = self._kept.get(self._slot)
        # Same text, same memory: the head of the batch before is already there. That saves 10 us a
        # batch.
        if kept is not None and kept.text is text and kept.memory is self._ring.memory(self._slot):
            self._used = kept.stop
            self._form = kept
            return
        numbers = 8 * (_NUMBERS + 2 * arrays)
        self._used = numbers + len(text)
        memory = self._ring.memory(self._slot, self._used)
        memory[numbers : self._used] = np.frombuffer(text, dtype=np.uint8)
        self._form = self._kept[self._slot] = _Filled(text, memory, memory[:numbers].view(np.int64), self._used)
        self._form.numbers[:_NUMBERS] = len(text), arrays

    def values(self, field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return memory in the slot for the values of a field. Fill it before asking for the next one."""
        self._places[field.name], out = self._array(shape, field.numpy)
        return out

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, int], npt.NDArray[Any]]:
        number, arrays = self._taken, self._form.arrays
        self._taken += 1
        if number < len(arrays):
            place, array, self._used = arrays[number]
            if array.shape == shape and array.dtype == dtype:
                return place, array
            # From the first array that differs on all offsets change, so the arrays behind it are
            # made again.
            self._used = arrays[number - 1][2] if number else self._form.stop
            del arrays[number:]
        nbytes = math.prod(shape) * dtype.itemsize
        start = _start(self._used, nbytes)
        # At least one byte, so that each array has an address of its own: torch.save tells arrays
        # apart by it.
        stop = start + max(1, nbytes)
        memory = self._ring.memory(self._slot)
        if stop > len(memory):
            # Room for a whole batch like the largest so far. Otherwise the slot would be moved, and
            # what is in it copied, once for each field.
            memory = self._ring.memory(self._slot, max(stop, self._largest), keep=self._used)
        self._used = stop
        self._ring.fill(self._slot, stop)
        place, out = (start, shape[0]), memory[start : start + nbytes].view(dtype).reshape(shape)
        arrays.append((place, out, stop))
        # The places in the head are wrong now, so the reader must not take its arrays of the batch
        # before.
        self._form.form = 0
        return place, out

    def commit(self, generation: int, step: int, columns: Mapping[str, Column]) -> None:
        """Hand the batch over. ``columns`` are the columns whose values were written into this slot."""
        assert self._schema is not None
        places: list[int] = []
        for field in self._schema:
            places += self._places[field.name]
            column = columns[field.name]
            for layout in (column.offsets, column.shapes) if isinstance(column, Ragged) else ():
                if layout is not None:
                    place, out = self._array(layout.shape, layout.dtype)
                    out[...] = layout
                    places += place
        self._hand_over(generation, step, places)

    def fail(self, generation: int, step: int, error: Mapping[str, Any]) -> None:
        """Hand an error over in place of a batch."""
        self._head(json.dumps({"error": error}).encode(), 0)
        self._hand_over(generation, step, [])

    def _hand_over(self, generation: int, step: int, places: list[int]) -> None:
        form = self._form
        memory = self._ring.memory(self._slot)
        # The slot was moved while it was filled. Its arrays point into the old memory, so they are
        # made again with the next batch; only the numbers of the head are still to be written, to
        # the new place.
        if memory is not form.memory:
            self._kept.pop(self._slot)
            form.numbers = memory[: form.numbers.nbytes].view(np.int64)
        if not form.form:
            form.numbers[_NUMBERS:] = places
            # A number that this slot did not have before tells the reader that places or fields
            # have changed.
            self._forms = self._forms % _FORMS + 1
            form.form = self._forms
        self._largest = max(self._largest, self._used)
        self._ring.commit(
            self._slot, form.form, generation, step, spent=() if self._times is None else self._times.spent
        )
        self._more()

    def _more(self) -> None:
        """Allow this feeder more slots, once the size of a batch is known and whenever the consumer needs more."""
        if self._ring.starved():
            self._bytes = min(2 * self._bytes, self._most_bytes)
        wanted = max(_LEAST, self._wanted or min(MOST, round(self._bytes / max(1, self._used))))
        if wanted > self._permitted:
            self._ring.permit(wanted - self._permitted)
            self._permitted = wanted


class _Columns(NamedTuple):
    """The fields of a slot, and which of its arrays belong to which."""

    schema: Schema
    fields: list[tuple[str, int, int]]
    """The name of each field, the index of its first array, and how many arrays it has."""
    names: list[str] | None
    """The names of the fields if each has exactly one array, otherwise None."""


class SlotReader:
    """A reader that makes batches of the slots that come out of a ring.

    ``schemas`` is shared by the readers of all feeders: the schemas that came so far, by their text.
    """

    def __init__(self, ring: Ring, schemas: dict[bytes, Schema] | None = None) -> None:
        self.ring = ring
        self._schemas = {} if schemas is None else schemas

    def ready(self, generation: int) -> bool:
        """Return True if :meth:`take` would return a batch. Drop batches of earlier generations, without releasing the
        GIL."""
        ring = self.ring
        while ring.ready or ring.poll():
            slot, _, batch_generation, _ = ring.next()
            if batch_generation >= generation:
                return True
            # A batch of a plan that the training process has left: its slot goes straight back to
            # the feeder.
            ring.take(slot)
        return False

    def take(self, generation: int) -> Batch | None:
        """Return the next ready batch of a generation, or None if there is none.

        Batches of earlier generations are dropped. Raises the error that the feeder sent in place of a batch.
        """
        ring = self.ring
        while ring.ready:
            slot, form, batch_generation, step = ring.next()
            if batch_generation > generation:
                # This batch belongs to the epoch after this one: it stays in the queue until that
                # begins.
                break
            if batch_generation < generation:
                ring.take(slot)
                continue
            # A batch of a known form is not read at all here: its arrays are in the slot already. A
            # change of the lock counts as a new form, because memory may be locked only while no
            # array points into it.
            if slot.form != form or slot.lock is not ring.lock:
                self._read(slot)
                slot.form = form
            schema, fields, names = slot.columns
            columns: dict[str, Column] = {}
            if names is None:
                for name, first, count in fields:
                    # array[...] makes a view. The array itself must stay with the slot alone (see
                    # Slot).
                    arrays = [array[...] for array in slot.arrays[first : first + count]]
                    columns[name] = arrays[0] if count == 1 else Ragged(*arrays)
            else:
                for name, array in zip(names, slot.arrays, strict=True):
                    columns[name] = array[...]
            # Only after the views were made: a slot without references would count as free.
            ring.take(slot)
            return Batch(batch_generation, step, schema, columns)
        return None

    def _read(self, slot: Slot) -> None:
        """Make the arrays of a slot, as its head describes them."""
        self.ring.look(slot)
        length, count = slot.numbers[:_NUMBERS].tolist()
        at = 8 * (_NUMBERS + 2 * count)
        places = slot.numbers[_NUMBERS : _NUMBERS + 2 * count].tolist()
        schema = self._schema(bytes(slot.memory[at : at + length]))
        fields: list[tuple[str, int, int]] = []
        pairs = iter(zip(places[::2], places[1::2], strict=True))
        for field in schema:
            first = len(slot.arrays)
            for dtype, inner in _parts(field):
                offset, size = next(pairs)
                slot.array(offset, (size, *inner), dtype)
            fields.append((field.name, first, len(slot.arrays) - first))
        one_array_each = len(fields) == len(slot.arrays)
        slot.columns = _Columns(schema, fields, [name for name, _, _ in fields] if one_array_each else None)

    def _schema(self, text: bytes) -> Schema:
        # Most slots have the same text, which need not be parsed for each of them.
        schema = self._schemas.get(text)
        if schema is None:
            value = json.loads(text)
            if "error" in value:
                raise rebuilt(value["error"])
            schema = Schema.from_json(value["fields"])
            # A transform that returns other fields for another batch would give training tensors of
            # changing types. It is refused with both schemas, because the first batch alone looks
            # right.
            for other in self._schemas.values():
                if other != schema:
                    raise UsageError(
                        f"transform= returned {schema.describe()}, but {other.describe()} for another batch; fields,"
                        " types and shapes must be the same for all batches"
                    )
            self._schemas[text] = schema
        return schema
