"""Rank and world size of a process, from its arguments or from the environment that the launcher set."""

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
"""Variables in which torchrun and similar launchers, and Slurm, store the rank on the node, the number of processes of
the node, and the number of all processes."""


def given(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return rank and world size if they were given as arguments; None if neither was.

    Raises :class:`UsageError` if only one was given, and for a rank outside of the world.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(
            f"rank= and world_size= are needed together, got rank={shown(rank)}, world_size={shown(world_size)}"
        )
    if rank is None or world_size is None:
        return None
    rank, world_size = parse_whole(rank, what="rank="), parse_whole(world_size, what="world_size=", least=1)
    share(0, rank=rank, world_size=world_size)
    return rank, world_size


def launched() -> tuple[int, int]:
    """Return rank and world size from ``RANK`` and ``WORLD_SIZE``, as torchrun and similar launchers set them; 0 of 1
    without.

    Raises :class:`UsageError` for values that are no rank of a job.
    """
    texts = {name: os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")}
    try:
        rank, size = int(texts["RANK"] or 0), int(texts["WORLD_SIZE"] or 1)
    except ValueError:
        rank, size = -1, 0
    # A wrong rank must not pass as rank 0 of 1: each process of the job would then train on all samples, without any
    # error.
    if not 0 <= rank < size or (size > 1 and not texts["RANK"]):
        said = ", ".join(f"{name}={text!r}" if text else f"no {name}" for name, text in texts.items())
        raise UsageError(
            f"the environment has {said}, which is not a valid rank; set both variables or none, or use rank= and"
            " world_size="
        )
    return rank, size


def on_node(world_size: int) -> tuple[int, int] | None:
    """Return rank and world size of this process among the processes of its node; None if no launcher says so.

    ``world_size`` is the number of all processes of the job.
    """
    if world_size == 1:
        return 0, 1
    for names in _ON_NODE:
        try:
            rank, size, all_nodes = (int(os.environ.get(name, "")) for name in names)
        except ValueError:
            continue
        # Slurm counts only the tasks that it starts itself. If a task starts further ranks, as torchrun does within one
        # Slurm task a node, the number of all processes differs, and the variables describe other processes than these
        # ranks.
        if 0 <= rank < size and all_nodes == world_size:
            return rank, size
    return None


def require_node(node: tuple[int, int] | None) -> tuple[int, int]:
    """Return rank and world size on this node, for a cache that holds one node's share of its source.

    Raises :class:`UsageError` if :func:`on_node` does not know them.
    """
    # The ranks of other nodes cannot read this cache. If all ranks divided it, the samples of the other nodes' ranks
    # would be trained by nobody.
    if node is None:
        names = " or ".join(f"{names[0]}, {names[1]} and {names[2]}" for names in _ON_NODE)
        raise UsageError(
            f"this cache has the part of one node, so only the processes of this node divide it, but the environment"
            f" does not number them ({names});\nset their rank= and world_size=, and agree=True for a Loader of PyTorch"
        )
    return node
