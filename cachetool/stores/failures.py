"""Translation of obstore's errors into errors of cachetool. The messages quote no text of a server.

obstore has a class for a missing object and one for a refusal of a single object. Every other error is a
``GenericError`` with the facts in its text, such as ``Server returned non-2xx status code: 404 ...:
<Error><Code>NoSuchBucket</Code>`` or ``HTTP error: error sending request``.
"""

from __future__ import annotations

import random
import re
import time

from cachetool.core.errors import (
    AccessDenied,
    BadObject,
    CacheToolError,
    NotFound,
    SourceError,
    Unreachable,
    UsageError,
)
from cachetool.stores.base import CHANGED, Limits
from cachetool.stores.bounded import TooMuch
from cachetool.stores.redact import printable, scrub
from cachetool.stores.traffic import paused, retried

__all__ = ["Patience", "as_our_error"]

_STATUS = re.compile(r"status code: (\d{3})")
# Only the code of the server's XML is taken: servers echo keys and signatures of the request in the text beside it.
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
# The user info is a group of its own so that a message names the host alone.
_ENDPOINT = re.compile(r"https?://([^/\s\"'?#@]+@)?([^/\s\"'?#]+)")
_SLOW_DOWN = (429, 503)
_CLOCK = ("RequestTimeTooSkewed",)
_EXPIRED = (
    "ExpiredAuthenticationToken",
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "TokenRefreshRequired",
)
_REFUSALS = (
    *_EXPIRED,
    "AccessDenied",
    "AuthFailure",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidIdentityToken",
    "InvalidSecurity",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
    "UnsupportedAlgorithm",
)
_GRANT = re.compile(r"\b(invalid_grant|invalid_client|unauthorized_client|invalid_token|expired_token)\b")
"""Codes with which token servers refuse the keys that a token is asked for with."""


class Patience:
    """Waits of one request for a store that says "slow down".

    obstore repeats such a request only for ``limits.retry`` seconds, as after any other error. This class waits for up
    to ``limits.throttle`` seconds.
    """

    def __init__(self, limits: Limits) -> None:
        self._until = time.monotonic() + limits.throttle
        self._attempt = 0
        self.refusals = 0
        """Number of times that this request was refused for its credentials."""

    def with_(self, error: Exception) -> bool:
        """Wait because of ``error`` and return True if the request may be repeated then; return False at once
        otherwise."""
        status = _STATUS.search(str(error))
        if status is None or int(status.group(1)) not in _SLOW_DOWN:
            return False
        self._attempt += 1
        # Full jitter: workers that were refused at the same moment must not all come back at the same moment.
        pause = random.uniform(0, min(30.0, 2.0**self._attempt))
        # Checked before sleeping, so that the pull does not wait half a minute for an attempt that will not be made.
        if time.monotonic() + pause > self._until:
            return False
        retried()
        time.sleep(pause)
        paused(pause)
        return True


