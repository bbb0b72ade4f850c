"""``where=``: an epoch has the samples whose stored numbers or texts match, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.numpy import Loader
from cachetool.loaders.torch import Loader as TorchLoader
from tests.commands import run_command
from tests.loaders.conftest import run_script
from tests.loaders.numbered import put_samples

WORDS = ["cat", "dog", "cats", "", "née", "c\0t"]
SCHEMA = Schema(
    (
        Field("__key__", "str"),
        Field("number", "<i8"),
        Field("label", "i1"),
        Field("big", "<u8"),
        Field("weight", "<f4"),
        Field("good", "bool"),
        Field("word", "str"),
        Field("raw", "bytes"),
        Field("array", "<f8", (3,)),
        Field("ragged", "<i2", (None,)),
        Field("day", "<M8[D]"),
    )
)
PARTS = [range(100), range(100, 103), range(103, 240)]


def row(number: int) -> dict[str, Any]:
    """Return a sample with a value of each selectable kind, and some other values."""
    return {
        "__key__": f"scan{number}",
        "number": number,
        "label": np.int8(number % 7 - 3),
        "big": np.uint64(2**63 + number % 3),
        "weight": np.float32(number % 5 / 10),
        "good": np.bool_(number % 2),
        "word": WORDS[number % 6],
        "raw": WORDS[number % 6].encode(),
        "array": np.arange(3.0),
        "ragged": np.arange(number % 3, dtype=np.int16),
        "day": np.datetime64("2024-01-01") + number,
    }


def fill(cache: CacheDir, numbers: range, *, format: str = "lmdb", compression: str | None = None) -> None:
    put_samples(cache, [row(n) for n in numbers], schema=SCHEMA, format=format, compression=compression)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDir]:
    with open_cache(tmp_path_factory.mktemp("where") / "cache", max_size="50MB") as cache:
        for numbers in PARTS:
            fill(cache, numbers)
        yield cache


def opened(cache: CacheDir | Path, **options: Any) -> Loader:
    return Loader(cache, **{"batch_size": 8, "fields": ["number"], "workers": 0, "wait": 0.2, **options})


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["number"]]


def expected(where: dict[str, Any], of: range = range(240)) -> list[int]:
    """Return the numbers of the samples that a selection in Python would keep."""

    def keeps(name: str, values: Any, sample: dict[str, Any]) -> bool:
        listed = values if isinstance(values, set | list | tuple | range) else [values]
        value = sample[name].decode() if isinstance(sample[name], bytes) else sample[name]
        if isinstance(value, np.floating):
            return any(value == type(value)(each) for each in listed)
        return value in listed

    return [n for n in of if all(keeps(name, values, row(n)) for name, values in where.items())]


CHOICES: list[dict[str, Any]] = [
    {"label": {0, 1}},
    {"label": -3},
    {"label": 2.0},
    {"label": np.int16(2)},
    {"label": range(-3, 0)},
    {"label": True},
    {"big": [2**63 + 1]},
    {"weight": (0.1, 0.3)},
    {"good": False},
    {"good": {1}},
    {"word": "cat"},
    {"word": ["cats", "née", ""]},
    {"word": ["c\0t"]},
    {"raw": "dog"},
    {"__key__": {"scan7", "scan101", "scan200", "no such key"}},
    {"label": {0, 1}, "good": True, "word": {"dog", "cats"}},
]


@pytest.mark.parametrize("where", CHOICES, ids=" ".join)
def test_an_epoch_has_exactly_the_samples_with_the_requested_values(where: dict[str, Any], made: CacheDir) -> None:
    wanted = expected(where)
    assert wanted
    with opened(made, where=where, shuffle=False) as loader:
        assert len(loader) == -(-len(wanted) // 8)
        assert numbers(loader) == wanted
    with opened(made, where=where) as loader:
        assert sorted(numbers(loader)) == wanted


@pytest.mark.parametrize("format", ["hdf5", "zarr", "tfrecord", "lmdb"])
@pytest.mark.parametrize("compressed", [False, True])
def test_selection_works_in_every_format(format: str, compressed: bool, tmp_path: Path) -> None:
    compression = {"hdf5": "gzip", "tfrecord": "gzip", "zarr": "blosc"}.get(format) if compressed else None
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for part in PARTS:
            fill(cache, part, format=format, compression=compression)
        for where in ({"label": {0, 1}}, {"word": ["née", ""], "good": 0}):
            with opened(cache, where=where) as loader:
                assert sorted(numbers(loader)) == expected(where)


@pytest.mark.parametrize("kind", [Loader, TorchLoader])
def test_selection_works_in_every_framework(kind: type[BaseLoader[Any]], made: CacheDir) -> None:
    with kind(made, batch_size=8, fields=["number"], workers=2, where={"label": {0, 1}}) as loader:
        assert len(loader) == -(-len(expected({"label": {0, 1}})) // 8)
        assert sorted(numbers(loader)) == expected({"label": {0, 1}})


def test_tensorflow_selects_samples_and_reports_an_empty_selection(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        for part in PARTS:
            fill(cache, part, format="tfrecord")
    seen = run_script("tensorflow_where.py", tmp_path / "cache")
    assert seen["numbers"] == expected({"label": {0, 1}})
    assert seen["both"] == sorted(set(seen["side"]) & set(expected({"word": "cat"})))
    assert "where={'label': [100]} selects none of the 240 samples of dataset 'default'" in seen["nothing"]


def test_keras_gets_inputs_and_targets_as_a_tuple(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        fill(cache, PARTS[0], format="tfrecord")
    seen = run_script("tensorflow_supervised.py", tmp_path / "cache")
    assert seen["numbers"] == list(PARTS[0])
    assert seen["shapes"] == ["(3,)"]
    assert seen["several"] == [3, 2]
    assert seen["rows"] == len(expected({"label": 1}, PARTS[0]))
    assert seen["epochs"] == 2
    pair = "cannot be used; name the fields of inputs and targets, such as ('volume', 'label')"
    for number, says in enumerate((pair, pair, pair, "no field 'nothing'", "no field 'label'", pair)):
        assert says in seen["refused"][number]


def test_selection_works_on_plain_files(made: CacheDir, tmp_path: Path) -> None:
    ended = run_command("convert", "--to", "hdf5", "--out", tmp_path / "out", "--cache", made.root, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    with opened(tmp_path / "out", where={"word": "dog"}) as loader:
        assert sorted(numbers(loader)) == expected({"word": "dog"})


def test_selection_works_on_the_sides_of_a_split(made: CacheDir) -> None:
    sides = []
    for side in ("train", "validation"):
        with opened(made, split=side, validation=0.3, where={"label": {0, 1}}, fields=["number"]) as loader:
            sides.append(numbers(loader))
    assert all(sides)
    assert sorted(sides[0] + sides[1]) == expected({"label": {0, 1}})
    with opened(made, split="train", validation=0.3) as loader:
        assert set(sides[0]) <= set(numbers(loader))


def test_each_epoch_selects_again_from_a_growing_cache(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        fill(cache, PARTS[0])
        with opened(cache, where={"label": 0}, workers=2) as loader:
            for at, part in enumerate(PARTS[1:], 1):
                assert sorted(numbers(loader)) == expected({"label": 0}, range(PARTS[at - 1].stop))
                fill(cache, part)
                loader.refresh()
                assert len(loader) == -(-len(expected({"label": 0}, range(part.stop))) // 8)
            assert sorted(numbers(loader)) == expected({"label": 0})


labels = st.sets(st.integers(-3, 3), min_size=1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    labels=labels,
    word=st.none() | st.lists(st.sampled_from(WORDS), min_size=1),
    world=st.integers(1, 3),
    after=st.integers(0, 6),
    shuffle=st.sampled_from(["full", "window", False]),
    batch_size=st.integers(1, 9),
    goes_on_with=st.integers(1, 3),
)
def test_ranks_together_read_each_selected_sample_once_also_after_a_restart(
    made: CacheDir, labels: set[int], word: Any, world: int, after: int, shuffle: Any, batch_size: int,
    goes_on_with: int,
) -> None:  # fmt: skip
    where: dict[str, Any] = {"label": labels} if word is None else {"label": labels, "word": word}
    options: dict[str, Any] = {"shuffle": shuffle, "batch_size": batch_size, "where": where}
    wanted, seen = expected(where), list[int]()
    if len(wanted) < max(world, goes_on_with):
        return
    states = []
    for rank in range(world):
        with opened(made, rank=rank, world_size=world, run="one", **options) as loader:
            epoch = iter(loader)
            seen += numbers(batch for _, batch in zip(range(after), epoch, strict=False))
            states.append(json.loads(json.dumps(loader.state_dict())))
    if states[0]["epoch"] == 0:  # the first epoch has not ended
        for rank in range(goes_on_with):
            with opened(made, rank=rank, world_size=goes_on_with, run="two", **options) as loader:
                loader.load_state_dict(states[0])
                seen += numbers(loader)
    assert sorted(seen) == wanted


def test_a_state_belongs_to_its_selection(made: CacheDir) -> None:
    with opened(made, where={"label": {1, 0}}) as loader:
        epoch = iter(loader)
        first = numbers([next(epoch)])
        state = json.loads(json.dumps(loader.state_dict()))
    with opened(made) as loader:
        epoch = iter(loader)
        next(epoch)
        plain = json.loads(json.dumps(loader.state_dict()))
    for where, of, says in (
        (
            {"label": [0]},
            state,
            r"saved with where=\{'label': \[0, 1\]\}, but this loader has \{'label': \[0\]\}; create it",
        ),
        (None, state, r"saved with where=\{'label': \[0, 1\]\}, but this loader has None; create it"),
        (
            {"label": [0]},
            plain,
            r"saved with where=None, but this loader has \{'label': \[0\]\}; create it with where=None",
        ),
    ):
        with opened(made, where=where) as loader, pytest.raises(UsageError, match=says):
            loader.load_state_dict(of)
    with opened(made, where={"label": (0.0, 1)}) as loader:  # the advice of the message, in another notation
        loader.load_state_dict(state)
        assert sorted(first + numbers(loader)) == expected({"label": {0, 1}})


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({"colour": 1}, "where= needs field 'colour'; this dataset has __key__, number, label,"),
        ({"array": 1}, r"cannot select by field 'array' \(float64 \(3,\)\)"),
        ({"ragged": 1}, "cannot select by field 'ragged' .int16 ragged rank 1"),
        ({"day": 1}, r"cannot select by field 'day' \(datetime64\[D\]\)"),
        ({"word": 3}, "where= gives 3 for field 'word', which holds str; give text"),
        ({"label": "cat"}, "where= gives 'cat' for field 'label', but int8 cannot hold that value; give a number"),
        ({"label": [1, 300]}, "where= gives 300 for field 'label', but int8 cannot hold that value"),
        ({"label": 0.5}, r"where= gives 0\.5 for field 'label', but int8"),
        ({"good": 2}, "where= gives 2 for field 'good', but bool"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_field_that_cannot_be_selected_by_is_named(
    where: dict[str, Any], says: str, workers: int, made: CacheDir
) -> None:
    with opened(made, where=where, workers=workers) as loader:
        for ask in (len, iter):
            with pytest.raises(UsageError, match=says) as raised:
                ask(loader)
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (3, "where=3 cannot be used; use a dict of fields"),
        ({}, r"where=\{\} cannot be used; use a dict of fields"),
        ({3: 4}, r"where=\{3: 4\} cannot be used"),
        ({"label": []}, "where= has no value for field 'label'"),
        ({"label": float("nan")}, "where= cannot select nan of field 'label'; use numbers or text"),
        ({"label": None}, "where= cannot select None of field 'label'"),
        ({"label": {"a": 1}}, "where= cannot select {'a': 1} of field 'label'"),
        ({"label": [[1, 2]]}, r"where= cannot select \[1, 2\] of field 'label'"),
        ({"label": b"cat"}, "where= cannot select b'cat' of field 'label'"),
        ({"label": lambda value: value}, "where= cannot select <function"),
        ({"label": [1, "cat"]}, "where= has both numbers and text for field 'label'"),
    ],
)
def test_an_invalid_selection_is_refused_when_the_loader_is_created(where: Any, says: str, made: CacheDir) -> None:
    with pytest.raises(UsageError, match=says):
        opened(made, where=where)


def test_values_without_a_sample_are_refused_at_once_if_no_pull_runs(made: CacheDir) -> None:
    with opened(made, where={"label": 100}) as loader:
        says = r"where=\{'label': \[100\]\} selects none of the 240 samples in .*, and no pull is running"
        with pytest.raises(UsageError, match=says):
            iter(loader)
