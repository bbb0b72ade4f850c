"""A forked child's use of its parent's cache, whatever the parent's threads do during the fork. Also: a signal handler
or another thread that uses or closes the cache in the middle of a call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, catalog, forking, holders, open_cache, root
from cachetool.cache.forking import members
from cachetool.core.errors import CapacityError, CatalogError, UsageError

from .conftest import put_shard

LEASES = "import sys, cachetool; print(len(cachetool.open_cache(sys.argv[1]).stats().leases))"


def in_child(work: Callable[[], bool]) -> bool:
    """Return the result of ``work`` in a forked child, which has a minute."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            code = 0 if work() else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextlib.contextmanager
def beside(work: Callable[[threading.Event, threading.Event], None]) -> Iterator[threading.Event]:
    """Run ``work`` in a thread and return while it is in the middle. It continues when the event is set."""
    inside, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(inside, go))
    thread.start()
    assert inside.wait(60)
    try:
        yield go
    finally:
        go.set()
        thread.join()


def leases(cache: CacheDir) -> int:
    """Return the leases that another process counts. It recovers dead holders first."""
    done = subprocess.run([sys.executable, "-c", LEASES, cache.root], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Run a function in a signal handler at the next ``signal.raise_signal(signal.SIGUSR1)``."""
    before = signal.getsignal(signal.SIGUSR1)

    def by(work: Callable[[], object]) -> None:
        def once(*_: object) -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            work()

        signal.signal(signal.SIGUSR1, once)

    yield by
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_fork_waits_for_the_transaction_of_another_thread(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Otherwise SQLite in the child would believe for ever that its process holds the lock."""
    monkeypatch.setattr(catalog, "_LOOKS", 500)  # a second or two instead of a minute
    put_shard(cache)

    def transaction(inside: threading.Event, go: threading.Event) -> None:
        with getattr(cache.catalog, kind)() as own:
            own.execute("SELECT count(*) FROM shards").fetchall()
            inside.set()
            go.wait(0.3)

    def writes() -> bool:
        with open_cache(cache.root) as mine:
            mine.snapshot().release()
        return True

    with beside(transaction):
        assert in_child(writes)
    assert cache.snapshot().samples == 10


def test_a_fork_does_not_deadlock_with_a_thread_that_waits_for_the_forking_thread(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_PATIENCE", 0.05)

    waited: list[bool] = []

    def transaction(inside: threading.Event, go: threading.Event) -> None:
        with cache.catalog.read():
            inside.set()
            waited.append(go.wait(20))

    with beside(transaction):
        assert in_child(lambda: True)
    assert cache.snapshot().samples == 0
    assert waited == [True]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # Python ignores exceptions in fork hooks
def test_threads_that_fork_at_the_same_time_leave_no_lock_behind(cache: CacheDir) -> None:
    others = [CacheDir(cache.root) for _ in range(3)]
    for each in (cache, *others):
        _ = each.catalog.number("version")
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(in_child(lambda: True))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True] * 8
    free: list[bool] = []

    def look() -> None:
        for each in (cache, *others):
            free.append(each.catalog.lock().acquire(timeout=5))
            each.catalog.lock().release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert free == [True] * 4


def test_a_child_forked_while_a_holder_is_created_opens_the_cache(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = holders._make_locked

    def makes(inside: threading.Event, go: threading.Event) -> None:
        def slowly(path: Path) -> int | None:
            if threading.current_thread() is thread:
                inside.set()
                go.wait(60)
            return made(path)

        thread = threading.current_thread()
        monkeypatch.setattr(holders, "_make_locked", slowly)
        _ = cache.holder

    def opens() -> bool:
        with open_cache(cache.root) as mine:
            mine.snapshot()
        return True

    with beside(makes):
        assert in_child(opens)


def test_a_childs_lease_of_an_inherited_cache_survives_other_uses_of_the_cache(cache: CacheDir) -> None:
    put_shard(cache)

    def leased() -> bool:
        cache.snapshot()
        with open_cache(cache.root):
            pass
        return len(cache.catalog.rows("SELECT * FROM leases")) == 1

    assert in_child(leased)


def test_a_child_that_closes_its_parents_cache_keeps_its_own_cache_open(cache: CacheDir) -> None:
    put_shard(cache)
    cache.snapshot()

    def closes() -> bool:
        with CacheDir(cache.root) as own:
            own.snapshot()
            cache.close()
            return len(own.stats().leases) == 2

    assert in_child(closes)
    assert [row["pid"] for row in cache.stats().leases] == [os.getpid()]


def test_a_signal_handler_that_queries_the_cache_does_not_undo_the_transaction(
    cache: CacheDir, interrupted: Callable[[Callable[[], object]], None]
) -> None:
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(CatalogError) as error:
            cache.stats()
        said.append(str(error.value))

    interrupted(ask)
    with cache.catalog.write() as own:
        own.execute("INSERT INTO evictions VALUES ('first', '', '', 0, 0, 0)")
        signal.raise_signal(signal.SIGUSR1)
        own.execute("INSERT INTO evictions VALUES ('second', '', '', 0, 0, 0)")
    assert "a signal handler interrupted" in said[0]
    assert len(cache.catalog.rows("SELECT * FROM evictions")) == 2


def test_a_cache_closed_by_a_signal_handler_in_a_transaction_raises_and_leaves_nothing(
    cache: CacheDir, interrupted: Callable[[Callable[[], object]], None]
) -> None:
    put_shard(cache)
    cache.snapshot()
    interrupted(cache.close)

    def change() -> None:
        with cache.catalog.write() as own:
            own.execute("INSERT INTO evictions VALUES ('first', '', '', 0, 0, 0)")
            signal.raise_signal(signal.SIGUSR1)
            own.execute("INSERT INTO evictions VALUES ('second', '', '', 0, 0, 0)")

    with pytest.raises(CatalogError, match="was closed in the middle of a call"):
        change()
    assert leases(cache) == 0
    with open_cache(cache.root) as again:
        assert again.catalog.rows("SELECT * FROM evictions") == []


@pytest.mark.parametrize("by", ["a handler", "a thread"])
def test_a_snapshot_of_a_cache_closed_meanwhile_raises_and_no_file_is_closed_twice(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[[Callable[[], object]], None], by: str
) -> None:
    put_shard(cache)
    _ = cache.holder
    files: list[int] = []

    def close() -> None:
        cache.close()
        # these files get the descriptor numbers that are free now
        files.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(8))

    interrupted(close)
    find = CacheDir.schema

    def schema(self: CacheDir, name: str) -> Any:
        found = find(self, name)
        if by == "a handler":
            signal.raise_signal(signal.SIGUSR1)
        else:
            thread = threading.Thread(target=close)
            thread.start()
            thread.join()
        return found

    monkeypatch.setattr(CacheDir, "schema", schema)
    with pytest.raises(UsageError, match="is closed"):
        cache.snapshot()
    for fd in files:
        os.close(fd)  # the descriptor still belongs to this test
    assert os.listdir(cache.root / "holders") == []


@pytest.mark.parametrize("error", [CapacityError("the disk is full"), KeyboardInterrupt()])
def test_a_holder_that_could_not_be_removed_at_close_is_removed_by_the_next_open(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    put_shard(cache)
    cache.snapshot()

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(root, "sign_out", fails)
        with contextlib.nullcontext() if isinstance(error, Exception) else pytest.raises(KeyboardInterrupt):
            cache.close()
    assert leases(cache) == 0, "though the pid that had it still runs"


def test_a_cache_opened_while_the_process_closes_its_last_one_keeps_lease_and_lock(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_shard(cache)
    cache.snapshot()
    first, sign_out = cache.holder, root.sign_out
    opened: list[CacheDir] = []

    def meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(root, "sign_out", sign_out)
        opened.append(open_cache(cache.root))
        opened[0].snapshot()
        with open_cache(cache.root) as another:
            assert another.holder is opened[0].holder is not first
        assert opened[0].stats().holders == []
        sign_out(*arguments)

    monkeypatch.setattr(root, "sign_out", meanwhile)
    cache.close()
    assert first.retired
    assert not first.path.exists()
    assert not opened[0].holder.retired
    assert leases(cache) == 1, "another process finds the lock taken, and keeps the lease"
    opened[0].close()
    assert os.listdir(cache.root / "holders") == []
    with open_cache(cache.root) as again:
        assert again.catalog.rows("SELECT * FROM leases") == []


def test_a_new_cap_is_accepted_while_this_process_closes_the_cache(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.snapshot()
    sign_out = root.sign_out

    def meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(root, "sign_out", sign_out)
        with open_cache(cache.root, max_size="5MB") as other:
            _ = other.holder
            assert other.max_size == 5_000_000
        sign_out(*arguments)

    monkeypatch.setattr(root, "sign_out", meanwhile)
    cache.close()


def test_a_set_that_another_thread_extends_is_listed_without_an_error() -> None:
    class Growing(weakref.WeakSet[Any]):
        grown = False

        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                yield each
                if not self.grown:
                    self.grown = True
                    raise RuntimeError("Set changed size during iteration")

    class Thing:
        pass

    things = [Thing(), Thing()]
    assert set(members(Growing(things))) == set(things)
