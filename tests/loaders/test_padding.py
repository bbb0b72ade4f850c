"""Ragged fields that the feeders pad, or give as values and offsets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader, Pad
from cachetool.loaders.other_names import OF_TENSORFLOW, answering
from cachetool.loaders.torch import CacheDataset
from cachetool.loaders.torch import Loader as TorchLoader
from tests.loaders.numbered import EVERY, put, sample

LINES = Schema((Field("number", "<i8"), Field("tokens", "<i4", (None,)), Field("grid", "<f4", (None, None, None))))
WORKERS = pytest.mark.parametrize("workers", [0, 2])
FEATURES = Schema((Field("number", "<i8"), Field("frames", "<f4", (None, None)), Field("words", "str")))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDir]:
    """Create a cache of two shards of 21 samples."""
    with open_cache(tmp_path / "cache", max_size="20MB") as opened:
        for start in (0, 21):
            put(opened, range(start, start + 21), schema=LINES)
        yield opened


def unpadded(schema: Schema, name: str, batch: dict[str, Any], at: int, value: Any) -> np.ndarray:
    """Return sample ``at`` of a padded field, after a check that everything else is the fill value."""
    sizes = np.atleast_1d(batch[f"{name}_length"][at])
    row = np.array(batch[name][at])
    inside = tuple(slice(int(size)) for size in sizes)
    out = row[inside].copy()
    row[inside] = value
    assert (row == value).all()
    return out


@WORKERS
@pytest.mark.parametrize("name", ["tokens", "grid"])
@pytest.mark.parametrize("compressed", [False, True])
def test_samples_are_padded_to_the_longest_of_their_batch_along_every_axis(
    name: str, compressed: bool, workers: int, cache: CacheDir
) -> None:
    seen = []
    put(cache, range(42, 50), schema=LINES, format="zarr", compression="zstd" if compressed else None)
    with Loader(cache, batch_size=8, workers=workers, pad={name: -1}) as loader:
        for batch in loader:
            expected = [sample(LINES, int(number))[name] for number in batch["number"]]
            longest = np.max([array.shape for array in expected], axis=0).tolist()
            assert batch[name].shape == (len(expected), *longest)
            assert batch[name].dtype == LINES[name].numpy
            for at, array in enumerate(expected):
                assert np.array_equal(unpadded(LINES, name, batch, at, -1), array)
            seen += batch["number"].tolist()
    assert sorted(seen) == list(range(50))


@WORKERS
def test_every_type_of_number_can_be_padded(workers: int, tmp_path: Path) -> None:
    names = [field.name for field in EVERY if field.kind == "ragged"]
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(9), schema=EVERY)
        options: dict[str, Any] = {"batch_size": 9, "shuffle": False, "workers": workers, "fields": names}
        with Loader(cache, **options, pad=dict.fromkeys(names, 1)) as loader:
            (batch,) = loader
    assert list(batch) == [name for field in names for name in (field, f"{field}_length")]
    for name in names:
        dtype = batch[name].dtype
        fill = np.array(1).view(dtype) if dtype.kind in "mM" else dtype.type(1)
        for at in range(9):
            assert unpadded(EVERY, name, batch, at, fill).tobytes() == sample(EVERY, at)[name].tobytes()


@WORKERS
def test_values_and_offsets_are_those_of_the_samples_in_order(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=8, workers=workers, varlen={"tokens"}) as loader:
        for batch in loader:
            expected = [sample(LINES, int(number))["tokens"] for number in batch["number"]]
            assert batch["tokens"].tolist() == np.concatenate(expected).tolist()
            assert batch["tokens_offsets"].dtype == np.int32
            assert batch["tokens_offsets"].tolist() == [0, *np.cumsum([len(array) for array in expected])]
            assert type(batch["tokens_longest"]) is int
            assert batch["tokens_longest"] == max(map(len, expected))


@WORKERS
def test_arrays_of_more_axes_are_joined_along_the_first(workers: int, tmp_path: Path) -> None:
    def frames(columns: dict[str, Any]) -> dict[str, Any]:
        numbers = columns["number"]
        return {"number": numbers, "frames": [np.full((n % 3 + 1, 5), n, np.float32) for n in numbers.tolist()]}

    options: dict[str, Any] = {"transform": frames, "transform_each": "batch", "shuffle": False, "workers": workers}
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(7), schema=LINES)
        with Loader(cache, batch_size=7, varlen="frames", **options) as loader:
            (batch,) = loader
    assert batch["frames"].shape == (13, 5)
    assert batch["frames"][:, 2].tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 6]
    assert batch["frames_offsets"].tolist() == [0, 1, 3, 6, 7, 9, 12, 13]


@WORKERS
def test_a_length_a_multiple_and_a_mask_shape_the_array(workers: int, cache: CacheDir) -> None:
    options: dict[str, Any] = {"batch_size": 6, "workers": workers, "fields": ["number", "tokens"]}
    with Loader(cache, **options, pad={"tokens": Pad(7, length=10)}) as loader:
        assert {batch["tokens"].shape for batch in loader} == {(6, 10)}
    with Loader(cache, **options, pad={"tokens": Pad(7, multiple=4)}) as loader:
        assert {batch["tokens"].shape[1] for batch in loader} <= {0, 4}
    with Loader(cache, **options, pad={"tokens": Pad(7, length=2, truncate=True, mask="mask")}) as loader:
        for batch in loader:
            assert list(batch) == ["number", "tokens", "mask"]
            for number, row, mask in zip(batch["number"], batch["tokens"], batch["mask"], strict=True):
                expected = sample(LINES, int(number))["tokens"][:2].tolist()
                assert mask.tolist() == [True] * len(expected) + [False] * (2 - len(expected))
                assert row.tolist() == expected + [7] * (2 - len(expected))


@WORKERS
def test_arrays_of_more_axes_are_cut_at_a_length_of_the_first(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=6, workers=workers, pad={"grid": Pad(9, length=1, truncate=True)}) as loader:
        for batch in loader:
            assert batch["grid"].shape[1] == 1
            for at, number in enumerate(batch["number"].tolist()):
                assert np.array_equal(unpadded(LINES, "grid", batch, at, 9), sample(LINES, number)["grid"][:1])


def shifted(one: dict[str, Any]) -> dict[str, Any]:
    assert one["tokens"].shape == sample(LINES, int(one["number"]))["tokens"].shape
    return {"number": one["number"], "tokens": one["tokens"] + 1, "more": np.arange(int(one["number"]) % 4)}


def shifted_columns(columns: dict[str, Any]) -> dict[str, Any]:
    more = [np.arange(number % 4) for number in columns["number"].tolist()]
    return {"number": columns["number"], "tokens": [array + 1 for array in columns["tokens"]], "more": more}


@WORKERS
@pytest.mark.parametrize(("function", "each"), [(shifted, "sample"), (shifted_columns, "batch")])
def test_a_transform_sees_samples_without_padding_and_its_results_are_padded(
    function: Callable[..., Any], each: str, workers: int, cache: CacheDir
) -> None:
    options: dict[str, Any] = {"batch_size": 1, "workers": workers, "transform": function, "transform_each": each}
    with Loader(cache, **options, pad={"tokens": Pad(0, length=3)}, varlen="more") as loader:
        for batch in loader:
            (number,) = batch["number"].tolist()
            expected = (sample(LINES, number)["tokens"] + 1).tolist()
            assert batch["tokens"].tolist() == [expected + [0] * (3 - len(expected))]
            assert batch["tokens_length"].tolist() == [len(expected)]
            assert batch["more"].tolist() == list(range(number % 4))


@WORKERS
def test_checksums_are_compared_before_padding(workers: int, cache: CacheDir) -> None:
    with Loader(cache, batch_size=42, shuffle=False, workers=workers, verify=True, pad={"tokens": 0}) as loader:
        (batch,) = loader
    assert batch["tokens_length"].tolist() == [len(sample(LINES, number)["tokens"]) for number in range(42)]


@WORKERS
def test_a_rank_without_samples_left_gets_an_empty_array(workers: int, tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(3), schema=LINES)
        options: dict[str, Any] = {"batch_size": 2, "workers": workers, "rank": 1, "world_size": 2, "run": "one"}
        with Loader(cache, **options, min_samples=1, pad={"tokens": Pad(0, length=4)}, varlen="grid") as loader:
            shapes = [(batch["tokens"].shape, batch["grid_longest"]) for batch in loader if not len(batch["number"])]
        with Loader(cache, **options, min_samples=1, pad={"tokens": 0}, fields=["tokens", "number"]) as loader:
            counts = [batch["tokens"].shape[0] for batch in loader]
    assert shapes == [] or shapes == [((0, 4), 0)]
    assert sum(counts) in (1, 2)


@WORKERS
def test_a_resumed_epoch_continues_with_padded_batches(workers: int, cache: CacheDir) -> None:
    options: dict[str, Any] = {"batch_size": 4, "workers": workers, "pad": {"tokens": 0}, "drop_last": True}
    with Loader(cache, **options) as loader:
        whole = [batch["tokens"].tolist() for batch in loader]
    with Loader(cache, **options) as loader:
        batches = iter(loader)
        before = [next(batches)["tokens"].tolist() for _ in range(3)]
        state = loader.state_dict()
    with Loader(cache, **options) as loader:
        loader.load_state_dict(state)
        after = [batch["tokens"].tolist() for batch in loader]
    assert before + after == whole


@WORKERS
def test_pytorch_gets_tensors_over_the_memory_of_the_batch(workers: int, cache: CacheDir) -> None:
    with (
        TorchLoader(
            cache, batch_size=8, workers=workers, pad={"tokens": Pad(0, mask="mask")}, varlen="grid", fields=["tokens"]
        ) as loader,
        pytest.raises(UsageError, match="no field 'grid'"),
    ):
        next(iter(loader))
    options: dict[str, Any] = {"batch_size": 8, "workers": workers, "fields": ["number", "tokens"]}
    with TorchLoader(cache, **options, pad={"tokens": Pad(0, mask="mask")}) as loader:
        for batch in loader:
            assert {name: value.dtype for name, value in batch.items()} == {
                "number": torch.int64, "tokens": torch.int32, "mask": torch.bool,
            }  # fmt: skip
            assert batch["tokens"].shape == batch["mask"].shape
    with TorchLoader(cache, **options, varlen={"tokens"}, device="cpu") as loader:
        batch = next(iter(loader))
        assert batch["tokens_offsets"].dtype == torch.int32
        assert type(batch["tokens_longest"]) is int


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"pad": {"tokens": Pad(0, length=1)}},
        r"field 'tokens' of sample \d+ has the length [23], but pad= has length=1;",
    ),
    ({"pad": {"number": 0}}, "pad= cannot be used for field 'number', which holds int64; it is for arrays of numbers"),
    ({"varlen": "number"}, "varlen= cannot be used for field 'number', which holds int64; it is for arrays"),
    ({"pad": {"tokens": 2**40}}, "pad= has the value 1099511627776: field 'tokens' holds int32, which cannot hold"),
    ({"pad": {"tokens": math.nan}}, "pad= has the value nan: field 'tokens' holds int32, got float64"),
    ({"pad": {"nothing": 0}}, "no field 'nothing'; this dataset has number, tokens, grid"),
    ({"varlen": "grid"}, r"varlen= joins samples along the first axis, so their other axes must be equal, but field"),
    ({"pad": {"tokens": Pad(0, mask="grid")}}, "pad= and varlen= would add a field 'grid', but the batch has one"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_fields_that_cannot_be_padded_are_named(options: dict[str, Any], says: str, cache: CacheDir) -> None:
    with Loader(cache, batch_size=42, workers=0, **options) as loader, pytest.raises(UsageError, match=says):
        next(iter(loader))


def test_an_error_of_padding_in_a_feeder_reaches_the_training_loop(cache: CacheDir) -> None:
    options, says = REFUSED[0]
    with Loader(cache, batch_size=42, workers=1, **options) as loader, pytest.raises(UsageError, match=says):
        next(iter(loader))


def test_text_cannot_be_padded(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(9), schema=FEATURES)
        with (
            Loader(cache, batch_size=4, workers=0, pad={"words": 0}) as loader,
            pytest.raises(UsageError, match="pad= cannot be used for field 'words', which holds str; it is for arrays"),
        ):
            next(iter(loader))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pad": 0}, "pad=0 cannot be used; use a dict of ragged fields and the numbers that fill them up, such as"),
        ({"pad": {}}, "pad={} cannot be used; use a dict"),
        ({"pad": {1: 2}}, "pad={1: 2} cannot be used; use a dict"),
        ({"pad": {"tokens": "x"}}, "pad= of field 'tokens': value='x' cannot be used; padding is filled with a number"),
        ({"varlen": 3}, "fields 3 cannot be used; give the name of a field"),
        ({"varlen": set()}, "cannot be used; give the name of a field"),
        ({"varlen": {"tokens"}, "pad": {"tokens": 0}}, "field 'tokens' is in pad= and in varlen=; name it in one"),
    ],
)
def test_wrong_arguments_are_refused_when_the_loader_is_created(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache, pytest.raises(UsageError, match=says):
        Loader(cache, batch_size=4, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 0}, "length=0 cannot be used; it must be at least 1"),
        ({"multiple": 1.5}, r"multiple=1\.5 is not a whole number"),
        ({"length": 8, "multiple": 8}, "length=8 and multiple=8 exclude each other; give one of them"),
        ({"truncate": True}, "truncate=True needs length=, the length at which samples are cut"),
        ({"value": None}, "value=None cannot be used; padding is filled with a number"),
        ({"mask": 3}, "mask=3"),
    ],
)
def test_a_pad_that_cannot_be_used_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Pad(**options)


def test_a_dataset_for_a_data_loader_names_the_loader_that_pads(cache: CacheDir) -> None:
    with pytest.raises(UsageError, match=r"^pad=.* is not an argument here: .*Loader with pad=$"):
        CacheDataset(cache, pad={"tokens": 0})  # type: ignore[call-arg]


def test_the_dataset_for_tensorflow_names_what_pads_there() -> None:
    @answering(OF_TENSORFLOW)
    def make(cache: str, *, batch_size: int) -> str:
        return cache * batch_size

    assert make("x", batch_size=2) == "xx"
    with pytest.raises(UsageError, match=r"^pad=.* is not an argument here: .* dataset.map\(\) pads with .to_tensor\("):
        make("x", batch_size=2, pad={"tokens": 0})  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^unknown option 'batchsize'; do you mean batch_size="):
        make("x", batchsize=2)  # type: ignore[call-arg]
