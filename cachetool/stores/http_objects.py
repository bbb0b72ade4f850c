"""Objects of one web server through obstore, which takes less processor time than :mod:`http.client`.

obstore retries here not once, and whatever does not come as it should is no answer: the standard library's client asks
again (:mod:`cachetool.stores.http_pages`), which sees what obstore hides: the headers of an error (``Retry-After``), a
redirect, a body without a length. obstore follows redirects by itself, without the credentials but with a ``Referer``,
to any address. So all other hosts are behind a proxy that does not exist, and URLs with a query are not asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import cachetool.stores.bounded as bounded
from cachetool.core.errors import BadObject, SourceError
from cachetool.stores.base import Limits, Object, check_identity, check_length
from cachetool.stores.http_pages import Answer, OtherSize, PageClient, Response
from cachetool.stores.login import Credentials, Login
from cachetool.stores.origins import origin_of
from cachetool.stores.traffic import retried

__all__ = ["IgnoresRanges", "ObjectClient"]

_NOWHERE = "http://127.0.0.1:9"
"""The proxy before all hosts but the server's: nobody listens there."""
_NEVER = datetime.fromtimestamp(0, UTC)
_RATE = 16
"""Times ``limits.min_rate`` that a large object must reach, or it is left to the other client."""
_FAILURES = 8
"""Answers in a row that did not come; then no object is asked for..."""
_REST = 60.0
"""...for so many seconds."""


class IgnoresRanges(SourceError):
    """All of an object came in place of a part of it: ``size`` bytes, less than 0 where the server does not say."""

    def __init__(self, what: str, size: int) -> None:
        super().__init__(
            f"{what}: the server ignores the Range header, so that parts of objects cannot be read;"
            " copy it to a disk of this machine first"
        )
        self.size = size


