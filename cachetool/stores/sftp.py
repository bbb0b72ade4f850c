"""Folders on machines that are reached by SSH, through asyncssh. Only this module imports asyncssh.

User, keys and trusted servers are those of ``ssh``: ``~/.ssh/config``, the agent, the keys in ``~/.ssh``, and
``~/.ssh/known_hosts``. A server that is not in ``known_hosts`` is refused. asyncssh's event loop runs in a thread of
its own. A broken connection is made again, and reading a file continues where it stopped. The "ETag" of a file is its
time of modification and its size.
"""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Sized
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from cachetool.core.errors import (
    AccessDenied,
    BadObject,
    CacheToolError,
    MissingExtra,
    NotFound,
    SourceError,
    Unreachable,
    UsageError,
)
from cachetool.stores.base import LeftOut, Limits, Object, Pages, check_identity, check_length
from cachetool.stores.redact import redact, scrub, usable_host
from cachetool.stores.traffic import retried
from cachetool.stores.walk import FOLLOW, Walk

__all__ = ["SftpStore", "open_sftp_store"]

_PART = 2**20
_REQUEST = 2**14
_MAX_DEPTH = 64

T = TypeVar("T")


def open_sftp_store(url: str, limits: Limits, *, follow_links: bool = False) -> SftpStore:
    """Open the store at ``sftp://[user@]host[:port]/absolute/path``. No connection is made yet.

    Raises:
        MissingExtra: If asyncssh is not installed.
        UsageError: If the URL names no host, or its user or password cannot be sent.
    """
    try:
        # Imported here, because asyncssh is an optional package (extra `sftp`).
        from asyncssh import saslprep
    except ImportError:
        raise MissingExtra("reading sftp:// URLs", "sftp") from None
    try:
        parts = urlsplit(url)
        port = parts.port
    # The message of urlsplit quotes text that may be a password, so the error is not chained.
    except ValueError:
        raise UsageError(f"{redact(url)!r} is not a URL: its host or its port cannot be read") from None
    if not (parts.hostname and usable_host(parts.hostname)) or parts.query or parts.fragment:
        raise UsageError(f"{redact(url)}: an SFTP URL is sftp://user@host/absolute/path")
    login: dict[str, Any] = {"host": parts.hostname}
    if port is not None:
        login["port"] = port
    try:
        for name, text in (("username", parts.username), ("password", parts.password)):
            if text:
                login[name] = unquote(text)
                # asyncssh prepares the text in the same way before it sends it. A character that cannot be sent is
                # found here, before the connection.
                saslprep.saslprep(login[name])
    # The message may quote user or password, so the error is not chained.
    except ValueError:
        raise UsageError(f"{redact(url)!r}: its user or password has a character that cannot be sent") from None
    root = unquote(parts.path, errors="surrogateescape").rstrip("/") or "/"
    return SftpStore(redact(url), root, login, limits, follow_links=follow_links)


