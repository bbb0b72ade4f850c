"""Results of a transform: batches without samples, renamed columns, unusual values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from cachetool.cache import CacheDir
from cachetool.core.errors import UsageError
from cachetool.loaders.numpy import Loader

OPTIONS: dict[str, Any] = {"batch_size": 20, "shuffle": False}


def kept(places: Iterable[int], columns: dict[str, Any]) -> dict[str, Any]:
    """Return these positions of a batch as a user's code would: as lists where lists are possible."""
    return {
        name: column[list(places)] if name == "x" else [column[place] for place in places]
        for name, column in columns.items()
        if name in ("x", "number", "words", "raw", "ragged")
    }


def without(first: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a transform that leaves out all twenty samples from ``first`` on."""
    return lambda columns: kept([at for at, n in enumerate(columns["number"]) if n // 20 * 20 != first], columns)


def listed(batches: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (int(number), x.tolist(), words, raw, ragged.tolist())
        for batch in batches
        for number, x, words, raw, ragged in zip(
            batch["number"], batch["x"], batch["words"], batch["raw"], batch["ragged"], strict=True
        )
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [0, 20, 40])
def test_a_batch_without_remaining_samples_has_the_fields_of_the_others(
    first: int, workers: int, cache: CacheDir
) -> None:
    with Loader(cache, workers=workers, **OPTIONS) as loader:
        expected = [row for row in listed(loader) if row[0] // 20 * 20 != first]

    with Loader(cache, workers=workers, transform=without(first), transform_each="batch", **OPTIONS) as loader:
        batches = list(loader)

    assert [len(batch["number"]) for batch in batches] == [0 if at == first else 20 for at in (0, 20, 40)]
    assert {batch["number"].dtype for batch in batches} == {np.dtype("<i8")}
    assert listed(batches) == expected


@pytest.mark.parametrize("made", [lambda few: few, np.array])
def test_an_empty_column_of_numbers_keeps_its_dtype(made: Callable[[list[int]], Any], cache: CacheDir) -> None:
    def few(columns: dict[str, Any]) -> dict[str, Any]:
        return {"low": made([int(number) for number in columns["number"] if number < 20])}

    with Loader(cache, workers=0, transform=few, transform_each="batch", **OPTIONS) as loader:
        batches = list(loader)

    assert [len(batch["low"]) for batch in batches] == [20, 0, 0]
    assert {batch["low"].dtype for batch in batches} == {np.dtype("<i8")}


def test_an_empty_list_as_the_first_value_of_a_new_field_is_refused(cache: CacheDir) -> None:
    def late(columns: dict[str, Any]) -> dict[str, Any]:
        return {"high": [int(number) for number in columns["number"] if number >= 20]}

    loader = Loader(cache, workers=0, transform=late, transform_each="batch", **OPTIONS)
    with loader, pytest.raises(UsageError, match=r"an empty list for field 'high' .*\nreturn an empty array of"):
        list(loader)


@pytest.mark.parametrize("each", ["sample", "batch"])
def test_a_ragged_field_can_be_renamed(each: str, cache: CacheDir) -> None:
    with Loader(cache, workers=1, **OPTIONS) as loader:
        expected = [value.tolist() for batch in loader for value in batch["ragged"]]
    renamed = {"transform": lambda given: {"pieces": given["ragged"]}, "transform_each": each}
    with Loader(cache, workers=1, **renamed, **OPTIONS) as loader:
        assert [value.tolist() for batch in loader for value in batch["pieces"]] == expected


@pytest.mark.parametrize("name", ["ragged", "pieces"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_values_stay_ragged_for_any_omitted_samples(workers: int, name: str, cache: CacheDir) -> None:
    """The rule also holds if only one sample of the first batch remains, and not its first."""

    def third(columns: dict[str, Any]) -> dict[str, Any]:
        places = [at for at, number in enumerate(columns["number"]) if number % 3 == 2]
        return {name: [columns["ragged"][place] for place in places], "number": columns["number"][places]}

    options: dict[str, Any] = {"batch_size": 3, "shuffle": False, "workers": workers}
    with Loader(cache, **options) as loader:
        expected = [value.tolist() for batch in loader for value in batch["ragged"]][2::3]
    with Loader(cache, transform=third, transform_each="batch", **options) as loader:
        assert [value.tolist() for batch in loader for value in batch[name]] == expected


def test_arrays_computed_from_ragged_values_of_one_shape_are_one_array(cache: CacheDir) -> None:
    """Under a new name the field does not become ragged merely because the first values had that size already."""
    with Loader(cache, workers=0, **OPTIONS) as loader:
        size = next(iter(loader))["ragged"][0].shape

    def resized(sample: dict[str, Any]) -> dict[str, Any]:
        values = sample["ragged"]
        return {"image": values if values.shape == size else np.resize(values, size)}

    with Loader(cache, workers=0, transform=resized, **OPTIONS) as loader:
        assert next(iter(loader))["image"].shape == (20, *size)


@pytest.mark.parametrize("each", ["sample", "batch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_computed_ragged_values_stay_ragged_in_batches_of_one(workers: int, each: str, cache: CacheDir) -> None:
    """A single value has one shape, whatever the shape of the next."""

    def doubled(given: dict[str, Any]) -> dict[str, Any]:
        values = given["ragged"]
        return {"ragged": [value * 2 for value in values] if each == "batch" else values * 2}

    options: dict[str, Any] = {"batch_size": 1, "shuffle": False, "workers": workers}
    with Loader(cache, **options) as loader:
        expected = [(batch["ragged"][0] * 2).tolist() for batch in loader]
    with Loader(cache, transform=doubled, transform_each=each, **options) as loader:
        assert [batch["ragged"][0].tolist() for batch in loader] == expected


def test_ragged_values_padded_to_one_shape_are_one_array_in_batches_of_one(cache: CacheDir) -> None:
    def padded(sample: dict[str, Any]) -> dict[str, Any]:
        return {"ragged": np.resize(sample["ragged"], (50, 60))}

    with Loader(cache, batch_size=1, workers=0, transform=padded) as loader:
        assert {batch["ragged"].shape for batch in loader} == {(1, 50, 60)}


def test_values_of_one_shape_only_in_the_first_batch_are_refused_with_advice(cache: CacheDir) -> None:
    def first_padded(sample: dict[str, Any]) -> dict[str, Any]:
        return {"ragged": np.zeros((1, 1) if sample["number"] < 20 else (2, 2))}

    loader = Loader(cache, workers=0, transform=first_padded, **OPTIONS)
    with loader, pytest.raises(UsageError, match=r"first batch 'ragged' had one shape: pad the others too, or"):
        list(loader)


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Mute, r"transform= raised Mute \(sample \d+\)$"),
        (lambda: ValueError("long " * 500), r"raised ValueError: (long ){90,120}\.\.\. \(sample \d+\)$"),
    ],
)
def test_any_error_of_a_transform_is_one_line(
    error: Callable[[], Exception], says: str, workers: int, cache: CacheDir
) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise error()

    loader = Loader(cache, workers=workers, transform=fails, **OPTIONS)
    with loader, pytest.raises(UsageError, match=says) as caught:
        list(loader)
    assert "\n" not in str(caught.value)


def half_masked() -> Any:
    return np.ma.masked_array([1, 2], mask=[False, True])


@pytest.mark.parametrize("each", ["sample", "batch"])
@pytest.mark.parametrize(
    ("value", "says"),
    [(lambda: "\ud800", "text with half a surrogate pair"), (half_masked, r"masked.*fill them: \.filled")],
)
def test_values_that_cannot_be_stored_exactly_are_refused(
    value: Callable[[], Any], says: str, each: str, cache: CacheDir
) -> None:
    def odd(given: dict[str, Any]) -> dict[str, Any]:
        if each == "sample":
            return {"odd": value()}
        one = value()
        return {"odd": [one] * len(given["number"])}

    loader = Loader(cache, workers=0, transform=odd, transform_each=each, **OPTIONS)
    with loader, pytest.raises(UsageError, match=says):
        list(loader)


def test_a_masked_array_without_masked_values_is_an_array(cache: CacheDir) -> None:
    whole = {"transform": lambda sample: {"whole": np.ma.masked_array([1, 2], mask=False)}}
    with Loader(cache, workers=0, **whole, **OPTIONS) as loader:
        assert next(iter(loader))["whole"].tolist() == [[1, 2]] * 20


@pytest.mark.parametrize("each", ["sample", "batch"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"v": np.longdouble(1)}, "transform= returned field 'v': dtype float128 cannot be stored"),
        ({"a:b": 1}, "transform= returned field 'a:b': "),
        ({"a": 1, "a/b": 2}, "transform= returned fields that cannot be combined: field 'a' is also the folder"),
    ],
)
def test_the_error_about_an_invalid_field_names_the_transform(
    given: dict[str, Any], message: str, each: str, cache: CacheDir
) -> None:
    def function(sample: dict[str, Any]) -> dict[str, Any]:
        return given if each == "sample" else {name: np.array([value] * 20) for name, value in given.items()}

    loader = Loader(cache, workers=0, transform=function, transform_each=each, **OPTIONS)
    with loader, pytest.raises(UsageError) as told:
        next(iter(loader))
    assert str(told.value).startswith(message)
    assert "--rename" not in str(told.value)


def test_columns_of_different_length_are_named(cache: CacheDir) -> None:
    def function(columns: dict[str, Any]) -> dict[str, Any]:
        return {"number": columns["number"], "x": columns["x"][:2]}

    loader = Loader(cache, workers=0, transform=function, transform_each="batch", **OPTIONS)
    with loader, pytest.raises(UsageError, match=r"^transform= of a batch .* \{'number': 20, 'x': 2\}$"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_bound_by_the_user_is_not_replaced(workers: int, cache: CacheDir) -> None:
    def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"drawn": rng.integers(1000)}

    bound = functools.partial(draw, rng=np.random.default_rng(5))
    with Loader(cache, workers=workers, transform=bound, **OPTIONS) as loader:
        drawn = next(iter(loader))["drawn"]
    assert drawn.tolist() == np.random.default_rng(5).integers(1000, size=20).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_values_of_different_shapes_for_a_fixed_field_are_refused_with_padding_advised(
    workers: int, cache: CacheDir
) -> None:
    def tokens(sample: dict[str, Any]) -> dict[str, Any]:
        return {"number": sample["number"], "ids": np.zeros(3 + int(sample["number"]) % 3, np.int32)}

    loader = Loader(cache, workers=workers, transform=tokens, **OPTIONS)
    with loader, pytest.raises(UsageError) as told:
        next(iter(loader))
    said = r"^transform= must return .*; pad 'ids' to one shape, or name it in pad= or varlen= of the loader: of the"
    assert re.match(said, str(told.value))
