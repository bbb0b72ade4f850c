"""``stats --html`` and ``stats --watch`` on the command line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from cachetool.api import open_cache
from cachetool.cache.history import Delivered
from cachetool.cache.stats import newest_pass
from cachetool.cli.watch import Rates, look, one_line, rendered

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def test_stats_html_writes_one_page_and_reports_its_path(here: Run, filled: Path, tmp_path: Path) -> None:
    ran = here("stats", "--html", "report.html")

    assert (ran.code, ran.stdout) == (0, "wrote report.html\n")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "30" in text
    again = here("stats", "--html", "report.html", "--json", "--dataset", "default")
    assert again.document["samples"] == 30
    assert again.document["html"] == "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "report.html"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--html nowhere/report.html", "'nowhere/report.html'"),
        ("--html cache", "'cache'"),
        ("--html .", "'.'"),
        ("--html ..", "'..'"),
        (f"--html {'x' * 300}", "File name too long"),
        ("--html cache/report.html", "outside of the cache"),
        ("--html -", "name one"),
        ("--watch --json", "--json"),
        ("--watch --html x.html", "--html"),
        ("--html x.html --dataset other", "'other'"),
    ],
)
def test_impossible_options_are_refused_and_leave_no_file(
    here: Run, filled: Path, tmp_path: Path, line: str, says: str
) -> None:
    ran = here("stats", *line.split())

    assert ran.code == 2
    assert says in ran.error
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("there", [False, True])
def test_the_page_is_written_to_the_target_of_a_link(here: Run, filled: Path, tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    if there:
        (folder / "target.html").write_text("old")
    (tmp_path / "link").symlink_to("pages/target.html")

    assert here("stats", "--html", "link").code == 0

    assert (tmp_path / "link").is_symlink()
    assert (folder / "target.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in folder.iterdir()] == ["target.html"]


def test_writing_a_page_again_keeps_its_permissions(here: Run, filled: Path, tmp_path: Path) -> None:
    (page := tmp_path / "page.html").touch(mode=0o600)
    assert here("stats", "--html", "page.html").code == 0
    assert page.stat().st_mode & 0o777 == 0o600
    assert page.stat().st_size


def test_a_link_into_the_cache_is_refused_as_a_page(here: Run, filled: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(filled / "catalog.sqlite3")

    ran = here("stats", "--html", "link")

    assert (ran.code, "outside of the cache" in ran.error) == (2, True)
    assert here("stats").code == 0


def test_only_a_regular_file_is_replaced_by_the_page(here: Run, filled: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")

    for name in ("pipe", "link"):
        ran = here("stats", "--html", name)
        assert (ran.code, f"'{name}': it is a device, a pipe" in ran.error) == (2, True), ran

    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "link", "pipe"]


def test_an_empty_file_name_for_the_page_is_refused(here: Run, filled: Path) -> None:
    assert here("stats", "--html", "").code == 2


@pytest.fixture
def trained(filled: Path) -> Path:
    """Return the cache after two epochs and an eviction, with names longer than the width of any terminal."""
    with open_cache(filled) as cache:
        for number in range(2):
            with cache.snapshot(run="r" * 200, epoch=number) as snapshot:
                snapshot.served(Delivered(12.0, 1234, 56, 0.7))
        cache.evict(cache.usage().total - 1)
        cache.catalog.note_error("s3://bucket/", "Unreachable: " + "x" * 300, dataset="default")
        with cache.catalog.write() as connection:
            connection.execute("UPDATE sources SET url = ?", (f"s3://bucket/{'long/' * 60}",))
    return filled


@pytest.mark.parametrize("width", [80, 120])
def test_a_watch_screen_fits_the_terminal_and_cuts_no_figure(trained: Path, width: int) -> None:
    with open_cache(trained) as cache, cache.snapshot():
        found = look(cache, None)
    rates = Rates()
    rates.add({**found, "fetched": 0}, 100.0)
    rates.add(found, 110.0)
    console = Console(width=width, height=60, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(rendered(found, rates, width))
    lines = console.export_text().splitlines()

    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for figure in (
        "of 8.0 MB (",
        "20 samples in 2 shards",
        "of disk free",
        "50.0 %",
        "1234",
        "12 s",
        "56 x, 0.7 s (6 %)",
        "kB/s",
    ):
        assert figure in text, text
    assert f"pid {os.getpid()}" in text
    assert "\n".join(lines).count("…") >= 2, "only what is too long gives way"


def test_only_the_widest_column_of_a_watch_screen_is_shortened(trained: Path) -> None:
    with open_cache(trained) as cache, cache.snapshot():
        found = dict(look(cache, None))
    found["leases"] = [{**found["leases"][0], "what": f"python {'long ' * 40}", "dataset": "faces", "version": 321}]
    console = Console(width=80, height=60, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(rendered(found, Rates(), 80))
    lines = console.export_text().splitlines()
    (reader,) = (line for line in lines if line.startswith(f"pid {os.getpid()}  python long"))
    assert reader.split()[-2:] == ["faces", "321"]
    (head,) = (line for line in lines if line.startswith("reader"))
    assert head.split() == ["reader", "program", "dataset", "version"]
    (head,) = (line for line in lines if line.startswith("dataset  format"))
    assert len(head.rstrip()) < 60, "what fits stays together"


def test_stats_fit_a_terminal_of_80_columns(trained: Path) -> None:
    """Long names are wrapped, numbers are not."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "cachetool", "stats", "--cache", str(trained)]
    process = subprocess.Popen(command, stdin=follower, stdout=follower)
    os.close(follower)
    seen = b""
    while chunk := _read(leader):
        seen += chunk
    os.close(leader)
    assert process.wait(60) == 0

    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).splitlines()
    # paths and commands that users copy stay on one line
    lines = [line for line in lines if not line.startswith(("cache ", "last error"))]
    assert max(map(len, lines)) <= 80, lines
    assert "20 samples in 2 shards" in lines
    assert any(line.startswith("1 shard evicted so far, ") for line in lines)
    assert any(re.search(r" 30 +60 +50\.0 % +0 +1 +0$", line) for line in lines), lines


