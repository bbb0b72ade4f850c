"""Datasets of the Hugging Face hub: ``hf://datasets/OWNER/NAME[@REVISION]/path``, listed by the hub's API.

A revision is a branch, a tag or a commit; a slash in it is written ``%2F``. ``refs/pr/1`` and ``refs/convert/parquet``
are known as they are, as in ``huggingface_hub``. The revision is looked up once, and everything is read at that commit.

The "ETag" of a file is the hash of its content that the hub names. A whole file is compared with that hash. For a part
the hub is asked whether the file is still the listed one. ``HF_TOKEN``, or else the file that ``huggingface-cli login``
writes, is sent to ``HF_ENDPOINT`` and to no other server.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, UsageError
from cachetool.stores.base import Limits, Object, Pages, check_identity
from cachetool.stores.credentials import hub_token_path
from cachetool.stores.http_listing import json_objects
from cachetool.stores.http_objects import ObjectClient
from cachetool.stores.http_pages import Response
from cachetool.stores.login import Credentials, Login
from cachetool.stores.origins import origin_of
from cachetool.stores.redact import redact, split_url

__all__ = ["HubStore", "open_hub_store"]

ENDPOINT = "https://huggingface.co"
_MIRRORS = ("hf.co",)
"""Hosts to which the hub redirects requests for large files."""
_PAGE_BYTES = 2**27
EMPTY_PAGES = 1000
"""Pages in a row without a file after which a listing is given up. A page of the hub has 1,000 entries."""
_SENT = re.compile(r"[!-~]*")
_REFS = re.compile(r"refs/(convert/\w+|pr/\d+)(/|$)")
"""Revisions with slashes that the hub itself makes:
https://huggingface.co/docs/huggingface_hub/guides/hf_file_system."""
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="next"')


