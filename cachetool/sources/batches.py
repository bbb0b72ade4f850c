"""Runs that become one piece, and the requests that fetch their parts: neighbours in one."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachetool.core.errors import BadObject, NotFound
from cachetool.sources.file_reading import Want
from cachetool.sources.file_table import Run

__all__ = ["MAX_RUNS", "MOST", "Batch", "Body", "Get", "batch_of", "deliver"]

GAP = 4 * 2**10
"""Bytes between two parts that are fetched along rather than asked for apart."""
MOST = 8 * 2**20
"""Bytes of one request, unless one part is larger."""
MAX_RUNS = 4096


@dataclass(slots=True)
class Get:
    """One request: the parts of a batch that lie side by side in one object."""

    item: int
    start: int
    stop: int
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Run and part of the run."""


@dataclass(slots=True)
class Batch:
    """Runs that become one piece."""

    runs: list[Run]
    wants: list[list[Want]]
    gets: list[Get]
    bodies: list[list[memoryview]]
    errors: dict[int, BadObject | NotFound] = field(default_factory=dict)
    fetched: int = 0
    missing: int = 0


Body = memoryview | BadObject | NotFound


def batch_of(runs: list[Run], wants: list[list[Want]], errors: dict[int, BadObject | NotFound]) -> Batch:
    """The batch of these runs; ``errors`` are known before. Parts that lie side by side become one request."""
    parts = sorted(
        (want.item, want.start, want.stop, number, part)
        for number, mine in enumerate(wants)
        for part, want in enumerate(mine)
    )
    gets: list[Get] = []
    for item, start, stop, number, part in parts:
        last = gets[-1] if gets else None
        near = last is not None and last.item == item and start - last.stop <= GAP
        if last is not None and near and max(stop, last.stop) - last.start <= MOST:
            last.stop = max(stop, last.stop)
            last.parts.append((number, part))
        else:
            gets.append(Get(item, start, stop, [(number, part)]))
    bodies = [[memoryview(b"")] * len(mine) for mine in wants]
    return Batch(runs, wants, gets or [Get(0, 0, 0)], bodies, errors)


def deliver(batch: Batch, get: Get, body: Body) -> None:
    """Hand what a request brought to the parts it was for."""
    if isinstance(body, memoryview):
        batch.fetched += len(body)
    for number, part in get.parts:
        if isinstance(body, memoryview):
            want = batch.wants[number][part]
            batch.bodies[number][part] = body[want.start - get.start : want.stop - get.start]
        else:
            batch.errors[number] = body
