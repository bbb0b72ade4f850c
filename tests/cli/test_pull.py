"""``cachetool pull`` on the command line."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import pytest

import cachetool
from cachetool.core.errors import BadObject
from cachetool.core.progress import Progress
from cachetool.core.units import parse_size
from tests.cli.folders import labels, tree
from tests.servers import Scripted, scripted_server, serve_file

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def test_a_pull_draws_the_requested_samples_and_reports_them(run: Run, remote: Path, tmp_path: Path) -> None:
    ran = run("pull", remote, "--samples", "12", "--max-size", "8MB")

    assert ran.code == 0, ran.stderr
    assert "pulled 12 samples" in ran.stdout
    assert len(set(labels(tmp_path / "cache"))) == 12


def test_json_is_one_document_and_notes_go_to_stderr(run: Run, remote: Path) -> None:
    ran = run("pull", remote, "--samples", "12", "--json")

    assert ran.code == 0, ran.stderr
    assert (ran.document["samples"], ran.document["format"], ran.document["dataset"]) == (12, "lmdb", "default")
    assert ran.document["skipped"] == 0
    assert "half of the free disk" in ran.stderr


def test_quiet_keeps_the_result(run: Run, remote: Path) -> None:
    ran = run("pull", remote, "--samples", "2", "--quiet")

    assert ran.code == 0
    assert ran.stderr == ""
    assert len(ran.stdout.splitlines()) >= 1


def test_the_seed_decides_the_draw_and_a_second_pull_draws_other_samples(
    run: Run, remote: Path, tmp_path: Path
) -> None:
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert run("pull", remote, "--samples", "20", "--seed", seed, "--cache", tmp_path / name).code == 0
    a, b, c = (labels(tmp_path / name) for name in "abc")
    assert run("pull", remote, "--samples", "20", "--cache", tmp_path / "a").code == 0

    assert sorted(a) == sorted(b)
    assert sorted(a) != sorted(c)
    assert len(set(labels(tmp_path / "a"))) == 40


def test_without_samples_the_whole_source_is_pulled_if_it_fits(run: Run, remote: Path, tmp_path: Path) -> None:
    ran = run("pull", remote, "--max-size", "8MB", "--json")

    assert ran.code == 0, ran.stderr
    assert ran.document["pass_complete"] is True
    assert sorted(labels(tmp_path / "cache")) == list(range(60))


@pytest.mark.parametrize("fields", [("--fields", "scan, label"), ("--fields", "scan", "--fields", "label")])
def test_fields_can_be_chosen_and_renamed(run: Run, remote: Path, fields: tuple[str, ...]) -> None:
    ran = run("pull", remote, "--samples", "3", "--rename", "volume=scan", *fields, "--no-key", "--max-size", "8MB")
    assert ran.code == 0, ran.stderr

    assert list(run("stats", "--json").document["datasets"][0]["schema"]) == ["scan", "label"]


def test_images_are_resized_to_one_fixed_field_and_a_dataset_keeps_its_size(
    run: Run, photos: Path, tmp_path: Path
) -> None:
    line = ("pull", photos, "--rename", "png=image,jpg=image", "--fields", "image", "--max-size", "50MB")
    ran = run(*line, "--decode", "image", "--resize", "48x64", "--samples", "9")

    assert ran.code == 0, ran.stderr
    with cachetool.open_cache(tmp_path / "cache") as cache:
        assert cache.schema("default")["image"].describe() == "uint8 (48, 64, 3)"
    other = run(*line, "--decode", "image", "--resize", "64", "--samples", "3")
    assert (other.code, "(48, 64, 3)" in other.error) == (2, True)
    assert run("pull", photos, "--samples", "3").code == 0, "the same size when nothing is said"
    assert run("stats", "--json").document["samples"] == 12
    lone = run(*line, "--resize", "64")
    assert (lone.code, "--decode image" in lone.error) == (2, True)
    assert len(lone.error.splitlines()) == 1


def test_a_bad_object_is_named_or_skipped_and_counted(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for number in range(30):
        np.save(folder / f"{number:02d}.npy", np.full(4, number))
    (folder / "07.npy").unlink()
    (folder / "07--a.npy").write_bytes(b"junk" * 30)

    ran = run("pull", folder, "--all", "--max-size", "8MB")
    assert ran.code == 3
    assert "07--a.npy" in ran.error
    assert "--on-error skip" in ran.error

    ran = run("pull", folder, "--all", "--max-size", "8MB", "--on-error", "skip")
    assert ran.code == 0, ran.stderr
    assert "pulled 29 samples" in ran.stdout
    assert "07--a.npy" in ran.stdout


@pytest.mark.parametrize("files", [1, 2])
def test_arrays_that_belong_to_no_sample_are_named(run: Run, tmp_path: Path, files: int) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for number in range(files):
        with h5py.File(folder / f"run{number}.h5", "w") as file:
            file["x"], file["labels"], file["one"] = np.zeros((50, 3)), np.zeros(49), 7.0
    place = folder / "run0.h5" if files == 1 else folder
    prefix = "" if files == 1 else "run0.h5: "
    why = "its first dimension is 49, not 50"
    said_why = f"{why}, the length with the most bytes; to use the length 49 instead: --fields labels"
    ran = run("pull", place, "--samples", "5", "--max-size", "8MB", "--json")

    assert ran.code == 0, ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("left out: ")]
    assert said.startswith(f"left out: {prefix}labels ({said_why}); ")
    assert "; and 1 more; --json lists them" in said or files == 1
    assert [f"{prefix}labels", said_why] in ran.document["left_out"]
    assert len(ran.document["left_out"]) == 2 * files

    refused = run("pull", place, "--samples", "5", "--fields", "x,labels", "--dataset", "other")
    assert refused.code == 2
    assert refused.stderr.splitlines()[-1] == f"error: field 'labels' cannot be read: {why}"
    chosen = run("pull", place, "--samples", "5", "--fields", "x", "--dataset", "third")
    assert (chosen.code, "left out" in chosen.stderr) == (0, False)


def test_the_options_that_a_note_about_files_advises_work(run: Run, tmp_path: Path) -> None:
    """The notes ask which of two lengths is that of the samples, and for groups. Checked in text and JSON, by pull and
    convert.
    """
    with h5py.File(tmp_path / "vote.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((200, 8, 8), "u1"), np.arange(200)
        file["mean"], file["std"], file["class names"] = np.zeros(3), np.ones(3), np.zeros(3)
    with h5py.File(tmp_path / "clips.h5", "w") as file:
        for number in range(50):
            file[f"clip{number:03d}/feat"], file[f"clip{number:03d}/label"] = np.full((16, 4), number), [number]
    for name, option, counts in (("vote.h5", "fields", (200, 3)), ("clips.h5", "read-as", (50, 16))):
        ran = run("pull", name, "--all", "--max-size", "20MB", "--dataset", name[:4], "--json")
        assert (ran.code, ran.document["samples"]) == (0, counts[0]), ran.stderr
        ((words,),) = [re.findall(rf"(--{option} (?:'[^']*'|[^\s)]+))", line) for line in ran.stderr.splitlines()
                       if f"--{option}" in line]  # fmt: skip
        assert words in json.dumps(ran.document)
        shown = run("convert", name, "--to", "hdf5", "--out", f"out-{name}")
        assert words in shown.stderr
        assert words in run("convert", name, "--to", "hdf5", "--dry-run").stdout
        again = run("pull", name, "--all", "--dataset", f"{name[:4]}-again", "--json", *shlex.split(words))
        assert (again.code, again.document["samples"]) == (0, counts[1]), again.stderr


def test_a_pull_that_skipped_too_many_objects_fails_again_at_the_next_run(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for number in range(40):
        np.save(folder / f"{number:02d}.npy", np.full(4, number))
    for number in range(5, 18):
        (folder / f"{number:02d}.npy").write_bytes(b"junk" * 30)
    line = ("pull", folder, "--max-size", "8MB", "--shard-size", "100", "--on-error", "skip")

    ran = run(*line, "--all")
    assert (ran.code, "more than 1 %" in ran.stderr) == (3, True)
    ran = run(*line, "--samples", "2", "--json")
    assert (ran.code, ran.document["samples"], "more than 1 %" in ran.document["warning"]) == (0, 2, True)
    assert "warning: " + ran.document["warning"] in ran.stderr
    for _ in range(2):
        ran = run(*line, "--all")
        assert (ran.code, "13 of 40 draws could not be used" in ran.error) == (3, True)
    assert run("stats", "--json").document["samples"] == 27

    for number in range(5, 18):
        np.save(folder / f"{number:02d}.npy", np.full(4, number))
    ran = run(*line, "--all", "--refresh", "--json")
    assert (ran.code, ran.document["samples"], ran.document["warning"]) == (0, 13, "")
    assert run(*line, "--all").code == 0


def tar(path: Path, sizes: dict[str, int]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, size in sizes.items():
            about = tarfile.TarInfo(name)
            about.size = size
            archive.addfile(about, io.BytesIO(bytes(size)))


def test_a_missing_mount_loses_no_draws_with_on_error_skip(run: Run, tmp_path: Path) -> None:
    folder, aside = tmp_path / "mount", tmp_path / "aside"
    folder.mkdir()
    for number in range(60):
        np.save(folder / f"{number:02d}.npy", np.full(4, number))
    line = ("pull", folder, "--max-size", "8MB", "--on-error", "skip", "--json")
    assert run(*line, "--samples", "20").code == 0
    folder.rename(aside)
    folder.mkdir()

    ran = run(*line, "--all")

    assert ran.code == 3
    assert "is empty now" in ran.error
    folder.rmdir()
    aside.rename(folder)
    assert run(*line, "--all").document["samples"] == 40
    assert run("stats", "--json").document["sources"][0]["drawn"] == 60


def test_a_pull_from_archives_draws_the_requested_number_of_samples(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(100):
        count = 40 if number % 10 == 0 else 1
        tar(folder / f"{number:03d}.tar", {f"{number:03d}-{each:02d}.bin": 100 for each in range(count)})
    drawn = []
    for workers in (1, 2):
        root = tmp_path / f"cache{workers}"
        line = ("pull", folder, "--read-as", "files", "--samples", "60", "--seed", "5", "--cache", root)
        ran = run(*line, "--max-size", "8MB", "--workers", str(workers), "--json")
        assert ran.code == 0, ran.stderr
        assert ran.document["samples"] >= 60
        with cachetool.open_cache(root) as cache:
            (row,) = cache.catalog.rows("SELECT frontier FROM parts")
            drawn.append((row["frontier"], ran.document["samples"]))
    assert drawn[0] == drawn[1]


def test_for_an_archive_larger_than_the_cap_the_largest_sample_is_named(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(30):
        large = {f"{number:03d}-5.bin": 9_000_000} if number == 17 else {}
        tar(folder / f"{number:03d}.tar", {**{f"{number:03d}-{each}.bin": 100 for each in range(4)}, **large})
    line = ("pull", folder, "--read-as", "files", "--all", "--max-size", "4MB", "--shard-size", "100kB")
    ran = run(*line, "--on-error", "skip", "--json")
    assert ran.code == 0, ran.stderr
    (skipped,) = ran.document["skipped_examples"]
    assert skipped["key"].endswith("017-5")
    assert skipped["reason"].startswith("it has 9.0 MB together with 4 other samples of its archive")
    assert ran.document["samples"] == 29 * 4


def test_a_sample_larger_than_the_cap_is_named_and_can_be_skipped(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number:03d}.bin").write_bytes(bytes(4000))
    (folder / "123.bin").write_bytes(bytes(9_000_000))
    line = ("pull", folder, "--all", "--max-size", "4MB", "--shard-size", "100kB", "--seed", "3", "--workers", "1")

    ran = run(*line)
    assert ran.code == 4
    assert "'123' has 9.0 MB" in ran.stderr
    assert "--on-error skip" in ran.stderr

    ran = run(*line, "--on-error", "skip", "--json")
    assert ran.code == 0, ran.stderr
    assert (ran.document["skipped"], ran.document["pass_complete"]) == (1, True)
    assert ran.document["skipped_examples"][0]["key"] == "123"
    assert run("stats", "--json").document["samples"] == 199


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("nowhere", 3, "nowhere"),
        ("empty", 3, "empty"),
        ("abc://bucket/x", 2, "abc"),
        ("remote/scan000.json", 2, "scan000.json"),
    ],
)
def test_an_unusable_source_leaves_the_cache_unchanged(
    run: Run, filled: Path, remote: Path, tmp_path: Path, source: str, code: int, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "remote").symlink_to(remote)
    before = tree(filled)

    ran = run("pull", source)

    assert ran.code == code, ran.stderr
    assert says in ran.error
    assert tree(filled) == before


@pytest.mark.parametrize("written", ["{}", "file://{}"])
def test_a_cache_is_no_source(here: Run, filled: Path, tmp_path: Path, written: str) -> None:
    ran = here("pull", written.format(filled), "--max-size", "8MB", "--cache", "new")

    assert ran.code == 2
    assert ran.error == (
        f"{filled} is a cache; give it with --cache, and give the place of the samples as SOURCE;\n"
        "to copy its samples, write them to files and pull the files: cachetool convert --to lmdb --out DIR"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("format", ["lmdb", "hdf5", "zarr", "tfrecord"])
def test_an_exported_folder_is_pulled_as_files_of_one_kind(
    here: Run, filled: Path, tmp_path: Path, format: str
) -> None:
    """The ``dataset.json`` beside the files does not count as a file."""
    assert here("convert", "--to", format, "--out", "plain", "--cache", filled).code == 0
    held = here("stats", "--json", "--cache", filled).document["samples"]

    ran = here("pull", "plain", "--all", "--max-size", "8MB", "--cache", "new", "--json")

    assert ran.code == 0, ran.stderr
    assert ran.document["samples"] == held


def test_a_cap_below_one_shard_is_refused_with_the_minimum_before_a_file_is_created(
    run: Run, remote: Path, tmp_path: Path
) -> None:
    ran = run("pull", remote, "--max-size", "100kB")

    assert ran.code == 4
    assert "--max-size" in ran.error
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("what", ["file", "other"])
def test_a_cache_folder_with_other_content_is_not_touched(run: Run, remote: Path, tmp_path: Path, what: str) -> None:
    place = tmp_path / "cache"
    if what == "file":
        place.write_text("precious")
    else:
        place.mkdir()
        (place / "precious.txt").write_text("precious")

    ran = run("pull", remote, "--samples", "1")

    assert ran.code == 2
    assert str(place) in ran.error
    assert "precious" in (place if what == "file" else place / "precious.txt").read_text()


def test_a_cache_of_a_newer_version_is_refused(run: Run, filled: Path, remote: Path) -> None:
    marker = filled / "cachetool.json"
    marker.write_text(json.dumps({"layout": 99}))

    for command in (["pull", remote, "--samples", "1"], ["stats"], ["ls"], ["evict", "--max-size", "0"]):
        ran = run(*command)
        assert ran.code == 6
        assert "newer" in ran.error


def committed(cache: Path) -> int:
    """Return the number of shards of a cache, 0 if it does not exist."""
    if not (cache / "cachetool.json").exists():
        return 0
    with cachetool.open_cache(cache, create=False) as opened:
        return len(opened.shards())


def test_a_pull_that_waits_for_a_reader_names_the_reader_and_then_exits_with_4(
    run: Run, remote: Path, tmp_path: Path
) -> None:
    line = ("pull", remote, "--max-size", "1.45MB", "--shard-size", "10400")
    assert "stopped: cache full" in run(*line).stdout
    with cachetool.open_cache(tmp_path / "cache") as opened, opened.snapshot() as snapshot:
        ran = run(*line, "--samples", "20", "--wait", "6s")

        assert ran.code == 4, ran.stderr
        told = rf"pid {os.getpid()} on {re.escape(socket.gethostname())} .* reads default at version {snapshot.version}"
        assert re.search(rf"pulling: .*, waiting for up to .* of free space: {told}", ran.stderr)
        stopped = "error: stopped at the cap with 0 of 20 samples after evicting 1 older shard: "
        assert re.search(rf"{stopped}.* \(waited 6.* s\): {told}", ran.stderr)
    assert run(*line, "--samples", "20").code == 0


@pytest.mark.parametrize("source", ["objects", "a file"])
@pytest.mark.parametrize("format", ["lmdb", "hdf5", "zarr", "tfrecord"])
def test_the_minimum_cap_in_an_error_works_at_the_first_try(
    here: Run, remote: Path, tmp_path: Path, source: str, format: str
) -> None:
    """Shards are a sixteenth of the cap by default, so a larger cap needs larger shards. The minimum includes this."""
    np.save(tmp_path / "x.npy", np.zeros((1000, 64)))
    what = ["pull", str(remote), "--samples", "20"] if source == "objects" else ["pull", "x.npy", "--all"]
    refused = here(*what, "--to", format, "--max-size", "1150kB")
    assert refused.code == 4
    least = int(refused.error.split("the minimum is ")[1].split()[0])

    assert here(*what, "--to", format, "--max-size", str(least - 1)).code == 4
    assert not (tmp_path / "cache").exists()
    ran = here(*what, "--to", format, "--max-size", str(least), "--json", "--quiet")
    assert "the minimum is" not in ran.stderr
    assert here("stats", "--json").document["samples"] > 0


@pytest.mark.parametrize("format", ["lmdb", "hdf5", "zarr", "tfrecord"])
@pytest.mark.parametrize("source", ["objects", "a file"])
def test_samples_of_one_byte_or_none_fit_into_a_small_cache(
    here: Run, tmp_path: Path, source: str, format: str
) -> None:
    """Their metadata counts, not only their bytes."""
    if source == "objects":
        (tmp_path / "tiny").mkdir()
        for number in range(150):
            (tmp_path / "tiny" / f"{number:03d}.bin").write_bytes(b"x" * (number % 2))
        what = ["pull", "tiny", "--no-key"]
    else:
        np.save(tmp_path / "tiny.npy", np.zeros(200_000, dtype=np.uint8))
        what = ["pull", "tiny.npy", "--all", "--no-key"]
    ran = here(*what, "--to", format, "--max-size", "5MB", "--json", "--quiet")

    assert "minimum" not in ran.stderr, ran.stderr
    assert here("stats", "--json").document["samples"] >= 150


def test_the_cap_that_a_message_names_works_to_the_byte(here: Run, remote: Path, tmp_path: Path) -> None:
    """The cap works for a new and an existing cache. Rounded sizes in messages are only for reading."""
    line = ["pull", remote, "--samples", "5", "--max-size", "1200kB"]
    told = re.search(
        r"^a cap of 1.2 MB cannot hold one lmdb shard of [\d.]+ kB of values;\nthe minimum is (\d+) bytes "
        r"\([\d.]+ kB for the shard, [\d.]+ MB for .*\): raise --max-size or lower --shard-size$",
        here(*line).error,
    )
    assert told is not None
    least = int(told.group(1))
    assert here(*line[:-1], str(least), "--json").document["samples"] == 5

    larger = ["pull", remote, "--shard-size", "400kB", "--samples", "20"]
    least = int(here(*larger).error.split("the minimum is ")[1].split()[0])
    assert here(*larger, "--max-size", str(least - 1)).code == 4
    assert "the minimum" not in here(*larger, "--max-size", str(least)).stderr


def test_a_refused_first_pull_leaves_no_files(here: Run, remote: Path, tmp_path: Path) -> None:
    """Neither the cache nor new folders above it remain, and no message mentions a new cache."""
    ran = here("pull", remote, "--samples", "5", "--max-size", "8MB", "--min-free", "900TB", "--cache", "a/b/c")

    assert ran.code == 4
    assert "--min-free" in ran.error
    assert ran.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_the_floor_of_free_disk_is_kept_and_shown(run: Run, remote: Path) -> None:
    assert run("pull", remote, "--samples", "5", "--max-size", "8MB", "--min-free", "1MB").code == 0
    assert run("pull", remote, "--samples", "5").code == 0

    assert run("stats", "--json").document["min_free"] == 1_000_000
    assert "1.0 MB kept free (--min-free)" in run("stats").stdout
    assert run("pull", remote, "--samples", "5", "--min-free", "0").code == 0
    assert "--min-free" not in run("stats").stdout


def test_a_first_pull_whose_objects_are_all_bad_leaves_no_files(here: Run, tmp_path: Path) -> None:
    """They were sound while the pull probed the schema."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(65):
        np.save(source / f"{number:03d}.npy", np.zeros(3))
    folder = str(source)
    with cachetool.open_cache(tmp_path / "a" / "cache", max_size="8MB") as cache:

        def spoil(step: Progress) -> None:
            if step.phase == "pull":
                for path in source.iterdir():
                    path.write_bytes(b"junk" * 20)

        with pytest.raises(BadObject):
            cache.pull(folder, workers=1, progress=spoil)
        assert not (tmp_path / "a").exists()
        for path in source.iterdir():
            np.save(path, np.zeros(3))
        assert cache.pull(folder, workers=1).samples == 65, "the same object makes the cache anew"
        assert cache.max_size == 8_000_000


