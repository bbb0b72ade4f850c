"""Common parts of the tests of foreign files: reading a whole file as ``convert`` does, and damaging it at many
places.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import CacheToolError
from cachetool.sources.base import Source
from cachetool.sources.kinds import Census, locate
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from cachetool.stores import open_store


class OpenFiles:
    """All samples of a file or folder in order, as ``convert`` reads them."""

    def __init__(self, path: Path | str, options: SourceOptions | None = None) -> None:
        self.path, self._options = path, options or SourceOptions()
        self._folder = tempfile.TemporaryDirectory()
        self._listing = Path(self._folder.name, "listing")
        list_source(str(path), self._listing, self._options, survey="all")
        self._source: Source | None = None
        source: Any = self._opened()
        try:
            self.samples, self.skipped = source.units, getattr(source, "skipped", ())
            self.schema = source.probe(np.arange(1)).schema
        finally:
            self.close()

    def _opened(self) -> Source:
        if self._source is None:
            self._source = open_source(str(self.path), self._listing, self._options, number=False)
        return self._source

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all samples in blocks of about ``block_bytes``."""
        return self._blocks(0, self.samples, block_bytes)

    def _blocks(self, start: int, stop: int, block_bytes: int) -> Iterator[Block]:
        units = np.arange(start, stop)
        with contextlib.closing(self._opened().read(units, schema=self.schema, block_bytes=block_bytes)) as pieces:
            for piece in pieces:
                if len(piece.block):
                    yield piece.block

    def read(self, start: int, stop: int) -> Block:
        """Return the samples ``start`` to ``stop``."""
        assert 0 <= start <= stop <= self.samples
        blocks = list(self._blocks(start, stop, BLOCK_BYTES))
        return Block.concat(blocks) if blocks else Block.from_samples(self.schema, [])

    def check(self, start: int, checksums: Any) -> None:
        """Compare samples with checksums, as ``convert`` does after writing."""
        self._opened().check(start, checksums)  # type: ignore[attr-defined]

    @property
    def reader(self) -> int:
        """Return the pid of the process that reads for this one."""
        opened = self._opened()._reader._open  # type: ignore[attr-defined]
        source = opened[1] if isinstance(opened, tuple) else opened
        return int(source._source._child.process.pid)

    def close(self) -> None:
        """Close the source. It is opened again when it is needed."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_kind(path: Path) -> str | None:
    """Return the kind of file of a path; None for a folder of objects."""
    if (located := locate(str(path))) is not None:
        return located[2].name
    with contextlib.closing(open_store(str(path))) as store:
        census = Census(str(path))
        list(census.count(store.list()))
        kind = census.kind(None)
    return None if kind is None else kind.name


def open_files(path: Path | str, options: SourceOptions | None = None) -> OpenFiles:
    """Open the samples of ``path``."""
    return OpenFiles(path, options)


def samples(path: Path | str, *, block_bytes: int = 1000, **options: Any) -> list[dict[str, Any]]:
    """Return all samples of a file, read in small blocks."""
    with open_files(path, SourceOptions(**options)) as source:
        found = [block.sample(i) for block in source.blocks(block_bytes=block_bytes) for i in range(len(block))]
        assert len(found) == source.samples
    return found


def read(source: OpenFiles, start: int, stop: int) -> Block:
    """Return samples of a source with random access."""
    block = source.read(start, stop)
    assert isinstance(block, Block)
    assert len(block) == stop - start
    return block


def same(found: Any, wanted: Any) -> bool:
    """Return True if value, shape and stored dtype are equal. NaN equals NaN."""
    if isinstance(wanted, str | bytes):
        return type(found) is type(wanted) and bool(found == wanted)
    found, wanted = np.asarray(found), np.asarray(wanted)
    return (
        found.dtype == wanted.dtype.newbyteorder("<")
        and found.shape == wanted.shape
        and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted, dtype=found.dtype).tobytes()
    )


def damaged(path: Path, *, cuts: int, flips: int, seed: int = 0) -> Iterator[tuple[str, Path]]:
    """Yield the file truncated at ``cuts`` places and with one flipped bit at ``flips`` places, one after another."""
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
    """Return the samples, or the message of cachetool's error. Any other exception is a failure."""
    try:
        return samples(path, block_bytes=2**20, **options)
    except CacheToolError as error:
        text = str(error)
        assert path.name in text, f"the message does not name the file: {text}"
        assert len(text.splitlines()) <= 2, text
        assert text.isprintable() or "\n" in text
        return text
