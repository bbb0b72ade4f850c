"""Modules that read samples out of shards, by the positions that the extents of a shard give."""
