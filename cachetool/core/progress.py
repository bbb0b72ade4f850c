"""Progress of long work: one frozen value at a time, passed to a callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Progress", "Report", "silent"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a pull, a conversion or a check, as handed to ``progress=``."""

    phase: str
    """Name of the phase: ``list``, ``fetch``, ``schema``, ``pull``, ``convert`` or ``verify``."""
    done: int
    """Number of objects listed, of bytes fetched, or of samples."""
    total: int | None = None
    """The number at the end; None when unknown."""
    bytes: int = 0
    """Bytes moved so far in this phase."""
    note: str = ""
    """More words for the user."""
    flying: int = 0
    """Number of requests in flight."""
    retries: int = 0
    """Number of requests that were sent again by the clients for HTTP, Hugging Face and SFTP. Retries of S3, Google
    Cloud and Azure are not counted, because obstore retries by itself and does not report it."""
    used: int = 0
    """Bytes that count against the cap, as last measured."""
    cap: int = 0
    """The cap in bytes; 0 where no cache is filled."""
    evicted: int = 0
    """Number of shards evicted for this work."""
    shards: int = 0
    """Number of shards that this work committed."""


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Ignore the progress."""
