"""A listing of a bucket made without obstore, for buckets with keys that obstore cannot name.

obstore returns none of the other keys then. This module lists S3 and, without a signature, Google Cloud Storage. Keys
with an empty, ``.`` or ``..`` part or a control character are left out by name. Requests are signed as described in
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

from cachetool.core.errors import AccessDenied, NotFound, SourceError
from cachetool.stores.base import LeftOut, Limits
from cachetool.stores.http_pages import PageClient

__all__ = ["BucketList", "unusable"]

_PAGE_BYTES = 2**26
_PART = re.compile(r"\.{0,2}|.*[\x00-\x1f\x7f].*", re.DOTALL)
# Longer than `limits.throttle` (600 s): the same signed request is sent again for so long while the server is too busy.
_EXPIRES = "900"
"""Seconds for which a signed request is valid."""
_SAFE = "-_.~"
REASON = "keys that cannot be requested"


def unusable(key: str) -> bool:
    """Return True if obstore cannot name a key: it begins with a slash, or has a part that :data:`_PART` matches."""
    return any(_PART.fullmatch(part) for part in key.split("/"))


class BucketList:
    """The keys of one bucket below a prefix.

    Args:
        place: The store's URL as it may be shown.
        url: The URL of the bucket.
        prefix: The prefix, without a slash at its end.
        keys: ``region``, ``access_key_id`` and the like, named as in :func:`cachetool.stores.credentials.s3_options`.
            Empty: sign nothing.
        limits: How long the server is waited for.
    """

    def __init__(self, place: str, url: str, prefix: str, keys: Mapping[str, str], limits: Limits) -> None:
        self._place, self._url, self._keys = place, url, keys
        self._prefix = f"{prefix}/" if prefix else ""
        self._limits = limits

    def pages(self, after: str | None, left_out: LeftOut, upto: str | None = None) -> Iterator[list[dict[str, Any]]]:
        """Yield pages of the objects behind the key ``after``, in the form that obstore has.

        Objects without a usable key are added to ``left_out`` if they lie at or before ``upto``.
        """
        client = PageClient(self._url, self._limits, certificates=os.environ.get("AWS_CA_BUNDLE"))
        # encoding-type=url: a key may hold control characters, which XML cannot contain. The server then escapes all
        # keys.
        query = {"list-type": "2", "encoding-type": "url", "prefix": self._prefix}
        if after is not None:
            query["start-after"] = self._prefix + after
        seen: set[str] = set()
        try:
            while True:
                answer = self._answer(client, query)
                page = [_object(entry, len(self._prefix), answer) for entry in _all(answer, "Contents")]
                # A copy of the list, because unusable items are removed from the page meanwhile.
                for item in [item for item in page if unusable(item["path"])]:
                    page.remove(item)
                    # Keys above `upto` belong to another range of the same list (`--list-workers`), which counts them
                    # itself.
                    if upto is not None and item["path"] > upto:
                        continue
                    if item["path"].endswith("/") and not item["size"] and not unusable(item["path"][:-1]):
                        # A marker `name/` of 0 bytes is a console's idea of a folder. It holds no data, so it is
                        # counted but not named.
                        left_out["folder markers"] += 1
                    elif item["path"] or item["size"]:
                        left_out.add(item["path"], REASON, _WHY)
                yield page
                token = _text(answer, "NextContinuationToken")
                if _text(answer, "IsTruncated") != "true" or not token:
                    return
                # A hostile or broken server may name the same next page for ever.
                if token in seen:
                    raise SourceError(
                        f"{self._place}: the listing repeats itself: an earlier page is named as the next page"
                    )
                seen.add(token)
                # The token already says where the next page begins; start-after belongs to the first request only.
                query.pop("start-after", None)
                query["continuation-token"] = token
        finally:
            client.close()

    def _answer(self, client: PageClient, query: Mapping[str, str]) -> ElementTree.Element:
        if self._keys.get("access_key_id"):
            query = _signed(self._url, query, self._keys)
        response = client.fetch(f"{self._url}?{_written(query)}", most=_PAGE_BYTES)
        if response.status in (401, 403):
            raise AccessDenied(f"{self._place}: access denied ({response.status}) to the list; check the credentials")
        if response.status in (404, 410):
            raise NotFound(f"{self._place}: no such bucket or container ({response.status})")
        if response.status != 200:
            raise SourceError(f"{self._place}: the server refuses the request ({response.status})")
        body = bytes(response.body)
        try:
            # A document type may define entities that expand without end ("billion laughs"). No real listing has one.
            if b"<!DOCTYPE" in body:
                raise ValueError("a document type")
            return ElementTree.fromstring(body)
        except (ElementTree.ParseError, ValueError) as error:
            raise SourceError(
                f"{self._place}: the server's answer is not the listing of a bucket; check the endpoint"
            ) from error


_WHY = "its key cannot be requested: it has an empty, '.' or '..' part or a control character"


def _all(answer: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [child for child in answer if child.tag.rpartition("}")[2] == name]


def _text(element: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in _all(element, name)), "")


def _object(entry: ElementTree.Element, start: int, answer: ElementTree.Element) -> dict[str, Any]:
    key, size = _text(entry, "Key"), _text(entry, "Size")
    if _text(answer, "EncodingType") == "url":
        # Servers write a blank as `+` here, which unquote() would leave as it is.
        key = unquote(key.replace("+", " "), errors="surrogateescape")
    return {
        "path": key[start:],
        # int() also takes signs, blanks and digits of other scripts, which no server of S3 writes.
        "size": int(size) if size.isascii() and size.isdigit() else -1,
        "e_tag": _text(entry, "ETag"),
    }


def _signed(url: str, query: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """Return the query of a GET of ``url`` with the parameters that sign it."""
    parts, now = urlsplit(url), datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = [now[:8], keys["region"], "s3", "aws4_request"]
    query = {
        **query,
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": "/".join([keys["access_key_id"], *scope]),
        "X-Amz-Date": now,
        "X-Amz-Expires": _EXPIRES,
        "X-Amz-SignedHeaders": "host",
    }
    if token := keys.get("session_token"):
        query["X-Amz-Security-Token"] = token
    if keys.get("request_payer"):
        query["x-amz-request-payer"] = "requester"
    # The server computes this text from the request it received. Another order or another escape gives another
    # signature, and a refusal (403).
    lines = ["GET", parts.path or "/", _written(query), f"host:{parts.netloc}", "", "host", "UNSIGNED-PAYLOAD"]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    key = functools.reduce(_mac, scope, f"AWS4{keys['secret_access_key']}".encode())
    signature = _mac(key, "\n".join(["AWS4-HMAC-SHA256", now, "/".join(scope), digest])).hex()
    return {**query, "X-Amz-Signature": signature}


def _written(query: Mapping[str, str]) -> str:
    # AWS prescribes sorted names, and an escape for every character but letters, digits and `-_.~`.
    return "&".join(f"{quote(name, safe=_SAFE)}={quote(query[name], safe=_SAFE)}" for name in sorted(query))


def _mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
