"""Answers of web servers by the standard library: index pages, manifests, the hub's API, headers, and every object that
obstore does not bring (:mod:`cachetool.stores.http_objects`).

What each answer leads to::

    2xx              the body, complete or not at all
    3xx              at most 5 hops; never https -> http; credentials only ever go to the origin that was given
    429, 503         wait (Retry-After clamped to 300 s, else full jitter), until limits.throttle
    408, 5xx, broken connection, silence
                     again with full jitter until limits.retry; a body cut short continues where it stopped, when the
                     server proves by the same strong ETag and length that it is still the same
    401, 403, 407    again if there are other credentials by now, else returned to the caller
    other 4xx        returned to the caller
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import io
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from cachetool.core.errors import BadObject, SourceError, Unreachable, UsageError
from cachetool.proc.lines import ready
from cachetool.stores.base import Limits, refuse_encoded
from cachetool.stores.login import Login
from cachetool.stores.origins import Origin, allowed_hosts, is_public, origin_of, written
from cachetool.stores.redact import printable, redact
from cachetool.stores.traffic import retried

__all__ = ["MOST", "Answer", "OtherSize", "PageClient", "Response", "retry_after", "told_size"]

MOST = 2**32
"""Bytes of a body whose size nobody told."""
_MAX_RETRY_AFTER = 300.0
_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_REFUSALS = (401, 403, 407)
_AGAIN = (408, 429, 500, 502, 503, 504)
_FLAP = 5.0
"""Seconds that a name which does not resolve or a port where nobody listens is given to come back."""
_PIECE = 2**16
_SIZE = re.compile("[0-9]{1,18}")
_HEADERS = {"User-Agent": "cachetool", "Accept-Encoding": "identity", "Accept": "*/*"}


class _Broken(Exception):
    """An attempt failed in a way that another may not."""


class OtherSize(BadObject):
    """A body is not as long as it was listed, but has ``size`` bytes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class Answer(NamedTuple):
    """An object, or a part of it, and what its headers tell."""

    body: memoryview
    size: int
    """Bytes of the whole object; -1 where the server does not tell."""
    etag: str
    modified: datetime | str | None
    """When the object was changed: servers write that in several ways; as it came where nobody can read it."""
    content_type: str


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer."""

    status: int
    headers: Message
    """Case-insensitive."""
    body: memoryview
    url: str
    """Where the answer came from in the end."""

    @property
    def answer(self) -> Answer:
        """What an object's headers tell."""
        headers = self.headers
        modified: datetime | str = headers.get("Last-Modified", "")
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            modified = email.utils.parsedate_to_datetime(str(modified)).astimezone(UTC)
        name = "Content-Range" if self.status == 206 else "Content-Length"
        size = told_size(headers.get(name, "").rpartition("/")[2])
        return Answer(self.body, size, headers.get("ETag", ""), modified, headers.get("Content-Type", ""))


class _Connection(http.client.HTTPConnection):
    """A connection to one origin; ``guard`` refuses addresses that are not public."""

    def __init__(self, origin: Origin, limits: Limits, tls: ssl.SSLContext, *, guard: bool) -> None:
        super().__init__(origin.host, origin.port)
        self.peer: socket.socket | None = None
        """Where an answer is read from, also when http.client has let go of it."""
        self._origin, self._limits, self._tls, self._guard = origin, limits, tls, guard

    def connect(self) -> None:
        """Connect to the first address that answers; each is checked just before it is used, so that no second look-up
        can name another one."""
        addresses = socket.getaddrinfo(self._origin.host, self._origin.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        give_up = time.monotonic() + 2 * self._limits.connect  # for all addresses together
        for family, kind, protocol, _, address in addresses:
            if self._guard and not is_public(str(address[0])):
                raise SourceError(
                    f"{self._origin.netloc} is the private address {address[0]}, where no link or redirect may lead;\n"
                    f"allow it with CACHETOOL_ALLOW_HOSTS={self._origin.host}"
                )
            if failure and time.monotonic() > give_up:
                break
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._limits.connect)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._origin.scheme == "https":
                    sock = self._tls.wrap_socket(sock, server_hostname=self._origin.host)
                sock.settimeout(self._limits.silence)
            except OSError as error:
                sock.close()
                failure = error
                continue
            self.sock = self.peer = sock
            return
        raise failure or OSError("no address")

    @property
    def is_stale(self) -> bool:
        """Whether the peer closed the connection or sent something nobody asked for while it was idle."""
        if self.sock is None:
            return False
        return bool(ready(0, self.sock.fileno()))


