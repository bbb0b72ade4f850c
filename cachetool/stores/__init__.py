"""Stores: remote bytes by key, under one URL. Local folders, object stores, web servers and SFTP."""

from cachetool.stores.base import Limits, Object, OrderedStore, Store
from cachetool.stores.redact import canonical, redact, scrub, split_url
from cachetool.stores.registry import local_path, open_store

__all__ = [
    "Limits",
    "Object",
    "OrderedStore",
    "Store",
    "canonical",
    "local_path",
    "open_store",
    "redact",
    "scrub",
    "split_url",
]
