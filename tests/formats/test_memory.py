"""Large samples: writing and converting hold only a few of them in memory, however many exist."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cachetool.conversion.inputs import run_of_blocks
from cachetool.core.block import Block, Ragged
from cachetool.core.schema import Field, Schema
from cachetool.formats import format_names, get_format
from cachetool.formats.shard import ShardFiles, open_shard, verify_file

SAMPLE = 4 * 2**20
COUNT = 12
FIXED = Schema((Field("x", "<f4", (SAMPLE // 4,)), Field("y", "<i8")))
VARIED = Schema((Field("raw", "bytes"), Field("y", "<i8")))


def one(schema: Schema, number: int) -> Block:
    values = np.full(SAMPLE // 4, number, dtype="<f4")
    column = values[None] if schema is FIXED else Ragged(values.view(np.uint8), np.array([0, SAMPLE]))
    return Block(schema, {schema.names[0]: column, "y": np.array([number])})


def peak(work: Callable[[], object]) -> int:
    """Return the peak of NumPy's and Python's allocations during ``work``, above those before it."""
    work()  # imports and one-time allocations do not count
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("schema", [FIXED, VARIED], ids=["fixed", "bytes"])
@pytest.mark.parametrize("name", format_names())
def test_a_few_large_samples_are_held_at_a_time(name: str, schema: Schema, tmp_path: Path) -> None:
    """Samples are written one by one, read by extents and through the library, and read back after writing."""
    kind, turns = get_format(name), iter(range(100))

    def write() -> Path:
        folder = tmp_path / f"w{next(turns)}"
        folder.mkdir()
        files = ShardFiles(folder, kind, schema, samples=COUNT, nbytes=COUNT * (SAMPLE + 8))
        for number in range(COUNT):
            files.write(one(schema, number))
        files.facts()
        return folder

    def convert() -> None:
        source = tmp_path / "w0"
        folder = tmp_path / f"c{next(turns)}"
        folder.mkdir()
        files = ShardFiles(folder, kind, schema, samples=COUNT, nbytes=COUNT * (SAMPLE + 8))
        with open_shard(source, kind, schema) as reader:
            for block in run_of_blocks(reader, 0, COUNT):
                files.write(block)
        checksums.append(files.facts().written.checksums)

    checksums: list[np.ndarray] = []
    held = 3 * SAMPLE  # one that arrives, one that is packed, one that a library joins
    if schema is VARIED and name in ("hdf5", "zarr"):
        held += COUNT * SAMPLE  # these arrays cannot be placed before all sizes are known, so they wait in memory
    assert peak(write) < held + 2**21
    assert peak(convert) < held + 2**21
    path = tmp_path / "w0" / f"data{kind.suffix}"
    # Zarr reads in its own threads, which sometimes hold one more sample for a moment.
    assert peak(lambda: verify_file(path, kind, schema, checksums[0])) < 6 * SAMPLE + 2**21
