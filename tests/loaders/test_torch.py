"""The map-style datasets for PyTorch. Each script runs in a separate process and returns its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import open_cache
from tests.loaders.conftest import run_script
from tests.loaders.numbered import EVERY, NUMBERS, SMALL, WIDE, digests, leases, put

MIXED, LMDB = range(63), range(60)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache with a dataset in all formats, also compressed, and one of LMDB shards."""
    root = tmp_path_factory.mktemp("filled") / "cache"
    formats = (
        ("lmdb", None),
        ("hdf5", None),
        ("zarr", None),
        ("tfrecord", None),
        ("hdf5", "gzip"),
        ("zarr", "zstd"),
        ("tfrecord", "gzip"),
    )
    with open_cache(root, max_size="50MB") as cache:
        for at, (name, compression) in zip(MIXED[::9], formats, strict=True):
            numbers = range(at, at + 9)
            put(cache, numbers, format=name, schema=EVERY, dataset="mixed", compression=compression)
        for at in LMDB[::20]:
            put(cache, range(at, at + 20), dataset="lmdb")
    return root


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_deliver_every_sample_exactly_once_and_as_it_was_written(method: str, filled: Path) -> None:
    written = {"mixed": digests(EVERY, MIXED), "lmdb": digests(SMALL, LMDB)}

    results = run_script("torch_once.py", method, filled)

    assert len(results) == (2 if method == "spawn" else 10)
    for result in results:
        name, _, persistent = result["case"]
        assert result["epochs"] == [written[name]] * (2 if persistent else 1), result["case"]
        assert result["same"], result["case"]
        assert result["steps"] == 9
    with open_cache(filled) as cache:
        assert leases(cache) == []


@pytest.fixture(scope="module", params=[("cache", "fork"), ("lmdb", "forkserver")], ids="-".join)
def growth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of ``torch_growth.py``."""
    out: dict[str, Any] = run_script("torch_growth.py", *request.param, tmp_path_factory.mktemp("growth") / "cache")
    return out


def test_persistent_workers_see_new_samples_and_no_evicted_ones(growth: dict[str, Any]) -> None:
    assert growth["epoch 1"] == [0, 59, 60, 60]  # first number, last number, samples, different samples
    assert growth["epoch 2"] == [0, 79, 80, 80]
    assert growth["shuffled"]
    assert growth["waits"]
    assert growth["on disk"] == 4
    assert growth["epoch 3"] == [0, 79, 80, 80]
    assert growth["epoch 4"] == [20, 99, 80, 80]
    assert growth["on disk later"] == 4
    assert growth["waits again"]
    assert growth["epoch 6"] == [40, 119, 80, 80]
    assert growth["epochs"] == 6
    assert growth["batched"] == [40, 119, 80, 80]
    assert growth["leases"] == 1
    assert growth["leases at the end"] == 0


def test_an_old_index_never_means_another_sample(growth: dict[str, Any]) -> None:
    assert growth["plain 1"] == [40, 119, 80, 80]
    assert growth["plain 2"] == [40, 139, 100, 100]
    assert "shards were evicted between snapshots" in growth["plain 3"]
    assert "use sampler=EpochSampler(dataset)" in growth["plain 3"]
    assert growth["plain, new workers"] == [60, 139, 80, 80]
    assert "iterate over the sampler again" in growth["old index"]


MATRIX = [(kind, method, "0 2 2p 8 8p") for kind in ("cache", "lmdb") for method in ("fork", "forkserver", "spawn")]


@pytest.mark.parametrize(
    ("kind", "method", "cases"),
    [
        ("cache", "fork", "0 8"),
        ("lmdb", "forkserver", "0 8p"),
        ("cache", "spawn", "2p"),
        *(pytest.param(*each, marks=pytest.mark.soak, id=f"{each[0]}-{each[1]}-all") for each in MATRIX),
    ],
)
@pytest.mark.timeout(1200)
def test_epochs_follow_three_rounds_of_growth_and_one_of_eviction(
    kind: str, method: str, cases: str, tmp_path: Path
) -> None:
    """Each epoch delivers exactly the samples of its snapshot, byte by byte. An evicted shard is closed in all
    processes.
    """
    snapshots = [range(60), range(80), range(100), range(120), range(20, 120)]

    seen = run_script("torch_rounds.py", kind, method, tmp_path / "cache", *cases.split(), seconds=1100)

    assert list(seen) == cases.split()
    for case, found in seen.items():
        assert found["epochs"] == [digests(SMALL, numbers) for numbers in snapshots], case
        assert found["waits"], case  # the evicted shard stays until the epoch that reads it has ended
        assert found["still mapped"] == 0, case
        assert found["leases"] == 0, case


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of ``torch_single.py``, which leaves one dataset open when it ends."""
    root = tmp_path_factory.mktemp("single")
    out: dict[str, Any] = run_script("torch_single.py", root)
    with open_cache(root / "cache") as cache:
        out["after the process"] = len(leases(cache))
    return out