class _Body:
    """The body of an answer, which may come over several attempts."""

    def __init__(self) -> None:
        self._file, self._length = io.BytesIO(), 0
        self.validator = ""
        """The strong ETag it belongs to, quoted; empty: the next attempt begins again."""
        self.total: int | None = None

    def __len__(self) -> int:
        return self._length

    def clear(self) -> None:
        """Begin again."""
        self._file.seek(0)
        self._file.truncate()
        self.validator, self.total, self._length = "", None, 0

    def append(self, part: bytes) -> None:
        """Add what came."""
        self._length += self._file.write(part)

    def as_memory(self) -> memoryview:
        """Return what came."""
        return memoryview(self._file.getvalue())


class PageClient:
    """One keep-alive connection per thread and origin."""

    def __init__(
        self, home: str, limits: Limits, *, login: Login[str | None] | None = None, certificates: str | None = None
    ) -> None:
        """``home`` is a URL of the origin that is trusted and gets what ``login`` gives for the header of
        authorization. ``certificates``: a file with more authorities to trust."""
        self._home = origin_of(home)
        self._limits, self._login = limits, login
        self._allowed = allowed_hosts()
        self._tls = ssl.create_default_context()
        if certificates:
            self._tls.load_verify_locations(certificates)
        self._local = threading.local()
        self._all: list[_Connection] = []
        self._lock = threading.Lock()

    def fetch(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        size: int = -1,
        most: int = MOST,
        bodiless: bool = False,
    ) -> Response:
        """The answer to a GET.

        ``size``: bytes that a 200 must bring, -1 when not known; ``most``: the most bytes that are taken;
        ``bodiless``: the headers are all that is wanted, as they are of a 200 to a ``Range``.

        Raises :class:`BadObject` for a body that is not as promised, :class:`Unreachable`, :class:`SourceError`.
        """
        began = time.monotonic()
        body, headers = _Body(), headers or {}
        attempt = had = refusals = 0
        while True:
            attempt += 1
            credentials = self._login.now() if self._login is not None else None
            authorization = credentials.value if credentials is not None else None
            asked, answered = None, False
            patience = self._limits.retry
            failure: Exception | None = None
            try:
                response = self._attempt(url, {**_HEADERS, **headers}, body, size, most, authorization, bodiless)
            except (http.client.InvalidURL, UnicodeEncodeError) as error:
                raise BadObject(f"{redact(url)[:200]!r} is no URL") from error
            except (_Broken, OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise Unreachable(
                        f"{redact(url)}: the server's certificate is not valid: {error.verify_message}"
                    ) from error
                failure, why = error, _reason(error)
                if isinstance(error, ConnectionRefusedError | socket.gaierror):
                    patience = min(patience, _FLAP)
            else:
                if response.status in _REFUSALS and self._login is not None and credentials is not None:
                    refusals += 1
                    if self._login.renewed(credentials, refusals):
                        retried()
                        continue
                if response.status not in _AGAIN:
                    return response
                why = f"the server answers {response.status}"
                answered = response.status not in (429, 503)
                if not answered:
                    patience = self._limits.throttle
                    asked = retry_after(response.headers.get("Retry-After"))
            if len(body) - had > self._limits.min_rate * (time.monotonic() - began):
                # It broke, but it got on: what counts is the time without progress.
                began, attempt, had = time.monotonic(), 1, len(body)
            most_wait = min(30.0 if patience > self._limits.retry else 3.0, 0.1 * 2.0 ** min(attempt, 16))
            pause = random.uniform(0, most_wait)
            if asked:  # 0 would be to ask again at once, for as long as it says so
                pause = asked + random.uniform(0, min(most_wait, 1.0))
            if time.monotonic() - began + pause > patience:
                unreachable = Unreachable(f"{redact(url)}: {why}, {attempt} times in {time.monotonic() - began:.0f} s")
                unreachable.answered = answered
                raise unreachable from failure
            retried()
            time.sleep(pause)

    def _attempt(
        self,
        url: str,
        headers: dict[str, str],
        body: _Body,
        size: int,
        most: int,
        authorization: str | None,
        bodiless: bool,
    ) -> Response:
        of_part = "Range" in headers
        if len(body) and body.validator and not of_part:
            headers |= {"Range": f"bytes={len(body)}-", "If-Range": body.validator}
        else:
            body.clear()
        for _ in range(_MAX_HOPS + 1):
            origin, parts = origin_of(url), urlsplit(url)
            headers.pop("Authorization", None)
            if authorization and origin == self._home:
                headers["Authorization"] = authorization
            connection, done = self._connection(origin), False
            try:
                with _Watch(connection, body, self._limits):
                    place = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                    connection.request("GET", place, headers=headers)
                    answer = connection.getresponse()
                    target = answer.headers.get("Location")
                    if answer.status in _REDIRECTS and target:
                        url = _next_hop(url, target)
                        continue
                    if answer.status in (200, 206) and not bodiless and not (of_part and answer.status == 200):
                        resumed = bool(len(body)) and answer.status == 206
                        _receive(answer, body, size, most, url)
                        done = True
                        return Response(200 if resumed else answer.status, answer.headers, body.as_memory(), url)
                    # All of an object in place of a part is nothing that anybody asked for.
                    done = answer.status not in (200, 206) and len(answer.read(_PIECE)) < _PIECE
                    if answer.status == 416 and len(body):
                        body.clear()  # it broke off at its very end, or is another one: only a whole answer tells
                        raise _Broken("the server has no more of it")
                    return Response(answer.status, answer.headers, memoryview(b""), url)
            finally:
                if not done:
                    connection.close()
        raise SourceError(f"{redact(url)}: more than {_MAX_HOPS} redirects")

    def _connection(self, origin: Origin) -> _Connection:
        pool: dict[Origin, _Connection] = self._local.__dict__.setdefault("pool", {})
        connection = pool.get(origin)
        if connection is None:
            guard = origin != self._home and origin.host.lower() not in self._allowed
            connection = pool[origin] = _Connection(origin, self._limits, self._tls, guard=guard)
            with self._lock:
                self._all.append(connection)
        elif connection.is_stale:
            connection.close()
        return connection

    def close(self) -> None:
        """Close every connection. May be called twice."""
        with self._lock:
            for connection in self._all:
                connection.close()


class _Watch:
    """Shuts a connection that brings too little while ``limits.grace`` passes: a server may send a byte now and then,
    in headers, in a body or between its chunks, and :mod:`http.client` waits for each."""

    def __init__(self, connection: _Connection, body: _Body, limits: Limits) -> None:
        self._connection, self._body, self._limits = connection, body, limits
        self._had, self._is_late = len(body), False

    def __enter__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._timer = threading.Timer(self._limits.grace, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        had, self._had = self._had, len(self._body)
        if self._had - had >= self._limits.min_rate * self._limits.grace:
            self._start()
            return
        self._is_late = True
        if self._connection.peer is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._connection.peer, socket.SHUT_RDWR)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._is_late and (kind is None or issubclass(kind, Exception)):
            raise TimeoutError(f"less than {self._limits.min_rate:g} bytes a second are too slow")


def _receive(answer: http.client.HTTPResponse, body: _Body, size: int, most: int, url: str) -> None:
    """Append what comes to ``body``. Raises :class:`_Broken` while it is not whole, :class:`BadObject` for a body that
    is not as promised."""
    length, end = answer.length, answer.length
    _refuse_framing(answer, url)
    if len(body) and answer.status == 206:
        end = _continued(answer, body)
    else:
        if length is None and not answer.chunked and size < 0:
            raise BadObject(f"{redact(url)}: the server tells no length, so that nobody knows whether it is complete")
        if answer.status == 200 and size >= 0 and length not in (None, size):
            raise OtherSize(f"{redact(url)} has {length} bytes instead of {size}", length or 0)
        body.clear()
        etag = answer.headers.get("ETag", "")
        body.validator, body.total = etag if etag.startswith('"') and length is not None else "", length
    limit = size if size >= 0 and answer.status == 200 else max(size, most)
    while (end is None or len(body) < end) and max(end or 0, len(body)) <= limit:
        if not (piece := answer.read1(_PIECE if end is None else min(_PIECE, end - len(body)))):
            break
        body.append(piece)
    if max(end or 0, len(body)) > limit:
        raise BadObject(f"{redact(url)}: more than {limit} bytes come, which is the most that is taken")
    whole = body.total or end
    if whole is not None and len(body) < whole:
        raise _Broken(f"the connection ended after {len(body)} of {whole} bytes")
    if end is not None and answer.read(1):  # also lets http.client see the end, so that the connection is used again
        raise _Broken("the server sent more than it said")


def _continued(answer: http.client.HTTPResponse, body: _Body) -> int:
    """Where the part ends that an answer brings for the rest of a body."""
    said = re.fullmatch(rf"bytes {len(body)}-([0-9]{{1,18}})/{body.total}", answer.headers.get("Content-Range", ""))
    end = int(said[1]) + 1 if said else 0
    same = answer.headers.get("ETag") == body.validator  # not every server that knows Range knows If-Range
    if not same or not len(body) < end <= (body.total or 0) or answer.length not in (None, end - len(body)):
        body.clear()
        raise _Broken("the server continues with another object, or at another place")
    return end


def _refuse_framing(answer: http.client.HTTPResponse, url: str) -> None:
    """Of a name that comes several times :mod:`http.client` takes the first, and what it does not know for nothing:
    where the body ends would be a guess (RFC 9112, section 6.3)."""

    def said(name: str) -> set[str]:
        return {value.strip().lower() for value in answer.headers.get_all(name, ())} - {""}

    refuse_encoded(redact(url), ",".join(said("Content-Encoding")))
    coded = said("Transfer-Encoding")
    lengths = {part.strip().lstrip("0") for value in said("Content-Length") for part in value.split(",")}
    if len(lengths) > 1 or not (coded == {"chunked"} if answer.chunked else coded <= {"identity"}):
        raise BadObject(f"{redact(url)}: the server says in several ways, or in one unknown, where the body ends")


def _next_hop(url: str, target: str) -> str:
    try:
        parts = urlsplit(urljoin(url, target))
        if parts.scheme in ("http", "https"):
            if not (parts.hostname or "").isascii():
                raise ValueError("no host")
            origin_of(parts.geturl())
    except (ValueError, UsageError):
        raise SourceError(
            f"{redact(url)}: redirected to {redact(printable(target[:200]))!r}, which is no URL"
        ) from None
    if parts.scheme not in ("http", "https"):
        raise SourceError(f"{redact(url)}: redirected to {parts.scheme}://, which is not followed")
    if urlsplit(url).scheme == "https" and parts.scheme == "http":
        raise SourceError(f"{redact(url)}: redirected from https to http, which is not followed")
    # Headers are bytes that were read as Latin-1: what was raw in them is written as just these bytes.
    path, query = (written(part, encoding="latin-1") for part in (parts.path, parts.query))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query=query, fragment="").geturl()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in time ({error})" if error.args and "slow" in str(error) else "no answer in time"
    if isinstance(error, _Broken):
        return str(error)
    if isinstance(error, http.client.HTTPException):
        return f"the connection ended early or the answer is no HTTP ({type(error).__name__})"
    return f"no connection ({getattr(error, 'strerror', None) or type(error).__name__})"


def told_size(text: str) -> int:
    """The number of bytes that a header names; -1 where it names none, or more than any file has."""
    return int(text) if _SIZE.fullmatch(text) else -1


def retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, clamped to [0, 300]; None when it is absent or senseless."""
    if value is None:
        return None
    try:
        seconds = float(value.strip())
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError):
            return None
    return None if seconds != seconds else min(max(seconds, 0.0), _MAX_RETRY_AFTER)
