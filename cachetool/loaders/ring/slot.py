"""A batch as bytes in a slot of a ring: written by a feeder, looked at by the training process, copied by neither.

::

    int64: bytes of text | arrays | offset, length | offset, length | ...
    text: {"fields": schema} or {"error": ...}
    array | array | ...             each at another multiple of 64, one of more than a page in the middle of one

Arrays of a field: the values; for bytes, str and ragged fields behind them where each sample begins, and for ragged
ones the shapes. All that is before the arrays is the form of the batch. A slot that is filled with a batch of the form
that it had keeps it, and the ring's queue says so: then the training process reads nothing but the arrays.
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
from cachetool.loaders.ring.ring import Ring, RingWriter, Slot
from cachetool.proc.lines import rebuilt

__all__ = ["Batch", "SlotReader", "SlotWriter"]

_ALIGN = 64
_PAGE = 4096  # not that of the machine: the bits of an address that a processor compares first are twelve anywhere
_NUMBERS = 2
_FORMS = 2**31 - 1
_READY_BYTES = 384 * 2**20
"""What all feeders of a loader keep ready together at most, for a consumer that takes whatever there is. A busy one
comes for its batches once in 5 to 10 ms, the turns of its GIL; a training step needs a quarter (docs/decisions.md)."""
_LEAST_READY_BYTES = 48 * 2**20
_LEAST, MOST = 2, 128


class Batch(NamedTuple):
    """What a feeder made for one step, as it came."""

    generation: int
    """Of the plan it belongs to."""
    step: int
    schema: Schema
    columns: Mapping[str, Column]
    """Memory that is this batch's alone as long as any of these arrays is seen."""


