"""Two first pulls of one source at the same time, in every relevant order: neither removes the other pull's source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachetool import open_cache
from cachetool.cache import Claim, SourceRow
from cachetool.cache.draws import claim, finish, open_job
from cachetool.cache.root import CacheDir
from cachetool.cache.unmaking import withdraw_unused
from cachetool.core.errors import CatalogError, UsageError
from cachetool.core.names import Id
from cachetool.core.schema import Field, Schema

SOURCE = Id("5" * 16)

SCHEMA = Schema((Field("x", "<f8", (3,)),))


def source(units: int = 10, identity: str = "i") -> SourceRow:
    return SourceRow(SOURCE, "s3://bucket/", {}, identity, "default", units, units, 0, 0, 0)


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    listing = tmp_path / "listing"
    listing.mkdir()
    (listing / "listing.json").write_text("{}")
    cache = open_cache(tmp_path / "cache", max_size=5_000_000)
    cache.declare("default", SCHEMA)
    cache.add_source(source(), listing, new=True)
    return cache


def drawing(cache: CacheDir) -> tuple[str, Claim]:
    """Start a pull. Return its job and the claim of its worker."""
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
        job, _ = open_job(connection, SOURCE, holder=cache.holder.id, wanted=None, seed=None)
        held = claim(connection, job, holder=cache.holder.id, most=5, stop_at=lambda turn, part, start, stop: stop)
    assert held is not None
    return job, held


def test_a_pull_that_draws_nothing_does_not_remove_the_source_of_another_pull(cache: CacheDir) -> None:
    job, held = drawing(cache)
    withdraw_unused(cache, "default", SOURCE)

    assert cache.source(SOURCE) is not None
    with cache.catalog.write() as connection:
        finish(connection, job, held, held.stop, samples=5, skipped=0)


def test_draws_whose_claim_was_deleted_are_not_committed(cache: CacheDir) -> None:
    job, held = drawing(cache)
    with cache.catalog.write() as connection:
        connection.execute("DELETE FROM claims")
    for upto in (held.start + 1, held.stop):
        with pytest.raises(CatalogError, match="run the pull again"), cache.catalog.write() as connection:
            finish(connection, job, held, upto, samples=5, skipped=0)


def test_a_source_added_meanwhile_keeps_its_listing_and_a_different_one_is_refused(
    cache: CacheDir, tmp_path: Path
) -> None:
    before = cache.source(SOURCE)
    inode = cache.listing(SOURCE).stat().st_ino
    cache.add_source(source(), tmp_path / "listing", new=True)
    assert (cache.source(SOURCE), cache.listing(SOURCE).stat().st_ino) == (before, inode)
    for other in (source(units=9), source(identity="another")):
        with pytest.raises(UsageError, match="another process began to draw from s3://bucket/"):
            cache.add_source(other, tmp_path / "listing", new=True)
    assert cache.source(SOURCE) == before


def test_two_simultaneous_pulls_draw_every_sample_once(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for number in range(120):
        np.save(place / f"{number:03}.x.npy", np.full(200, number))
    command = [sys.executable, "-m", "cachetool", "pull", str(place), "--all", "--cache", str(tmp_path / "c")]
    both = [
        subprocess.Popen([*command, "--max-size", "50MB", "--quiet", "--max-rate", "100kB/s"], text=True, stderr=-1)
        for _ in range(2)
    ]
    ends = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    with open_cache(tmp_path / "c") as cache:
        assert sum(shard.samples for shard in cache.shards()) == 120