class ObjectClient:
    """GETs of objects. Used by many threads."""

    def __init__(
        self, home: str, limits: Limits, login: Login[str | None] | None, *, hosts: Sequence[str] = ()
    ) -> None:
        """``home``: a URL of the origin that is trusted. ``hosts``: where else its redirects may lead unchecked, names
        below them included."""
        self.pages = PageClient(home, limits, login=login)
        """For all that is no object."""
        self._origin, self._limits, self._login = origin_of(home), limits, login
        parts = urlsplit(home)
        self._begins = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/"
        self._hosts = ",".join([self._origin.host, *hosts])
        self._lock = threading.Lock()
        self._stores: tuple[Credentials[str | None] | None, Any, Any] | None = None
        self._failures, self._rests_until = 0, 0.0
        self._watched = bounded.Watched(self._origin.port)
        # Of the last object whose size no list told. The next is taken to be like it: one that is asked for as a small
        # object and turns out large is asked for again.
        self._last_size = 0

    def get(self, url: str, item: Object, check: Callable[[Response], None]) -> Answer:
        """The object at a URL; ``check`` refuses the answer of a server that is not the object. Raises
        :class:`BadObject` for one of another size than ``item`` has, and as :meth:`PageClient.fetch` does."""
        answer = self._fast(url, item.size, None)
        if answer is None:
            try:
                response = self.pages.fetch(url, size=item.size)
            except OtherSize as error:
                check_identity(item, size=error.size, etag=None)
                raise
            check(response)
            answer = response.answer
        return answer

    def part(self, url: str, span: tuple[int, int], what: str, check: Callable[[Response], None]) -> Answer:
        """Bytes [start, stop) of the object at a URL, which messages call ``what``. Raises :class:`IgnoresRanges` when
        the server does, :class:`BadObject` for another part."""
        answer = self._fast(url, span[1] - span[0], span)
        if answer is None:
            said = f"{span[0]}-{span[1] - 1}"
            response = self.pages.fetch(url, headers={"Range": f"bytes={said}"}, most=span[1] - span[0])
            if response.status == 416:
                raise BadObject(f"{what} is shorter than when it was listed")
            if response.status == 200:
                raise IgnoresRanges(what, response.answer.size)
            check(response)
            got = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")[0]
            if got != said:
                raise BadObject(f"{what}: the server sent another range ({got[:40]!r}) than the one asked for")
            answer = response.answer
            check_length(Object(what, -1), got=len(answer.body), want=span[1] - span[0])
        return answer

    def close(self) -> None:
        """Close the connections of all threads; obstore closes its own when they are idle."""
        self.pages.close()

    def _fast(self, url: str, size: int, span: tuple[int, int] | None) -> Answer | None:
        """What obstore brings; None when it should be asked for in another way."""
        bounded.refuse_fork()
        path = self._path(url)
        if not path or time.monotonic() < self._rests_until:
            return None
        try:
            answer = self._get(path, size, {"range": span} if span else {})
        except bounded.errors():
            answer = None
        if answer is not None:
            self._failures = 0
        else:
            retried()
            self._failures += 1
            if self._failures >= _FAILURES:
                self._rests_until = time.monotonic() + _REST
        return answer

    def _path(self, url: str) -> str:
        """The path of a URL as obstore wants it; empty when obstore would ask for another one, or must not ask."""
        escaped = url[len(self._begins) :]
        if not url.startswith(self._begins) or "?" in escaped:
            return ""
        path = unquote(escaped, errors="surrogateescape")
        return path if path.count("/") == escaped.count("/") else ""

    def _get(self, path: str, size: int, options: dict[str, Any]) -> Answer | None:
        import obstore

        small, large = self._clients()
        expected = size if size >= 0 else self._last_size
        if expected < bounded.LARGE:
            with self._watched:
                response = obstore.get(small, path, options=options)  # type: ignore[arg-type]
                meta = response.meta
                total = meta["size"]
                if not options and 0 <= size != total:
                    return None
                if size >= 0 or total < bounded.LARGE:
                    return _answer(response, meta, response.bytes(), size)
            expected = self._last_size = total

        async def begin() -> Any:
            return await obstore.get_async(large, path, options=options)  # type: ignore[arg-type]

        response = bounded.awaited(begin(), memory=bounded.PAGE_MEMORY + 32 * expected, seconds=self._limits.grace)
        meta = response.meta
        if size < 0:
            expected = self._last_size = meta["size"]
        elif not options and meta["size"] != size:
            return None

        async def finish() -> Any:
            return await response.bytes_async()

        memory = bounded.PAGE_MEMORY + 32 * expected  # so many may be on their way
        seconds = self._limits.grace + expected / (_RATE * self._limits.min_rate)
        return _answer(response, meta, bounded.awaited(finish(), memory=memory, seconds=seconds), size)

    def _clients(self) -> tuple[Any, Any]:
        """obstore's clients with the present credentials, for small and for large objects."""
        credentials = self._login.now() if self._login is not None else None
        stores = self._stores
        if stores is None or stores[0] is not credentials:
            with self._lock:
                stores = self._stores
                if stores is None or stores[0] is not credentials:
                    stores = credentials, *self._new_clients(credentials.value if credentials is not None else None)
                    self._stores = stores
        return stores[1:]

    def _new_clients(self, authorization: str | None) -> tuple[Any, Any]:
        bounded.begin()
        from obstore.store import HTTPStore

        origin, limits = self._origin, self._limits
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        headers = {"accept-encoding": "identity"} | ({"authorization": authorization} if authorization else {})
        options: dict[str, Any] = {
            "allow_http": origin.scheme == "http",
            "connect_timeout": timedelta(seconds=limits.connect),
            "read_timeout": timedelta(seconds=limits.silence),
            "proxy_url": _NOWHERE,
            "proxy_excludes": self._hosts,
            "default_headers": headers,
            "user_agent": "cachetool",
        }
        return tuple(  # type: ignore[return-value]
            HTTPStore(
                f"{origin.scheme}://{host}:{origin.port}",
                client_options={**options, "timeout": timedelta(seconds=seconds)},  # type: ignore[arg-type]
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=limits.retry)},
            )
            for seconds in (limits.grace, 3600.0)
        )


def _answer(response: Any, meta: Any, body: Any, size: int) -> Answer | None:
    """None for a body that is encoded, or is not as long as its headers say."""
    attributes, (start, stop) = response.attributes, response.range
    if "Content-Encoding" in attributes or len(body) != stop - start or 0 <= size != len(body):
        return None
    modified = meta["last_modified"]  # 1970 where the server does not tell
    kind = attributes.get("Content-Type", "")
    return Answer(memoryview(body), meta["size"], meta["e_tag"] or "", modified if modified > _NEVER else None, kind)
