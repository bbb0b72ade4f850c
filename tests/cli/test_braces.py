"""``{000..009}`` and ``{a,b}`` in the name of a source: each member is requested by name, and a missing member is
named.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import UsageError
from cachetool.loaders.numpy import Loader
from cachetool.sources import braces
from cachetool.sources.braces import braces_of
from tests.cli.conftest import Run
from tests.servers import Http, Moto, Scripted, moto_server, scripted_server, serve_file

SETS, EACH = 12, 5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create tar files 000 to 011 of five samples with consecutive numbers, two folders of objects, and three HDF5
    files.
    """
    folder = tmp_path_factory.mktemp("braces")
    for number in range(SETS):
        with tarfile.open(folder / f"{number:03d}.tar", "w") as archive:
            for within in range(EACH):
                body = io.BytesIO()
                np.save(body, np.array(number * EACH + within))
                info = tarfile.TarInfo(f"s{number * EACH + within:04d}.number.npy")
                info.size = len(body.getvalue())
                archive.addfile(info, io.BytesIO(body.getvalue()))
        with h5py.File(folder / f"run{number}.h5", "w") as file:
            file["number"] = np.arange(number * EACH, (number + 1) * EACH)
    for start, name in enumerate(("train", "val")):
        (folder / name).mkdir()
        for number in range(10 * start, 10 * start + 10):
            np.save(folder / name / f"{number}.number.npy", np.array(number))
    return folder


@pytest.fixture(scope="module")
def silent(files: Path) -> Iterator[Http]:
    """Serve the files without any index page."""

    def script(handler: Scripted) -> None:
        serve_file(handler, files, "none")

    with scripted_server(script) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(files: Path) -> Iterator[Moto]:
    with moto_server() as moto:
        objects = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        moto.put("braces", objects)
        yield moto


def numbers(place: Path, **options: str) -> list[int]:
    with Loader(place, batch_size=2, workers=0, shuffle=False, **options) as loader:  # type: ignore[arg-type]
        return [int(number) for batch in loader for number in batch["number"]]


PLACES = ["here", "file", "http", "s3"]


def at(place: str, files: Path, silent: Http, bucket: Moto) -> tuple[str, dict[str, str]]:
    where = {"here": str(files), "file": f"file://{files}", "http": silent.url, "s3": "s3://braces"}[place]
    return where, dict(bucket.env) if place == "s3" else {}


@pytest.mark.parametrize("place", PLACES)
def test_members_of_a_range_form_one_source_without_a_listing(
    place: str, files: Path, silent: Http, bucket: Moto, run: Run, tmp_path: Path
) -> None:
    where, env = at(place, files, silent, bucket)
    ran = run("pull", f"{where}/{{000..009}}.tar", "--all", "--max-size", "50MB", env=env)
    assert ran.code == 0, ran.stderr
    assert sorted(numbers(tmp_path / "cache")) == list(range(10 * EACH))
    ran = run("convert", f"{where}/{{001..003}}.tar", "--to", "lmdb", "--out", "out", env=env)
    assert ran.code == 0, ran.stderr
    assert numbers(tmp_path / "out") == list(range(EACH, 4 * EACH))
    ran = run("pull", f"{where}/run{{2,9,11}}.h5", "--all", "--dataset", "rows", env=env)
    assert ran.code == 0, ran.stderr
    rows = [n for number in (2, 9, 11) for n in range(number * EACH, (number + 1) * EACH)]
    assert sorted(numbers(tmp_path / "cache", dataset="rows")) == rows


@pytest.mark.parametrize("place", PLACES)
def test_a_missing_member_is_named(place: str, files: Path, silent: Http, bucket: Moto, run: Run) -> None:
    where, env = at(place, files, silent, bucket)
    for words in (["pull"], ["convert", "--to", "lmdb", "--out", "out"]):
        ran = run(*words, f"{where}/{{010..012}}.tar", env=env)
        assert ran.code == 3
        assert "'012.tar' does not exist" in ran.error


