"""One HTTP connection whose every wait is bounded, and whose peer is checked before a byte is sent.

:mod:`http.client` gives up a read after a silence, but not a server that dribbles a byte now and then. Here each read
goes through :class:`_Reader`, which also measures the rate: a transfer that has run for ``limits.grace`` seconds below
``limits.min_rate`` is given up; headers get no more than ``limits.grace`` seconds in any case.
"""

from __future__ import annotations

import email.utils
import http.client
import io
import ipaddress
import os
import re
import select
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from cachetool.core.errors import SourceError, UsageError
from cachetool.stores.base import Limits
from cachetool.stores.redact import redact, usable_host

__all__ = ["Connection", "Origin", "allowed_hosts", "origin_of", "retry_after", "told_size", "written"]

_MAX_RETRY_AFTER = 300.0
HEADER_BYTES = 2**20
"""All headers of an answer, interim answers (1xx) and trailers included, are less."""
_SIZE = re.compile("[0-9]{1,18}")
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port: the scope of credentials and of a connection."""

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
    """Hosts in ``CACHETOOL_ALLOW_HOSTS`` (separated by commas), which may have private addresses."""
    return frozenset(filter(None, (h.strip().lower() for h in os.environ.get("CACHETOOL_ALLOW_HOSTS", "").split(","))))


class _Reader(io.RawIOBase):
    """The receiving side of a socket: limits on silence, on slowness, and on what one answer may bring in all."""

    def __init__(self, owner: _Socket, limits: Limits) -> None:
        self._owner, self._sock, self._limits = owner, owner.raw, limits
        self._began, self._got = time.monotonic(), 0
        self._most, self._in_body = HEADER_BYTES, False

    def readable(self) -> bool:
        return True

    def expect_body(self, most: int) -> None:
        """The headers have come; the rest is a body of at most ``most`` bytes, in chunks of any size, and trailers."""
        self._most, self._in_body = self._got + 8 * most + HEADER_BYTES, True

    def close(self) -> None:
        super().close()
        self._owner.let_go(self)

    def readinto(self, buffer: Any) -> int:
        ran = time.monotonic() - self._began
        if ran > self._limits.grace and (not self._in_body or self._got < ran * self._limits.min_rate):
            raise TimeoutError(f"{self._got} bytes in {ran:.0f} s are too slow")
        if self._got > self._most:
            raise http.client.HTTPException("an answer without end")
        count = self._sock.recv_into(buffer)
        self._got += count
        return count


class _Socket:
    """What :class:`http.client.HTTPConnection` needs of a socket."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self.raw, self._limits = sock, limits
        self._reader: _Reader | None = None
        self._closed = False

    def sendall(self, data: bytes) -> None:
        self.raw.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._reader = _Reader(self, self._limits)
        return io.BufferedReader(self._reader, 65536)

    def close(self) -> None:
        # http.client closes the socket before it reads an answer that ends with the connection.
        self._closed = True
        if self._reader is None:
            self.raw.close()

    def let_go(self, reader: _Reader) -> None:
        if self._reader is reader:
            self._reader = None
            if self._closed:
                self.raw.close()


class _Answer(http.client.HTTPResponse):
    """An answer behind the interim ones that were not asked for, such as 103: :mod:`http.client` knows 100 alone."""

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 102 <= status < 200:
                return version, status, reason
            http.client.parse_headers(self.fp)


class Connection(http.client.HTTPConnection):
    """A connection to one origin; ``guard`` refuses addresses that are not public."""

    response_class = _Answer

    def __init__(self, origin: Origin, limits: Limits, tls: ssl.SSLContext, *, guard: bool) -> None:
        super().__init__(origin.host, origin.port)
        self.origin, self._limits, self._tls, self._guard = origin, limits, tls, guard

    def connect(self) -> None:
        """Connect to the first address that answers; each is checked just before it is used, so that no second look-up
        can name another one."""
        addresses = socket.getaddrinfo(self.origin.host, self.origin.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        give_up = time.monotonic() + 2 * self._limits.connect  # for all addresses together
        for family, kind, protocol, _, address in addresses:
            if self._guard and not _public(str(address[0])):
                raise SourceError(
                    f"{self.origin.netloc} is the private address {address[0]}, where no link or redirect may lead;\n"
                    f"allow it with CACHETOOL_ALLOW_HOSTS={self.origin.host}"
                )
            if failure and time.monotonic() > give_up:
                break
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._limits.connect)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.origin.scheme == "https":
                    sock = self._tls.wrap_socket(sock, server_hostname=self.origin.host)
                sock.settimeout(self._limits.silence)
            except OSError as error:
                sock.close()
                failure = error
                continue
            self.sock: Any = _Socket(sock, self._limits)
            return
        raise failure or OSError("no address")

    def receive(self, most: int) -> http.client.HTTPResponse:
        """The answer to the request just sent, up to its headers; its body may have at most ``most`` bytes."""
        answer = self.getresponse()
        if answer.fp is not None:
            answer.fp.raw.expect_body(most)  # type: ignore[attr-defined]  # _Socket.makefile made it
        return answer

    @property
    def stale(self) -> bool:
        """Whether the peer closed the connection or sent something nobody asked for while it was idle."""
        if self.sock is None:
            return False
        ready = select.poll()  # whatever its number: select ends at 1,024
        ready.register(self.sock.raw, select.POLLIN)
        return bool(ready.poll(0))


def _public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_global and not ip.is_multicast


D = TypeVar("D")


def told_size(text: str, default: D) -> int | D:
    """The number of bytes that a header names; ``default`` where it names none, or more than any file has."""
    return int(text) if _SIZE.fullmatch(text) else default


def retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, clamped to [0, 300]; None when it is absent or senseless."""
    if value is None:
        return None
    value = value.strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError):
            return None
    if seconds != seconds:
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER)
