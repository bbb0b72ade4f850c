"""Scheme, host and port of a web URL: the scope of credentials, of connections and of what a manifest may name."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from cachetool.core.errors import UsageError
from cachetool.stores.redact import redact, usable_host

__all__ = ["Origin", "allowed_hosts", "is_public", "origin_of", "written"]

_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a URL leads."""

    scheme: str
    host: str
    port: int

    @property
    def netloc(self) -> str:
        """``host:port`` for messages."""
        return f"{self.host}:{self.port}"


def origin_of(url: str) -> Origin:
    """The origin of an http(s) URL. Raises :class:`UsageError` for any other URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
        if not usable_host(parts.hostname or ""):
            raise ValueError("no name of a host")
    except ValueError:  # its message quotes what may be a password
        raise UsageError(f"{redact(url)!r} is not a URL: its host or its port cannot be read") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{redact(url)!r} is not an http:// or https:// URL")
    return Origin(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))


def written(part: str, *, encoding: str = "utf-8") -> str:
    """A path or a query as it may be sent: blanks and what is not ASCII as browsers write them, all else as it is."""
    return quote(part, safe=_VISIBLE, encoding=encoding, errors="surrogateescape")


def allowed_hosts() -> frozenset[str]:
    """Hosts in ``CACHETOOL_ALLOW_HOSTS`` (separated by commas): a manifest may name them, and they may have private
    addresses."""
    return frozenset(filter(None, (h.strip().lower() for h in os.environ.get("CACHETOOL_ALLOW_HOSTS", "").split(","))))


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet rather than to this machine or its network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_global and not ip.is_multicast
