"""The plan of ``convert`` in place: which shards give way to which, whose samples are whose, and the room for that.

Plans are pure, rows in, plans out; :mod:`cachetool.conversion.in_place` carries them out. :func:`way_out` alone looks
into the catalog, for the commands that make room.

::

    before a swap   used + what the swaps before it may have grown by + all that its new shards may take  <=  cap
    after it        its old shards are gone

The bounds are those that will be reserved. Shards may end smaller: what is named here always suffices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.cache import CacheDir, Origin
from cachetool.cache.admission import asked
from cachetool.cache.layout import cache_option
from cachetool.cache.policies import choose
from cachetool.cache.removal import candidates, leaseholders
from cachetool.cache.usage import measure
from cachetool.core.ranges import between, joined, total

__all__ = ["Piece", "Swap", "cuts", "groups", "is_exact", "origin_of", "room_for", "way_out"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard, as far as the plan cares."""

    id: str
    samples: int
    payload: int
    origin: tuple[Any, ...]
    """Source, part and pass: only shards of one origin become one."""
    exact: bool
    """Whether it is known which sample is which draw: not where draws were skipped."""
    done: bool
    """Whether it is in the format that is asked for."""


def groups(pieces: Sequence[Piece], most: int | None) -> list[list[str]]:
    """Which shards are replaced together, in the order of commits, so that shards have at most ``most`` bytes of values
    (None: each stays as large as it is).

    Only shards below half of that are merged: those that come of it, and those of a cut, are larger or alone.
    """
    merged: list[list[Piece]] = []
    for piece in pieces:
        last = merged[-1] if merged else []
        if (
            most is not None
            and last
            and all(2 * other.payload < most and other.origin == piece.origin for other in (*last, piece))
            and sum(other.payload for other in last) + piece.payload <= most
        ):
            last.append(piece)
        else:
            merged.append([piece])
    return [
        [piece.id for piece in group]
        for group in merged
        if len(group) > 1 or not group[0].done or (most is not None and _can_be_cut(group[0], most))
    ]


def _can_be_cut(piece: Piece, most: int) -> bool:
    return piece.payload > most and piece.samples > 1 and piece.exact


def cuts(upto: npt.NDArray[np.int64], most: int) -> list[int]:
    """Where samples are cut into as few parts of at most ``most`` bytes as can be, alike in size where samples are.

    ``upto`` are the bytes of all samples before each, from 0 on; the result runs from 0 to the number of samples. A
    sample of more than ``most`` bytes is a part alone.
    """
    samples, total = len(upto) - 1, int(upto[-1])
    count = -(-total // most)
    at = [int(np.searchsorted(upto, total * number // count)) for number in range(count)] + [samples]
    if (np.diff(upto[at]) <= most).all() and (np.diff(at) >= 1).all():
        return at
    at = [0]
    while at[-1] < samples:  # very uneven samples: as many as fit
        fit = int(np.searchsorted(upto, upto[at[-1]] + most, side="right")) - 1
        at.append(min(max(fit, at[-1] + 1), samples))
    return at


def is_exact(origin: Origin, samples: int) -> bool:
    """Whether it is known which sample is which draw: not where draws were skipped."""
    return not origin.draws or total(origin.draws) == samples


def origin_of(origins: Mapping[str, Origin], ids: Sequence[str], start: int, stop: int, samples: int) -> Origin:
    """Where samples ``start`` to ``stop`` of a group come from; the draws in the order of their samples."""
    first = origins[ids[0]]
    draws = [part for id in ids for part in origins[id].draws]
    if (start, stop) != (0, samples):  # else it may have more draws than samples
        draws = [*between(draws, start, stop)]
    return Origin(first.source, first.url, first.pass_number, joined(draws), first.part)


@dataclass(frozen=True, slots=True)
class Swap:
    """Shards that give way to others."""

    old: int
    """Bytes that they take."""
    new: int
    """Bytes that the others are reserved."""


def room_for(swaps: Sequence[Swap]) -> int:
    """Bytes that must be free for these swaps, one after another in any order."""
    growth = sum(max(0, swap.new - swap.old) for swap in swaps)
    return growth + max((min(swap.old, swap.new) for swap in swaps), default=0)


def way_out(cache: CacheDir, foreseen: Callable[[Collection[str]], list[Swap]]) -> str:
    """What to do about a conversion that found no room. ``foreseen`` tells the swaps that are left when some shards are
    gone."""
    with cache.catalog.read() as connection:
        used, slack = measure(connection, cache.layout).total, asked(connection, cache.layout, 0)
        going = connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
        ).fetchone()[0]
        victims = choose(candidates(connection), excess=used, policy="oldest")
        readers = leaseholders(connection)
    freed = list(accumulate((victim.bytes for victim in victims), initial=int(going)))

    def fits(count: int) -> bool:
        """Whether all goes through once the oldest ``count`` shards are gone."""
        swaps = foreseen({victim.id for victim in victims[:count]})
        return used - freed[count] + room_for(swaps) + slack <= cache.max_size

    ways = [f"raise the cap with --max-size {used + room_for(foreseen(())) + slack}"]
    count = bisect_left(range(len(victims) + 1), True, key=fits)
    if 0 < count <= len(victims) and foreseen({victim.id for victim in victims[:count]}):
        ways.append(f"make room with: cachetool evict --max-size {used - freed[count]}{cache_option(cache.root)}")
    elif count == 0:
        ways = ["run it again"]
    if readers:
        ways.append("give the readers longer with --wait")
    return ", or ".join(ways)
