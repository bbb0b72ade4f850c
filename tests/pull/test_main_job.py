"""The main job end to end on the command line, against a real S3 server: pull, convert, evict, and every error."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from cachetool import SourceError, open_cache
from cachetool.core.progress import Progress
from cachetool.core.schema import Schema
from cachetool.formats.lmdb import ValueLayout
from tests.commands import run_command
from tests.servers import free_port

PYTHON = sys.executable


class Ran:
    """The result of a command."""

    def __init__(self, args: tuple[str | Path, ...], env: Mapping[str, str]) -> None:
        began = time.monotonic()
        done = run_command(*args, folder=Path.cwd(), environment={**os.environ, **env}, seconds=240)
        self.seconds = time.monotonic() - began
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr

    @property
    def document(self) -> Any:
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)

    def refused(self, code: int) -> str:
        """Return the message of an error with this exit code. Check that it has at most two lines and no traceback."""
        assert self.code == code, f"{self.code}: {self.stderr}{self.stdout}"
        assert "Traceback" not in self.stderr
        lines = [
            line for line in self.stderr.splitlines() if not line.startswith(("no --max-size", "listing", "new cache"))
        ]
        assert 1 <= len(lines) <= 2, self.stderr
        return "\n".join(lines)


def raw_samples(cache: Path) -> Iterator[dict[str, Any]]:
    """Return every sample of a cache of LMDB shards, read by py-lmdb alone, with the schema from the file itself."""
    for shard in sorted((cache / "shards").iterdir()):
        with lmdb.open(str(shard / "data.lmdb"), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
            layout = ValueLayout(Schema.from_json(json.loads(txn.get(b"__schema__"))))
            for number in range(int(txn.get(b"__len__"))):
                yield layout.decode(txn.get(b"%012d" % number))


def keys(cache: Path) -> list[str]:
    return [sample["__key__"] for sample in raw_samples(cache)]


def tree_hash(root: Path) -> str:
    """Return a hash over the names and bytes of all files under ``root``, which may be missing."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")) if root.exists() else []:
        digest.update(str(path.relative_to(root)).encode() + (path.read_bytes() if path.is_file() else b"/"))
    return digest.hexdigest()


def du(root: Path, *how: str) -> int:
    out = subprocess.run(["du", *how, root], capture_output=True, text=True, check=True).stdout
    return int(out.split()[0])


def test_a_seeded_pull_draws_distinct_unchanged_and_repeatable_samples(
    digits: Path, s3_env: dict[str, str], tmp_path: Path
) -> None:
    args = ("pull", "s3://digits/train/", "--samples", "500", "--seed", "7", "--to", "lmdb", "--max-size", "64MB")
    first = Ran((*args, "--cache", tmp_path / "c", "--json"), s3_env).document
    assert (first["samples"], first["skipped"], first["format"]) == (500, 0, "lmdb")
    drawn = {}
    for sample in raw_samples(tmp_path / "c"):
        key = sample["__key__"]
        assert np.array_equal(sample["npy"], np.load(digits / f"{key}.npy"))
        assert sample["label"] == json.loads((digits / f"{key}.json").read_text())["label"]
        drawn[key] = sample
    assert len(drawn) == 500

    Ran((*args, "--cache", tmp_path / "other", "--workers", "4", "--shard-size", "50kB", "--json"), s3_env)
    assert set(keys(tmp_path / "other")) == set(drawn)

    Ran((*args, "--cache", tmp_path / "c", "--json"), s3_env)
    both = keys(tmp_path / "c")
    assert len(both) == len(set(both)) == 1000
    assert set(drawn) <= set(both)


TENSORFLOW = """
import json, pathlib, sys
import tensorflow as tf
out = {}
for shard in sorted(pathlib.Path(sys.argv[1], "shards").iterdir()):
    spec = {"__key__": tf.io.FixedLenFeature([], tf.string), "npy": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64)}
    for record in tf.data.TFRecordDataset(str(shard / "data.tfrecord")):
        sample = tf.io.parse_single_example(record, spec)
        values = tf.io.decode_raw(sample["npy"], tf.float64)
        out[sample["__key__"].numpy().decode()] = [values.numpy().tolist(), int(sample["label"])]
print(json.dumps(out))
"""