class SftpStore:
    """Files below one folder; see :class:`cachetool.stores.base.Store`. Made by :func:`open_sftp_store`.

    ``login`` are arguments of ``asyncssh.connect``.
    """

    concurrency = 16

    def __init__(
        self, url: str, root: str, login: Mapping[str, Any], limits: Limits, *, follow_links: bool = False
    ) -> None:
        self.url = url
        self._root, self._login, self._limits = root, dict(login), limits
        self._follow_links = follow_links
        self._left_out = LeftOut()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Made at first use inside the event loop, because an asyncio.Lock belongs to the loop that first waits for it.
        self._connecting: asyncio.Lock | None = None
        self._connection: Any = None
        self._client: Any = None

    @property
    def left_out(self) -> Mapping[str, int]:
        """Counts and names of the files that the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """Yield all files, one folder after the other."""
        walk = Walk(self, self._there)
        folders = [""]
        while folders:
            folder = folders.pop()
            # A server may make up folders inside each other without end.
            if folder.count("/") > _MAX_DEPTH:
                raise SourceError(f"{self.url}: folders are nested more than {_MAX_DEPTH} deep")
            batch: list[Object] = []
            entries = self._folder(folder)
            # SFTP returns a whole folder at once. The walk then needs no request for each name.
            walk.enter(folder, (name for name, _ in entries))
            for name, attributes in entries:
                mode = attributes.permissions or 0
                key = f"{folder}{name}"
                if name in (".", "..") or walk.hides(key, folder=stat.S_ISDIR(mode)):
                    continue
                if stat.S_ISDIR(mode):
                    folders.append(f"{key}/")
                elif stat.S_ISLNK(mode):
                    # A link's target takes a request for each link, so links are followed only when asked for. Only the
                    # server knows where a link leads.
                    target = self._target(key) if self._follow_links else None
                    if target is None:
                        why = "a link whose target is not a file" if self._follow_links else f"a link; {FOLLOW} it"
                        walk.leave_out(key, "links", why)
                    else:
                        batch.append(target)
                elif not stat.S_ISREG(mode):
                    walk.leave_out(key, "special files", "not a regular file")
                else:
                    batch.append(_object(key, attributes))
            if batch:
                yield batch
        self._left_out = walk.left_out

    def _folder(self, folder: str) -> Sequence[tuple[str, Any]]:
        path = self._path(folder) if folder else self._root

        async def read(client: Any) -> Sequence[tuple[str, Any]]:
            # Bytes, because names on the server need not be UTF-8. asyncssh then returns bytes as well.
            entries = await asyncio.wait_for(
                client.readdir(path.encode("utf-8", "surrogateescape")), self._limits.listing
            )
            return [(os.fsdecode(entry.filename), entry.attrs) for entry in entries]

        try:
            return self._run(read, f"{self.url}: folder {folder!r}" if folder else self.url)
        except NotFound:
            # Another process removed the folder between its listing and its walk. Only the store's own folder must
            # exist.
            if folder:
                return []
            raise NotFound(f"{self.url}: not found") from None

    def _there(self, key: str) -> bool:
        return self._target(key) is not None

    def _target(self, key: str) -> Object | None:
        """Return the file with this key, or the target of a link with this key; None if there is no such file."""
        try:
            return self.find(key)
        # Safe to suppress: a link to nothing, or in a circle, has no file. A server that is out of reach has given no
        # answer, so that error is raised.
        except SourceError as error:
            if isinstance(error, Unreachable):
                raise
            return None

    def find(self, key: str) -> Object:
        """Return the file with this key."""
        path = self._path(key)

        async def look(client: Any) -> Any:
            return await asyncio.wait_for(client.stat(path.encode("utf-8", "surrogateescape")), self._limits.silence)

        attributes = self._run(look, f"{self.url}: {key!r}")
        if not stat.S_ISREG(attributes.permissions or 0):
            raise NotFound(f"{self.url}: {key!r} is not a file")
        return _object(key, attributes)

    def get(self, item: Object) -> memoryview:
        """Return the whole file."""
        return self._read(item, 0, None)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``start``."""
        return self._read(item, start, length)

    def _read(self, item: Object, start: int, length: int | None) -> memoryview:
        path = self._path(item.key).encode("utf-8", "surrogateescape")
        data = bytearray()
        version: Object | None = None

        async def read(client: Any) -> None:
            nonlocal version
            within = self._limits.silence
            async with await asyncio.wait_for(client.open(path, "rb"), within) as file:
                now = _object(item.key, await asyncio.wait_for(file.stat(), within))
                check_identity(item, size=now.size, etag=now.etag)
                # The file may have been replaced between two attempts. Bytes of the earlier attempt are kept only for
                # the same size and time; without a time nothing proves that.
                if now != version or now.etag is None:
                    data.clear()
                    version = now
                want = now.size if length is None else length
                while len(data) < want:
                    # `grace`, and not `silence`: a slow line may take so long for a part. Keepalives find a line that
                    # is dead.
                    reading = file.read(min(_PART, want - len(data)), start + len(data))
                    if not (part := await asyncio.wait_for(reading, self._limits.grace)):
                        break
                    data.extend(part)
                # More than one request brought these bytes, and another process may have written to the file between
                # them.
                if want > _REQUEST:
                    later = _object(item.key, await asyncio.wait_for(file.stat(), within))
                    check_identity(now, size=later.size, etag=later.etag)
                check_length(item, got=len(data), want=want)

        try:
            self._run(read, f"{self.url}: {item.key!r}", data)
        except NotFound:
            raise NotFound(f"{item.key!r} does not exist any more; it did when {self.url} was listed") from None
        return memoryview(data).toreadonly()

    def _path(self, key: str) -> str:
        if "\0" in key or any(part in (".", "..") for part in key.split("/")):
            raise BadObject(f"{key!r} is not the name of a file below the folder")
        return f"{self._root.rstrip('/')}/{key}"

    def close(self) -> None:
        """End the connection and its thread. May be called twice."""
        # The loop is taken out under the lock, so that of two closing threads only one stops it.
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            connection, self._connection, self._client = self._connection, None, None
            asyncio.run_coroutine_threadsafe(_end(connection), loop)

    def _run(self, work: Callable[[Any], Awaitable[T]], what: str, came: Sized = b"") -> T:
        """Run ``work`` with a client, and repeat it on a new connection when the connection breaks, until
        ``limits.retry``.

        ``came`` holds the bytes that ``work`` has received so far and keeps for the next attempt.
        """
        began, attempt, had = time.monotonic(), 0, 0
        while True:
            attempt += 1
            try:
                return self._wait(self._attempt(work))
            # A final error ends the loop at once. Only a broken connection is worth a second attempt.
            except _failures() as error:
                failure = _refused(error, what, self._login)
                if failure is not None:
                    raise failure from None
                # The connection broke, but it made progress. Only time without progress counts, so a long file may need
                # many connections.
                if len(came) - had > self._limits.min_rate * (time.monotonic() - began):
                    began, attempt, had = time.monotonic(), 1, len(came)
                # Random, because a server that restarts breaks the connections of all workers at the same moment.
                pause = random.uniform(0, min(3.0, 0.1 * 2.0**attempt))
                if time.monotonic() - began + pause > self._limits.retry:
                    seconds = time.monotonic() - began
                    raise Unreachable(f"{what}: {_line(error)}, {attempt} times in {seconds:.0f} s") from error
                retried()
                time.sleep(pause)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # The old lock belongs to the loop of before, and cannot be used in another one.
                self._connecting = None
                threading.Thread(target=_turn, args=(self._loop,), name="sftp", daemon=True).start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def _attempt(self, work: Callable[[Any], Awaitable[T]]) -> T:
        client = await self._connected()
        try:
            return await work(client)
        except _broken():
            # All threads share the connection. Another task may have made a new one since, which must not be ended.
            if self._client is client:
                self._client = None
                self._connection.abort()
            raise

    async def _connected(self) -> Any:
        import asyncssh

        # No race: all tasks run in the loop's one thread, and there is no await in between.
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        # Many threads find the connection broken at once. One of them makes the new one, and the others wait for it.
        async with self._connecting:
            if self._client is None:
                limits = self._limits
                self._connection = await asyncio.wait_for(
                    asyncssh.connect(
                        **self._login,
                        # The algorithms of known keys first, then all others. By default only those of known keys are
                        # offered, and a server with another key hangs up. The user would not learn that the key
                        # changed.
                        server_host_key_algs="+*",
                        connect_timeout=limits.connect,
                        login_timeout=limits.silence,
                        # Two unanswered keepalives end the connection after about `silence` seconds; without them a
                        # dead line would be noticed only after `grace` seconds.
                        keepalive_interval=limits.silence / 2,
                        keepalive_count_max=2,
                    ),
                    limits.connect + 2 * limits.silence,
                )
                self._client = await asyncio.wait_for(self._connection.start_sftp_client(), limits.silence)
            return self._client


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


