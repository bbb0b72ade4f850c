"""Remote bytes by key, under one URL: local folders, object stores, HTTP servers."""

from cachetool.stores.base import Limits, Object, Store
from cachetool.stores.redact import canonical, redact, scrub
from cachetool.stores.registry import open_store

__all__ = ["Limits", "Object", "Store", "canonical", "open_store", "redact", "scrub"]