def test_a_lease_lives_as_long_as_its_dataset(single: dict[str, Any]) -> None:
    assert single["one dataset"] == 1
    assert single["after forked children"] == 1
    assert single["another handle closed"] == 1
    assert single["closed"] == 0
    assert single["in a cycle"] == 1
    assert single["collected"] == 0
    assert single["left open"] == [1, 81]
    assert single["after the process"] == 0
    assert single["read after close"] == "UsageError: this CacheDataset was closed"


def test_a_pickled_copy_reads_the_same_samples_and_takes_its_own_lease(single: dict[str, Any]) -> None:
    assert single["copy is equal"]
    assert single["copy holds none"] == 1
    assert single["copy after refresh"] == 2
    assert single["copy deleted"] == 1


def test_ranks_of_a_run_share_a_snapshot_and_divide_it(single: dict[str, Any]) -> None:
    assert single["rank versions"]
    assert single["rank counts"] == [30, 30, 60]
    assert single["next epoch"] == [40, 40]  # of 81: the remainder is left out
    assert single["rank numbers"]
    assert single["order of an epoch"] == [True, False]
    assert "run=NAME" in single["ranks without run"]
    assert "rank=2 cannot be used with world_size=2" in single["rank outside"]
    assert single["from environment"] == [1, 3, 27, 81]


def test_a_sample_is_a_dict_of_tensors_bytes_and_str(single: dict[str, Any]) -> None:
    tensor = "Tensor"
    assert single["kinds"] == {"x": tensor, "number": tensor, "words": "str", "raw": "bytes", "ragged": tensor}
    assert single["writable"]
    assert single["tensor index"]
    assert single["fields"] == ["words", "x"]
    dtypes = {name.removeprefix("scalar ").split()[0]: dtype for name, dtype in single["dtypes"].items()}
    assert dtypes.pop("datetime64") == dtypes.pop("timedelta64") == "torch.int64"
    assert dtypes == {name: f"torch.{name}" for name in dtypes}
    assert len(dtypes) == 14


def test_a_batch_stacks_numbers_and_lists_other_values(single: dict[str, Any]) -> None:
    assert single["batch"] == {
        "x": "Tensor",
        "number": "Tensor",
        "words": "list",
        "raw": "list",
        "ragged": "TensorList",
    }
    assert single["ragged"]
    assert single["ragged slice"] == [2, 2, True]
    assert single["collate of dicts"]
    assert single["default collate"]
    assert single["subset"] == [7, 9]
    assert single["concat"] == 100
    assert single["empty"] == 0


def test_workers_hand_over_the_tensors_that_samples_were_copied_into(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="50MB") as cache:
        put(cache, range(NUMBERS), schema=WIDE)

    out = run_script("torch_batches.py", tmp_path / "cache")

    assert out["batches"] == [[True] * 4] * 4
    assert out["picked"] == [[NUMBERS - 1, 0, 0], [NUMBERS - 1, 1]]


def test_bad_indices_and_arguments_are_refused_and_leave_no_lease(single: dict[str, Any]) -> None:
    assert single["outside"] == [
        f"IndexError: index {n} is outside a dataset of 81 samples" for n in (81, -82, -(2**70))
    ]
    assert "indices of two snapshots" in single["two snapshots"]
    assert "no dataset 'nothere'" in single["no dataset"]
    assert "no field 'nothing'" in single["unknown field"]
    assert "shards in zarr" in single["other format"]
    assert "convert --to lmdb" in single["other format"]
    assert "there is no cache" in single["no cache"]
    assert "LMDB files of other programs" in single["value format"]
    assert single["left by errors"] == 0


def test_lmdb_files_and_converted_folders_are_read_without_a_cache(single: dict[str, Any]) -> None:
    assert single["file"] == [20, [0, 19], 20]
    assert single["file epoch"]
    assert single["folder, CacheDataset"]
    assert single["folder, LMDBDataset"]
    assert single["files in the folder"] > 1
    assert "value_format='raw'" in single["foreign"]
    assert single["raw"] == [[f"key{n}", [n] * n] for n in range(5)]
    assert single["raw in workers"] == [f"key{n}" for n in range(5)]
    assert "value_format='pickle' is unknown" in single["raw format"]
