"""``verify --repair`` and the samples to pull again: which samples are missing, which are pulled again, and the
report.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import cachetool
from cachetool.cache.draws import reopened
from cachetool.check.own_files import contradiction
from cachetool.check.verify import verify
from cachetool.cli.app import run
from cachetool.pull.options import PullOptions
from tests.pull.test_growing import drawn, write
from tests.servers import Scripted, scripted_server


def keys(cache: cachetool.Cache) -> Counter[str]:
    return Counter(key for key, _ in drawn(cache))


def keys_of(root: Path) -> Counter[str]:
    with cachetool.open_cache(root) as cache:
        return keys(cache)


def spoil(path: Path) -> None:
    """Make an object undecodable, or restore it, with the size and ETag that were listed."""
    found, data = path.stat(), bytearray(path.read_bytes())
    data[0] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def flip(folder: Path) -> None:
    """Flip one bit of the largest file of a shard."""
    path = max((each for each in folder.iterdir() if each.name != "shard.json"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("second", "how"), [(40, "repair"), (8, "pull")])
def test_missing_samples_of_an_earlier_pass_are_reported_and_pulled_again(
    second: int, how: str, tmp_path: Path
) -> None:
    """A shard of pass 1 is bad while pass 2 has drawn 8 of 36 samples or all of them."""
    remote, root = tmp_path / "remote", tmp_path / "cache"
    write(remote, range(60))
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), all=True, shard_size=160, workers=1, to="hdf5", seed=3)
        while cache.stats().samples > 24:
            cache.evict(cache.usage().total - 1)
        left = cache.stats().samples
        cache.pull(str(remote), samples=second, shard_size=160, workers=1)
        before = keys(cache)
        bad = cache.catalog.one("SELECT id, samples FROM shards WHERE state = 'ready' AND pass_number = 0")
        assert bad is not None
        assert left + min(second, 60 - left) == before.total()
    flip(root / "shards" / bad["id"])

    found = verify(root, repair=True)
    assert [row.draws for row in found.missing] == [bad["samples"]]
    assert not found.sound
    (root / "catalog.sqlite3").unlink()
    found = verify(root, repair=True)
    assert [row.draws for row in found.missing] == [bad["samples"]], "also by a catalog made anew"
    if how == "repair":
        found = verify(root, repair=True, repull=True)
        assert found.sound
        assert found.repulled == bad["samples"]
        with cachetool.open_cache(root) as cache:
            assert keys(cache) == before
    with cachetool.open_cache(root) as cache:
        assert contradiction(cache.catalog, cache.layout) is None
        cache.pull(str(remote), all=True, shard_size=160, workers=1)
        assert keys(cache) == Counter(f"{n:04d}" for n in range(60))
        assert cache.stats().sources[0]["drawn"] == 60
        assert contradiction(cache.catalog, cache.layout) is None
    assert verify(root).sound


def test_a_repair_stopped_by_the_cap_reports_repaired_and_missing_samples_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader keeps two bad shards, and the cache has space for only one more."""
    remote, root = tmp_path / "remote", tmp_path / "cache"
    remote.mkdir()
    for number in range(20):
        np.save(remote / f"{number:02d}.npy", np.random.default_rng(number).random(12_500))
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), all=True, shard_size=410_000, workers=1, to="hdf5")
        assert [shard.samples for shard in cache.shards()] == [4] * 5
        used = cache.usage().total
    monkeypatch.setattr(
        "cachetool.check.verify.PullOptions", partial(PullOptions, wait=0)
    )  # do not wait a minute for the reader
    with cachetool.open_cache(root, max_size=used + 700_000) as cache, cache.snapshot():
        for shard in cache.shards()[1:3]:
            flip(shard.path)
        found = verify(root, repair=True, repull=True)
        with cache.catalog.read() as connection:
            [left] = reopened(connection)
        assert 0 < left.draws < 8
        assert found.reopened == {str(remote): 8}
        [missing] = found.missing
        assert missing.draws == left.draws
        assert not found.sound
        assert missing.failed is not None
        assert missing.failed.startswith("stopped at the cap with ")
        assert "; raise --max-size" in missing.failed
        said = [missing.failed, missing.last_error, *(error["text"] for error in cache.stats().errors)]
        assert not any("\n" in text for text in said)


@pytest.mark.parametrize("more", [0, 1])
def test_a_repair_skips_objects_that_the_pull_skipped_and_reports_objects_that_became_bad_since(
    more: int, tmp_path: Path
) -> None:
    remote, root = tmp_path / "remote", tmp_path / "cache"
    write(remote, range(40))
    (remote / "0007.x.npy").write_bytes(b"no array")
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), all=True, on_error="skip", shard_size=160, workers=1, seed=3)
        before = keys(cache)
        assert before.total() == 39
        assert cache.stats().sources[0]["skipped"] == 1
        for shard in cache.shards():
            flip(shard.path)
    if more:
        spoil(remote / "0011.x.npy")

    found = verify(root, repair=True, repull=True)
    assert found.repulled == 39 - more
    assert [(row.draws, row.tried) for row in found.missing] == [(1 + more, 1 + more)]
    assert "cannot be read; the last of them is" in str(found.missing[0].failed)
    assert found.sound, "what gives nothing holds nothing up"
    assert verify(root, repair=True, repull=True).repulled == 0
    with cachetool.open_cache(root) as cache:
        assert keys(cache) == before - Counter(["0011"] * more)
        assert cache.stats().sources[0]["drawn"] == 40
        assert cache.pull(str(remote), all=True, on_error="skip").pass_complete
    (root / "catalog.sqlite3").unlink()
    rebuilt = verify(root, repair=True)
    assert [row.draws for row in rebuilt.missing] == [1 + more], "also by a catalog made anew"
    if more:
        spoil(remote / "0011.x.npy")
    assert verify(root, repair=True, repull=True).repulled == more
    assert verify(root).sound
    with cachetool.open_cache(root) as cache:
        assert keys(cache) == before
        assert cache.stats().sources[0]["skipped"] == 1
        assert cache.stats().sources[0]["drawn"] == 40
        assert contradiction(cache.catalog, cache.layout) is None


