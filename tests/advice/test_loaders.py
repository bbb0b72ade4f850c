"""The advice of messages of the loaders and of the formats."""

from __future__ import annotations

import os
import shutil
import signal

import lmdb
import numpy as np
import pytest

from cachetool import open_cache
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from cachetool.loaders.numpy import Loader
from cachetool.loaders.read.gather import Parts, gather, open_by_library
from cachetool.loaders.torch import LMDBDataset
from cachetool.loaders.view import View
from tests.advice.conftest import World, follows
from tests.advice.rows import VALUES
from tests.loaders.processes import children


def load(place: object, **options: object) -> int:
    """Return the number of samples in an epoch."""
    with Loader(place, batch_size=4, workers=0, **options) as loader:  # type: ignore[arg-type]
        return sum(len(batch["n"]) for batch in loader)


@follows("loaders/snapshots/plain_files.py", "{} is not a shard")
def test_a_single_file_is_converted_to_shards(world: World) -> None:
    world.raises(lambda: load([world.folder / "a.h5"]))
    world.advised(**VALUES)
    assert load(world.folder / "new") == 12


@follows("loaders/snapshots/plain_files.py", "the list of shards is empty")
def test_a_list_of_exported_folders_is_read(world: World) -> None:
    world.raises(lambda: load([]))
    world.works("convert a.h5 --to hdf5 --out new")
    assert load([world.folder / "out", world.folder / "new"]) == 24


@follows("loaders/snapshots/plain_files.py", "{} is neither a cache")
def test_a_cache_is_filled_from_a_folder(world: World) -> None:
    world.raises(lambda: load([world.folder / "src"]))
    world.advised(**VALUES)
    assert load(world.folder / "new") == 12


@follows("loaders/snapshots/waiting.py", "cachetool pull SOURCE")
@pytest.mark.parametrize("dataset", [None, "other"])
def test_a_cache_without_samples_is_filled(world: World, dataset: str | None) -> None:
    place = world.folder / ("c" if dataset else "new")
    world.raises(lambda: load(place, wait=0.1, dataset=dataset))
    world.advised(**VALUES)
    assert load(place, dataset=dataset) == 12


@follows("loaders/view.py", "cachetool convert --to")
@pytest.mark.parametrize("dataset", ["default", "another one"])
def test_a_dataset_of_another_format_is_converted(world: World, dataset: str) -> None:
    world.works("pull", "src", "--all", "--cache", "x", "--to", "hdf5", "--dataset", dataset)
    world.works("pull src --all --cache x --dataset third")
    world.raises(lambda: LMDBDataset(world.folder / "x", dataset=dataset))
    world.advised()
    assert len(LMDBDataset(world.folder / "x", dataset=dataset)) == 12


@follows("loaders/view.py", "cachetool convert {} --to")
def test_a_folder_of_another_format_is_converted(world: World) -> None:
    world.works("convert a.h5 --to hdf5 --out 'in hdf5'")
    world.raises(lambda: LMDBDataset(world.folder / "in hdf5"))
    world.advised(**VALUES)
    assert len(LMDBDataset(world.folder / "new")) == 12


@follows("loaders/feed/processes.py", "; a shard was cut short")
def test_a_shard_is_verified_after_a_feeder_died_of_sigbus(world: World) -> None:
    with Loader(world.folder / "c", batch_size=2, workers=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(children()[0], signal.SIGBUS)
        world.raises(lambda: list(batches))
    world.advised()


@follows("loaders/read/gather.py", "cachetool verify --repair")
def test_a_shard_that_was_deleted_by_hand_is_pulled_again(world: World) -> None:
    world.works("pull src --all --cache x")
    with open_cache(world.folder / "x") as cache:
        view = View.of_shards(cache.version, "default", cache.schema("default"), cache.shards("default"))
        for part in view.parts:
            shutil.rmtree(part.folder)
        world.raises(lambda: gather(view, np.array([0]), Parts(open_by_library), view.schema))
    world.advised()
    assert load(world.folder / "x") == 12


@follows("formats/files.py", "; run: cachetool verify --repair")
def test_a_link_in_a_shard_is_removed(world: World) -> None:
    world.works("pull src --all --cache x")
    data = next((world.folder / "x/shards").glob("*/data.lmdb"))
    data.rename(world.folder / "moved")
    data.symlink_to(world.folder / "moved")
    world.raises(lambda: load(world.folder / "x"))
    world.advised()
    assert load(world.folder / "x") == 12


@follows("formats/shard.py", "cachetool verify --cache")
def test_a_shard_with_changed_bytes_is_verified(world: World) -> None:
    with open_cache(world.folder / "c") as cache:
        shard = cache.shards()[0]
        kind = get_format("lmdb")
        with (shard.path / "data.lmdb").open("ab") as file:
            file.write(b"more")
        world.raises(lambda: open_shard(shard.path, kind, shard.schema, library=True, digest=shard.digest))
    said = world.run(world.said[-1].partition(": cachetool ")[2])
    assert "data.lmdb" in said
    world.worked += 1


@follows("formats/tfrecord.py", "{}: sample {} is not a record")
def test_a_foreign_file_is_converted(world: World) -> None:
    world.works("convert a.h5 --to tfrecord --out written")
    part = world.folder / "written/part-00000.tfrecord"
    schema = Schema((Field("y", "<f4", (2,)),))
    with get_format("tfrecord").open(part, schema=schema) as reader:
        world.raises(lambda: reader.take(np.arange(3)))
    world.advised(**VALUES)
    assert load(world.folder / "new") == 12


@follows("loaders/read/lmdb_file.py", "{} holds named databases")
def test_values_of_named_databases_are_written_as_samples(world: World) -> None:
    with lmdb.open(str(world.folder / "named.lmdb"), subdir=False, max_dbs=1, lock=False) as environment:
        database = environment.open_db(b"images")
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"a", b"value")
    world.raises(lambda: LMDBDataset(world.folder / "named.lmdb", value_format="raw"))
    world.advised(**VALUES)
    assert len(LMDBDataset(world.folder / "new")) == 1
