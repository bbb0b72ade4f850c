"""Protocols and checks that all stores share. A store holds remote bytes by key, under one URL.

A key is relative to the store's URL, with ``/`` between its parts. A key is only a name: no key of a remote store
becomes a local path. Many threads of one process use a store at once. A forked child never uses the store of its
parent.
"""

from __future__ import annotations

import errno
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self, overload, runtime_checkable

from cachetool.core.errors import BadObject, UsageError
from cachetool.stores.redact import printable

__all__ = [
    "Batch",
    "CHANGED",
    "EXHAUSTED",
    "HTTP_SCHEMES",
    "LeftOut",
    "OBJECT_SCHEMES",
    "SCHEMES",
    "ZARR_METADATA",
    "Limits",
    "Object",
    "Opening",
    "OrderedStore",
    "Page",
    "Pages",
    "SortedStore",
    "Store",
    "StoreAround",
    "Telling",
    "check_identity",
    "check_length",
    "check_listed",
    "refuse_encoded",
]

ZARR_METADATA = (".zarray", ".zgroup", ".zattrs")
"""Names of Zarr metadata that begin with a dot and still count as visible."""
OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")
HTTP_SCHEMES = ("http", "https")
# Defined here and not in stores/registry.py: stores/other.py names the schemes in its messages, and the registry
# imports stores/other.py. The import would be a circle.
SCHEMES = ("file", *OBJECT_SCHEMES, *HTTP_SCHEMES, "hf", "sftp")
"""Schemes that this package serves itself. Any other scheme is tried with fsspec."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Error numbers of an OSError that say what the machine lacks. They say nothing about the file that was opened."""


@dataclass(frozen=True, slots=True)
class Object:
    """One remote object, as a listing names it.

    Example:
        >>> Object("train/000001.npy", 3072, "9b2cf535f27731c9")
        Object(key='train/000001.npy', size=3072, etag='9b2cf535f27731c9')
    """

    key: str
    """The name, relative to the store's URL. Bytes that are not UTF-8 become surrogates, as in :func:`os.fsdecode`."""
    size: int
    """Size in bytes; -1 if the listing does not say it (plain HTTP indexes)."""
    etag: str | None = None
    """The store's identity of this content, without quotes; None if the store has none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a store is waited for, and the least speed of a transfer.

    With the defaults, a store is given up within 30 s if it cannot be reached, or accepts a connection and sends
    nothing.

    Raises:
        UsageError: If a limit is not above 0.

    Example:
        >>> Limits(retry=60.0).retry
        60.0
    """

    connect: float = 5.0
    """Seconds until a connection is established."""
    silence: float = 8.0
    """Seconds without a single byte, after which an attempt is given up."""
    listing: float = 25.0
    """Seconds without a byte of a page of an object store's listing: some servers need long to make a page."""
    page: float = 600.0
    """Seconds for 1,000 more keys of an object store's listing, or for its end. Many answers may be empty."""
    # The last attempt may begin just before these 18 s are over. It then lasts up to `connect` or `silence`, so a store
    # that says nothing is given up within 30 s.
    retry: float = 18.0
    """Seconds after the first attempt, after which no further attempt begins. A server may ask to wait longer."""
    throttle: float = 600.0
    """Seconds in all that a request is repeated while the server answers "slow down"."""
    min_rate: float = 1024.0
    """Bytes a second that a transfer must reach after :attr:`grace` seconds."""
    grace: float = 30.0
    """Seconds that a transfer may run before :attr:`min_rate` applies."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"limit {name} must be above 0, got {getattr(self, name)}")


KEY_BYTES = 4096
"""Most bytes of a key or of an ETag: the longest path that Linux takes. The clouds end at 1,024."""
LARGEST = 2**48
"""Limit of an object's size in bytes; every object is smaller. The largest object of any cloud has 190 TiB."""

CHANGED = (
    "\nlist the source again with --refresh, pull the changed files into another --dataset,"
    " or leave them out with --on-error skip"
)
"""Advice for an object that is not the listed one."""

