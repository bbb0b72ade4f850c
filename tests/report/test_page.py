"""The page of ``stats --html``: self-contained, with correct figures, and safe against malicious names."""

from __future__ import annotations

import itertools
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest

from benchmarks.scale_catalog import fill
from cachetool.cache import CacheDir, Room, SourceRow, draws, history, open_cache
from cachetool.cache.draws import close_job
from cachetool.cache.history import Delivered
from cachetool.core.names import Id
from cachetool.report.charts import HEIGHT, WIDTH
from cachetool.report.numbers import Figures, figures
from cachetool.report.page import page
from tests.cache.conftest import SCHEMA, put_shard

SOURCE = Id("5" * 16)

SECTIONS = [
    "Used space and cap",
    "Pull rate",
    "Shards by age",
    "Shards by size",
    "Evictions",
    "Epochs",
    "Samples of each epoch",
    "Coverage and reuse of each source",
    "Datasets",
    "Newest epochs",
    "Readers, pulls and errors",
]
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'</style></title>\x1b[2J\u202e<!--"


def parsed(text: str) -> Element:
    """Parse the page as a browser does. Raise its syntax errors."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)


def tag(element: Element) -> str:
    return str(element.tag).rpartition("}")[2]


def words(element: Element) -> str:
    return "".join(element.itertext())


def headings(root: Element) -> list[str]:
    return [words(each) for each in root.iter() if tag(each) == "h2"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def put(seconds: float) -> None:
        monkeypatch.setattr(history.time, "time", lambda: seconds)

    return put


@pytest.fixture
def cache(tmp_path: Path, clock: Callable[[float], None]) -> Iterator[CacheDir]:
    """Create a cache that was filled beyond its cap, read and shrunk, all within a minute."""
    with open_cache(tmp_path / "cache", max_size="3MB") as opened:
        opened.declare("default", SCHEMA)
        (tmp_path / "listing").mkdir()
        opened.add_source(
            SourceRow(SOURCE, "s3://bucket/", {}, "i", "default", 900, 900, 0, 0, 0), tmp_path / "listing"
        )
        began = history.time.time()
        for number in range(8):
            clock(began + 2 * number)
            with opened.catalog.write() as connection:
                job, _ = draws.open_job(connection, SOURCE, holder=opened.holder.id, wanted=None, seed=None)
                held = draws.claim(connection, job, holder=opened.holder.id, most=10)
                assert held is not None
                draws.finish(connection, job, held, held.stop, samples=10, skipped=0, fetched=310_000)
                close_job(connection, job)
            put_shard(opened, 300_000 + 1000 * number, room=Room(evict=True, policy="oldest", wait=0))
        clock(began + 50)
        for number in range(3):
            with opened.snapshot(run="job", epoch=number) as snapshot:
                snapshot.served(Delivered(seconds=10.0, batches=5, waits=2, waited=1.0) if number else None)
        opened.evict(opened.usage().total - 400_000)
        yield opened


def test_the_page_has_every_section_and_needs_no_other_file(cache: CacheDir) -> None:
    text = page(figures(cache))
    root = parsed(text)

    assert headings(root) == SECTIONS
    assert {tag(each) for each in root.iter()}.isdisjoint({"script", "link", "img", "iframe", "object", "use", "image"})
    names = {name for each in root.iter() for name in each.attrib}
    assert names.isdisjoint({"src", "href", "srcset", "style", "action", "{http://www.w3.org/1999/xlink}href"})
    assert not any(name.startswith("on") for name in names)
    (style,) = (words(each) for each in root.iter() if tag(each) == "style")
    assert not re.search(r"url\(|@import|expression|https?:", style)
    assert "prefers-color-scheme: dark" in style
    policies = [each.get("content", "") for each in root.iter() if each.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    assert "http://" not in text
    assert "https://" not in text


def test_the_figures_of_the_page_are_those_of_the_cache(cache: CacheDir) -> None:
    found, stats = figures(cache), cache.stats()
    assert found.age is not None
    assert found.size is not None
    rates, gone = found.rates(), found.evictions()

    assert sum(float(values.sum()) for values in found.age.series.values()) == stats.shard_bytes
    assert found.age.series["read by an epoch"].sum() == stats.shard_bytes
    assert found.size.series["shards"].sum() == stats.shards
    passed = rates.edges[1:] - rates.edges[:-1]
    assert float((rates.series["fetched"] * passed).sum()) == pytest.approx(stats.fetched)
    totals = {row["reason"]: row["bytes"] for row in stats.evictions}
    assert {name: float(values.sum()) for name, values in gone.series.items()} == pytest.approx(totals)
    assert set(totals) == {"room", "evict"}
    text = words(parsed(page(found)))
    assert f"{stats.samples:,}samples in {stats.shards} shards" in text
    assert "80 of 900 units drawn (8.9 %) in pass 1" in text
    assert "2 waits, 1.0 s, 10.0 %" in text
    assert "waits unknown" in text


def test_no_label_is_cut_and_no_labels_overlap(cache: CacheDir) -> None:
    """Judged by the largest possible width of the words: they stay within the picture and beside each other on one
    line.
    """
    charts = [each for each in parsed(page(figures(cache))).iter() if tag(each) == "svg" and each.get("role") == "img"]
    assert len(charts) == 7
    for chart in charts:
        assert chart.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
        lines: dict[float, list[tuple[float, float]]] = {}
        for each in chart.iter():
            if tag(each) == "text":
                length, at = 7.2 * len(words(each)), float(each.get("x", 0))
                left = at - {"end": length, "middle": length / 2}.get(each.get("text-anchor", ""), 0.0)
                lines.setdefault(float(each.get("y", 0)), []).append((left, left + length))
            if tag(each) == "rect":
                sides = [float(each.get(name, "nan")) for name in ("x", "y", "width", "height")]
                assert 0 <= sides[0] <= sides[0] + sides[2] <= WIDTH
                assert 0 <= sides[1] <= sides[1] + sides[3] <= HEIGHT
            for x, y in re.findall(r"([-\d.]+),([-\d.]+)", each.get("points", "")):
                assert 0 <= float(x) <= WIDTH
                assert 0 <= float(y) <= HEIGHT
        assert len(lines) > 3
        for y, spans in lines.items():
            assert 0 < y < HEIGHT
            spans.sort()
            assert spans[0][0] >= -0.5
            assert spans[-1][1] <= WIDTH + 0.5
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), spans


def test_the_users_of_the_cache_are_named(cache: CacheDir) -> None:
    assert "No process reads or fills the cache now" in words(parsed(page(figures(cache))))
    command = [sys.executable, "-c", HOLDER, str(cache.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        shown = words(parsed(page(figures(cache))))
        child.communicate()

    assert f"(pid {child.pid}) has the cache open" in shown
    assert "Nobody" not in shown


HOLDER = """
import sys
from cachetool.cache import open_cache
with open_cache(sys.argv[1]) as cache:
    with cache.catalog.write() as connection:
        cache.holder.register(connection)
    print("open", flush=True)
    sys.stdin.read()
