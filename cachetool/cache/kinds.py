"""What the id of a pull says of its kind, and what becomes of its claims without it.

By itself, since whoever finishes what the dead left needs this, trainers too, which load nothing that fills a cache.
"""

from __future__ import annotations

from cachetool.cache.catalog import Connection

__all__ = ["AGAIN", "NOT_AGAIN", "OVER", "let_go"]

OVER = "over-"
"""How the ids of jobs begin that are a node's part of a pull over several."""
AGAIN = "again-"
"""How the ids of pulls begin that bring evicted shards again: the draws of these are done, and stay so without them."""
NOT_AGAIN = f"(job IS NULL OR job NOT LIKE '{AGAIN}%')"
"""Of a claim: its draws are not done."""


def let_go(connection: Connection, which: str, *values: str) -> None:
    """Nobody draws the claims any more that the condition ``which`` names: they are open, or done as they were."""
    connection.execute(f"DELETE FROM claims WHERE {which} AND job LIKE '{AGAIN}%'", values)
    connection.execute(f"UPDATE claims SET holder = NULL, job = NULL WHERE {which}", values)
