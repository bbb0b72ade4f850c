"""The on-disk formats of a shard: how blocks are written, read back, and found again without the format's library."""

from __future__ import annotations

from cachetool.formats.base import Format, Reader, Writer, Written
from cachetool.formats.registry import format_for, format_names, get_format

__all__ = ["Format", "Reader", "Writer", "Written", "format_for", "format_names", "get_format"]
