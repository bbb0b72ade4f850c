"""Fetching the objects of one web server through obstore, which takes less processor time than :mod:`http.client`.

obstore makes one attempt here. If the object does not come as it should, the client of the standard library asks again
(:mod:`cachetool.stores.http_pages`). That client sees what obstore hides: the headers of an error (``Retry-After``), a
redirect, a body without a length.
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

# obstore follows redirects by itself to any address, without the credentials but with a `Referer`. Behind a proxy that
# does not exist, a redirect to another host fails, and the other client follows it with all checks.
_NOWHERE = "http://127.0.0.1:9"
"""Address of the proxy for all hosts but the server's. Nobody listens there."""
# obstore's time of change for an answer without one.
_NEVER = datetime.fromtimestamp(0, UTC)
_RATE = 16
"""Multiple of ``limits.min_rate`` that a large object must reach; otherwise the other client fetches it."""
# A server that obstore cannot use (redirects, no lengths) would otherwise be asked twice for every object.
_FAILURES = 8
"""Failed attempts in a row after which obstore is not used for :data:`_REST` seconds."""
_REST = 60.0
"""Seconds without obstore after :data:`_FAILURES` failed attempts."""


class IgnoresRanges(SourceError):
    """A whole object came instead of a part. It has ``size`` bytes; negative if the server does not say."""

    def __init__(self, what: str, size: int) -> None:
        super().__init__(
            f"{what}: the server ignores the Range header, so parts of objects cannot be read;"
            " copy the object to this machine first"
        )
        self.size = size