def _start(used: int, nbytes: int) -> int:
    """Where an array of so many bytes begins behind ``used`` bytes.

    Files have large values at the beginning of a page, or 16 bytes behind it. Where source and target are that near
    to each other in their pages, loads wait for stores to other pages, and memcpy goes backwards: samples of 1 MiB
    then came at a third to a half of the rate on one machine (docs/decisions.md).
    """
    if nbytes <= _PAGE:
        return -(-used // _ALIGN) * _ALIGN
    return -(-(used - _PAGE // 2) // _PAGE) * _PAGE + _PAGE // 2


def _parts(field: Field) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and inner shape of the arrays of a field."""
    if field.kind == "fixed":
        return [(field.numpy.str, field.sizes)]
    values: list[tuple[str, tuple[int, ...]]] = [(field.numpy.str, ()), ("<i8", ())]
    return [*values, ("<i8", (field.rank,))] if field.kind == "ragged" else values


class _Filled:
    """What a slot was filled with: the next batch is mostly like it, and only its values are written anew."""

    __slots__ = ("arrays", "form", "memory", "numbers", "stop", "text")

    def __init__(self, text: bytes, memory: Bytes, numbers: Int64s, stop: int) -> None:
        self.text, self.memory = text, memory
        self.numbers, self.stop = numbers, stop
        """Of the head: its numbers, and where it ends."""
        self.arrays: list[tuple[tuple[int, int], npt.NDArray[Any], int]] = []
        """Place and length, the array, and where it ends."""
        self.form = 0
        """Number of the form that the head says, 0 for none yet."""


class SlotWriter:
    """Fills one slot after another; the sink of a feeder (see :class:`~cachetool.loaders.feed.batches.Sink`).

    ``ready``: how many batches may wait for the consumer or be in use there, at least 2. None: as many as take 96 MiB,
    shared by ``feeders``, but at least 12 MiB and 2 batches each, and at most 128 batches. Twice as many whenever the
    consumer waits again and again though there was no slot to fill, up to four times.
    """

    def __init__(self, ring: RingWriter, *, ready: int | None, feeders: int = 1) -> None:
        self._ring = ring
        self._wanted, self._permitted = ready, _LEAST
        self._most_bytes = max(_LEAST_READY_BYTES, _READY_BYTES // max(2, feeders))
        self._bytes = self._most_bytes // 4
        ring.permit(self._permitted)
        self._schema: Schema | None = None
        self._text, self._arrays = b"", 0
        self._kept: dict[int, _Filled] = {}
        self._forms = 0
        self._largest = 0

    def open(self, over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for room; False when it is ``over`` before there is any."""
        slot = self._ring.acquire(over)
        if slot is None:
            return False
        self._slot = slot
        return True

    def begin(self, schema: Schema) -> None:
        """Say which fields the batch has."""
        if schema is not self._schema:
            self._schema = schema
            self._text = json.dumps({"fields": schema.to_json()}).encode()
            self._arrays = sum(len(_parts(field)) for field in schema)
        self._head(self._text, self._arrays)

    def _head(self, text: bytes, arrays: int) -> None:
        self._taken = 0
        self._places: dict[str, tuple[int, int]] = {}
        kept = self._kept.get(self._slot)
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
        """Memory for the values of a field, in the slot; to be filled before the next is asked for."""
        self._places[field.name], out = self._array(shape, field.numpy)
        return out

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, int], npt.NDArray[Any]]:
        number, arrays = self._taken, self._form.arrays
        self._taken += 1
        if number < len(arrays):
            place, array, self._used = arrays[number]
            if array.shape == shape and array.dtype == dtype:
                return place, array
            self._used = arrays[number - 1][2] if number else self._form.stop
            del arrays[number:]
        nbytes = math.prod(shape) * dtype.itemsize
        start = _start(self._used, nbytes)
        stop = start + max(1, nbytes)  # an address of its own, by which torch.save tells arrays apart
        memory = self._ring.memory(self._slot)
        if stop > len(memory):
            # Room for the rest of a batch like the one before, so that the slot is not moved once a field.
            memory = self._ring.memory(self._slot, max(stop, self._largest), keep=self._used)
        self._used = stop
        self._ring.fill(self._slot, stop)
        place, out = (start, shape[0]), memory[start : start + nbytes].view(dtype).reshape(shape)
        arrays.append((place, out, stop))
        self._form.form = 0
        return place, out

    def commit(self, generation: int, step: int, columns: Mapping[str, Column]) -> None:
        """Hand the batch over: the columns whose values were put into this slot."""
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
        if memory is not form.memory:  # moved since: written anew next time
            self._kept.pop(self._slot)
            form.numbers = memory[: form.numbers.nbytes].view(np.int64)
        if not form.form:
            form.numbers[_NUMBERS:] = places
            self._forms = self._forms % _FORMS + 1
            form.form = self._forms
        self._largest = max(self._largest, self._used)
        self._ring.commit(self._slot, form.form, generation, step)
        self._more()

    def _more(self) -> None:
        """Once it is known how large a batch is: as many slots as there shall be, more when the consumer needs them."""
        if self._ring.starved():
            self._bytes = min(2 * self._bytes, self._most_bytes)
        wanted = max(_LEAST, self._wanted or min(MOST, round(self._bytes / max(1, self._used))))
        if wanted > self._permitted:
            self._ring.permit(wanted - self._permitted)
            self._permitted = wanted


class _Columns(NamedTuple):
    """What the arrays of a slot are."""

    schema: Schema
    fields: list[tuple[str, int, int]]
    """Of each field, which of the arrays are its own: the first one, and how many."""
    names: list[str] | None
    """Those of the fields, when each has one array."""


class SlotReader:
    """Makes batches of the slots that come out of a ring."""

    def __init__(self, ring: Ring, schemas: dict[bytes, Schema] | None = None) -> None:
        """``schemas``: what readers of the same batches have in common."""
        self.ring = ring
        self._schemas = {} if schemas is None else schemas

    def ready(self, generation: int) -> bool:
        """Whether :meth:`take` would give a batch, once those of earlier generations are dropped; keeps the GIL."""
        ring = self.ring
        while ring.ready or ring.poll():
            slot, _, batch_generation, _ = ring.next()
            if batch_generation >= generation:
                return True
            ring.take(slot)
        return False

    def take(self, generation: int) -> Batch | None:
        """The next batch of a generation, of those that are ready; None when there is none.

        Batches of earlier generations are dropped. Raises the error that the feeder sent in its place.
        """
        ring = self.ring
        while ring.ready:
            slot, form, batch_generation, step = ring.next()
            if batch_generation > generation:
                break  # of the next epoch
            if batch_generation < generation:
                ring.take(slot)
                continue
            if slot.form != form or slot.lock is not ring.lock:
                self._read(slot)
                slot.form = form
            schema, fields, names = slot.columns
            columns: dict[str, Column] = {}
            if names is None:
                for name, first, count in fields:
                    arrays = [array[...] for array in slot.arrays[first : first + count]]
                    columns[name] = arrays[0] if count == 1 else Ragged(*arrays)
            else:
                for name, array in zip(names, slot.arrays, strict=True):
                    columns[name] = array[...]
            ring.take(slot)
            return Batch(batch_generation, step, schema, columns)
        return None

    def _read(self, slot: Slot) -> None:
        """Make the slot's arrays as its head says."""
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
        schema = self._schemas.get(text)
        if schema is None:
            value = json.loads(text)
            if "error" in value:
                raise rebuilt(value["error"])
            schema = Schema.from_json(value["fields"])
            for other in self._schemas.values():
                if other != schema:
                    raise UsageError(
                        f"transform= gave {schema.describe()}, and {other.describe()} for another batch; fields, types"
                        " and shapes must be the same for all"
                    )
            self._schemas[text] = schema
        return schema