"""


def test_malicious_names_are_displayed_as_text(tmp_path: Path) -> None:
    """Names of datasets, sources, runs, programs, errors, and of the folder itself."""
    root = tmp_path / "<script>alert(2)<"
    (tmp_path / "listing").mkdir()
    with open_cache(root, max_size="4MB") as cache:
        cache.declare(HOSTILE, SCHEMA)
        row = SourceRow(SOURCE, f"s3://bucket/{HOSTILE}", {}, "i", HOSTILE, 9, 9, 0, 0, 0)
        cache.add_source(row, tmp_path / "listing")
        for _ in range(3):
            put_shard(cache, 100_000, dataset=HOSTILE)
        with cache.snapshot(dataset=HOSTILE, run=HOSTILE, epoch=1) as snapshot:
            snapshot.served(Delivered(1.0, 1, 1, 0.5))
        cache.evict(cache.usage().total - 1, dataset=HOSTILE)
        cache.catalog.note_error(HOSTILE, HOSTILE, dataset=HOSTILE)
        with cache.catalog.write() as connection:
            connection.execute("UPDATE holders SET what = ?", (HOSTILE,))
            connection.execute("UPDATE evictions SET reason = ?, policy = ?", (HOSTILE, HOSTILE))
        with cache.snapshot(dataset=HOSTILE), open_cache(root) as other:
            text = page(figures(other, HOSTILE))
    tree = parsed(text)

    tags = {tag(each) for each in tree.iter()}
    assert tags.isdisjoint({"script", "img"})
    assert next(words(each) for each in tree.iter() if tag(each) == "style").count("}") > 20
    assert not any(name.startswith("on") for each in tree.iter() for name in each.attrib)
    shown = words(tree)
    assert shown.count("<script>alert(1)</script>") > 8
    assert "<script>alert(2)<" in shown
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("what", ["empty", "one shard", "without a history"])
def test_an_almost_empty_cache_has_a_page_too(tmp_path: Path, what: str) -> None:
    with open_cache(tmp_path / "cache", max_size="4MB") as cache:
        _ = cache.catalog
        if what != "empty":
            cache.declare("default", SCHEMA)
            put_shard(cache, 100_000)
        if what == "without a history":
            cache.layout.history.unlink()
        root = parsed(page(figures(cache)))

    expected = [name for name in SECTIONS if name != "Newest epochs"]
    assert [name.replace("Sources", "Coverage and reuse of each source") for name in headings(root)] == expected
    assert "nan" not in words(root).lower()


def test_twenty_thousand_shards_make_a_small_page(tmp_path: Path, clock: Callable[[float], None]) -> None:
    fill(tmp_path / "cache", 20_000)
    with open_cache(tmp_path / "cache") as cache:
        with cache.catalog.write() as connection:
            clock(1e9)
            point = history.present(connection, cache.layout)
            told = {"dataset": "default", "shards": 20_000, "samples": 10**8, "bytes": 10**12, "seconds": 3000.0}
            told |= {"run": "r" * 60, "batches": 10**6, "waits": 10**5, "waited": 20.0}
            evicted = [{"room": 10**9 * number, "renewal": 10**10 * number} for number in range(240)]
            points = [{**point, "at": 1e9 + 3600 * n, "evicted": gone} for n, gone in enumerate(evicted)]
            epochs = [{**told, "ended": 1e9 + 3600 * number, "epoch": number} for number in range(200)]
            cache.layout.history.write_bytes(history._bytes(history.History(points, epochs)))
        found = figures(cache)
        text = page(found)

    assert len(text.encode()) < 1_000_000
    assert headings(parsed(text)) == SECTIONS
    assert _bars(found) < 400


def _bars(found: Figures) -> int:
    assert found.age is not None
    assert found.size is not None
    bins: list[Any] = [found.age, found.size, found.rates(), found.evictions()]
    return sum(len(each.edges) - 1 for each in bins) + len(found.history.epochs)


def test_a_clock_set_back_and_a_rebuilt_catalog_cause_no_negative_rates(
    cache: CacheDir, clock: Callable[[float], None]
) -> None:
    told = history.history_of(cache.layout)
    points = [
        {**row, "fetched": row["fetched"] * bool(number % 5), "at": row["at"] - 1e6 * (not number % 7)}
        for number, row in enumerate(told.points)
    ]
    cache.layout.history.write_bytes(history._bytes(history.History(points, told.epochs)))
    found = figures(cache)

    assert (found.rates().series["fetched"] >= 0).all()
    parsed(page(found))


def paused(opened: CacheDir, clock: Callable[[float], None], pulls: int = 3) -> list[tuple[float, float]]:
    """Run pulls of 200 s with pauses of half an hour between them. Return the begin and end of each."""
    now = history.time.time()
    spans = [(now - 2000 * (pulls - number), now - 2000 * (pulls - number) + 200) for number in range(pulls)]
    for began, ended in spans:
        for at in (began, *(began + 20 * step for step in range(1, 10)), ended):
            clock(at)
            if at not in (began, ended):
                put_shard(opened, 100_000)
            history.edged(opened.catalog, opened.layout, partial(_fetch, nbytes=100_000 * (at != began)))
    clock(now)
    return spans


def _fetch(connection: sqlite3.Connection, *, nbytes: int) -> None:
    connection.execute("UPDATE sources SET fetched = fetched + ?", (nbytes,))


@pytest.fixture
def bursts(tmp_path: Path, clock: Callable[[float], None]) -> Iterator[tuple[CacheDir, list[tuple[float, float]]]]:
    with open_cache(tmp_path / "cache", max_size="8MB") as opened:
        opened.declare("default", SCHEMA)
        (tmp_path / "listing").mkdir()
        row = SourceRow(SOURCE, "s3://bucket/", {}, "i", "default", 900, 900, 0, 0, 0)
        opened.add_source(row, tmp_path / "listing")
        yield opened, paused(opened, clock)


def test_pauses_between_pulls_are_level_lines_without_a_rate(
    bursts: tuple[CacheDir, list[tuple[float, float]]],
) -> None:
    cache, spans = bursts
    found = figures(cache)
    rates, edges = found.rates().series["fetched"], found.rates().edges

    assert rates.any()
    for left, right, rate in zip(edges, edges[1:], rates, strict=False):
        ran = any(left < ended and right > began for began, ended in spans)
        assert (rate > 0) == ran, (left, right, rate)
    (fill,) = [each for each in parsed(page(found)).iter() if tag(each) == "polyline" and each.get("class") == "line"]
    corners = [tuple(map(float, each.split(","))) for each in fill.get("points", "").split()]
    for before, after in itertools.pairwise(corners):
        assert before[0] == after[0] or before[1] == after[1], "steps: level or upright"


def test_an_eviction_after_a_pause_is_drawn_at_its_time(
    bursts: tuple[CacheDir, list[tuple[float, float]]], clock: Callable[[float], None]
) -> None:
    cache, spans = bursts
    clock(spans[-1][1] + 1500)
    cache.evict(cache.usage().total - 300_000)
    found = figures(cache).evictions()

    drawn = found.series["evict"].nonzero()[0].tolist()
    assert drawn == [len(found.edges) - 2]
