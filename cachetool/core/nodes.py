"""Nodes: machines with a cache each, their names, and the place of each cache.

::

    --cache /data/{node}     node a: /data/a    node b: /data/b
    --cache /data/cache      every node: /data/cache
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cachetool.core.errors import UsageError

__all__ = ["LABEL", "PLACE", "Node", "address_option", "cache_of", "namesakes", "node_of"]

PLACE = "{node}"
"""Text in the name of a cache folder that stands for the name of the node."""
LABEL = "cachetool.node"
"""Label of a Ray node that names it: ``ray start --labels cachetool.node=NAME``."""

_PART = re.compile(r"[\w.-]+", flags=re.ASCII)
_ADDRESS = re.compile(r"[\d.]+|[\da-fA-F:.]*:[\da-fA-F:.]*")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster, or a process that stands for one in a test."""

    id: str
    """Ray's id of this node, which changes when the node is started again."""
    name: str
    """Name of the node, which stays when the node is started again; it can be one component of a path."""
    address: str


def node_of(row: Mapping[str, Any]) -> Node:
    """Return the node that Ray describes by a row of ``ray.nodes()``.

    The name is the label :data:`LABEL`, otherwise the ``--node-name`` that the node was started with, otherwise the
    name of its host. Raises :class:`UsageError` for a name that cannot be a component of a path.
    """
    given, address = str(row.get("NodeName") or ""), str(row.get("NodeManagerAddress") or "")
    name = str((row.get("Labels") or {}).get(LABEL) or "")
    # Ray reports the address as the node's name if none was given. The address may change when the node is started
    # again, and the node would then not find its cache.
    if not name and not _ADDRESS.fullmatch(given):
        name = given
    name = name or str(row.get("NodeManagerHostname") or "") or address
    # The name becomes a folder below the user's path, so a name such as "../other" from a node must not leave that
    # path.
    if not _PART.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"a node is called {name!r}, which cannot name a folder; start it with: ray start --node-name NAME"
        )
    return Node(str(row["NodeID"]), name, address)


def address_option(address: str | None) -> str:
    """Return `` --address HOST:PORT`` for a command in a message; empty if the user named no address."""
    return "" if address is None else f" --address {shlex.quote(address)}"


def namesakes(nodes: Iterable[Node]) -> dict[str, int]:
    """Return the names that more than one node has, each with the number of nodes that have it."""
    return {name: count for name, count in Counter(node.name for node in nodes).items() if count > 1}


def cache_of(cache: str, node: Node) -> str:
    """Return the cache folder of a node: ``cache`` with the node's name in place of ``{node}``."""
    return cache.replace(PLACE, node.name)
