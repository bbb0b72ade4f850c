"""``make_dataset`` over a loader; TensorFlow runs in a separate process, once for all tests here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loaders.conftest import run_script

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the script."""
    out: dict[str, Any] = run_script("tensorflow_loader.py", tmp_path_factory.mktemp("tensorflow"))
    return out


def test_every_dtype_of_any_format_becomes_a_tensor(seen: dict[str, Any]) -> None:
    assert seen["every dtype"] == [[], 10]
    assert seen["fixed spec"] == [None, 2, 3]
    assert seen["padded spec"] == [[None, None, None, None], [None, None]]
    assert seen["padded"]
    assert seen["varlen"] == ["deep", "deep_longest", "deep_offsets"]


def test_a_mixture_has_the_batches_of_its_loader(seen: dict[str, Any]) -> None:
    assert seen["mixture"] == [True, False]
    assert seen["ratio"] == [60, 60]
    assert seen["balanced"] == [50, 50, 50, 50]


def test_the_state_counts_the_batches_that_tensorflow_took_and_continues_on_other_ranks(seen: dict[str, Any]) -> None:
    assert seen["state"] == [True, 3]
    assert seen["resumed"]


def test_epochs_repeat_or_have_a_number_of_steps_that_keras_knows(seen: dict[str, Any]) -> None:
    assert seen["repeat"] == [15, [[8, 3], [8]]]
    assert seen["steps"] == [7, 7, 7]
    assert seen["fit"] == 21
    assert seen["leases"] == [True, 0]


def test_a_resumed_epoch_of_fixed_length_has_all_its_steps(seen: dict[str, Any]) -> None:
    assert seen["fixed"]
    assert seen["fixed steps"] == 12


def test_looking_at_the_first_batch_changes_no_epoch(seen: dict[str, Any]) -> None:
    assert seen["set_epoch"]
    assert seen["concurrent"]
    assert seen["delivered"] == 1


def test_arguments_of_the_loader_are_refused(seen: dict[str, Any]) -> None:
    assert "fields=['x'] belongs to the loader" in seen["fields"]
    assert "batch_size=8 belongs to the loader" in seen["batch_size"]
    assert "names field 'y'; a batch has __key__, n, label, x" in seen["supervised"]
    assert "takes the loader of cachetool.loaders.numpy" in seen["torch"]
    assert "waited 0 s for samples" in seen["no batch"]
    assert "give it to cachetool.loaders.numpy.Loader, and the loader to make_dataset()" in seen["dict"]
    assert "a mixture of datasets needs a loader: make_dataset(Loader({...}" in seen["dict alone"]
    assert "batch_size= is missing" in seen["no size"]
