"""S3, Google Cloud Storage and Azure Blob through obstore.

obstore retries by itself, with full jitter. Its runtime does not survive ``fork``: a child whose parent has used it
hangs, so a store used in a forked child raises instead. Keys with an empty, ``.`` or ``..`` part or a control character
cannot be fetched by it; a listing that holds one is refused and names it, or with ``skip_unusable`` leaves it out by
name (:mod:`cachetool.stores.bucket_listing`).

A small object is put together by the thread that asks for it, a large one by obstore's own thread: the pieces of 2 GiB
take 2.0 s of a processor when each is handed over.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.request import getproxies, proxy_bypass

import cachetool.stores.bounded as bounded
from cachetool.core.errors import AccessDenied, BadObject, NotFound, SourceError, UsageError
from cachetool.stores.base import Batch, LeftOut, Limits, Object, Pages, check_identity, check_length, refuse_encoded
from cachetool.stores.bucket_listing import BucketList
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
from cachetool.stores.login import Credentials, Login
from cachetool.stores.origins import origin_of
from cachetool.stores.redact import redact, split_url
from cachetool.stores.traffic import retried

__all__ = ["ObjectStore", "open_object_store"]


def open_object_store(url: str, limits: Limits, *, skip_unusable: bool = False) -> ObjectStore:
    """The store at ``s3://bucket/prefix`` and its likes; nothing is fetched yet. ``skip_unusable``: a listing leaves
    out keys that cannot be asked for.

    Raises :class:`UsageError` for a URL that names no bucket, :class:`AccessDenied` without credentials.
    """
    bounded.begin()
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
        endpoint = str(options.get("endpoint", options.get("base_url", "")))
        client["allow_http"] = endpoint.startswith("http://")
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _read(bundle)
        shared = {"prefix": prefix.strip("/") or None, "retry_config": retry, **options}

        def make(silence: float) -> Any:
            timeouts = {**client, "read_timeout": timedelta(seconds=silence)}
            try:
                return store_class(bucket, client_options=timeouts, **shared)
            except bounded.errors() as error:
                raise as_our_error(error, place=place) from None

        pair = _Clients(
            make(limits.silence),
            functools.cache(lambda: make(limits.listing)),
            bounded.Watched(origin_of(endpoint).port if endpoint else 443),
            _own_list(place, scheme, bucket, prefix.strip("/"), options, limits),
            f"{endpoint} {options.get('account_name', '')}",
        )
        return Credentials(pair, identity, ends)

    retry = {
        "max_retries": 100,  # a connection that is refused takes no time: a server that begins anew needs seconds
        "retry_timeout": timedelta(seconds=limits.retry),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=min(3.0, limits.retry)),
            "base": 2,
        },
    }
    return ObjectStore(Login(clients), place, limits, skip_unusable=skip_unusable)


def _own_list(place: str, scheme: str, bucket: str, prefix: str, options: Options, limits: Limits) -> BucketList | None:
    """What lists a bucket in place of obstore; None where only obstore has the credentials, or goes through a proxy."""
    unsigned, keys = "skip_signature" in options, {}
    if scheme in ("gs", "gcs") and unsigned:
        url = f"{options.get('base_url', 'https://storage.googleapis.com')}/{bucket}"
    elif scheme in ("s3", "s3a") and (unsigned or "access_key_id" in options):
        host = str(options.get("endpoint", f"https://s3.{options['region']}.amazonaws.com"))
        # An endpoint with virtual hosts has the bucket's name in it already.
        url = host if options.get("virtual_hosted_style_request") else f"{host}/{bucket}"
        keys = {} if unsigned else {name: str(value) for name, value in options.items()}
    else:
        return None
    origin = origin_of(url)
    if getproxies().keys() & {origin.scheme, "all"} and not proxy_bypass(origin.host):
        return None
    return BucketList(place, url, prefix, keys, limits)


@dataclass(frozen=True, slots=True)
class _Clients:
    """obstore's stores with the credentials of one moment."""

    reading: Any
    listing: Callable[[], Any]
    """Makes another one with the limits that suit a listing, when it is first asked for."""
    watched: bounded.Watched
    """Around a call of the reading one."""
    own_list: BucketList | None
    """Lists keys that the others cannot name."""
    server: str
    """Tells the server from others that have buckets of the same names."""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"AWS_CA_BUNDLE names {path!r}, which cannot be read: {error.strerror}") from error


