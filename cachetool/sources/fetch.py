"""Many requests in flight, results in order: a small pool of threads with a bounded look-ahead.

The store's client lets go of the GIL while it waits, and decoding is short or lets go as well, so threads do. They are
daemons: a process that is told to stop does not wait for a request that nobody needs any more.
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
"""So many tasks are begun together while they stay within so many times the bytes: one connection is slow."""

T = TypeVar("T")
R = TypeVar("R")


class Fetcher(Generic[T, R]):
    """Runs ``work`` on tasks in ``threads`` threads. Used by one thread."""

    def __init__(self, work: Callable[[T, threading.Event], R], threads: int) -> None:
        """``work`` gets a task and an event that is set once its result is no longer wanted."""
        self._work, self.threads = work, threads
        self._queue: SimpleQueue[tuple[Future[R], T, threading.Event] | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self.begun_bytes = 0
        """Bytes of the tasks that were begun and not taken."""

    def run(self, tasks: Iterable[T], *, ahead: int, size: Callable[[T], int]) -> Fetching[T, R]:
        """The results in the order of the tasks; the first task that raises ends it with that error.

        Tasks are begun at once, and while the sizes of all that were begun here stay within ``ahead`` bytes; of large
        ones a few while they stay within eight times as many, one in any case.
        """
        return Fetching(self, tasks, ahead, size)

    def begin(self, task: T, stop: threading.Event) -> Future[R]:
        """Put a task behind the others."""
        future: Future[R] = Future()
        self._queue.put((future, task, stop))
        # A thread more only when all are busy: each has memory of its own, which large bodies touch anew.
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
                except BaseException as raised:  # noqa: BLE001  # raised again where the result is taken
                    error = raised
            self._idle.release()  # before the result is out, which may bring another task
            if error is not None:
                future.set_exception(error)
            elif wanted:
                future.set_result(result)  # type: ignore[arg-type]
            del entry, future, task, error, result

    def close(self) -> None:
        """Let the threads end once they are done with what they are at. May be called twice."""
        for _ in self._started:
            self._queue.put(None)
        self._started = []


class Fetching(Generic[T, R]):
    """Tasks under way; an iterator over their results. Made by :meth:`Fetcher.run`."""

    def __init__(self, fetcher: Fetcher[T, R], tasks: Iterable[T], ahead: int, size: Callable[[T], int]) -> None:
        self._fetcher, self._tasks, self._ahead, self._size = fetcher, iter(tasks), ahead, size
        self._stop = threading.Event()
        self._begun: deque[tuple[Future[R], T, int]] = deque()
        self._next: T = _END
        self.begun = False
        """Whether the last task was begun: others may be begun behind it."""
        self._begin()

    def _begin(self) -> None:
        fetcher = self._fetcher
        while not self.begun and len(self._begun) < 4 * fetcher.threads:
            if self._next is _END:
                self._next = next(self._tasks, _END)
                if self._next is _END:
                    self.begun = True
                    return
            nbytes = self._size(self._next)
            most = _FEW_AHEAD * self._ahead if len(self._begun) < _FEW else self._ahead
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
        result = self._begun[0][0].result()
        self._fetcher.begun_bytes -= self._begun.popleft()[2]
        self._begin()
        return result

    def wait(self, seconds: float) -> bool:
        """Whether the next result is there within so long, or there will be none."""
        return not self._begun or bool(wait([self._begun[0][0]], seconds).done)

    def drain(self, seconds: float) -> list[T]:
        """Begin no more, and give the tasks that are under way or done out of order, after they had so long to end."""
        self._stop.set()
        self.begun = True
        begun = [(future, task) for future, task, _ in self._begun if not future.cancel()]
        wait([future for future, _ in begun], seconds)
        return [task for _, task in begun]

    def close(self) -> None:
        """Forget what was begun. May be called twice."""
        self._stop.set()
        self.begun = True
        for future, _, nbytes in self._begun:
            future.cancel()
            self._fetcher.begun_bytes -= nbytes
        self._begun.clear()


_END: Any = object()
