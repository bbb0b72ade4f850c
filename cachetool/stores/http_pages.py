"""Answers of web servers, fetched by the standard library.

This client fetches index pages, manifests, headers, the hub's API, and every object that obstore does not bring
(:mod:`cachetool.stores.http_objects`).

Each kind of answer leads to::

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
from cachetool.stores.traffic import paused, retried

__all__ = ["MOST", "Answer", "OtherSize", "PageClient", "Response", "retry_after", "told_size"]

MOST = 2**32
"""Most bytes of a body whose size nobody stated."""
# A server may ask for a century. Longer waits than this are shortened.
_MAX_RETRY_AFTER = 300.0
_MAX_HOPS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_REFUSALS = (401, 403, 407)
_AGAIN = (408, 429, 500, 502, 503, 504)
_FLAP = 5.0
"""Seconds that a name which does not resolve, or a port where nobody listens, is given to come back."""
_PIECE = 2**16
# At most 18 digits: no file needs more, and int() raises an error of its own beyond 4,300 digits.
_SIZE = re.compile("[0-9]{1,18}")
# identity: sizes, ranges and ETags of a packed body are those of the packed bytes.
_HEADERS = {"User-Agent": "cachetool", "Accept-Encoding": "identity", "Accept": "*/*"}


class _Broken(Exception):
    """An attempt failed, and another attempt may succeed."""


class _TooSlow(TimeoutError):
    """An answer brought too few bytes a second."""


class OtherSize(BadObject):
    """A body has ``size`` bytes, and not as many as were listed."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class Answer(NamedTuple):
    """An object, or a part of it, with the facts from its headers."""

    body: memoryview
    size: int
    """Size of the whole object in bytes; -1 if the server does not say."""
    etag: str
    modified: datetime | str | None
    """Time of the last change. A time that nobody can parse stays the text of the server."""
    content_type: str


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer."""

    status: int
    headers: Message
    """The headers; their names are case-insensitive."""
    body: memoryview
    url: str
    """The URL that sent the answer, after all redirects."""

    @property
    def answer(self) -> Answer:
        """The body with the facts from the headers of an object."""
        headers = self.headers
        modified: datetime | str = headers.get("Last-Modified", "")
        # Safe to suppress: a text that is no date still tells two versions of an object apart, so the text is kept.
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            modified = email.utils.parsedate_to_datetime(str(modified)).astimezone(UTC)
        # Content-Length of a part is the length of the part; the size of the object stands behind the slash of
        # Content-Range.
        name = "Content-Range" if self.status == 206 else "Content-Length"
        size = told_size(headers.get(name, "").rpartition("/")[2])
        return Answer(self.body, size, headers.get("ETag", ""), modified, headers.get("Content-Type", ""))


class _Connection(http.client.HTTPConnection):
    """A connection to one origin. With ``guard`` it refuses addresses that are not public."""

    def __init__(self, origin: Origin, limits: Limits, tls: ssl.SSLContext, *, guard: bool) -> None:
        super().__init__(origin.host, origin.port)
        self.peer: socket.socket | None = None
        """The socket of the present answer, also after http.client has dropped it."""
        self._origin, self._limits, self._tls, self._guard = origin, limits, tls, guard

    def connect(self) -> None:
        """Connect to the first address that answers."""
        addresses = socket.getaddrinfo(self._origin.host, self._origin.port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        # One limit for all addresses together: a name with many dead addresses must not multiply the waiting time.
        give_up = time.monotonic() + 2 * self._limits.connect
        for family, kind, protocol, _, address in addresses:
            # The check is made on the address that connect() uses. A second look-up could return another address (DNS
            # rebinding).
            if self._guard and not is_public(str(address[0])):
                raise SourceError(
                    f"{self._origin.netloc} has the private address {address[0]}; no link or redirect is followed to"
                    f" such an address;\nallow this host with CACHETOOL_ALLOW_HOSTS={self._origin.host}"
                )
            if failure and time.monotonic() > give_up:
                break
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._limits.connect)
                sock.connect(address)
                # As http.client's own connect() does, which this method replaces: Nagle's algorithm could delay small
                # requests.
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
        """True if the peer closed the idle connection, or sent something that nobody asked for."""
        if self.sock is None:
            return False
        # An idle connection has nothing to read. Anything there is the end of the connection, or an answer that nobody
        # asked for. That answer would be taken for the next one.
        return bool(ready(0, self.sock.fileno()))


class _Body:
    """The body of an answer. It may arrive in several attempts."""

    def __init__(self) -> None:
        self._file, self._length = io.BytesIO(), 0
        self.validator = ""
        """The strong ETag of the body, with quotes; empty: the next attempt begins again."""
        self.total: int | None = None

    def __len__(self) -> int:
        return self._length

    def clear(self) -> None:
        """Drop all bytes and begin again."""
        self._file.seek(0)
        self._file.truncate()
        self.validator, self.total, self._length = "", None, 0

    def append(self, part: bytes) -> None:
        """Add received bytes."""
        self._length += self._file.write(part)

    def as_memory(self) -> memoryview:
        """Return the received bytes."""
        return memoryview(self._file.getvalue())


class PageClient:
    """A client with one keep-alive connection for each thread and origin.

    Args:
        home: A URL of the origin that is trusted. Only this origin gets credentials.
        limits: How long the server is waited for.
        login: The credentials, as the value of the header ``Authorization``. None: send none.
        certificates: Path of a file with further certificate authorities to trust.
    """

    def __init__(
        self, home: str, limits: Limits, *, login: Login[str | None] | None = None, certificates: str | None = None
    ) -> None:
        self._home = origin_of(home)
        self._limits, self._login = limits, login
        self._allowed = allowed_hosts()
        self._tls = ssl.create_default_context()
        if certificates:
            self._tls.load_verify_locations(certificates)
        # Each thread has its own connections, because http.client's are not made for several threads.
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
        """Return the answer to a GET.

        Args:
            url: The URL.
            headers: Further headers.
            size: Bytes that an answer 200 must have; -1 if not known.
            most: Most bytes that are accepted.
            bodiless: If True, only the headers are wanted. The body of a 200 to a ``Range`` is never read.

        Raises:
            BadObject: If the body is not as promised, or the URL is none.
            Unreachable: If the server does not answer in time.
            SourceError: For a redirect that is not followed.
        """
        # The clock of `limits.retry`: it starts anew when an attempt made progress (below).
        began = time.monotonic()
        body, headers = _Body(), headers or {}
        attempt = had = refusals = 0
        while True:
            attempt += 1
            # Asked again before each attempt, because credentials may be renewed while a request is repeated for
            # minutes.
            credentials = self._login.now() if self._login is not None else None
            authorization = credentials.value if credentials is not None else None
            asked, answered = None, False
            patience = self._limits.retry
            failure: Exception | None = None
            try:
                response = self._attempt(url, {**_HEADERS, **headers}, body, size, most, authorization, bodiless)
            # No attempt can succeed with this URL. It usually comes from a listing, so the object is at fault and not
            # the server.
            except (http.client.InvalidURL, UnicodeEncodeError) as error:
                raise BadObject(f"{redact(url)[:200]!r} is not a URL") from error
            except (_Broken, OSError, http.client.HTTPException) as error:
                # A certificate does not become valid within seconds, and verification is never turned off.
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
                    # No pause here: login.renewed() waits if necessary, and a first refusal with new credentials is
                    # repeated at once.
                    if self._login.renewed(credentials, refusals):
                        retried()
                        continue
                if response.status not in _AGAIN:
                    return response
                why = f"the server answers {response.status}"
                # A busy server says nothing about the object. After other answers sources/blame.py may find that only
                # this object is at fault.
                answered = response.status not in (429, 503)
                if not answered:
                    patience = self._limits.throttle
                    asked = retry_after(response.headers.get("Retry-After"))
            # The connection broke, but it made progress. Only time without progress counts, so that a long transfer may
            # break many times.
            if len(body) - had > self._limits.min_rate * (time.monotonic() - began):
                began, attempt, had = time.monotonic(), 1, len(body)
            most_wait = min(30.0 if patience > self._limits.retry else 3.0, 0.1 * 2.0 ** min(attempt, 16))
            # Full jitter: 64 workers that were refused at the same moment must not come back at the same moment.
            pause = random.uniform(0, most_wait)
            # A Retry-After of 0 asks for an immediate repeat. Obeyed, it would repeat without pause for as long as the
            # server says so.
            if asked:
                pause = asked + random.uniform(0, min(most_wait, 1.0))
            # Checked before sleeping: no time is lost for an attempt that will not be made.
            if time.monotonic() - began + pause > patience:
                unreachable = Unreachable(f"{redact(url)}: {why}, {attempt} times in {time.monotonic() - began:.0f} s")
                unreachable.answered = answered
                raise unreachable from failure
            retried()
            time.sleep(pause)
            if patience == self._limits.throttle:
                paused(pause)

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
        # A part is never resumed: its request has a Range header of its own, so it begins again.
        of_part = "Range" in headers
        if len(body) and body.validator and not of_part:
            # If-Range: if the object changed, the server sends all of it with status 200, and the old bytes are
            # dropped.
            headers |= {"Range": f"bytes={len(body)}-", "If-Range": body.validator}
        else:
            body.clear()
        for _ in range(_MAX_HOPS + 1):
            origin, parts = origin_of(url), urlsplit(url)
            # Set anew for each hop: a redirect to another origin, even another port, must not receive the credentials.
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
                        # http.client follows no redirects. So each hop is checked here: no way from https to http, no
                        # private address.
                        url = _next_hop(url, target)
                        continue
                    if answer.status in (200, 206) and not bodiless and not (of_part and answer.status == 200):
                        resumed = bool(len(body)) and answer.status == 206
                        _receive(answer, body, size, most, url)
                        done = True
                        return Response(200 if resumed else answer.status, answer.headers, body.as_memory(), url)
                    # A short error page is read, so that the connection can be used again. A whole object in place of a
                    # part is not read: it may be large, so the connection is closed.
                    done = answer.status not in (200, 206) and len(answer.read(_PIECE)) < _PIECE
                    # The body broke off at its very end, or the object is a shorter one now. Only a whole answer can
                    # tell.
                    if answer.status == 416 and len(body):
                        body.clear()
                        raise _Broken("the server cannot send the rest of the object")
                    return Response(answer.status, answer.headers, memoryview(b""), url)
            finally:
                # The rest of an answer that was not read would be taken for the next answer on this connection.
                if not done:
                    connection.close()
        raise SourceError(f"{redact(url)}: more than {_MAX_HOPS} redirects")

    def _connection(self, origin: Origin) -> _Connection:
        pool: dict[Origin, _Connection] = self._local.__dict__.setdefault("pool", {})
        connection = pool.get(origin)
        if connection is None:
            # The user named the home and the allowed hosts. Any other origin comes from a redirect or manifest, which
            # must not reach private addresses.
            guard = origin != self._home and origin.host.lower() not in self._allowed
            connection = pool[origin] = _Connection(origin, self._limits, self._tls, guard=guard)
            with self._lock:
                self._all.append(connection)
        # The server closed the idle connection. Found here, the request does not fail and use up an attempt.
        elif connection.is_stale:
            connection.close()
        return connection

    def close(self) -> None:
        """Close every connection. May be called twice."""
        with self._lock:
            for connection in self._all:
                connection.close()


class _Watch:
    """A context manager that shuts a connection which brings too little while ``limits.grace`` passes.

    A server may send a byte now and then (in headers, in a body, between chunks), and :mod:`http.client` waits for each
    byte. So the time limit of the socket never ends such an answer.
    """

    def __init__(self, connection: _Connection, body: _Body, limits: Limits) -> None:
        self._connection, self._body, self._limits = connection, body, limits
        self._had, self._is_late = len(body), False

    def __enter__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._timer = threading.Timer(self._limits.grace, self._look)
        # A program that ends must not wait for the timers of its requests.
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        had, self._had = self._had, len(self._body)
        # Fast enough: look again after another `grace`.
        if self._had - had >= self._limits.min_rate * self._limits.grace:
            self._start()
            return
        self._is_late = True
        if self._connection.peer is not None:
            with contextlib.suppress(OSError):
                # shutdown() wakes the thread that reads; close() would leave it waiting. The method of the base class,
                # because SSLSocket.shutdown() would drop the TLS state under that thread.
                socket.socket.shutdown(self._connection.peer, socket.SHUT_RDWR)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        # A shut connection looks like a regular end of the body, so the error is raised in any case. Ctrl-C keeps its
        # own exception.
        if self._is_late and (kind is None or issubclass(kind, Exception)):
            raise _TooSlow(f"the answer is too slow (less than {self._limits.min_rate:g} bytes a second)")


def _receive(answer: http.client.HTTPResponse, body: _Body, size: int, most: int, url: str) -> None:
    """Append the body of ``answer`` to ``body``.

    Raises:
        _Broken: If the body is not complete yet.
        BadObject: If the body is not as promised.
    """
    length, end = answer.length, answer.length
    # Before the first byte is taken: a body with an unclear end could contain the answer of another request.
    _refuse_framing(answer, url)
    if len(body) and answer.status == 206:
        end = _continued(answer, body)
    else:
        if length is None and not answer.chunked and size < 0:
            # Without a length the end of the connection ends the body. A broken connection would look like a complete
            # object.
            raise BadObject(f"{redact(url)}: the server sends no length, so an incomplete answer cannot be noticed")
        if answer.status == 200 and size >= 0 and length not in (None, size):
            raise OtherSize(f"{redact(url)} has {length} bytes instead of {size}", length or 0)
        body.clear()
        etag = answer.headers.get("ETag", "")
        # Only a strong ETag proves equal bytes, and only with a known length can the end be checked.
        body.validator, body.total = etag if etag.startswith('"') and length is not None else "", length
    limit = size if size >= 0 and answer.status == 200 else max(size, most)
    while (end is None or len(body) < end) and max(end or 0, len(body)) <= limit:
        # read1() returns what has arrived, so _Watch sees progress; read() would block until the piece is full.
        if not (piece := answer.read1(_PIECE if end is None else min(_PIECE, end - len(body)))):
            break
        body.append(piece)
    if max(end or 0, len(body)) > limit:
        raise BadObject(f"{redact(url)}: the server sends more than {limit} bytes, the most that is accepted")
    whole = body.total or end
    if whole is not None and len(body) < whole:
        raise _Broken(f"the connection ended after {len(body)} of {whole} bytes")
    # This read also lets http.client see the end of the body, so that the connection can be used again.
    if end is not None and answer.read(1):
        raise _Broken("the server sent more bytes than it announced")


def _continued(answer: http.client.HTTPResponse, body: _Body) -> int:
    """Return the offset at which the part ends that an answer brings for the rest of a body."""
    said = re.fullmatch(rf"bytes {len(body)}-([0-9]{{1,18}})/{body.total}", answer.headers.get("Content-Range", ""))
    end = int(said[1]) + 1 if said else 0
    # Some servers know Range but not If-Range, and continue with the bytes of another version.
    same = answer.headers.get("ETag") == body.validator
    if not same or not len(body) < end <= (body.total or 0) or answer.length not in (None, end - len(body)):
        body.clear()
        raise _Broken("the server continues with another version of the object, or at another offset")
    return end


def _refuse_framing(answer: http.client.HTTPResponse, url: str) -> None:
    """Raise :class:`BadObject` if the headers leave open where the body ends (RFC 9112, section 6.3)."""

    def said(name: str) -> set[str]:
        return {value.strip().lower() for value in answer.headers.get_all(name, ())} - {""}

    refuse_encoded(redact(url), ",".join(said("Content-Encoding")))
    coded = said("Transfer-Encoding")
    lengths = {part.strip().lstrip("0") for value in said("Content-Length") for part in value.split(",")}
    if len(lengths) > 1 or not (coded == {"chunked"} if answer.chunked else coded <= {"identity"}):
        # http.client takes the first of several headers, and ignores values that it does not know. The end of the body
        # would be a guess.
        raise BadObject(f"{redact(url)}: Content-Length and Transfer-Encoding do not say clearly where the answer ends")


def _next_hop(url: str, target: str) -> str:
    try:
        parts = urlsplit(urljoin(url, target))
        if parts.scheme in ("http", "https"):
            # http.client cannot send such a host, and its error would be a UnicodeError in the middle of the request.
            if not (parts.hostname or "").isascii():
                raise ValueError("no host")
            origin_of(parts.geturl())
    except (ValueError, UsageError):
        raise SourceError(
            f"{redact(url)}: redirected to {redact(printable(target[:200]))!r}, which is not a URL"
        ) from None
    if parts.scheme not in ("http", "https"):
        raise SourceError(f"{redact(url)}: redirected to {parts.scheme}://, which is not followed")
    if urlsplit(url).scheme == "https" and parts.scheme == "http":
        raise SourceError(f"{redact(url)}: redirected from https to http, which is not followed")
    # http.client reads headers as Latin-1. Raw bytes in the target are escaped as just these bytes, as browsers do.
    path, query = (written(part, encoding="latin-1") for part in (parts.path, parts.query))
    # User info in a redirect is dropped: a server must not choose the credentials that are sent.
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query=query, fragment="").geturl()


def _reason(error: Exception) -> str:
    if isinstance(error, _Broken | _TooSlow):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.HTTPException):
        return f"the connection ended early or the answer is not HTTP ({type(error).__name__})"
    return f"no connection ({getattr(error, 'strerror', None) or type(error).__name__})"


def told_size(text: str) -> int:
    """Return the number of bytes in a header; -1 if the text is no number, or has more digits than any file size."""
    return int(text) if _SIZE.fullmatch(text) else -1


def retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Return the seconds in a ``Retry-After`` header, clamped to [0, 300]; None if it is absent or senseless."""
    if value is None:
        return None
    try:
        seconds = float(value.strip())
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError):
            return None
    # NaN, which float() accepts, differs from itself.
    return None if seconds != seconds else min(max(seconds, 0.0), _MAX_RETRY_AFTER)
