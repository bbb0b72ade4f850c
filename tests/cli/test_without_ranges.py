"""Files on web servers without range requests are fetched completely, for ``pull`` and ``convert``."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from cachetool.core.errors import SourceError
from cachetool.loaders.numpy import Loader
from cachetool.stores import open_store, whole
from tests.cli.conftest import Run
from tests.servers import Http, Scripted, scripted_server
from tests.sources.classic import classic

COUNT = 40
KINDS = ["tar", "tar.gz", "tfrecord", "lmdb", "h5", "nc", "npy", "npz", "parquet"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of each kind, whose samples have a number each."""
    from tests.commands import run_command

    folder = tmp_path_factory.mktemp("whole")
    numbers = np.arange(COUNT)
    (folder / "members").mkdir()
    for number in numbers:
        np.save(folder / "members" / f"{number:03d}.number.npy", number)
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz")):
        with tarfile.open(folder / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(folder / "members", "members")
    for name in ("tfrecord", "lmdb"):
        done = run_command("convert", folder / "a.tar", "--to", name, "--out", folder / name, folder=folder)
        assert done.returncode == 0, done.stderr
        (folder / name / f"part-00000.{name}").rename(folder / f"a.{name}")
    with h5py.File(folder / "a.h5", "w") as file:
        file["number"] = numbers
    (folder / "a.nc").write_bytes(classic({"number": (("x",), numbers.astype("i4"), {})}, {"x": COUNT}))
    np.save(folder / "a.npy", numbers)
    np.savez(folder / "a.npz", number=numbers)
    pyarrow.parquet.write_table(pyarrow.table({"number": numbers}), folder / "a.parquet", row_group_size=7)
    return folder


def deaf(handler: Scripted, folder: Path) -> None:
    """Send the whole file for every range, as Python's own server does."""
    path = folder / handler.path.lstrip("/")
    if path.is_file():
        handler.answer(200, path.read_bytes(), Content_Type="application/octet-stream")
    else:
        handler.answer(404, b"")


@pytest.fixture
def server(files: Path) -> Iterator[Http]:
    with scripted_server(lambda handler: deaf(handler, files)) as started:
        yield started


def numbers(place: Path) -> list[int]:
    with Loader(place, batch_size=8, workers=0) as loader:
        fields = [(name, values) for batch in loader for name, values in batch.items() if name != "__key__"]
    return sorted(int(number) for _, values in fields for number in values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_on_a_server_without_ranges_is_pulled_and_converted(
    kind: str, server: Http, run: Run, tmp_path: Path
) -> None:
    ran = run("pull", f"{server.url}/a.{kind}", "--all", "--max-size", "50MB")
    assert ran.code == 0, ran.stderr
    ran = run("convert", f"{server.url}/a.{kind}", "--to", "lmdb", "--out", "out")
    assert ran.code == 0, ran.stderr
    assert numbers(tmp_path / "cache") == numbers(tmp_path / "out") == list(range(COUNT))


def test_a_file_too_large_to_be_fetched_completely_is_refused_with_its_size(
    server: Http, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "LARGEST_WHOLE", 1000)
    store = open_store(f"{server.url}/")
    item, body = store.find("a.tar"), (files / "a.tar").read_bytes()
    said = r"a\.tar'.* ignores the Range header, .* at most 1\.0 kB\); copy the object"
    with pytest.raises(SourceError, match=said):
        store.get_range(item, 10, 20)
    assert bytes(store.get(item)) == body


def test_an_object_is_fetched_once_for_all_its_parts(server: Http, files: Path) -> None:
    store = open_store(f"{server.url}/")
    item, body = store.find("a.h5"), (files / "a.h5").read_bytes()
    parts = [bytes(store.get_range(item, at, 10)) for at in range(0, 200, 10)]
    assert parts == [body[at : at + 10] for at in range(0, 200, 10)]
    count = len(server.requests)
    store.get_range(item, 400, 16)
    assert len(server.requests) == count
    with pytest.raises(SourceError, match="bytes came instead of"):
        store.get_range(item, len(body) - 5, 10)


def test_files_that_would_be_fetched_repeatedly_are_refused_with_an_alternative_that_works(
    server: Http, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "KEPT", 0)
    store = open_store(f"{server.url}/")
    items = [store.find("a.h5"), store.find("a.npz")]
    for _ in range(whole._TIMES):
        for item in items:
            store.get_range(item, 0, 8)
    count = len(server.requests)
    with pytest.raises(SourceError, match="convert SOURCE --to hdf5 --out DIR") as refused:
        store.get_range(items[0], 0, 8)
    assert len(server.requests) == count
    advice = re.findall(r"cachetool (convert .*)", str(refused.value))[0]
    words = advice.replace("SOURCE", f"{server.url}/a.h5").replace("DIR", "out").split()
    assert run(*words).code == 0
