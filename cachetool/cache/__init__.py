"""Cache folder with a size cap: catalog, admission, commit, snapshots, eviction.

Each public name is imported at its first use, so a process that only reads a cache does not import the code that fills
one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachetool.cache.commit import Facts, Origin, Staging, commit_together
    from cachetool.cache.draws import Claim, SourceRow
    from cachetool.cache.opening import open_cache
    from cachetool.cache.policies import Room, Victim, policy_names
    from cachetool.cache.removal import Removal
    from cachetool.cache.root import CacheDir
    from cachetool.cache.snapshots import Shard, Snapshot
    from cachetool.cache.stats import Stats

__all__ = [
    "CacheDir",
    "Claim",
    "Facts",
    "Origin",
    "Removal",
    "Room",
    "Shard",
    "Snapshot",
    "SourceRow",
    "Staging",
    "Stats",
    "Victim",
    "commit_together",
    "open_cache",
    "policy_names",
]

_HOMES = {
    **dict.fromkeys(("Facts", "Origin", "Staging", "commit_together"), "commit"),
    **dict.fromkeys(("Claim", "SourceRow"), "draws"),
    "open_cache": "opening",
    **dict.fromkeys(("Victim", "policy_names"), "policies"),
    "Removal": "removal",
    "Room": "policies",
    "CacheDir": "root",
    **dict.fromkeys(("Shard", "Snapshot"), "snapshots"),
    "Stats": "stats",
}


# The leading feeder needs 0.3 s to start on a slow machine. Of 90 ms for the catalog, 28 ms were
# imports of modules that fill a cache, so these modules load at their first use.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cachetool.cache' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"cachetool.cache.{_HOMES[name]}"), name)
    return value
