"""The share of the cap that a dataset may take, for caches with several datasets.

A dataset with a share never takes more than its share, and only writers of its own evict its shards. The datasets
without one divide what all shares leave, also while a dataset has not filled its share, and evict each other's shards.
Shares together are at most the whole cap::

    cap  | sim: 60 %                 | obs: 30 %     | others, listings, catalog |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachetool.cache.catalog import Connection
from cachetool.cache.policies import Candidate
from cachetool.core.errors import UsageError

__all__ = ["Portion", "divided", "kept_free", "portions", "set_share"]


@dataclass(frozen=True, slots=True)
class Portion:
    """The bytes that a dataset may take of the cap, and those that it takes."""

    dataset: str
    limit: int
    """Bytes that its shards may take."""
    used: int
    """Bytes of its shards in all states, with the reservations of shards being written."""
    leaving: int
    """Bytes of its shards that are deleted when their readers end."""


def portions(connection: Connection) -> dict[str, Portion]:
    """Return the portions of the datasets that have a share, by their names."""
    rows = connection.execute(
        "SELECT d.name, d.share * (SELECT max_size FROM cache), coalesce(sum(s.bytes), 0),"
        " coalesce(sum(s.bytes * (s.state IN ('retiring', 'trash'))), 0)"
        " FROM datasets d LEFT JOIN shards s ON s.dataset = d.name WHERE d.share IS NOT NULL GROUP BY d.name"
    ).fetchall()
    return {name: Portion(name, int(limit), int(used), int(leaving)) for name, limit, used, leaving in rows}


def kept_free(shared: Mapping[str, Portion]) -> int:
    """Return the bytes that datasets with a share may still take, which no other dataset may fill."""
    return sum(max(0, portion.limit - portion.used) for portion in shared.values())


def divided(
    rows: Sequence[Candidate], shared: Mapping[str, Portion], dataset: str | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the shards of ``dataset`` if it has a share, and those of the datasets without one: a writer of
    ``dataset`` may evict both."""
    own = [row for row in rows if row.dataset == dataset] if dataset in shared else []
    return own, [row for row in rows if row.dataset not in shared]


def set_share(connection: Connection, dataset: str, share: float | None) -> None:
    """Set the share of a dataset, a fraction of the cap; None: it has none.

    Raises :class:`UsageError` if the shares of all datasets would be more than the cap.
    """
    others = connection.execute(
        "SELECT name, share FROM datasets WHERE share IS NOT NULL AND name != ? ORDER BY name", (dataset,)
    ).fetchall()
    # Fractions such as 0.7 + 0.2 + 0.1 may be a little more than 1.
    if share is not None and sum(other for _, other in others) + share > 1 + 1e-9:
        taken = ", ".join(f"{name} {100 * other:g}%" for name, other in others)
        raise UsageError(
            f"--share {100 * share:g}% of dataset {dataset!r} is too much beside the shares of {taken}; shares are 100%"
            " together at most"
        )
    connection.execute("UPDATE datasets SET share = ? WHERE name = ?", (share, dataset))
