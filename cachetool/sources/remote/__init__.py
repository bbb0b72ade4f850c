"""Files of many samples on a store, read by parts: rows of arrays, chunks, row groups, records, whole archives."""

from cachetool.sources.remote.listing import list_files
from cachetool.sources.remote.source import open_files_source

__all__ = ["list_files", "open_files_source"]
