"""Web servers as stores: a folder with an index page, or a manifest that names the objects.

The URL decides how objects are listed. A URL that ends in ``.txt`` or ``.jsonl`` is a manifest. Any other URL is a
folder whose index pages (JSON of nginx or Caddy, or the links of an HTML page) are followed downwards.

User info in the URL, or else ``~/.netrc``, gives basic authentication. A query is sent along to the same server.
Neither is ever shown or stored. obstore fetches the objects (:mod:`cachetool.stores.http_objects`), the standard
library everything else (:mod:`cachetool.stores.http_pages`).

Many listings name no ETags (HTML indexes, plain manifests), but most answers do. The first answer with a part of an
object fixes the ETag of that object, so that parts of two versions are never joined.
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
from cachetool.stores.base import ZARR_METADATA, Batch, LeftOut, Limits, Object, Page, Pages, check_identity
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
"""Most objects whose identity is remembered; those asked for last stay."""
_LONGEST = 1024
"""Most characters of an identity. A longer one counts as none."""


def identity_of(answer: Answer, *, like: str | None = None) -> str | None:
    """Return the ETag of an answer, or else its time of modification; None if it has neither.

    With ``like``, return the kind of identity that ``like`` is.
    """
    identity: str | None = None
    if like is None or not like.startswith(MODIFIED):
        # Manifests name ETags as tools print them, with or without `W/` and quotes. The same content must not look
        # changed.
        identity = answer.etag.removeprefix("W/").strip('"') or None
    if (identity is None if like is None else like.startswith(MODIFIED)) and answer.modified:
        told = answer.modified
        identity = MODIFIED + (told if isinstance(told, str) else email.utils.format_datetime(told, usegmt=True))
    # A hostile server may send an ETag of any length, and one is kept for each of 131,072 objects.
    return identity if identity is None or len(identity) <= _LONGEST else None


class Identities:
    """The identity of each object in the first answer. Used by many threads."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def first(self, key: str, answer: Answer) -> str | None:
        """Return the first identity that was seen of ``key``, that of this answer included."""
        identity = identity_of(answer)
        with self._lock:
            if identity is not None:
                self._first.setdefault(key, identity)
            if key in self._first:
                self._first.move_to_end(key)
            # The bound keeps memory constant for sources of millions of objects. A forgotten object is identified by
            # its next answer.
            while len(self._first) > MOST:
                self._first.popitem(last=False)
            return self._first.get(key)

    def all(self) -> dict[str, str]:
        """Return the remembered identities by key."""
        with self._lock:
            return dict(self._first)

    def clear(self) -> None:
        """Forget all identities, because objects that are listed anew may have changed."""
        with self._lock:
            self._first.clear()


_MANIFESTS = (".txt", ".jsonl", ".ndjson")
_INDEX_BYTES = 2**27
"""Most bytes of one index page. A server writes some hundred bytes for each object."""
_MANIFEST_BYTES = 2**30
_PAGE = 1000
# A server may lead into a folder inside itself, for ever.
_MAX_DEPTH = 64
# A server may make up folders without end.
EMPTY_FOLDERS = 100_000
"""Folders in a row without a file after which a listing is given up."""


def open_http_store(url: str, limits: Limits) -> HttpStore:
    """Open the store at an http(s) URL. No request is made yet.

    Raises:
        UsageError: If the URL has no host, or the netrc file cannot be used.
    """

    def header() -> Credentials[str | None]:
        authorization = _authorization(url)
        return Credentials(authorization, authorization)

    return HttpStore(url, ObjectClient(url, limits, Login(header)))


