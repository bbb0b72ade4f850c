"""The share of the cap that a dataset may take, for caches with several datasets.

A dataset with a share never takes more than its share, and only writers of its own evict its shards. The datasets
without one divide what all shares leave, also while a dataset has not filled its share, and evict each other's shards.
Shares together are at most the whole cap::

    cap  | sim: 60 %                 | obs: 30 %     | others, listings, catalog |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachetool.cache.catalog import Connection
from cachetool.cache.policies import Candidate
from cachetool.core.errors import UsageError

__all__ = ["Portion", "divided", "kept_free", "portion_of", "portions", "set_share"]


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


def portion_of(connection: Connection, dataset: str | None) -> Portion | None:
    """Return the portion of a dataset; None if it has no share."""
    row = connection.execute(
        "SELECT share, (SELECT max_size FROM cache) FROM datasets WHERE name = ? AND share IS NOT NULL", (dataset,)
    ).fetchone()
    if row is None or dataset is None:
        return None
    used, leaving = connection.execute(
        "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes * (state IN ('retiring', 'trash'))), 0) FROM shards"
        " WHERE dataset = ?",
        (dataset,),
    ).fetchone()
    return Portion(dataset, int(row[0] * row[1]), int(used), int(leaving))


def portions(connection: Connection) -> list[Portion]:
    """Return the portions of all datasets that have a share."""
    names = connection.execute("SELECT name FROM datasets WHERE share IS NOT NULL ORDER BY name").fetchall()
    found = (portion_of(connection, name) for (name,) in names)
    return [portion for portion in found if portion is not None]


def kept_free(connection: Connection) -> int:
    """Return the bytes that datasets with a share may still take, which no other dataset may fill."""
    return sum(max(0, portion.limit - portion.used) for portion in portions(connection))


def divided(
    connection: Connection, rows: Sequence[Candidate], dataset: str | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the shards of ``dataset`` if it has a share, and those of the datasets without one: a writer of
    ``dataset`` may evict both."""
    shared = {portion.dataset for portion in portions(connection)}
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
