"""``--label-from-folder int``: class numbers by the sorted names of all folders, which the dataset keeps forever."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.core.errors import UsageError
from cachetool.core.schema import MAX_CLASSES, Field, Schema
from cachetool.loaders.numpy import Loader
from cachetool.loaders.torch import CacheDataset
from cachetool.loaders.torch import Loader as TorchLoader
from tests.cli.conftest import Run

FORMATS = ["lmdb", "hdf5", "zarr", "tfrecord"]
NAMES = ("cat", "dog", "née", "zebra 2")


def write(folder: Path, names: tuple[str, ...] = NAMES, *, count: int = 4) -> Path:
    """Create a folder for each class. The value of each sample says its class."""
    for name in names:
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            np.save(folder / "train" / name / f"{number}.x.npy", np.full(3, float(sorted(NAMES).index(name))))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write(tmp_path / "photos")


def labels(place: Path, **options: Any) -> Iterator[tuple[int, int]]:
    """Return the value and the label of each sample."""
    with Loader(place, batch_size=4, workers=0, **options) as loader:
        for batch in loader:
            assert batch["label"].dtype == np.int64
            yield from zip(batch["x"][:, 0].astype(int).tolist(), batch["label"].tolist(), strict=True)


@pytest.mark.parametrize("format", FORMATS)
def test_labels_are_numbers_and_their_class_names_follow_the_samples(
    format: str, run: Run, photos: Path, tmp_path: Path
) -> None:
    assert run("pull", "--label-from-folder", "int", photos, "--all", "--to", format, "--max-size", "50MB").code == 0
    cache = tmp_path / "cache"
    pairs = list(labels(cache))
    assert len(pairs) == 16
    assert all(value == label for value, label in pairs)
    with TorchLoader(cache, batch_size=4) as loader, CacheDataset(cache) as dataset:
        assert loader.classes == dataset.classes == NAMES
    other = FORMATS[FORMATS.index(format) - 1]
    assert run("convert", "--to", other).code == 0
    assert run("convert", "--to", format, "--out", "files").code == 0
    (cache / "catalog.sqlite3").unlink()
    assert run("verify", "--repair").code == 0
    with TorchLoader(cache, batch_size=4) as loader:
        assert loader.classes == NAMES
    with TorchLoader(tmp_path / "files", batch_size=4) as loader:
        assert loader.classes == NAMES
    assert run("pull", "files", "--all", "--dataset", "again").code == 0
    with TorchLoader(cache, batch_size=4, dataset="again") as loader:
        assert loader.classes == NAMES
    assert sorted(labels(cache, dataset="again")) == sorted(pairs)
    assert list(labels(cache, dataset="again", where={"label": 2})) == [(2, 2)] * 4


@pytest.mark.parametrize("format", FORMATS)
def test_convert_numbers_folders_like_pull(format: str, run: Run, photos: Path, tmp_path: Path) -> None:
    done = run("convert", photos, "--label-from-folder", "int", "--to", format, "--out", "out", "--verify", "--json")
    assert done.code == 0, done.stderr
    assert all(value == label for value, label in labels(tmp_path / "out"))
    with CacheDataset(tmp_path / "out") as dataset:
        assert dataset.classes == NAMES
    done = run("convert", photos, "--label-from-folder", "--to", format, "--out", "text", "--dry-run")
    assert done.code == 0
    assert "label     str" in done.stdout
    api = cachetool.convert(photos, to=format, out=tmp_path / "api", label_from_folder="int")
    assert api.samples == 16


@pytest.mark.parametrize(
    "words", [["--label-from-folder"], ["--label-from-folder", "text"], ["--label-from-folder=text"]]
)
def test_labels_stay_text_without_int_at_any_place_of_the_option(words: list[str], run: Run, photos: Path) -> None:
    assert run("pull", *words, photos, "--all", "--max-size", "50MB").code == 0
    assert run("pull", photos, *words, "--all", "--dataset", "b").code == 0
    with cachetool.open_cache(photos.parent / "cache") as cache:
        assert {cache.schema(name)["label"].dtype for name in ("default", "b")} == {"str"}
    with Loader(photos.parent / "cache", batch_size=4, dataset="b") as loader:
        assert loader.classes == ()


def test_an_unknown_kind_of_label_is_refused_by_name(run: Run, photos: Path) -> None:
    ran = run("pull", photos, "--label-from-folder=number")
    assert (ran.code, "--label-from-folder must be text or int, got 'number'" in ran.error) == (2, True)
    with cachetool.open_cache(photos.parent / "api", max_size="50MB") as cache:
        with pytest.raises(UsageError, match="--label-from-folder must be text or int, got 'number'"):
            cache.pull(str(photos), label_from_folder="number")
        cache.pull(str(photos), all=True, label_from_folder="int")
        assert cache.schema().classes == NAMES


def test_class_numbers_stay_after_folders_disappear_and_for_another_source_with_some_of_them(
    run: Run, photos: Path
) -> None:
    assert run("pull", photos, "--label-from-folder", "int", "--all", "--max-size", "50MB").code == 0
    shutil.rmtree(photos / "train" / "cat")
    write(photos, ("née",), count=9)
    assert run("pull", photos, "--all", "--refresh").code == 0
    few = write(photos.parent / "few", ("zebra 2", "dog"))
    assert run("pull", few, "--label-from-folder", "int", "--all").code == 0
    pairs = list(labels(photos.parent / "cache"))
    assert len(pairs) == 16 + 9 + 8  # all samples of née were written again
    assert all(value == label for value, label in pairs)


def test_a_new_folder_shifts_no_class_number_and_the_advice_works(run: Run, photos: Path) -> None:
    assert run("pull", photos, "--label-from-folder", "int", "--all", "--max-size", "50MB").code == 0
    (photos / "train" / "bird").mkdir()
    shutil.copy(photos / "train" / "dog" / "0.x.npy", photos / "train" / "bird")
    for words in (["--refresh"], ["--refresh", "--label-from-folder", "int"]):
        ran = run("pull", photos, "--all", *words)
        assert ran.code == 2
        assert ran.error.startswith("'bird' is not a class of this dataset")
        assert "'cat', 'dog', 'née', 'zebra 2'" in ran.error
    assert run("pull", write(photos.parent / "b", ("dog",)), "--label-from-folder", "int", "--all").code == 0
    assert run("pull", photos, "--label-from-folder", "int", "--all", "--dataset", "another").code == 0
    with TorchLoader(photos.parent / "cache", batch_size=4, dataset="another") as loader:
        assert loader.classes == ("bird", *NAMES)
    with TorchLoader(photos.parent / "cache", batch_size=4, dataset="default") as loader:
        assert loader.classes == NAMES


def test_an_incomplete_listing_assigns_no_class_numbers(run: Run, photos: Path) -> None:
    ran = run("pull", photos, "--label-from-folder", "int", "--start-early", "--all")
    assert (ran.code, "which --start-early does not have yet" in ran.error) == (2, True)
    assert run("pull", photos, "--label-from-folder", "int", "--all", "--max-size", "50MB").code == 0


def test_folders_inside_archives_cannot_be_numbered_but_text_labels_work(run: Run, photos: Path) -> None:
    with tarfile.open(photos.parent / "photos.tar", "w") as archive:
        archive.add(photos / "train", "train")
    for words in (["pull", "photos.tar", "--all"], ["convert", "photos.tar", "--to", "lmdb", "--out", "out"]):
        ran = run(*words, "--label-from-folder", "int")
        assert ran.code == 2
        assert "use --label-from-folder text" in ran.error
        assert run(*words, "--label-from-folder").code == 0


def test_a_sample_in_no_folder_is_named(run: Run, photos: Path) -> None:
    np.save(photos / "stray.x.npy", np.zeros(3))
    ran = run("pull", photos, "--label-from-folder", "int", "--all")
    assert (ran.code, "'stray' is in no folder" in ran.error) == (3, True)


def test_files_of_many_samples_are_labelled_by_their_folder(run: Run, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "files" / name).mkdir(parents=True)
        np.savez(tmp_path / "files" / name / "part.npz", x=np.full((5, 3), float("ab".index(name))))
    ran = run("pull", "files", "--label-from-folder", "int", "--read-as", "files", "--all", "--max-size", "50MB")
    assert ran.code == 0, ran.stderr
    assert sorted(labels(tmp_path / "cache")) == [(0, 0)] * 5 + [(1, 1)] * 5


def test_another_kind_of_label_than_the_datasets_is_refused(run: Run, photos: Path) -> None:
    assert run("pull", photos, "--label-from-folder", "int", "--samples", "4", "--max-size", "50MB").code == 0
    ran = run("pull", photos, "--label-from-folder", "text", "--samples", "4")
    assert ran.code == 2
    assert "label: int64, 4 classes (cat, dog, née, ...)" in ran.error
    assert run("pull", photos, "--samples", "4").code == 0  # as before


def test_class_names_are_checked() -> None:
    for dtype, shape in (("str", ()), ("<f4", ()), ("<i8", (3,))):
        with pytest.raises(UsageError, match="only a field of whole numbers has classes"):
            Field("label", dtype, shape, ("a", "b"))
    with pytest.raises(UsageError, match="--label-from-folder without int stores the name as text"):
        Field("label", "<i8", (), tuple(f"{number:050d}" for number in range(MAX_CLASSES // 50)))
    field = Field("label", "<i8", (), tuple(f"{number:07d}" for number in range(MAX_CLASSES // 10)))
    assert Schema.from_json(Schema((field,)).to_json()).classes == field.classes
    assert Schema((field,)).fingerprint != Schema((Field("label", "<i8"),)).fingerprint
