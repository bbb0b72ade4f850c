"""Writes what was read into shards of another format: in a cache, or into an exported folder."""
