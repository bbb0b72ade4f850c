"""A folder on a machine that is reached by SSH, through asyncssh (the only module that imports it).

Who one is and whom one trusts is what ``ssh`` knows: ``~/.ssh/config``, the agent, the keys in ``~/.ssh``, and
``~/.ssh/known_hosts``, without which a server is refused. Its event loop runs in a thread of its own; a connection that
breaks is made anew, and a file that was being read goes on where it stopped. The "ETag" of a file is its time of
modification and its size.
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
    """The store at ``sftp://[user@]host[:port]/absolute/path``; nothing is connected yet.

    Raises :class:`MissingExtra` without asyncssh, :class:`UsageError` for a URL that names no host.
    """
    try:
        from asyncssh import saslprep
    except ImportError:
        raise MissingExtra("reading sftp:// URLs", "sftp") from None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its message quotes what may be a password
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
                saslprep.saslprep(login[name])  # as it is prepared to be sent
    except ValueError:  # its message may quote them
        raise UsageError(f"{redact(url)!r}: its user or password has a character that cannot be sent") from None
    root = unquote(parts.path, errors="surrogateescape").rstrip("/") or "/"
    return SftpStore(redact(url), root, login, limits, follow_links=follow_links)


class SftpStore:
    """Files below one folder; see :class:`cachetool.stores.base.Store`."""

    concurrency = 16

    def __init__(
        self, url: str, root: str, login: Mapping[str, Any], limits: Limits, *, follow_links: bool = False
    ) -> None:
        """``login`` are arguments of ``asyncssh.connect``. Made by :func:`open_sftp_store`."""
        self.url = url
        self._root, self._login, self._limits = root, dict(login), limits
        self._follow_links = follow_links
        self._left_out = LeftOut()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Lock | None = None
        self._connection: Any = None
        self._client: Any = None

    @property
    def left_out(self) -> Mapping[str, int]:
        """What the last finished :meth:`list` passed over."""
        return self._left_out

    def list(self) -> Pages:
        """All files, folder by folder."""
        walk = Walk(self, self._there)
        folders = [""]
        while folders:
            folder = folders.pop()
            if folder.count("/") > _MAX_DEPTH:
                raise SourceError(f"{self.url}: more than {_MAX_DEPTH} folders inside each other")
            batch: list[Object] = []
            entries = self._folder(folder)
            walk.enter(folder, (name for name, _ in entries))
            for name, attributes in entries:
                mode = attributes.permissions or 0
                key = f"{folder}{name}"
                if name in (".", "..") or walk.hides(key, folder=stat.S_ISDIR(mode)):
                    continue
                if stat.S_ISDIR(mode):
                    folders.append(f"{key}/")
                elif stat.S_ISLNK(mode):
                    target = self._target(key) if self._follow_links else None
                    if target is None:
                        why = "a link to no file" if self._follow_links else f"a link; {FOLLOW} it"
                        walk.leave_out(key, "links", why)
                    else:
                        batch.append(target)
                elif not stat.S_ISREG(mode):
                    walk.leave_out(key, "special files", "no regular file")
                else:
                    batch.append(_object(key, attributes))
            if batch:
                yield batch
        self._left_out = walk.left_out

    def _folder(self, folder: str) -> Sequence[tuple[str, Any]]:
        path = self._path(folder) if folder else self._root

        async def read(client: Any) -> Sequence[tuple[str, Any]]:
            entries = await asyncio.wait_for(
                client.readdir(path.encode("utf-8", "surrogateescape")), self._limits.listing
            )
            return [(os.fsdecode(entry.filename), entry.attrs) for entry in entries]

        try:
            return self._run(read, f"{self.url}: folder {folder!r}" if folder else self.url)
        except NotFound:
            if folder:  # removed by somebody between being listed and being walked
                return []
            raise NotFound(f"{self.url}: not found") from None

    def _there(self, key: str) -> bool:
        return self._target(key) is not None

    def _target(self, key: str) -> Object | None:
        """The file that has this key, or that a link of this key leads to; None where there is none."""
        try:
            return self.find(key)
        except SourceError as error:  # such as a circle of links
            if isinstance(error, Unreachable):
                raise
            return None

    def find(self, key: str) -> Object:
        """The file of this key."""
        path = self._path(key)

        async def look(client: Any) -> Any:
            return await asyncio.wait_for(client.stat(path.encode("utf-8", "surrogateescape")), self._limits.silence)

        attributes = self._run(look, f"{self.url}: {key!r}")
        if not stat.S_ISREG(attributes.permissions or 0):
            raise NotFound(f"{self.url}: {key!r} is no file")
        return _object(key, attributes)

    def get(self, item: Object) -> memoryview:
        """The whole file."""
        return self._read(item, 0, None)

    def get_range(self, item: Object, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start``."""
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
                if now != version or now.etag is None:  # what an earlier attempt brought may be of another version
                    data.clear()
                    version = now
                want = now.size if length is None else length
                while len(data) < want:
                    # As long as a slow line may take for a part; a line that is dead is found by keepalives.
                    reading = file.read(min(_PART, want - len(data)), start + len(data))
                    if not (part := await asyncio.wait_for(reading, self._limits.grace)):
                        break
                    data.extend(part)
                if want > _REQUEST:  # it came by several requests: it may have been written to meanwhile
                    later = _object(item.key, await asyncio.wait_for(file.stat(), within))
                    check_identity(now, size=later.size, etag=later.etag)
                check_length(item, got=len(data), want=want)

        try:
            self._run(read, f"{self.url}: {item.key!r}", data)
        except NotFound:
            raise NotFound(f"{item.key!r} is not there any more; it was when {self.url} was listed") from None
        return memoryview(data).toreadonly()

    def _path(self, key: str) -> str:
        if "\0" in key or any(part in (".", "..") for part in key.split("/")):
            raise BadObject(f"{key!r} is no name of a file below the folder")
        return f"{self._root.rstrip('/')}/{key}"

    def close(self) -> None:
        """End the connection and its thread. May be called twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            connection, self._connection, self._client = self._connection, None, None
            asyncio.run_coroutine_threadsafe(_end(connection), loop)

    def _run(self, work: Callable[[Any], Awaitable[T]], what: str, came: Sized = b"") -> T:
        """Do ``work`` with a client; again on a new connection when it breaks, until limits.retry. ``came`` is what it
        has brought so far and keeps for the next attempt."""
        began, attempt, had = time.monotonic(), 0, 0
        while True:
            attempt += 1
            try:
                return self._wait(self._attempt(work))
            except _failures() as error:
                failure = _refused(error, what, self._login)
                if failure is not None:
                    raise failure from None
                if len(came) - had > self._limits.min_rate * (time.monotonic() - began):
                    # It broke, but it got on: what counts is the time without progress.
                    began, attempt, had = time.monotonic(), 1, len(came)
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
                self._connecting = None
                threading.Thread(target=_turn, args=(self._loop,), name="sftp", daemon=True).start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def _attempt(self, work: Callable[[Any], Awaitable[T]]) -> T:
        client = await self._connected()
        try:
            return await work(client)
        except _broken():
            if self._client is client:  # others may have made a new one meanwhile
                self._client = None
                self._connection.abort()
            raise

    async def _connected(self) -> Any:
        import asyncssh

        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                limits = self._limits
                self._connection = await asyncio.wait_for(
                    asyncssh.connect(
                        **self._login,
                        # The algorithms of known keys first, then all others: where only those of a known key are
                        # offered, as is the default, a server with another key just hangs up.
                        server_host_key_algs="+*",
                        connect_timeout=limits.connect,
                        login_timeout=limits.silence,
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
    """Leave no task behind, and stop the loop this runs in."""
    if connection is not None:
        connection.abort()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _object(key: str, attributes: Any) -> Object:
    size = -1 if attributes.size is None else int(attributes.size)
    when = attributes.mtime
    return Object(key, size, None if when is None else f"{when:x}-{attributes.mtime_ns or 0:x}-{size:x}")


def _failures() -> tuple[type[Exception], ...]:
    """What an attempt may raise; which of it is final :func:`_refused` says."""
    import asyncssh

    return OSError, EOFError, TimeoutError, asyncssh.Error


def _broken() -> tuple[type[Exception], ...]:
    """What leaves a connection of no more use."""
    return OSError, EOFError, TimeoutError, *_lost()


def _lost() -> tuple[type[Exception], ...]:
    import asyncssh

    return asyncssh.ConnectionLost, asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection, asyncssh.DisconnectError


def _refused(error: Exception, what: str, login: Mapping[str, Any]) -> CacheToolError | None:
    """The error of ours for one that another attempt would meet again; None when it may pass."""
    import asyncssh

    host = login["host"]
    if isinstance(error, CacheToolError):
        return error
    if isinstance(error, asyncssh.SFTPNoSuchFile | asyncssh.SFTPNoSuchPath):
        return NotFound(f"{what}: not found")
    if isinstance(error, asyncssh.SFTPPermissionDenied):
        return AccessDenied(f"{what}: permission denied")
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        port = ["-p", str(login["port"])] if "port" in login else []
        return AccessDenied(
            f"{what}: the key that {host} shows is not in ~/.ssh/known_hosts; if the server is new, connect once with:"
            f" {shlex.join(['ssh', *port, host])}\n"
            "if it was known, its key was changed, or somebody else answers in its place: ask whoever runs it"
        )
    if isinstance(error, asyncssh.PermissionDenied):
        return AccessDenied(f"{what}: {host} takes none of the keys and passwords that ssh would offer")
    if isinstance(error, asyncssh.KeyExchangeFailed):  # mostly an algorithm that both sides know
        return SourceError(f"{what}: {_line(error)}")
    if isinstance(error, asyncssh.SFTPError) and not isinstance(error, _lost()):
        return SourceError(f"{what}: {_line(error)}")
    if isinstance(error, asyncssh.KeyImportError | asyncssh.ConfigParseError):
        return UsageError(f"{what}: {_line(error)}")
    return None


def _line(error: Exception) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    text = scrub(str(error).strip().partition("\n")[0])[:160]
    return text or type(error).__name__
