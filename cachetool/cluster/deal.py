"""Deal: the division of the parts of a source among the caches of several nodes, as a function of what these hold.

No process keeps a map. A later driver looks at the caches and finds the same division, or what became of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Held", "deal"]


@dataclass(frozen=True, slots=True)
class Held:
    """The parts of a source that the cache of a node holds."""

    cap: int
    """The cap of the cache in bytes."""
    parts: Mapping[int, int] = field(default_factory=dict)
    """The parts that the cache draws, with the number of samples that it has of each."""
    idle: frozenset[int] = frozenset()
    """Parts that the cache holds but has not begun to draw."""
    is_full: bool = False
    """True when the cache has no space for more samples."""


def deal(cut: int, caches: Mapping[str, Held], *, most: int) -> dict[str, set[int]]:
    """Give each of ``cut`` parts to one cache, at most ``most`` parts to each cache. Caches are named by their nodes.

    A part stays where most of its samples are; on a tie, in the cache with the fewest parts for its cap. A full cache
    gives up parts that it has not begun. Parts that no cache holds go one after another to the cache with the fewest
    parts for its cap. Then a cache that keeps no part takes parts from the others, until no other has more for its cap:
    first those that it also holds, then those with the fewest samples. Parts for which no cache has a place are left
    out.
    """
    # If all caches are full, no cache could take a part that a full one gives up.
    is_room = not all(held.is_full for held in caches.values())
    # By name, so that every driver deals in the same order and ties end in the same way.
    dealt: dict[str, set[int]] = {name: set() for name in sorted(caches)}
    most_samples: dict[int, int] = {}
    owners: dict[int, list[str]] = {}
    for name in dealt:
        held = caches[name]
        for part, samples in held.parts.items():
            if is_room and held.is_full and part in held.idle:
                continue
            if samples >= most_samples.get(part, 0):
                same = owners.get(part, []) if samples == most_samples.get(part) else []
                most_samples[part], owners[part] = samples, [*same, name]

    def load(name: str, more: int = 0) -> tuple[float, str]:
        # The name ends each tie, so that two drivers with the same view deal the same.
        return (len(dealt[name]) + more) / caches[name].cap, name

    # Parts with one owner first: they cannot move, and their number decides where the disputed ones
    # go.
    for part, names in sorted(owners.items(), key=lambda owned: (len(owned[1]), owned[0])):
        dealt[min(names, key=lambda name: load(name, 1))].add(part)
    # A heap, because a large cut has thousands of parts and each would otherwise look at every
    # node.
    places = [load(name, 1) for name in dealt if not (is_room and caches[name].is_full)]
    heapq.heapify(places)
    for part in sorted(set(range(cut)) - owners.keys()):
        while places and len(dealt[places[0][1]]) >= most:
            heapq.heappop(places)
        if places:
            name = places[0][1]
            dealt[name].add(part)
            heapq.heapreplace(places, load(name, 1))
    # A new node would otherwise idle for the rest of a pass, because all parts are begun early. It
    # takes parts with samples, which are drawn again.
    new = [name for name in dealt if dealt[name].isdisjoint(owners) and not caches[name].is_full]
    old = [name for name in dealt if name not in new]
    while new and old:
        taker = min(new, key=lambda name: load(name, 1))
        giver = max(old, key=load)
        if load(taker, 1)[0] >= load(giver)[0] or len(dealt[taker]) >= most:
            break
        wanted = caches[taker].parts
        # The part that costs least to draw again; on a tie the one with the highest number.
        part = min(dealt[giver], key=lambda part: (part not in wanted, most_samples.get(part, 0), -part))
        dealt[giver].remove(part)
        dealt[taker].add(part)
    return dealt
