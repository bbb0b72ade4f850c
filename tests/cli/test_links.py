"""Links in a folder: links inside the folder are followed, others are skipped and named; ``--follow-links`` follows
all.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cachetool.loaders.numpy import Loader

if TYPE_CHECKING:
    from tests.cli.conftest import Run

OUT = "--follow-links follows it"


def put(path: Path, value: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.save(file, np.full(3, value))
    return path


def link(path: Path, target: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def values(cache: Path) -> list[int]:
    with Loader(cache, batch_size=1, shuffle=False, workers=0) as loader:
        return sorted(int(batch["npy"][0, 0]) for batch in loader)


def pulled(run: Run, source: Path | str, *options: str, cache: str = "cache") -> Any:
    ran = run("pull", source, "--all", "--json", "--quiet", "--max-size", "20MB", "--cache", cache, *options)
    assert ran.code == 0, ran.stderr
    return ran.document


def test_links_out_of_the_folder_are_named_in_text_and_json_and_followed_with_the_option(
    run: Run, tmp_path: Path
) -> None:
    put(tmp_path / "blobs" / "n0.npy", 1)
    put(tmp_path / "mixed" / "a.npy", 0)
    link(tmp_path / "mixed" / "b.npy", "../blobs/n0.npy")

    assert pulled(run, "mixed")["left_out"] == [["b.npy", f"a link that leads out of the folder; {OUT}"]]
    shown = run("pull", "mixed", "--all", "--max-size", "20MB", "--cache", "text")
    assert "left out: b.npy (a link that leads out of the folder" in shown.stderr
    assert values(tmp_path / "cache") == [0]

    document = pulled(run, "mixed", "--follow-links", cache="more")
    assert (document["samples"], document["left_out"]) == (2, [])
    assert values(tmp_path / "more") == [0, 1]


def test_the_error_of_a_folder_of_links_names_them_and_an_option_that_works(run: Run, tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / "blobs" / f"n{number}.npy", number)
        link(tmp_path / "links" / f"s{number}.npy", f"../blobs/n{number}.npy")

    ran = run("pull", "links", "--all", "--max-size", "20MB")

    assert ran.code == 3
    assert "3 links that lead out of the folder" in ran.error
    assert f"'s0.npy': a link that leads out of the folder; {OUT}" in ran.error
    option = next(word for word in shlex.split(ran.error.replace("'", "")) if word == "--follow-links")
    assert pulled(run, "links", option)["samples"] == 3
    assert values(tmp_path / "cache") == [0, 1, 2]


@pytest.mark.parametrize("kind", ["npy", "h5", "tar", "lmdb", "no extension"])
def test_a_link_that_is_named_as_the_source_is_followed(run: Run, tmp_path: Path, kind: str) -> None:
    put(tmp_path / "one" / "a.npy", 5)
    put(tmp_path / "far" / "rows.npy", 5)
    target = tmp_path / "far" / "rows.npy"
    if kind in ("h5", "lmdb"):
        to = {"h5": "hdf5", "lmdb": "lmdb"}[kind]
        assert run("convert", "one", "--to", to, "--out", "far/out", "--no-key").code == 0
        target = next((tmp_path / "far" / "out").glob("part-*"))
    elif kind == "tar":
        import tarfile

        target = tmp_path / "far" / "x.tar"
        with tarfile.open(target, "w") as archive:
            archive.add(tmp_path / "one" / "a.npy", "a.npy")
    name = "blob" if kind == "no extension" else f"named.{kind}"
    link(tmp_path / "links" / name, os.path.relpath(target, tmp_path / "links"))
    put(tmp_path / "links" / "other.npy", 9)

    assert set(values_of(run, tmp_path, f"links/{name}")) == {5}
    link(tmp_path / "folder", "one")
    assert set(values_of(run, tmp_path, "folder", cache="second")) == {5}


def values_of(run: Run, tmp_path: Path, source: str, cache: str = "cache") -> list[int]:
    pulled(run, source, cache=cache)
    with Loader(tmp_path / cache, batch_size=1, shuffle=False, workers=0) as loader:
        return [int(np.ravel(value)[0]) for batch in loader for name, value in batch.items() if name != "__key__"]


def test_side_files_of_a_named_link_are_not_followed_out_of_their_folder(run: Run, tmp_path: Path) -> None:
    """A stranger's folder must not make cachetool read an index of another folder. Only the given name is trusted."""
    (tmp_path / "secret").write_text("root:x:0:0\n")
    assert run("convert", put(tmp_path / "one" / "a.npy", 5).parent, "--to", "tfrecord", "--out", "far").code == 0
    (tmp_path / "far" / "dataset.json").unlink()
    link(tmp_path / "links" / "x.tfrecord", "../far/part-00000.tfrecord")
    link(tmp_path / "links" / "x.tfrecord.idx", "../secret")

    ran = run("pull", "links/x.tfrecord", "--all", "--max-size", "20MB")

    assert ran.code == 3
    assert "x.tfrecord.idx" in ran.error
    assert "root:" not in ran.error


