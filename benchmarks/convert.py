"""How fast each format is written, as a share of writing the same bytes to one file.

    python benchmarks/convert.py FOLDER [--rounds 5] [--formats lmdb,tfrecord] [--scale 1.0]

Every round writes, for every size, one file of the same bytes with 8 MiB writes and one fsync (not preallocated), and
a shard of each format (checksums, extents and fsync included), one after another; the table gives medians over the
rounds.
FOLDER must lie on the disk to be measured and have about 1.5 GB free; what is written there is deleted again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from cachetool.block import BLOCK_BYTES, Block
from cachetool.formats import format_names, get_format
from cachetool.formats.reading import write_extents
from cachetool.schema import Field, Schema

SIZES = {"512 x 1 MiB": (512, 2**20), "4096 x 128 KiB": (4096, 2**17), "50000 x 3 KiB": (50_000, 3 * 2**10)}
CHUNK = 8 * 2**20


def blocks_of(samples: int, nbytes: int) -> list[Block]:
    """Blocks of float32 arrays with an int64 label, ``nbytes`` of array each, about 8 MB a block."""
    schema = Schema((Field("x", "<f4", (nbytes // 4,)), Field("label", "<i8")))
    values = np.random.default_rng(0).integers(0, 2**63, size=samples * nbytes // 8, dtype=np.int64)
    x = values.view("<f4").reshape(samples, nbytes // 4)
    whole = Block(schema, {"x": x, "label": np.arange(samples, dtype=np.int64)})
    step = max(1, BLOCK_BYTES // nbytes)
    return [whole.slice(at, min(at + step, samples)) for at in range(0, samples, step)]


def raw_write(folder: Path, data: memoryview) -> float:
    """Seconds to write ``data`` to a new file and fsync it."""
    begin = time.perf_counter()
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    for at in range(0, len(data), CHUNK):
        os.write(fd, data[at : at + CHUNK])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - begin


def shard_write(folder: Path, name: str, blocks: list[Block]) -> float:
    """Seconds to write ``blocks`` as one shard of the format ``name``, extents and fsync included."""
    chosen = get_format(name)
    samples, nbytes = sum(len(b) for b in blocks), sum(b.nbytes for b in blocks)
    begin = time.perf_counter()
    writer = chosen.create(folder / ("data" + chosen.suffix), blocks[0].schema, samples=samples, nbytes=nbytes)
    for block in blocks:
        writer.write(block)
    written = writer.finish()
    if written.extents is not None:
        write_extents(folder, written.extents)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default=",".join(format_names()))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples to write")
    options = parser.parse_args()
    names = options.formats.split(",")
    for title, (samples, nbytes) in SIZES.items():
        blocks = blocks_of(max(1, int(samples * options.scale)), nbytes)
        total = sum(b.nbytes for b in blocks)
        data = memoryview(np.concatenate([np.asarray(b.columns["x"]).reshape(-1) for b in blocks])).cast("B")
        seconds: dict[str, list[float]] = {name: [] for name in ("raw", *names)}
        for _ in range(options.rounds):
            for name, taken in seconds.items():
                folder = Path(tempfile.mkdtemp(dir=options.folder))
                try:
                    taken.append(raw_write(folder, data) if name == "raw" else shard_write(folder, name, blocks))
                finally:
                    shutil.rmtree(folder)
        raw = statistics.median(seconds["raw"])
        print(f"{title}: raw {total / raw / 1e6:.0f} MB/s")
        for name in names:
            median = statistics.median(seconds[name])
            print(f"  {name:9} {total / median / 1e6:6.0f} MB/s  {raw / median:5.2f} of raw")
        del data, blocks


if __name__ == "__main__":
    main()
