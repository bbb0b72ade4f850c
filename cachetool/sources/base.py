"""What a source is: samples read out of a store, numbered by units.

A unit is what one fetch brings out: the objects of one key, a row of an array, a chunk, a row group, a whole archive.
What is fetched together is drawn together: :meth:`Source.order` permutes units, then the samples inside each, and the
caller hands numbers of draws in that order to :meth:`Source.read`. A draw is one sample; of a whole archive, whose
number of samples nobody knows before it is fetched, it is the archive with all of them.
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
"""In how many seconds somebody wants what there is by then; None: it may be gathered into blocks."""


def unhurried() -> float | None:
    """Nobody waits."""
    return None


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
class ReadResult:
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
    gaps: npt.NDArray[np.int64] | None = None
    """Of the last piece before an error: positions below ``done`` that are not finished. None: there are none."""


class Reading:
    """Pieces that arrive; an iterator over them, whose requests were begun when it was made."""

    def __init__(self, fetching: Fetching[Any, Any], pieces: Generator[ReadResult]) -> None:
        self._fetching, self._pieces = fetching, pieces

    @property
    def begun(self) -> bool:
        """Whether all of it has been asked for: what is read next can be asked for behind it."""
        return self._fetching.begun

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReadResult:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel what is in flight. May be called twice."""
        self._pieces.close()
        self._fetching.close()


@dataclass(frozen=True, slots=True)
class Probe:
    """What a few samples tell of all."""

    schema: Schema
    mean_bytes: int
    """Mean bytes of the values of a sample, rounded up."""
    per_unit: int = 1
    """About how many samples a draw brings: 1, but of whole archives."""
    left_out: tuple[tuple[str, str], ...] = ()
    """What is in no sample although nobody said so: name of an object, or of an array or value of a file, and why."""
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    """How many objects are in no sample, by reason: all, those without a name in :attr:`left_out` too."""


class Source(Protocol):
    """Samples of one place, numbered. Used in one plain child process, by one thread; never in a forked child."""

    url: str
    """Where it is, without user info and query."""
    units: int
    """Number of draws in a pass."""
    samples: int
    """Number of samples, as far as the listing tells."""
    identity: str
    """Hexadecimal digest of the listing and of the options that decide what a unit number means."""
    segments: tuple[int, ...]
    """Numbers of units at which the listing has grown."""
    vanished: npt.NDArray[np.int64]
    """Units that a refresh of the listing did not find any more, ascending: they are not asked for."""

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
        """The order in which a pass draws a part; kept, so that it may be asked for often."""
        ...

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
        hurry: Hurry = unhurried,
    ) -> Reading:
        """Fetch ``units`` with many requests in flight, and give their samples in that order, in blocks of about
        ``block_bytes``; all samples of one draw in one block. The first requests are made at once; a second reading may
        be begun behind one that still goes on, and is iterated after it.

        A unit that cannot be read or does not fit ``schema`` raises :class:`BadObject` naming the object, or is
        skipped with ``skip_bad``. A store that fails as a whole raises its own error in either case. Before an error,
        and before :class:`Interrupted`, the samples in front of it are given.

        When no time is left by ``hurry``, what there is comes at once, even in a piece of no samples.
        """
        ...

    def close(self) -> None:
        """Let go of connections and files. May be called twice."""
        ...