@pytest.mark.parametrize("source", ["", "snapshots", "snapshots/c0ffee", "snapshots/c0ffee/train"])
def test_links_of_a_hugging_face_snapshot_into_its_own_blobs_are_followed(
    run: Run, tmp_path: Path, source: str
) -> None:
    repo = tmp_path / "hub" / "datasets--owner--name"
    for number in range(2):
        put(repo / "blobs" / f"{number:040x}", number)
        link(repo / "snapshots" / "c0ffee" / "train" / f"{number}.npy", f"../../../blobs/{number:040x}")
    put(tmp_path / "hub" / "models--other" / "blobs" / "0", 7)
    link(repo / "snapshots" / "c0ffee" / "train" / "stolen.npy", "../../../../models--other/blobs/0")
    link(repo / "snapshots" / "c0ffee" / "train" / "refs.npy", "../../../refs/main")

    document = pulled(run, repo / source)

    assert values(tmp_path / "cache") == [0, 1]
    assert {Path(name).name for name, _ in document["left_out"]} >= {"stolen.npy", "refs.npy"}


def test_a_folder_beside_blobs_that_is_not_a_snapshot_follows_no_links(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "repo" / "blobs" / "deep" / "0", 1)
    put(tmp_path / "repo" / "snapshots" / "r" / "a.npy", 0)
    link(tmp_path / "repo" / "snapshots" / "r" / "b.npy", "../../blobs/deep/0")  # a real blobs folder has no subfolders

    assert [name for name, _ in pulled(run, "repo/snapshots/r")["left_out"]] == ["b.npy"]


@pytest.mark.parametrize("source", ["set", "set/sub/deep", "super/part"])
def test_links_of_git_annex_are_followed_within_their_repository(run: Run, tmp_path: Path, source: str) -> None:
    objects = "annex/objects/zx/81/MD5E-s152--d41d8.npy/MD5E-s152--d41d8.npy"
    put(tmp_path / "set" / ".git" / objects, 3)
    link(tmp_path / "set" / "sub" / "deep" / "a.npy", f"../../.git/{objects}")
    link(tmp_path / "set" / "sub" / "deep" / "absent.npy", "../../.git/annex/objects/aa/bb/K/K")
    # A repository inside another one, as DataLad creates it: its .git is a link.
    put(tmp_path / "super" / ".git" / "modules" / "part" / objects, 3)
    link(tmp_path / "super" / "part" / ".git", "../.git/modules/part")
    link(tmp_path / "super" / "part" / "a.npy", f".git/{objects}")

    document = pulled(run, source)

    assert values(tmp_path / "cache") == [3]
    if source != "super/part":
        [[name, why]] = document["left_out"]
        assert name.endswith("absent.npy")
        assert "git annex get" in why


@pytest.mark.parametrize(
    "target",
    [
        "/etc/passwd",
        "../.git/config",
        "../.git/annex/objects/../../config",
        "../../other/.git/annex/objects/k",
        "git/annex/objects/k",
        "loop.npy",
        "nothing",
        "/proc/self/environ",
    ],
)
def test_a_hostile_folder_cannot_make_files_outside_it_readable(run: Run, tmp_path: Path, target: str) -> None:
    put(tmp_path / "repo" / "tree" / "a.npy", 0)
    for secret in ("repo/.git/config", "other/.git/annex/objects/k", "repo/.git/annex/objects/k"):
        put(tmp_path / secret, 8)
    link(tmp_path / "repo" / "tree" / "git", tmp_path / "other" / ".git")
    link(tmp_path / "repo" / "tree" / "loop.npy", "b.npy")
    link(tmp_path / "repo" / "tree" / "b.npy", target)

    document = pulled(run, "repo/tree")

    assert values(tmp_path / "cache") == [0]
    assert "b.npy" in [name for name, _ in document["left_out"]]