@pytest.mark.parametrize("place", ["here", "file", "s3"])
def test_folders_in_braces_form_one_source_of_objects(
    place: str, files: Path, silent: Http, bucket: Moto, run: Run, tmp_path: Path
) -> None:
    where, env = at(place, files, silent, bucket)
    ran = run("pull", f"{where}/{{train,val}}/", "--label-from-folder", "--all", "--max-size", "50MB", env=env)
    assert ran.code == 0, ran.stderr
    assert sorted(numbers(tmp_path / "cache")) == list(range(20))
    with Loader(tmp_path / "cache", batch_size=20) as loader:
        assert {label for batch in loader for label in batch["label"]} == {"train", "val"}
    assert run("pull", f"{where}/{{train,val}}/", "--refresh", "--all", "--json", env=env).document["samples"] == 0
    ran = run("pull", f"{where}/{{train,none}}/", env=env)
    assert (ran.code, "none" in ran.error) == (3, True)


def test_single_objects_of_several_folders_can_be_chosen(files: Path, run: Run, tmp_path: Path) -> None:
    ran = run("convert", f"{files}/{{train,val}}/{{3,13}}.number.npy", "--to", "lmdb", "--out", "out")
    assert ran.code == 3  # two of the four do not exist
    ran = run("convert", f"{files}/train/{{3..5}}.number.npy", "--to", "lmdb", "--out", "out", "--json")
    assert ran.document["samples"] == 3


def test_an_existing_name_with_braces_is_not_expanded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a{1,2}").mkdir()
    np.save(tmp_path / "a{1,2}" / "0.number.npy", np.array(5))
    (tmp_path / "{x}").mkdir()
    np.save(tmp_path / "{x}" / "0.number.npy", np.array(6))
    assert run("pull", "a{1,2}", "--all", "--max-size", "50MB").code == 0
    assert run("pull", "{x}", "--all").code == 0
    assert sorted(numbers(tmp_path / "cache")) == [5, 6]


def test_a_query_is_sent_with_every_member(files: Path, run: Run, tmp_path: Path) -> None:
    def script(handler: Scripted) -> None:
        if "token=1" not in handler.path:
            handler.answer(403)
        else:
            serve_file(handler, files, "none")

    with scripted_server(script) as server:
        ran = run("pull", f"{server.url}/{{000..001}}.tar?token=1", "--all", "--max-size", "50MB")
        assert ran.code == 0, ran.stderr
    assert "token" not in json.dumps(run("stats", "--json").document)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("s3://b/{8..11}.tar", ["8.tar", "9.tar", "10.tar", "11.tar"]),
        ("s3://b/{08..11}.tar", ["08.tar", "09.tar", "10.tar", "11.tar"]),
        ("s3://b/{9..010}", ["009", "010"]),
        ("s3://b/x/{a,b}-{0..1}.npy", ["a-0.npy", "a-1.npy", "b-0.npy", "b-1.npy"]),
        ("s3://b/{a,}x", ["ax", "x"]),
        ("s3://b/{a,a}x", ["ax"]),
        ("s3://b/{node}/{0..1}", ["0", "1"]),
        ("s3://b/x-{n}-{0..1}.npy", ["x-{n}-0.npy", "x-{n}-1.npy"]),
    ],
)
def test_braces_expand_to_names(name: str, names: list[str]) -> None:
    found = braces_of(name)
    assert found is not None
    assert found.names == names


@pytest.mark.parametrize("name", ["s3://b/x", "s3://b/{node}/", "s3://b/{}/", "s3://b/{a..b}", "s3://b/}{", "", "{"])
def test_names_whose_braces_offer_no_choice_are_not_expanded(name: str) -> None:
    assert braces_of(name) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("s3://{a,b}/x", "not for servers or buckets"),
        ("https://user:secret@{a,b}.org/x", "not for servers or buckets"),
        ("s3://b/{9..0}.npy", "is descending"),
        ("s3://b/{0..100000}", "stands for more than 100000 names"),
        ("s3://b/{0..999}/{0..999}", "stand for 1000000 names, but at most 100000"),
        ("s3://b/" + "{0..9}" * 3000, "at most 100000"),
    ],
)
def test_braces_without_a_useful_meaning_are_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        braces_of(name)
    assert "secret" not in str(refused.value)


@given(st.text("{},.0123456789ab/", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        found = braces_of(f"s3://bucket/{text}")
    except UsageError:
        return
    if found is not None:
        assert 1 <= len(found.names) <= braces.MOST
        assert found.place.startswith("s3://bucket/")
