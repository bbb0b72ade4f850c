"""Arguments in the forms that Python users write: NumPy numbers, floats for bytes, one name for a list, texts for
durations.
"""

from __future__ import annotations

import copy
import errno
import inspect
import multiprocessing
import os
import pickle
import re
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import cachetool
from cachetool.cache import CacheDir
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.feed import processes
from cachetool.loaders.numpy import Loader
from cachetool.loaders.other_names import OF_LOADERS
from cachetool.loaders.ring.memory import MOST_KEPT
from cachetool.loaders.ring.ring import Ring
from cachetool.loaders.torch import CacheDataset, DevicePrefetcher, EpochSampler, LMDBDataset
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.numbered import put


def numbers(batches: Any) -> list[int]:
    """Return the numbers of the samples of these batches, in order."""
    return [int(number) for batch in batches for number in batch["number"]]


@pytest.mark.parametrize("workers", [0, np.int64(2)])
def test_numpy_numbers_and_a_single_field_name_are_accepted(workers: Any, cache: CacheDir) -> None:
    options: dict[str, Any] = {"batch_size": np.int64(4), "seed": np.int64(3), "wait": "10min", "hold": "1s"}
    with Loader(cache, fields="number", workers=workers, **options) as loader:
        found = numbers(loader)
    with Loader(cache, fields=["number"], workers=1, batch_size=4, seed=3) as loader:
        assert found == numbers(loader)
    with Loader(cache, batch_size=4, workers=workers, seed=-1, transform=drawn) as loader:
        assert len(numbers(loader)) == 60


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"number": rng.integers(9)}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_infinite_wait_and_numpy_flags_and_counts_are_accepted(workers: int, cache: CacheDir) -> None:
    counts = dict.fromkeys(("prefetch", "epochs", "min_samples", "steps", "world_size"), np.int64(1))
    flags = dict.fromkeys(("drop_last", "verify", "concurrent"), np.bool_(True))
    endless = {"wait": float("inf"), "hold": np.float32("inf"), "rank": np.int64(0)}
    with Loader(cache, batch_size=4, workers=workers, fields=["number"], **counts, **flags, **endless) as loader:  # type: ignore[arg-type]
        assert len(numbers(loader)) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 4.0}, "batch_size=4.0 is not a whole number"),
        ({"seed": "one"}, "seed='one' is not a whole number"),
        ({"hold": "soon"}, "hold='soon' is not a duration"),
        ({"wait": None}, "wait=None is not a duration"),
        ({"validation": "much"}, "validation='much' is not a fraction"),
        ({"validation": 1, "split": "train"}, "validation=1 cannot be used; .* between 0 and 1"),
        ({"validation": 0.2}, r"validation=0\.2 needs split='train' or split='validation'"),
        ({"missing": "refetch"}, "^missing='refetch' cannot be used; it must be 'error' or 'skip'$"),
        ({"split": "test"}, "split='test' cannot be used; it must be 'train' or 'validation'"),
        ({"epochs": 0}, "epochs=0 cannot be used; it must be at least 1"),
        ({"transform": 3}, "transform=3 cannot be used; .* a function"),
        ({"drop_last": "no"}, "drop_last='no' cannot be used; it must be True or False"),
        ({"fields": 3}, "fields 3 cannot be used; give the name of a field, or a list of names"),
        (
            {"fields": {"number": 1}},
            "fields {'number': 1} cannot be used; give the name of a field, or a list of names",
        ),
        ({"fields": []}, r"fields \[\] cannot be used; give the name of a field"),
        ({"fields": ["x", "x"]}, "field 'x' is asked for twice; name it once"),
        ({"prefetch": 0}, "prefetch=0 cannot be used; .* 1 to 8192 batches"),
        ({"prefetch": 8193}, "prefetch=8193 cannot be used; .* 1 to 8192 batches"),
        ({"min_samples": 0}, "min_samples=0 cannot be used; it must be at least 1"),
        ({"dataset": 5}, "dataset=5 cannot be used; .* a name"),
        ({"dataset": ""}, "dataset='' cannot be used; .* a name"),
        ({"run": 5}, "run=5 cannot be used; .* a name"),
        ({"verify": "q"}, "verify='q' cannot be used; it must be True or False"),
    ],
)
def test_invalid_values_are_refused_when_the_loader_is_created(
    options: dict[str, Any], says: str, cache: CacheDir
) -> None:
    with pytest.raises(UsageError, match=says):
        Loader(cache, **{"batch_size": 4, **options})


