"""GET over HTTP with retries, redirects and resumption, for many threads at once.

What each answer leads to::

    2xx              the body, complete or not at all
    3xx              at most 5 hops; never https -> http; credentials only ever go to the origin that was given
    429, 503         wait (Retry-After clamped to 300 s, else full jitter), until limits.throttle
    408, 5xx, broken connection, silence
                     again with full jitter until limits.retry; a body cut short goes on where it stopped, when the
                     server proves by the same strong ETag and length that it is still the same
    401, 403, 407    again if there are other credentials by now, else returned to the caller
    other 4xx        returned to the caller
"""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from urllib.parse import urljoin, urlsplit

from cachetool.core.errors import BadObject, SourceError, Unreachable, UsageError
from cachetool.stores.base import Limits
from cachetool.stores.http_body import MOST, Broken, Partial, Sink, receive
from cachetool.stores.http_wire import Connection, Origin, allowed_hosts, origin_of, retry_after, written
from cachetool.stores.login import Login
from cachetool.stores.redact import printable, redact
from cachetool.stores.traffic import retried

__all__ = ["HttpClient", "Response"]

_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_REFUSALS = (401, 403, 407)
_AGAIN = (408, 429, 500, 502, 503, 504)
_FLAP = 5.0
"""Seconds that a name which does not resolve or a port where nobody listens is given to come back."""
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


class HttpClient:
    """One keep-alive connection per thread and origin."""

    def __init__(self, home: str, limits: Limits, *, login: Login[str | None] | None = None) -> None:
        """``home`` is a URL of the origin that is trusted and gets what ``login`` gives for the header of
        authorization."""
        self._home = origin_of(home)
        self._limits, self._login = limits, login
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
        takes the body, which the response then lacks; ``bodiless``: the headers are all that is wanted, as they are of
        a 200 to a ``Range``. Raises :class:`BadObject` for a body that is not as promised, :class:`Unreachable`,
        :class:`SourceError`.
        """
        began = time.monotonic()
        partial = Partial() if into is None else Partial(into)
        attempt = had = refusals = 0
        while True:
            attempt += 1
            credentials = self._login.now() if self._login is not None else None
            asked = None
            patience = self._limits.retry
            failure: Exception | None = None
            answered = False
            try:
                authorization = credentials.value if credentials is not None else None
                response = self._attempt(
                    url, dict(headers or {}), partial, size, most, bodiless=bodiless, authorization=authorization
                )
            except (http.client.InvalidURL, UnicodeEncodeError) as error:
                raise BadObject(f"{redact(url)[:200]!r} is no URL") from error
            except (Broken, OSError, http.client.HTTPException) as error:
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
        self,
        url: str,
        headers: dict[str, str],
        partial: Partial,
        size: int,
        most: int,
        *,
        bodiless: bool,
        authorization: str | None,
    ) -> Response:
        of_part = "Range" in headers
        if len(partial.data) and partial.validator and not of_part:
            headers |= {"Range": f"bytes={len(partial.data)}-", "If-Range": partial.validator}
        else:
            partial.clear()
        for _ in range(_MAX_HOPS + 1):
            origin = origin_of(url)
            connection = self._connection(origin)
            answer: http.client.HTTPResponse | None = None
            done = False
            try:
                if authorization and origin == self._home:
                    headers["Authorization"] = authorization
                else:
                    headers.pop("Authorization", None)
                answer = self._send(connection, url, headers, max(size, most))
                target = answer.headers.get("Location")
                if answer.status in _REDIRECTS and target:
                    url = _next_hop(url, target)
                    continue
                if (bodiless and answer.status in (200, 206)) or (of_part and answer.status == 200):
                    # All of it in place of a part is nothing that anybody asked for.
                    return Response(answer.status, answer.headers, memoryview(b""), url)
                if answer.status == 416 and len(partial.data):
                    # It broke off at its very end, or it is another one: only a whole answer tells.
                    partial.clear()
                    raise Broken("the server has no more of it")
                if answer.status not in (200, 206):
                    _drain(answer)
                    done = not answer.will_close
                    return Response(answer.status, answer.headers, memoryview(b""), url)
                resumed = bool(len(partial.data)) and answer.status == 206
                receive(answer, partial, size, most, url)
                done = not answer.will_close
                return Response(200 if resumed else answer.status, answer.headers, partial.body, url)
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
        self, connection: Connection, url: str, headers: Mapping[str, str], most: int
    ) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        sent = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", "Accept": "*/*", **headers}
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=sent)
        return connection.receive(most if most >= 0 else MOST)

    def close(self) -> None:
        """Close every connection. May be called twice."""
        with self._lock:
            for connection in self._all:
                connection.close()


def _drain(answer: http.client.HTTPResponse) -> None:
    """Read the short body of an error, or leave the connection to be closed."""
    if len(answer.read(65536)) == 65536:
        answer.will_close = True


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
    if isinstance(error, Broken):
        return str(error)
    if isinstance(error, http.client.HTTPException):
        return f"the connection ended early or the answer is no HTTP ({type(error).__name__})"
    return f"no connection ({getattr(error, 'strerror', None) or type(error).__name__})"
