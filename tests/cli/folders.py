"""The contents of a cache folder, seen from outside and through the library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

import cachetool
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard

__all__ = ["labels", "tree"]


def labels(cache: Path) -> list[int]:
    """Return the label of each sample in a cache filled from ``remote``. Check that its volume belongs to it."""
    found: list[int] = []
    with cachetool.open_cache(cache, create=False) as opened:
        for shard in opened.shards():
            with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
                block = reader.read(0, reader.samples)
            volumes, numbers = np.asarray(block.columns["volume"]), np.asarray(block.columns["label"])
            assert (volumes == numbers[:, None, None, None]).all()
            found += numbers.tolist()
    return found


def tree(root: Path) -> str:
    """Return a digest of every name and byte below ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"folder")
    return digest.hexdigest()
