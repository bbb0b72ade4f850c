"""obstore's errors told apart: which of our errors it is, in words that quote no server's text.

obstore has a class for a missing object and for a refusal on a single object; everything else is ``GenericError`` with
the facts in its text: ``Server returned non-2xx status code: 404 ...: <Error><Code>NoSuchBucket</Code>``, ``HTTP error:
error sending request``. Servers echo keys and signatures in their messages, so only the code is taken.
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
from cachetool.stores.redact import printable, scrub
from cachetool.stores.traffic import retried

__all__ = ["Patience", "as_our_error"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
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
"""What the servers that give tokens for keys say of keys that they do not take any more."""


class Patience:
    """With a store that says "slow down": obstore asks again for ``limits.retry``, which is seconds, as it does for all
    that fails."""

    def __init__(self, limits: Limits) -> None:
        self._until = time.monotonic() + limits.throttle
        self._attempt = 0
        self.refusals = 0
        """How often this request was refused."""

    def with_(self, error: Exception) -> bool:
        """Wait a while because of ``error``, after which the same can be asked for again; False when it cannot."""
        status = _STATUS.search(str(error))
        if status is None or int(status.group(1)) not in _SLOW_DOWN:
            return False
        self._attempt += 1
        pause = random.uniform(0, min(30.0, 2.0**self._attempt))
        if time.monotonic() + pause > self._until:
            return False
        retried()
        time.sleep(pause)
        return True


def as_our_error(error: Exception, *, place: str, key: str | None = None) -> CacheToolError:
    """The error of ours that says the same as obstore's ``error``.

    ``place`` is the store's URL as it may be shown, ``key`` the object that was asked for, None for a listing.
    """
    if isinstance(error, CacheToolError):
        return error
    name = type(error).__name__
    text = str(error).partition("\n\nDebug source")[0]
    status = int(match.group(1)) if (match := _STATUS.search(text)) else 0
    code = match.group(1) if (match := _CODE.search(text)) else ""
    what = f"{place}: {key!r}" if key is not None else place
    if name == "InvalidPathError":
        bad = _between(text, 'Path "', '" contained') or _between(text, 'parsing Path "', '": ') or key or ""
        return BadObject(
            f"{place}: key {bad!r} cannot be fetched: it has an empty, '.' or '..' part or a control character;\n"
            "name a longer prefix, without such a key"
        )
    if not code and status in (400, 401) and (match := _GRANT.search(text)):
        code = match.group(1)
    said = " ".join(filter(None, [str(status) if status else "", code]))
    if code in _CLOCK:
        return AccessDenied(f"{what}: refused ({said}): the clock of this machine is wrong")
    if code == "NoSuchBucket" or (key is None and (isinstance(error, FileNotFoundError) or status in (404, 410))):
        return NotFound(f"{place}: no such bucket or container{f' ({said})' if said else ''}")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return NotFound(f"{what}: not found")
    if code in _EXPIRED:
        return AccessDenied(
            f"{what}: access denied ({said}): the credentials have run out, and there are no others yet; renew them"
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
        failing = Unreachable(f"{what}: the server fails ({said}), also when asked again")
        failing.answered = True
        return failing
    if status:
        return SourceError(f"{what}: the server refuses the request ({said})")
    if "Content-Length Header missing" in text:
        packed = (
            " as what Google stores with Content-Encoding: gzip and unpacks on the way," if place[:2] == "gs" else ""
        )
        return BadObject(
            f"{what} comes without a length,{packed} and cannot be checked: copy such objects to a folder, unpacked"
        )
    if "HTTP error" in text or "error sending request" in text or "timed out" in text or "error decoding" in text:
        host = match.group(2) if (match := _ENDPOINT.search(text)) else ""
        at = f" at {printable(host)}" if host else ""
        return Unreachable(f"{what}: no answer{at}; check the endpoint, the network and the proxy settings")
    if isinstance(error, ValueError) or name in ("UnknownConfigurationKeyError", "NotSupportedError"):
        return UsageError(f"{what}: {_line(text)}")
    return SourceError(f"{what}: {_line(text)}")


def _between(text: str, before: str, after: str) -> str:
    """What stands between the first ``before`` and the last ``after``; empty where they are not there."""
    start, stop = text.find(before) + len(before), text.rfind(after)
    return text[start:stop] if before in text and stop > start else ""


def _line(text: str) -> str:
    """The first line of a message, scrubbed and cut."""
    return scrub(text.strip().partition("\n")[0])[:200]
