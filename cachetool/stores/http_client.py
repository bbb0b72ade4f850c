"""GET over HTTP with retries, redirects and resumption, for many threads at once.

What each answer leads to::

    2xx              the body, complete or not at all
    3xx              at most 5 hops; never https -> http; credentials only ever go to the origin that was given
    429, 503         wait (Retry-After clamped to 300 s, else full jitter), until limits.throttle
    408, 5xx, broken connection, silence
                     again with full jitter until limits.retry; a body cut short goes on where it stopped, when the
                     server proves by the same strong ETag and length that it is still the same
    other 4xx        returned to the caller
"""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

import numpy as np

from cachetool.errors import BadObject, SourceError, Unreachable
from cachetool.stores.base import Limits
from cachetool.stores.http_wire import Connection, Origin, allowed_hosts, origin_of, retry_after
from cachetool.stores.redact import printable, redact
from cachetool.stores.traffic import retried

__all__ = ["HttpClient", "Response", "Sink"]

_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (408, 429, 500, 502, 503, 504)
_FLAP = 5.0
"""Seconds that a name which does not resolve or a port where nobody listens is given to come back."""
_CHUNK = 2**20
_AT_ONCE = 2**28
"""Bytes of memory that are taken when a server says that so many come; more when they do."""
_MOST = 2**32
"""Bytes of a body whose size nobody told."""
_USER_AGENT = "cachetool"


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer."""

    status: int
    headers: Message
    """Case-insensitive."""
    body: memoryview
    url: str
    """Where it came from in the end."""


class _Body:
    """Memory for a body: what comes is read into its place."""

    def __init__(self) -> None:
        self._memory, self._filled = memoryview(b""), 0

    def __len__(self) -> int:
        return self._filled

    def take(self, answer: http.client.HTTPResponse, nbytes: int, wanted: int | None) -> int:
        """Read up to ``nbytes`` of an answer that brings ``wanted`` in all; gives how many came."""
        if self._filled + nbytes > len(self._memory):
            grown = max(self._filled + nbytes, 2 * len(self._memory), min(wanted or 0, _AT_ONCE))
            memory = np.empty(grown if wanted is None else min(grown, wanted), dtype=np.uint8).data
            memory[: self._filled] = self._memory[: self._filled]
            self._memory = memory
        came = answer.readinto(self._memory[self._filled : self._filled + nbytes])
        self._filled += came
        return came

    def clear(self) -> None:
        """Begin again."""
        self._filled = 0

    def whole(self) -> memoryview:
        """What came; of memory that was taken for much more, a copy."""
        body = self._memory[: self._filled]
        return memoryview(bytes(body)) if 2 * self._filled < len(self._memory) else body.toreadonly()


class Sink:
    """A file where a body goes instead of memory."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        """``file`` is empty; ``progress`` is told how many bytes are in it."""
        self._file, self._progress = file, progress

    def __len__(self) -> int:
        return self._file.tell()

    def take(self, answer: http.client.HTTPResponse, nbytes: int, wanted: int | None) -> int:
        """Write up to ``nbytes`` of an answer behind what is there; gives how many came."""
        part = answer.read(nbytes)
        self._file.write(part)
        self._progress(len(self))
        return len(part)

    def clear(self) -> None:
        """Begin again."""
        self._file.seek(0)
        self._file.truncate()


@dataclass(slots=True)
class _Partial:
    """What has come of a body so far, over several attempts."""

    data: _Body | Sink = field(default_factory=_Body)
    validator: str = ""
    """The strong ETag it belongs to, quoted; empty: it cannot be gone on with."""
    whole: int | None = None
    """Bytes of all of it, where the server told."""

    def clear(self) -> None:
        """Begin again."""
        self.data.clear()
        self.validator, self.whole = "", None


class _Broken(Exception):
    """An attempt failed in a way that another may not."""


class HttpClient:
    """One keep-alive connection per thread and origin."""

    def __init__(self, home: str, limits: Limits, *, authorization: str | None = None) -> None:
        """``home`` is a URL of the origin that is trusted and gets ``authorization``."""
        self._home = origin_of(home)
        self._limits, self._authorization = limits, authorization
        self._allowed = allowed_hosts()
        self._tls = ssl.create_default_context()
        self._local = threading.local()
        self._all: list[Connection] = []
        self._lock = threading.Lock()

    def fetch(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        size: int = -1,
        most: int = -1,
        into: Sink | None = None,
        bodiless: bool = False,
    ) -> Response:
        """The answer to a GET.

        ``size``: bytes that a 200 must bring, -1 when not known; ``most``: the most bytes that are taken; ``into``
        takes the body, which the response then lacks; ``bodiless``: the headers are all that is wanted. Raises
        :class:`BadObject` for a body that is not as promised, :class:`Unreachable`, :class:`SourceError`.
        """
        began = time.monotonic()
        partial = _Partial() if into is None else _Partial(into)
        attempt = had = 0
        while True:
            attempt += 1
            asked = None
            patience = self._limits.retry
            failure: Exception | None = None
            answered = False
            try:
                response = self._attempt(url, dict(headers or {}), partial, size, most, bodiless=bodiless)
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
                if response.status not in _AGAIN:
                    return response
                why = f"the server answers {response.status}"
                answered = response.status not in (429, 503)
                if not answered:
                    patience = self._limits.throttle
                    asked = retry_after(response.headers.get("Retry-After"))
            if len(partial.data) - had > self._limits.min_rate * (time.monotonic() - began):
                # It broke, but it got on: what counts is the time without progress.
                began, attempt, had = time.monotonic(), 1, len(partial.data)
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
        self, url: str, headers: dict[str, str], partial: _Partial, size: int, most: int, *, bodiless: bool
    ) -> Response:
        if len(partial.data) and partial.validator and "Range" not in headers:
            headers |= {"Range": f"bytes={len(partial.data)}-", "If-Range": partial.validator}
        else:
            partial.clear()
        for _ in range(_MAX_HOPS + 1):
            origin = origin_of(url)
            connection = self._connection(origin)
            answer: http.client.HTTPResponse | None = None
            done = False
            try:
                answer = self._send(connection, origin, url, headers, max(size, most))
                target = answer.headers.get("Location")
                if answer.status in _REDIRECTS and target:
                    url = _next_hop(url, target)
                    continue
                if bodiless and answer.status in (200, 206):
                    return Response(answer.status, answer.headers, memoryview(b""), url)
                resumed = bool(len(partial.data)) and answer.status == 206
                body = self._body(answer, partial, size, most, url)
                done = not answer.will_close
                return Response(200 if resumed else answer.status, answer.headers, body, url)
            finally:
                if not done:
                    if answer is not None:
                        answer.close()
                    connection.close()
        raise SourceError(f"{redact(url)}: more than {_MAX_HOPS} redirects")

    def _connection(self, origin: Origin) -> Connection:
        pool: dict[Origin, Connection] = self._local.__dict__.setdefault("pool", {})
        connection = pool.get(origin)
        if connection is None:
            guard = origin != self._home and origin.host.lower() not in self._allowed
            connection = pool[origin] = Connection(origin, self._limits, self._tls, guard=guard)
            with self._lock:
                self._all.append(connection)
        elif connection.stale:
            connection.close()
        return connection

    def _send(
        self, connection: Connection, origin: Origin, url: str, headers: Mapping[str, str], most: int
    ) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        sent = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", "Accept": "*/*", **headers}
        if self._authorization and origin == self._home:
            sent["Authorization"] = self._authorization
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=sent)
        return connection.receive(most if most >= 0 else _MOST)

    def _body(self, answer: http.client.HTTPResponse, partial: _Partial, size: int, most: int, url: str) -> memoryview:
        length = answer.length
        resuming = bool(len(partial.data))
        if answer.status not in (200, 206):
            _drain(answer)
            return memoryview(b"")
        if answer.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            raise BadObject(f"{redact(url)}: the server encodes the body, although it was asked not to")
        etag = answer.headers.get("ETag", "")
        if resuming and answer.status == 206:
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {len(partial.data)}-"):
                raise _Broken("the server goes on at another place than asked")
            whole = None if length is None else len(partial.data) + length
            other = None not in (whole, partial.whole) and whole != partial.whole
            if etag != partial.validator or other:  # not every server that knows Range knows If-Range
                partial.clear()
                raise _Broken("it was replaced while it was fetched")
        else:
            partial.clear()
        if length is None and not answer.chunked and size < 0:
            raise BadObject(f"{redact(url)}: the server tells no length, so that nobody knows whether it is complete")
        if answer.status == 200 and size >= 0 and length not in (None, size):
            raise BadObject(f"{redact(url)} changed since it was listed: {length} bytes instead of {size}")
        wanted = None if length is None else len(partial.data) + length
        partial.validator, partial.whole = etag if etag.startswith('"') else "", wanted
        _read(answer, partial.data, wanted, _limit(size, most, answer.status), url)
        return partial.data.whole() if isinstance(partial.data, _Body) else memoryview(b"")

    def close(self) -> None:
        """Close every connection. May be called twice."""
        with self._lock:
            for connection in self._all:
                connection.close()


def _read(answer: http.client.HTTPResponse, data: _Body | Sink, wanted: int | None, most: int, url: str) -> None:
    """Append the rest of the body to ``data``: up to ``wanted`` bytes in all, or to its end; never beyond ``most``."""
    while wanted is None or len(data) < wanted:
        if not data.take(answer, _CHUNK if wanted is None else min(_CHUNK, wanted - len(data)), wanted):
            break
        if len(data) > most:
            raise BadObject(f"{redact(url)}: more than the {most} bytes that were promised")
    if wanted is not None and len(data) < wanted:
        raise _Broken(f"the connection ended after {len(data)} of {wanted} bytes")
    if wanted is not None:
        answer.read()  # lets http.client see the end, so that the connection is used again


def _limit(size: int, most: int, status: int) -> int:
    if size >= 0 and status == 200:
        return size
    return most if most >= 0 else max(size, _MOST)


def _drain(answer: http.client.HTTPResponse) -> None:
    """Read the short body of an error, or leave the connection to be closed."""
    if len(answer.read(65536)) == 65536:
        answer.will_close = True


def _next_hop(url: str, target: str) -> str:
    try:
        parts = urlsplit(urljoin(url, target))
    except ValueError:
        raise SourceError(
            f"{redact(url)}: redirected to {redact(printable(target[:200]))!r}, which is no URL"
        ) from None
    if parts.scheme not in ("http", "https"):
        raise SourceError(f"{redact(url)}: redirected to {parts.scheme}://, which is not followed")
    if urlsplit(url).scheme == "https" and parts.scheme == "http":
        raise SourceError(f"{redact(url)}: redirected from https to http, which is not followed")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in time ({error})" if error.args and "slow" in str(error) else "no answer in time"
    if isinstance(error, _Broken):
        return str(error)
    if isinstance(error, http.client.HTTPException):
        return f"the connection ended early or the answer is no HTTP ({type(error).__name__})"
    return f"no connection ({getattr(error, 'strerror', None) or type(error).__name__})"