async def _end(connection: Any) -> None:
    """End the connection and all tasks, and stop the running loop."""
    if connection is not None:
        connection.abort()
    # Tasks that still wait would print "Task was destroyed but it is pending" when the loop is closed.
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _object(key: str, attributes: Any) -> Object:
    size = -1 if attributes.size is None else int(attributes.size)
    when = attributes.mtime
    # The time has nanoseconds only in newer versions of SFTP; the seconds alone miss two changes within one second.
    return Object(key, size, None if when is None else f"{when:x}-{attributes.mtime_ns or 0:x}-{size:x}")


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that an attempt may raise; :func:`_refused` says which of them are final."""
    import asyncssh

    return OSError, EOFError, TimeoutError, asyncssh.Error


def _broken() -> tuple[type[Exception], ...]:
    """Return the errors after which a connection is of no more use."""
    return OSError, EOFError, TimeoutError, *_lost()


def _lost() -> tuple[type[Exception], ...]:
    import asyncssh

    return asyncssh.ConnectionLost, asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection, asyncssh.DisconnectError


def _refused(error: Exception, what: str, login: Mapping[str, Any]) -> CacheToolError | None:
    """Return the error of cachetool if another attempt would fail in the same way; None if it may succeed."""
    import asyncssh

    host = login["host"]
    if isinstance(error, CacheToolError):
        return error
    # These classes are asked first, because the general SFTPError below is their base.
    if isinstance(error, asyncssh.SFTPNoSuchFile | asyncssh.SFTPNoSuchPath):
        return NotFound(f"{what}: not found")
    if isinstance(error, asyncssh.SFTPPermissionDenied):
        return AccessDenied(f"{what}: permission denied")
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        port = ["-p", str(login["port"])] if "port" in login else []
        return AccessDenied(
            f"{what}: the host key of {host} is not in ~/.ssh/known_hosts; if the server is new to you,"
            f" connect once with: {shlex.join(['ssh', *port, host])}\n"
            "otherwise the key has changed, or another server answers: ask the administrator before you connect"
        )
    if isinstance(error, asyncssh.PermissionDenied):
        return AccessDenied(f"{what}: {host} accepts none of the keys and passwords that ssh would offer")
    # The usual cause is that both sides have no algorithm in common: the next attempt would fail as well.
    if isinstance(error, asyncssh.KeyExchangeFailed):
        return SourceError(f"{what}: {_line(error)}")
    if isinstance(error, asyncssh.SFTPError) and not isinstance(error, _lost()):
        return SourceError(f"{what}: {_line(error)}")
    if isinstance(error, asyncssh.KeyImportError | asyncssh.ConfigParseError):
        return UsageError(f"{what}: {_line(error)}")
    return None


def _line(error: Exception) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    # Text of a server: it may hold secrets, control characters and any number of lines.
    text = scrub(str(error).strip().partition("\n")[0])[:160]
    return text or type(error).__name__
