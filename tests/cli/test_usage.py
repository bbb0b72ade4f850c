"""Invalid command lines: exit code 2 and at most two lines, one of which says where to read more."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from cachetool.cli.app import program

if TYPE_CHECKING:
    from tests.cli.conftest import Run

COMMANDS = ("pull", "convert", "evict", "stats", "ls", "show", "verify", "doctor", "bench", "demo")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("pul", "No such command 'pul'. Did you mean 'pull'?"),
        ("--bad", "No such option: --bad"),
        ("pull", "Missing argument 'SOURCE'"),
        ("pull a b", "unexpected extra argument"),
        ("pull a --nope", "No such option: --nope"),
        ("pull a --samples many", "'--samples'"),
        ("pull a --samples many", "got 'many'"),
        ("evict", "Missing option '--max-size'"),
        ("evict --max-size", "'--max-size' requires an argument"),
        ("convert", "Missing option '--to'"),
        ("show", "Missing argument 'SHARD[:INDEX]'"),
    ],
)
def test_an_invalid_command_line_prints_two_lines_with_the_help_to_read(here: Run, line: str, says: str) -> None:
    ran = here(*line.split())

    assert ran.code == 2
    assert says in ran.error
    assert re.search(r"try 'cachetool.* --help'$", ran.error)
    assert ran.stdout == ""


@pytest.mark.parametrize("line", ["convert --to", "evict --nope", "pull"])
def test_the_advised_help_is_that_of_the_intended_command(here: Run, line: str) -> None:
    assert here(*line.split()).error.endswith(f"try 'cachetool {line.split()[0]} --help'")


@pytest.mark.parametrize(
    "line", ["pul --json", "pull a --nope --json", "evict --json", "pull a --samples -1 --json", "ls --json"]
)
def test_with_json_an_error_is_also_the_one_document_on_stdout(here: Run, line: str) -> None:
    ran = here(*line.split())

    assert ran.code == 2
    assert ran.document.keys() == {"error", "message", "exit_code"}
    assert (ran.document["error"], ran.document["exit_code"]) == ("UsageError", 2)
    assert ran.document["message"].splitlines()[0] in ran.error


def test_a_process_prints_two_lines_and_ends_with_the_exit_code(run: Run) -> None:
    ran = run("pul")

    assert ran.code == 2
    assert "Did you mean 'pull'?" in ran.error


def test_json_after_two_dashes_is_an_argument(here: Run) -> None:
    ran = here("pull", "--samples", "0", "--", "--json")

    assert ran.code == 2
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("pull a --samples -1", "-1"),
        ("pull a --samples 0", "0"),
        ("pull a --samples 3 --all", "--all"),
        ("pull a --all --follow", "--follow"),
        ("pull a --to parquet", "'parquet'"),
        ("pull a --policy newest", "'newest'"),
        ("pull a --max-size huge", "'huge'"),
        ("pull a --shard-size -5", "'-5'"),
        ("pull a --shard-size 0", "--shard-size"),
        ("pull a --on-error explode", "'explode'"),
        ("pull a --rename npy", "'npy'"),
        ("pull a --rename =x", "'=x'"),
        ("pull a --wait soon", "'soon'"),
        ("pull a --decode sound", "'sound'"),
        ("pull a --dataset=", "''"),
    ],
)
def test_an_invalid_value_is_quoted_and_creates_no_cache(here: Run, tmp_path: Path, line: str, says: str) -> None:
    ran = here(*line.split())

    assert ran.code == 2
    assert says in ran.error
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", ["pull a", "stats", "evict --max-size 1GB", "ls", "verify", "doctor", "show x"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "the name of the cache folder is empty"),
        (" ", "the name of the cache folder is empty"),
        ("link", "is a link to elsewhere/gone, which does not exist"),
        ("file", "is a file"),
        ("file/below", "lies below a file"),
    ],
)
def test_a_folder_that_is_no_cache_is_named_in_one_line(
    here: Run, tmp_path: Path, command: str, place: str, says: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("elsewhere/gone")
    before = sorted(path.name for path in tmp_path.iterdir())
    ran = here(*command.split(), "--cache", place)

    assert ran.code == 2, ran.stderr
    assert says in ran.error
    assert len(ran.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("options", [[], ["--max-size", "8MB"]])
def test_a_folder_that_cannot_hold_files_is_refused_before_the_source_is_listed(
    here: Run, remote: Path, options: list[str]
) -> None:
    ran = here("pull", remote, "--cache", "/proc/cachetool", *options)

    assert (ran.code, "/proc cannot hold files" in ran.error) == (2, True)


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(here: Run) -> None:
    ran = here()

    assert ran.code == 2
    assert "Usage: cachetool" in ran.stdout
    assert ran.stderr == ""


def test_the_help_lists_every_command_in_one_line_each(here: Run) -> None:
    ran = here("--help")

    assert ran.code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z][^\n]*[a-z.]$", ran.stdout, flags=re.MULTILINE), command
    assert "..." not in ran.stdout.replace("[ARGS]...", "")
    assert "Exit codes: 0 done, 2 usage" in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_and_fits_80_columns(here: Run, command: str) -> None:
    ran = here(command, "--help")

    assert ran.code == 0
    assert len(re.findall(rf"^    cachetool {command}\b", ran.stdout, flags=re.MULTILINE)) >= 2
    assert max(map(len, ran.stdout.splitlines())) <= 80
    for option in ("--json", "--quiet", "--help"):
        assert option in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_help_page_parse(here: Run, command: str) -> None:
    page = typer.main.get_command(program()).commands[command]  # type: ignore[attr-defined]
    for line in re.findall(rf"^    cachetool {command}\b(.*)$", here(command, "--help").stdout, flags=re.MULTILINE):
        assert page.make_context(command, shlex.split(line)).params


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"demo"}))
def test_every_command_on_a_cache_has_the_cache_option(here: Run, command: str) -> None:
    assert re.search(r"--cache DIR", here(command, "--help").stdout)


def test_the_version_is_printed(here: Run) -> None:
    import cachetool

    assert here("--version").stdout == f"cachetool {cachetool.__version__}\n"


def test_windows_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cachetool.cli.app import run as run_here

    monkeypatch.setattr("sys.platform", "win32")

    assert run_here(["ls"]) == 2
    assert capsys.readouterr().err == "error: cachetool runs on Linux and macOS; on Windows use it inside WSL\n"


def test_the_shell_completes_formats_and_commands(run: Run) -> None:
    def complete(words: str) -> str:
        count = str(len(words.split()) - (0 if words.endswith(" ") else 1))
        return run(env={"_CACHETOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}).stdout

    assert {"pull", "convert", "show"} <= set(complete("cachetool ").split())
    assert complete("cachetool convert --to h").split() == ["hdf5"]
    assert complete("cachetool evict --policy m").split() == ["most-used"]
