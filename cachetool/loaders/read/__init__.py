"""Reads samples out of shards by their extents."""
