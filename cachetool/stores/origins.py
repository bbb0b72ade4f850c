"""Origins (scheme, host and port) of web URLs. Credentials, connections and manifests are limited to an origin."""

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
    """The scheme, host and port of a URL."""

    scheme: str
    host: str
    port: int

    @property
    def netloc(self) -> str:
        """The text ``host:port``, for messages."""
        return f"{self.host}:{self.port}"


def origin_of(url: str) -> Origin:
    """Return the origin of an http(s) URL. Raise :class:`UsageError` for any other URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
        if not usable_host(parts.hostname or ""):
            raise ValueError("no name of a host")
    # The message of urlsplit quotes text that may be a password, so the error is not chained.
    except ValueError:
        raise UsageError(f"{redact(url)!r} is not a URL: its host or its port cannot be read") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{redact(url)!r} is not an http:// or https:// URL")
    return Origin(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))


def written(part: str, *, encoding: str = "utf-8") -> str:
    """Return a path or query as it may be sent. Blanks and non-ASCII are escaped as browsers do; the rest is
    unchanged."""
    # All visible ASCII stays, `%` included: the URL may be escaped already, and escaping twice would name another
    # object.
    return quote(part, safe=_VISIBLE, encoding=encoding, errors="surrogateescape")


def allowed_hosts() -> frozenset[str]:
    """Return the hosts in the variable ``CACHETOOL_ALLOW_HOSTS`` (separated by commas).

    A manifest may name these hosts, and they may have private addresses.
    """
    return frozenset(filter(None, (h.strip().lower() for h in os.environ.get("CACHETOOL_ALLOW_HOSTS", "").split(","))))


def is_public(address: str) -> bool:
    """Return True if an address belongs to the internet, not to this machine or its local network."""
    # The part behind `%` is the zone of a link-local IPv6 address, which ip_address() would keep as part of the
    # address.
    ip = ipaddress.ip_address(address.partition("%")[0])
    # ::ffff:127.0.0.1 reaches the same socket as 127.0.0.1, so the IPv4 address inside is judged: otherwise a manifest
    # or redirect could reach this machine.
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_global and not ip.is_multicast
