"""Eviction policies: in which order shards are given up, and how room may be made for a writer.

The policies are pure functions over rows, and the plan is made from them.

How room may be made is a value that travels from the command line to admission and renewal.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cachetool.core.errors import UsageError
from cachetool.core.text import shown
from cachetool.core.units import format_size, is_one_of

__all__ = [
    "Candidate",
    "POLICIES",
    "Room",
    "Victim",
    "check_policy",
    "choose",
    "policy_names",
    "protected",
    "shards_of",
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready shard, as far as eviction cares."""

    id: str
    dataset: str
    samples: int
    bytes: int
    seq: float
    """Place in the order of commits; a fraction for a part of what was one shard."""
    epochs: int
    """How many epochs it served."""
    used: float
    """When it last served one (seconds since 1970), or was committed."""
    job: str | None = None
    """The pull that wrote it."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A shard chosen to go."""

    id: str
    dataset: str
    samples: int
    bytes: int
    reason: str
    """Why this one: the policy and the value it went by."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "id": self.id,
            "dataset": self.dataset,
            "samples": self.samples,
            "bytes": self.bytes,
            "reason": self.reason,
        }


def _random(row: Candidate) -> tuple[str, float]:
    return hashlib.sha256(row.id.encode()).hexdigest(), row.seq


POLICIES: dict[str, Callable[[Candidate], tuple[Any, ...]]] = {
    "oldest": lambda row: (row.seq,),
    "most-used": lambda row: (-row.epochs, row.seq),
    "lru": lambda row: (row.used, row.seq),
    "random": _random,
}
"""Name to sort key; the smallest key goes first."""


def _value(row: Candidate, policy: str) -> str:
    """The value of a shard by which the policy chose it, in words."""
    if policy == "lru":
        return f"last used {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row.used))}"
    return {"most-used": f"served {row.epochs} epochs", "random": "random order"}.get(policy, f"commit {row.seq:g}")


def policy_names() -> tuple[str, ...]:
    """The names that ``--policy`` takes."""
    return tuple(POLICIES)


def check_policy(policy: str) -> None:
    """Raise :class:`UsageError` for a name that is none."""
    if not is_one_of(policy, POLICIES):
        raise UsageError(f"unknown eviction policy {shown(policy)}; there are {', '.join(POLICIES)}")


def _kept(row: Candidate, min_epochs: int, dataset: str | None, keep_job: str | None) -> str | None:
    """Why a shard is protected; None when it may go."""
    if dataset is not None and row.dataset != dataset:
        return "of other datasets"
    if row.epochs < min_epochs:
        return f"which fewer than {min_epochs} epochs used (--min-epochs)"
    if keep_job is not None and row.job == keep_job:
        return "of this very pull"
    return None


def protected(
    rows: Iterable[Candidate], *, min_epochs: int = 0, dataset: str | None = None, keep_job: str | None = None
) -> list[str]:
    """What of ``rows`` :func:`choose` never takes, in words: ``2 shards (1.5 GB) of other datasets``."""
    sizes_by_reason: dict[str, list[int]] = {}
    for row in rows:
        why = _kept(row, min_epochs, dataset, keep_job)
        if why is not None:
            sizes_by_reason.setdefault(why, []).append(row.bytes)
    return [f"{shards_of(sizes)} {why}" for why, sizes in sizes_by_reason.items()]


def shards_of(sizes: Sequence[int]) -> str:
    """``1 shard (40.9 kB)``, ``2 shards (1.5 GB)``."""
    return f"{len(sizes)} shard{'' if len(sizes) == 1 else 's'} ({format_size(sum(sizes))})"


def choose(
    rows: Iterable[Candidate],
    *,
    excess: int,
    policy: str = "oldest",
    min_epochs: int = 0,
    dataset: str | None = None,
    keep_job: str | None = None,
) -> Sequence[Victim]:
    """Victims in order until their bytes reach ``excess``; fewer when the rest is protected.

    Protected: shards that served fewer than ``min_epochs`` epochs, of other datasets than ``dataset`` when one is
    named, and of the pull ``keep_job``. Raises :class:`UsageError` for an unknown policy.
    """
    check_policy(policy)
    free = [row for row in rows if _kept(row, min_epochs, dataset, keep_job) is None]
    victims: list[Victim] = []
    for row in sorted(free, key=POLICIES[policy]):
        if excess <= 0:
            break
        excess -= row.bytes
        victims.append(Victim(row.id, row.dataset, row.samples, row.bytes, f"{policy}: {_value(row, policy)}"))
    return victims


@dataclass(frozen=True, slots=True)
class Room:
    """How room may be made for a writer."""

    evict: bool = False
    """Whether older shards may go."""
    policy: str = "oldest"
    min_epochs: int = 0
    job: str | None = None
    """The pull that writes."""
    trainer: str | None = None
    """Holder of the program that the pull is a part of. Nothing goes any more once that program has died: it may be
    resumed, and its leases died too."""
    keep_own: bool = False
    """Whether the shards of this very pull must stay. When the cache is full it says itself what to do then: evicting
    what it has would be for nothing."""
    wait: float = 60.0
    """Seconds to wait for others."""
    advise: bool = True
    """Whether an error says what to do; else its receiver does, who knows how much is still to come."""
    renew: float = 0.1
    """Share of the cap that snapshots free for the pull at each epoch, once it wants room."""
