"""The readers in ``docs/reference/formats.md`` read every field of our files without cachetool."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats import Format, format_names, get_format
from cachetool.formats.shard import ShardFiles
from tests.formats.samples import EVERY_KIND, block, on_disk, write
from tests.interop.documented import DOC, READERS, arguments, expected, read

CONTENT = block(EVERY_KIND, 6, largest=9)
NUMBERS = Schema((Field("x", "<f4", (3, 2)), Field("n", "|u1"), Field("y", "<f8")))


def test_there_is_a_short_reader_for_each_format_and_for_extents() -> None:
    assert list(READERS) == [*("lmdb", "hdf5", "zarr", "tfrecord"), "extents.bin"]
    for name, program in READERS.items():
        lines = [line for line in program.splitlines() if line.strip() and not line.startswith("import")]
        assert len(lines) <= 17, name


@pytest.mark.parametrize("kind", [get_format(name) for name in format_names()], ids=lambda kind: kind.name)
def test_a_documented_reader_reads_every_kind_of_field(kind: Format, tmp_path: Path) -> None:
    """Uncompressed, in every compression, without samples, and with fixed fields only."""
    jobs, wanted = [], []
    for number, (content, compression) in enumerate(
        [
            *((CONTENT, compression) for compression in (None, *kind.compressions)),
            (CONTENT.slice(0, 0), None),
            (block(NUMBERS, 4), None),
        ]
    ):
        path = tmp_path / f"{number}{kind.suffix}"
        write(kind, path, content, compression=compression)
        jobs.append((len(content), arguments(kind.name, path, content.schema, compression=compression)))
        wanted.append(expected(content))

    assert read(kind.name, jobs) == wanted


def test_the_documented_reader_of_extents_reads_every_format(tmp_path: Path) -> None:
    jobs = []
    for name in format_names():
        (tmp_path / name).mkdir()
        files = ShardFiles(tmp_path / name, get_format(name), EVERY_KIND, samples=6, nbytes=CONTENT.nbytes)
        files.write(CONTENT)
        files.finish()
        jobs.append((6, [str(tmp_path / name / "extents.bin"), str(tmp_path / name), EVERY_KIND.to_json()]))

    assert read("extents.bin", jobs) == [expected(CONTENT)] * len(jobs)


ROWS = re.findall(r"^\| ([\d,]+) bytes \|(.*)\|$", DOC, re.MULTILINE)


@pytest.mark.parametrize(("size", "cells"), ROWS, ids=[size for size, _ in ROWS])
def test_the_table_of_costs_matches_the_bytes_on_disk(size: str, cells: str) -> None:
    """Within 1 % and one block per file. The test knows only file systems with blocks of 4,096 bytes."""
    nbytes = int(size.replace(",", ""))
    count, *costs = (int(cell.replace(",", "")) for cell in cells.split("|"))
    schema = Schema((Field("x", "u1", (nbytes,)),))
    content = Block(schema, {"x": np.zeros((count, nbytes), dtype=np.uint8)})
    for name, cost in zip(("lmdb", "hdf5", "zarr", "tfrecord"), costs, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data"
            write(get_format(name), path, content)
            assert on_disk(path) / count == pytest.approx(cost, rel=0.01, abs=5 * 4096 / count), name
