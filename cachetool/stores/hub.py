"""A dataset of the Hugging Face hub: ``hf://datasets/OWNER/NAME[@REVISION]/path``, listed by the hub's API.

A revision is a branch, a tag or a commit, a slash in it written ``%2F``; ``refs/pr/1`` and ``refs/convert/parquet`` are
known as they are, as ``huggingface_hub`` knows them. The revision is looked up once, and everything then read at that
commit. A file's "ETag" is the hash of its content that the hub names: a whole file is compared with it, for a part the
hub is asked whether the file is still the one listed. ``HF_TOKEN``, else the file that ``huggingface-cli login``
writes, goes to ``HF_ENDPOINT`` and nowhere else.
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
"""Where the hub's redirects to large files lead."""
_PAGE_BYTES = 2**27
EMPTY_PAGES = 1000
"""Pages in a row without a file, at which a list is given up; the hub's pages have 1,000 entries each."""
_SENT = re.compile(r"[!-~]*")
_REFS = re.compile(r"refs/(convert/\w+|pr/\d+)(/|$)")
"""Revisions with slashes, which the hub makes itself: https://huggingface.co/docs/huggingface_hub/guides/hf_file_system"""
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="next"')


def open_hub_store(url: str, limits: Limits) -> HubStore:
    """The store at a URL of the hub; nothing is fetched yet.

    Raises :class:`UsageError` for a URL that names no dataset.
    """
    _, path = split_url(url)
    kind, _, path = path.partition("/")
    owner, _, path = path.partition("/")
    named, _, path = path.partition("/")
    name, _, revision = named.partition("@")
    if (match := _REFS.match(f"{revision}/{path}")) is not None:
        revision, path = match[0].rstrip("/"), f"{revision}/{path}"[match.end() :]
    if kind != "datasets" or not owner or not name:
        raise UsageError(f"{redact(url)}: a URL of the hub is hf://datasets/OWNER/NAME/path (models are not read)")
    endpoint = (os.environ.get("HF_ENDPOINT", "").strip() or ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError("HF_ENDPOINT must begin with http:// or https://; its value, which is not shown, does not")

    def header() -> Credentials[str | None]:
        token = _token()
        authorization = f"Bearer {token}" if token else None
        return Credentials(authorization, authorization)

    login = Login(header)
    try:
        client = ObjectClient(endpoint, limits, login, hosts=_MIRRORS if endpoint == ENDPOINT else ())
    except UsageError as error:
        raise UsageError(f"HF_ENDPOINT cannot be used: {error}") from None
    return HubStore(redact(url), endpoint, f"{owner}/{name}", unquote(revision) or "main", path.strip("/"), client)


class HubStore:
    """Files below one path of a dataset; see :class:`cachetool.stores.base.Store`."""

    concurrency = 32

    def __init__(self, url: str, endpoint: str, dataset: str, revision: str, path: str, client: ObjectClient) -> None:
        """Takes over ``client``. Made by :func:`open_hub_store`."""
        self.url = url
        self._endpoint, self._dataset, self._revision, self._path = endpoint, dataset, revision, path
        self._client = client
        self._lock = threading.Lock()
        self._commit = ""
        self._known: dict[str, Object] = {}
        self._left_out: Mapping[str, int] = {}

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """All files below the path, a page of the API at a time."""
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
        seen, empty = {url}, 0
        while url:
            answer = self._fetch(url, self.url)
            try:
                page = [
                    Object(str(entry["path"])[start:], int(entry["size"]), str((entry.get("lfs") or entry)["oid"]))
                    for entry in json_objects(answer.body)
                    if entry["type"] == "file" and str(entry["path"])[: max(0, start - 1)] == self._path
                ]
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                raise SourceError(f"{self.url}: the hub's answer is no list of files") from error
            yield page
            empty = 0 if page else empty + 1
            more = _NEXT.search(answer.headers.get("Link", ""))
            try:
                url = urljoin(answer.url, more.group(1)) if more else ""
                origin_of(url or self._endpoint)
            except ValueError:
                raise SourceError(f"{self.url}: the hub names a next page of its list that is no URL") from None
            if url in seen:
                raise SourceError(f"{self.url}: the hub's list leads back into itself")
            if url and empty == EMPTY_PAGES:
                raise SourceError(
                    f"{self.url}: the hub's list has {EMPTY_PAGES} pages in a row without a file;\n"
                    "check HF_ENDPOINT, or give a folder of the dataset"
                )
            seen.add(url)

    def find(self, key: str) -> Object:
        """The file of this key, out of the list of its folder."""
        with self._lock:
            item = self._known.get(key)
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
        """The whole file, compared with its hash."""
        what = f"{self.url}: {item.key!r}"
        answer = self._client.get(
            self._url_of(item), item, lambda response: self._check(response, what, 200, listed=True)
        )
        check_identity(item, size=len(answer.body), etag=_hash(answer.body, item.etag or ""))
        return answer.body

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``."""
        if length == 0:
            return memoryview(b"")
        try:
            now = self.find(item.key)
        except NotFound:
            raise NotFound(f"{item.key!r} is not there any more; it was when {self.url} was listed") from None
        check_identity(item, size=now.size, etag=now.etag)
        what = f"{self.url}: {item.key!r}"
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
        """The commit that the revision names now; the same until this store is closed."""
        with self._lock:
            if not self._commit:
                answer = self._fetch(f"{self._api}/revision/{quote(self._revision, safe='')}", self.url)
                try:
                    about: Any = json.loads(bytes(answer.body))
                    self._commit = quote(str(about["sha"]), safe="")
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise SourceError(f"{self.url}: the hub does not say which commit it is") from error
            return self._commit

    def _url_of(self, item: Object) -> str:
        path = f"{self._path}/{item.key}" if self._path else item.key
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
        if status in (401, 403):
            raise AccessDenied(
                f"{what}: the hub refuses ({status}): there is no such dataset, or it is private or gated; set HF_TOKEN"
            )
        if status in (404, 410):
            raise NotFound(f"{what} is not there any more" if listed else f"{what}: not found ({status})")
        if status == 416:
            raise BadObject(f"{what} is shorter than when it was listed")
        raise SourceError(f"{what}: the hub answers {status}")


def _hash(body: memoryview, like: str) -> str | None:
    """The hash that the hub would name: SHA-256 of large files, git's SHA-1 of others."""
    if len(like) == 64:
        return hashlib.sha256(body).hexdigest()
    if len(like) == 40:
        return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
    return None


def _token() -> str:
    if token := os.environ.get("HF_TOKEN", "").strip():
        return _sendable(token, "HF_TOKEN")
    path = hub_token_path()
    try:
        return _sendable(path.read_text(encoding="utf-8").strip(), f"the file {str(path)!r}")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise AccessDenied(f"the token of the hub in {str(path)!r} cannot be read") from error


def _sendable(token: str, where: str) -> str:
    """The token, if a header can hold it: who sends it would quote it."""
    if not _SENT.fullmatch(token):
        raise UsageError(f"{where} holds no token of the hub: there is a blank, a line end or the like in it")
    return token