class ObjectStore:
    """One bucket or container, below a prefix; see :class:`cachetool.stores.base.Store`."""

    concurrency = 32

    def __init__(self, login: Login[_Clients], url: str, limits: Limits, *, skip_unusable: bool) -> None:
        """The clients, and the URL as it may be shown. Made by :func:`open_object_store`."""
        self._login, self._limits, self._skip_unusable = login, limits, skip_unusable
        self.url = url
        self._left_out = LeftOut()
        self._ranges = True
        """False once the server has answered a request for a part with all of it."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """All objects below the prefix, a page at a time."""
        yield from self.list_after(None)

    def place(self) -> str:
        """Server, bucket and prefix."""
        return f"{self._login.now().value.server} {self.url} {self._skip_unusable}"

    def folders(self, folder: str) -> Sequence[str]:
        """The folders right below one."""
        client = self._login.now().value.listing()
        try:
            answer = bounded.awaited(
                client.list_with_delimiter_async(folder or None), memory=bounded.PAGE_MEMORY, seconds=_SOON
            )
        except bounded.errors():  # the list itself says why
            return []
        return [str(name).strip("/") for name in answer["common_prefixes"]]

    def list_after(self, key: str | None, upto: str | None = None) -> Pages:
        """Those behind ``key``, ascending."""
        bounded.refuse_fork()
        left_out = self._left_out = LeftOut()
        circle = _Circle(self.url)
        for page in self._pages(key, left_out, upto):
            batch: Batch = []
            for meta in page:
                path = meta["path"]
                if upto is not None and _raw(path) > _raw(upto):
                    yield batch
                    return
                circle.look(path)
                # A folder's marker "name/" is listed as "name" of 0 bytes; asking for it tells them apart. That of the
                # prefix itself has no name.
                if not path or (meta["size"] == 0 and self._head(path) is None):
                    left_out["folder markers"] += 1
                    continue
                batch.append(Object(path, meta["size"], _bare(meta["e_tag"])))
            yield batch

    def _pages(self, after: str | None, left_out: LeftOut, upto: str | None) -> Iterator[Any]:
        patience = Patience(self._limits)
        while True:
            credentials = self._login.now()
            if self._skip_unusable and credentials.value.own_list is not None:
                try:
                    for page in credentials.value.own_list.pages(after, left_out, upto):
                        yield page
                        after = page[-1]["path"] if page else after
                    return
                except AccessDenied:  # or there are other credentials meanwhile
                    patience.refusals += 1
                    if not self._login.renewed(credentials, patience.refusals):
                        raise
                    continue
            try:
                stream = credentials.value.listing().list(offset=after, chunk_size=bounded.KEYS)
                for page in bounded.bounded_pages(stream, self.url, self._limits):
                    yield page
                    after, patience = page[-1]["path"] if page else after, Patience(self._limits)
                return
            except bounded.errors() as error:
                if type(error).__name__ == "InvalidPathError" and credentials.value.own_list is not None:
                    what, _, _ = str(as_our_error(error, place=self.url)).partition("\n")
                    raise BadObject(f"{what}\n{_SKIP}") from None
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
        return renewed

    def _head(self, key: str) -> Any:
        """What the store says of an object; None where there is none."""
        patience = Patience(self._limits)
        while True:
            credentials = self._login.now()
            try:
                with credentials.value.watched:
                    return credentials.value.reading.head(key)
            except FileNotFoundError:
                return None
            except bounded.errors() as error:
                if not self._may_ask_again(error, patience, credentials):
                    raise as_our_error(error, place=self.url, key=key) from None

    def find(self, key: str) -> Object:
        """The object with this key below the prefix."""
        bounded.refuse_fork()
        meta = self._head(key)
        if meta is None:
            raise as_our_error(FileNotFoundError(), place=self.url, key=key)
        return Object(key, meta["size"], _bare(meta["e_tag"]))

    def get(self, item: Object) -> memoryview:
        """The whole object."""
        return self._get(item, None, item.size)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``; of a server that knows no ranges the beginning only."""
        if length == 0:
            return memoryview(b"")
        if start == 0 and not self._ranges:
            return self._get(item, None, length)
        return self._get(item, {"range": (start, start + length)}, length)

    def _get(self, item: Object, options: dict[str, Any] | None, want: int) -> memoryview:
        bounded.refuse_fork()
        patience = Patience(self._limits)
        try:
            while True:
                credentials = self._login.now()
                try:
                    body = self._body(credentials.value, item, options, want)
                    break
                except bounded.errors() as error:
                    if not self._may_ask_again(error, patience, credentials):
                        raise
        except bounded.errors() as error:
            if options is not None and "non-partial response" in str(error):
                self._ranges = False
                if options["range"][0] == 0:
                    return self._get(item, None, want)
                raise SourceError(
                    f"{self.url}: {item.key!r}: the server ignores the Range header, so that parts of objects cannot be"
                    " read; copy it to a disk of this machine first"
                ) from None
            ours = as_our_error(error, place=self.url, key=item.key)
            if isinstance(ours, NotFound):
                raise NotFound(
                    f"{item.key!r} is not there any more; it was when {self.url} was listed (a key that begins or ends"
                    " with '/' is listed without it, and cannot be asked for)"
                ) from None
            raise ours from None
        check_length(item, got=len(body), want=want)
        return body

    def _body(self, clients: _Clients, item: Object, options: dict[str, Any] | None, want: int) -> memoryview:
        def check(response: Any) -> None:
            meta = response.meta
            refuse_encoded(f"{self.url}: {item.key!r}", response.attributes.get("Content-Encoding"))
            check_identity(item, size=meta["size"], etag=_bare(meta["e_tag"]))

        async def large() -> memoryview:
            response = await clients.reading.get_async(item.key, options=options)
            check(response)
            return memoryview(await response.bytes_async())

        only_beginning = options is None and want < item.size
        if want >= bounded.LARGE and not only_beginning:
            return bounded.awaited(large(), memory=bounded.PAGE_MEMORY + self.concurrency * want, seconds=3600.0)
        with clients.watched:
            response = clients.reading.get(item.key, options=options)
            check(response)
            if only_beginning:
                # All of it comes, and the connection is closed once the beginning is here.
                return memoryview(bytes(next(iter(response.stream(min_chunk_size=want)), b""))[:want])
            return memoryview(response.bytes())

    def close(self) -> None:
        """Connections belong to obstore, which drops idle ones by itself."""


_SOON = 5.0
"""Seconds after which a store is not waited for to name the folders of one."""
_SKIP = "leave such keys out, by name, with --on-error skip"


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


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _bare(etag: str | None) -> str | None:
    """An ETag without the quotes, which some servers put into listings and some do not."""
    return etag.strip('"') if etag else None
