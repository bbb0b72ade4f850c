"""A web server as a store: a folder with an index page, or a manifest that names the objects.

The URL decides how it is listed: one that ends in ``.txt`` or ``.jsonl`` is a manifest, any other a folder whose index
(JSON of nginx or Caddy, or the links of an HTML page) is followed downwards. User info in the URL, else ``~/.netrc``,
gives basic authentication; a query is sent along to the same server. Neither is ever shown or stored. obstore fetches
the objects (:mod:`cachetool.stores.http_objects`), the standard library all else (:mod:`cachetool.stores.http_pages`).

Many listings name no ETags (HTML indexes, plain manifests), but most answers do. The first one that brings a part of an
object decides which content it is from then on, so that no two versions are put together.
"""

from __future__ import annotations

import base64
import builtins
import email.utils
import hashlib
import netrc
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote, unquote, urlsplit

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, UsageError
from cachetool.stores.base import ZARR_METADATA, LeftOut, Limits, Object, Pages, check_identity
from cachetool.stores.credentials import netrc_path
from cachetool.stores.http_listing import MODIFIED, SHA256, Entry, OtherJson, is_absolute, read_index, read_manifest
from cachetool.stores.http_objects import IgnoresRanges, ObjectClient
from cachetool.stores.http_pages import Answer, Response
from cachetool.stores.login import Credentials, Login
from cachetool.stores.origins import allowed_hosts, origin_of, written
from cachetool.stores.redact import printable, redact
from cachetool.stores.whole import WholeObjects

__all__ = ["HttpStore", "Identities", "MOST", "identity_of", "open_http_store"]

MOST = 2**17
"""Objects that are remembered, those asked for last."""
_LONGEST = 1024
"""Characters of an identity; a longer one is as good as none."""


def identity_of(answer: Answer, *, like: str | None = None) -> str | None:
    """The ETag of an answer, else its time of modification; with ``like`` whichever of them that is. None where it has
    none."""
    identity: str | None = None
    if like is None or not like.startswith(MODIFIED):
        identity = answer.etag.removeprefix("W/").strip('"') or None
    if (identity is None if like is None else like.startswith(MODIFIED)) and answer.modified:
        told = answer.modified
        identity = MODIFIED + (told if isinstance(told, str) else email.utils.format_datetime(told, usegmt=True))
    return identity if identity is None or len(identity) <= _LONGEST else None


