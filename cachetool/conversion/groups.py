"""The plan of ``convert`` in place: groups of old shards, the new shards that replace each group, and the space for
them.
The functions are pure: rows in, plans out. :mod:`cachetool.conversion.in_place` carries the plans out. Only
:func:`way_out` reads the catalog, to name the commands that make space. A *swap* replaces the old shards of one group
by new ones.

::

    before a swap   used + growth by earlier swaps + upper bounds of its new shards  <=  cap
    after it        its old shards are deleted

The bounds are those that will be reserved. Shards may end smaller, so the space named here always suffices.
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
    """A shard, reduced to the facts that the plan needs."""

    id: str
    samples: int
    payload: int
    origin: tuple[Any, ...]
    """Source, part and pass. Only shards of one origin are merged."""
    exact: bool
    """True if it is known which sample is which draw. It is not known where draws were skipped."""
    done: bool
    """True if the shard is in the requested format already."""


def groups(pieces: Sequence[Piece], most: int | None) -> list[list[str]]:
    """Return the groups of shards that are replaced together, in the order of commits.

    The new shards have at most ``most`` bytes of values (None: each shard keeps its size). Only shards below half of
    ``most`` are merged. So merged shards, and the pieces of a cut, are not merged again by a second run.
    """
    merged: list[list[Piece]] = []
    for piece in pieces:
        last = merged[-1] if merged else []
        if (
            most is not None
            and last
            # Half of ``most`` is the limit, so that a second run of the same command finds nothing to do: a merged
            # shard is above it, or alone.
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
    """Return True if a shard is larger than ``most`` bytes of values and can be divided."""
    # A shard whose pull skipped draws cannot be cut: nobody knows which draw each sample is, so the draws could not be
    # divided.
    return piece.payload > most and piece.samples > 1 and piece.exact


def cuts(upto: npt.NDArray[np.int64], most: int) -> list[int]:
    """Return where to cut samples into as few parts of at most ``most`` bytes as possible.

    ``upto`` has the bytes of all samples before each sample, from 0 on, int64 (samples + 1,). The result runs from 0 to
    the number of samples. Parts are alike in size where samples are. A sample of more than ``most`` bytes is a part
    alone.
    """
    samples, total = len(upto) - 1, int(upto[-1])
    count = -(-total // most)
    # Equal shares first: each part is then above half of ``most``, and a second run of the command does not merge any
    # of them.
    at = [int(np.searchsorted(upto, total * number // count)) for number in range(count)] + [samples]
    if (np.diff(upto[at]) <= most).all() and (np.diff(at) >= 1).all():
        return at
    at = [0]
    # Very uneven samples: fill each part with as many samples as fit, but at least one, or the loop would not end.
    while at[-1] < samples:
        fit = int(np.searchsorted(upto, upto[at[-1]] + most, side="right")) - 1
        at.append(min(max(fit, at[-1] + 1), samples))
    return at


def is_exact(origin: Origin, samples: int) -> bool:
    """Return True if it is known which sample is which draw. It is not known where draws were skipped."""
    return not origin.draws or total(origin.draws) == samples


def origin_of(origins: Mapping[str, Origin], ids: Sequence[str], start: int, stop: int, samples: int) -> Origin:
    """Return the origin of samples ``start`` to ``stop - 1`` of a group. Draws are in the order of their samples."""
    first = origins[ids[0]]
    draws = [part for id in ids for part in origins[id].draws]
    # The whole group keeps its list as it is, because it may have more draws than samples.
    if (start, stop) != (0, samples):
        draws = [*between(draws, start, stop)]
    return Origin(first.source, first.url, first.pass_number, joined(draws), first.part)


@dataclass(frozen=True, slots=True)
class Swap:
    """The bytes of one group: old shards that are replaced by new ones."""

    old: int
    """Bytes that the old shards take."""
    new: int
    """Bytes that are reserved for the new shards."""


def room_for(swaps: Sequence[Swap]) -> int:
    """Return the bytes that must be free for these swaps, one after another in any order."""
    # The worst order: every swap that grows comes first, and the largest overlap of old and new shards at last.
    growth = sum(max(0, swap.new - swap.old) for swap in swaps)
    return growth + max((min(swap.old, swap.new) for swap in swaps), default=0)


def way_out(cache: CacheDir, foreseen: Callable[[Collection[str]], list[Swap]]) -> str:
    """Return the advice for a conversion that lacked space.

    ``foreseen`` returns the swaps that remain when the given shards are gone.
    """
    with cache.catalog.read() as connection:
        used, slack = measure(connection, cache.layout).total, asked(connection, cache.layout, 0)
        going = connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM shards WHERE state IN ('retiring', 'trash')"
        ).fetchone()[0]
        victims = choose(candidates(connection), excess=used, policy="oldest")
        readers = leaseholders(connection)
    freed = list(accumulate((victim.bytes for victim in victims), initial=int(going)))

    def fits(count: int) -> bool:
        """Return True if all swaps fit once the oldest ``count`` shards are gone."""
        swaps = foreseen({victim.id for victim in victims[:count]})
        return used - freed[count] + room_for(swaps) + slack <= cache.max_size

    ways = [f"raise the cap with --max-size {used + room_for(foreseen(())) + slack}"]
    # Bisection, because each look sums the swaps of the whole cache, and a cache may have 20,000 shards. More evictions
    # never make it fit worse.
    count = bisect_left(range(len(victims) + 1), True, key=fits)
    if 0 < count <= len(victims) and foreseen({victim.id for victim in victims[:count]}):
        ways.append(f"free space with: cachetool evict --max-size {used - freed[count]}{cache_option(cache.root)}")
    # It fits now: others freed space since the conversion was refused.
    elif count == 0:
        ways = ["run the command again"]
    if readers:
        ways.append("wait longer for the readers with --wait")
    return ", or ".join(ways)