def test_a_bad_object_among_the_probed_ones_stops_neither_a_repair_nor_a_pull(tmp_path: Path) -> None:
    """A pull probes the first draws to learn the fields, which a known dataset has already."""
    remote, root = tmp_path / "remote", tmp_path / "cache"
    write(remote, range(40))
    (remote / "0007.x.npy").write_bytes(b"no array")
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), all=True, on_error="skip", shard_size=160, workers=1, seed=3)
        before = keys(cache)
        flip(max(cache.shards(), key=lambda shard: shard.samples).path)

    assert verify(root, repair=True, repull=True).sound
    assert keys_of(root) == before

    with cachetool.open_cache(tmp_path / "another", max_size="20MB") as cache:
        cache.pull(str(remote), samples=20, order="sequential", on_error="skip", workers=1)
        assert cache.pull(str(remote), samples=10, workers=1).samples == 10


def test_pulls_and_later_passes_continue_despite_missing_samples_that_cannot_be_read(tmp_path: Path) -> None:
    remote, root = tmp_path / "remote", tmp_path / "cache"
    write(remote, range(20))
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), all=True, shard_size=80, workers=1, seed=3)
        flip(cache.shards()[0].path)
        lost = verify(root, repair=True).missing[0].draws
    bad = next(path for path in sorted(remote.iterdir()) if path.name[:4] not in keys_of(root))
    spoil(bad)
    with cachetool.open_cache(root) as cache:
        made = cache.pull(str(remote), all=True, on_error="skip", shard_size=80, workers=2)
        assert (made.samples, made.skipped, made.pass_complete) == (lost - 1, 1, True)
        assert [(row.draws, row.tried) for row in verify(root).missing] == [(1, 1)]
        cache.evict(cache.usage().total - 1)
        cache.pull(str(remote), samples=1, on_error="skip", shard_size=80, workers=2)
        assert cache.stats().sources[0]["pass"] == 2
        assert verify(root).missing == [], "the next pass draws it like any other"
        spoil(bad)
        cache.pull(str(remote), all=True, on_error="skip", shard_size=80, workers=2)
        assert keys(cache) == Counter(f"{n:04d}" for n in range(20))


def test_a_rebuilt_catalog_keeps_the_count_of_missing_samples(tmp_path: Path) -> None:
    remote, root = tmp_path / "remote", tmp_path / "cache"
    write(remote, range(20))
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), samples=15, shard_size=80, workers=1, seed=3)
        before = keys(cache)
        bad = cache.shards()[1]
    flip(bad.path)
    assert [row.draws for row in verify(root, repair=True).missing] == [bad.samples]
    (root / "catalog.sqlite3").unlink()

    assert [row.draws for row in verify(root, repair=True).missing] == [bad.samples]
    assert verify(root, repair=True, repull=True).repulled == bad.samples
    (root / "catalog.sqlite3").unlink()
    assert verify(root, repair=True).sound
    with cachetool.open_cache(root) as cache:
        assert keys(cache) == before


def test_repaired_samples_keep_their_format_and_removed_shards_take_no_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule also holds if no shard of the dataset is left whose format could be read."""
    remote, root = tmp_path / "remote", tmp_path / "cache"
    write(remote, range(8))
    with cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(str(remote), all=True, to="tfrecord", workers=1)
        cache.pull(str(remote), samples=5, to="zarr", dataset="other", workers=1)
    shutil.rmtree(root / "shards")

    assert run(["verify", "--repair", "--cache", str(root)]) == 0

    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.endswith("fetched again")] == ["13 samples fetched again"]
    with cachetool.open_cache(root) as cache:
        assert {(shard.dataset, shard.format) for shard in cache.shards()} == {
            ("default", "tfrecord"),
            ("other", "zarr"),
        }


@pytest.mark.parametrize("query", ["sr=2", "token=2"])
def test_a_repair_does_not_fetch_other_values_if_the_urls_query_is_unknown(query: str, tmp_path: Path) -> None:
    """The query selects the content of the objects, and no file of the cache stores it."""
    root = tmp_path / "cache"

    def script(handler: Scripted) -> None:
        if handler.path.startswith("/d/?") or handler.path == "/d/":
            handler.answer(200, b'<a href="0.x.npy">0</a><a href="1.x.npy">1</a>', Content_Type="text/html")
            return
        body = io.BytesIO()
        np.save(body, np.full(10, float(handler.path.partition("=")[2] or 0)))
        handler.answer(200, body.getvalue())

    with scripted_server(script) as server, cachetool.open_cache(root, max_size="20MB") as cache:
        cache.pull(f"{server.url}/d/?{query}", all=True, workers=1, to="hdf5")
        [shard] = cache.shards()
        flip(shard.path)
        found = verify(root, repair=True, repull=True)
        assert found.repulled == 0
        [missing] = found.missing
        assert "its stored URL is incomplete" in str(missing.failed)
        cache.pull(f"{server.url}/d/?{query}", all=True, workers=1)
        assert verify(root).sound
        assert sorted(drawn(cache)) == [("0", 2), ("1", 2)]
