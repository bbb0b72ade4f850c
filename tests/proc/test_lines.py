"""Values and bytes over a pipe, in pieces of any size."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from cachetool.proc.lines import Lines, ready, write_line


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return the reading and the writing end. Tests may close the writing end."""
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb", closefd=False):
        yield reading, writing


def test_values_are_received_one_by_one_for_any_split_of_their_lines(pipe: tuple[int, int]) -> None:
    lines, sent = Lines(pipe[0]), b'{"a": 1}\n"\xc3\xa4"\n[2]\n'
    values = []
    for at in range(len(sent)):
        os.write(pipe[1], sent[at : at + 1])
        lines.receive()
        values += list(lines)

    assert values == [{"a": 1}, "ä", [2]]
    os.close(pipe[1])
    assert lines.wait() is None
    assert lines.ended


def test_blocks_of_bytes_follow_the_line_that_announces_them(pipe: tuple[int, int]) -> None:
    blocks = b"\n{}\n", bytes(range(256)) * 4000, b""
    writer = threading.Thread(target=write_line, args=(pipe[1], {"sizes": [len(block) for block in blocks]}, *blocks))
    writer.start()
    lines = Lines(pipe[0])
    out = [bytearray(size) for size in lines.wait()["sizes"]]
    for block in out:
        lines.fill(memoryview(block), 60.0)
    writer.join()
    write_line(pipe[1], "after")

    assert tuple(map(bytes, out)) == blocks
    assert lines.wait() == "after"


def test_missing_bytes_are_an_error_with_the_cause(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"abc")
    lines, out = Lines(pipe[0]), bytearray(4)
    with pytest.raises(TimeoutError):
        lines.fill(memoryview(out), 0.0)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        lines.fill(memoryview(out), 60.0)


def test_an_endless_line_from_an_untrusted_process_is_refused(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[0], most=100)
    os.write(pipe[1], b" " * 100)
    lines.receive()
    assert lines.next() is None
    os.write(pipe[1], b" ")
    lines.receive()
    with pytest.raises(ValueError, match="without an end"):
        lines.next()


def test_a_pipe_is_ready_when_bytes_arrived_and_when_it_ended(pipe: tuple[int, int]) -> None:
    assert ready(0, pipe[0]) == set()
    os.write(pipe[1], b"x")
    assert ready(None, pipe[0]) == {pipe[0]}
    os.read(pipe[0], 1)
    os.close(pipe[1])
    assert ready(None, pipe[0]) == {pipe[0]}
