"""The interface of a source: samples read out of a store and numbered by units.

A unit is what one fetch brings: the objects of a key, a row of an array, a chunk, a row group, or a complete
archive. Samples that are fetched together are also drawn together: :meth:`Source.order` permutes the units, then the
samples inside each unit. The caller passes the numbers of draws, in that order, to :meth:`Source.read`. A draw is
one sample. Of an archive that is one unit a draw is the complete archive with all its samples, because their number
is unknown before the archive is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.schema import Schema
from cachetool.sources.fetch import Fetching
from cachetool.sources.order import PartOrder

__all__ = ["Hurry", "ReadResult", "Probe", "Reading", "Skipped", "Source", "unhurried"]

Hurry = Callable[[], float | None]
"""A function that returns in how many seconds the caller needs the samples that are ready by then.

It returns None when the caller can wait until samples fill a block.
"""


def unhurried() -> float | None:
    """Return None: the caller does not wait for samples, so they may be gathered into full blocks.

    Returns:
        None, always.
    """
    return None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A unit that was left out of a read, and the reason.

    Example:
        Skipped(draw=3, key="cats/0003.jpg", reason="not an image that can be read")
    """

    draw: int
    """Position of the unit in the array of units that the caller passed."""
    key: str
    """Key of the object, or name of the file and row."""
    reason: str
    """The reason, in one line of text."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A run of samples that a read returns, in the order that the caller asked for.

    Example:
        ReadResult(block, draws=np.arange(len(block)), done=len(block))
    """

    block: Block
    """The samples. The block is empty when all units of this result were skipped."""
    draws: npt.NDArray[np.int64]
    """int64 (samples,): for each sample of the block the position of its unit in the caller's array, never
    decreasing."""
    done: int
    """All positions below this number are finished: their samples were returned, or the units were skipped."""
    skipped: tuple[Skipped, ...] = ()
    """The units of this result that were left out."""
    fetched: int = 0
    """Bytes that were fetched from the store for this result."""
    gaps: npt.NDArray[np.int64] | None = None
    """int64: positions below ``done`` that are not finished, set in the last result before an error. None: no such
    gaps."""


class Reading:
    """An iterator over the results of a read, whose first requests are made when the iterator is created.

    Args:
        fetching: The requests of the read.
        pieces: The results, made from the answers to these requests.

    Example:
        with contextlib.closing(source.read(units, schema=schema)) as reading:
            for result in reading:
                print(len(result.block), result.done)
    """

    def __init__(self, fetching: Fetching[Any, Any], pieces: Generator[ReadResult]) -> None:
        # Both are kept: closing the generator ends the decoding, and only `fetching` can cancel the requests that are
        # queued or in flight.
        self._fetching, self._pieces = fetching, pieces

    @property
    def begun(self) -> bool:
        """True once all requests of this read have been made, so that the requests of a next read can follow them."""
        return self._fetching.begun

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReadResult:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the requests in flight. May be called twice."""
        self._pieces.close()
        self._fetching.close()


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts about all samples of a source, taken from a few of them.

    Example:
        Probe(Schema((Field("image", "|u1", (32, 32, 3)),)), mean_bytes=3072)
    """

    schema: Schema
    """The fields that all samples share."""
    mean_bytes: int
    """Mean bytes of the values of a sample, rounded up."""
    per_unit: int = 1
    """About how many samples a draw brings: 1, or more for archives that are one unit."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Data that is in no sample although the user did not exclude it: (name of an object, or of an array or value of a
    file; reason)."""
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    """The number of objects that are in no sample, by reason, including those that :attr:`left_out` does not name."""


class Source(Protocol):
    """The samples of one place, with numbers. A source is used by one thread of a process that was started without
    fork.

    Example:
        list_source("data/", folder)
        source = open_source("data/", folder)
        schema = source.probe(np.arange(min(64, source.units))).schema
        with contextlib.closing(source.read(np.arange(source.units), schema=schema)) as reading:
            samples = sum(len(result.block) for result in reading)
        source.close()
    """

    url: str
    """Path or URL of the place, without user info and query."""
    units: int
    """Number of draws in a pass."""
    samples: int
    """Number of samples, as far as the listing tells."""
    identity: str
    """Hexadecimal digest of the listing and of the options that decide which samples a unit number means."""
    segments: tuple[int, ...]
    """Numbers of units at which a refresh has added units to the listing, ascending."""
    vanished: npt.NDArray[np.int64]
    """int64: units that a refresh of the listing no longer found, ascending. They are not fetched."""

    def order(
        self,
        *,
        seed: int,
        pass_number: int,
        segments: Sequence[int] = (),
        sequential: bool = False,
        part: int = 0,
        cut: int = 1,
    ) -> PartOrder:
        """Return the order in which a pass draws one part of the source. The result is cached, so repeated calls are
        cheap.

        Args:
            seed: The seed of the permutation.
            pass_number: The number of the pass, counted from 0. Each pass has a permutation of its own.
            segments: Numbers of units that begin a segment. Each segment is permuted by itself, one after another.
                Default: the source is one segment.
            sequential: Keep the order of the listing instead of a permutation. Default: False.
            part: Which of the ``cut`` parts to draw, counted from 0. Default: 0.
            cut: The number of parts that the source's order is divided into. Default: 1, the complete source.

        Returns:
            The order, which maps positions of the part to the numbers of draws.
        """
        ...

    def probe(self, units: npt.NDArray[np.int64], *, skip_bad: bool = False) -> Probe:
        """Return what the samples of these units have in common.

        Args:
            units: int64 (n,), the numbers of the units to look at. A source may stop after the first few.
            skip_bad: Leave out objects that cannot be read, instead of raising. Default: False.

        Returns:
            The schema, the mean size of a sample in bytes, and the names of data that is in no sample.

        Raises:
            BadObject: An object cannot be read, or the fields of two keys differ. The error names the object.
            UsageError: A field that the options ask for is in none of the samples.
        """
        ...

    def read(
        self,
        units: npt.NDArray[np.int64],
        *,
        schema: Schema,
        skip_bad: bool = False,
        block_bytes: int = BLOCK_BYTES,
        hurry: Hurry = unhurried,
    ) -> Reading:
        """Fetch ``units`` with many requests in flight and return their samples in that order.

        All samples of one draw are in one block. The first requests are made at once. A second reading may be
        started while the first one is still iterated, and is iterated after the first.

        Args:
            units: int64 (n,), the numbers of the units to read.
            schema: The fields of the samples, from :meth:`probe`.
            skip_bad: Skip a unit that cannot be read or does not fit ``schema``, instead of raising. Default: False.
            block_bytes: About how many bytes a block has. Default: ``BLOCK_BYTES``.
            hurry: Returns in how many seconds the caller needs samples. When no time is left the source returns what is
                ready, even a result without samples. Default: never.

        Returns:
            An iterator over the results. Close it to cancel requests.

        Raises:
            BadObject: A unit cannot be read or does not fit ``schema``, and ``skip_bad`` is False. The error names the
                object. The samples before that unit are returned first.
            SourceError: The store fails as a whole, also with ``skip_bad``.
            Interrupted: The process was told to stop. The samples that are ready are returned first.
        """
        ...

    def close(self) -> None:
        """Close connections and files. May be called twice."""
        ...
