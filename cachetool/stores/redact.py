"""Removal of secrets and terminal control codes from URLs and from messages of others.

All text that leaves this package (``Store.url``, error messages) passes through this module. Messages of libraries and
servers are not repeated as they came. Stores pick the known facts out of them, and quoted parts are scrubbed first.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote

from cachetool.core.errors import UsageError

__all__ = [
    "SECRET_VARIABLES",
    "canonical",
    "printable",
    "redact",
    "refuse_hidden_user",
    "scrub",
    "split_url",
    "usable_host",
]

SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "HF_TOKEN",
)
"""Environment variables whose values must never be shown."""

_HOST = 253
"""Most characters of a host name (RFC 1035)."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# In these schemes the part before the `@` is a container, not a user. Cut off, the shown URL would name no place.
_CONTAINER_BEFORE_AT = ("abfs", "abfss", "wasb", "wasbs", "adl")
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]*\](:\d*)?")
_WITHOUT_PORT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf")
_WITH_USER = ("http", "https", "sftp", "ssh", "ftp", "ftps", "smb", "webdav", "webdavs", *_WITHOUT_PORT)
# In these schemes of fsspec a repository or the like stands before the `@`: part of the place, so canonical() keeps it.
# It may also be a secret, so it is never shown.
_PLACE_BEFORE_AT = ("github", "git")
# Messages of servers pass through these patterns. All quantifiers are possessive, so that each run of characters is
# looked at once: a hostile message of 10 MB must not take quadratic time.
_URL_IN_TEXT = re.compile(r"(?<![A-Za-z0-9+.-])([0-9+.-]*+)([A-Za-z0-9+.-]++://[^\s\"'<>|\\]++)")
_ASSIGNED = re.compile(r"(?<![\w-])([\w-]++)(\s*+[=:]\s*+)(?:\"[^\"]*+\"|[^\s&;,\"']++)")
_SECRET_NAME = re.compile(
    r"(?i)signature|credential|token|password|passwd|secret|access[_-]?key|account[_-]?key|accesskeyid|(?<!\w)sig\Z"
)
_SIGNS = re.compile(r"(?i)(x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|key-pair-id|signature|sig|token)$")
# These parameters select content as often as they sign. Alone they stay, because otherwise two contents would be one
# source. Beside a parameter that is certainly a signature (Azure; S3, CloudFront) they belong to it.
_SIGNS_BESIDE = {
    "sig": frozenset(
        {"sv", "ss", "srt", "sp", "se", "st", "spr", "sr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv"}
    ),
    "signature": frozenset({"expires", "policy"}),  # CloudFront, S3, Google
}
_AUTHORIZATION = re.compile(r"(?i)\b(authorization\s*+:?+\s*+)[^\r\n]++")
_AUTH_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s++[A-Za-z0-9+/=._~-]{6,}+")


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into its scheme and the rest.

    Args:
        url: A URL or a plain path.

    Returns:
        The scheme in lower case, and the text behind ``://``. The scheme of a plain path is empty.

    Example:
        >>> split_url("S3://bucket/train")
        ('s3', 'bucket/train')
        >>> split_url("data/train")
        ('', 'data/train')
    """
    match = _SCHEME.match(url)
    return (match.group(1).lower(), url[match.end() :]) if match else ("", url)


def usable_host(name: str) -> bool:
    """Return True if a resolver can look up this host name: it encodes each part, and some parts cannot be encoded."""
    try:
        # The idna codec raises for an empty or overlong part. A resolver encodes each host name so, and would raise the
        # same UnicodeError in the middle of a request.
        return len(name.encode("idna")) <= _HOST
    except UnicodeError:
        return False


def printable(text: str) -> str:
    """Return ``text`` with each character that a terminal acts on (control, direction, line end) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _hides_user(url: str) -> bool:
    """Return True if user info seems to hold a raw ``/``, ``?`` or ``#``.

    A parser of URLs ends the user info there, and takes the rest of the password for a path. Secret keys of AWS have
    slashes.
    """
    scheme, location = split_url(url)
    place = re.split(r"[/?#]", location, maxsplit=1)[0]
    after = location[len(place) :]
    # An `@` before the first slash ends user info that is well written; only the host and port behind it are judged.
    place = place.rpartition("@")[2]
    if scheme not in _WITH_USER or ":" not in place or "@" not in after or _ADDRESS.fullmatch(place):
        return False
    # host:8080/a@b is an ordinary path with an `@`, so digits behind the colon count as a port. Object stores have no
    # ports: with them digits are the beginning of a password.
    return not place.rpartition(":")[2].isdigit() or after[0] in "?#" or scheme in _WITHOUT_PORT


def refuse_hidden_user(url: str) -> None:
    """Raise :class:`UsageError` for a URL whose user info a parser would take for a path, query or fragment."""
    if _hides_user(url):
        advice = "in a user name or a password write / as %2F, ? as %3F, # as %23 and @ as %40"
        if split_url(url)[0] in _WITHOUT_PORT:
            advice = "user info does not belong in this URL; credentials come from the environment"
        raise UsageError(f"{redact(url)!r}: {advice}")


