"""Large objects of an S3 server without TLS, as of MinIO or Ceph beside the machine: signed URLs and our own client.

obstore hands a body over in many pieces, from a thread of its runtime to the one that asks, which puts them together:
2.0 s of a processor for 2 GiB, where reading them from the socket into their place takes 0.9 s. With TLS its client is
the faster one. Whatever does not come as it should is left to obstore, which knows all about errors and retries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace

from cachetool.core.errors import CacheToolError
from cachetool.stores.base import Limits, Object, check_identity
from cachetool.stores.http_client import HttpClient

__all__ = ["Signed"]

_LEAST = 2**20
"""Bytes of an object from which on it pays: signing takes a tenth of a millisecond."""
_PATIENCE = 8
"""Objects that may fail to come; then all others are left to obstore, too."""
_PROXIES = ("http_proxy", "all_proxy")


class Signed:
    """GETs of whole objects. ``sign`` gives the URL for a key; for many threads."""

    def __init__(self, sign: Callable[[str], str], limits: Limits) -> None:
        self._sign = sign
        self._limits = replace(limits, retry=1e-3, throttle=1e-3)  # one attempt
        self._client: HttpClient | None = None
        self._lock = threading.Lock()
        self._failures = 0
        self._usable = self._may = not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)

    def renew(self) -> None:
        """Try again after refusals: there are other credentials now."""
        self._usable, self._failures = self._may, 0

    def get(self, item: Object) -> memoryview | None:
        """The whole object; None when it should be asked for in another way. Raises :class:`BadObject` when it is not
        the listed one."""
        if not self._usable or item.size < _LEAST:
            return None
        try:
            url = self._sign(item.key)
            with self._lock:
                self._client = client = self._client or HttpClient(url, self._limits)
            response = client.fetch(url, size=item.size)
        except CacheToolError:
            self._failures += 1
            self._usable = self._failures < _PATIENCE
            return None
        if response.status != 200:
            self._usable = False  # it wants more than a signature
            return None
        check_identity(item, size=len(response.body), etag=response.headers.get("ETag", "").strip('"') or None)
        return response.body

    def close(self) -> None:
        """Close the connections of all threads."""
        if self._client is not None:
            self._client.close()
