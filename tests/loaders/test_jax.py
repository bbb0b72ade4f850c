"""``prefetch_to_device``; JAX runs in a separate process, once for all tests here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.loaders.conftest import run_script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: pip install jax")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the script."""
    out: dict[str, Any] = run_script("jax_prefetch.py", tmp_path_factory.mktemp("jax"))
    return out


def test_kept_batches_do_not_change_while_a_loader_builds_60_more(seen: dict[str, Any]) -> None:
    assert seen["batches"] == 60
    assert seen["numbers"]  # in order
    assert seen["wrong"] == []


def test_an_array_that_its_iterable_reuses_is_copied(seen: dict[str, Any]) -> None:
    assert seen["refilled"]


def test_numbers_arrive_as_jax_arrays_and_other_values_unchanged(seen: dict[str, Any]) -> None:
    assert seen["types"] == [True, True, False, False]
    assert seen["strings"][0] == seen["strings"][1]
    assert seen["frameworks"] == []


def test_any_pytree_keeps_its_structure(seen: dict[str, Any]) -> None:
    assert seen["tree"] == [["list", "none", "pair", "text", "tuple"], "Pair", "abc", 3.0]
    assert sorted(seen["leaves"]) == ["ArrayImpl"] * 5 + ["str"]
    assert seen["other"] == [7.0, "ndarray", [True, False]]


def test_an_epoch_of_a_loader_counts_when_its_last_batch_is_delivered(seen: dict[str, Any]) -> None:
    assert seen["epochs counted"] == [0, 1]
    assert seen["counted ahead"] == 8  # of 8 x 5 that were fetched
    assert seen["second epoch"] == 61  # the cache grew
    assert seen["third epoch"] == 488  # after an abandoned iterator
    assert seen["leases"] == 0


def test_epochs_of_a_fixed_length_count_delivered_batches(seen: dict[str, Any]) -> None:
    assert seen["of a view"] == [16, 2, 16]
    assert seen["rest of a view"] == 3


def test_a_batch_is_delivered_without_waiting_for_the_next_one(seen: dict[str, Any]) -> None:
    assert seen["not kept back"] == 488


def test_the_prefetcher_starts_on_request_and_stays_size_batches_ahead(seen: dict[str, Any]) -> None:
    assert seen["lazy"] == []
    assert seen["ahead"] == [[0, 4], [1, 5], [2, 6]]


def test_an_error_of_the_iterable_comes_after_the_batches_before_it(seen: dict[str, Any]) -> None:
    assert seen["error"] == [3, 4, 5, 6, "the disk is gone"]


def test_an_abandoned_iterator_leaves_no_resources(seen: dict[str, Any]) -> None:
    assert seen["abandoned"] == [3, 0, [True], 0]
    assert seen["live"] == 0


def test_a_host_batch_is_kept_until_its_copy_has_arrived_and_no_longer(seen: dict[str, Any]) -> None:
    assert seen["kept until they arrive"] == [[0, 1], [False, False, True, True]]


def test_an_invalid_size_and_an_invalid_iterable_are_refused(seen: dict[str, Any]) -> None:
    assert seen["refused"] == [
        "size=0 cannot be used; it must be at least 1",
        "size='cuda' is not a whole number; to choose a device use device=",
        "size=CpuDevice(id=0) is not a whole number; to choose a device use device=",
        "size=2.5 is not a whole number",
        "'data/cache' is not an iterable of batches; use a Loader or another iterable of batches",
        "None is not an iterable of batches; use a Loader or another iterable of batches",
        "device='cpu' is a name, not a device of JAX; use device=jax.devices('cpu')[0]",
        "a batch holds a torch.Tensor, but JAX needs NumPy arrays; use cachetool.loaders.numpy.Loader",
    ]