def by_tensorflow(cache: Path) -> dict[str, Any]:
    done = subprocess.run([PYTHON, "-c", TENSORFLOW, cache], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_h5py(cache: Path) -> dict[str, Any]:
    import h5py

    found = {}
    for shard in (cache / "shards").iterdir():
        with h5py.File(shard / "data.h5") as file:
            text, at = file["__key__"][:].tobytes(), file["__key__.offsets"][:]
            for i, (array, label) in enumerate(zip(file["npy"][:], file["label"][:], strict=True)):
                found[text[at[i] : at[i + 1]].decode()] = [array.ravel().tolist(), int(label)]
    return found


def by_zarr(cache: Path) -> dict[str, Any]:
    import zarr

    found = {}
    for shard in (cache / "shards").iterdir():
        group = zarr.open_group(shard / "data.zarr", mode="r")
        text, at = group["__key__"][:].tobytes(), group["__key__.offsets"][:]
        for i, (array, label) in enumerate(zip(group["npy"][:], group["label"][:], strict=True)):
            found[text[at[i] : at[i + 1]].decode()] = [array.ravel().tolist(), int(label)]
    return found


def by_lmdb(cache: Path) -> dict[str, Any]:
    return {s["__key__"]: [s["npy"].ravel().tolist(), int(s["label"])] for s in raw_samples(cache)}


@pytest.mark.timeout(900)  # importing TensorFlow for the first time from a busy disk took 220 seconds
def test_every_format_is_read_back_equal_by_its_own_library(
    digits: Path, s3_env: dict[str, str], tmp_path: Path
) -> None:
    cache = ("--cache", tmp_path / "c")
    Ran(
        ("pull", "s3://digits/train/", "--samples", "300", "--shard-size", "40kB", "--max-size", "64MB", *cache), s3_env
    )
    expected = {
        key: [
            np.load(digits / f"{key}.npy").ravel().tolist(),
            json.loads((digits / f"{key}.json").read_text())["label"],
        ]
        for key in keys(tmp_path / "c")
    }
    assert len(expected) == 300
    digests = set()
    for to, read in (("hdf5", by_h5py), ("zarr", by_zarr), ("tfrecord", by_tensorflow), ("lmdb", by_lmdb)):
        digests.add(Ran(("convert", "--to", to, *cache, "--json"), {}).document["digest"])
        assert read(tmp_path / "c") == expected, to
    assert len(digests) == 1


def test_evict_frees_space_on_the_disk_and_stats_match_the_disk(s3_env: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "c"
    cache = ("--cache", root)
    pull = ("pull", "s3://digits/train/", "--samples", "900", "--shard-size", "50kB", "--workers", "1")
    Ran((*pull, "--max-size", "64MB", *cache), s3_env)
    order = [shard["id"] for shard in Ran(("ls", *cache, "--json"), {}).document["shards"]]
    target = 1_600_000
    Ran(("evict", "--max-size", str(target), *cache, "--json"), {})

    assert max(du(root, "-sB1"), du(root, "-sb")) <= target
    left = os.listdir(root / "shards")
    assert 0 < len(left) < len(order)
    assert sorted(left) == sorted(order[-len(left) :])
    stats = Ran(("stats", *cache, "--json"), {}).document
    assert stats["shards"] == len(left)
    assert stats["samples"] == len(keys(root)) == len(set(keys(root)))
    on_disk = sum(
        max(path.stat().st_size, path.stat().st_blocks * 512)
        for shard in left
        for path in (root / "shards" / shard, *(root / "shards" / shard).rglob("*"))
    )
    assert stats["shard_bytes"] == on_disk
    assert max(du(root, "-sB1"), du(root, "-sb")) <= stats["used"] <= target


def test_photographs_arrive_as_bytes_or_as_ragged_arrays(photos: Path, s3_env: dict[str, str], tmp_path: Path) -> None:
    Ran(
        (
            "pull",
            "s3://photos/",
            "--rename",
            "png=photo",
            "--rename",
            "jpg=photo",
            "--cache",
            tmp_path / "b",
            "--max-size",
            "200MB",
        ),
        s3_env,
    )
    for sample in raw_samples(tmp_path / "b"):
        assert (photos / f"{sample['__key__']}").with_suffix("").name
        assert sample["photo"] in {path.read_bytes() for path in photos.glob(sample["__key__"] + ".*")}
    assert len(keys(tmp_path / "b")) == len({p.name.split(".")[0] for p in photos.iterdir()})

    args = (
        "pull",
        "s3://photos/",
        "--rename",
        "png=photo",
        "--rename",
        "jpg=photo",
        "--decode",
        "image",
        "--to",
        "hdf5",
    )
    result = Ran((*args, "--cache", tmp_path / "a", "--max-size", "200MB", "--json"), s3_env).document
    assert result["samples"] == len(keys(tmp_path / "b"))
    shown = Ran(("stats", "--cache", tmp_path / "a", "--json"), {}).document
    assert shown["datasets"][0]["schema"]["photo"] == "uint8 ragged rank 3"


# -- everything that goes wrong


@pytest.fixture
def filled(s3_env: dict[str, str], tmp_path: Path) -> Path:
    root = tmp_path / "filled"
    assert (
        Ran(("pull", "s3://digits/train/", "--samples", "50", "--max-size", "8MB", "--cache", root), s3_env).code == 0
    )
    return root


def folder(root: Path, **files: bytes) -> Path:
    root.mkdir()
    for name, data in files.items():
        (root / name.replace("__", ".")).write_bytes(data)
    return root


def npy(value: Any) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


@pytest.mark.parametrize("new", [False, True], ids=["a cache in use", "a new cache"])
def test_bad_input_is_named_and_changes_nothing(
    new: bool, filled: Path, s3_env: dict[str, str], tmp_path: Path
) -> None:
    root = tmp_path / "new" if new else filled
    junk = folder(tmp_path / "junk", **{f"{n}__npy": npy(np.zeros(3)) for n in range(20)}, bad__npy=b"junk")
    mixed = folder(tmp_path / "mixed", a__npy=npy(1.0), b__npy=npy(2.0), b__json=b'{"label": 1}')
    (tmp_path / "empty").mkdir()
    wrong = {**s3_env, "AWS_SECRET_ACCESS_KEY": "wrong"}
    nobody = {name: value for name, value in s3_env.items() if "KEY" not in name}
    dead = {**s3_env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    before = tree_hash(root)
    cases: list[tuple[tuple[str | Path, ...], Mapping[str, str], int, str]] = [
        (("pull", "gopher://host/x"), {}, 2, "gopher"),
        (("pull", "s3://no-such-bucket/x/"), s3_env, 3, "no such bucket"),
        (("pull", "s3://digits/train/", "--dataset", "d"), wrong, 3, "access denied"),
        (("pull", "s3://digits/train/", "--dataset", "d"), nobody, 3, "credentials"),
        (("pull", "s3://digits/train/", "--dataset", "d"), dead, 3, "no answer"),
        (("pull", junk, "--dataset", "d"), {}, 3, "bad.npy"),
        (("pull", mixed, "--dataset", "d"), {}, 3, "--stem"),
        (("pull", tmp_path / "empty", "--dataset", "d"), {}, 3, "no samples"),
        (("pull", junk, "--to", "parquet"), {}, 2, "parquet"),
        (("pull", junk, "--samples", "-1"), {}, 2, "--samples"),
        (("pull", s3_url(), "--dataset", "d", "--shard-size", "1GB"), s3_env, 4, "minimum"),
    ]
    for args, env, code, message in cases:
        ran = Ran((*args, "--cache", root, *(("--max-size", "8MB") if new else ())), env)
        assert message in ran.refused(code), args
        assert ran.seconds < 30
        assert tree_hash(root) == before, args
    assert root.exists() == (not new)


def s3_url() -> str:
    return "s3://digits/train/"


def test_a_host_that_never_answers_is_an_error_within_30_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
        }
        ran = Ran(("pull", "s3://digits/train/", "--cache", tmp_path / "c", "--max-size", "8MB"), env)

    assert "no answer" in ran.refused(3)
    assert ran.seconds < 30
    assert not (tmp_path / "c").exists()


def test_junk_is_skipped_and_counted_on_request(tmp_path: Path) -> None:
    source = folder(tmp_path / "junk", **{f"{n}__npy": npy(np.zeros(3)) for n in range(20)}, bad__npy=b"junk")
    args = ("pull", source, "--on-error", "skip", "--cache", tmp_path / "c", "--max-size", "8MB", "--json")
    result = Ran(args, {}).document

    assert (result["samples"], result["skipped"]) == (20, 1)
    assert result["skipped_examples"][0]["key"].startswith("bad")
    stats = Ran(("stats", "--cache", tmp_path / "c", "--json"), {}).document
    assert (stats["sources"][0]["drawn"], stats["sources"][0]["skipped"]) == (21, 1)


def test_a_cap_below_one_shard_is_refused_and_its_minimum_works(digits: Path, tmp_path: Path) -> None:
    args = ("pull", digits, "--samples", "20", "--shard-size", "1MB", "--cache", tmp_path / "c", "--json")
    message = Ran((*args, "--max-size", "1200kB"), {}).refused(4)
    assert not (tmp_path / "c").exists()
    least = message.split("minimum is ")[1].split()[0]
    assert Ran((*args, "--max-size", least), {}).document["samples"] == 20


def test_a_file_and_a_newer_cache_are_refused(filled: Path, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in Ran(("pull", digits, "--cache", tmp_path / "file"), {}).refused(2)
    assert (tmp_path / "file").read_text() == "mine"
    (filled / "cachetool.json").write_text(json.dumps({"layout": 99}))
    before = tree_hash(filled)
    for args in (("pull", digits), ("stats",), ("evict", "--max-size", "1MB"), ("convert", "--to", "hdf5")):
        assert "newer" in Ran((*args, "--cache", filled), {}).refused(6)
    assert tree_hash(filled) == before


def test_a_second_pull_has_the_same_fields_without_repeated_options(digits: Path, tmp_path: Path) -> None:
    cache = ("--cache", tmp_path / "c", "--json")
    first = ("--rename", "npy=digit", "--fields", "digit", "--max-size", "20MB")
    assert Ran(("pull", digits, "--samples", "20", *first, *cache), {}).document["samples"] == 20
    assert Ran(("pull", digits, "--samples", "20", *cache), {}).document["samples"] == 20
    assert {tuple(sample) for sample in raw_samples(tmp_path / "c")} == {("digit", "__key__")}


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    assert "source is empty" in Ran(("pull", "", "--cache", tmp_path / "c"), {}).refused(2)
    assert not (tmp_path / "c").exists()


def test_one_place_is_one_source_in_every_spelling(digits: Path, tmp_path: Path) -> None:
    cache = ("--cache", tmp_path / "c", "--samples", "40", "--max-size", "20MB", "--json")
    for spelling in (str(digits), f"{digits}/", f"file://{digits}", os.path.relpath(digits)):
        assert Ran(("pull", spelling, *cache), {}).document["samples"] == 40

    assert len(keys(tmp_path / "c")) == len(set(keys(tmp_path / "c"))) == 160
    stats = Ran(("stats", "--cache", tmp_path / "c", "--json"), {}).document
    assert [source["drawn"] for source in stats["sources"]] == [160]
    assert stats["sources"][0]["fetched"] > 160 * 512


def test_a_pull_without_samples_leaves_no_dataset(tmp_path: Path) -> None:
    def pull() -> None:
        source = folder(
            tmp_path / f"{time.monotonic_ns()}", **{f"{number:03d}__npy": npy(np.zeros(3)) for number in range(20)}
        )

        def looked(step: Progress) -> None:
            if step.phase == "pull":  # all objects disappear between the probe and the first draw
                for path in source.iterdir():
                    path.unlink()

        with open_cache(tmp_path / "c", max_size="8MB") as cache, pytest.raises(SourceError, match="is empty now"):
            cache.pull(source, progress=looked)

    pull()
    assert not (tmp_path / "c").exists()

    (tmp_path / "c").mkdir()  # a folder that existed before stays
    pull()
    stats = Ran(("stats", "--cache", tmp_path / "c", "--json"), {}).document

    assert (stats["datasets"], stats["sources"], stats["shards"]) == ([], [], 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--samples", "9" * 20), "below 2**63"),
        (("--seed", "9" * 20), "below 2**63"),
        (("--rename", "nyp=volume"), "unknown field 'nyp'"),
    ],
)
def test_impossible_options_are_named(digits: Path, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    ran = Ran(("pull", digits, "--cache", tmp_path / "c", "--max-size", "8MB", *args), {})

    assert message in ran.refused(2)
    assert not (tmp_path / "c").exists()


def test_a_cache_that_cannot_be_created_is_named(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("dangling", "loop"):
        ran = Ran(("pull", digits, "--samples", "5", "--cache", tmp_path / name, "--max-size", "8MB"), {})
        assert name[:40] in ran.refused(2)