def test_a_pass_without_draws_shows_the_previous_pass(trained: Path) -> None:
    with open_cache(trained) as cache:
        found = look(cache, None)
    (source,) = found["sources"]
    assert newest_pass(source) == (30, 0.5, 1)
    assert newest_pass({**source, "drawn": 0, "coverage": 0.0}) == (0, 0.0, 1)
    assert newest_pass({**source, "drawn": 0, "coverage": 0.0, "pass": 3}) == (60, 1.0, 2)
    assert newest_pass({**source, "drawn": 6, "coverage": 0.1, "pass": 3}) == (6, 0.1, 3)


def test_rates_count_samples_like_all_other_figures(trained: Path) -> None:
    """The rule also holds while as many samples are evicted as are added."""
    with open_cache(trained) as cache:
        found = look(cache, None)
    rates = Rates()
    rates.add(found, 0.0)
    (gone,) = found["evictions"]
    rates.add({**found, "evictions": [{**gone, "samples": gone["samples"] + 50}]}, 10.0)

    assert rates.samples == 5.0


def test_rates_are_averages_over_half_a_minute(trained: Path) -> None:
    with open_cache(trained) as cache:
        found = look(cache, None)
    rates = Rates()
    for second in range(100):
        rates.add({**found, "fetched": 1000 * second}, float(second))
        assert rates.fetched == pytest.approx(1000 if second else 0)
    for second in range(100, 140):
        rates.add({**found, "fetched": 100_000}, float(second))
    assert rates.fetched == 0
    assert "pulling 0 B/s" in one_line(found, rates)


def watching(cache: Path, **streams: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cachetool", "stats", "--watch", "--cache", str(cache)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **streams)


def test_watch_without_a_terminal_prints_lines_until_it_is_interrupted(trained: Path) -> None:
    with watching(trained, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)

    assert (process.returncode, errors) == (0, b"")
    for line in (*lines, *rest.splitlines()):
        assert re.match(rb"\d\d:\d\d:\d\d, .* of 8.0 MB used \(\d+ %\), 20 samples in 2 shards, ", line)


def test_watch_on_a_terminal_is_live_and_restores_the_terminal(trained: Path) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = watching(trained, stdin=follower, stdout=follower)
    os.close(follower)
    seen = b""
    while seen.count(b"fill") < 2:  # two screens
        seen += os.read(leader, 65536)
    process.send_signal(signal.SIGINT)
    while chunk := _read(leader):
        seen += chunk
    assert process.wait(60) == 0
    os.close(leader)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()

    assert seen.index(b"\x1b[?1049h") < seen.index(b"\x1b[?1049l"), "the screen before is there again"
    assert seen.index(b"\x1b[?25l") < seen.index(b"\x1b[?25h"), "and so is the cursor"
    assert b"20 samples in 2 shards" in seen.rpartition(b"\x1b[?1049l")[2], "the last look stays"


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other end is closed
        return b""
