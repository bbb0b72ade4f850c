"""Bounds on the memory and time of obstore's answers, and the start of obstore's runtime in this process.

obstore holds a page of a listing and the page of an error in memory, whatever their size, and it follows empty pages
for ever. Its synchronous calls do not return early.

Pages of listings and large objects are therefore awaited in an event loop, and cancelled when they take too much;
obstore then closes the connection. Small objects do without the loop, which would cost as much as such a request. A
thread watches the memory meanwhile, and shuts the connections down.

Memory is counted for the whole process, because a process that uses a store does little else.
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
"""Number of keys in a page that is awaited."""
# obstore's own thread puts the pieces of such an object together. Handing each piece to Python costs more: 12.2 instead
# of 9.9 ms of processor for 16 MiB. A smaller object costs less without the event loop.
LARGE = 2**20
"""Least bytes of an object that is awaited."""
# A server that names all of 600,000 keys in one answer of 133 MiB takes 280 MiB, and must still work.
PAGE_MEMORY = 2**29
"""Most bytes by which the process may grow during one page."""
# Over loopback 30 MiB arrive between two looks, far less than the limit.
_LOOK = 0.05
"""Seconds between two looks at the memory."""

_DO = "check the endpoint, or list fewer objects by a longer prefix"

T = TypeVar("T")
_pid: int | None = None
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_watch: threading.Thread | None = None
_size = 0
"""Bytes of this process at the last look of the watching thread."""
_waiting: dict[int, int] = {}
"""Bytes of this process at the moment when a thread began to wait for obstore, by thread."""
_ports: set[int] = set()
"""Ports of the servers that are used under a :class:`Watched`."""


class TooMuch(OSError):
    """An answer took more than ``memory`` bytes of memory, or more than ``seconds``. One of both is given."""

    def __init__(self, *, memory: int | None = None, seconds: float | None = None) -> None:
        limit = f"{seconds:g} s" if memory is None else f"{memory / 2**20:.0f} MiB of memory"
        super().__init__(f"the answer takes more than {limit}")
        self.memory, self.seconds = memory, seconds


def begin() -> None:
    """Prepare the process for obstore. Raise :class:`CacheToolError` in a forked child."""
    global _pid
    refuse_fork()
    # Its runtime has a thread for each core by default, and these hand small requests to and fro. With one thread
    # objects of 64 KiB take half of the processor time.
    _pid = os.getpid()
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")


def refuse_fork() -> None:
    """Raise :class:`CacheToolError` in a child whose parent used obstore."""
    # The threads of obstore's runtime do not exist in a forked child, where each call would wait for them for ever
    # (developmentseed/obstore#441).
    if _pid not in (None, os.getpid()):
        raise CacheToolError(
            "a remote store cannot be used in a forked process, because its client would hang;"
            " start the process with 'spawn'"
        )


def errors() -> tuple[type[Exception], ...]:
    """Return the classes of obstore's errors: its own, and built-in ones for missing objects and unusable options."""
    from obstore.exceptions import BaseError

    return BaseError, OSError, ValueError, TypeError


def bounded_pages(stream: AsyncIterator[Any], place: str, limits: Limits) -> Iterator[Any]:
    """Yield the pages of a listing in chunks of :data:`KEYS` keys. ``place`` is the store's URL as it may be shown.

    Raises:
        SourceError: If a page takes more than :data:`PAGE_MEMORY` bytes or ``limits.page`` seconds.
        Exception: Any error of the stream itself.
    """

    async def following() -> Any:
        # anext() needs a coroutine of its own: run_coroutine_threadsafe() takes no other awaitable.
        return await anext(stream, None)

    while True:
        try:
            page = awaited(following(), memory=PAGE_MEMORY, seconds=limits.page)
        except TooMuch as error:
            if error.memory is not None:
                most = f"{error.memory >> 20} MiB of memory"
                raise SourceError(f"{place}: one page of the listing takes more than {most};\n{_DO}") from None
            raise SourceError(
                f"{place}: the server listed fewer than {KEYS} keys in {limits.page:g} s, and did not end the list;\n"
                f"{_DO}"
            ) from None
        if page is None:
            return
        yield page


