"""The memory of a ring: the addresses of its slots, and their page sizes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachetool.loaders.read.arena import HUGE
from cachetool.loaders.ring.ring import Ring, RingWriter
from cachetool.proc.parent import boot


@pytest.fixture
def ends() -> Iterator[tuple[Ring, RingWriter]]:
    """Return both ends of a ring in one process."""
    ring = Ring()
    writer = RingWriter(ring.fd)
    writer.permit(4)
    yield ring, writer
    ring.close()


@pytest.mark.parametrize("step", ["Head", "library", "watch", "Inherited"])
def test_a_ring_whose_creation_is_interrupted_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"cachetool.loaders.ring.ring.{step}", interrupted)
    gc.collect()  # leftovers of other tests must not count
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        Ring()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # a client's thread may close an idle connection meanwhile


def in_huge_pages(address: int) -> int:
    """Return the bytes of the map around ``address`` that use huge pages."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            here = start <= address < end
        elif here and first == "ShmemPmdMapped:":
            return 1024 * int(line.split()[1])
    return 0


def send(ends: tuple[Ring, RingWriter], *sizes: int) -> memoryview:
    """Return a slot that was enlarged several times and filled with 7, as the reader sees it."""
    ring, writer = ends
    slot = writer.acquire()
    kept = 0
    for size in sizes:
        memory = writer.memory(slot, size, keep=kept)
        writer.fill(slot, size)
        memory[kept:size] = 7
        kept = size
    writer.commit(slot)
    assert ring.wait(1)
    taken, *_ = ring.next()
    ring.look(taken)
    ring.take(taken)
    return taken.memory


@pytest.mark.skipif(
    tuple(int(each) for each in os.uname().release.split(".")[:2]) < (6, 1), reason="MADV_COLLAPSE came with Linux 6.1"
)
@pytest.mark.parametrize("before", [(), (5000,), (5000, HUGE + 5000)])
def test_large_batches_use_huge_pages_in_both_processes(ends: tuple[Ring, RingWriter], before: tuple[int, ...]) -> None:
    """The earlier size of the slot does not matter, nor do small slots beside it."""
    send(ends, 5000)
    memory = send(ends, *before, 2 * HUGE + 5000)
    address = memory.obj.ctypes.data  # type: ignore[attr-defined]
    assert address % HUGE == 0
    assert bytes(memory[: 2 * HUGE + 5000]) == b"\7" * (2 * HUGE + 5000)
    assert in_huge_pages(address) >= 2 * HUGE


def test_slots_of_any_size_share_no_bytes(ends: tuple[Ring, RingWriter]) -> None:
    sizes = [4096, HUGE, 3 * 4096, HUGE + 4096]
    slots = [send(ends, size) for size in sizes]
    for number, slot in enumerate(slots):
        slot[:] = bytes([number]) * len(slot)
    assert [(len(slot), set(slot)) for slot in slots] == [(size, {number}) for number, size in enumerate(sizes)]


def test_memory_that_a_batch_does_not_fill_is_not_allocated(ends: tuple[Ring, RingWriter]) -> None:
    """Slots have the size of the largest batch."""
    ring, writer = ends
    slot = writer.acquire()
    writer.memory(slot, 32 * HUGE)
    writer.fill(slot, HUGE + 5000)
    blocks = os.fstat(ring.fd).st_blocks * 512
    writer.fill(slot, 3 * HUGE)
    assert blocks <= 2 * HUGE
    assert os.fstat(ring.fd).st_blocks * 512 <= 4 * HUGE


def test_a_keeper_whose_first_message_is_stop_ends_silently() -> None:
    command = [sys.executable, "-c", boot("cachetool.loaders.feed.feeder:main()")]
    ended = subprocess.run(command, input=b'{"id": 0, "do": "stop"}\n', capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
