"""The iterable-style dataset for PyTorch; each script runs in a process of its own and tells what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir
from cachetool.core.errors import CacheToolError
from cachetool.loaders.torch_iterable import Call, RollCall
from tests.loaders.conftest import run_script
from tests.loaders.numbered import EVERY, digests

CASES = {"fork": ["0 False", "2 False", "2 True", "8 False"], "spawn": ["2 True"], "forkserver": ["2 True"]}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``torch_iterable.py`` saw with forked workers."""
    out: dict[str, Any] = run_script("torch_iterable.py", "fork", tmp_path_factory.mktemp("iterable") / "cache")
    return out


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_every_epoch_has_the_newest_samples_exactly_once(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Three rounds of growth and one of eviction; 0, 2 and 8 workers, persistent or not."""
    if method == "fork":
        seen = request.getfixturevalue("forked")
    else:
        seen = run_script("torch_iterable.py", method, tmp_path / "cache")
    for case in CASES[method]:
        found = seen[case]
        # First number, last number, samples, different samples.
        grown = [[0, 59, 60, 60], [0, 79, 80, 80], [0, 99, 100, 100]]
        assert found["epochs"] == [*grown, grown[2], [20, 99, 80, 80]], case
        assert found["len"] == 8
        assert found["shuffled"]
        assert found["new order"]
        assert found["waits"]  # an evicted shard stays until the epoch that reads it is over
        assert found["same seeds"]
        assert [found["leases before"], found["leases"]] == [0, 0]
        assert not found["leases after break"]
    assert all(each == digests(EVERY, range(40)) for each in seen["every"])


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_several_iterators_at_once_have_an_epoch_each(method: str, cache: CacheDir) -> None:
    """Two of one DataLoader, one each of two, and a second one for a moment."""
    assert run_script("torch_twice.py", method, cache.root) == [list(range(60))] * 5


def test_the_order_does_not_depend_on_the_number_of_workers(forked: dict[str, Any]) -> None:
    assert forked["same order"]


def test_loaders_of_other_numbers_of_workers_have_an_epoch_each_though_their_seeds_are_the_same(
    forked: dict[str, Any],
) -> None:
    assert forked["other workers"] == [[0, 70, 71, 71]] * 2


def test_ranks_share_every_epoch_out_in_equal_steps(forked: dict[str, Any]) -> None:
    """71 samples, three ranks of two workers each: batches and samples of each rank, all, different ones."""
    steps, samples = [6, 6, 6], [24, 24, 23]
    assert forked["ranks"] == [[steps, samples, 71, 71], [steps, samples, 71, 71], True]
    assert forked["ranks, drop_last"] == [[[5] * 3, [20] * 3, 60, 60], [[5] * 3, [20] * 3, 60, 60], True]
    for epoch in forked["ranks, samples"][:2]:
        assert epoch[1:] == [samples, 71, 71]
    for epoch in forked["ranks, samples, drop_last"][:2]:
        assert epoch[1:] == [[23] * 3, 69, 69]
    assert [len(each) for each in forked["left out"]] == [2] * 6
    assert len({number for each in forked["left out"] for number in each}) > 6, "others in each epoch"
    assert "71 samples are too few for 3 ranks with whole batches of 24" in forked["too few"]
    assert forked["leases"] == 0


def test_what_cannot_be_read_is_refused(forked: dict[str, Any]) -> None:
    wanted = ("run=NAME", "batch_size=0", "shuffle='half'", "no field 'nothing'", "no cache", "batch_size=4.0 is not")
    for message, words in zip(forked["errors"], wanted, strict=True):
        assert message.startswith("UsageError")
        assert words in message


def test_an_epoch_that_was_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    """By torchdata's StatefulDataLoader with 0, 2 and 3 workers, single samples too, and by hand."""
    found = run_script("torch_resume.py", tmp_path / "cache")

    assert len(found["cases"]) == 4
    for case, seen in found["cases"].items():
        assert all(seen.values()), (case, seen)
    hand = found["by hand"]
    assert hand["fresh"] == {"state": 1, "seed": 4, "epoch": 0}
    assert all(hand[name] for name in ("kept until used", "the same rest", "disjoint", "epoch 7"))
    wrong = ("'epoch' is 'x'", "'row' is 0", "'parts' is [5]")
    refused = ("seed=4", "not a state", *wrong, "worker 0 of 2", "1 of 1 shards of the epoch")
    for message, words in zip(hand["refused"], refused, strict=True):
        assert message.startswith("UsageError")
        assert words in message
    assert hand["other order"] == [
        *(
            f"UsageError: the state was made with {was}, this dataset has {has}; make it with {was}"
            for was, has in (
                ("shuffle='full'", False), ("batch_size=6", None), ("batch_size=6", 12), ("drop_last=False", True)
            )
        ),
        "accepted",
    ]  # fmt: skip
    assert found["leases"] == 0


def test_what_an_earlier_epoch_left_is_not_taken_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from cachetool.loaders import torch_iterable as rollcall

    calls = RollCall()
    calls.begin(5, Call(3, 9, 77))
    assert calls.join(5, 1) == (3, 9, 77)
    assert calls.next_epoch == 4
    monkeypatch.setattr(rollcall, "_PATIENCE", 0.0)
    with pytest.raises(CacheToolError, match="worker 0 has not begun"):
        calls.join(6, 1)
    calls.arrived(5, 1)
    with pytest.raises(CacheToolError, match="worker 0 has not begun"):
        calls.join(5, 1)
    assert calls.join(5, 2) == (3, 9, 77)
    monkeypatch.setattr(rollcall, "_alive", lambda pid: False)
    with pytest.raises(CacheToolError, match="worker 0 has not begun"):
        calls.join(5, 2)
    calls.wait_for_all(5, 2)
    with pytest.raises(CacheToolError, match="another worker did not begin"):
        calls.wait_for_all(5, 3)
