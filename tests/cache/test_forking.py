"""What a forked child has of its parent's cache, whatever the parent's threads were doing; and what happens to a thread
whose signal handler, or another thread, uses or closes the cache in the middle of a call."""

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
    """Whether it was true in a forked child, which has a minute."""
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
    """A thread that does ``work`` until it is in the middle of it; goes on when the event is set."""
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
    """As another process counts them, which recovers first."""
    done = subprocess.run([sys.executable, "-c", LEASES, cache.root], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Have something done by a signal's handler, at the next ``signal.raise_signal(signal.SIGUSR1)``."""
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
    """SQLite would else believe in the child that the process has its lock, for ever."""
    monkeypatch.setattr(catalog, "_LOOKS", 500)  # of a minute, a second or two
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


def test_a_thread_that_waits_for_the_forking_one_does_not_stop_it_for_ever(
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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # Python ignores what hooks raise
def test_threads_that_fork_at_once_leave_no_lock_behind(cache: CacheDir) -> None:
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


def test_a_child_forked_while_a_holder_is_made_opens_the_cache(
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


def test_a_childs_lease_of_an_inherited_cache_outlives_another_use_of_it(cache: CacheDir) -> None:
    put_shard(cache)

    def leased() -> bool:
        cache.snapshot()
        with open_cache(cache.root):
            pass
        return len(cache.catalog.rows("SELECT * FROM leases")) == 1

    assert in_child(leased)


def test_a_child_that_closes_the_cache_of_its_parent_keeps_its_own(cache: CacheDir) -> None:
    put_shard(cache)
    cache.snapshot()

    def closes() -> bool:
        with CacheDir(cache.root) as own:
            own.snapshot()
            cache.close()
            return len(own.stats().leases) == 2

    assert in_child(closes)
    assert [row["pid"] for row in cache.stats().leases] == [os.getpid()]


def test_what_a_handler_asks_in_the_middle_of_a_transaction_does_not_undo_it(
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
    assert "a signal's handler interrupted its use" in said[0]
    assert len(cache.catalog.rows("SELECT * FROM evictions")) == 2


def test_a_cache_that_a_handler_closes_in_the_middle_of_a_transaction_says_so_and_leaves_nothing(
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
def test_a_snapshot_of_a_cache_that_is_closed_meanwhile_is_refused_and_no_file_is_closed_twice(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[[Callable[[], object]], None], by: str
) -> None:
    put_shard(cache)
    _ = cache.holder
    files: list[int] = []

    def close() -> None:
        cache.close()
        files.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(8))  # they get the numbers that are free now

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
        os.close(fd)  # it is still ours
    assert os.listdir(cache.root / "holders") == []


@pytest.mark.parametrize("error", [CapacityError("the disk is full"), KeyboardInterrupt()])
def test_what_a_closing_process_cannot_sign_out_is_taken_back_by_the_next_one(
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


def test_a_cache_opened_while_the_last_one_is_closed_keeps_its_lease_and_its_lock(
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


def test_a_new_cap_beside_a_closing_use_of_this_process_is_taken(
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


def test_members_of_a_set_that_grows_meanwhile_are_listed() -> None:
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
