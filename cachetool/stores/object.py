"""S3, Google Cloud Storage and Azure Blob through obstore (the only module that imports it).

obstore retries by itself, with full jitter. Its runtime does not survive ``fork``: a child whose parent has used it
hangs, so a store used in a forked child raises instead. Keys with an empty, ``.`` or ``..`` part or a control character
cannot be fetched by it; a listing that holds one is refused and names it.

Large objects of an S3 server without TLS, as of MinIO or Ceph beside the machine: signed URLs and our own client.

obstore hands a body over in many pieces, from a thread of its runtime to the one that asks, which puts them together:
2.0 s of a processor for 2 GiB, where reading them from the socket into their place takes 0.9 s. With TLS its client is
the faster one. Whatever does not come as it should is left to obstore, which knows all about errors and retries.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from cachetool.core.errors import AccessDenied, CacheToolError, NotFound, SourceError, UsageError
from cachetool.stores.base import Limits, Object, Pages, check_identity, check_length
from cachetool.stores.bounded import KEYS, bounded_pages
from cachetool.stores.credentials import (
    EXPIRES,
    Options,
    azure_options,
    gcs_options,
    identity_of,
    refuse_unsendable,
    s3_options,
    seconds_of,
)
from cachetool.stores.failures import Patience, as_our_error
from cachetool.stores.http_client import HttpClient
from cachetool.stores.login import Credentials, Login
from cachetool.stores.redact import redact, split_url
from cachetool.stores.traffic import retried

__all__ = ["ObjectStore", "Signed", "open_object_store"]


_runtime_pid: int | None = None


def open_object_store(url: str, limits: Limits) -> ObjectStore:
    """The store at ``s3://bucket/prefix`` and its likes; nothing is fetched yet.

    Raises :class:`UsageError` for a URL that names no bucket, :class:`AccessDenied` without credentials.
    """
    global _runtime_pid
    if _runtime_pid not in (None, os.getpid()):
        raise _forked()
    _runtime_pid = os.getpid()
    # Its runtime has a thread for each core, which hand small requests to and fro: one thread takes half of the
    # processor time for objects of 64 KiB. Bodies are put together in the threads that ask for them.
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")
    from obstore import store as obstore_store

    place = redact(url)
    scheme, location = split_url(url)
    bucket, _, prefix = location.partition("/")
    account = ""
    if scheme in ("abfs", "abfss") and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    if "@" in bucket or "?" in location or "#" in bucket or ":" in bucket:
        raise UsageError(
            f"{place}: an object store's URL is {scheme}://BUCKET/PREFIX; user info and queries do not belong in it,\n"
            "credentials come from the environment"
        )
    if not bucket:
        raise UsageError(f"{place} names no bucket; write {scheme}://BUCKET/PREFIX")

    def clients() -> Credentials[_Clients]:
        options: Options
        store_class: Any
        if scheme in ("s3", "s3a"):
            options, store_class = s3_options(place), obstore_store.S3Store
        elif scheme in ("gs", "gcs"):
            options, store_class = gcs_options(place), obstore_store.GCSStore
        else:
            options, store_class = azure_options(place, account), obstore_store.AzureStore
        refuse_unsendable(place, options)
        identity, ends = identity_of(options), seconds_of(str(options.pop(EXPIRES, "")))
        client: dict[str, Any] = {"connect_timeout": timedelta(seconds=limits.connect), "timeout": timedelta(hours=1)}
        plain = str(options.get("endpoint", options.get("base_url", ""))).startswith("http://")
        if plain:
            client["allow_http"] = True
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _read(bundle)
        shared = {"prefix": prefix.strip("/") or None, "retry_config": retry, **options}

        def make(silence: float) -> Any:
            timeouts = {**client, "read_timeout": timedelta(seconds=silence)}
            try:
                return store_class(bucket, client_options=timeouts, **shared)
            except _errors() as error:
                raise as_our_error(error, place=place) from None

        pair = _Clients(make(limits.silence), lambda: make(limits.listing), may_be_signed=plain and store_class is s3)
        return Credentials(pair, identity, ends)

    s3 = obstore_store.S3Store
    retry = {
        "max_retries": 100,  # a connection that is refused takes no time: a server that begins anew needs seconds
        "retry_timeout": timedelta(seconds=limits.retry),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=min(3.0, limits.retry)),
            "base": 2,
        },
    }
    login, signed = Login(clients), None
    if login.now().value.may_be_signed:
        from obstore import sign

        def signed_url(key: str) -> str:
            try:
                return str(sign(login.now().value.reading, "GET", key, timedelta(hours=1)))
            except _errors() as error:
                raise as_our_error(error, place=place, key=key) from None

        signed = Signed(signed_url, limits)
    return ObjectStore(login, place, limits, signed)


@dataclass(frozen=True, slots=True)
class _Clients:
    """obstore's stores with the credentials of one moment."""

    reading: Any
    listing: Callable[[], Any]
    """Makes another one with the limits that suit a listing."""
    may_be_signed: bool
    """Whether large objects may come by signed URLs: of S3 without TLS."""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"AWS_CA_BUNDLE names {path!r}, which cannot be read: {error.strerror}") from error