def test_with_follow_links_entries_that_are_no_files_are_still_skipped_and_named(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.npy", 0)
    put(tmp_path / "out" / "c.npy", 1)
    for name, target in {
        "circle.npy": "circle.npy",
        "none.npy": "x",
        "dir.npy": "../out",
        "c.npy": "../out/c.npy",
    }.items():
        link(tmp_path / "in" / name, target)
    os.mkfifo(tmp_path / "out" / "pipe")
    link(tmp_path / "in" / "pipe.npy", "../out/pipe")
    link(tmp_path / "in" / "whole", "../in")  # a walk through this link would never end

    left_out = dict(pulled(run, "in", "--follow-links")["left_out"])

    assert values(tmp_path / "cache") == [0, 1]
    assert set(left_out) == {"circle.npy", "none.npy", "dir.npy", "pipe.npy", "whole"}
    assert "circle" in left_out["circle.npy"]
    assert "folder" in left_out["dir.npy"]
    assert not any("--follow-links" in why for why in left_out.values())


@pytest.mark.parametrize("of", ["objects", "files"])
def test_convert_names_links_and_follows_them(run: Run, tmp_path: Path, of: str) -> None:
    options = ["--read-as", of] if of == "files" else []
    put(tmp_path / "in" / "a.npy", 0)
    put(tmp_path / "out.npy", 1)
    link(tmp_path / "in" / "b.npy", "../out.npy")

    ran = run("convert", "in", "--to", "hdf5", "--out", "plain", "--json", *options)
    assert ran.document["skipped"] == [["b.npy", f"a link that leads out of the folder; {OUT}"]]
    assert "left out: b.npy" in ran.stderr
    assert OUT in run("convert", "in", "--to", "hdf5", "--dry-run", *options).stdout.replace("\n", " ")
    ran = run("convert", "in", "--to", "hdf5", "--out", "linked", "--json", "--follow-links", *options)
    assert (ran.document["samples"], ran.document["skipped"]) == ((2, []) if of == "objects" else (6, []))


def test_a_second_pull_with_follow_links_draws_the_files_that_the_first_skipped(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.npy", 0)
    put(tmp_path / "out.npy", 1)
    link(tmp_path / "in" / "b.npy", "../out.npy")
    pulled(run, "in")

    pulled(run, "in", "--follow-links")

    assert 1 in values(tmp_path / "cache")


def test_refresh_names_the_current_links(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.npy", 0)
    put(tmp_path / "out.npy", 1)
    link(tmp_path / "in" / "old.npy", "../out.npy")
    pulled(run, "in")
    (tmp_path / "in" / "old.npy").unlink()
    link(tmp_path / "in" / "new.npy", "../out.npy")
    put(tmp_path / "in" / "c.npy", 2)

    document = pulled(run, "in", "--refresh")

    assert [name for name, _ in document["left_out"]] == ["new.npy"]
    assert values(tmp_path / "cache") == [0, 2]


def test_links_after_the_first_hundred_are_only_counted(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.npy", 0)
    for number in range(130):
        link(tmp_path / "in" / f"{number:03}.npy", "../nothing")

    left_out = pulled(run, "in")["left_out"]

    assert len(left_out) == 101
    assert left_out[-1] == ["...", "and 30 more"]


def test_names_of_links_cannot_control_a_terminal(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.npy", 0)
    link(tmp_path / "in" / "\x1b[2J.npy", "../nothing")

    assert "\x1b" not in run("pull", "in", "--all", "--max-size", "20MB").stderr


def test_a_link_inside_the_named_folder_is_not_trusted_as_the_named_link_is(run: Run, tmp_path: Path) -> None:
    """A folder with a ``data.mdb`` is one LMDB, but the user did not name the target of its link."""
    assert run("convert", put(tmp_path / "one" / "a.npy", 5).parent, "--to", "lmdb", "--out", "secret").code == 0
    link(tmp_path / "in" / "data.mdb", "../secret/part-00000.lmdb")

    ran = run("pull", "in", "--all", "--max-size", "20MB")
    assert ran.code == 3
    assert OUT in ran.error
    assert pulled(run, "in", "--follow-links")["samples"] == 1
    assert pulled(run, "in/data.mdb", cache="named")["samples"] == 1


def test_a_linked_zarr_chunk_is_followed_with_the_option_that_the_error_names(run: Run, tmp_path: Path) -> None:
    import zarr

    zarr.create_array(tmp_path / "x.zarr", shape=(8, 2), chunks=(2, 2), dtype="i4")[...] = 7
    (tmp_path / "x.zarr" / "c" / "1" / "0").rename(tmp_path / "moved")
    link(tmp_path / "x.zarr" / "c" / "1" / "0", tmp_path / "moved")

    refused = run("pull", "x.zarr", "--all", "--max-size", "20MB")
    assert refused.code == 3
    assert f"{OUT}" in refused.error

    assert pulled(run, "x.zarr", "--follow-links")["samples"] == 8
    with Loader(tmp_path / "cache", batch_size=8, workers=0) as loader:
        assert (next(iter(loader))["x"] == 7).all()
    shutil.copytree(tmp_path / "x.zarr", tmp_path / "copy.zarr")  # as cp -rL does
    assert pulled(run, "copy.zarr", cache="copied")["samples"] == 8