def test_as_many_batches_as_a_ring_has_slots_are_ready_and_kept(cache: CacheDir) -> None:
    put(cache, range(9000), schema=Schema((Field("number", "<i8"),)), dataset="many")
    with Loader(cache, dataset="many", batch_size=1, workers=1, prefetch=MOST_KEPT, shuffle=False) as loader:
        kept = [batch["number"] for batch in islice(loader, MOST_KEPT)]
        assert [int(number[0]) for number in kept] == list(range(MOST_KEPT))
        kept.clear()
        assert sorted(numbers(loader)) == list(range(9000))


@pytest.mark.parametrize("made", [Loader, TorchLoader])
def test_an_unknown_keyword_is_refused_in_the_name_of_the_loader(made: Any, cache: CacheDir) -> None:
    for name, meant in (("batchsize", "batch_size"), ("filds", "fields"), ("dop_last", "drop_last")):
        with pytest.raises(UsageError, match=f"^unknown option {name!r}; do you mean {meant}=[?]$"):
            made(cache, batch_size=4, **{name: 2})
    with pytest.raises(UsageError, match=r"^unknown option 'colour'; choose one of batch_size, fields, shuffle"):
        made(cache, batch_size=4, colour=2)


def test_a_misspelled_keyword_of_a_single_loader_is_refused_with_a_suggestion(cache: CacheDir) -> None:
    with pytest.raises(UsageError, match="do you mean device="):
        TorchLoader(cache, batch_size=4, devise="cpu")
    with pytest.raises(UsageError, match=r"^unknown option 'feilds'; do you mean fields="):
        CacheDataset(cache, feilds=["number"])  # type: ignore[call-arg]


@pytest.mark.parametrize("made", [Loader, TorchLoader])
def test_an_argument_of_pytorchs_data_loader_is_refused_with_its_name_here(made: Any, cache: CacheDir) -> None:
    for name, answer in OF_LOADERS.items():
        with pytest.raises(UsageError, match=f"^{name}=2 is not an argument here: {re.escape(answer)}$"):
            made(cache, batch_size=4, **{name: 2})
        offered = set(re.findall(r"(\w+)=", answer))
        assert offered <= {*inspect.signature(TorchLoader).parameters}, "an argument that no loader has"
        assert offered or "leave it out" in answer


@pytest.mark.parametrize("made", [CacheDataset, LMDBDataset])
@pytest.mark.parametrize("name", ["where", "split", "validation"])
def test_a_dataset_refuses_where_and_names_the_loader_that_selects_samples(
    made: Any, name: str, cache: CacheDir
) -> None:
    with pytest.raises(UsageError, match=rf"^{name}=.* is not an argument here: .*torch\.Loader with .*{name}="):
        made(cache, **{name: {"number": 1}})


