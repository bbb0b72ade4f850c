"""The output of the command line on each stream, for all kinds of connected files and terminals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.cli.output import Lines, Output, describe, fail, plain, wants_json
from cachetool.core.progress import Progress

if TYPE_CHECKING:
    from tests.cli.conftest import Run


@given(st.text())
def test_displayed_text_cannot_move_the_cursor(text: str) -> None:
    shown = plain(text)

    assert shown.isprintable()
    shown.encode("utf-8")  # no lone surrogate is left
    if text.isprintable():
        assert shown == text


def test_control_characters_are_shown_as_escapes() -> None:
    assert plain("a\x1b[31mb\n\udcff\u202e") == r"a\x1b[31mb\n\udcff\u202e"


def test_a_table_on_a_pipe_cuts_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    key = "k" * 300
    Output(as_json=False, quiet=False).table(["key", ">n"], [(key, 1), ("[red]x[/red]\x1b[2J", 22)])
    lines = capsys.readouterr().out.splitlines()

    assert any(line.split() == [key, "1"] for line in lines)
    assert any(line.split() == [r"[red]x[/red]\x1b[2J", "22"] for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_an_error_has_at_most_two_lines_however_long_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("SourceError", "first\n\nsecond\x1b[0m\nthird\n", 3, as_json=True) == 3
    captured = capsys.readouterr()

    assert captured.err == "error: first\nsecond\\x1b[0m third\n"
    assert json.loads(captured.out) == {
        "error": "SourceError",
        "message": "first\nsecond\\x1b[0m\nthird",
        "exit_code": 3,
    }


def test_an_error_without_a_message_prints_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    fail("CatalogError", "", 6, as_json=False)

    assert capsys.readouterr().err == "error: CatalogError\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [(["ls", "--json"], True), (["ls"], False), (["pull", "--", "--json"], False), (["--json", "--", "x"], True)],
)
def test_json_is_recognised_before_the_line_is_parsed(args: list[str], expected: bool) -> None:
    assert wants_json(args) is expected


def test_quiet_keeps_results_and_drops_notes(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=False, quiet=True)
    out.note("talk")
    out.line("result")
    captured = capsys.readouterr()

    assert (captured.out, captured.err) == ("result\n", "")


@pytest.mark.parametrize(
    ("step", "seconds", "expected"),
    [
        (Progress("list", 20000), 0.5, "listing: 20000 objects"),
        (Progress("pull", 120, 500, 7_900_000), 0.1, "pulling: 120 of 500 samples, 7.9 MB"),
        (Progress("pull", 100, 500, 8_000_000), 4.0, "pulling: 100 of 500 samples, 8.0 MB, 2.0 MB/s, 16 s left"),
        (
            Progress("pull", 9, None, 800, "note", flying=32, retries=1, used=450, cap=1000, evicted=2, shards=3),
            0.1,
            "pulling: 9 samples, 800 B, 32 in flight, 1 retry, cache 45 %, 2 shards evicted, 3 shards, note",
        ),
        (
            Progress("pull", 9, None, 800, retries=2, used=1000, cap=1000),
            0.1,
            "pulling: 9 samples, 800 B, 2 retries, cache 100 %",
        ),
        (Progress("convert", 5, 5, 8_000_000, "note"), 4.0, "converting: 5 of 5 samples, 8.0 MB, 2.0 MB/s, note"),
    ],
)
def test_progress_is_one_line_with_counts_rate_and_remaining_time(
    step: Progress, seconds: float, expected: str
) -> None:
    assert describe(step, seconds) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (200, "100 of 500 samples, 8.0 MB, 2.0 MB/s, 16 s left, 32 in flight, cache 45 %, 1 shard evicted, 3 shards"),
        (90, "100 of 500 samples, 8.0 MB, 2.0 MB/s, 16 s left, cache 45 %, 1 shard evicted"),
        (64, "100 of 500 samples, 2.0 MB/s, 16 s left, cache 45 %"),
        (50, "100 of 500 samples, 2.0 MB/s, 16 s left"),
        (10, "100 of 500 samples"),
    ],
)
def test_a_narrow_terminal_drops_the_least_important_parts_first(width: int, expected: str) -> None:
    step = Progress("pull", 100, 500, 8_000_000, flying=32, used=450, cap=1000, evicted=1, shards=3)

    assert describe(step, 4.0, width) == f"pulling: {expected}"


def test_a_bar_on_a_terminal_of_80_columns_is_one_whole_line() -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code = (
        "from cachetool.cli.output import Bars\n"
        "from cachetool.core.progress import Progress\n"
        "with Bars() as report:\n"
        "    for done in range(1, 40):\n"
        "        report(Progress('pull', 10000 * done, 400000, 10**9 * done, flying=32, used=done, cap=40, shards=9))\n"
        "    report(Progress('pull', 400000, 400000, 10**12, flying=32, used=40, cap=40, evicted=11, shards=999))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(leader, 65536):
            seen += chunk
    os.close(leader)
    assert process.wait(60) == 0

    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", seen.decode())]
    lines = [line for line in lines if "pulling" in line]
    assert any("400000 of 400000 samples" in line and "cache 100 %" in line for line in lines), lines
    assert all(len(line) <= 80 and "…" not in line for line in lines), lines


def test_progress_lines_without_a_terminal_are_limited_in_frequency() -> None:
    told: list[str] = []
    with Lines(told.append, every=3600.0) as report:
        for done in range(1000):
            report(Progress("pull", done, 1000))
    assert told == []
    with Lines(told.append, every=0.0) as report:
        report(Progress("pull", 1, 2))
    assert told == ["pulling: 1 of 2 samples"]


def start(*args: str, stdout: int, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Start a command with its stdout connected to the descriptor ``stdout``."""
    return subprocess.run(
        [sys.executable, "-m", "cachetool", *args], stdout=stdout, stderr=stderr, text=True, timeout=60, check=False
    )