def _forked() -> CacheToolError:
    return CacheToolError(
        "an object store cannot be used in a forked child, where its client hangs; start the process with 'spawn'"
    )


class ObjectStore:
    """One bucket or container, below a prefix; see :class:`cachetool.stores.base.Store`."""

    concurrency = 32

    def __init__(self, login: Login[_Clients], url: str, limits: Limits, signed: Signed | None = None) -> None:
        """The clients, the URL as it may be shown, and a faster way to large objects, where there is one.

        Made by :func:`open_object_store`.
        """
        self._login, self._signed, self._limits = login, signed, limits
        self.url = url
        self._pid = os.getpid()
        self._left_out: Counter[str] = Counter()
        self._ranges = True
        """False once the server has answered a request for a part with all of it."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last finished :meth:`list` passed over."""
        return self._left_out

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise _forked()

    def list(self) -> Pages:
        """All objects below the prefix, a page at a time."""
        yield from self.list_after(None)

    def list_after(self, key: str | None) -> Pages:
        """Those behind ``key``, ascending."""
        self._refuse_fork()
        left_out: Counter[str] = Counter()
        circle = _Circle(self.url)
        for page in self._pages(key):
            batch = []
            for meta in page:
                path = meta["path"]
                circle.look(path)
                # A folder's marker "name/" is listed as "name" of 0 bytes; asking for it tells them apart. That of the
                # prefix itself has no name.
                if not path or (meta["size"] == 0 and self._head(path) is None):
                    left_out["folder markers"] += 1
                    continue
                batch.append(Object(path, meta["size"], _bare(meta["e_tag"])))
            yield batch
        self._left_out = left_out

    def _pages(self, after: str | None) -> Iterator[Any]:
        patience = Patience(self._limits)
        while True:
            credentials = self._login.now()
            try:
                stream = credentials.value.listing().list(offset=after, chunk_size=KEYS)
                for page in bounded_pages(stream, self.url, self._limits):
                    yield page
                    after, patience = page[-1]["path"] if page else after, Patience(self._limits)
                return
            except _errors() as error:
                if not self._may_ask_again(error, patience, credentials):
                    raise as_our_error(error, place=self.url) from None

    def _may_ask_again(self, error: Exception, patience: Patience, credentials: Credentials[_Clients]) -> bool:
        """Whether the same request may succeed now: the store was too busy for it, or refused credentials in place of
        which there are others."""
        if patience.with_(error):
            return True
        if not isinstance(as_our_error(error, place=self.url), AccessDenied):
            return False
        patience.refusals += 1
        if renewed := self._login.renewed(credentials, patience.refusals):
            retried()
            if self._signed is not None:
                self._signed.renew()
        return renewed

    def _head(self, key: str) -> Any:
        """What the store says of an object; None where there is none."""
        patience = Patience(self._limits)
        while True:
            credentials = self._login.now()
            try:
                return credentials.value.reading.head(key)
            except FileNotFoundError:
                return None
            except _errors() as error:
                if not self._may_ask_again(error, patience, credentials):
                    raise as_our_error(error, place=self.url, key=key) from None

    def find(self, key: str) -> Object:
        """The object with this key below the prefix."""
        self._refuse_fork()
        meta = self._head(key)
        if meta is None:
            raise as_our_error(FileNotFoundError(), place=self.url, key=key)
        return Object(key, meta["size"], _bare(meta["e_tag"]))

    def get(self, item: Object) -> memoryview:
        """The whole object."""
        if self._signed is not None:
            self._refuse_fork()
            if (body := self._signed.get(item)) is not None:
                return body
        return self._get(item, None, item.size)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``; of a server that knows no ranges the beginning only."""
        if length == 0:
            return memoryview(b"")
        if start == 0 and not self._ranges:
            return self._get(item, None, length)
        return self._get(item, {"range": (start, start + length)}, length)

    def _get(self, item: Object, options: dict[str, Any] | None, want: int) -> memoryview:
        self._refuse_fork()
        patience = Patience(self._limits)
        try:
            while True:
                credentials = self._login.now()
                try:
                    response = credentials.value.reading.get(item.key, options=options)
                    break
                except _errors() as error:
                    if not self._may_ask_again(error, patience, credentials):
                        raise
            meta = response.meta
            check_identity(item, size=meta["size"], etag=_bare(meta["e_tag"]))
            if options is None and want < item.size:
                # All of it comes, and the connection is closed once the beginning is here.
                body = memoryview(bytes(next(iter(response.stream(min_chunk_size=want)), b""))[:want])
            else:
                body = memoryview(response.bytes())
        except _errors() as error:
            if options is not None and "non-partial response" in str(error):
                self._ranges = False
                if options["range"][0] == 0:
                    return self._get(item, None, want)
                raise SourceError(
                    f"{self.url}: {item.key!r}: the server ignores the Range header, so that parts of objects cannot be"
                    " read; cachetool convert URL fetches whole files"
                ) from None
            ours = as_our_error(error, place=self.url, key=item.key)
            if isinstance(ours, NotFound):
                raise NotFound(
                    f"{item.key!r} is not there any more; it was when {self.url} was listed\n"
                    "(a key that begins or ends with '/' is listed without it and cannot be fetched: rename it)"
                ) from None
            raise ours from None
        check_length(item, got=len(body), want=want)
        return body

    def close(self) -> None:
        """Other connections belong to obstore, which drops idle ones by itself."""
        if self._signed is not None:
            self._signed.close()


class _Circle:
    """Finds a listing that goes round in a circle, which obstore would follow for ever: a key comes again.

    One key is kept, the 1st, 2nd, 4th, 8th ... that came (Brent's method), so it is noticed within three rounds.
    """

    def __init__(self, place: str) -> None:
        self._place, self._left, self._power = place, 1, 1
        self._key: str | None = None

    def look(self, key: str) -> None:
        """The next key. Raises :class:`SourceError` when it was there before."""
        if key == self._key:
            raise SourceError(
                f"{self._place}: the list leads back into itself: {key[:200]!r} comes again;\n"
                "or two keys differ by a / at an end, which cannot be told apart: then rename one"
            ) from None
        self._left -= 1
        if not self._left:
            self._key, self._power = key, 2 * self._power
            self._left = self._power


def _errors() -> tuple[type[Exception], ...]:
    """What obstore raises: its own classes, and built-in ones for missing objects and for options it cannot use."""
    from obstore.exceptions import BaseError

    return BaseError, OSError, ValueError, TypeError


def _bare(etag: str | None) -> str | None:
    """An ETag without the quotes, which some servers put into listings and some do not."""
    return etag.strip('"') if etag else None


_LEAST = 2**20
"""Bytes of an object from which on it pays: signing takes a tenth of a millisecond."""
_PATIENCE = 8
"""Objects that may fail to come; then all others are left to obstore, too."""
_PROXIES = ("http_proxy", "all_proxy")


class Signed:
    """GETs of whole objects. ``sign`` gives the URL for a key; for many threads."""

    def __init__(self, sign: Callable[[str], str], limits: Limits) -> None:
        self._sign = sign
        self._limits = replace(limits, retry=1e-3, throttle=1e-3)  # one attempt
        self._client: HttpClient | None = None
        self._lock = threading.Lock()
        self._failures = 0
        self._usable = self._may = not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)

    def renew(self) -> None:
        """Try again after refusals: there are other credentials now."""
        self._usable, self._failures = self._may, 0

    def get(self, item: Object) -> memoryview | None:
        """The whole object; None when it should be asked for in another way. Raises :class:`BadObject` when it is not
        the listed one."""
        if not self._usable or item.size < _LEAST:
            return None
        try:
            url = self._sign(item.key)
            with self._lock:
                self._client = client = self._client or HttpClient(url, self._limits)
            response = client.fetch(url, size=item.size)
        except CacheToolError:
            self._failures += 1
            self._usable = self._failures < _PATIENCE
            return None
        if response.status != 200:
            self._usable = False  # it wants more than a signature
            return None
        check_identity(item, size=len(response.body), etag=response.headers.get("ETag", "").strip('"') or None)
        return response.body

    def close(self) -> None:
        """Close the connections of all threads."""
        if self._client is not None:
            self._client.close()
