"""An option is declared once, and means the same on the command line, in Python, and to a child process."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import cachetool
from cachetool.cli.options import command
from cachetool.conversion.options import ConvertCall
from cachetool.core.errors import UsageError
from cachetool.core.options import Option, Options, declared, takes
from cachetool.core.units import parse_count
from cachetool.pull.options import DrawOptions, PullCall, PullOptions

DOCS = Path(__file__).parents[2] / "docs"
GIVEN: dict[str, tuple[list[str], Any]] = {
    "fields": (["--fields", "a,b", "--fields", "c"], ["a", "b", "c"]),
    "rename": (["--rename", "x=a", "--rename", "y=b"], {"x": "a", "y": "b"}),
    "stem": (["--stem", "last"], "last"),
    "decode": (["--decode", "image"], "image"),
    "resize": (["--resize", "224x320", "--decode", "image"], (224, 320)),
    "label_from_folder": (["--label-from-folder", "int"], "int"),
    "read_as": (["--read-as", "tar"], "tar"),
    "include": (["--include", "*.jpg", "--include", "a/**"], ["*.jpg", "a/**"]),
    "exclude": (["--exclude", "*.txt"], "*.txt"),
    "key": (["--no-key"], False),
    "value_format": (["--value-format", "npy"], "npy"),
    "rows": (["--rows", "12"], 12),
    "block": (["--block", "0=4,1=2"], {"0": 4, "1": 2}),
    "edges": (["--edges", "drop", "--block", "0=4"], "drop"),
    "level": (["--level", "1", "--block", "0=4"], 1),
    "runs": (["--runs", "32"], 32),
    "follow_links": (["--follow-links"], True),
    "concurrency": (["--concurrency", "7"], 7),
    "list_workers": (["--list-workers", "4"], 4),
    "to": (["--to", "zarr"], "zarr"),
    "policy": (["--policy", "lru"], "lru"),
    "dataset": (["--dataset", "d"], "d"),
    "seed": (["--seed", "3"], 3),
    "order": (["--order", "sequential"], "sequential"),
    "refresh": (["--refresh"], True),
    "start_early": (["--start-early"], True),
    "workers": (["--workers", "5"], 5),
    "max_rate": (["--max-rate", "2MB/s"], 2_000_000),
    "shard_size": (["--shard-size", "1MiB"], 2**20),
    "first_shard_after": (["--first-shard-after", "2min"], 120),
    "min_epochs": (["--min-epochs", "2"], 2),
    "on_error": (["--on-error", "skip"], "skip"),
    "renew": (["--renew", "25%"], 0.25),
    "share": (["--share", "30%"], 0.3),
    "part": (["--part", "1,2/4"], "1,2/4"),
    "parts": (["--parts", "8", "--part", "0/4"], 8),
    "listing": (["--listing", "/x"], "/x"),
    "repart": (["--repart", "--part", "0/4"], True),
    "samples": (["--samples", "9"], 9),
    "all": (["--all"], True),
    "follow": (["--follow"], True),
    "wait": (["--wait", "3s"], 3.0),
    "on": (["--on", "ray"], "ray"),
    "address": (["--address", "h:1"], "h:1"),
    "placement": (["--placement", "replicate"], "replicate"),
    "out": (["--out", "/x"], Path("/x")),
    "compression": (["--compression", "zstd", "--to", "zarr"], "zstd"),
    "verify": (["--verify"], True),
}


def parsed(options: type[Options], words: list[str]) -> Any:
    """The options that the command line ``words`` stands for."""
    heard: list[Any] = []

    def run(options: Any) -> None:
        heard.append(options)

    run.__annotations__["options"] = options
    app = typer.Typer()
    app.command()(command(run))
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert heard, result.output
    return heard[0]


def names(options: type[Options]) -> list[str]:
    return [name for name, one in declared(options).items() if one.option.command_line]


@pytest.mark.parametrize(
    ("options", "name"),
    [(options, name) for options in (PullCall, ConvertCall) for name in names(options)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_option_means_the_same_on_the_command_line_in_python_and_as_json(options: Any, name: str) -> None:
    words, value = GIVEN[name]
    if options is ConvertCall and "--to" not in words:
        words = [*words, "--to", "hdf5"]
    more = {"to": words[words.index("--to") + 1]} if "--to" in words else {}
    more |= {"decode": "image"} if name == "resize" else {}
    more |= {"part": "0/4"} if name in ("parts", "repart") else {}
    more |= {"block": {"0": 4}} if name in ("edges", "level") else {}

    asked = options.of({**more, name: value})

    assert parsed(options, words) == asked
    assert getattr(asked, name) != declared(options)[name].default, "a value that shows that it was taken"
    assert options.from_json(json.loads(json.dumps(asked.to_json()))) == asked


def test_what_is_not_given_is_the_same_default_in_all_worlds() -> None:
    assert parsed(PullCall, []) == PullCall.of({}) == PullCall.from_json(json.loads(json.dumps(PullCall().to_json())))


def test_an_option_that_is_added_reaches_all_worlds_from_its_declaration() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(PullCall):
        depth: Annotated[int, Option("How deep.", "N", parse_count)] = 3

    @takes(More)
    def call(source: str, options: More) -> More:
        """Do it."""
        return options

    assert parsed(More, ["--depth", "8"]).depth == call("x", depth=8).depth == 8
    assert inspect.signature(call).parameters["depth"].default == 3
    assert "    depth: How deep." in str(call.__doc__)
    assert More.from_json(json.loads(json.dumps(More(depth=8).to_json()))).depth == 8
    with pytest.raises(UsageError, match="--depth -1 cannot be used; it must be 0 or more"):
        call("x", depth=-1)
    with pytest.raises(UsageError, match="--depth -1 cannot be used; it must be 0 or more"):
        parsed(More, ["--depth", "-1"])


def test_a_part_has_the_options_of_its_class_alone() -> None:
    asked = PullCall(samples=3, on="ray", fields=["a"])

    assert asked.only(PullOptions) == PullOptions(samples=3, fields=["a"])
    assert asked.source == replace(DrawOptions(fields=["a"]).source)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sampels": 3}, "unknown option 'sampels'; do you mean samples="),
        ({"max_size": 3}, "max_size= cannot be used here; set the cap on the cache"),
        ({"dry_run": True}, "dry_run= cannot be used here; it is an option of the command line only"),
        ({"reopened": True}, "unknown option 'reopened'"),
        ({"xyzzy": 3}, "unknown option 'xyzzy'; choose one of samples, all, follow"),
    ],
)
def test_a_name_that_is_no_option_is_refused_with_what_is_meant(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with cachetool.open_cache(tmp_path / "c", max_size="20MB") as cache, pytest.raises(UsageError, match=says):
        cache.pull(tmp_path, **given)


def test_a_background_pull_refuses_an_end(tmp_path: Path) -> None:
    with cachetool.open_cache(tmp_path / "c", max_size="20MB") as cache:
        for name, value in (("samples", 3), ("all", True), ("follow", True), ("wait", 3)):
            with pytest.raises(UsageError, match=f"{name}= cannot be used here; use cache.pull"):
                cachetool.BackgroundPull(cache, str(tmp_path), **{name: value})


def test_type_checkers_see_the_options(tmp_path: Path) -> None:
    """Names, types and defaults, as written in the declaration."""
    program = tmp_path / "program.py"
    program.write_text(
        "import cachetool\n"
        "def use(cache: cachetool.Cache) -> None:\n"
        "    cache.pull('x', samples=3, to='hdf5', fields=['a'], all=False)\n"
        "    cachetool.BackgroundPull(cache, 'x', renew='10%')\n"
        "    cache.convert(to='lmdb')\n"
        "    cachetool.convert('x', to='lmdb', out='y')\n"
        "    cache.pull('x', sampels=3)\n"
        "    cache.pull('x', samples='three')\n"
        "    cache.convert()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "m"), str(program)],
        capture_output=True, text=True, check=False, cwd=DOCS.parent,
    )  # fmt: skip
    wrong = [line.partition(": error: ")[0].rpartition(":")[2] for line in done.stdout.splitlines() if "error:" in line]

    assert wrong == ["7", "8", "9"], done.stdout
