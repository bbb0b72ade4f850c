"""Many requests in flight, results in order: a small pool of threads with a bounded look-ahead.

The store's client lets go of the GIL while it waits, and decoding is short or lets go as well, so threads do. They are
daemons: a process that is told to stop does not wait for a request that nobody needs any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from cachetool.stores.traffic import flying

__all__ = ["Fetcher"]

T = TypeVar("T")
R = TypeVar("R")


class Fetcher(Generic[T, R]):
    """Runs ``work`` on tasks in ``threads`` threads. Used by one thread."""

    def __init__(self, work: Callable[[T, threading.Event], R], threads: int) -> None:
        """``work`` gets a task and an event that is set once its result is no longer wanted."""
        self._work, self.threads = work, threads
        self._queue: SimpleQueue[tuple[Future[R], T, threading.Event] | None] = SimpleQueue()
        self._started: list[threading.Thread] = []

    def run(self, tasks: Iterable[T], *, ahead: int, size: Callable[[T], int]) -> Iterator[R]:
        """The results in the order of the tasks; the first task that raises ends it with that error.

        Tasks are begun while their sizes together stay within ``ahead`` bytes, one in any case. Closing the iterator
        forgets what was begun.
        """
        self._start()
        stop = threading.Event()
        begun: deque[tuple[Future[R], int]] = deque()
        waiting = deque[tuple[T, int]]()
        source = iter(tasks)
        held = 0
        try:
            while True:
                while len(begun) < 4 * self.threads:
                    if not waiting:
                        task = next(source, _END)
                        if task is _END:
                            break
                        waiting.append((task, size(task)))
                    if begun and held + waiting[0][1] > ahead:
                        break
                    future: Future[R] = Future()
                    begun.append((future, waiting[0][1]))
                    held += waiting[0][1]
                    self._queue.put((future, waiting.popleft()[0], stop))
                if not begun:
                    return
                result = begun[0][0].result()
                held -= begun.popleft()[1]
                yield result
        finally:
            stop.set()
            for future, _ in begun:
                future.cancel()

    def _start(self) -> None:
        while len(self._started) < self.threads:
            thread = threading.Thread(target=self._serve, name=f"fetch-{len(self._started)}", daemon=True)
            thread.start()
            self._started.append(thread)

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, task, stop = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with flying():
                    result = self._work(task, stop)
            except BaseException as error:  # noqa: BLE001  # raised again where the result is taken
                future.set_exception(error)
            else:
                future.set_result(result)
            del entry, future, task

    def close(self) -> None:
        """Let the threads end once they are done with what they are at. May be called twice."""
        for _ in self._started:
            self._queue.put(None)
        self._started = []


_END: Any = object()
