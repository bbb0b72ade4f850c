"""Names of folders in practice: ``~``, bytes that are not UTF-8, and very long names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cachetool
from cachetool.loaders.numpy import Loader

if TYPE_CHECKING:
    from tests.cli.conftest import Run

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale in which Python reads names as ASCII."""


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for number in range(2):
        np.save(tmp_path / "src" / f"{number}.npy", np.full(3, number))
    return tmp_path / "src"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def made_here() -> list[str]:
    return os.listdir(".")


def test_every_option_expands_a_tilde_to_the_home_folder(run: Run, src: Path, home: Path) -> None:
    (home / "src").symlink_to(src)
    here = Path.cwd()

    for words in (
        ["pull", "~/src", "--all", "--max-size", "20MB", "--cache=~/c"],
        ["stats", "--html", "~/page.html", "--cache", "~/c"],
        ["verify", "--cache=~/c"],
        ["doctor", "--cache=~/c"],
        ["convert", "--to", "hdf5", "--out=~/out", "--cache=~/c"],
        ["convert", "~/src", "--to", "hdf5", "--out=~/out2"],
        ["convert", "~/src", "--to", "hdf5", "--dry-run"],
    ):
        ran = run(*words, cwd=here)
        assert ran.code == 0, (words, ran.stderr)
    ran = run("pull", "~/src", "--all", "--max-size", "20MB", cwd=here, env={"CACHETOOL_CACHE": "~/d"})
    assert ran.code == 0, ran.stderr

    assert made_here() == []
    assert {"c", "d", "out", "out2", "page.html"} <= set(os.listdir(home))


def test_the_library_expands_a_tilde_too(src: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "src").symlink_to(src)
    with cachetool.open_cache("~/c", max_size="20MB") as cache:
        cache.pull(Path("~/src"), all=True)
        cache.convert(to="hdf5", out="~/out")
    cachetool.convert(Path("~/src"), to="lmdb", out=Path("~/plain"))
    monkeypatch.setenv("CACHETOOL_CACHE", "~/c")
    for place in ("~/c", Path("~/c"), None, "~/out", ["~/plain"]):
        cache_or_place = cachetool.open_cache(create=False) if place is None else place
        with Loader(cache_or_place, batch_size=2, workers=0) as loader:
            assert len(list(loader)) == 1

    assert made_here() == []


def test_a_tilde_inside_a_name_is_not_expanded(run: Run, src: Path, home: Path) -> None:
    here = Path.cwd()
    (here / "~").mkdir()
    for place in ("./~/c", "a~/c", "~nobody-is-called-so/c"):
        ran = run("pull", src, "--all", "--max-size", "20MB", "--cache", place, cwd=here)
        assert ran.code == 0, ran.stderr
        assert (here / place / "cachetool.json").exists()
    assert os.listdir(home) == []


def cachetool_in(folder: bytes, *words: str | bytes, environment: dict[str, str]) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "cachetool", *words],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("to", "name", "environment"),
    [
        pytest.param("lmdb", "caf\xe9".encode(), ASCII, id="ASCII"),
        *(pytest.param(to, b"caf\xe9", {}, id=to, marks=[pytest.mark.soak] * (to != "hdf5")) for to in FORMATS),
    ],
)
def test_folders_with_undecodable_names_work_for_everything(
    tmp_path: Path, to: str, name: bytes, environment: dict[str, str]
) -> None:
    place = os.fsencode(tmp_path) + b"/" + name
    os.makedirs(place + b"/src")
    for key in (b"a", b"\xe9"):
        with open(place + b"/src/" + key + b".npy", "wb") as file:
            np.save(file, np.arange(3))

    def run(*words: str | bytes) -> bytes:
        return cachetool_in(place, *words, environment=environment)

    run("pull", place + b"/src", "--all", "--to", to, "--cache", place + b"/c", "--max-size", "20MB")
    run("convert", place + b"/src", "--to", to, "--out", place + b"/out", "--verify")
    run("pull", place + b"/out", "--all", "--to", to, "--cache", "c2", "--max-size", "20MB")
    run("convert", "--to", FORMATS[FORMATS.index(to) - 1], "--cache", place + b"/c", "--verify")
    assert b": no problems" in run("verify", "--cache", "c")
    run("stats", "--html", place + b"/page.html", "--cache", "c")
    script = (
        "import sys; from cachetool.loaders.numpy import Loader\n"
        "with Loader(sys.argv[1], batch_size=2, workers=1) as loader: print(len(list(loader)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, place + b"/c"],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=120,
    )
    assert done.stdout == b"1\n", done.stderr


