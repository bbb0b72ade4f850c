"""Division of the parts of a source among the caches of several nodes, as a function of what these hold.

Nobody keeps a map: whoever comes later looks at the caches and finds the same division, or what became of it.
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
    """Bytes."""
    parts: Mapping[int, int] = field(default_factory=dict)
    """The parts that it draws, with the samples that it has of each."""
    idle: frozenset[int] = frozenset()
    """Those of them that it has not begun to draw."""
    is_full: bool = False
    """True when it has no room for more samples."""


def deal(cut: int, caches: Mapping[str, Held], *, most: int) -> dict[str, set[int]]:
    """Give each of ``cut`` parts to one cache, at most ``most`` of them to each; caches by the names of their nodes.

    A part stays where most samples of it are; where these are equal, in the cache that has fewest parts for its cap. A
    full cache gives up parts that it has not begun. Parts of nobody go one after another to the cache that has fewest
    for its cap. Then a cache that keeps none takes parts from the others until none of them has more for its cap: those
    that it has too, then those with the fewest samples. Parts for which no cache has a place are left out.
    """
    is_room = not all(held.is_full for held in caches.values())
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
        return (len(dealt[name]) + more) / caches[name].cap, name

    for part, names in sorted(owners.items(), key=lambda owned: (len(owned[1]), owned[0])):
        dealt[min(names, key=lambda name: load(name, 1))].add(part)
    places = [load(name, 1) for name in dealt if not (is_room and caches[name].is_full)]
    heapq.heapify(places)
    for part in sorted(set(range(cut)) - owners.keys()):
        while places and len(dealt[places[0][1]]) >= most:
            heapq.heappop(places)
        if places:
            name = places[0][1]
            dealt[name].add(part)
            heapq.heapreplace(places, load(name, 1))
    new = [name for name in dealt if dealt[name].isdisjoint(owners) and not caches[name].is_full]
    old = [name for name in dealt if name not in new]
    while new and old:
        taker = min(new, key=lambda name: load(name, 1))
        giver = max(old, key=load)
        if load(taker, 1)[0] >= load(giver)[0] or len(dealt[taker]) >= most:
            break
        wanted = caches[taker].parts
        part = min(dealt[giver], key=lambda part: (part not in wanted, most_samples.get(part, 0), -part))
        dealt[giver].remove(part)
        dealt[taker].add(part)
    return dealt
