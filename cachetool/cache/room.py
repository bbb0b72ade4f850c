"""How room may be made for a writer: a value that travels from the command line to admission and renewal."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Room"]


@dataclass(frozen=True, slots=True)
class Room:
    """How room may be made for a writer."""

    evict: bool = False
    """Whether older shards may go."""
    policy: str = "oldest"
    min_epochs: int = 0
    job: str | None = None
    """The pull that writes."""
    keep_own: bool = False
    """Whether the shards of this very pull must stay. When the cache is full it says itself what to do then: evicting
    what it has would be for nothing."""
    keep: tuple[str, ...] = ()
    """Shards that stay in any case."""
    wait: float = 60.0
    """Seconds to wait for others."""
    advise: bool = True
    """Whether an error says what to do; else its receiver does, who knows how much is still to come."""
    renew: float = 0.1
    """Share of the cap that snapshots free for the pull at each epoch, once it wants room."""