def awaited(work: Coroutine[Any, Any, T], *, memory: int, seconds: float) -> T:
    """Return the result of an obstore coroutine.

    Raises:
        TooMuch: If the process grows by more than ``memory`` bytes, or ``seconds`` have passed. The work is cancelled.
    """
    # Growth is measured from the beginning of this call, because libraries and earlier objects have filled memory
    # before.
    until, before = time.monotonic() + seconds, _taken()
    future = asyncio.run_coroutine_threadsafe(work, _running_loop())
    try:
        while True:
            try:
                return future.result(_LOOK)
            except concurrent.futures.TimeoutError:
                # The work finished just now, or raised a TimeoutError of its own. Both look like the timeout of
                # result().
                if future.done():
                    return future.result()
            if _taken() - before > memory:
                raise TooMuch(memory=memory)
            if time.monotonic() > until:
                raise TooMuch(seconds=seconds)
    finally:
        # Also after an error in this thread, such as Ctrl-C: otherwise obstore would continue to receive, with nobody
        # to stop it.
        future.cancel()


def _running_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process; start it at first use."""
    global _loop
    refuse_fork()
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            # A daemon thread, because the loop never ends by itself and would keep the interpreter alive.
            thread = threading.Thread(target=loop.run_forever, name="obstore", daemon=True)
            try:
                thread.start()
            # Python could not start a thread (a limit on processes). The unused loop would otherwise leave its sockets
            # open.
            except RuntimeError:
                loop.close()
                raise
            _loop = loop
            # Awaited work must be cancelled before the interpreter ends, because obstore's thread would call into an
            # interpreter that is gone.
            atexit.register(_end, loop, thread)
        return _loop


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel all awaited work and stop the loop, at the end of the interpreter."""

    async def stop() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    # A forked child inherits the atexit hook, but not the loop's thread: only the process that started the loop may
    # stop it.
    if _pid == os.getpid():
        asyncio.run_coroutine_threadsafe(stop(), loop)
        # At most 5 s: work that does not react to its cancellation must not hold up the end of the program.
        thread.join(5)


class Watched:
    """A context manager around calls of obstore that cannot be cancelled.

    If the process grows by more than :data:`PAGE_MEMORY` bytes during a call, all connections to ``port`` are shut
    down, and the call raises. Nobody knows which call made the process grow, so other calls may raise as well.
    """

    def __init__(self, port: int) -> None:
        _ports.add(port)

    def __enter__(self) -> None:
        global _watch
        if _watch is None:
            with _lock:
                # Checked again under the lock: two threads may come here at once, and one watching thread is enough.
                if _watch is None:
                    _watch = threading.Thread(target=_look_on, name="obstore memory", daemon=True)
                    _watch.start()
        # The size of the last look is good enough and saves a read of /proc for each small object.
        _waiting[threading.get_ident()] = _size or _taken()

    def __exit__(self, *_: object) -> None:
        del _waiting[threading.get_ident()]


def _look_on() -> None:
    global _size
    while True:
        _size = _taken()
        # The values are copied first, because other threads add and remove entries meanwhile.
        if any(_size - before > PAGE_MEMORY for before in [*_waiting.values()]):
            _shut_connections()
        time.sleep(_LOOK)


def _shut_connections() -> None:
    """Shut down all sockets of this process whose peer has a watched port."""
    for name in os.listdir("/proc/self/fd"):
        # Safe to suppress: other threads close descriptors between listdir() and here, and some sockets have no peer.
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # A duplicate, because closing the socket object would close the descriptor under obstore, which could then
            # use the number of another file.
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] in _ports:
                    # shutdown() acts on the connection, not on the descriptor: obstore sees the end of the stream and
                    # returns with an error.
                    sock.shutdown(socket.SHUT_RDWR)


def _taken() -> int:
    """Return the bytes of this process's data, swapped bytes included; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