def redact(url: str) -> str:
    """Remove user info, query and fragment from a URL, so that it may be shown and stored.

    Args:
        url: A URL or a plain path.

    Returns:
        The URL without secrets, with control characters as escapes. A plain path keeps its text.

    Example:
        >>> redact("https://me:password@host/data?X-Amz-Signature=abc")
        'https://host/data'
    """
    scheme, location = split_url(url)
    # A plain path, or chained URLs of fsspec such as simplecache::s3://..., where a URL with its secrets stands in the
    # middle of the text.
    if not scheme:
        return printable(_redact_urls(url))
    if _hides_user(url):
        first, query = re.search(r"[/?#]", location), re.search(r"[?#]", location)
        if first is not None and query is not None and "@" in location[: query.start()]:
            host = location[: first.start()].rpartition("@")[2]
            if "@" in location[first.start() : query.start()] or re.fullmatch(r"[^:]+(:\d*)?", host):
                location = location[: query.start()]
        location = location.rpartition("@")[2]
        # No host stands behind the last `@`, so that `@` was part of a query, whose text may be the secret. Nothing is
        # shown then.
        if not re.match(r"[\w.:\[\]-]*([/?#]|\Z)", location):
            return f"{scheme}://***"
    if scheme != "file":
        # Keys of object stores may contain a `#` like any other character. Before the first slash there is no key yet,
        # so a `#` there ends the text that may be shown.
        ends = r"\?|^[^/?]*?#" if scheme in _WITHOUT_PORT else r"[?#]"
        if (end := re.search(ends, location)) is not None:
            location = location[: end.end() - 1]
    place, slash, path = location.partition("/")
    before, at, host = place.rpartition("@")
    if at and not (scheme in _CONTAINER_BEFORE_AT and ":" not in before and "@" not in before):
        place = host
    return printable(f"{scheme}://{place}{slash}{path}")


def canonical(url: str) -> str:
    """Return one spelling for all URLs of one place. Two URLs are the same source if their spellings are equal.

    The result may hold secrets: it is hashed, and never shown. A local path is resolved. In other URLs user info, a web
    fragment and a slash at the end are left out. Parameters that sign a request are left out as well, because they
    change from day to day.

    Args:
        url: A URL or a plain path.

    Returns:
        The spelling. It ends with ``#signed`` if a signature was left out. So the redacted URL is another place, and a
        repair does not fetch from there.

    Example:
        >>> canonical("https://me:password@host/data/?b=2&a=1&X-Amz-Signature=abc")
        'https://host/data?a=1&b=2#signed'
    """
    scheme, location = split_url(url)
    if not scheme or scheme == "file":
        path = url if not scheme else unquote("/" + location.partition("/")[2])
        return f"file://{os.path.realpath(path)}"
    # A `#` begins a fragment on the web only. In other places it is part of a key, and cutting it off would join two
    # sources.
    web = scheme in ("http", "https")
    parts = [part for part in (location.partition("#")[0] if web else location).partition("?")[2].split("&") if part]
    names = {part: part.partition("=")[0].lower() for part in parts}
    beside = {name for sign, more in _SIGNS_BESIDE.items() if sign in names.values() for name in more}
    kept = [part for part in parts if not (_SIGNS.match(names[part]) or names[part] in beside)]
    # Only the names are sorted. If a name comes twice, the order of its values may matter, and a stable sort keeps it.
    kept.sort(key=names.__getitem__)
    # A repair knows only the shown URL. The mark makes that URL another source, so that nothing is fetched from it in
    # place of the signed one.
    signed = "#signed" if len(kept) < len(parts) else ""
    before = location.partition("/")[0].rpartition("@")[0] if scheme in _PLACE_BEFORE_AT else ""
    named = location.partition("#")[1:] if not web and scheme not in _WITHOUT_PORT else ("", "")
    return f"{redact(url).rstrip('/')}?{'&'.join(kept)}{signed}{''.join(named)}{f'@{before}' if before else ''}"


def _redact_urls(text: str) -> str:
    return _URL_IN_TEXT.sub(lambda match: match[1] + redact(match[2]), text)


def scrub(text: str) -> str:
    """Remove the secrets from a message of a library or server.

    URLs are redacted. The values of ``token=...``, of headers and of this process's credential variables become
    ``***``.

    Args:
        text: The message.

    Returns:
        The message without secrets, with control characters as escapes.

    Example:
        >>> scrub("GET https://me:password@host/a?sig=x failed; token=abcdef")
        'GET https://host/a failed; token=***'
    """
    text = _redact_urls(text)
    text = _AUTHORIZATION.sub(r"\1***", text)
    text = _ASSIGNED.sub(lambda match: f"{match[1]}{match[2]}***" if _SECRET_NAME.search(match[1]) else match[0], text)
    text = _AUTH_SCHEME.sub(r"\1 ***", text)
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        # A shorter value occurs in ordinary words by accident, and replacing it would make the message unreadable.
        if len(value) >= 4:
            # A server may quote the secret as it was typed or as it was escaped in the URL, so all its forms are
            # replaced.
            for form in (value, quote(value, safe=""), quote(value), unquote(value)):
                text = text.replace(form, "***")
    return printable(text)
