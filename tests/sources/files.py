"""What the tests of files by others share: reading all of one, and damaging one at many places."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.core.block import Block
from cachetool.core.errors import CacheToolError
from cachetool.sources.doors import FileOptions, FileSource, open_files


def samples(path: Path, *, block_bytes: int = 1000, **options: Any) -> list[dict[str, Any]]:
    """All samples of a file, out of small blocks."""
    with open_files(path, FileOptions(**options)) as source:
        found = [block.sample(i) for block in source.blocks(block_bytes=block_bytes) for i in range(len(block))]
        assert len(found) == source.samples
    return found


def read(source: FileSource, start: int, stop: int) -> Block:
    """Samples of a source that reads at random."""
    block = source.read(start, stop)  # type: ignore[attr-defined]
    assert isinstance(block, Block)
    assert len(block) == stop - start
    return block


def same(found: Any, wanted: Any) -> bool:
    """Equal in value, shape and stored dtype; not a number equals itself."""
    if isinstance(wanted, str | bytes):
        return type(found) is type(wanted) and bool(found == wanted)
    found, wanted = np.asarray(found), np.asarray(wanted)
    return (
        found.dtype == wanted.dtype.newbyteorder("<")
        and found.shape == wanted.shape
        and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted, dtype=found.dtype).tobytes()
    )


def damaged(path: Path, *, cuts: int, flips: int, seed: int = 0) -> Iterator[tuple[str, Path]]:
    """The file cut short at ``cuts`` places and with one bit flipped at ``flips``, one after another."""
    whole = path.read_bytes()
    chance = random.Random(seed)
    copy = path.with_name(f"damaged{path.suffix}")
    for at in sorted(chance.sample(range(len(whole)), min(cuts, len(whole)))):
        copy.write_bytes(whole[:at])
        yield f"cut at {at}", copy
    for _ in range(flips):
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        raw = bytearray(whole)
        raw[at] ^= 1 << bit
        copy.write_bytes(raw)
        yield f"bit {bit} of byte {at} flipped", copy
    copy.unlink()


def outcome(path: Path, **options: Any) -> list[dict[str, Any]] | str:
    """The samples, or the message of the error that cachetool raised; any other exception is a failure."""
    try:
        return samples(path, block_bytes=2**20, **options)
    except CacheToolError as error:
        text = str(error)
        assert path.name in text, f"the message does not name the file: {text}"
        assert len(text.splitlines()) <= 2, text
        assert text.isprintable() or "\n" in text
        return text