class Identities:
    """The first identity that was seen of each object. Used by many threads."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def first(self, key: str, answer: Answer) -> str | None:
        """What was seen first, this answer included."""
        identity = identity_of(answer)
        with self._lock:
            if identity is not None:
                self._first.setdefault(key, identity)
            if key in self._first:
                self._first.move_to_end(key)
            while len(self._first) > MOST:
                self._first.popitem(last=False)
            return self._first.get(key)

    def all(self) -> dict[str, str]:
        """What is remembered, by key."""
        with self._lock:
            return dict(self._first)

    def clear(self) -> None:
        """Forget all: what is listed anew may have changed."""
        with self._lock:
            self._first.clear()


_MANIFESTS = (".txt", ".jsonl", ".ndjson")
_INDEX_BYTES = 2**27
"""Of one index page: a server writes some hundred for each object."""
_MANIFEST_BYTES = 2**30
_MAX_DEPTH = 64
EMPTY_FOLDERS = 100_000
"""Folders in a row without a file, at which a list is given up: a server may make up folders without end."""


def open_http_store(url: str, limits: Limits) -> HttpStore:
    """The store at an http(s) URL; nothing is fetched yet.

    Raises :class:`UsageError` for a URL without a host or a netrc file that cannot be used.
    """

    def header() -> Credentials[str | None]:
        authorization = _authorization(url)
        return Credentials(authorization, authorization)

    return HttpStore(url, ObjectClient(url, limits, Login(header)))


class HttpStore:
    """Objects below one URL; see :class:`cachetool.stores.base.Store`."""

    concurrency = 32

    def __init__(self, url: str, client: ObjectClient) -> None:
        """Takes over ``client``. Made by :func:`open_http_store`."""
        parts = urlsplit(url)
        self.url = redact(url)
        path, query = written(parts.path), written(parts.query)
        self._query = f"?{query}" if query else ""
        self._manifest = path if path.lower().endswith(_MANIFESTS) else ""
        folder = self._manifest.rpartition("/")[0] if self._manifest else path.rstrip("/")
        self._origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._folder = f"{folder}/"
        self._home, self._allowed = origin_of(url), allowed_hosts()
        self._client = client
        self._left_out = LeftOut()
        self._seen = Identities()
        self._whole = WholeObjects(self.get)

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """All objects that the manifest or the index pages name; sizes are -1 where they do not tell."""
        self._seen.clear()
        left_out = LeftOut()
        if self._manifest:
            body = self._fetch(self._origin + self._manifest + self._query, self.url, most=_MANIFEST_BYTES).body
            for page in read_manifest(body, place=self.url):
                for item in page:
                    if is_absolute(item.key):
                        self._url_of(item)
                yield page
        else:
            yield from self._walk(left_out)
        self._left_out = left_out

    def _walk(self, left_out: LeftOut) -> Pages:
        folders, seen, empty = [""], {""}, 0
        while folders:
            folder = folders.pop()
            page = self._origin + self._folder + quote(folder, errors="surrogateescape")
            try:
                entries = self._index(page, "application/json, text/html;q=0.9")
            except OtherJson as error:  # its page for people may tell
                try:
                    entries = self._index(page, "text/html")
                except SourceError:
                    raise error from None
            batch = []
            for entry in entries:
                if entry.left_out:
                    left_out.add(f"{folder}{entry.name}", entry.left_out, entry.left_out)
                elif entry.name in ("", ".", "..") or "/" in entry.name:
                    left_out.add(f"{folder}{entry.name}", "odd names in an index", "no name of a file or folder")
                elif entry.name.startswith(".") and entry.name not in ZARR_METADATA:
                    left_out["hidden"] += 1
                elif not entry.is_folder:
                    batch.append(Object(f"{folder}{entry.name}", entry.size, entry.etag))
                elif (below := f"{folder}{entry.name}/") not in seen:
                    if below.count("/") > _MAX_DEPTH:
                        raise SourceError(f"{self.url}: more than {_MAX_DEPTH} folders inside each other, or a loop")
                    seen.add(below)
                    folders.append(below)
            yield batch
            empty = 0 if batch else empty + 1
            if folders and empty == EMPTY_FOLDERS:
                raise SourceError(
                    f"{self.url}: {EMPTY_FOLDERS} folders in a row have no file;\n"
                    "give a folder below, or a manifest (.txt, .jsonl)"
                )

    def _index(self, page: str, accept: str) -> builtins.list[Entry]:
        answer = self._fetch(page + self._query, redact(page), most=_INDEX_BYTES, accept=accept)
        if "/" not in urlsplit(answer.url).path[-1:]:
            raise SourceError(
                f"{redact(page)} is no folder with an index page; give a folder or a manifest (.txt, .jsonl)"
            )
        kind = answer.headers.get("Content-Type", "")
        return [*read_index(answer.body, kind, page=answer.url.partition("?")[0], asked=page)]

    def _fetch(self, url: str, what: str, *, most: int, accept: str = "*/*") -> Response:
        response = self._client.pages.fetch(url, headers={"Accept": accept}, most=most)
        _check_status(response, what, 200)
        return response

    def find(self, key: str) -> Object:
        """The object at this name. Asked for by its first byte alone: a signed URL may not allow HEAD."""
        url, what = self._url_of(Object(key, -1)), f"{self.url}: {key!r}"
        response = self._client.pages.fetch(url, headers={"Range": "bytes=0-0"}, bodiless=True)
        if response.status == 416:  # nothing is there to have a first byte
            return Object(key, 0)
        answer = response.answer
        if response.status == 200:
            _refuse_page(answer, key, what)
        else:
            _check_status(response, what, 206)
        return Object(key, answer.size, identity_of(answer))

    def seen(self) -> Mapping[str, str]:
        """The identities that parts of objects had whose listing names no ETag, by key."""
        return self._seen.all()

    def get(self, item: Object) -> memoryview:
        """The whole object."""
        what = f"{self.url}: {item.key!r}"
        answer = self._client.get(
            self._url_of(item), item, lambda response: _check_status(response, what, 200, listed=True)
        )
        self._check(item, answer, len(answer.body))
        if item.etag is not None and item.etag.startswith(SHA256):
            check_identity(item, size=None, etag=SHA256 + hashlib.sha256(answer.body).hexdigest())
        return answer.body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``; of a server that ignores ranges the object is fetched whole."""
        if length == 0:
            return memoryview(b"")
        what = f"{self.url}: {item.key!r}"
        if self._whole.knows(item):
            return self._whole.part(item, 0, start, start + length, what)
        try:
            answer = self._client.part(
                self._url_of(item),
                (start, start + length),
                what,
                lambda response: _check_status(response, what, 206, listed=True),
            )
        except IgnoresRanges as error:
            return self._whole.part(item, error.size, start, start + length, what)
        self._check(item, answer, answer.size, part=True)
        return answer.body

    def _url_of(self, item: Object) -> str:
        if is_absolute(item.key):
            origin = origin_of(item.key)
            if origin != self._home and origin.host.lower() not in self._allowed:
                raise SourceError(
                    f"{self.url}: {redact(printable(item.key[:200]))!r} is on another server, which a manifest may not"
                    f" name;\nallow it with CACHETOOL_ALLOW_HOSTS={origin.host}"
                )
            return item.key
        if any(part in ("", ".", "..") for part in item.key.split("/")):
            raise BadObject(f"{item.key!r} cannot be named in a URL: it has an empty, '.' or '..' part")
        return self._origin + self._folder + quote(item.key, errors="surrogateescape") + self._query

    def _check(self, item: Object, answer: Answer, size: int, *, part: bool = False) -> None:
        if item.size < 0 and not part:
            _refuse_page(answer, item.key, f"{self.url}: {item.key!r}")
        identity = item.etag
        if identity is None or identity.startswith(SHA256):  # which nothing but the whole object can be compared with
            identity = self._seen.first(item.key, answer)
        if identity is not None:
            item = replace(item, etag=identity)
        etag = None if identity is None else identity_of(answer, like=identity)
        check_identity(item, size=None if size < 0 else size, etag=etag)

    def close(self) -> None:
        """Close the connections of all threads."""
        self._client.close()
        self._whole.clear()


