"""Eviction policies: the order in which shards are evicted, and how room may be made for a writer.

The policies are pure functions over rows; a plan is made from them. :class:`Room` is a value that travels from the
command line to admission and renewal.
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
    """A ready shard, with the values that eviction needs."""

    id: str
    dataset: str
    samples: int
    bytes: int
    seq: float
    """Place in the order of commits; a fraction for a shard that was cut from another one."""
    epochs: int
    """Number of epochs that it served."""
    used: float
    """Time when it last served an epoch, or else was committed (seconds since 1970)."""
    job: str | None = None
    """The pull that wrote it."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A shard that an eviction chose."""

    id: str
    """Id of the shard."""
    dataset: str
    """Its dataset."""
    samples: int
    """Number of its samples."""
    bytes: int
    """Its bytes on disk."""
    reason: str
    """Why this shard was chosen: the policy and the value that it compared."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "id": self.id,
            "dataset": self.dataset,
            "samples": self.samples,
            "bytes": self.bytes,
            "reason": self.reason,
        }


def _random(row: Candidate) -> tuple[str, float]:
    # A hash of the id instead of a random number: the order is the same in each process and each
    # dry run.
    return hashlib.sha256(row.id.encode()).hexdigest(), row.seq


POLICIES: dict[str, Callable[[Candidate], tuple[Any, ...]]] = {
    # Each key ends with `seq`, so that equal shards have a fixed order, oldest first.
    "oldest": lambda row: (row.seq,),
    "most-used": lambda row: (-row.epochs, row.seq),
    "lru": lambda row: (row.used, row.seq),
    "random": _random,
}
"""Name of a policy -> sort key; the shard with the smallest key is evicted first."""


def _value(row: Candidate, policy: str) -> str:
    """Return the value by which the policy chose a shard, in words."""
    if policy == "lru":
        return f"last used {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row.used))}"
    return {"most-used": f"served {row.epochs} epochs", "random": "random order"}.get(policy, f"commit {row.seq:g}")


def policy_names() -> tuple[str, ...]:
    """Return the names that ``--policy`` takes.

    Returns:
        The names: ``oldest``, ``most-used``, ``lru``, ``random``.

    Example:
        assert "lru" in policy_names()
    """
    return tuple(POLICIES)


def check_policy(policy: str) -> None:
    """Raise :class:`UsageError` for the name of a policy that does not exist."""
    if not is_one_of(policy, POLICIES):
        raise UsageError(f"unknown eviction policy {shown(policy)}; choose one of {', '.join(POLICIES)}")


def _kept(row: Candidate, min_epochs: int, dataset: str | None, keep_job: str | None) -> str | None:
    """Return why a shard is protected, or None when it may be evicted."""
    if dataset is not None and row.dataset != dataset:
        return "of other datasets"
    if row.epochs < min_epochs:
        return f"used by fewer than {min_epochs} epochs (--min-epochs)"
    if keep_job is not None and row.job == keep_job:
        return "of this pull"
    return None


def protected(
    rows: Iterable[Candidate], *, min_epochs: int = 0, dataset: str | None = None, keep_job: str | None = None
) -> list[str]:
    """Return the shards of ``rows`` that :func:`choose` never takes, in words: ``2 shards (1.5 GB) of other
    datasets``."""
    sizes_by_reason: dict[str, list[int]] = {}
    for row in rows:
        why = _kept(row, min_epochs, dataset, keep_job)
        if why is not None:
            sizes_by_reason.setdefault(why, []).append(row.bytes)
    return [f"{shards_of(sizes)} {why}" for why, sizes in sizes_by_reason.items()]


def shards_of(sizes: Sequence[int]) -> str:
    """Return the number and size of shards in words: ``1 shard (40.9 kB)``, ``2 shards (1.5 GB)``."""
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
    """Return victims in the order of the policy until their bytes reach ``excess``; fewer when the other shards are
    protected.

    Protected are shards that served fewer than ``min_epochs`` epochs, shards of other datasets than ``dataset`` when
    one is named, and shards of the pull ``keep_job``. Raises :class:`UsageError` for an unknown policy.
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
    """The ways in which room may be made for a writer.

    Example:
        room = Room(evict=True, policy="lru", wait=10.0)
    """

    evict: bool = False
    """True if older shards may be evicted. Default False."""
    policy: str = "oldest"
    """Name of the eviction policy. Default ``oldest``."""
    min_epochs: int = 0
    """Shards that served fewer epochs are not evicted. Default 0."""
    job: str | None = None
    """Id of the pull that writes."""
    trainer: str | None = None
    """Holder of the training program to which the pull belongs. Nothing is evicted after that program has died: it may
    be resumed, and its leases have ended."""
    keep_own: bool = False
    """True if the shards of this pull must stay. The pull itself then says what to do when the cache is full, because
    evicting its own shards would be useless."""
    wait: float = 60.0
    """Seconds to wait for readers and other writers; infinity for ``--follow``. Default 60."""
    advise: bool = True
    """True if an error says what to do. False if the receiver of the error does, who knows how many samples are still
    to come."""
    renew: float = 0.1
    """Share of the cap that snapshots free for the pull at each epoch, once the pull wants room. Default 0.1."""
