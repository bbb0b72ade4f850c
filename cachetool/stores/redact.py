"""What may be shown of a URL or of somebody else's message: no secrets, no terminal control codes.

Everything that leaves this package as text (``Store.url``, error messages) went through here. A message of a library or
a server is not repeated as it came: stores pick the known facts out of it, and what they quote is scrubbed first.
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
"""Letters of the longest name of a host (RFC 1035)."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# The part before the @ is the container there, not a user.
_CONTAINER_BEFORE_AT = ("abfs", "abfss", "wasb", "wasbs", "adl")
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]*\](:\d*)?")
_WITHOUT_PORT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf")
_WITH_USER = ("http", "https", "sftp", "ssh", "ftp", "ftps", "smb", "webdav", "webdavs", *_WITHOUT_PORT)
# What stands before the @ is a repository and its like there: part of the place, but shown nowhere, for all we know.
_PLACE_BEFORE_AT = ("github", "git")
# What servers write goes through these: each run of characters is looked at once, from its beginning to its end.
_URL_IN_TEXT = re.compile(r"(?<![A-Za-z0-9+.-])([0-9+.-]*+)([A-Za-z0-9+.-]++://[^\s\"'<>|\\]++)")
_ASSIGNED = re.compile(r"(?<![\w-])([\w-]++)(\s*+[=:]\s*+)(?:\"[^\"]*+\"|[^\s&;,\"']++)")
_SECRET_NAME = re.compile(
    r"(?i)signature|credential|token|password|passwd|secret|access[_-]?key|account[_-]?key|accesskeyid|(?<!\w)sig\Z"
)
_SIGNS = re.compile(r"(?i)(x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|key-pair-id|signature|sig|token)$")
# These select content as often as they sign: they count beside what is certainly a signature (Azure; S3, CloudFront).
_SIGNS_BESIDE = {
    "sig": frozenset(
        {"sv", "ss", "srt", "sp", "se", "st", "spr", "sr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv"}
    ),
    "signature": frozenset({"expires", "policy"}),  # CloudFront, S3, Google
}
_AUTHORIZATION = re.compile(r"(?i)\b(authorization\s*+:?+\s*+)[^\r\n]++")
_AUTH_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s++[A-Za-z0-9+/=._~-]{6,}+")


def split_url(url: str) -> tuple[str, str]:
    """The scheme in lower case and what follows ``://``; an empty scheme for a plain path."""
    match = _SCHEME.match(url)
    return (match.group(1).lower(), url[match.end() :]) if match else ("", url)


def usable_host(name: str) -> bool:
    """Whether a host can be called so: a resolver encodes each part of the name, and some cannot be."""
    try:
        return len(name.encode("idna")) <= _HOST
    except UnicodeError:
        return False


def printable(text: str) -> str:
    """``text`` with everything that a terminal could act on (control, direction, line ends) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _hides_user(url: str) -> bool:
    """Whether user info seems to hold a ``/``, ``?`` or ``#`` as it is, before which a parser of URLs ends it: keys of
    AWS have slashes. The rest of it would be taken for a path, and shown."""
    scheme, location = split_url(url)
    place = re.split(r"[/?#]", location, maxsplit=1)[0]
    after = location[len(place) :]
    place = place.rpartition("@")[2]
    if scheme not in _WITH_USER or ":" not in place or "@" not in after or _ADDRESS.fullmatch(place):
        return False
    return not place.rpartition(":")[2].isdigit() or after[0] in "?#" or scheme in _WITHOUT_PORT


def refuse_hidden_user(url: str) -> None:
    """Raise :class:`UsageError` for user info that would be taken for something else."""
    if _hides_user(url):
        advice = "in a user name or a password / is written %2F, ? %3F, # %23 and @ %40"
        if split_url(url)[0] in _WITHOUT_PORT:
            advice = "user info does not belong in it, credentials come from the environment"
        raise UsageError(f"{redact(url)!r}: {advice}")


def redact(url: str) -> str:
    """``url`` without user info, query and fragment, fit to be shown and stored; a plain path stays as it is."""
    scheme, location = split_url(url)
    if not scheme:  # a plain path, or chained URLs such as x::s3://...
        return printable(_redact_urls(url))
    if _hides_user(url):
        first, query = re.search(r"[/?#]", location), re.search(r"[?#]", location)
        if first is not None and query is not None and "@" in location[: query.start()]:
            host = location[: first.start()].rpartition("@")[2]
            if "@" in location[first.start() : query.start()] or re.fullmatch(r"[^:]+(:\d*)?", host):
                location = location[: query.start()]
        location = location.rpartition("@")[2]
        if not re.match(r"[\w.:\[\]-]*([/?#]|\Z)", location):  # no host: rather a query, with what is in it
            return f"{scheme}://***"
    if scheme != "file":
        # Keys have a # like any other character; before the first slash there is no key yet.
        ends = r"\?|^[^/?]*?#" if scheme in _WITHOUT_PORT else r"[?#]"
        if (end := re.search(ends, location)) is not None:
            location = location[: end.end() - 1]
    place, slash, path = location.partition("/")
    before, at, host = place.rpartition("@")
    if at and not (scheme in _CONTAINER_BEFORE_AT and ":" not in before and "@" not in before):
        place = host
    return printable(f"{scheme}://{place}{slash}{path}")


def canonical(url: str) -> str:
    """One spelling for one place, to be hashed and never shown: two URLs are the same source when these are equal.

    A local path is resolved; elsewhere user info, a fragment of the web and a slash at the end say nothing. Of the
    query what signs a request (it changes from day to day) is left out, but not that it was signed: what is shown of
    such a URL is another place, so that nobody fetches from there in its stead.
    """
    scheme, location = split_url(url)
    if not scheme or scheme == "file":
        path = url if not scheme else unquote("/" + location.partition("/")[2])
        return f"file://{os.path.realpath(path)}"
    web = scheme in ("http", "https")  # elsewhere a # is part of a name
    parts = [part for part in (location.partition("#")[0] if web else location).partition("?")[2].split("&") if part]
    names = {part: part.partition("=")[0].lower() for part in parts}
    beside = {name for sign, more in _SIGNS_BESIDE.items() if sign in names.values() for name in more}
    kept = [part for part in parts if not (_SIGNS.match(names[part]) or names[part] in beside)]
    kept.sort(key=names.__getitem__)  # of a name that is there twice, the order may tell
    signed = "#signed" if len(kept) < len(parts) else ""
    before = location.partition("/")[0].rpartition("@")[0] if scheme in _PLACE_BEFORE_AT else ""
    named = location.partition("#")[1:] if not web and scheme not in _WITHOUT_PORT else ("", "")
    return f"{redact(url).rstrip('/')}?{'&'.join(kept)}{signed}{''.join(named)}{f'@{before}' if before else ''}"


def _redact_urls(text: str) -> str:
    return _URL_IN_TEXT.sub(lambda match: match[1] + redact(match[2]), text)


def scrub(text: str) -> str:
    """Somebody else's message without the secrets it may quote: URLs redacted, ``token=...`` and headers blanked, and
    no value of a credential variable of this process left in it."""
    text = _redact_urls(text)
    text = _AUTHORIZATION.sub(r"\1***", text)
    text = _ASSIGNED.sub(lambda match: f"{match[1]}{match[2]}***" if _SECRET_NAME.search(match[1]) else match[0], text)
    text = _AUTH_SCHEME.sub(r"\1 ***", text)
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= 4:
            for form in (value, quote(value, safe=""), quote(value), unquote(value)):
                text = text.replace(form, "***")
    return printable(text)