MAX_NAMED = 100
"""Most names that :class:`LeftOut` keeps; further names are only counted."""


class LeftOut(Counter[str]):
    """Objects that a listing passed over: ``{"reason": count}``, and the names of the first ones that a user may miss.

    Args:
        counts: Count of objects by reason.
        named: Pairs of name and reason, as another :class:`LeftOut` has them after a trip through JSON.
        more: Number of objects that were counted but not named.
    """

    def __init__(
        self, counts: Mapping[str, int] = MappingProxyType({}), named: Iterable[Sequence[str]] = (), more: int = 0
    ) -> None:
        super().__init__(counts)
        self.named = [(str(name), str(why)) for name, why in named]
        self.more = more

    def add(self, key: str, reason: str, why: str) -> None:
        """Count ``key`` under ``reason``, and keep its name. ``why`` is the reason for one object, with what to do."""
        self[reason] += 1
        # The key comes from a remote listing. Its control characters must not reach the user's terminal.
        self._name(printable(key), why)

    def _name(self, name: str, why: str) -> None:
        if len(self.named) < MAX_NAMED:
            self.named.append((name, why))
        else:
            self.more += 1

    def joined(self, others: Mapping[str, int]) -> Self:
        """Add the counts and names of ``others`` to this one, and return this one."""
        # Counter.update adds the counts; it does not replace them as dict.update does.
        self.update(others)
        if isinstance(others, LeftOut):
            self.more += others.more
            for name, why in others.named:
                self._name(name, why)
        return self

    def listed(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of name and reason. A last pair counts the objects without a name."""
        return (*self.named, ("...", f"and {self.more} more")) if self.more else tuple(self.named)


class Page(Sequence[Object]):
    """Objects of a listing as three columns, so that a million names need no million objects.

    Args:
        keys: Key of each object.
        sizes: Size of each object in bytes; -1 if unknown.
        etags: ETag of each object; an empty text if the store has none.
    """

    __slots__ = ("etags", "keys", "sizes")

    def __init__(self, keys: list[str], sizes: list[int], etags: list[str]) -> None:
        self.keys, self.sizes, self.etags = keys, sizes, etags

    @classmethod
    def of(cls, objects: Sequence[Object]) -> Page:
        """Return ``objects`` as a page; a page is returned as it is."""
        if isinstance(objects, Page):
            return objects
        return cls([one.key for one in objects], [one.size for one in objects], [one.etag or "" for one in objects])

    def at(self, places: Sequence[int]) -> Page:
        """Return the objects at these positions as a page."""
        keys, sizes, etags = self.keys, self.sizes, self.etags
        return Page([keys[at] for at in places], [sizes[at] for at in places], [etags[at] for at in places])

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> Object: ...
    @overload
    def __getitem__(self, at: slice) -> Page: ...
    def __getitem__(self, at: int | slice) -> Object | Page:
        if isinstance(at, slice):
            return Page(self.keys[at], self.sizes[at], self.etags[at])
        return Object(self.keys[at], self.sizes[at], self.etags[at] or None)

    def __iter__(self) -> Iterator[Object]:
        return (
            Object(key, size, etag or None) for key, size, etag in zip(self.keys, self.sizes, self.etags, strict=True)
        )


Batch = Sequence[Object]
Pages = Iterator[Batch]
"""A listing as it arrives: batches of objects, each a list or a :class:`Page`."""


class Store(Protocol):
    """Remote bytes by key. A class that has these members is a store; no base class is needed.

    Many threads call the methods at once.

    Example:
        >>> def total_bytes(store: Store) -> int:
        ...     return sum(len(store.get(item)) for page in store.list() for item in page)
    """

    url: str
    """The URL without user info and query: safe to show and to store."""
    concurrency: int
    """Number of requests in flight at once that serve this store well."""

    def list(self) -> Pages:
        """Yield all objects, in batches, in no promised order. "Folders" (keys that end in ``/``) are left out.

        Returns:
            An iterator over lists of :class:`Object`, or over :class:`Page` objects. Either may be empty.

        Raises:
            NotFound: If the bucket or folder does not exist.
            AccessDenied: If credentials are missing or refused.
            Unreachable: If the store does not answer in time.
        """
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts of the objects that the last finished :meth:`list` passed over: ``{"reason": count}``.

        A :class:`LeftOut` also has names.
        """
        ...

    def find(self, key: str) -> Object:
        """Return one object by its key, as a listing would name it.

        If the listing has no size or ETag, both come from the server's answer for this object.

        Args:
            key: The name, relative to the store's URL.

        Returns:
            The object with its present size and ETag.

        Raises:
            NotFound: If there is no such object. The message names the key.
            AccessDenied: If credentials are missing or refused.
            Unreachable: If the store does not answer in time.
        """
        ...

    def get(self, item: Object) -> memoryview:
        """Return the whole object.

        Args:
            item: The object as it was listed. Its size and its ETag, where known, are compared with the answer.

        Returns:
            All bytes, read-only.

        Raises:
            BadObject: If size or ETag differ from those of ``item``.
            NotFound: If the object is gone.
            AccessDenied: If credentials are missing or refused.
            Unreachable: If the store does not answer in time.
        """
        ...

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return a part of an object.

        Args:
            item: The object as it was listed.
            start: Offset of the first byte.
            length: Number of bytes.

        Returns:
            Exactly ``length`` bytes, read-only.

        Raises:
            BadObject: If the object is shorter than asked for, or size or ETag differ from those of ``item``.
            NotFound: If the object is gone.
            AccessDenied: If credentials are missing or refused.
            Unreachable: If the store does not answer in time.
        """
        ...

    def close(self) -> None:
        """Close all connections. May be called twice."""
        ...


@runtime_checkable
class Telling(Protocol):
    """A store whose answers name the content (an ETag), although its listing does not. An optional protocol."""

    def seen(self) -> Mapping[str, str]:
        """Return the ETag by key that parts of objects had so far. Only the objects asked for last are kept."""
        ...


@runtime_checkable
class Opening(Protocol):
    """A store of this machine, whose files are opened once and then read from several places. An optional protocol."""

    def opened(self, item: Object) -> io.RawIOBase:
        """Return the object as an open file. Opening and reading raise the errors of :meth:`Store.get`."""
        ...


@runtime_checkable
class SortedStore(Store, Protocol):
    """A store that can list its keys in ascending order of their bytes. An optional protocol.

    A listing of such a store can continue after a key.

    Example:
        >>> def keys_after(store: SortedStore, key: str) -> list[str]:
        ...     return [item.key for page in store.list_after(key) or () for item in page]
    """

    def list_after(self, key: str | None) -> Pages | None:
        """Yield the objects with a key above ``key``, ascending.

        :attr:`Store.left_out` grows page by page meanwhile.

        Args:
            key: The listing begins behind this key. None: list from the beginning.

        Returns:
            An iterator over batches of objects; None if the keys of this place cannot be listed in order.

        Raises:
            NotFound: If the folder does not exist.
            AccessDenied: If credentials are missing or refused.
            Unreachable: If the store does not answer in time.
        """
        ...


@runtime_checkable
class OrderedStore(Store, Protocol):
    """A remote store that lists its keys in ascending order of their bytes. An optional protocol.

    Several ranges of its keys can be listed at once, and a listing continues after a kill.

    Example:
        >>> def keys_upto(store: OrderedStore, key: str) -> list[str]:
        ...     return [item.key for page in store.list_after(None, key) for item in page]
    """

    def place(self) -> str:
        """Return a text that tells this listing from all others.

        Returns:
            The server, the place there, and which of its keys are left out.
        """
        ...

    def list_after(self, key: str | None, upto: str | None = None) -> Pages:
        """Yield the objects with a key above ``key``, ascending; see :class:`SortedStore`.

        Args:
            key: The listing begins behind this key. None: list from the beginning.
            upto: Last key of the listing, itself included. None: list to the end.

        Returns:
            An iterator over batches of objects.

        Raises:
            NotFound: If the bucket does not exist.
            AccessDenied: If credentials are missing or refused.
            Unreachable: If the store does not answer in time.
        """
        ...

    def folders(self, folder: str) -> Sequence[str]:
        """Return the folders directly below ``folder``.

        Args:
            folder: A folder's key; ``""`` is the store's own place.

        Returns:
            Names without a ``/`` at the end. Empty if the store does not answer soon.
        """
        ...


def check_identity(item: Object, *, size: int | None, etag: str | None) -> None:
    """Raise :class:`BadObject` if an object is not the listed one. The message names the key.

    ``size`` and ``etag`` are what the store says now; None if it does not say.
    """
    if size is not None and item.size >= 0 and size != item.size:
        raise BadObject(f"{item.key!r} changed since it was listed ({size} bytes instead of {item.size});{CHANGED}")
    # Every answer is compared; no request sends If-Match. If-Match would only save the transfer of a changed object,
    # and servers quote its value differently.
    if item.etag is not None and etag is not None and etag != item.etag:
        raise BadObject(f"{item.key!r} changed since it was listed (another ETag or modification time);{CHANGED}")


def check_length(item: Object, *, got: int, want: int) -> None:
    """Raise :class:`BadObject`, naming the key, if a body has ``got`` bytes instead of ``want``."""
    if got != want:
        raise BadObject(f"{item.key!r}: {got} bytes came instead of {want}")


def refuse_encoded(what: str, encoding: str | None) -> None:
    """Raise :class:`BadObject` if the ``Content-Encoding`` of the object ``what`` says that its bytes are packed.

    Sizes, ranges and ETags would be those of the packed bytes.
    """
    if packed := {word.strip().lower() for word in (encoding or "").split(",")} - _UNPACKED:
        raise BadObject(
            f"{what} has Content-Encoding: {printable(', '.join(sorted(packed)))[:40]}, which cachetool cannot unpack;"
            " copy such objects to a folder and unpack them there"
        )


_UNPACKED = frozenset({"", "identity", "aws-chunked"})
"""Encodings that leave the bytes unchanged. Some clients of S3 leave ``aws-chunked`` at a stored object."""


def check_listed(item: Object, url: str) -> None:
    """Raise :class:`BadObject` for a key, size or ETag that no store can mean. The listing of ``url`` may say
    anything."""
    why = ""
    try:
        # Names that are not UTF-8 carry their bytes as surrogates, which surrogateescape turns back. Any other half of
        # a surrogate pair has no bytes, so a listing with it could not be written to the disk.
        key, etag = item.key.encode("utf-8", "surrogateescape"), (item.etag or "").encode("utf-8", "surrogateescape")
        if (longest := max(len(key), len(etag))) > KEY_BYTES:
            why = f" or its ETag has {longest} bytes; at most {KEY_BYTES} are allowed"
        elif not -1 <= item.size < LARGEST:
            why = f" has an impossible size: {item.size} bytes"
    except UnicodeEncodeError:
        why = " or its ETag is not valid Unicode: it has half of a surrogate pair"
    if why:
        raise BadObject(f"{url}: the listed key {printable(item.key[:80])!r}{why};{_LEAVE_OUT}")


_LEAVE_OUT = "\nleave such objects out with --on-error skip (it names them)"


class StoreAround:
    """A store that passes calls on to another store. Base class of stores that limit or cache bodies."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url, self.concurrency = store.url, store.concurrency

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts of the wrapped store; see :class:`Store`."""
        return self._store.left_out

    def list(self) -> Pages:
        """Yield the pages of the wrapped store; see :class:`Store`."""
        return self._store.list()

    def find(self, key: str) -> Object:
        """Return an object of the wrapped store; see :class:`Store`."""
        return self._store.find(key)

    def close(self) -> None:
        """Close the wrapped store; see :class:`Store`."""
        self._store.close()
