"""What a store is: remote bytes by key, under one URL.

Keys are relative to the store's URL, with ``/`` between parts, and are only ever used as names: no key becomes a local
path. Store objects are used by many threads of one process at once, and never in a forked child.
"""

from __future__ import annotations

import errno
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self, runtime_checkable

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
    "Pages",
    "Store",
    "StoreAround",
    "Telling",
    "check_identity",
    "check_length",
    "check_listed",
    "refuse_encoded",
]

ZARR_METADATA = (".zarray", ".zgroup", ".zattrs")
"""Names that begin with a dot and yet are no hidden ones."""
OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")
HTTP_SCHEMES = ("http", "https")
SCHEMES = ("file", *OBJECT_SCHEMES, *HTTP_SCHEMES, "hf", "sftp")
"""Schemes that this package serves itself; any other is tried with fsspec."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Numbers of an OSError that say what the machine lacks, and nothing about the file it met."""


@dataclass(frozen=True, slots=True)
class Object:
    """One remote object as the listing names it."""

    key: str
    """Relative to the store's URL; bytes that are not UTF-8 as surrogates, as :func:`os.fsdecode` has them."""
    size: int
    """Bytes; -1 where the listing does not say (plain HTTP indexes)."""
    etag: str | None = None
    """The store's identity of this content, without quotes; None where it has none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a store is waited for, in seconds.

    With the defaults a store that cannot be reached, or accepts and says nothing, is given up within 30 s.
    """

    connect: float = 5.0
    """Until a connection stands."""
    silence: float = 8.0
    """Without a single byte: the attempt is given up."""
    listing: float = 25.0
    """The same for a page of an object store's listing, which some servers take long to put together."""
    page: float = 600.0
    """For 1,000 more keys of an object store's listing or its end, in however many answers; many may be empty."""
    retry: float = 18.0
    """After the first attempt: no further attempt begins, unless the server itself asked to wait."""
    throttle: float = 600.0
    """In all, when the server answers "slow down"."""
    min_rate: float = 1024.0
    """Bytes a second that a transfer must reach..."""
    grace: float = 30.0
    """...once it has run for so long."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"limit {name} must be above 0, got {getattr(self, name)}")


KEY_BYTES = 4096
"""A key, or an ETag, is at most so long: what a path may have; the clouds end at 1,024."""
LARGEST = 2**48
"""Bytes of an object are less; the largest that a cloud takes has 190 TiB."""

CHANGED = (
    "\nlist objects again with --refresh, draw changed files into another --dataset, or leave out with --on-error skip"
)
"""What to do about an object that is not the listed one."""

MAX_NAMED = 100
"""Names that :class:`LeftOut` keeps; more are counted."""


class LeftOut(Counter[str]):
    """What a listing passed over, ``{"reason": count}``; the first of those that a user may miss also by name."""

    def __init__(
        self, counts: Mapping[str, int] = MappingProxyType({}), named: Iterable[Sequence[str]] = (), more: int = 0
    ) -> None:
        """``named`` and ``more`` are those of another one, as JSON has them."""
        super().__init__(counts)
        self.named = [(str(name), str(why)) for name, why in named]
        self.more = more

    def add(self, key: str, reason: str, why: str) -> None:
        """Count ``key`` for its reason, and name it; ``why`` says it of one, with what to do."""
        self[reason] += 1
        self._name(printable(key), why)

    def _name(self, name: str, why: str) -> None:
        if len(self.named) < MAX_NAMED:
            self.named.append((name, why))
        else:
            self.more += 1

    def joined(self, others: Mapping[str, int]) -> Self:
        """This one, with those that another one has."""
        self.update(others)
        if isinstance(others, LeftOut):
            self.more += others.more
            for name, why in others.named:
                self._name(name, why)
        return self

    def listed(self) -> tuple[tuple[str, str], ...]:
        """Names and why, with a last line for those that are only counted."""
        return (*self.named, ("...", f"and {self.more} more")) if self.more else tuple(self.named)


Batch = list[Object]
Pages = Iterator[Batch]
"""A listing as it arrives."""


class Store(Protocol):
    """Remote bytes by key."""

    url: str
    """The place, without user info and query: fit to be shown and stored."""
    concurrency: int
    """How many requests in flight at once serve this store well."""

    def list(self) -> Pages:
        """All objects, in batches, in no promised order; "folders" (keys ending in ``/``) left out.

        Raises :class:`NotFound` when the bucket or folder does not exist, :class:`AccessDenied`, :class:`Unreachable`.
        """
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last finished :meth:`list` passed over, as ``{"reason": count}``; :class:`LeftOut` has names too."""
        ...

    def find(self, key: str) -> Object:
        """One object by its key, as a listing would name it; where the listing has no size or ETag, what the object's
        own answer tells.

        Raises :class:`NotFound` naming the key, :class:`AccessDenied`, :class:`Unreachable`.
        """
        ...

    def get(self, item: Object) -> memoryview:
        """The whole object, read-only. Its length and, where known, its ETag are those of ``item``.

        Raises :class:`BadObject` when they are not, :class:`NotFound`, :class:`AccessDenied`, :class:`Unreachable`.
        """
        ...

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``; errors as for :meth:`get`, also when the object is shorter."""
        ...

    def close(self) -> None:
        """Let go of connections. May be called twice."""
        ...


@runtime_checkable
class Telling(Protocol):
    """An optional power: stores whose answers tell which content they are of, although the listing does not."""

    def seen(self) -> Mapping[str, str]:
        """The ETag that parts of objects had so far, by key; of those asked for last."""
        ...


@runtime_checkable
class Opening(Protocol):
    """An optional power: stores of this machine, whose files are opened once and read here and there."""

    def opened(self, item: Object) -> io.RawIOBase:
        """The object as a file. Opening and reading raise what :meth:`Store.get` raises."""
        ...


@runtime_checkable
class OrderedStore(Store, Protocol):
    """A store that lists in the order of its keys, as bytes."""

    def place(self) -> str:
        """The server, the place there, and which of its keys are left out: tells this list from all others."""
        ...

    def list_after(self, key: str | None, upto: str | None = None) -> Pages:
        """All objects behind ``key`` (None: all), up to and with ``upto``, ascending; otherwise as :meth:`list`. What
        is passed over is in :attr:`left_out` page by page."""
        ...

    def folders(self, folder: str) -> Sequence[str]:
        """Names of the folders right below one (``""``: the place itself), without a ``/`` at the end; none where the
        store does not say it soon."""
        ...


def check_identity(item: Object, *, size: int | None, etag: str | None) -> None:
    """Refuse an object that is not the one listed, by the size and ETag the store now tells (None: it tells none).

    Raises :class:`BadObject` naming the key.
    """
    if size is not None and item.size >= 0 and size != item.size:
        raise BadObject(f"{item.key!r} changed since it was listed ({size} bytes instead of {item.size});{CHANGED}")
    if item.etag is not None and etag is not None and etag != item.etag:
        raise BadObject(f"{item.key!r} changed since it was listed (another ETag, or another time);{CHANGED}")


def check_length(item: Object, *, got: int, want: int) -> None:
    """Refuse a body of ``got`` bytes where ``want`` were promised. Raises :class:`BadObject` naming the key."""
    if got != want:
        raise BadObject(f"{item.key!r}: {got} bytes came instead of {want}")


def refuse_encoded(what: str, encoding: str | None) -> None:
    """Raise :class:`BadObject` for an object ``what`` whose bytes are packed, as its ``Content-Encoding`` says: sizes,
    ranges and ETags are those of the packed bytes."""
    if packed := {word.strip().lower() for word in (encoding or "").split(",")} - _UNPACKED:
        raise BadObject(
            f"{what} comes with Content-Encoding: {printable(', '.join(sorted(packed)))[:40]}, which is not unpacked"
            " here: copy such objects to a folder and unpack them there"
        )


_UNPACKED = frozenset({"", "identity", "aws-chunked"})
"""Encodings that leave the bytes as they are; the last one is what some clients of S3 leave behind."""


def check_listed(item: Object, url: str) -> None:
    """Raise :class:`BadObject` for what no store can mean: the listing of ``url`` may say anything."""
    why = ""
    try:
        key, etag = item.key.encode("utf-8", "surrogateescape"), (item.etag or "").encode("utf-8", "surrogateescape")
        if (longest := max(len(key), len(etag))) > KEY_BYTES:
            why = f", or its ETag, goes on for {longest} bytes; at most {KEY_BYTES} are taken"
        elif not -1 <= item.size < LARGEST:
            why = f" is said to have {item.size} bytes"
    except UnicodeEncodeError:
        why = ", or its ETag, is no text: it has half of a surrogate pair"
    if why:
        raise BadObject(f"{url}: the listed key {printable(item.key[:80])!r}{why};{_LEAVE_OUT}")


_LEAVE_OUT = "\nleave such objects out, by name, with --on-error skip"


class StoreAround:
    """A store that passes to another one what it does not do itself; a base for limits and caches of bodies."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url, self.concurrency = store.url, store.concurrency

    @property
    def left_out(self) -> Mapping[str, int]:
        """See :class:`Store`."""
        return self._store.left_out

    def list(self) -> Pages:
        """See :class:`Store`."""
        return self._store.list()

    def find(self, key: str) -> Object:
        """See :class:`Store`."""
        return self._store.find(key)

    def close(self) -> None:
        """See :class:`Store`."""
        self._store.close()