class ObjectClient:
    """A client that GETs objects. Used by many threads.

    Args:
        home: A URL of the origin that is trusted.
        limits: How long the server is waited for.
        login: The credentials, as the value of the header ``Authorization``. None: send none.
        hosts: Other hosts, with all names below them, to which redirects may lead unchecked.
    """

    def __init__(
        self, home: str, limits: Limits, login: Login[str | None] | None, *, hosts: Sequence[str] = ()
    ) -> None:
        self.pages = PageClient(home, limits, login=login)
        """The client of the standard library, for everything that is no object."""
        self._origin, self._limits, self._login = origin_of(home), limits, login
        parts = urlsplit(home)
        self._begins = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/"
        self._hosts = ",".join([self._origin.host, *hosts])
        self._lock = threading.Lock()
        self._stores: tuple[Credentials[str | None] | None, Any, Any] | None = None
        self._failures, self._rests_until = 0, 0.0
        self._watched = bounded.Watched(self._origin.port)
        # Size of the last object whose size no listing told. The next object is expected to be like it. A large object
        # that is requested as a small one is requested twice, which left a pull 0.64 of its speed.
        self._last_size = 0

    def get(self, url: str, item: Object, check: Callable[[Response], None]) -> Answer:
        """Return the object at a URL. ``check`` raises if an answer of the server is not the object.

        Raises:
            BadObject: If the object has another size than ``item``.
            SourceError: As :meth:`PageClient.fetch` does.
        """
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
        """Return the bytes [start, stop) of the object at a URL. ``what`` names the object in messages.

        Raises:
            IgnoresRanges: If the server sends the whole object.
            BadObject: If the server sends another part.
        """
        answer = self._fast(url, span[1] - span[0], span)
        if answer is None:
            said = f"{span[0]}-{span[1] - 1}"
            response = self.pages.fetch(url, headers={"Range": f"bytes={said}"}, most=span[1] - span[0])
            if response.status == 416:
                raise BadObject(f"{what} is shorter than when it was listed")
            # The whole object instead of the range; its body is not read, because it may be large.
            if response.status == 200:
                raise IgnoresRanges(what, response.answer.size)
            check(response)
            got = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")[0]
            # A server may send another range than asked for. Its bytes would be taken for those of other samples.
            if got != said:
                raise BadObject(f"{what}: the server sent another range ({got[:40]!r}) than the requested one")
            answer = response.answer
            check_length(Object(what, -1), got=len(answer.body), want=span[1] - span[0])
        return answer

    def close(self) -> None:
        """Close the connections of all threads. obstore closes its own when they are idle."""
        self.pages.close()

    def _fast(self, url: str, size: int, span: tuple[int, int] | None) -> Answer | None:
        """Return the answer that obstore gets; None if the other client should ask."""
        bounded.refuse_fork()
        path = self._path(url)
        if not path or time.monotonic() < self._rests_until:
            return None
        try:
            answer = self._get(path, size, {"range": span} if span else {})
        # Safe to suppress: the other client asks again, and its error says more.
        except bounded.errors():
            answer = None
        if answer is not None:
            # Threads count without a lock. A lost count only shifts the pause by an attempt.
            self._failures = 0
        else:
            retried()
            self._failures += 1
            if self._failures >= _FAILURES:
                self._rests_until = time.monotonic() + _REST
        return answer

    def _path(self, url: str) -> str:
        """Return the path of a URL in obstore's form; empty if obstore must not ask for this URL."""
        escaped = url[len(self._begins) :]
        # Other origins are left to the client that checks addresses. A query may be a signature, and obstore would send
        # it as `Referer` when it follows a redirect to another port of the host.
        if not url.startswith(self._begins) or "?" in escaped:
            return ""
        path = unquote(escaped, errors="surrogateescape")
        # An escaped slash (%2F) is part of a name. obstore would send it as a separator, and ask for another object.
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
                # A size that was guessed too small: the answer is dropped before its body, and the object is requested
                # again as a large one.
                if size >= 0 or total < bounded.LARGE:
                    return _answer(response, meta, response.bytes(), size)
            expected = self._last_size = total

        async def begin() -> Any:
            return await obstore.get_async(large, path, options=options)  # type: ignore[arg-type]

        # 32 requests are in flight, and memory is counted for the whole process, so each of them may bring an object of
        # this size.
        response = bounded.awaited(begin(), memory=bounded.PAGE_MEMORY + 32 * expected, seconds=self._limits.grace)
        meta = response.meta
        # Now the size is known: the limits of the body are those of the real size.
        if size < 0:
            expected = self._last_size = meta["size"]
        elif not options and meta["size"] != size:
            return None

        async def finish() -> Any:
            return await response.bytes_async()

        memory = bounded.PAGE_MEMORY + 32 * expected
        # A large object may take long, but must keep 16 times the least rate. A slower one is left to the client that
        # measures progress.
        seconds = self._limits.grace + expected / (_RATE * self._limits.min_rate)
        return _answer(response, meta, bounded.awaited(finish(), memory=memory, seconds=seconds), size)

    def _clients(self) -> tuple[Any, Any]:
        """Return obstore's clients for small and for large objects, with the present credentials."""
        credentials = self._login.now() if self._login is not None else None
        stores = self._stores
        # New clients for new credentials: obstore sends the headers that its client was made with. The look without the
        # lock is safe, because the tuple is replaced as a whole.
        if stores is None or stores[0] is not credentials:
            with self._lock:
                stores = self._stores
                if stores is None or stores[0] is not credentials:
                    stores = credentials, *self._new_clients(credentials.value if credentials is not None else None)
                    self._stores = stores
        return stores[1:]

    def _new_clients(self, authorization: str | None) -> tuple[Any, Any]:
        # Before obstore is imported: TOKIO_WORKER_THREADS, which this sets, is read when the runtime starts.
        bounded.begin()
        from obstore.store import HTTPStore

        origin, limits = self._origin, self._limits
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        # identity: a packed body has another length than the listing says.
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
                # No retries here: obstore does not see Retry-After, and the other client asks again with full checks.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=limits.retry)},
            )
            # Small objects must come within `grace` seconds. Large ones have a limit of their own in _get().
            for seconds in (limits.grace, 3600.0)
        )


def _answer(response: Any, meta: Any, body: Any, size: int) -> Answer | None:
    """Return the answer of obstore; None if the body is encoded, or is not as long as its headers say."""
    attributes, (start, stop) = response.attributes, response.range
    # The other client asks again and raises the precise error for each of these cases.
    if "Content-Encoding" in attributes or len(body) != stop - start or 0 <= size != len(body):
        return None
    # 1970 if the server does not say: such a time tells no versions apart.
    modified = meta["last_modified"]
    kind = attributes.get("Content-Type", "")
    return Answer(memoryview(body), meta["size"], meta["e_tag"] or "", modified if modified > _NEVER else None, kind)
