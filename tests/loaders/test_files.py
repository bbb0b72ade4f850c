"""Shards outside any cache: exported folders, read only by their paths."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest

import cachetool
from cachetool.cache import CacheDir, open_cache
from cachetool.core.errors import CorruptError, UsageError
from cachetool.loaders.numpy import Loader
from cachetool.proc.folders import MAX_JSON
from tests.loaders.conftest import run_script
from tests.loaders.numbered import EVERY, SMALL, digest, digests, leases, put, sample

FORMATS = (
    *(("lmdb", None), ("hdf5", None), ("zarr", None), ("tfrecord", None)),
    *(("hdf5", "gzip"), ("zarr", "zstd"), ("tfrecord", "gzip")),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None], Path]:
    """Write the samples 0 to 39 with every kind of field, as several files of each format."""
    base = tmp_path_factory.mktemp("files")
    with open_cache(base / "cache", max_size="50MB") as cache:
        put(cache, range(40), schema=EVERY)
    out = {}
    for name, compression in FORMATS:
        out[name, compression] = base / f"{name}-{compression}"
        with cachetool.open_cache(base / "cache") as cache:
            cache.convert(to=name, compression=compression, out=out[name, compression], shard_size=20_000)
    return out


def seen(loader: Loader, schema: Any = EVERY) -> list[str]:
    """Return the sorted digests of the samples of one epoch."""
    return sorted(
        digest(schema, {name: column[i] for name, column in batch.items()})
        for batch in loader
        for i in range(len(next(iter(batch.values()))))
    )


@pytest.mark.parametrize(
    ("workers", "name", "compression"),
    [
        *((0, *each) for each in FORMATS),
        *(pytest.param(2, *each, marks=[pytest.mark.soak] * (number % 3 > 0)) for number, each in enumerate(FORMATS)),
    ],
)
def test_an_exported_folder_is_read_without_a_cache(
    name: str, compression: str | None, workers: int, folders: dict[Any, Path]
) -> None:
    folder = folders[name, compression]
    assert len(list(folder.glob("part-*"))) > 1
    with Loader(folder, batch_size=7, workers=workers) as loader:
        assert len(loader) == 6
        assert seen(loader) == seen(loader) == digests(EVERY, range(40))


def test_the_loader_for_pytorch_accepts_paths_too(folders: dict[Any, Path]) -> None:
    paths = [path for (_, compression), path in folders.items() if compression is None]

    assert (
        run_script("torch_paths.py", *paths)
        == [sorted(sample(EVERY, n)["words"] for n in range(40) for _ in paths)] * 2
    )


def test_a_list_of_folders_and_single_files_is_one_dataset(folders: dict[Any, Path]) -> None:
    """Files in different folders have the same names, and formats may be mixed."""
    hdf5 = sorted(folders["hdf5", None].glob("part-*"))
    zarr = sorted(folders["zarr", None].glob("part-*"))
    with Loader([hdf5[0], zarr[1], folders["lmdb", None]], batch_size=7, workers=1) as loader:
        found = seen(loader)
        state = (next(iter(loader)), loader.state_dict())[1]
    with Loader(hdf5[0], batch_size=7, workers=1) as loader:
        first = seen(loader)
    with Loader([str(zarr[1])], batch_size=7, workers=0) as loader:
        second = seen(loader)

    assert found == sorted(first + second + digests(EVERY, range(40)))
    assert first != second
    json.dumps(state)


def test_one_shard_of_a_cache_is_read_by_its_folder_without_a_lease(cache: CacheDir) -> None:
    shard = cache.shards()[1]
    with Loader(shard.path, batch_size=4, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        assert leases(cache) == []
        assert seen(loader, SMALL) == digests(SMALL, range(20, 40))
    assert [each.epochs for each in cache.shards()] == [0, 0, 0]


def test_a_path_that_is_no_shard_is_refused_when_the_loader_is_created(
    cache: CacheDir, folders: dict[Any, Path], tmp_path: Path
) -> None:
    lmdb = folders["lmdb", None]
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("no shard")
    with cachetool.open_cache(cache.root) as opened:
        opened.convert(to="hdf5", out=tmp_path / "small")
    for paths, message in (
        ([], "the list of shards is empty"),
        ([lmdb, tmp_path / "gone"], f"{tmp_path / 'gone'} does not exist"),
        ([lmdb, lmdb], "is listed twice"),
        ([lmdb, min(lmdb.glob("part-*"))], "is listed twice"),
        ([cache.root], "is a cache; give it alone"),
        (other, f"{other} is neither a cache nor a shard; .*cachetool pull {other} --cache FOLDER"),
        (other / "notes.txt", rf"notes\.txt is not a shard: .*cachetool convert {other}/notes\.txt --to lmdb"),
        (
            "s3://key:secret@bucket/x",
            r"not a URL \(s3://\.\.\.\).*: cachetool pull URL --cache FOLDER",
        ),
        (["s3://key:secret@bucket/x"], r"s3://\.\.\.\W"),
        ("", "the name of the cache folder is empty"),
        (5, "5 is not a cache; use an open cache, its folder, or a list of shards"),
        (None, "None is not a cache"),
        ([lmdb, tmp_path / "small"], "hold different fields"),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            Loader(paths, batch_size=4)  # type: ignore[arg-type]
        said = "".join(traceback.format_exception(refused.value))
        assert "During handling" not in said
        assert "secret" not in str(refused.value)
    with Loader(lmdb.glob("part-*"), batch_size=4, workers=0) as loader:  # type: ignore[arg-type]
        assert sum(len(next(iter(batch.values()))) for batch in loader) == 40
    with pytest.raises(UsageError, match="leave out dataset="):
        Loader(lmdb, batch_size=4, dataset="default")


def test_a_damaged_description_is_named(cache: CacheDir, tmp_path: Path) -> None:
    with cachetool.open_cache(cache.root) as opened:
        opened.convert(to="lmdb", out=tmp_path / "out")
    about = tmp_path / "out" / "dataset.json"
    value = json.loads(about.read_text())
    for part in ({**value["parts"][0], "file": "../../elsewhere.lmdb"}, {"file": "part-00000.lmdb"}):
        about.write_text(json.dumps({**value, "parts": [part]}))
        with pytest.raises(CorruptError, match=r"dataset\.json is damaged"):
            Loader(tmp_path / "out", batch_size=4)
    about.write_text(json.dumps({**value, "layout": 2}))
    with pytest.raises(CorruptError, match=r"dataset\.json has layout 2, this cachetool reads layout 1"):
        Loader(tmp_path / "out", batch_size=4)
    shard = cache.shards()[0].path
    (shard / "shard.json").write_text((shard / "shard.json").read_text().replace('"samples": 20', '"samples": 21'))
    with pytest.raises(CorruptError, match=r"shard\.json is damaged"):
        Loader(shard, batch_size=4)


def test_batches_larger_than_the_files_samples_are_refused_at_once(folders: dict[Any, Path]) -> None:
    says = r"40 of 64 samples in .* drop_last=True .*; plain files do not grow"
    loader = Loader(folders["lmdb", None], batch_size=64, drop_last=True, workers=0)
    with loader, pytest.raises(UsageError, match=says):
        iter(loader)


@pytest.mark.parametrize("name", ["lmdb", "zarr"])
def test_links_that_the_user_created_in_a_folder_are_followed(
    name: str, folders: dict[Any, Path], tmp_path: Path
) -> None:
    """Links to files on another disk are followed, for example. Links in a shard of a cache never are."""
    folder = folders[name, None]
    for path in (*folder.iterdir(), *(folder / ".extents").rglob("*.bin")):
        link = tmp_path / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        if path.name != ".extents":
            link.symlink_to(path)
    with Loader(tmp_path, batch_size=7, workers=0, verify=True) as loader:
        assert seen(loader) == digests(EVERY, range(40))


def test_a_link_that_the_user_created_to_a_shard_is_followed(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put(cache, range(9))
        folder = cache.shards()[0].path
    link = tmp_path / "gathered" / folder.name
    link.parent.mkdir()
    link.symlink_to(folder)
    with Loader(link, batch_size=9, workers=0) as loader:
        assert seen(loader, SMALL) == digests(SMALL, range(9))


@pytest.mark.parametrize("text", [b" " * (MAX_JSON + 1) + b"{}", b"[" * 100_000, b"[]", b'{"format": "lmdb"}'])
def test_an_invalid_dataset_json_is_reported_in_one_line(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_bytes(text)
    with pytest.raises(CorruptError, match=r"dataset\.json is damaged") as told:
        Loader(tmp_path, batch_size=1)
    assert len(str(told.value).splitlines()) == 1
