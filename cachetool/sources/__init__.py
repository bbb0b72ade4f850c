"""Samples read out of remote stores: listed once, numbered by units, fetched with many requests in flight."""

from cachetool.sources.base import Probe, ReadResult, Skipped, Source
from cachetool.sources.listing import Listing
from cachetool.sources.options import SourceOptions, image_size
from cachetool.sources.rate_limit import RateLimit
from cachetool.sources.registry import list_source, open_source

__all__ = [
    "Listing",
    "RateLimit",
    "ReadResult",
    "Probe",
    "Skipped",
    "Source",
    "SourceOptions",
    "image_size",
    "list_source",
    "open_source",
]
