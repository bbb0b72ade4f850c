"""``convert --on-error skip``: unusable samples of an input are skipped and named, up to 1 %, and the advice of an
error works.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cachetool
from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.loaders.numpy import Loader
from tests.servers import Scripted, scripted_server, serve_file

if TYPE_CHECKING:
    from tests.cli.conftest import Run

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")


def folder_of(path: Path, count: int = 12) -> Path:
    path.mkdir()
    for number in range(count):
        np.save(path / f"{number:03}.npy", np.full(4, number, dtype="f4"))
    return path


def numbers(place: Path) -> list[int]:
    with Loader(place, batch_size=1, shuffle=False, workers=0) as loader:
        return [int(np.ravel(batch["npy"])[0]) for batch in loader]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def another_type(path: Path) -> None:
    np.save(path, np.zeros(4, dtype="f8"))


def another_shape(path: Path) -> None:
    np.save(path, np.zeros((2, 2), dtype="f4"))


def no_array(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("damage", [cut, another_type, another_shape, no_array, empty, pickled])
def test_the_option_that_an_error_advises_skips_and_names_the_sample(
    run: Run, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder_of(tmp_path / "in") / "005.npy")

    refused = run("convert", "in", "--to", "hdf5", "--out", "out")
    assert refused.code == 3
    assert not (tmp_path / "out").exists()
    words = shlex.split(refused.error.replace("'", "").replace(";", " "))
    option = words[words.index("--on-error") :][:2]
    ran = run("convert", "in", "--to", "hdf5", "--out", "out", "--json", *option)

    assert ran.code == 0, ran.stderr
    assert ran.document["samples"] == 11
    [[name, why]] = ran.document["skipped"]
    assert "005" in name
    assert why
    assert "left out: 005" in ran.stderr
    assert numbers(tmp_path / "out") == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("sizes", ["fixed", "differing"])
def test_the_written_files_are_complete_in_every_format(tmp_path: Path, to: str, sizes: str) -> None:
    folder = folder_of(tmp_path / "in")
    if sizes == "differing":
        for number in range(12):
            np.save(folder / f"{number:03}.npy", np.full(4 + number, number, dtype="f4"))
    for number in (0, 5, 11):
        no_array(folder / f"{number:03}.npy")

    result = cachetool.convert(folder, to=to, out=tmp_path / "out", on_error="skip", verify=True, shard_size=64)

    assert (result.samples, len(result.skipped)) == (9, 3)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["samples"] == 9
    assert numbers(tmp_path / "out") == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    again = cachetool.convert(tmp_path / "out", to="lmdb", out=tmp_path / "again", verify=True)
    assert (again.samples, again.digest) == (9, result.digest)
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(tmp_path / "out", all=True).samples == 9


def test_more_than_one_percent_is_an_error_and_leaves_no_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", 40)
    for number in range(20, 31):
        no_array(folder / f"{number:03}.npy")

    with pytest.raises(BadObject, match=r"11 of 40 samples could not be used, .*more than 1 %"):
        cachetool.convert(folder, to="lmdb", out=tmp_path / "out", on_error="skip", workers=1)
    assert not (tmp_path / "out").exists()


def test_more_than_one_percent_over_all_workers_is_an_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", 40)
    for number in range(20, 31):
        no_array(folder / f"{number:03}.npy")

    with pytest.raises(BadObject, match="more than 1 %"):
        cachetool.convert(folder, to="lmdb", out=tmp_path / "out", on_error="skip", workers=3, shard_size=64)
    assert not (tmp_path / "out").exists()


def test_a_deleted_object_is_named_without_advice_that_convert_does_not_have(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in")

    def script(handler: Scripted) -> None:
        if handler.path == "/005.npy":
            handler.answer(404)
        else:
            serve_file(handler, folder, "html")

    with scripted_server(script) as server:
        with pytest.raises(NotFound, match=r"5\.npy.*\nskip such .* --on-error skip") as caught:
            cachetool.convert(server.url, to="lmdb", out=tmp_path / "out")
        assert "--refresh" not in str(caught.value)
        result = cachetool.convert(server.url, to="lmdb", out=tmp_path / "out", on_error="skip")
    assert [name for name, _ in result.skipped] == ["005"]


def test_a_changed_object_is_named_without_advice_that_convert_does_not_have(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in")
    size = (folder / "005.npy").stat().st_size
    index = [{"name": f"{n:03}.npy", "type": "file", "size": size + (n == 5)} for n in range(12)]

    def script(handler: Scripted) -> None:
        if handler.path == "/":
            handler.answer(200, json.dumps(index).encode(), Content_Type="application/json")
        else:
            serve_file(handler, folder, "none")

    with scripted_server(script) as server:
        with pytest.raises(
            BadObject, match=r"changed since it was listed.*\nrun the command again.*--on-error skip"
        ) as caught:
            cachetool.convert(server.url, to="lmdb", out=tmp_path / "out")
        assert "--refresh" not in str(caught.value)
        assert "--dataset" not in str(caught.value)
        assert cachetool.convert(server.url, to="lmdb", out=tmp_path / "out", on_error="skip").samples == 11


def test_a_dry_run_skips_bad_samples_too(run: Run, tmp_path: Path) -> None:
    no_array(folder_of(tmp_path / "in") / "005.npy")

    assert run("convert", "in", "--to", "lmdb", "--dry-run").code == 3
    assert "12 samples" in run("convert", "in", "--to", "lmdb", "--dry-run", "--on-error", "skip").stdout


@pytest.mark.parametrize("value", ["ignore", "", None, 1])
def test_an_unknown_value_of_on_error_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match="--on-error must be error or skip"):
        cachetool.convert(folder_of(tmp_path / "in"), to="lmdb", out=tmp_path / "out", on_error=value)


def test_on_error_needs_an_input(run: Run) -> None:
    ran = run("convert", "--to", "lmdb", "--on-error", "skip")

    assert ran.code == 2
    assert "--on-error" in ran.error
    assert "only for INPUT with --out" in ran.error


def test_all_samples_of_one_part_may_be_skipped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", 4)
    no_array(folder / "002.npy")

    result = cachetool.convert(folder, to="hdf5", out=tmp_path / "out", on_error="skip", shard_size=16)

    assert (result.samples, result.shards) == (3, 3)
    assert numbers(tmp_path / "out") == [0, 1, 3]
