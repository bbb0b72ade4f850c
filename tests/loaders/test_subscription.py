"""Following a dataset: leases, runs of several processes, folders of plain files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.errors import CorruptError, UsageError
from cachetool.loaders.files import shards_at
from cachetool.loaders.subscription import CacheSubscription, launched_run, subscribe
from tests.loaders.numbered import leases, put


def test_one_lease_moves_along_with_the_newest_view(cache: CacheDir) -> None:
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


def test_a_lease_is_given_back_when_its_subscription_is_dropped(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache.root)
    subscription.newest()
    assert len(leases(cache)) == 1

    del subscription
    assert leases(cache) == []


def test_a_copy_takes_a_lease_of_its_own(cache: CacheDir) -> None:
    subscription = CacheSubscription(cache)
    subscription.newest()
    other = copy.copy(subscription)
    assert len(leases(cache)) == 1
    other.newest()
    assert len(leases(cache)) == 2

    other.close()
    assert len(leases(cache)) == 1
    subscription.close()


def test_a_run_shares_the_view_of_an_epoch_and_only_then(cache: CacheDir) -> None:
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


def test_what_is_not_there_is_refused(cache: CacheDir, tmp_path: Path) -> None:
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
        with pytest.raises(CorruptError, match=r"dataset\.json is not what cachetool writes"):
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
