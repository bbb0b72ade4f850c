"""Conversion of samples into shards of another format, in a cache or in an exported folder."""
