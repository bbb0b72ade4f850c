"""``make_dataset``; TensorFlow runs in a separate process, once for all tests here."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.advice.conftest import World
from tests.loaders.conftest import run_script

pytestmark = pytest.mark.timeout(900)  # importing TensorFlow for the first time from a busy disk took 150 s


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the script."""
    out: dict[str, Any] = run_script("tensorflow_growth.py", tmp_path_factory.mktemp("tensorflow"))
    return out


def test_every_dtype_and_shape_is_read_back_equal_and_in_order(seen: dict[str, Any]) -> None:
    assert seen["every dtype"] == [[], 10]
    assert seen["fixed spec"] == ["int16", [4, 2, 3]]
    assert seen["ragged spec"] == [3, "float64"]
    assert seen["in order"]
    assert seen["fields"] == ["words", "deep"]


def test_a_folder_of_converted_files_is_read_like_a_cache(seen: dict[str, Any]) -> None:
    assert seen["folder"]


def test_every_epoch_reads_the_samples_in_the_cache_at_its_start(seen: dict[str, Any]) -> None:
    assert seen["epoch 1"] == [0, 2999, 3000, 3000]  # first number, last number, samples, different samples
    assert seen["epoch 2"] == [0, 3999, 4000, 4000]
    assert seen["snapshots taken"] == 2  # one call into Python per epoch
    assert seen["epochs served"] == [1, 1, 1, 0]
    assert seen["repeat"] == [1000, 2000, 3000, 1000, 2000, 3000, 4000]
    assert seen["fit"] == [40, 45]


def test_the_order_is_shuffled_by_the_seed(seen: dict[str, Any]) -> None:
    assert seen["shuffled"]
    assert seen["seed"] == [True, True, False]
    assert seen["user's seed"] == [True, True]  # neither used nor changed
    assert seen["epochs"] == [False, True]
    assert "have changed; call make_dataset() again" in seen["other fields"]
    assert "is not an argument here: give it to cachetool.loaders.numpy.Loader, and the loader" in seen["decode"]
    assert seen["one file"] == [False, False, False, 300, 300]


def test_a_lease_lasts_as_long_as_the_epoch_or_its_iterator(seen: dict[str, Any]) -> None:
    assert seen["leases before"] == 0
    assert seen["leases in the epoch"] == 1
    assert seen["leases after"] == 0
    assert seen["abandoned"] == [1, 0]
    assert seen["leases at the end"] == 0


def test_a_traced_loop_reads_whole_epochs(seen: dict[str, Any]) -> None:
    everything = sum(range(1000, 5000))  # the oldest shard was evicted
    assert seen["in a function"] == [everything, everything, 4000]


def test_an_epoch_calls_python_once_for_any_number_of_samples_and_files(seen: dict[str, Any]) -> None:
    small, large = seen["turns"]
    assert small[:2] == [50, 1]
    assert large[:2] == [5000, 1]
    assert large[2] == small[2]  # calls from TensorFlow into Python: start, element and end of the generator
    assert large[2] <= 5


def test_training_and_validation_are_disjoint_complete_and_equal_to_the_numpy_loader(seen: dict[str, Any]) -> None:
    epochs = seen["sides"]
    for (train, validation, *_), count in zip(epochs, (400, 700, 702), strict=True):
        assert sorted(train + validation) == list(range(count))
        assert count * 0.1 < len(validation) < count * 0.3
    for before, after in itertools.pairwise(epochs):
        assert set(before[0]) <= set(after[0])
        assert set(before[1]) <= set(after[1])
    assert all(same for epoch in epochs for same in epoch[2:])
    assert seen["sides leases"] == 0
    assert seen["empty side"] == []
    assert "belongs to split='validation'" in seen["empty side for ever"]
    assert "split='test' cannot be used; it must be 'train' or 'validation'" in seen["bad split"][0]
    assert "between 0 and 1" in seen["bad split"][1]
    assert "split= needs the field __key__" in seen["no keys"]
    assert not [said for said in seen["warnings"] if "valid node name" in said]  # of a function's parameters


@pytest.mark.parametrize("nbytes", [2**17, 2**19])
def test_large_records_are_read_back_equal_and_damage_is_detected(seen: dict[str, Any], nbytes: int) -> None:
    assert seen[f"large {nbytes}"] == [[], 18, 16, True, [[None, nbytes // 4], [None], [None]]]


def test_an_evicted_shard_stays_until_the_epoch_has_ended(seen: dict[str, Any]) -> None:
    assert seen["waits"]
    assert seen["on disk"] == 4
    assert seen["epoch 3"] == [0, 3999, 4000, 4000]
    assert seen["on disk later"] == 3
    assert seen["epoch 4"] == [1000, 3999, 3000, 3000]


def test_other_formats_and_bad_arguments_are_refused(seen: dict[str, Any]) -> None:
    for message in (seen["other format"], seen["other format later"]):
        assert "shards in hdf5" in message
        assert "cachetool convert --to tfrecord --cache /" in message
    assert "the folder has shards in lmdb" in seen["other folder"]
    assert seen["other folder"].endswith("/in lmdb' --to tfrecord --out NEW")
    assert "batch_size=0 cannot be used; it must be at least 1" in seen["no batch"]
    assert "shuffle_buffer=-1 cannot be used" in seen["no buffer"]
    assert seen["no seed"] == "seed='x' is not a whole number"
    for said in seen["less than a batch"]:
        assert "5 samples are too few for a batch of batch_size=6 with drop_remainder=True" in said
    assert "no field 'no'" in seen["unknown field"]
    assert "no dataset 'no'" in seen["unknown dataset"]
    assert seen["left by errors"] == 0
    assert len(seen["emptied"]) == 2
    assert all("has no samples; fill it with: cachetool pull SOURCE --to tfrecord" in said for said in seen["emptied"])


@pytest.mark.parametrize("what", ["other format", "other folder", "emptied"])
def test_the_advised_command_works(seen: dict[str, Any], tmp_path: Path, what: str) -> None:
    world = World(tmp_path)
    (said,) = seen[what][:1] if what == "emptied" else [seen[what]]
    world.note(said)
    root = Path(re.findall("/\\S*", said)[-1].rstrip("'")).parent
    world.advised(NEW="new", SOURCE=f"{root}/samples --no-key")


def test_the_components_work_in_a_custom_pipeline(seen: dict[str, Any]) -> None:
    assert seen["own pipeline"] == 1002
    assert seen["spec"] == ["number", "ragged", "ragged/shape", "raw", "words", "x"]
    assert not seen["tfrecord package"]
