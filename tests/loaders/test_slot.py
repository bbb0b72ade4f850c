"""The moment at which the training process takes batches from the slots of a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachetool.core.block import Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.feed.processes import Processes
from cachetool.loaders.ring import ring as ring_module
from cachetool.loaders.ring import slot as slot_module
from cachetool.loaders.ring.ring import Ring, RingWriter
from cachetool.loaders.ring.slot import Batch, SlotReader, SlotWriter
from cachetool.loaders.waits import EpochTimes
from cachetool.proc.lines import described

SCHEMA = Schema((Field("x", "<i8", (3,)),))


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    ring.close()


def put(writer: SlotWriter, generation: int, step: int) -> None:
    """Write a batch of two samples whose values are the number of the step."""
    writer.open()
    writer.begin(SCHEMA)
    column = writer.values(SCHEMA["x"], (2, 3))
    column[:] = step
    writer.commit(generation, step, {"x": column})


def taken(reader: SlotReader, generation: int) -> tuple[int, list[int]] | None:
    batch = reader.take(generation)
    return None if batch is None else (batch.step, np.unique(batch.columns["x"]).tolist())  # type: ignore[call-overload]


def test_batches_of_the_next_epoch_stay_in_their_slots(ring: Ring) -> None:
    writer, reader = SlotWriter(RingWriter(ring.fd), ready=16), SlotReader(ring)
    for generation, step in [(1, 0), (1, 2), (2, 0), (2, 2), (4, 0)]:
        put(writer, generation, step)
    assert ring.poll()
    assert ring.ready == 5
    assert [taken(reader, 1) for _ in range(4)] == [(0, [0]), (2, [2]), None, None]
    assert taken(reader, 2) == (0, [0])
    assert taken(reader, 4) == (0, [0])  # the remaining batches of the second epoch were discarded
    assert taken(reader, 4) is None
    assert ring.ready == 0


def test_an_error_stays_until_its_epoch_is_discarded(ring: Ring) -> None:
    writer, reader = SlotWriter(RingWriter(ring.fd), ready=16), SlotReader(ring)
    put(writer, 1, 0)
    writer.open()
    writer.fail(1, 1, described(UsageError("no such number")))
    put(writer, 2, 0)
    assert ring.poll()
    assert taken(reader, 1) == (0, [0])
    for _ in range(2):
        with pytest.raises(UsageError, match="no such number"):
            reader.take(1)
    assert taken(reader, 2) == (0, [0])


def test_batches_of_a_discarded_epoch_cause_no_wait(ring: Ring) -> None:
    """A wait would be recorded in the history and would release the GIL, for any number of discarded batches."""
    writer, reader = SlotWriter(RingWriter(ring.fd), ready=60), SlotReader(ring)
    for step in range(50):
        put(writer, 1, step)
    put(writer, 2, 0)
    feed = Processes.__new__(Processes)  # without any process
    feed._readers, feed.times, feed._tell_at = [reader], EpochTimes(), math.inf
    assert [batch.step for batch in feed.take(2, 0, 32)] == [0]
    assert feed.times.delivered(1).waits == 0


@pytest.mark.parametrize(("ready", "at_once"), [(2, 1), (3, 2), (5, 4), (8, 6), (15, 14), (40, 32)])
def test_fewer_than_half_of_the_slots_are_taken_together_and_of_two_slots_one(ready: int, at_once: int) -> None:
    """Otherwise a feeder has no slot to fill while one batch is in use and the other waits for its turn."""
    rings = [Ring(), Ring()]
    feed = Processes.__new__(Processes)  # without any process
    feed._readers, feed.times, feed._tell_at = [SlotReader(ring) for ring in rings], EpochTimes(), math.inf
    for number, ring in enumerate(rings):
        writer = SlotWriter(RingWriter(ring.fd), ready=ready)
        for step in range(ready):
            put(writer, 1, 2 * step + number)
    steps = [batch.step for batch in feed.take(1, 0, 32)]
    assert steps == list(range(at_once))
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("most", [1, 3, 32])
def test_no_more_batches_are_taken_together_than_requested_and_none_is_lost(most: int) -> None:
    rings = [Ring(), Ring()]
    feed = Processes.__new__(Processes)  # without any process
    feed._readers, feed.times, feed._tell_at = [SlotReader(ring) for ring in rings], EpochTimes(), math.inf
    for number, ring in enumerate(rings):
        writer = SlotWriter(RingWriter(ring.fd), ready=40)
        for step in range(40):
            put(writer, 1, 2 * step + number)
    taken: list[list[int]] = []
    while sum(map(len, taken)) < 80:
        taken.append([batch.step for batch in feed.take(1, sum(map(len, taken)), most)])
    assert [step for steps in taken for step in steps] == list(range(80))
    assert max(map(len, taken)) == most
    for ring in rings:
        ring.close()


@pytest.mark.parametrize(("there", "looked"), [(1, 2), (2, 3), (4, 4)])
def test_rings_are_read_as_far_as_batches_are_ready(there: int, looked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = [Ring() for _ in range(4)]
    feed = Processes.__new__(Processes)  # without any process
    feed._readers, feed.times, feed._tell_at = [SlotReader(ring) for ring in rings], EpochTimes(), math.inf
    writers = [SlotWriter(RingWriter(ring.fd), ready=3) for ring in rings]
    for step in range(there):
        put(writers[step], 1, step)
    looks: list[Ring] = []
    poll = Ring.poll
    monkeypatch.setattr(Ring, "poll", lambda ring: looks.append(ring) or poll(ring))
    assert [batch.step for batch in feed.take(1, 0, 32)] == list(range(there))
    assert looks == rings[:looked]
    for ring in rings:
        ring.close()


BOTH = Schema((Field("x", "<i8", (3,)), Field("text", "bytes"), Field("y", "<f4", (None, None))))


def ragged(rng: np.random.Generator, count: int, *, rank: int, most: int) -> Ragged:
    shapes = rng.integers(0, most, (count, max(1, rank)))
    offsets = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])
    values = rng.integers(0, 100, int(offsets[-1])).astype("<f4" if rank else "u1")
    return Ragged(values, offsets, shapes if rank else None)


def waited_for(ring: Ring, reader: SlotReader, generation: int) -> Batch:
    """Return the next batch of a generation. Batches left from earlier generations come out first."""
    while (batch := reader.take(generation)) is None:
        assert ring.poll()
    return batch


@given(st.lists(st.tuples(st.sampled_from([0, 3, 3, 3, 5]), st.sampled_from([2, 2, 60]), st.booleans()), max_size=12))
@example([(3, 2, False), (3, 60, False), (3, 2, False), (3, 2, False)])
@example([(3, 2, False), (0, 2, True), (3, 2, False)])
def test_a_slot_returns_the_batch_that_was_written_for_any_earlier_content(
    batches: list[tuple[int, int, bool]],
) -> None:
    """A slot filled with a batch of the same form keeps its arrays and its header."""
    ring = Ring()
    reader, writer = SlotReader(ring), SlotWriter(RingWriter(ring.fd), ready=2)
    rng = np.random.default_rng(0)
    for step, (count, most, fails) in enumerate(batches):
        whole = {
            "x": rng.integers(0, 100, (count, 3)),
            "text": ragged(rng, count, rank=0, most=most),
            "y": ragged(rng, count, rank=2, most=most),
        }
        writer.open()
        writer.begin(BOTH)
        for field in BOTH:
            column = whole[field.name]
            values = column.values if isinstance(column, Ragged) else column
            writer.values(field, values.shape)[...] = values
        if fails:
            writer.fail(step, step, described(UsageError("bad")))
            with pytest.raises(UsageError, match="bad"):
                waited_for(ring, reader, step)
            continue
        writer.commit(step, step, whole)
        batch = waited_for(ring, reader, step)
        assert batch.step == step
        for name, column in whole.items():
            found = batch.columns[name]
            if isinstance(column, Ragged):
                assert isinstance(found, Ragged)
                np.testing.assert_array_equal(found.values, column.values)
                np.testing.assert_array_equal(found.offsets, column.offsets)
                if column.shapes is not None:
                    np.testing.assert_array_equal(found.shapes, column.shapes)
            else:
                np.testing.assert_array_equal(found, column)
        del batch, found
    ring.close()


@pytest.mark.parametrize(
    ("ready", "events", "slots"),
    [
        (None, "", 4),
        (None, "full full full", 4),  # a consumer that is slower than its feeder
        (None, "waited waited", 4),  # a feeder that is slower than its consumer
        (None, "waited full", 4),
        (None, "full waited", 4),
        (None, "full waited waited waited", 4),
        (None, "full waited full waited", 8),
        (None, "full waited full full full waited", 4),  # too rarely
        (None, "full waited full waited full waited", 16),
        (None, "full waited full waited full waited full waited", 16),
        (3, "full waited full waited", 3),
    ],
)
def test_a_feeder_gets_more_slots_if_its_consumer_waits_repeatedly_without_a_free_slot(
    ring: Ring, ready: int | None, events: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "_READY_BYTES", 2**21)
    monkeypatch.setattr(slot_module, "_LEAST_READY_BYTES", 0)
    monkeypatch.setattr(ring_module, "_LOOK", 0.0)
    schema, count = Schema((Field("x", "<i8", (2**13,)),)), ring._head.count
    writer, reader = SlotWriter(RingWriter(ring.fd), ready=ready), SlotReader(ring)

    def send() -> None:
        assert writer.open()
        writer.begin(schema)
        writer.commit(1, 0, {"x": writer.values(schema["x"], (1, 2**13))})

    send()
    for event in events.split():
        if event == "full":
            for _ in range(count[0] - 1):
                send()
            assert not writer.open(lambda: True)
        else:
            ring.late()
        while ring.poll():
            assert reader.take(1) is not None
        send()
    assert count[0] == slots


def test_large_arrays_begin_in_the_middle_of_a_page(ring: Ring) -> None:
    """Values in files lie at the start of a page. Copies to the same offset of another page are slow."""
    small = Field("y", "<i8"), Field("z", "<u1", (3,))
    schema = Schema((small[0], Field("x", "<f4", (4096,)), small[1], Field("w", "<f4", (1024,))))
    writer, reader = SlotWriter(RingWriter(ring.fd), ready=2), SlotReader(ring)
    writer.open()
    writer.begin(schema)
    columns = {}
    for number, field in enumerate(schema):
        columns[field.name] = writer.values(field, (3, *field.sizes))
        columns[field.name][...] = number
    writer.commit(1, 0, columns)
    assert ring.poll()
    batch = reader.take(1)
    assert batch is not None
    found = {name: np.asarray(column) for name, column in batch.columns.items()}
    assert {name: column.ctypes.data % 4096 for name, column in found.items() if name in "xw"} == {"x": 2048, "w": 2048}
    assert all(column.ctypes.data % 64 == 0 for column in found.values())
    assert [np.unique(column).tolist() for column in found.values()] == [[0], [1], [2], [3]]
