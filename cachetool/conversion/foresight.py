"""How much room a conversion in place still needs to its end, and the commands that make it.

::

    before a swap   used + what the swaps before it may have grown by + all that its new shards may take  <=  cap
    after it        its old shards are gone

The bounds are those that will be reserved. Shards may end smaller: what is named here always suffices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cachetool.cache import CacheDir
from cachetool.cache.admission import asked
from cachetool.cache.layout import cache_option
from cachetool.cache.policies import choose
from cachetool.cache.removal import candidates, leaseholders
from cachetool.cache.usage import measure

__all__ = ["Swap", "room_for", "way_out"]


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