def test_a_closed_pipe_ends_the_command_quietly(filled: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = start("ls", "--cache", str(filled), stdout=writer)
    finally:
        os.close(writer)

    assert ran.returncode == 141
    assert ran.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("form", [["--json"], []])
def test_output_that_cannot_be_written_is_an_error_without_a_traceback(filled: Path, form: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ran = start("ls", "--cache", str(filled), *form, stdout=full.fileno())

    assert ran.returncode == 4
    assert ran.stderr == "error: cannot write the result to stdout: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_written_as_json_keeps_its_line_and_code(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = start("ls", "--cache", str(tmp_path / "none"), "--json", stdout=full.fileno())

    assert ran.returncode == 2
    assert ran.stderr.startswith("error: there is no cache at ")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_streams_do_not_disturb_a_command(filled: Path, closed: str) -> None:
    ran = subprocess.run(
        ["sh", "-c", f'"$0" -m cachetool ls --cache "$1" {closed}', sys.executable, str(filled)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0
    assert ran.stderr == ""


def test_a_command_in_a_deleted_folder_reports_that(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    ran = subprocess.run(
        ["sh", "-c", 'rmdir ../gone; "$0" -m cachetool ls --cache c', sys.executable],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 2
    assert ran.stderr == (
        "error: the current folder was removed, so relative paths lead nowhere; change to another folder\n"
    )


def test_text_that_the_terminal_cannot_show_is_escaped(run: Run, remote: Path) -> None:
    ran = run(
        "pull", remote, "--dataset", "größe", "--samples", "2", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    )

    assert ran.code == 0, ran.stderr
    assert r"gr\xf6\xdfe" in ran.stdout


def test_an_internal_error_is_one_line_with_the_way_to_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cachetool import api
    from cachetool.cli.app import run as run_here

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("some\nthing")

    monkeypatch.setattr(api, "open_cache", broken)

    assert run_here(["ls", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "error: RuntimeError: some thing\nthis is a bug in cachetool; CACHETOOL_DEBUG=1 shows where it happened\n"
    )
    assert json.loads(captured.out)["exit_code"] == 1
    monkeypatch.setenv("CACHETOOL_DEBUG", "1")
    assert run_here(["ls"]) == 1
    assert "in broken" in capsys.readouterr().err
