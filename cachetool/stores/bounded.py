"""The pages of an obstore listing, each with a bound on memory and time.

obstore holds an answer in memory whatever its size, and follows empty pages for ever. Neither can be seen from outside,
and its calls do not return early. So each page is awaited in an event loop: a page that takes too much is cancelled,
and obstore then closes the connection. Memory is counted for the whole process, because listings are made in processes
that do nothing else meanwhile (:mod:`cachetool.pull.listing`, :mod:`cachetool.conversion.remote`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import resource
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from cachetool.core.errors import SourceError
from cachetool.stores.base import Limits

__all__ = ["KEYS", "PAGE_MEMORY", "bounded_pages"]

KEYS = 1000
"""Keys of a page that is awaited."""
PAGE_MEMORY = 2**29
"""Bytes by which the process may grow during one page. A server that names all of 600,000 keys in one answer of 133 MiB
takes 280 MiB."""
_LOOK = 0.05
"""Seconds between two looks at the memory. Over loopback 30 MiB come meanwhile."""

_DO = "check the endpoint, or list fewer objects by a longer prefix"


def bounded_pages(stream: AsyncIterator[Any], place: str, limits: Limits) -> Iterator[Any]:
    """The pages of a listing in chunks of :data:`KEYS` keys; ``place`` is the store's URL as it may be shown.

    Raises :class:`SourceError` for a page that takes more than :data:`PAGE_MEMORY` or ``limits.page``, and what the
    stream raises.
    """
    loop, owner = asyncio.new_event_loop(), os.getpid()
    thread = threading.Thread(target=_run, args=(loop,), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        loop.close()
        raise
    try:
        while (page := _wait(asyncio.run_coroutine_threadsafe(_next(stream), loop), place, limits)) is not None:
            yield page
    finally:
        if os.getpid() == owner:  # a forked child has the generator without its thread
            asyncio.run_coroutine_threadsafe(_end(), loop)
            thread.join()


def _wait(page: concurrent.futures.Future[Any], place: str, limits: Limits) -> Any:
    began, before = time.monotonic(), _taken()
    while not concurrent.futures.wait([page], _LOOK).done:
        if _taken() - before > PAGE_MEMORY:
            raise SourceError(
                f"{place}: one answer with a part of the list takes more than {PAGE_MEMORY >> 20} MiB of memory;\n{_DO}"
            )
        if time.monotonic() - began > limits.page:
            raise SourceError(
                f"{place}: the server names fewer than {KEYS} keys in {limits.page:g} s, and no end of the list;\n{_DO}"
            )
    return page.result()


async def _next(stream: AsyncIterator[Any]) -> Any:
    """The next page; None at the end."""
    return await anext(stream, None)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _end() -> None:
    """Cancel a page that is still awaited, and stop the loop this runs in."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _taken() -> int:
    """Bytes of this process's data, also those swapped out; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
