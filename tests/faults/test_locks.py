"""Locks that are lost or kept by accident: of holders, of transactions, of caches under two names."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cachetool.cache import CacheDir, catalog, open_cache, opening, transaction_lock
from cachetool.check.doctor import examine
from cachetool.core.errors import CapBlocked, CatalogError
from cachetool.loaders.numpy import Loader
from cachetool.proc.locks import OwnLock, close_kept, lock_owners, try_lock
from tests.cache.conftest import SCHEMA, put_shard
from tests.loaders.numbered import KEYED, leases, put

SCRIPTS = Path(__file__).parent / "scripts"
Start = Callable[..., "subprocess.Popen[str]"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and maps that no child gets")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a cache of three shards."""
    return filled(tmp_path / "cache")


def filled(root: Path) -> Path:
    with open_cache(root, max_size="4MB") as cache:
        cache.declare("default", SCHEMA)
        for _ in range(3):
            put_shard(cache)
        with cache.catalog.write() as own:
            own.execute("INSERT INTO evictions VALUES ('counter', '', '', 0, 0, 0)")
    return root


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a script in its own session and waits for its first line. The session ends with the
    test.
    """
    started: list[subprocess.Popen[str]] = []

    def run(*words: object, says: bool = True, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        name, *arguments = map(str, words)
        program = [*before, sys.executable, str(SCRIPTS / name), *arguments]
        started.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert not says or (started[-1].stdout is not None and started[-1].stdout.readline() == "ready\n")
        return started[-1]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_held(root: Path) -> bool:
    """Return True if leases keep all shards from an eviction, False if all were evicted."""
    with open_cache(root) as cache:
        usage = cache.usage()
        try:
            cache.evict(usage.overhead + usage.listings)
            held = False
        except CapBlocked:
            held = True
    assert len(os.listdir(root / "shards")) == (3 if held else 0)
    return held


@pytest.mark.parametrize("act", ["copy", "digest", "archive", "open_to_write", pytest.param("daemonize", marks=linux)])
def test_a_program_that_opens_or_closes_all_files_keeps_its_lease_until_it_dies(
    root: Path, tmp_path: Path, start: Start, act: str
) -> None:
    process = start("keeps_a_lease.py", root, tmp_path, act)
    assert is_held(root)
    process.kill()
    process.wait()
    assert not is_held(root)


@pytest.mark.parametrize(
    "act",
    ["fork", pytest.param("fork_in_c", marks=linux), "fork_by_multiprocessing", "inherit_all", "fork_in_a_transaction"],
)
def test_a_lease_ends_with_its_process_though_its_children_live(
    root: Path, tmp_path: Path, start: Start, act: str
) -> None:
    process = start("keeps_a_lease.py", root, tmp_path, "copy", act)
    if act != "fork_in_a_transaction":
        assert is_held(root)
    process.kill()
    process.wait()
    os.killpg(process.pid, 0)  # a process of the session still lives; otherwise this call would raise
    assert not is_held(root)


@linux
def test_a_holder_in_another_pid_namespace_is_alive(root: Path, tmp_path: Path, start: Start) -> None:
    space = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], check=False).returncode:
        pytest.skip("no PID namespaces here")
    process = start("keeps_a_lease.py", root, tmp_path, "copy", before=space)
    assert is_held(root)
    process.kill()
    process.wait()
    with open_cache(root) as cache:  # the kernel ends the namespace a moment later
        while cache.stats().leases:
            cache.recover()


def test_a_dead_holder_counts_as_dead_although_another_process_has_its_pid(root: Path) -> None:
    with open_cache(root) as cache:
        with cache.catalog.write() as own:
            own.execute("INSERT INTO holders VALUES ('f0f0f0f0f0f0f0f0', ?, 'here', 'gone', 0)", (os.getpid(),))
        (root / "holders" / "f0f0f0f0f0f0f0f0.lock").touch()
        assert cache.recover() == 1
        assert os.listdir(root / "holders") == [cache.holder.path.name]


def test_a_pipe_in_place_of_a_lock_file_blocks_no_process(root: Path) -> None:
    os.mkfifo(root / "holders" / "f0f0f0f0f0f0f0f0.lock")
    with open_cache(root) as cache:
        assert cache.snapshot().samples == 30


@pytest.mark.parametrize("commits", [15, pytest.param(50, marks=pytest.mark.soak)])
def test_no_commit_is_lost_beside_threads_that_read_the_catalogs_file(root: Path, start: Start, commits: int) -> None:
    """Each such read releases SQLite's own POSIX locks. With these locks alone, the catalog was malformed after some
    hundred commits.
    """
    writers = [start("counts_and_copies.py", root, commits, says=False) for _ in range(3)]
    assert [process.wait() for process in writers] == [0] * 3
    with open_cache(root) as cache:
        assert cache.catalog.rows("SELECT shards FROM evictions")[0][0] == 3 * commits
        assert cache.catalog.trouble() is None


def stopped(process: subprocess.Popen[str]) -> int:
    """Return the pid of a process after it has stopped itself."""
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    return process.pid


@linux
@pytest.mark.parametrize("where", ["writing", "reading", "spilling"])
def test_a_process_stopped_in_a_transaction_is_named_with_the_remedy(root: Path, start: Start, where: str) -> None:
    process = start("stops.py", root, where, says=False)
    pid = stopped(process)
    with CacheDir(root) as cache:
        with pytest.raises(CatalogError) as error, cache.catalog.write(patience=0.1):
            pass
        told = str(error.value)
        assert f"is locked by pid {pid} " in told
        assert "(stops.py) since 20" in told or where == "reading", "one that changes nothing leaves no word"
        assert "which is stopped" in told
        command = told.partition("let it continue with: ")[2].partition(", or end it with: ")[0]
        subprocess.run(command, shell=True, check=True)
        assert process.wait() == 0
        with cache.catalog.write(patience=60):
            pass


@linux
@pytest.mark.parametrize("where", ["writing", "reading"])
def test_commands_that_only_read_work_beside_a_process_stopped_in_a_transaction(
    root: Path, start: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(opening, "_TO_LOOK", 0.1)
    pid = stopped(start("stops.py", root, where, says=False))
    said: list[str] = []
    with open_cache(root, create=False, notify=said.append) as cache:
        assert sum(shard.samples for shard in cache.shards()) == 30
        assert cache.stats().samples == 30
        assert cache.catalog.rows("SELECT shards FROM evictions")[0][0] == 0
    assert f"locked by pid {pid}" in said[0]


@linux
def test_a_program_that_holds_sqlites_lock_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_LOOKS", 2)
    code = (
        "import sqlite3, sys; other = sqlite3.connect(sys.argv[1], isolation_level=None);"
        " other.execute('BEGIN EXCLUSIVE'); print('ready', flush=True); sys.stdin.read()"
    )
    program = [sys.executable, "-c", code, root / "catalog.sqlite3"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with (
            CacheDir(root) as cache,
            pytest.raises(CatalogError, match=rf"locked by pid {other.pid} \(.+kill {other.pid}"),
        ):
            cache.catalog.number("version")
        assert other.stdin is not None
        other.stdin.close()


def test_readers_wait_for_a_waiting_writer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_lock, "_POLITE", 60.0)
    if sys.platform != "linux":
        pytest.skip("only Linux tells who waits")
    order: list[str] = []
    waits = threading.Event()
    sleep = transaction_lock.time.sleep

    def slept(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    def take(name: str, *, shared: bool) -> None:
        with transaction_lock.TransactionLock(root / "catalog.sqlite3").hold(shared=shared):
            order.append(name)

    monkeypatch.setattr(transaction_lock.time, "sleep", slept)
    with transaction_lock.TransactionLock(root / "catalog.sqlite3").hold(shared=True):
        writer = threading.Thread(target=take, args=("writer",), kwargs={"shared": False})
        writer.start()
        assert waits.wait(60)
        waits.clear()
        reader = threading.Thread(target=take, args=("reader",), kwargs={"shared": True})
        reader.start()
        assert waits.wait(60)
    writer.join(60)
    reader.join(60)
    assert order == ["writer", "reader"]


def test_a_deleted_lock_file_of_transactions_is_created_again(root: Path) -> None:
    lock = root / "catalog.sqlite3-lock"
    with open_cache(root) as cache:
        lock.unlink()
        with cache.catalog.write():
            there = lock.stat().st_ino
            lock.unlink()
        with cache.catalog.write() as own:
            assert own.in_transaction
            assert lock.stat().st_ino
    assert there


@linux
def test_a_lock_survives_the_closing_of_every_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    assert try_lock(held)
    lock = OwnLock(held)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    with path.open() as other:
        assert not try_lock(other.fileno(), shared=True)
        assert lock_owners(path) == [os.getpid()]
        lock.release()
        lock.release()
        assert try_lock(other.fileno(), shared=True)


def test_a_kept_descriptor_that_the_program_closed_is_not_closed_again(tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)  # a folder, which cannot be mapped
    lock = OwnLock(held)
    os.close(held)
    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, held)
    lock.release()
    close_kept(held)
    os.fstat(held)  # the descriptor still belongs to this test
    for fd in {other, held}:
        os.close(fd)


def test_a_cache_opened_through_a_link_stays_the_same_after_the_link_changes(root: Path, tmp_path: Path) -> None:
    other, link = filled(tmp_path / "other"), tmp_path / "link"
    link.symlink_to(root)
    with open_cache(link) as cache:
        snapshot = cache.snapshot()
        (tmp_path / "new").symlink_to(other)
        os.replace(tmp_path / "new", link)
        put_shard(cache)
        assert cache.snapshot().samples == 40
        assert all(shard.path.is_relative_to(root) and shard.path.exists() for shard in snapshot.shards)
        assert os.listdir(root / "holders") == [cache.holder.path.name]
        assert os.listdir(other / "holders") == []
        snapshot.release()
    with open_cache(link) as cache:
        assert cache.snapshot().samples == 30


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_reads_one_cache_although_its_link_changes(tmp_path: Path, workers: int) -> None:
    for name, first in (("one", 0), ("other", 1000)):
        with open_cache(tmp_path / name, max_size="4MB") as cache:
            for at in (0, 50):
                put(cache, range(first + at, first + at + 50), schema=KEYED)
    link = tmp_path / "link"
    link.symlink_to("one")
    with Loader(link, batch_size=10, workers=workers) as loader:
        for epoch in range(3):
            read = np.concatenate([batch["number"] for batch in loader])
            assert sorted(read.tolist()) == list(range(100)), f"epoch {epoch}"
            if epoch == 0:
                (tmp_path / "new").symlink_to("other")
                os.replace(tmp_path / "new", link)
    with open_cache(tmp_path / "one") as cache:
        assert {row["epochs"] for row in cache.catalog.rows("SELECT epochs FROM shards")} == {3}
        assert leases(cache) == []
    assert os.listdir(tmp_path / "other" / "holders") == []


@pytest.fixture
def twin(root: Path, tmp_path: Path) -> Path:
    """Create a copy of the cache from hard links."""
    shutil.copytree(root, tmp_path / "twin", copy_function=os.link)
    return tmp_path / "twin"


@pytest.mark.parametrize("refused", ["root", "twin"])
def test_a_catalog_with_two_hard_links_is_refused_until_the_advice_is_followed(
    root: Path, twin: Path, refused: str
) -> None:
    one, other = (root, twin) if refused == "root" else (twin, root)
    with pytest.raises(CatalogError) as error:
        open_cache(one)
    told = str(error.value)
    assert "hard links" in told
    assert any((each.what, each.state, each.text) == ("catalog", "bad", told) for each in examine(one))
    subprocess.run(["sh", "-ec", told.partition("separate the two with: ")[2]], check=True)
    with open_cache(one) as cache, open_cache(other) as kept:
        cache.evict(cache.usage().total - 150_000)
        assert len(cache.shards()) == 1
        put_shard(kept)
        assert all((shard.path / "data.lmdb").read_bytes() == bytes(100_000) for shard in kept.shards())
        assert len(kept.shards()) == 4
        assert cache.catalog.trouble() is None
        assert kept.catalog.trouble() is None


def test_a_journal_with_two_hard_links_is_refused(root: Path, twin: Path) -> None:
    """Otherwise one cache would roll back the other cache's transactions in its own catalog."""
    for folder in (root, twin):
        shutil.copy(folder / "catalog.sqlite3", folder / "own")
        os.replace(folder / "own", folder / "catalog.sqlite3")
    for folder in (root, twin):
        with pytest.raises(CatalogError, match=r"catalog\.sqlite3-journal is shared"):
            open_cache(folder)


def test_a_lease_in_a_hard_linked_copy_ends_in_both_caches(root: Path, tmp_path: Path) -> None:
    """The holder's lock file has two names while the holder lives."""
    with open_cache(root) as cache, cache.snapshot():
        twin = shutil.copytree(root, tmp_path / "twin", copy_function=os.link)
        for path in twin.glob("catalog.sqlite3*"):
            shutil.copy(path, tmp_path / "own")
            os.replace(tmp_path / "own", path)
        assert is_held(twin)
    assert not is_held(twin)
    assert len(list((root / "shards").iterdir())) == 3