class HttpStore:
    """Objects below one URL; see :class:`cachetool.stores.base.Store`. Made by :func:`open_http_store`.

    The store closes ``client``.
    """

    concurrency = 32

    def __init__(self, url: str, client: ObjectClient) -> None:
        parts = urlsplit(url)
        self.url = redact(url)
        path, query = written(parts.path), written(parts.query)
        self._query = f"?{query}" if query else ""
        self._manifest = path if path.lower().endswith(_MANIFESTS) else ""
        folder = self._manifest.rpartition("/")[0] if self._manifest else path.rstrip("/")
        # User info is cut off here: it goes into a header, and URLs of objects are shown and stored.
        self._origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._folder = f"{folder}/"
        self._home, self._allowed = origin_of(url), allowed_hosts()
        self._client = client
        self._left_out = LeftOut()
        self._seen = Identities()
        self._whole = WholeObjects(self.get)

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts and names of the objects that the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """Yield all objects that the manifest or the index pages name. Unknown sizes are -1."""
        # Objects that changed on purpose must not be refused after the source is listed again.
        self._seen.clear()
        left_out = LeftOut()
        if self._manifest:
            for page in self._named():
                self._check_hosts(page)
                yield page
        else:
            yield from self._walk(left_out)
        self._left_out = left_out

    def list_after(self, key: str | None) -> Pages | None:
        """Yield the objects of a manifest behind ``key``, ascending, whatever the order of its lines. Return None
        without a manifest."""
        return self._sorted(key) if self._manifest else None

    def _sorted(self, key: str | None) -> Pages:
        self._seen.clear()
        page = Page([], [], [])
        for some in self._named():
            page.keys += [item.key for item in some]
            page.sizes += [item.size for item in some]
            page.etags += [item.etag or "" for item in some]
        raw = [text.encode("utf-8", "surrogateescape") for text in page.keys]
        after = b"" if key is None else key.encode("utf-8", "surrogateescape")
        order = [at for at in sorted(range(len(raw)), key=raw.__getitem__) if raw[at] > after]
        for start in range(0, len(order), _PAGE):
            some = page.at(order[start : start + _PAGE])
            self._check_hosts(some)
            yield some

    def _named(self) -> Pages:
        """Yield the objects in the order of the manifest's lines."""
        body = self._fetch(self._origin + self._manifest + self._query, self.url, most=_MANIFEST_BYTES).body
        return read_manifest(body, place=self.url)

    def _check_hosts(self, page: Batch) -> None:
        """Raise an error if a manifest names an object of another server, before any object is fetched."""
        for item in page:
            if is_absolute(item.key):
                self._url_of(item)

    def _walk(self, left_out: LeftOut) -> Pages:
        folders, seen, empty = [""], {""}, 0
        while folders:
            folder = folders.pop()
            page = self._origin + self._folder + quote(folder, errors="surrogateescape")
            try:
                entries = self._index(page, "application/json, text/html;q=0.9")
            # The server has JSON of its own for this folder; its HTML page may still be an index. If it is not, the
            # first error says more.
            except OtherJson as error:
                try:
                    entries = self._index(page, "text/html")
                except SourceError:
                    raise error from None
            batch = []
            for entry in entries:
                if entry.left_out:
                    left_out.add(f"{folder}{entry.name}", entry.left_out, entry.left_out)
                # An index is foreign text: such a name would lead out of its folder when the key is joined to the URL.
                elif entry.name in ("", ".", "..") or "/" in entry.name:
                    left_out.add(
                        f"{folder}{entry.name}", "invalid names in an index", "not a valid name of a file or folder"
                    )
                elif entry.name.startswith(".") and entry.name not in ZARR_METADATA:
                    left_out["hidden"] += 1
                elif not entry.is_folder:
                    batch.append(Object(f"{folder}{entry.name}", entry.size, entry.etag))
                # Each folder is read once. A page may link to the same folder many times.
                elif (below := f"{folder}{entry.name}/") not in seen:
                    if below.count("/") > _MAX_DEPTH:
                        raise SourceError(
                            f"{self.url}: folders are nested more than {_MAX_DEPTH} deep, or links form a loop"
                        )
                    seen.add(below)
                    folders.append(below)
            yield batch
            empty = 0 if batch else empty + 1
            if folders and empty == EMPTY_FOLDERS:
                raise SourceError(
                    f"{self.url}: {EMPTY_FOLDERS} folders in a row have no file;\n"
                    "choose a folder further down, or a manifest (.txt, .jsonl)"
                )

    def _index(self, page: str, accept: str) -> builtins.list[Entry]:
        answer = self._fetch(page + self._query, redact(page), most=_INDEX_BYTES, accept=accept)
        # A file may answer in place of a folder. Links on such a page are relative to the folder above, and would name
        # other objects.
        if "/" not in urlsplit(answer.url).path[-1:]:
            raise SourceError(
                f"{redact(page)} is not a folder with an index page; give a folder or a manifest (.txt, .jsonl)"
            )
        kind = answer.headers.get("Content-Type", "")
        return [*read_index(answer.body, kind, page=answer.url.partition("?")[0], asked=page)]

    def _fetch(self, url: str, what: str, *, most: int, accept: str = "*/*") -> Response:
        response = self._client.pages.fetch(url, headers={"Accept": accept}, most=most)
        _check_status(response, what, 200)
        return response

    def find(self, key: str) -> Object:
        """Return the object with this name."""
        # The first byte is requested and not HEAD, because a signed URL often allows GET alone.
        url, what = self._url_of(Object(key, -1)), f"{self.url}: {key!r}"
        response = self._client.pages.fetch(url, headers={"Range": "bytes=0-0"}, bodiless=True)
        # An object of 0 bytes has no first byte, so the server cannot serve the range.
        if response.status == 416:
            return Object(key, 0)
        answer = response.answer
        # A server that ignores ranges answers 200, and so does a login page. The type of the answer tells them apart.
        if response.status == 200:
            _refuse_page(answer, key, what)
        else:
            _check_status(response, what, 206)
        return Object(key, answer.size, identity_of(answer))

    def seen(self) -> Mapping[str, str]:
        """Return the identities that answers had for objects whose listing names no ETag, by key."""
        return self._seen.all()

    def get(self, item: Object) -> memoryview:
        """Return the whole object."""
        what = f"{self.url}: {item.key!r}"
        answer = self._client.get(
            self._url_of(item), item, lambda response: _check_status(response, what, 200, listed=True)
        )
        self._check(item, answer, len(answer.body))
        # A checksum of the manifest is compared with the bytes. Servers may keep an ETag although the content changed.
        if item.etag is not None and item.etag.startswith(SHA256):
            check_identity(item, size=None, etag=SHA256 + hashlib.sha256(answer.body).hexdigest())
        return answer.body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``start``. If the server ignores ranges, the object is fetched whole."""
        if length == 0:
            return memoryview(b"")
        what = f"{self.url}: {item.key!r}"
        # The server ignored a range of this object before. Another request with a range would begin to transfer the
        # object in vain.
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
                    f"{self.url}: {redact(printable(item.key[:200]))!r} is on another server than the"
                    f" manifest;\nallow that server with CACHETOOL_ALLOW_HOSTS={origin.host}"
                )
            return item.key
        if any(part in ("", ".", "..") for part in item.key.split("/")):
            raise BadObject(f"{item.key!r} cannot be named in a URL: it has an empty, '.' or '..' part")
        return self._origin + self._folder + quote(item.key, errors="surrogateescape") + self._query

    def _check(self, item: Object, answer: Answer, size: int, *, part: bool = False) -> None:
        # Without a listed size, a login page with status 200 would pass for the object.
        if item.size < 0 and not part:
            _refuse_page(answer, item.key, f"{self.url}: {item.key!r}")
        identity = item.etag
        # A checksum can only be compared with the whole object. For parts the first answer's ETag is used.
        if identity is None or identity.startswith(SHA256):
            identity = self._seen.first(item.key, answer)
        if identity is not None:
            item = replace(item, etag=identity)
        # An answer may have an ETag and a time. Only the kind that was seen first can be compared.
        etag = None if identity is None else identity_of(answer, like=identity)
        check_identity(item, size=None if size < 0 else size, etag=etag)

    def close(self) -> None:
        """Close the connections of all threads."""
        self._client.close()
        self._whole.clear()


def _refuse_page(answer: Answer, key: str, what: str) -> None:
    # Captive portals and login pages answer every request with 200 and HTML.
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
        raise NotFound(f"{what} does not exist any more" if listed else f"{what}: not found ({status})")
    raise SourceError(f"{what}: the server answers {status}")


def _authorization(url: str) -> str | None:
    """Return the header of basic authentication from the URL's user info or the netrc file; None without either."""
    # Called for its error: a URL without a host must be refused before its user info is used.
    origin_of(url)
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
            # Not chained, and quoted only if certain to hold no secret: the parser's message may repeat a token of the
            # file, which can be the password.
            raise UsageError(
                f"{path!r} cannot be used: {reason if 'token' not in str(reason) else 'bad entry'}"
            ) from None
        if login is None:
            return None
        user, password = login[0], login[2]
    else:
        user, password = (unquote(part or "", errors="surrogateescape") for part in (user, password))
    try:
        # surrogateescape gives back the bytes that were typed, in whatever encoding the server expects.
        both = f"{user}:{password or ''}".encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{redact(url)!r}: its user or password has a character that cannot be sent") from None
    return "Basic " + base64.b64encode(both).decode("ascii")
