"""What lies in a cache folder, seen from outside and through the library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import cachetool
from cachetool.api import read_sample

__all__ = ["labels", "tree"]


def labels(cache: Path) -> list[int]:
    """The label of every sample in a cache filled from ``remote``, after checking that its volume belongs to it."""
    found = []
    with cachetool.open_cache(cache, create=False) as opened:
        for shard in opened.shards():
            for index in range(shard.samples):
                sample = read_sample(opened, shard.id, index)
                assert (sample["volume"] == sample["label"]).all()
                found.append(int(sample["label"]))
    return found


def tree(root: Path) -> str:
    """A digest of every name and byte below ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"folder")
    return digest.hexdigest()
