"""Names from strangers in the output of commands: no name forges a line or moves the cursor, and JSON stays valid."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cachetool.cache import SourceRow, open_cache
from cachetool.core.errors import BadObject, CacheToolError, UsageError, from_json, to_json
from cachetool.core.names import Id
from cachetool.loaders.snapshots.waiting import say
from tests.cache.conftest import SCHEMA, put_shard

if TYPE_CHECKING:
    from tests.cli.conftest import Run

HOSTILE = [
    "\x1b[2J\x1b[1;1Hcleared", "\x1b]0;title\x07", "\x9b31m", "a\rerror: forged", "a\nerror: forged\nb",
    "a\x0berror: b", "a\u2028error: forged\u2029b", "a\x85b", "\u202etxt.exe", "\u2066\u200b\u200f",
    "[bold red]x[/bold red]", "[link=http://x]y", "%s%n%x", "{0.__class__}", "${HOME}`id`",
    "\"'></script><script>alert(1)</script>", "\x7f\x08\x08", "\ufeff\U000e0001",
]  # fmt: skip


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache whose datasets, sources, holders, errors and reasons have these names."""
    tmp_path = tmp_path_factory.mktemp("named")
    root = tmp_path / "cache"
    with open_cache(root, max_size="8MB") as cache:
        for number, name in enumerate(HOSTILE):
            cache.declare(name, SCHEMA)
            (listing := tmp_path / f"listing{number}").mkdir()
            cache.add_source(SourceRow(Id(f"{number:016x}"), f"s3://b/{name}", {}, name, name, 9, 9, 0, 0, 0), listing)
            put_shard(cache, 20_000, dataset=name)
            cache.catalog.note_error(name, name, dataset=name)
        with cache.catalog.write() as connection:
            connection.execute("UPDATE holders SET what = ?, host = ?", (HOSTILE[0], HOSTILE[4]))
            connection.execute("UPDATE shards SET format = ?", (HOSTILE[4],))
    return root


def harmless(text: str) -> bool:
    """Return True if a terminal only displays the text: no control or format characters, no line separators except
    newlines.
    """
    return all(char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in text)


@pytest.mark.parametrize(
    "line", ["stats", "ls", "doctor", "evict --max-size 1MB --dry-run", "stats --dataset none", "show x"]
)
def test_a_terminal_displays_hostile_names_without_executing_them(here: Run, named: Path, line: str) -> None:
    ran = here(*line.split(), "--cache", str(named))

    assert harmless(ran.stdout + ran.stderr), ran
    assert not [text for text in (ran.stdout + ran.stderr).splitlines() if text.startswith("error: forged")]
    if line in ("stats", "ls"):
        assert "\\x1b[2J" in ran.stdout  # displayed as an escape
        assert "[bold red]x[/bold red]" in ran.stdout.replace("\n", "")  # displayed as text, not as markup


@pytest.mark.parametrize("line", ["stats", "ls", "evict --max-size 1MB --dry-run", "stats --dataset none"])
def test_json_is_one_ascii_document_that_preserves_the_names(here: Run, named: Path, line: str) -> None:
    ran = here(*line.split(), "--json", "--cache", str(named))
    found = json.loads(ran.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    assert ran.stdout.isascii()
    if line == "stats":
        assert {row["name"] for row in found["datasets"]} == set(HOSTILE)


def test_numbers_that_json_cannot_represent_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    from cachetool.cli.output import Output

    value = {"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}], "d": 1.5, "e": "\ud800"}
    Output(as_json=True, quiet=False).document(value)
    text = capsys.readouterr().out

    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, {"c": None}],
        "d": 1.5,
        "e": "\ud800",
    }
    assert text.encode("utf-8", "strict").isascii()


@pytest.mark.parametrize("name", HOSTILE)
def test_an_error_message_cannot_control_a_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule also holds in a traceback, a log, a notebook, across processes, and in the line that a waiting loader
    prints.
    """
    told = str(BadObject(f"object {name!r}: {name}\nleave it out"))
    say(name)

    assert harmless(told)
    assert harmless(capsys.readouterr().err)
    assert str(from_json(to_json(BadObject(told)))) == told
    assert told.endswith("\nleave it out")


def test_a_long_message_is_shortened_but_keeps_its_advice() -> None:
    told = str(UsageError(f"no field 'x'; there is {', '.join(map(str, range(20_000)))}; name one with --fields"))

    assert len(told) < 2100
    assert told.startswith("no field 'x'; there is 0, 1, ")
    assert told.endswith("; name one with --fields")
    assert str(CacheToolError()) == ""


def test_keys_of_a_source_are_quoted_in_the_output_of_a_pull(here: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        np.save(source / f"{number}.npy", np.zeros(2))
    (source / "a\nerror: forged \x1b[2J.npy").write_bytes(b"no array")
    ran = here("pull", str(source), "--max-size", "8MB", "--workers", "1")
    assert harmless(ran.stdout + ran.stderr)
    assert ran.code == 3
    assert [line[:7] for line in ran.stderr.splitlines() if line.startswith("error")] == ["error: "]
    ran = here("pull", str(source), "--on-error", "skip", "--workers", "1")

    assert ran.code == 0, ran.stderr
    assert harmless(ran.stdout + ran.stderr)
    assert "a\\nerror: forged \\x1b[2J.npy" in ran.stdout
