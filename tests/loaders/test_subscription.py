"""Following a dataset: leases, runs of several processes, exported folders."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, open_cache, snapshots
from cachetool.cache.catalog import Catalog
from cachetool.cache.history import Delivered, history_of
from cachetool.check.verify import verify
from cachetool.core.errors import CapBlocked, CorruptError, UsageError
from cachetool.loaders.snapshots.follow import CacheSubscription, launched_run, subscribe
from cachetool.loaders.snapshots.plain_files import shards_at
from tests.loaders.numbered import leases, put


def retire_one(cache: CacheDir) -> None:
    """Remove the oldest shard from future snapshots."""
    with pytest.raises(CapBlocked):
        cache.evict(cache.usage().total - 1, wait=0)


def test_one_lease_follows_the_newest_view(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache)
    assert leases(cache) == []
    first = subscription.newest()
    put(cache, range(60, 80))
    second = subscription.newest()

    assert (first.samples, second.samples) == (60, 80)
    assert leases(cache) == [second.version]
    assert subscription.at(first.version).fingerprint == first.fingerprint
    subscription.close()
    subscription.close()
    assert leases(cache) == []


def test_a_lease_is_returned_when_its_subscription_is_dropped(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache.root)
    subscription.newest()
    assert len(leases(cache)) == 1

    del subscription
    assert leases(cache) == []


def test_a_copy_takes_its_own_lease(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache)
    subscription.newest()
    other = copy.copy(subscription)
    assert len(leases(cache)) == 1
    other.newest()
    assert len(leases(cache)) == 2

    other.close()
    assert len(leases(cache)) == 1
    subscription.close()


def test_processes_of_a_run_share_the_view_of_the_same_epoch_only(cache: CacheDir) -> None:
    one, two, stranger = (CacheSubscription(cache, run=run) for run in ("job", "job", "other job"))
    first = one.newest(epoch=0)
    put(cache, range(60, 80))

    assert two.newest(epoch=0).version == first.version
    assert stranger.newest(epoch=0).samples == 80
    assert two.newest().samples == 80
    assert one.newest(epoch=1).samples == 80
    put(cache, range(80, 100))
    assert two.newest().samples == 100
    for subscription in (one, two, stranger):
        subscription.close()


def test_served_epochs_are_counted_for_the_leased_shards(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache)
    subscription.newest()
    put(cache, range(60, 80))
    subscription.served()
    subscription.close()
    subscription.served()

    assert [shard.epochs for shard in cache.shards()] == [1, 1, 1, 0]


def test_an_epoch_is_counted_and_its_lease_ends_in_one_transaction(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = CacheSubscription(cache)
    subscription.newest(epoch=7)
    begun: list[str] = []
    transaction = Catalog._transaction

    def counted(self: Catalog, begin: str, patience: float) -> Iterator[Any]:
        if self._outer is None:
            begun.append(begin)
        return transaction(self, begin, patience)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "_transaction", counted)
        subscription.served(Delivered(2.5, 7, 3, 0.5), last=True)
        subscription.release()
        subscription.release()

    assert begun == ["BEGIN IMMEDIATE"]
    assert leases(cache) == []
    assert [shard.epochs for shard in cache.shards()] == [1, 1, 1]
    [told] = history_of(cache.layout).epochs
    assert told.items() >= {"epoch": 7, "shards": 3, "samples": 60, "batches": 7, "waited": 0.5}.items()
    assert cache.stats().served == told["bytes"]


def test_shards_that_only_a_finished_epoch_kept_are_deleted(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache)
    subscription.newest()
    gone = cache.shards()[0].path
    retire_one(cache)
    assert gone.exists()
    subscription.served(last=True)
    subscription.release()

    assert not gone.exists()
    assert len(cache.shards(retiring=True)) == 2


def test_an_epoch_ends_although_its_history_cannot_be_written(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    subscription = CacheSubscription(cache)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("cachetool.cache.history.new_file", full)
    for epoch in range(3):
        subscription.newest(epoch=epoch)
        subscription.served(Delivered(1.0, 1, 1, 0.1), last=True)
        subscription.release()
        assert leases(cache) == []
    assert [shard.epochs for shard in cache.shards()] == [3, 3, 3]
    assert history_of(cache.layout).epochs == []


def test_an_unchanged_view_is_not_read_again(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    rows = snapshots._rows

    def noted(*asked: Any, **more: Any) -> Any:
        read.append(asked)
        return rows(*asked, **more)

    monkeypatch.setattr(snapshots, "_rows", noted)
    subscription = CacheSubscription(cache)
    view = subscription.newest()
    assert subscription.newest() is view
    subscription.served(last=True)
    subscription.release()
    assert subscription.newest(sparing=True) is view
    assert len(read) == 1

    put(cache, range(60, 80))
    assert subscription.newest().samples == 80
    retire_one(cache)
    assert subscription.newest().samples == 60
    assert len(read) == 3
    subscription.close()


def test_the_shards_of_a_known_version_are_looked_up_on_request(cache: CacheDir) -> None:
    with cache.snapshot() as first, cache.snapshot(known=(first.version, first.stamp)) as second:
        assert (first.is_unchanged, second.is_unchanged) == (False, True)
        retire_one(cache)
        assert (second.samples, second.shards) == (60, tuple(cache.shards(version=first.version)))
        assert [shard.id for shard in second.shards] == [shard.id for shard in first.shards]
        with cache.snapshot(known=(first.version, first.stamp)) as third:
            assert (third.is_unchanged, third.samples) == (False, 40)


def test_a_recreated_cache_is_read_again_although_it_has_the_same_version(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache)
    before = subscription.newest()
    shutil.rmtree(cache.root)
    with open_cache(cache.root, max_size="50MB") as other:
        for at in (0, 20, 40):
            put(other, range(at, at + 20))
    after = subscription.newest()

    assert after.version == before.version
    assert [part.id for part in after.parts] == [shard.id for shard in cache.shards()]
    subscription.close()


def test_a_corrected_row_is_read_again(cache: CacheDir) -> None:
    wrong = cache.shards()[1].id
    with cache.catalog.write() as connection:
        connection.execute("UPDATE shards SET samples = 19 WHERE id = ?", (wrong,))
    subscription = CacheSubscription(cache)
    assert subscription.newest().samples == 59
    verify(cache.root, repair=True)
    assert subscription.newest().samples == 60
    subscription.close()


def test_an_older_version_is_read_again_also_if_others_leased_it(cache: CacheDir) -> None:
    """Shards of a version that only others lease may have been deleted before."""
    one, two = (CacheSubscription(cache, run="job") for _ in range(2))
    known = one.newest(epoch=0)
    one.release()
    put(cache, range(60, 80))
    cache.evict(cache.usage().total - 1, wait=0)
    two.newest(epoch=1)
    with cache.catalog.write() as connection:
        connection.execute("UPDATE leases SET version = ?", (known.version,))
    shared = one.newest(epoch=1)

    assert (shared.version, shared.samples) == (known.version, 40)
    for subscription in (one, two):
        subscription.close()


@pytest.mark.parametrize("part", ["count", "lease", "files"])
def test_counting_an_epoch_and_ending_its_lease_succeed_independently(
    part: str, cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "no")

    subscription = CacheSubscription(cache)
    subscription.newest()
    retire_one(cache)
    place, name = {
        "count": (snapshots.history, "epoch_row"),
        "lease": (snapshots, "sweep"),
        "files": (snapshots, "delete_trash"),
    }[part]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, fail)
        with pytest.raises(PermissionError) if part == "count" else contextlib.nullcontext():
            subscription.served(last=True)
        with contextlib.nullcontext() if part == "count" else pytest.raises(PermissionError):
            subscription.release()
        subscription.release()

    assert len(leases(cache)) == (part == "lease")
    assert {shard.epochs for shard in cache.shards()} == {int(part != "count")}
    subscription.close()


def test_a_missing_cache_or_dataset_is_refused(cache: CacheDir, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no dataset 'other'"):
        CacheSubscription(cache, dataset="other")
    with pytest.raises(UsageError, match="there is no cache at"):
        CacheSubscription(tmp_path / "nothing")
    with open_cache(tmp_path / "new", max_size="20MB") as new, pytest.raises(UsageError, match="it is empty"):
        CacheSubscription(new)


def test_a_damaged_list_of_files_is_refused(tmp_path: Path) -> None:
    about = {"format": "lmdb", "parts": [], "schema": [{"name": "x", "dtype": "<f4", "shape": [2]}]}
    (tmp_path / "dataset.json").write_text(json.dumps(about))
    assert subscribe(tmp_path, dataset=None, run=None).newest().samples == 0
    with pytest.raises(UsageError, match="leave out dataset="):
        subscribe(tmp_path, dataset="x", run=None)

    for text in ("{", "[]", json.dumps({**about, "parts": [{"file": "part-00000.lmdb"}]})):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(CorruptError, match=r"dataset\.json is damaged"):
            shards_at([tmp_path])


def test_a_launcher_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert launched_run() is None
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert launched_run() == "77::2"
    for name, value in {"RUN_ID": "none", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launched_run() == "none:10.0.0.1:29500:0"