def test_a_foreign_lmdb_in_a_folder_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    import lmdb

    place = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(place)
    with lmdb.open(place + b"/x.lmdb", subdir=False, lib_version=0) as environment, environment.begin(write=True) as t:
        t.put(b"k", b"value")

    out = cachetool_in(place, "pull", place + b"/x.lmdb", "--all", "--cache", "c", "--max-size", "20MB", environment={})

    assert b"pulled 1 sample" in out


def test_an_impossible_folder_name_is_refused(src: Path) -> None:
    for name in ("a\0b", "\ud800"):
        for call in (
            lambda name=name: cachetool.open_cache(name),
            lambda name=name: cachetool.convert(src, to="lmdb", out=name),
            lambda name=name: cachetool.convert(name, to="lmdb", out="o"),
        ):
            with pytest.raises(cachetool.UsageError, match="is not a valid file name"):
                call()


def deep(folder: Path, nbytes: int) -> Path:
    """Return a folder below this one whose path has ``nbytes`` bytes."""
    while len(os.fsencode(folder)) + 201 < nbytes:
        folder = folder / ("x" * min(200, nbytes - len(os.fsencode(folder)) - 3))
    return folder / ("y" * (nbytes - len(os.fsencode(folder)) - 1))


def test_a_cache_path_that_is_too_long_is_refused_and_the_longest_one_works(
    run: Run, src: Path, tmp_path: Path
) -> None:
    too_long = deep(tmp_path, 600)
    for words in (["pull", src, "--all", "--max-size", "20MB"], ["stats"], ["verify"], ["doctor"]):
        ran = run(*words, "--cache", too_long)
        assert ran.code == 2
        assert "has 600 bytes" in ran.error
    (most,) = map(int, re.findall(r"allows (\d+)", ran.error))
    assert not (tmp_path / ("x" * 200)).exists()

    longest = deep(tmp_path, most)
    for to in FORMATS:
        ran = run("pull", src, "--all", "--max-size", "20MB", "--to", to, "--dataset", to, "--cache", longest)
        assert ran.code == 0, ran.stderr
    assert run("convert", "--to", "lmdb", "--dataset", "zarr", "--cache", longest).code == 0
    assert ": no problems" in run("verify", "--cache", longest).stdout
    assert run("pull", src, "--all", "--cache", deep(tmp_path, most + 1)).code == 2


def test_the_length_limit_counts_the_resolved_path_of_a_link(run: Run, src: Path, tmp_path: Path) -> None:
    target = deep(tmp_path, 600)
    target.mkdir(parents=True)
    (tmp_path / "short").symlink_to(target)

    assert "has 600 bytes" in run("pull", src, "--all", "--max-size", "20MB", "--cache", "short").error


@pytest.mark.parametrize("to", FORMATS)
def test_exported_folders_and_sources_may_have_longer_paths(run: Run, src: Path, tmp_path: Path, to: str) -> None:
    out = deep(tmp_path, 900)

    assert run("convert", src, "--to", to, "--out", out, "--verify").code == 0
    ran = run("pull", out, "--all", "--max-size", "20MB")
    assert "pulled 2 samples" in ran.stdout, ran.stderr
    with Loader(out, batch_size=2, workers=0) as loader:
        assert len(list(loader)) == 1
