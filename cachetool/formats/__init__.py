"""The formats of a shard on disk.

A format writes blocks into a shard and reads samples back. The writer also records where each value lies, so that a
loader can read uncompressed shards without the format's library.
"""

from __future__ import annotations

from cachetool.formats.base import Format, Reader, Writer, Written
from cachetool.formats.registry import format_for, format_names, get_format

__all__ = ["Format", "Reader", "Writer", "Written", "format_for", "format_names", "get_format"]
