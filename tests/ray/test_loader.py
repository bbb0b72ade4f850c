"""``cachetool.loaders.ray``: a snapshot as batches in the object store of the node that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from cachetool.cache import open_cache
from cachetool.core.block import Ragged
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders import numpy as plain
from cachetool.loaders.ray import batches, cache_here
from tests.loaders.numbered import SMALL, digest, digests, leases, put
from tests.loaders.processes import until

LARGE = Schema((Field("volume", "<f4", (256, 1024)), Field("number", "<i8")))
"""Samples of 1 MiB."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Create 50 samples of every kind of field in the cache of each node."""
    for node in "ab":
        with open_cache(tmp_path / node, max_size="8MB") as opened:
            put(opened, range(30))
            put(opened, range(30, 50))
    return tmp_path / "{node}"


def samples(batch: dict[str, Any]) -> list[str]:
    """Return the numbers of a batch's samples, after checking their values."""
    columns = {field.name: batch[field.name] for field in SMALL}
    return [digest(SMALL, {name: column[n] for name, column in columns.items()}) for n in range(len(batch["number"]))]


def test_every_sample_is_delivered_once_in_the_order_of_the_loader(joined: str, cache: Path) -> None:
    with batches(cache, batch_size=8, seed=3, epoch=2) as refs:
        assert len(refs) == 7
        found = [ray.get(ref) for ref in refs]
        assert len(refs) == 0
    with plain.Loader(cache_here(str(cache)), batch_size=8, seed=3) as loader:
        loader.epoch = 2
        expected = [batch["number"].tolist() for batch in loader]

    assert [batch["number"].tolist() for batch in found] == expected
    assert sorted(each for batch in found for each in samples(batch)) == digests(SMALL, range(50))
    assert isinstance(found[0]["words"], list)
    assert isinstance(found[0]["ragged"], Ragged)


@pytest.mark.soak
def test_batches_are_built_on_the_node_of_the_cache_and_read_there_without_a_copy(joined: str, tmp_path: Path) -> None:
    with open_cache(tmp_path / "b", max_size="40MB") as opened:
        put(opened, range(8), schema=LARGE)

    with batches(tmp_path / "{node}", batch_size=4, node="b", fields=["volume", "number"], shuffle=False) as refs:
        first = next(refs)
        assert refs.node.name == "b"

        @ray.remote(num_cpus=0)
        def looked(batch: dict[str, Any]) -> tuple[str, list[int], bool, bool]:
            volume = batch["volume"]
            return (
                ray.get_runtime_context().get_node_id(),
                batch["number"].tolist(),
                volume.flags.writeable,
                volume.flags.owndata,
            )

        node, numbers, writeable, owned = ray.get(
            looked.options(
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(refs.node.id, False)
            ).remote(first)
        )
        # what the process that created it has learned meanwhile
        where = ray.experimental.get_object_locations([first])[first]
        assert where["node_ids"] == [refs.node.id]
        assert (node, numbers) == (refs.node.id, [0, 1, 2, 3])
        assert (writeable, owned) == (False, False), "a view of the object store"
        assert ray.get(next(refs))["number"].tolist() == [4, 5, 6, 7]
        assert next(refs, None) is None


@pytest.mark.soak
def test_a_single_field_is_delivered_as_bare_arrays(joined: str, cache: Path) -> None:
    with batches(cache, batch_size=25, fields="number", shuffle=False) as refs:
        arrays = [ray.get(ref) for ref in refs]

    assert [type(array) for array in arrays] == [np.ndarray, np.ndarray]
    assert np.concatenate(arrays).tolist() == list(range(50))


@pytest.mark.soak
def test_no_more_batches_are_built_than_may_be_in_flight(joined: str, tmp_path: Path) -> None:
    """No more batches are built for a slow caller. An epoch of twice the node's object store passes through it without
    spilling to the disk.
    """

    def store() -> Any:
        return get_memory_info_reply(get_state_from_address(joined)).store_stats

    with open_cache(tmp_path / "a", max_size="800MB") as opened:
        for start in range(0, 320, 40):
            put(opened, range(start, start + 40), schema=LARGE)
    before = store()
    with batches(tmp_path / "{node}", batch_size=8, in_flight=2, shuffle=False) as refs:
        seen = ray.get(next(refs))["number"].tolist()
        until(lambda: store().cumulative_created_objects - before.cumulative_created_objects >= 3)
        for _ in range(20):  # enough time to build 40 batches
            ray.get(busy.remote())
        assert store().cumulative_created_objects - before.cumulative_created_objects <= 5
        for ref in refs:
            batch = ray.get(ref)
            seen += batch["number"].tolist()
            del batch, ref

    assert seen == list(range(320))
    after = store()
    each = after.object_store_bytes_avail / len(ray.nodes())
    assert after.cumulative_created_bytes - before.cumulative_created_bytes > 2 * each
    assert after.spilled_bytes_total == 0


@ray.remote(num_cpus=0)
def busy() -> int:
    return sum(range(10**6))


@pytest.mark.soak
def test_the_lease_is_held_until_the_last_batch_and_then_returned(joined: str, cache: Path) -> None:
    with open_cache(cache_here(str(cache))) as opened:
        version = opened.version
        with batches(cache, batch_size=5) as refs:
            next(refs)
            assert leases(opened) == [version]
            put(opened, range(50, 60))
            rest = [ray.get(ref)["number"].tolist() for ref in refs]

            assert len(rest) == 9
            assert max(number for numbers in rest for number in numbers) < 50, "one snapshot"
            assert leases(opened) == []
        with batches(cache, batch_size=5) as refs:
            assert len(refs) == 12
            assert leases(opened) == [version + 1]
        until(lambda: leases(opened) == [])
        assert list(refs) == []

        refs = batches(cache, batch_size=5)
        next(refs)
        del refs
        until(lambda: leases(opened) == [])


@pytest.mark.soak
def test_errors_of_the_loader_are_raised_with_the_first_batch(joined: str, cache: Path) -> None:
    with pytest.raises(UsageError, match="there is no cache at"):
        next(batches(cache.parent / "none", batch_size=5))
    with pytest.raises(UsageError, match="nothing"):
        len(batches(cache, batch_size=5, dataset="nothing", wait=0.1))
    with pytest.raises(UsageError, match="Ray has no node called 'z'; its nodes are a, b, c"):
        batches(cache, batch_size=5, node="z")
    with pytest.raises(UsageError, match="in_flight=0 cannot be used; it must be at least 1"):
        batches(cache, batch_size=5, in_flight=0)


@pytest.mark.soak
def test_an_error_in_the_middle_is_raised_with_the_last_reference(joined: str, cache: Path) -> None:
    def odd(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] == 40:
            raise ValueError("sample 40 is odd")
        return sample

    with batches(cache, batch_size=10, fields=["number"], shuffle=False, transform=odd, workers=1) as refs:
        given = list(refs)

    assert [ray.get(ref)["number"].tolist()[0] for ref in given[:-1]] == [0, 10, 20, 30]
    with pytest.raises(CacheToolError, match="sample 40 is odd"):
        ray.get(given[-1])