def _refuse_page(answer: Answer, key: str, what: str) -> None:
    is_page = answer.content_type.lower().startswith(("text/html", "application/xhtml+xml"))
    if is_page and not key.lower().endswith((".html", ".htm", ".xhtml", ".xht")):
        raise BadObject(f"{what}: an HTML page came instead of the object")


def _check_status(response: Response, what: str, expected: int, *, listed: bool = False) -> None:
    status = response.status
    if status == expected:
        return
    if status in (401, 403, 407):
        raise AccessDenied(f"{what}: access denied ({status}); give user and password in ~/.netrc")
    if status in (404, 410):
        raise NotFound(f"{what} is not there any more" if listed else f"{what}: not found ({status})")
    raise SourceError(f"{what}: the server answers {status}")


def _authorization(url: str) -> str | None:
    """The header of basic authentication from the URL's user info or the netrc file."""
    origin_of(url)  # refuses what is no URL
    parts = urlsplit(url)
    user, password = parts.username, parts.password
    if user is None:
        path = str(netrc_path())
        try:
            login = netrc.netrc(path).authenticators(parts.hostname or "")
        except FileNotFoundError:
            return None
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
            reason = error.msg if isinstance(error, netrc.NetrcParseError) else getattr(error, "strerror", "not UTF-8")
            # Not chained, and only where it is certain to quote no secret.
            raise UsageError(
                f"{path!r} cannot be used: {reason if 'token' not in str(reason) else 'bad entry'}"
            ) from None
        if login is None:
            return None
        user, password = login[0], login[2]
    else:
        user, password = (unquote(part or "", errors="surrogateescape") for part in (user, password))
    try:
        both = f"{user}:{password or ''}".encode("utf-8", "surrogateescape")  # the bytes that were typed
    except UnicodeEncodeError:
        raise UsageError(f"{redact(url)!r}: its user or password has a character that cannot be sent") from None
    return "Basic " + base64.b64encode(both).decode("ascii")