def test_more_workers_than_the_address_space_allows_are_refused(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Ring] = []

    def ring() -> Ring:
        if len(made) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(Ring())
        return made[-1]

    monkeypatch.setattr(processes, "Ring", ring)
    with (
        Loader(cache, batch_size=4, workers=3) as loader,
        pytest.raises(CacheToolError, match=r"workers=3 .*: Cannot allocate memory after 2 .*ulimit -v.*; use fewer"),
    ):
        iter(loader)
    assert [each.fd for each in made] == [-1, -1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_argument_is_an_error_without_cachetools_frames_in_the_traceback(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, workers=workers, fields=["nothing"]) as loader:
        with pytest.raises(UsageError, match="no field 'nothing'; this dataset has x, number") as refused:
            next(iter(loader))
        assert refused.value.__cause__ is None
        with pytest.raises(UsageError, match="epoch=-1 cannot be used; it must be 0 or more"):
            loader.epoch = -1
        assert loader.epoch == 0


def test_notebooks_and_help_show_all_arguments_of_the_loader_for_torch() -> None:
    shown, base = (inspect.signature(loader).parameters for loader in (TorchLoader, Loader))
    assert [*shown] == [*base, "device", "agree"]
    assert all(shown[name] == base[name] for name in base)


@pytest.mark.parametrize(("device", "says"), [("gpu", "device='gpu' cannot be used: "), ("xpu", "no such device here")])
def test_a_missing_device_is_refused_before_an_epoch_begins(device: str, says: str, cache: CacheDir) -> None:
    with pytest.raises(UsageError, match=says):
        list(DevicePrefetcher([], device))
    with pytest.raises(UsageError, match=says), TorchLoader(cache, batch_size=4, workers=0, device=device) as loader:
        iter(loader)
    assert cache.stats().leases == []


def test_an_epoch_sampler_needs_a_dataset_of_cachetool(cache: CacheDir) -> None:
    with pytest.raises(UsageError, match="EpochSampler needs a CacheDataset or LMDBDataset, not str"):
        EpochSampler(str(cache.root))  # type: ignore[arg-type]


def test_seeds_and_epochs_of_samplers_and_datasets_must_be_whole_numbers(cache: CacheDir) -> None:
    with pytest.raises(UsageError, match="seed='x' is not a whole number"):
        EpochSampler(CacheDataset(cache), seed="x")  # type: ignore[arg-type]
    sampler = EpochSampler(CacheDataset(cache))
    with pytest.raises(UsageError, match="epoch='x' is not a whole number"):
        sampler.set_epoch("x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="epoch=-1 cannot be used; it must be 0 or more"):
        sampler.set_epoch(-1)


@pytest.mark.parametrize("what", [None, 3, b"s3://user:secret@bucket"])
def test_an_invalid_source_or_cache_is_refused_without_quoting_its_value(what: Any, tmp_path: Path) -> None:
    name = type(what).__name__
    with cachetool.open_cache(tmp_path / "new", max_size="3MB") as new:
        with pytest.raises(UsageError, match=f"source= takes a path or URL as text, not {name}$"):
            new.pull(what, samples=3)
        with pytest.raises(UsageError, match=f"url= takes a path or URL as text, not {name}$"):
            cachetool.BackgroundPull(new, what)
    if what is not None:  # None means the default cache
        with pytest.raises(UsageError, match=f"the cache folder must be a str or a Path, not {name}$"):
            cachetool.open_cache(what)


@pytest.mark.parametrize("twice", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_and_its_epochs_cannot_be_copied(twice: Callable[[Any], Any], cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, workers=1) as loader:
        epoch = iter(loader)
        for each in (loader, epoch):
            with pytest.raises(UsageError, match=r"cannot be pickled or copied, .* load_state_dict\(\)"):
                twice(each)
        assert len(numbers(epoch)) == 60


def test_a_pull_accepts_a_path_and_floats_for_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        np.save(source / f"{number:02d}.npy", np.full(4, number))
    with cachetool.open_cache(tmp_path / "cache", max_size=20e6) as cache:
        first = cache.pull(source, samples=np.int64(5), seed=np.int64(1), shard_size=1e6, fields="npy")  # type: ignore[arg-type]
        assert first.samples == 5
        with pytest.raises(UsageError, match=r"--samples 5\.0 is not a whole number"):
            cache.pull(source, samples=5.0)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="unknown option 'field'; do you mean fields="):
            cachetool.BackgroundPull(cache, source, field=["x"])
        with cachetool.BackgroundPull(cache, source), Loader(cache, batch_size=4, min_samples=20) as loader:
            assert sum(len(batch["npy"]) for batch in loader) == 20
        with pytest.raises(UsageError, match="'nan' is not a size"):
            cache.evict("nan")


def passed(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_columns_pass_through_a_transform_of_batches(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, workers=workers, seed=1) as loader:
        expected = [[value.tolist() for value in batch["ragged"]] for batch in loader]
    with Loader(cache, batch_size=4, workers=workers, seed=1, transform=passed, transform_each="batch") as loader:
        assert [[value.tolist() for value in batch["ragged"]] for batch in loader] == expected


def reversed_fields(sample: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(sample.items(), reverse=bool(sample["number"] % 2)))


def cropped(sample: dict[str, Any]) -> dict[str, Any]:
    return {"ragged": sample["ragged"][1:]}


def cropped_columns(columns: dict[str, Any]) -> dict[str, Any]:
    return {"ragged": [value[1:] for value in columns["ragged"]]}


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_values_stay_ragged_in_a_transform(workers: int, cache: CacheDir) -> None:
    options: dict[str, Any] = {"batch_size": 20, "workers": workers, "seed": 1}
    with Loader(cache, **options) as loader:
        expected = {
            int(number): value.tolist()
            for batch in loader
            for number, value in zip(batch["number"], batch["ragged"], strict=True)
        }
    assert len({np.shape(value) for value in expected.values()}) > 2
    with Loader(cache, transform=reversed_fields, **options) as loader:
        for batch in loader:
            for number, value in zip(batch["number"], batch["ragged"], strict=True):
                assert value.tolist() == expected[int(number)]
    with Loader(cache, shuffle=False, transform=cropped, **options) as loader:
        values = [value.tolist() for batch in loader for value in batch["ragged"]]
    with Loader(cache, shuffle=False, transform=cropped_columns, transform_each="batch", **options) as loader:
        assert values == [value.tolist() for batch in loader for value in batch["ragged"]]
    assert values == [expected[number][1:] for number in range(60)]


def padded(columns: dict[str, Any]) -> dict[str, Any]:
    return {"ragged": [np.zeros((8, 8), np.int16) for _ in columns["ragged"]]}


def padded_sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {"ragged": np.zeros((8, 8), np.int16)}


def padded_in_place(sample: dict[str, Any]) -> dict[str, Any]:
    sample["ragged"] = np.zeros((8, 8), np.int16)
    return sample


def padded_and_taken_out(sample: dict[str, Any]) -> dict[str, Any]:
    del sample["ragged"]
    return {"ragged": np.zeros((8, 8), np.int16)}


@pytest.mark.parametrize(
    ("each", "pads"),
    [("batch", padded), ("sample", padded_sample), ("sample", padded_in_place), ("sample", padded_and_taken_out)],
)
def test_a_ragged_column_that_a_transform_pads_is_an_array(each: str, pads: Any, cache: CacheDir) -> None:
    with Loader(cache, batch_size=4, workers=1, transform=pads, transform_each=each) as loader:
        assert next(iter(loader))["ragged"].shape == (4, 8, 8)


class Refuses:
    """An array of another library that refuses the conversion to NumPy."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        ({"x": [[1], [2, 3]]}, "transform= returned list for field 'x', which NumPy cannot convert"),
        ({"x": Refuses()}, "transform= returned Refuses for field 'x', .*BFloat16"),
        ({1: 1}, "transform= must return field names that are str, but it returned 1"),
        (None, r"it returned NoneType \(sample \d+\); to leave samples out use transform_each='batch'"),
    ],
)
def test_values_that_cannot_be_a_field_of_a_batch_are_named(gives: Any, says: str, cache: CacheDir) -> None:
    with (
        Loader(cache, batch_size=4, workers=1, transform=lambda sample: gives) as loader,
        pytest.raises(UsageError, match=says),
    ):
        next(iter(loader))


def test_the_first_result_of_a_transform_sets_the_dtypes_for_all_feeders(cache: CacheDir) -> None:
    def alternates(columns: dict[str, Any]) -> dict[str, Any]:
        kind = np.float32 if columns["number"][0] % 8 else np.float64
        return {"x": np.zeros(len(columns["number"]), dtype=kind)}

    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "transform_each": "batch"}
    loader = Loader(cache, workers=2, transform=alternates, **options)
    with (
        loader,
        pytest.raises(UsageError, match=r"transform= returned x: float\d\d, but x: float\d\d for another batch"),
    ):
        list(loader)


def _go_on(batches: Any, answer: Any) -> None:
    try:
        next(batches)
        answer.send("it went on")
    except UsageError as error:
        answer.send(str(error))
    os._exit(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_of_the_process_before_a_fork_is_refused_in_the_child(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=1, fields=["number"], workers=workers) as loader:
        batches = iter(loader)
        first = numbers([next(batches)])
        while workers and not batches.progress.ready:  # batches that were fetched already belong to the parent too
            first += numbers([next(batches)])
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=_go_on, args=(batches, theirs))
        child.start()
        assert f"this iterator belongs to process {os.getpid()}" in ours.recv()
        child.join(20)
        assert sorted(first + numbers(batches)) == list(range(60))
        assert loader.epoch == 1


def test_the_length_of_an_epoch_before_a_fork_is_known_in_the_child(cache: CacheDir) -> None:
    """The child starts no feeders."""
    with Loader(cache, batch_size=10, fields=["number"]) as loader:
        batches = iter(loader)
        next(batches)
        ours, theirs = multiprocessing.get_context("fork").Pipe()

        def look() -> None:
            try:
                loader.state_dict()
            except UsageError as error:
                theirs.send((len(loader), loader._feed.pid, str(error)))  # type: ignore[union-attr]
            os._exit(0)

        child = multiprocessing.get_context("fork").Process(target=look)
        child.start()
        says = f"this epoch runs in process {os.getpid()}; call state_dict() in that process"
        assert ours.recv() == (6, os.getpid(), says)
        child.join(20)
        assert len(numbers(batches)) == 50


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_lasts_until_a_prefetcher_has_delivered_its_batches(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=10, fields=["number"], workers=workers) as loader:
        epoch: Any = iter(loader)
        found = numbers([next(epoch)])
        found += numbers(epoch.uncounted())
        for step in range(1, 6):
            assert (len(loader), len(epoch), loader.state_dict()["taken"], epoch.over) == (6, 6 - step, step, False)
            assert loader.epoch == 0
            epoch.count()
        assert (loader.epoch, epoch.over) == (1, True)
        assert sorted(found) == list(range(60))


class _Interrupted(list):  # type: ignore[type-arg]
    def pop(self, *at: Any) -> Any:
        super().pop(*at)
        raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_at_the_last_batch_ends_the_iterator_and_loses_no_sample(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=10, fields=["number"], workers=workers) as loader:
        batches = iter(loader)
        found = numbers([next(batches) for _ in range(5)])
        batches._last = _Interrupted(batches._last)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"this iterator ended because .*interrupted"):
                next(batches)
        loader.load_state_dict(loader.state_dict())
        assert sorted(found + numbers(loader)) == list(range(60))


@pytest.mark.parametrize("workers", [0, 1])
def test_each_thread_has_its_own_epochs_of_a_concurrent_loader(workers: int, cache: CacheDir) -> None:
    found: list[list[int]] = []
    with Loader(cache, batch_size=7, fields=["number"], workers=workers, concurrent=True) as loader:

        def iterate() -> None:
            for _ in range(5):
                found.append(numbers(loader))

        threads = [threading.Thread(target=iterate, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert [sorted(each) for each in found] == [list(range(60))] * 15
    assert len(set(map(tuple, found))) == 15  # each in its own order


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_thread_begins_no_epoch_that_another_thread_began(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=60, fields=["number"], workers=workers, concurrent=True) as loader:
        orders = [numbers(loader)]
        thread = threading.Thread(target=lambda: orders.extend(numbers(loader) for _ in range(3)), daemon=True)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
        orders += [numbers(loader) for _ in range(2)]
        state = loader.state_dict()
        rest = numbers(loader)
        loader.load_state_dict(state)
        assert numbers(loader) == rest
    assert len(set(map(tuple, [*orders, rest]))) == 7


def test_agreement_of_ranks_needs_torch_distributed(cache: CacheDir) -> None:
    with pytest.raises(UsageError, match=r"agree=True needs torch\.distributed; call .*init_process_group"):
        iter(TorchLoader(cache, batch_size=4, rank=0, world_size=2, run="a", agree=True))
    with TorchLoader(cache, batch_size=4, agree=True) as alone:
        assert len(list(alone)) == 15


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one', WORLD_SIZE='2', which is not a valid rank"),
        ({"RANK": "1"}, "RANK='1', no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "no RANK, WORLD_SIZE='2'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0', which is not a valid rank; set both variables or none"),
    ],
)
def test_an_environment_without_a_complete_job_is_named(
    environment: dict[str, str], says: str, cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with Loader(cache, batch_size=4) as loader:
        for asked in (iter, len):
            with pytest.raises(UsageError, match=re.escape(says)):
                asked(loader)
    with pytest.raises(UsageError, match=re.escape(says)):
        EpochSampler(CacheDataset(cache))
    Loader(cache, batch_size=4, rank=0, world_size=1).close()


def test_empty_environment_variables_count_as_unset(cache: CacheDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    with Loader(cache, batch_size=4, workers=0) as loader:
        assert len(numbers(loader)) == 60


def test_a_loader_passed_to_a_data_loader_raises_with_an_alternative(cache: CacheDir) -> None:
    with (
        TorchLoader(cache, batch_size=4, workers=0) as loader,
        pytest.raises(UsageError, match="not inside a DataLoader"),
    ):
        list(DataLoader(loader, batch_size=None))  # type: ignore[arg-type]
