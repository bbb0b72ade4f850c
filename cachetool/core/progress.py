"""What long work tells whoever waits for it: one frozen value at a time, handed to a callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Progress", "Report", "silent"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a piece of work stands."""

    phase: str
    """``list``, ``fetch``, ``schema``, ``pull``, ``convert`` or ``verify``."""
    done: int
    """Objects listed, bytes fetched, or samples."""
    total: int | None = None
    """Of how many; None when unknown."""
    bytes: int = 0
    """Moved so far in this phase."""
    note: str = ""
    """A few more words."""
    flying: int = 0
    """Requests in flight."""
    retries: int = 0
    """Requests that were sent again, by the clients of HTTP, Hugging Face and SFTP. Those of S3, Google Cloud and Azure
    are not counted: obstore sends again by itself and tells nobody."""
    used: int = 0
    """Bytes charged against the cap of the cache, as last looked at."""
    cap: int = 0
    """0 where no cache is filled."""
    evicted: int = 0
    """Shards that went to make room for this work."""
    shards: int = 0
    """Committed by this work."""


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The report that tells nobody."""
