"""Machines that work together: what each is called, and where its cache lies.

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
"""In the name of a cache folder: where the node's name goes."""
LABEL = "cachetool.node"
"""The label of a Ray node that names it: ``ray start --labels cachetool.node=NAME``."""

_PART = re.compile(r"[\w.-]+", flags=re.ASCII)
_ADDRESS = re.compile(r"[\d.]+|[\da-fA-F:.]*:[\da-fA-F:.]*")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a cluster, or what plays one."""

    id: str
    """Of this life of the node; another one when it comes back."""
    name: str
    """The same when it comes back; can be one part of a path."""
    address: str


def node_of(row: Mapping[str, Any]) -> Node:
    """A node as Ray describes it (``ray.nodes()``): called by its label, else by the ``--node-name`` it was started
    with, else by its host's name. Raises :class:`UsageError` for a name that cannot be part of a path."""
    given, address = str(row.get("NodeName") or ""), str(row.get("NodeManagerAddress") or "")
    name = str((row.get("Labels") or {}).get(LABEL) or "")
    if not name and not _ADDRESS.fullmatch(given):  # without a name Ray calls it by its address
        name = given
    name = name or str(row.get("NodeManagerHostname") or "") or address
    if not _PART.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"a node is called {name!r}, which cannot name a folder of its own; start it with: ray start --node-name"
        )
    return Node(str(row["NodeID"]), name, address)


def address_option(address: str | None) -> str:
    """`` --address HOST:PORT`` for a command in a message, where one was named."""
    return "" if address is None else f" --address {shlex.quote(address)}"


def namesakes(nodes: Iterable[Node]) -> dict[str, int]:
    """Names that more than one node has, and how many have them."""
    return {name: count for name, count in Counter(node.name for node in nodes).items() if count > 1}


def cache_of(cache: str, node: Node) -> str:
    """The cache folder of a node."""
    return cache.replace(PLACE, node.name)