def open_hub_store(url: str, limits: Limits) -> HubStore:
    """Open the store at a URL of the hub. No request is made yet.

    Raises:
        UsageError: If the URL names no dataset, or ``HF_ENDPOINT`` cannot be used.
    """
    _, path = split_url(url)
    kind, _, path = path.partition("/")
    owner, _, path = path.partition("/")
    named, _, path = path.partition("/")
    name, _, revision = named.partition("@")
    # A revision with slashes looks like the beginning of a path, so it is recognised before path and revision are
    # parted.
    if (match := _REFS.match(f"{revision}/{path}")) is not None:
        revision, path = match[0].rstrip("/"), f"{revision}/{path}"[match.end() :]
    if kind != "datasets" or not owner or not name:
        raise UsageError(f"{redact(url)}: a URL of the hub is hf://datasets/OWNER/NAME/path (models are not read)")
    endpoint = (os.environ.get("HF_ENDPOINT", "").strip() or ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        # The value is not shown: it may hold user and password.
        raise UsageError(
            "HF_ENDPOINT must begin with http:// or https://; its value is not shown because it may be secret"
        )

    def header() -> Credentials[str | None]:
        token = _token()
        authorization = f"Bearer {token}" if token else None
        return Credentials(authorization, authorization)

    login = Login(header)
    try:
        # Mirrors are allowed for the real hub only. A private endpoint may not lead to other hosts unchecked.
        client = ObjectClient(endpoint, limits, login, hosts=_MIRRORS if endpoint == ENDPOINT else ())
    except UsageError as error:
        raise UsageError(f"HF_ENDPOINT cannot be used: {error}") from None
    return HubStore(redact(url), endpoint, f"{owner}/{name}", unquote(revision) or "main", path.strip("/"), client)


class HubStore:
    """Files below one path of a dataset; see :class:`cachetool.stores.base.Store`. Made by :func:`open_hub_store`.

    The store closes ``client``.
    """

    concurrency = 32

    def __init__(self, url: str, endpoint: str, dataset: str, revision: str, path: str, client: ObjectClient) -> None:
        self.url = url
        self._endpoint, self._dataset, self._revision, self._path = endpoint, dataset, revision, path
        self._client = client
        self._lock = threading.Lock()
        self._commit = ""
        self._known: dict[str, Object] = {}
        self._left_out: Mapping[str, int] = {}

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts of the files that the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """Yield all files below the path, a page of the API at a time."""
        hidden = 0
        for page in self._tree(self._path, recursive=True):
            shown = [item for item in page if not any(part.startswith(".") for part in item.key.split("/"))]
            hidden += len(page) - len(shown)
            yield shown
        self._left_out = {"hidden": hidden} if hidden else {}

    def _tree(self, path: str, *, recursive: bool) -> Pages:
        place = quote(path, errors="surrogateescape")
        url = f"{self._api}/tree/{self._at()}{f'/{place}' if path else ''}?recursive={str(recursive).lower()}"
        start = len(self._path) + 1 if self._path else 0
        # A broken or hostile hub may name pages without end, or the same page again. So each page's URL is kept, and
        # empty pages are counted.
        seen, empty = {url}, 0
        while url:
            answer = self._fetch(url, self.url)
            try:
                page = [
                    Object(str(entry["path"])[start:], int(entry["size"]), str((entry.get("lfs") or entry)["oid"]))
                    # One entry after the other, because a decoded page takes 30 times the memory of its text.
                    for entry in json_objects(answer.body)
                    if entry["type"] == "file" and str(entry["path"])[: max(0, start - 1)] == self._path
                ]
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                raise SourceError(f"{self.url}: the hub's answer is not a list of files") from error
            yield page
            empty = 0 if page else empty + 1
            more = _NEXT.search(answer.headers.get("Link", ""))
            try:
                url = urljoin(answer.url, more.group(1)) if more else ""
                # The next page's URL comes from a header of the server. Any host is allowed, but the token only goes to
                # the endpoint.
                origin_of(url or self._endpoint)
            except ValueError:
                raise SourceError(f"{self.url}: the hub's link to the next page of its list is not a URL") from None
            if url in seen:
                raise SourceError(
                    f"{self.url}: the hub's listing repeats itself: an earlier page is named as the next page"
                )
            if url and empty == EMPTY_PAGES:
                raise SourceError(
                    f"{self.url}: the hub's list has {EMPTY_PAGES} pages in a row without a file;\n"
                    "check HF_ENDPOINT, or give a folder of the dataset"
                )
            seen.add(url)

    def find(self, key: str) -> Object:
        """Return the file with this key, taken from the listing of its folder."""
        with self._lock:
            item = self._known.get(key)
        # Outside of the lock, because the request may take long and other threads know their files already. Two threads
        # may list one folder; the results are equal.
        if item is None:
            folder = f"{self._path}/{key}".strip("/").rpartition("/")[0]
            try:
                items = {item.key: item for page in self._tree(folder, recursive=False) for item in page}
            except NotFound:
                raise NotFound(f"{self.url}: no file {key!r}") from None
            with self._lock:
                self._known.update(items)
            if key not in items:
                raise NotFound(f"{self.url}: no file {key!r}")
            item = items[key]
        return item

    def get(self, item: Object) -> memoryview:
        """Return the whole file after comparing it with its hash."""
        what = f"{self.url}: {item.key!r}"
        answer = self._client.get(
            self._url_of(item), item, lambda response: self._check(response, what, 200, listed=True)
        )
        # The hash is computed from the bytes: a proxy or a mirror may send anything under the right headers.
        check_identity(item, size=len(answer.body), etag=_hash(answer.body, item.etag or ""))
        return answer.body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``start``."""
        if length == 0:
            return memoryview(b"")
        try:
            # A part has no hash of its own. The listing of the pinned commit says whether the file is still the listed
            # one.
            now = self.find(item.key)
        except NotFound:
            raise NotFound(f"{item.key!r} does not exist any more; it did when {self.url} was listed") from None
        check_identity(item, size=now.size, etag=now.etag)
        what = f"{self.url}: {item.key!r}"
        # Checked here, because a server answers with a shorter part, and the message would speak of another range.
        if start + length > now.size:
            raise BadObject(f"{what} is shorter than when it was listed")
        answer = self._client.part(
            self._url_of(item),
            (start, start + length),
            what,
            lambda response: self._check(response, what, 206, listed=True),
        )
        check_identity(item, size=None if answer.size < 0 else answer.size, etag=None)
        return answer.body

    def close(self) -> None:
        """Close the connections of all threads."""
        self._client.close()

    @property
    def _api(self) -> str:
        return f"{self._endpoint}/api/datasets/{quote(self._dataset)}"

    def _at(self) -> str:
        """Return the commit of the revision. It is looked up once and stays the same until the store is closed."""
        # The lock is held during the request. Two threads that look up a branch could otherwise get two commits, and
        # read a mix.
        with self._lock:
            if not self._commit:
                answer = self._fetch(f"{self._api}/revision/{quote(self._revision, safe='')}", self.url)
                try:
                    about: Any = json.loads(bytes(answer.body))
                    self._commit = quote(str(about["sha"]), safe="")
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise SourceError(
                        f"{self.url}: the hub does not name the commit of revision {self._revision!r}"
                    ) from error
            return self._commit

    def _url_of(self, item: Object) -> str:
        path = f"{self._path}/{item.key}" if self._path else item.key
        # Clients and servers resolve such parts, so the URL would lead to another file, or out of the dataset.
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise BadObject(f"{item.key!r} cannot be named in a URL: it has an empty, '.' or '..' part")
        place = quote(path, errors="surrogateescape")
        return f"{self._endpoint}/datasets/{quote(self._dataset)}/resolve/{self._at()}/{place}"

    def _fetch(self, url: str, what: str) -> Response:
        response = self._client.pages.fetch(url, headers={"Accept": "application/json"}, most=_PAGE_BYTES)
        self._check(response, what, 200)
        return response

    def _check(self, response: Response, what: str, expected: int, *, listed: bool = False) -> None:
        status = response.status
        if status == expected:
            return
        # The hub answers 401 for a missing dataset as well, so as not to reveal private ones. The message names both
        # causes.
        if status in (401, 403):
            raise AccessDenied(
                f"{what}: the hub refuses ({status}): the dataset does not exist, is private or is gated; set HF_TOKEN"
            )
        if status in (404, 410):
            raise NotFound(f"{what} does not exist any more" if listed else f"{what}: not found ({status})")
        if status == 416:
            raise BadObject(f"{what} is shorter than when it was listed")
        raise SourceError(f"{what}: the hub answers {status}")


def _hash(body: memoryview, like: str) -> str | None:
    """Return the hash that the hub would name: SHA-256 for large files, git's SHA-1 for others."""
    if len(like) == 64:
        return hashlib.sha256(body).hexdigest()
    if len(like) == 40:
        # git hashes a header with the length before the content. SHA-1 is only compared with the hub's, and protects
        # nothing.
        return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
    return None


def _token() -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        return _sendable(token, "HF_TOKEN")
    path = hub_token_path()
    try:
        return _sendable(path.read_text(encoding="utf-8").strip(), f"the file {str(path)!r}")
    # No token is no error: public datasets need none.
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise AccessDenied(f"the token of the hub in {str(path)!r} cannot be read") from error


def _sendable(token: str, where: str) -> str:
    """Return the token if an HTTP header can hold it; otherwise raise :class:`UsageError`."""
    # http.client would refuse such a header with an error that quotes the token.
    if not _SENT.fullmatch(token):
        raise UsageError(f"{where} holds no token of the hub: it contains a blank, a line end or the like")
    return token