def as_our_error(error: Exception, *, place: str, key: str | None = None) -> CacheToolError:
    """Return the error of cachetool that means the same as obstore's ``error``.

    ``place`` is the store's URL as it may be shown. ``key`` is the object that was asked for; None for a listing.
    """
    name = type(error).__name__
    # Behind this mark obstore prints the debug form of its error, which repeats the request and the server's answer.
    text = str(error).partition("\n\nDebug source")[0]
    status = int(match.group(1)) if (match := _STATUS.search(text)) else 0
    code = match.group(1) if (match := _CODE.search(text)) else ""
    what = f"{place}: {key!r}" if key is not None else place
    if name == "InvalidPathError":
        # The key is taken out of the error text because a listing fails as a whole, and nobody knows which key it met.
        bad = _between(text, 'Path "', '" contained') or _between(text, 'parsing Path "', '": ') or key or ""
        return BadObject(
            f"{place}: key {bad!r} cannot be fetched: it has an empty, '.' or '..' part or a control character;\n"
            "use a longer prefix, without such keys"
        )
    # Servers of tokens answer in JSON, without a <Code>. Such a 400 would otherwise count as a bad request, and nobody
    # would read the credentials again.
    if not code and status in (400, 401) and (match := _GRANT.search(text)):
        code = match.group(1)
    said = " ".join(filter(None, [str(status) if status else "", code]))
    # Before the other refusals: the credentials are right, and renewing them would not help.
    if code in _CLOCK:
        return AccessDenied(f"{what}: request refused ({said}): the clock of this machine is wrong; set it")
    # A missing bucket answers 404 for each object. Taken for a missing object, `--on-error skip` would leave out one
    # object after the other.
    if code == "NoSuchBucket" or (key is None and (isinstance(error, FileNotFoundError) or status in (404, 410))):
        return NotFound(f"{place}: no such bucket or container{f' ({said})' if said else ''}")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return NotFound(f"{what}: not found")
    # Before the other refusals, because the user has to renew these credentials instead of looking for a wrong one.
    if code in _EXPIRED:
        return AccessDenied(
            f"{what}: access denied ({said}): the credentials have expired, and no new ones were found; renew them"
        )
    granted = _GRANT.fullmatch(code)
    if (
        granted
        or name in ("PermissionDeniedError", "UnauthenticatedError")
        or status in (401, 403)
        or code in _REFUSALS
    ):
        return AccessDenied(
            f"{what}: access denied{f' ({said})' if said else ''}; check the credentials in the environment"
        )
    if name == "PreconditionError" or status == 412:
        return BadObject(f"{what} changed since it was listed;{CHANGED}")
    if "redirect without LOCATION" in text or status in (301, 307):
        return SourceError(f"{what}: the bucket is in another region; set AWS_REGION")
    if status == 416:
        return BadObject(f"{what} is shorter than when it was listed")
    if status in _SLOW_DOWN:
        return Unreachable(f"{what}: the store keeps answering 'slow down' ({said}); try later or with fewer workers")
    if status >= 500:
        failing = Unreachable(f"{what}: the server answered each attempt with an error ({said})")
        # The store did answer, so sources/blame.py may try another object, and find that only this object is at fault.
        failing.answered = True
        return failing
    if status:
        return SourceError(f"{what}: the server refuses the request ({said})")
    # Google unpacks such objects on the way and then states no length. A body without a length cannot be told from one
    # that was cut short.
    if "Content-Length Header missing" in text:
        cause = " (Google unpacks objects with Content-Encoding: gzip while it sends them)" if place[:2] == "gs" else ""
        return BadObject(
            f"{what}: the store does not send its length, so an incomplete copy cannot be noticed{cause}; copy such"
            " objects to a folder and unpack them there"
        )
    if "HTTP error" in text or "error sending request" in text or "timed out" in text or "error decoding" in text:
        # Only the host is quoted: path and query of the URL in the error may hold a signature.
        host = match.group(2) if (match := _ENDPOINT.search(text)) else ""
        at = f" at {printable(host)}" if host else ""
        return Unreachable(f"{what}: no answer{at}; check the endpoint, the network and the proxy settings")
    if isinstance(error, TooMuch):
        return SourceError(f"{what}: {error}; check the endpoint and the network")
    if isinstance(error, ValueError) or name in ("UnknownConfigurationKeyError", "NotSupportedError"):
        return UsageError(f"{what}: {_line(text)}")
    return SourceError(f"{what}: {_line(text)}")


def _between(text: str, before: str, after: str) -> str:
    """Return the text between the first ``before`` and the last ``after``; empty if one of them is missing."""
    start, stop = text.find(before) + len(before), text.rfind(after)
    return text[start:stop] if before in text and stop > start else ""


def _line(text: str) -> str:
    """Return the first line of a message, without secrets, at most 200 characters."""
    return scrub(text.strip().partition("\n")[0])[:200]
