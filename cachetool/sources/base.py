"""What a source is: samples read out of a store, numbered by units.

A unit is what one fetch brings out: for a folder of objects, the objects of one key, which are one sample. What is
fetched together is drawn together: the caller permutes unit numbers and hands them to :meth:`Source.read`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachetool.block import BLOCK_BYTES, Block
from cachetool.schema import Schema

__all__ = ["Piece", "Probe", "Skipped", "Source"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A unit that was left out, and why."""

    draw: int
    """Position in the array of units that was asked for."""
    key: str
    """Where it lies."""
    reason: str
    """One line."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some samples of a read, in the order asked for."""

    block: Block
    """The samples; may be empty when all units of this piece were skipped."""
    draws: npt.NDArray[np.int64]
    """For each sample of the block the position of its unit in the array asked for, never decreasing."""
    done: int
    """All positions below this one are finished: their samples were handed out, or they were skipped."""
    skipped: tuple[Skipped, ...] = ()
    """Units of this piece that were left out."""
    fetched: int = 0
    """Bytes that came over the wire for this piece."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a few samples tell of all."""

    schema: Schema
    mean_bytes: int
    """Mean bytes of the values of a sample, rounded up."""


class Source(Protocol):
    """Samples of one place, numbered. Used in one plain child process, by one thread; never in a forked child."""

    url: str
    """Where it is, without user info and query."""
    units: int
    """Number of units in the listing."""
    samples: int
    """Number of samples in the listing."""
    identity: str
    """Hexadecimal digest of the listing and of the options that decide what a unit number means."""

    def probe(self, units: npt.NDArray[np.int64], *, skip_bad: bool = False) -> Probe:
        """What the samples of these units have in common.

        Raises :class:`BadObject` naming an object that cannot be read (left out with ``skip_bad``), or two keys whose
        fields differ; :class:`UsageError` when a field that was asked for is in none of them.
        """
        ...

    def read(
        self,
        units: npt.NDArray[np.int64],
        *,
        schema: Schema,
        skip_bad: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[Piece]:
        """Fetch ``units`` with many requests in flight, and give their samples in that order, in blocks of about
        ``block_bytes``. Closing the iterator cancels what is in flight.

        A unit that cannot be read or does not fit ``schema`` raises :class:`BadObject` naming the object, or is
        skipped with ``skip_bad``. A store that fails as a whole raises its own error in either case.
        """
        ...

    def close(self) -> None:
        """Let go of connections and files. May be called twice."""
        ...
