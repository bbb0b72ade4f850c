"""The bounded root directory: catalog, cap, commit, snapshots, eviction."""

from cachetool.cache.commit import Facts, Origin, Staging, commit_together
from cachetool.cache.draws import Claim, SourceRow
from cachetool.cache.opening import open_cache
from cachetool.cache.policies import Victim, policy_names
from cachetool.cache.removal import Removal
from cachetool.cache.room import Room
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