def test_progress_shows_how_full_the_cache_is_and_what_was_evicted_for_the_pull(remote: Path, tmp_path: Path) -> None:
    steps: list[Progress] = []
    with cachetool.open_cache(tmp_path / "cache", max_size="1600kB") as cache:
        cache.pull(str(remote), shard_size=10_400, workers=1, progress=steps.append)
        filled = cache.usage().total

        assert [step for step in steps if step.phase == "pull"][-1].cap == 1_600_000
        assert 0 < max(step.used for step in steps) <= filled
        assert {step.evicted for step in steps} == {0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_pull_with_follow_cleanly(remote: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The exit code is 130, no half-written shard remains, and committed shards are complete."""
    cache = tmp_path / "cache"
    command = ["pull", str(remote), "--follow", "--max-size", "2MB", "--shard-size", "10400", "--cache", str(cache)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cachetool", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not committed(cache):
        os.sched_yield()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("error: ")
    assert labels(cache)
    with cachetool.open_cache(cache, create=False) as opened:
        assert {path.name for path in (cache / "shards").iterdir()} == {shard.id for shard in opened.shards()}


def test_a_new_cap_takes_effect_for_a_known_source(run: Run, remote: Path) -> None:
    assert run("pull", remote, "--samples", "4", "--max-size", "8MB").code == 0

    for cap in (9_000_000, 7_000_000):
        ran = run("pull", remote, "--samples", "1", "--max-size", str(cap))

        assert ran.code == 0, ran.stderr
        assert run("stats", "--json").document["max_size"] == cap


@pytest.mark.parametrize("format", ["lmdb", "zarr", "tfrecord"])
def test_a_pull_stopped_at_the_cap_names_a_sufficient_cap(here: Run, tmp_path: Path, format: str) -> None:
    """The advice is not a cap that would evict this pull's own samples, because the next pull would evict again."""
    (tmp_path / "many").mkdir()
    for number in range(150):
        (tmp_path / "many" / f"{number:03d}.bin").write_bytes(bytes(10_000 + 100 * number))
    what = ["pull", "many", "--to", format, "--all"]
    stopped = here(*what, "--max-size", "2.5MB")

    assert stopped.code == 4
    told = re.search(
        r"stopped at the cap with (\d+) of 150 samples: cache is full: .* of 2.5 MB .* of this pull .*;\n"
        r"raise --max-size to about (\S+) for all of them, or use --follow .*$",
        stopped.stderr,
    )
    assert told is not None, stopped.stderr
    assert 0 < int(told.group(1)) < 150
    assert "cachetool evict" not in stopped.stderr
    assert parse_size(told.group(2)) < 3 * 150 * 20_000, "not much more than it takes"

    again = here(*what, "--max-size", told.group(2), "--json")
    assert again.code == 0, again.stderr
    assert here("stats", "--json").document["samples"] == 150
    assert here(*what, "--max-size", told.group(2), "--cache", "fresh", "--json").document["samples"] == 150


def test_a_pull_stopped_at_the_cap_reports_what_was_evicted_for_it(here: Run, tmp_path: Path) -> None:
    """Samples of earlier pulls that were evicted do not come again in this pass, and do not count as requested ones."""
    (tmp_path / "many").mkdir()
    for number in range(150):
        (tmp_path / "many" / f"{number:03d}.bin").write_bytes(bytes(20_000 + 100 * number))
    assert here("pull", "many", "--samples", "40", "--max-size", "3MB").code == 0
    stopped = here("pull", "many", "--all")

    assert stopped.code == 4
    told = re.search(
        r"stopped at the cap with (\d+) of 110 samples after evicting (\d+) older shards: ", stopped.stderr
    )
    assert told is not None, stopped.stderr
    assert here("stats", "--json").document["samples"] == int(told.group(1))
    assert "raise --max-size to about" in stopped.stderr


def test_a_pull_at_the_end_of_a_source_advises_the_next_step(run: Run, remote: Path) -> None:
    assert run("pull", remote, "--all", "--max-size", "8MB").stdout.endswith("stopped: source at its end\n")
    again = run("pull", remote, "--all").stdout.splitlines()[-1]

    assert again.startswith("stopped: source at its end, ")
    assert "--refresh" in again
    assert "--follow" in again


def test_a_cap_larger_than_the_free_disk_is_reported(run: Run, remote: Path) -> None:
    """Both when the cache is created and when its cap is raised."""
    made = run("pull", remote, "--samples", "2", "--max-size", "900TB")
    assert re.search(
        r"^new cache .*, cap 900\.0 TB: more than the .* that the disk has free: ",
        made.stderr,
    )
    assert "free" not in run("pull", remote, "--samples", "2", "--max-size", "900TB").stderr
    assert "free" not in run("pull", remote, "--samples", "2", "--max-size", "8MB").stderr
    raised = run("pull", remote, "--samples", "2", "--max-size", "800TB")
    assert re.search(r"^the cap of .* becomes 800\.0 TB, .* more than .*, but the disk has .* free: ", raised.stderr)


@pytest.mark.parametrize("typed", ["s3:/bucket/x", "https:/host/x", "s3:bucket"])
def test_a_url_with_a_missing_slash_is_recognised(here: Run, tmp_path: Path, typed: str) -> None:
    for command in (["pull", typed, "--samples", "1"], ["convert", typed, "--to", "lmdb", "--out", "out"]):
        ran = here(*command)
        scheme, _, rest = typed.partition(":")

        assert ran.code == 2, ran.stderr
        assert f"{scheme}://{rest.lstrip('/')}" in ran.error
    assert not (tmp_path / "cache").exists()


def test_an_object_that_the_store_refuses_can_be_skipped(here: Run, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for number in range(12):
        (place / f"{number:02d}.txt").write_text(str(number))

    def script(handler: Scripted) -> None:
        if handler.path == "/07.txt":
            handler.answer(403)
        else:
            serve_file(handler, place, "json")

    with scripted_server(script) as server:
        ran = here("pull", server.url, "--all", "--cache", "new")
        skipping = here(
            "pull", server.url, "--all", "--cache", "new", "--on-error", "skip", "--max-size", "8MB", "--json"
        )

    assert ran.code == 3
    assert ran.error == (
        f"{server.url}: '07.txt': access denied (403); give user and password in ~/.netrc;\n"
        "other objects can be read: skip such samples (up to 10 or 1 %) with --on-error skip"
    )
    assert skipping.code == 0, skipping.stderr
    assert (skipping.document["samples"], skipping.document["skipped"]) == (11, 1)
