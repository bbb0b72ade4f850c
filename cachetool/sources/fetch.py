"""Requests in flight with results in order: a small pool of threads with a limited look-ahead.

Threads are enough, because the store's client releases the GIL while it waits, and decoding is short or releases the
GIL as well. The threads are daemons, so a process that is told to stop does not wait for requests that nobody needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from cachetool.stores.traffic import flying

__all__ = ["Fetcher", "Fetching"]

_FEW, _FEW_AHEAD = 4, 8
"""Number of large tasks that may run at once beyond the limit, as one connection is slow, while their bytes stay within
``_FEW_AHEAD`` times the limit."""

T = TypeVar("T")
R = TypeVar("R")


class Fetcher(Generic[T, R]):
    """A pool of up to ``threads`` threads that run ``work`` on tasks. One thread uses it."""

    def __init__(self, work: Callable[[T, threading.Event], R], threads: int) -> None:
        """Create the pool. ``work`` gets a task, and an event that is set when its result is no longer needed."""
        self._work, self.threads = work, threads
        self._queue: SimpleQueue[tuple[Future[R], T, threading.Event] | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self.begun_bytes = 0
        """Bytes of the tasks that were started and whose results were not taken."""

    def run(self, tasks: Iterable[T], *, ahead: int, size: Callable[[T], int]) -> Fetching[T, R]:
        """Return the results in the order of the tasks. The first task that raises ends the iteration with that error.

        Tasks are started at once, while the sizes of all started tasks of this pool stay within ``ahead`` bytes. At
        least one task is started. Up to four large tasks are started within eight times ``ahead``.
        """
        return Fetching(self, tasks, ahead, size)

    def begin(self, task: T, stop: threading.Event) -> Future[R]:
        """Add a task behind the others, and return its future."""
        future: Future[R] = Future()
        self._queue.put((future, task, stop))
        # A new thread starts only when all others are busy. Each thread has malloc memory of its own, and large bodies
        # would touch new pages in all of them.
        if not self._idle.acquire(blocking=False) and len(self._started) < self.threads:
            thread = threading.Thread(target=self._serve, name=f"fetch-{len(self._started)}", daemon=True)
            thread.start()
            self._started.append(thread)
        return future

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, task, stop = entry
            error = result = None
            if wanted := future.set_running_or_notify_cancel():
                try:
                    with flying():
                        result = self._work(task, stop)
                # The error is raised again in the thread that takes the result. An error that escaped here would end
                # the thread, and its future would never complete.
                except BaseException as raised:  # noqa: BLE001
                    error = raised
            # Before the result is set: the caller may then add another task at once, and must find this thread idle
            # instead of starting a new one.
            self._idle.release()
            if error is not None:
                future.set_exception(error)
            elif wanted:
                future.set_result(result)  # type: ignore[arg-type]
            # The thread waits for its next task in the loop's head. Without this line it would keep the last body in
            # memory meanwhile.
            del entry, future, task, error, result

    def close(self) -> None:
        """Let the threads end after their current task. May be called twice."""
        # Each thread ends at its first None. The queue is in order, so tasks that are queued before are still taken.
        for _ in self._started:
            self._queue.put(None)
        self._started = []


class Fetching(Generic[T, R]):
    """An iterator over the results of tasks in flight. :meth:`Fetcher.run` creates it."""

    def __init__(self, fetcher: Fetcher[T, R], tasks: Iterable[T], ahead: int, size: Callable[[T], int]) -> None:
        self._fetcher, self._tasks, self._ahead, self._size = fetcher, iter(tasks), ahead, size
        self._stop = threading.Event()
        self._begun: deque[tuple[Future[R], T, int]] = deque()
        self._next: T = _END
        self.begun = False
        """True once the last task was started, so that other tasks can be started behind it."""
        self._begin()

    def _begin(self) -> None:
        fetcher = self._fetcher
        # Tasks of a few bytes never reach the limit of bytes, so their number is limited as well.
        while not self.begun and len(self._begun) < 4 * fetcher.threads:
            if self._next is _END:
                self._next = next(self._tasks, _END)
                if self._next is _END:
                    self.begun = True
                    return
            nbytes = self._size(self._next)
            # One connection is slow, so four large objects are fetched side by side even beyond the limit.
            most = _FEW_AHEAD * self._ahead if len(self._begun) < _FEW else self._ahead
            # An object larger than the limit starts when nothing else is in flight. Otherwise it would never start.
            if self._begun and fetcher.begun_bytes + nbytes > most:
                return
            self._begun.append((fetcher.begin(self._next, self._stop), self._next, nbytes))
            fetcher.begun_bytes += nbytes
            self._next = _END

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        if not self._begun:
            raise StopIteration
        # The task leaves the queue only after its result is there: if it raises, `drain` and `close` still see it.
        result = self._begun[0][0].result()
        self._fetcher.begun_bytes -= self._begun.popleft()[2]
        self._begin()
        return result

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds``. Return True if the next result is ready, or if there is no further result."""
        return not self._begun or bool(wait([self._begun[0][0]], seconds).done)

    def drain(self, seconds: float) -> list[T]:
        """Start no more tasks, and wait up to ``seconds`` for those in flight. Return the tasks that ran or still
        run."""
        self._stop.set()
        self.begun = True
        begun = [(future, task) for future, task, _ in self._begun if not future.cancel()]
        wait([future for future, _ in begun], seconds)
        return [task for _, task in begun]

    def close(self) -> None:
        """Cancel the tasks that were started. May be called twice."""
        self._stop.set()
        self.begun = True
        for future, _, nbytes in self._begun:
            future.cancel()
            self._fetcher.begun_bytes -= nbytes
        self._begun.clear()


_END: Any = object()
