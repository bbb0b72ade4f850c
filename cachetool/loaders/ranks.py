"""Where a process stands among those of its job: as it was given, or as the launcher's environment says."""

from __future__ import annotations

import os

from cachetool.core.errors import UsageError
from cachetool.core.text import shown
from cachetool.core.units import parse_whole
from cachetool.loaders.order import share

__all__ = ["given", "launched", "on_node", "require_node"]

_ON_NODE = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"),
)
"""The variables by which torchrun and its likes, and Slurm, number the processes of a node, and count those of all."""


def given(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Rank and world size as they were given; None when neither was.

    Raises :class:`UsageError` for one alone, and for a rank outside the world.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank and world_size go together, got rank={shown(rank)}, world_size={shown(world_size)}")
    if rank is None or world_size is None:
        return None
    rank, world_size = parse_whole(rank, what="rank="), parse_whole(world_size, what="world_size=", least=1)
    share(0, rank=rank, world_size=world_size)
    return rank, world_size


def launched() -> tuple[int, int]:
    """Rank and world size by ``RANK`` and ``WORLD_SIZE``, as torchrun and its likes set them; 0 of 1 without.

    Raises :class:`UsageError` for what is no rank of a job: each process would take samples that are not its own.
    """
    texts = {name: os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")}
    try:
        rank, size = int(texts["RANK"] or 0), int(texts["WORLD_SIZE"] or 1)
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size or (size > 1 and not texts["RANK"]):
        said = ", ".join(f"{name}={text!r}" if text else f"no {name}" for name, text in texts.items())
        raise UsageError(
            f"the environment has {said}, which is no rank of a job; set both or none, or give rank= and world_size="
        )
    return rank, size


def on_node(world_size: int) -> tuple[int, int] | None:
    """Rank and world size of this process among those of its node; None if no launcher of ``world_size`` processes says
    so. Slurm does not know of processes that its own begin."""
    if world_size == 1:
        return 0, 1
    for names in _ON_NODE:
        try:
            rank, size, all_nodes = (int(os.environ.get(name, "")) for name in names)
        except ValueError:
            continue
        if 0 <= rank < size and all_nodes == world_size:
            return rank, size
    return None


def require_node(node: tuple[int, int] | None) -> tuple[int, int]:
    """Rank and world size on this node, of a cache that has a share of its source. Raises :class:`UsageError` where
    :func:`on_node` knows them not: dividing by all ranks would leave samples out."""
    if node is None:
        names = " nor ".join(f"{names[0]}, {names[1]} and {names[2]}" for names in _ON_NODE)
        raise UsageError(
            "this cache has one node's share of its source, so only the processes of this node divide it, and neither"
            f" {names} count them; give their rank= and world_size=, and to a Loader of PyTorch agree=True"
        )
    return node
