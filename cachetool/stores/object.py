"""Object stores (S3, Google Cloud Storage and Azure Blob) through obstore.

obstore retries by itself, with full jitter. Its runtime does not survive ``fork``: in a child whose parent used obstore
each call hangs. So a store raises an error when it is used in a forked child.

obstore cannot fetch keys with an empty, ``.`` or ``..`` part or a control character. A listing that holds such a key is
refused and names it. With ``skip_unusable`` the listing leaves the key out, by name
(:mod:`cachetool.stores.bucket_listing`).
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
from cachetool.stores.base import LeftOut, Limits, Object, Page, Pages, check_identity, check_length, refuse_encoded
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
    """Open the store at ``s3://bucket/prefix`` or a similar URL. No request is made yet.

    With ``skip_unusable`` a listing leaves out keys that no request can name.

    Raises:
        UsageError: If the URL names no bucket, or an option cannot be sent.
        AccessDenied: If there are no credentials.
    """
    # Before obstore is imported: TOKIO_WORKER_THREADS, which this sets, is read when the runtime starts.
    bounded.begin()
    from obstore import store as obstore_store

    place = redact(url)
    scheme, location = split_url(url)
    bucket, _, prefix = location.partition("/")
    account = ""
    # abfss://container@account.dfs.core.windows.net/path: here the part before the `@` is the container, and not user
    # info.
    if scheme in ("abfs", "abfss") and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    # Refused and not dropped: the user meant such parts to have an effect, and the client would take them for a key.
    if "@" in bucket or "?" in location or "#" in bucket or ":" in bucket:
        raise UsageError(
            f"{place}: an object store's URL is {scheme}://BUCKET/PREFIX; user info and queries do not belong in it,\n"
            "credentials come from the environment"
        )
    if not bucket:
        raise UsageError(f"{place} names no bucket; write {scheme}://BUCKET/PREFIX")

    # A function, because the clients are made again with each new set of credentials (see stores/login.py).
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
        # EXPIRES is taken out of the options, because obstore refuses names that it does not know.
        identity, ends = identity_of(options), seconds_of(str(options.pop(EXPIRES, "")))
        # `timeout` bounds a whole request, large bodies included. One hour leaves the slow ones to `read_timeout`.
        client: dict[str, Any] = {"connect_timeout": timedelta(seconds=limits.connect), "timeout": timedelta(hours=1)}
        endpoint = str(options.get("endpoint", options.get("base_url", "")))
        # obstore refuses plain http by default. Only an endpoint that begins with http:// may lift this.
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
            # A second client, because read_timeout belongs to a client, and some servers need longer for a page of a
            # listing than `limits.silence`. A worker only reads objects, so this client is made at first use.
            functools.cache(lambda: make(limits.listing)),
            bounded.Watched(origin_of(endpoint).port if endpoint else 443),
            _own_list(place, scheme, bucket, prefix.strip("/"), options, limits),
            f"{endpoint} {options.get('account_name', '')}",
        )
        return Credentials(pair, identity, ends)

    retry = {
        # A refused connection fails in no time, and a server that restarts needs seconds. So `retry_timeout` ends the
        # retries, not their number.
        "max_retries": 100,
        "retry_timeout": timedelta(seconds=limits.retry),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=min(3.0, limits.retry)),
            "base": 2,
        },
    }
    return ObjectStore(Login(clients), place, limits, skip_unusable=skip_unusable)


def _own_list(place: str, scheme: str, bucket: str, prefix: str, options: Options, limits: Limits) -> BucketList | None:
    """Return the lister that can replace obstore's for this bucket.

    Return None if only obstore has the credentials, or if requests go through a proxy.
    """
    unsigned, keys = "skip_signature" in options, {}
    if scheme in ("gs", "gcs") and unsigned:
        url = f"{options.get('base_url', 'https://storage.googleapis.com')}/{bucket}"
    elif scheme in ("s3", "s3a") and (unsigned or "access_key_id" in options):
        host = str(options.get("endpoint", f"https://s3.{options['region']}.amazonaws.com"))
        # An endpoint with virtual hosts contains the bucket's name already.
        url = host if options.get("virtual_hosted_style_request") else f"{host}/{bucket}"
        keys = {} if unsigned else {name: str(value) for name, value in options.items()}
    else:
        return None
    origin = origin_of(url)
    # stores/http_pages.py knows no proxies. Behind a proxy its direct connection would time out, so the bucket is left
    # to obstore.
    if getproxies().keys() & {origin.scheme, "all"} and not proxy_bypass(origin.host):
        return None
    return BucketList(place, url, prefix, keys, limits)


@dataclass(frozen=True, slots=True)
class _Clients:
    """The obstore clients that were made with the credentials of one moment."""

    reading: Any
    listing: Callable[[], Any]
    """A function that returns a second client, whose time limits suit a listing."""
    watched: bounded.Watched
    """The context manager for calls of :attr:`reading`."""
    own_list: BucketList | None
    """The lister that can name all keys; None if there is none."""
    # Two servers may have buckets of one name. A list that was written down for one of them must not continue with the
    # other.
    server: str
    """A text that tells this server from others which have buckets of the same names."""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"AWS_CA_BUNDLE names {path!r}, which cannot be read: {error.strerror}") from error


class ObjectStore:
    """One bucket or container, below a prefix; see :class:`cachetool.stores.base.Store`. Made by
    :func:`open_object_store`.

    ``login`` gives the clients. ``url`` is the URL as it may be shown.
    """

    concurrency = 32

    def __init__(self, login: Login[_Clients], url: str, limits: Limits, *, skip_unusable: bool) -> None:
        self._login, self._limits, self._skip_unusable = login, limits, skip_unusable
        self.url = url
        self._left_out = LeftOut()
        self._ranges = True
        """False once the server has answered a request for a part with the whole object."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts and names of the objects that the last :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """Yield all objects below the prefix, a page at a time."""
        yield from self.list_after(None)

    def place(self) -> str:
        """Return server, bucket and prefix, and whether unusable keys are left out."""
        return f"{self._login.now().value.server} {self.url} {self._skip_unusable}"

    def folders(self, folder: str) -> Sequence[str]:
        """Return the folders directly below ``folder``; none if the store does not answer within :data:`_SOON`."""
        client = self._login.now().value.listing()
        try:
            answer = bounded.awaited(
                client.list_with_delimiter_async(folder or None), memory=bounded.PAGE_MEMORY, seconds=_SOON
            )
        # Safe to suppress: folders only help to cut the list into ranges, and the list itself reports the same error.
        except bounded.errors():
            return []
        return [str(name).strip("/") for name in answer["common_prefixes"]]

    def list_after(self, key: str | None, upto: str | None = None) -> Pages:
        """Yield the objects behind ``key``, ascending; see :class:`cachetool.stores.base.OrderedStore`."""
        bounded.refuse_fork()
        left_out = self._left_out = LeftOut()
        circle = _Circle(self.url)
        for page in self._pages(key, left_out, upto):
            batch = Page([], [], [])
            for meta in page:
                path = meta["path"]
                # Keys are compared as bytes, because stores list in this order and Python compares text by code points,
                # which differs for surrogates.
                if upto is not None and _raw(path) > _raw(upto):
                    yield batch
                    return
                circle.look(path)
                # obstore lists a folder's marker `name/` as `name` of 0 bytes, like an empty object. Only a HEAD
                # request tells them apart: `name` does not exist if it is a marker. The marker of the prefix itself has
                # no name.
                if not path or (meta["size"] == 0 and self._head(path) is None):
                    left_out["folder markers"] += 1
                    continue
                batch.keys.append(path)
                batch.sizes.append(meta["size"])
                batch.etags.append(_bare(meta["e_tag"]) or "")
            yield batch

    def _pages(self, after: str | None, left_out: LeftOut, upto: str | None) -> Iterator[Any]:
        patience = Patience(self._limits)
        while True:
            credentials = self._login.now()
            # obstore gives up the whole listing at a key that it cannot name, so with `skip_unusable` the own lister
            # comes first.
            if self._skip_unusable and credentials.value.own_list is not None:
                try:
                    for page in credentials.value.own_list.pages(after, left_out, upto):
                        yield page
                        # The last key is kept, so that after a refusal the listing continues behind it with new
                        # credentials: no key is lost or doubled.
                        after = page[-1]["path"] if page else after
                    return
                # The keys may have expired in the middle of a long listing while new ones are in the file.
                except AccessDenied:
                    patience.refusals += 1
                    if not self._login.renewed(credentials, patience.refusals):
                        raise
                    continue
            # Outside of the `try`: an error of this call is an error of cachetool already.
            client = credentials.value.listing()
            try:
                stream = client.list(offset=after, chunk_size=bounded.KEYS)
                for page in bounded.bounded_pages(stream, self.url, self._limits):
                    yield page
                    # A page that came ends the series of failures, so the next failure may wait as long as the first.
                    after, patience = page[-1]["path"] if page else after, Patience(self._limits)
                return
            except bounded.errors() as error:
                if type(error).__name__ == "InvalidPathError" and credentials.value.own_list is not None:
                    # The second line of that error advises a longer prefix. Here `--on-error skip` works, and is the
                    # better advice.
                    what, _, _ = str(as_our_error(error, place=self.url)).partition("\n")
                    raise BadObject(f"{what}\n{_SKIP}") from None
                if not self._may_ask_again(error, patience, credentials):
                    raise as_our_error(error, place=self.url) from None

    def _may_ask_again(self, error: Exception, patience: Patience, credentials: Credentials[_Clients]) -> bool:
        """Return True if the same request may succeed now.

        This is so if the store was only too busy, and if it refused credentials that have been replaced by others.
        """
        # First the busy store: a 503 says nothing about the credentials, and reading them again would not help.
        if patience.with_(error):
            return True
        if not isinstance(as_our_error(error, place=self.url), AccessDenied):
            return False
        patience.refusals += 1
        if renewed := self._login.renewed(credentials, patience.refusals):
            retried()
        return renewed

    def _head(self, key: str) -> Any:
        """Return the store's description of an object; None if there is no such object."""
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
        """Return the object with this key below the prefix."""
        bounded.refuse_fork()
        meta = self._head(key)
        if meta is None:
            raise as_our_error(FileNotFoundError(), place=self.url, key=key)
        return Object(key, meta["size"], _bare(meta["e_tag"]))

    def get(self, item: Object) -> memoryview:
        """Return the whole object."""
        return self._get(item, None, item.size)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``start``. A server without ranges can serve the beginning only."""
        if length == 0:
            return memoryview(b"")
        # The server ignores ranges. The beginning can still be read: the answer with the whole object is dropped after
        # its first piece.
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
            # obstore refuses a 200 in answer to a range and hides its body. This text of its error is the only sign of
            # that.
            if options is not None and "non-partial response" in str(error):
                self._ranges = False
                if options["range"][0] == 0:
                    return self._get(item, None, want)
                raise SourceError(
                    f"{self.url}: {item.key!r}: the server ignores the Range header, so parts of objects cannot be"
                    " read; copy the object to this machine first"
                ) from None
            ours = as_our_error(error, place=self.url, key=item.key)
            if isinstance(ours, NotFound):
                # obstore lists a key `a/` as `a`, and a request for `a` then fails. The message names this case,
                # because the object looks present.
                raise NotFound(
                    f"{item.key!r} does not exist any more; it did when {self.url} was listed (a key that begins or"
                    " ends with '/' is listed without the '/' and cannot be requested)"
                ) from None
            raise ours from None
        check_length(item, got=len(body), want=want)
        return body

    def _body(self, clients: _Clients, item: Object, options: dict[str, Any] | None, want: int) -> memoryview:
        def check(response: Any) -> None:
            meta = response.meta
            # First, because a packed object may have another length, and the message would then call it changed.
            refuse_encoded(f"{self.url}: {item.key!r}", response.attributes.get("Content-Encoding"))
            check_identity(item, size=meta["size"], etag=_bare(meta["e_tag"]))

        async def large() -> memoryview:
            response = await clients.reading.get_async(item.key, options=options)
            check(response)
            return memoryview(await response.bytes_async())

        # The server ignores ranges, and only the beginning is wanted: the whole object is requested and dropped on the
        # way.
        only_beginning = options is None and want < item.size
        if want >= bounded.LARGE and not only_beginning:
            # Other threads receive objects at the same time, up to `concurrency`, and the memory is that of the whole
            # process.
            return bounded.awaited(large(), memory=bounded.PAGE_MEMORY + self.concurrency * want, seconds=3600.0)
        with clients.watched:
            response = clients.reading.get(item.key, options=options)
            check(response)
            if only_beginning:
                # The server sends the whole object. obstore closes the connection when the stream is dropped: 10 ms and
                # 0.1 MB for a header.
                return memoryview(bytes(next(iter(response.stream(min_chunk_size=want)), b""))[:want])
            return memoryview(response.bytes())

    def close(self) -> None:
        """Do nothing: obstore owns the connections and drops idle ones by itself."""


_SOON = 5.0
"""Seconds after which a store is no longer waited for to name the folders in one."""
_SKIP = "leave such keys out with --on-error skip (it names them)"


# One key is kept: the 1st, 2nd, 4th, 8th ... that came (Brent's method). So memory stays constant, and a circle is
# noticed within three rounds.
class _Circle:
    """Detection of a listing that returns to an earlier page, because a key comes twice. obstore would follow it for
    ever."""

    def __init__(self, place: str) -> None:
        self._place, self._left, self._power = place, 1, 1
        self._key: str | None = None

    def look(self, key: str) -> None:
        """Take in the next key. Raise :class:`SourceError` if it came before."""
        if key == self._key:
            raise SourceError(
                f"{self._place}: the listing repeats itself: it has {key[:200]!r} twice;\n"
                "if two keys differ only by a / at the beginning or end, rename one of them"
            ) from None
        self._left -= 1
        if not self._left:
            self._key, self._power = key, 2 * self._power
            self._left = self._power


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _bare(etag: str | None) -> str | None:
    """Return an ETag without quotes."""
    # Some servers put quotes around ETags in listings and some do not. The ETag of the listing is compared with that of
    # the body.
    return etag.strip('"') if etag else None
