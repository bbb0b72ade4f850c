"""Changed bytes, swapped shards, lost catalogs: found, named, and repaired (11, 57, 58, 59, 60)."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, open_cache
from cachetool.cache.layout import Layout
from cachetool.cache.rebuild import rebuild
from cachetool.check.verify import verify
from tests.faults.conftest import Figures
from tests.faults.tracing import Children
from tests.faults.world import FORMATS, Oracle, make


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def fill(children: Children, root: Path, ledger: Path, *, shards: int, format: str = "all") -> None:
    outcome = children.run("pull", root=root, ledger=ledger, shards=shards, format=format, evict=True)
    assert outcome.status == 0, outcome


def answers(root: Path) -> dict[str, Any]:
    """Return the figures of the cache that a user sees, except those that are counted from now on."""
    with open_cache(root, create=False) as cache:
        stats = cache.stats().as_dict()
        claims = [
            tuple(row) for row in cache.catalog.rows("SELECT source, pass_number, start, stop FROM claims ORDER BY 3")
        ]
        shards = [(s.id, s.dataset, s.format, s.samples, s.bytes, s.payload, s.content) for s in cache.shards()]
        rows = [tuple(row) for row in cache.catalog.rows("SELECT id, draws, source, pass_number, lineage FROM shards")]
    keep = ("datasets", "sources", "shards", "samples", "shard_bytes", "listings", "max_size", "reserved")
    return {"shards": shards, "claims": claims, "rows": sorted(rows), **{name: stats[name] for name in keep}}


# -- changed bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flips", [pytest.param(60, id="short"), pytest.param(2500, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.timeout(3000)
def test_verify_finds_every_flipped_bit_and_names_shard_and_file(
    root: Path, ledger: Path, children: Children, figures: Figures, format: str, flips: int
) -> None:
    fill(children, root, ledger, shards=2, format=format)
    files = [path for path in sorted(root.glob("shards/*/**/*")) if path.is_file()]
    weights = [path.stat().st_size for path in files]
    rng = random.Random(58)
    for number in range(flips):
        path = files[number % len(files)] if number % 2 else rng.choices(files, weights)[0]
        data = bytearray(path.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        found = verify(root)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)

        shard, _, name = str(path.relative_to(root / "shards")).partition("/")
        assert [(p.shard, p.file) for p in found.problems] == [(shard, name)], f"bit {bit} of {path}"
        assert not found.sound
    figures(flips=flips, found_and_named=flips)
    assert verify(root).problems == []


@pytest.mark.parametrize("format", FORMATS)
def test_verify_finds_truncated_extended_missing_and_additional_files(
    root: Path, ledger: Path, children: Children, format: str
) -> None:
    fill(children, root, ledger, shards=1, format=format)
    (shard,) = (root / "shards").iterdir()
    for path in [path for path in sorted(shard.rglob("*")) if path.is_file()]:
        data = path.read_bytes()
        changed = [data[:size] for size in range(0, len(data), 1024)] + [data + b"\0", None]
        for other in changed:
            if other is None:
                path.unlink()
            else:
                path.write_bytes(other)
            (problem,) = verify(root).problems
            assert (problem.shard, problem.file) == (shard.name, str(path.relative_to(shard)))
            path.write_bytes(data)
    (shard / "more").write_bytes(b"")
    (problem,) = verify(root).problems
    assert (problem.shard, problem.file) == (shard.name, "more")


def test_swapped_shards_are_found(root: Path, ledger: Path, children: Children) -> None:
    fill(children, root, ledger, shards=2, format="lmdb")
    one, two = sorted((root / "shards").iterdir())
    aside = root / "aside"
    for parts in (("",), ("data.lmdb",), ("data.lmdb", "extents.bin")):
        for part in parts:
            (one / part).rename(aside)
            (two / part).rename(one / part)
            aside.rename(two / part)
        found = verify(root)
        assert {problem.shard for problem in found.problems} == {one.name, two.name}
        for part in parts:
            (one / part).rename(aside)
            (two / part).rename(one / part)
            aside.rename(two / part)
    assert verify(root).problems == []


# -- repair ----------------------------------------------------------------------------------------------------------


def test_a_bad_shard_is_removed_and_the_next_pull_draws_exactly_its_samples(
    root: Path, ledger: Path, children: Children
) -> None:
    fill(children, root, ledger, shards=4)
    with open_cache(root) as cache:
        bad = cache.shards()[1]
        draws = cache.catalog.rows("SELECT draws FROM shards WHERE id = ?", (bad.id,))[0][0]
    damage(bad.path / "extents.bin")
    with open_cache(root) as cache, cache.snapshot() as snapshot:
        found = verify(root, repair=True)
        assert [(p.shard, p.file, p.action) for p in found.problems] == [
            (bad.id, "extents.bin", "it is deleted when its readers end, 12 draws must be repeated")
        ]
        assert bad.id in {shard.id for shard in snapshot.shards}
        assert bad.id not in {shard.id for shard in cache.shards()}
        assert found.reopened == {"/nowhere": 12}
    assert not bad.path.exists()
    assert verify(root, repair=True).problems == []

    fill(children, root, ledger, shards=1)
    with open_cache(root) as cache:
        assert cache.catalog.rows("SELECT draws FROM shards ORDER BY seq DESC LIMIT 1")[0][0] == draws
        assert cache.stats().sources[0]["drawn"] == 48
        row = {"dataset": "default", "reason": "corrupt", "policy": "verify"}
        assert cache.stats().evictions == [{**row, "shards": 1, "samples": 12, "bytes": bad.bytes}]
        assert cache.stats().errors[0]["subject"] == bad.id


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_repair_deletes_unreferenced_files_of_the_cache_and_keeps_foreign_files(root: Path) -> None:
    ours = [
        root / "shards" / "0123456789abcdef" / "data.lmdb",
        root / "listings" / "0123456789abcdef.fedcba9876543210" / "listing.json",
        root / "cachetool.json.new",
        root / "catalog.sqlite3.new",
    ]
    foreign = [root / "notes.txt", root / "shards" / "mine" / "x", root / "holders" / "x"]
    for path in ours + foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10_000)
    (root / "shards" / "00000000000000ff").mkdir()
    (root / "shards" / "00000000000000ff" / "shard.json").write_text("{")
    found = verify(root)
    assert {problem.action for problem in found.problems} == {None}
    found = verify(root, repair=True)
    assert sorted(found.foreign) == ["holders/x", "notes.txt", "shards/mine"]
    # The unfinished new marker and catalog are removed by the recovery of every open.
    assert {problem.file for problem in found.problems} == {
        "shards/0123456789abcdef",
        "shards/00000000000000ff",
        "listings/0123456789abcdef.fedcba9876543210",
    }
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in foreign)
    assert not (root / "shards" / "00000000000000ff").exists()
    again = verify(root, repair=True)
    assert again.problems == []
    assert sorted(again.foreign) == sorted(found.foreign)


def test_wrong_rows_are_corrected_from_the_shards(root: Path, ledger: Path, children: Children) -> None:
    fill(children, root, ledger, shards=3)
    before = answers(root)
    with sqlite3.connect(root / "catalog.sqlite3") as raw:
        ids = [row[0] for row in raw.execute("SELECT id FROM shards ORDER BY seq")]
        raw.execute("UPDATE shards SET samples = 13, draws = '[[0, 99]]' WHERE id = ?", ids[:1])
        raw.execute("UPDATE shards SET bytes = bytes - 4096 WHERE id = ?", ids[1:2])
        raw.execute("UPDATE shards SET format = 'zarr', content = 'x' WHERE id = ?", ids[2:])
    raw.close()
    assert {problem.shard for problem in verify(root).problems} == set(ids)
    assert verify(root, repair=True).sound
    assert answers(root) == before
    assert verify(root, repair=True).problems == []


# -- lost catalogs ---------------------------------------------------------------------------------------------------


def lose(root: Path, how: str) -> None:
    catalog = root / "catalog.sqlite3"
    if how == "deleted":
        catalog.unlink()
    elif how == "emptied":
        catalog.write_bytes(b"")
    elif how == "garbled":
        catalog.write_bytes(random.Random(1).randbytes(catalog.stat().st_size))
    elif how == "cut":
        catalog.write_bytes(catalog.read_bytes()[:20_000])


WAYS, EVICTED = ("deleted", "emptied", "garbled", "cut"), ("none", "oldest", "newest", "all")


@pytest.mark.parametrize(
    ("evicted", "how"),
    [
        pytest.param(evicted, how, marks=[pytest.mark.soak] * (WAYS.index(how) != EVICTED.index(evicted)))
        for evicted in EVICTED
        for how in WAYS
    ],
)
def test_a_lost_catalog_is_rebuilt_with_the_same_figures_and_no_sample_is_drawn_twice(
    root: Path, ledger: Path, children: Children, how: str, evicted: str
) -> None:
    fill(children, root, ledger, shards=6)
    with open_cache(root) as cache:
        take_away(cache, evicted)
    oracle = Oracle(root, ledger)
    oracle.check()
    before = answers(root)
    lose(root, how)
    found = verify(root)
    assert [(p.file, p.action) for p in found.problems] == [("catalog.sqlite3", None)]
    found = verify(root, repair=True)
    assert found.sound
    assert found.problems[0].file == "catalog.sqlite3"
    assert found.notes == []

    after = answers(root)
    if evicted != "all":  # without a shard its dataset is unknown until it is pulled again
        assert after == before
    assert after["sources"] == before["sources"]
    assert verify(root, repair=True).problems == []
    if evicted == "all":
        make_again(root)
    fill(children, root, ledger, shards=3)
    oracle.check()


def make_again(root: Path) -> None:
    from tests.faults.world import SCHEMA

    with open_cache(root) as cache:
        cache.declare("default", SCHEMA)


def take_away(cache: CacheDir, what: str) -> None:
    """Evict some shards, also the newest, whose record alone knows all draws."""
    from cachetool.cache.removal import delete_trash, retire, sweep

    ids = [shard.id for shard in cache.shards()]
    chosen = {"none": [], "oldest": ids[:2], "newest": ids[-2:], "all": ids}[what]
    with cache.catalog.write() as connection:
        retire(connection, chosen, reason="evict", policy="lru")
        trash = sweep(connection, cache.holder)
    delete_trash(cache.catalog, cache.layout, trash)


def test_the_shards_alone_are_enough_for_a_rebuild(root: Path, ledger: Path, children: Children) -> None:
    """The listings are lost too. The newest shard's record has the finished draws, also those of older, evicted
    shards.
    """
    fill(children, root, ledger, shards=5)
    with open_cache(root) as cache:
        take_away(cache, "oldest")
    oracle = Oracle(root, ledger)
    oracle.check()
    before = answers(root)
    lose(root, "deleted")
    shutil.rmtree(root / "listings")
    assert {problem.file for problem in verify(root).problems} == {"listings", "catalog.sqlite3"}
    assert verify(root, repair=True).sound

    after = answers(root)
    assert {**after, "listings": 0} == {**before, "listings": 0}
    fill(children, root, ledger, shards=2)
    oracle.check()


def test_the_old_catalog_stays_until_the_new_one_is_complete(
    root: Path, ledger: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(children, root, ledger, shards=3)
    before = answers(root)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no room"):
            rebuild(Layout(root))
    assert answers(root) == before
    rebuild(Layout(root))
    assert answers(root) == before
    assert verify(root).sound


def test_an_old_copy_of_the_catalog_is_noticed_and_replaced(root: Path, ledger: Path, children: Children) -> None:
    fill(children, root, ledger, shards=3)
    shutil.copy(root / "catalog.sqlite3", root.parent / "copy")
    oracle = Oracle(root, ledger)
    for taken in ("newest", "all"):
        fill(children, root, ledger, shards=3)
        with open_cache(root) as cache:
            take_away(cache, taken)
        oracle.check()
        before = answers(root)["sources"]
        shutil.copy(root.parent / "copy", root / "catalog.sqlite3")

        found = verify(root)
        assert "cannot be trusted" in found.problems[0].what
        assert verify(root, repair=True).sound
        assert answers(root)["sources"] == before
        if taken == "all":
            make_again(root)
        fill(children, root, ledger, shards=1)
        oracle.check()


@pytest.mark.parametrize("seeds", [pytest.param(25, id="short"), pytest.param(1000, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(3000)
def test_a_catalog_with_damaged_pages_is_rebuilt_with_the_same_figures(
    root: Path, ledger: Path, children: Children, figures: Figures, seeds: int
) -> None:
    fill(children, root, ledger, shards=8)
    with open_cache(root) as cache:
        take_away(cache, "oldest")
    before, sound = answers(root), (root / "catalog.sqlite3").read_bytes()
    journal = (root / "catalog.sqlite3-journal").read_bytes()
    seen = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        data = bytearray(sound)
        at = rng.randrange(len(data) // 4096) * 4096
        if seed % 2:
            at += rng.randrange(4096)
            data[at : at + 16] = rng.randbytes(16)
        else:
            data[at : at + 4096] = rng.randbytes(4096)
        (root / "catalog.sqlite3").write_bytes(data)
        (root / "catalog.sqlite3-journal").write_bytes(journal)
        found = verify(root, repair=True)
        seen += bool(found.problems)
        assert found.sound, seed
        assert verify(root, repair=True).problems == [], seed
        assert answers(root) == before, seed
    figures(damaged_catalogs=seeds, noticed=seen, without_effect=seeds - seen, wrong_answers=0)
    assert seen > seeds // 4


def test_the_catalog_is_not_rebuilt_under_a_living_process(root: Path, ledger: Path, children: Children) -> None:
    fill(children, root, ledger, shards=2)
    told = root.parent / "told"
    reader = children.start("hold", root=root, told=told)
    while not told.exists():
        pass
    try:
        (root / "catalog.sqlite3").unlink()
        outcome = children.run("repair", root=root)
        assert outcome.kinds[0] == "CatalogError"
        assert f"while pid {reader} uses the cache" in outcome.text
    finally:
        import os
        import signal

        os.kill(reader, signal.SIGKILL)
        children.wait(reader)
    assert children.run("repair", root=root).status == 0
    assert Oracle(root, ledger).check() == 24
