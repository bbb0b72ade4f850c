"""obstore in this process: its runtime, and bounds on memory and time for its answers.

obstore holds a page of a list and the page of an error in memory, whatever its size, and follows empty pages for ever.
Neither can be seen from outside, and its calls do not return early. So pages of lists and large objects are awaited in
an event loop, and are cancelled when they take too much; obstore then closes the connection. Small objects do without
the loop, which costs as much as such a request: while one is waited for a thread looks at the memory, and shuts the
connections down. Memory is counted for the whole process: processes that use a store do little else.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from cachetool.core.errors import CacheToolError, SourceError
from cachetool.stores.base import Limits

__all__ = [
    "KEYS",
    "LARGE",
    "PAGE_MEMORY",
    "TooMuch",
    "awaited",
    "begin",
    "bounded_pages",
    "errors",
    "refuse_fork",
]

KEYS = 1000
"""Keys of a page that is awaited."""
LARGE = 2**20
"""Bytes from which on an object is awaited: obstore's thread puts its pieces together, which costs less than to hand
over each of them."""
PAGE_MEMORY = 2**29
"""Bytes by which the process may grow during one page. A server that names all of 600,000 keys in one answer of 133 MiB
takes 280 MiB."""
_LOOK = 0.05
"""Seconds between two looks at the memory. Over loopback 30 MiB come meanwhile."""

_DO = "check the endpoint, or list fewer objects by a longer prefix"

T = TypeVar("T")
_pid: int | None = None
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_watch: threading.Thread | None = None
_size = 0
"""Bytes of this process when the watching thread looked last."""
_waiting: dict[int, int] = {}
"""Bytes of this process when a thread began to wait for obstore, by thread."""
_ports: set[int] = set()
"""Of the servers that are waited for so."""


class TooMuch(OSError):
    """An answer takes too much memory, or too long."""


def begin() -> None:
    """Make the process ready for obstore. Raises :class:`CacheToolError` in a forked child."""
    global _pid
    refuse_fork()
    _pid = os.getpid()
    # Its runtime has a thread for each core, which hand small requests to and fro: one thread takes half of the
    # processor time for objects of 64 KiB. Bodies of small objects are put together in the threads that ask for them.
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")


def refuse_fork() -> None:
    """Raise :class:`CacheToolError` in a child whose parent used obstore: its runtime does not survive a fork."""
    if _pid not in (None, os.getpid()):
        raise CacheToolError(
            "an object store cannot be used in a forked child, where its client hangs; start the process with 'spawn'"
        )


def errors() -> tuple[type[Exception], ...]:
    """What obstore raises: its own classes, and built-in ones for missing objects and for options it cannot use."""
    from obstore.exceptions import BaseError

    return BaseError, OSError, ValueError, TypeError


def bounded_pages(stream: AsyncIterator[Any], place: str, limits: Limits) -> Iterator[Any]:
    """The pages of a listing in chunks of :data:`KEYS` keys; ``place`` is the store's URL as it may be shown.

    Raises :class:`SourceError` for a page that takes more than :data:`PAGE_MEMORY` or ``limits.page``, and what the
    stream raises.
    """

    async def following() -> Any:
        return await anext(stream, None)

    while True:
        began = time.monotonic()
        try:
            page = awaited(following(), memory=PAGE_MEMORY, seconds=limits.page)
        except TooMuch:
            if time.monotonic() - began < limits.page:
                most = f"{PAGE_MEMORY >> 20} MiB of memory"
                raise SourceError(
                    f"{place}: one answer with a part of the list takes more than {most};\n{_DO}"
                ) from None
            raise SourceError(
                f"{place}: the server names fewer than {KEYS} keys in {limits.page:g} s, and no end of the list;\n{_DO}"
            ) from None
        if page is None:
            return
        yield page


def awaited(work: Coroutine[Any, Any, T], *, memory: int, seconds: float) -> T:
    """The result of work with obstore. The work is cancelled, and :class:`TooMuch` raised, when the process grows by
    more than ``memory`` or ``seconds`` have passed."""
    until, before = time.monotonic() + seconds, _taken()
    future = asyncio.run_coroutine_threadsafe(work, _running_loop())
    try:
        while True:
            try:
                return future.result(_LOOK)
            except concurrent.futures.TimeoutError:
                if future.done():  # just now, or the error is the work's own
                    return future.result()
            if _taken() - before > memory or time.monotonic() > until:
                raise TooMuch
    finally:
        future.cancel()


def _running_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process."""
    global _loop
    refuse_fork()
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="obstore", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise
            _loop = loop
            atexit.register(_end, loop, thread)
        return _loop


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel what is still awaited before the interpreter goes, which obstore's thread would call."""

    async def stop() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    if _pid == os.getpid():
        asyncio.run_coroutine_threadsafe(stop(), loop)
        thread.join(5)


class Watched:
    """Around calls of obstore that cannot be cancelled: when the process grows by more than :data:`PAGE_MEMORY` during
    one of them, its connections to a port are shut down, and the call raises. Whose fault it was nobody knows: others
    may raise, too."""

    def __init__(self, port: int) -> None:
        _ports.add(port)

    def __enter__(self) -> None:
        global _watch
        if _watch is None:
            with _lock:
                if _watch is None:
                    _watch = threading.Thread(target=_look_on, name="obstore memory", daemon=True)
                    _watch.start()
        _waiting[threading.get_ident()] = _size or _taken()

    def __exit__(self, *_: object) -> None:
        del _waiting[threading.get_ident()]


def _look_on() -> None:
    global _size
    while True:
        _size = _taken()
        if any(_size - before > PAGE_MEMORY for before in [*_waiting.values()]):
            _shut_connections()
        time.sleep(_LOOK)


def _shut_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] in _ports:
                    sock.shutdown(socket.SHUT_RDWR)


def _taken() -> int:
    """Bytes of this process's data, also those swapped out; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
