"""The advice of messages of the command line, the checks and the benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachetool.bench.measure import _conversion
from cachetool.bench.rates import advice
from tests.advice.conftest import World, follows
from tests.advice.rows import VALUES, Row, follow
from tests.cli.test_bench import BIG

ROWS = [
    Row("cli/app.py", "{}\ntry '{} --help'", "stats --nonsense", "stats --help"),
    Row(
        "sources/options.py", "--rename {} is not",
        "pull src --rename x --cache new", "pull src --rename x=volume --cache new",
    ),
    Row(
        "cli/stats.py", ", {} kept free (--min-free)",
        ("pull src --all --cache c --min-free 1kB", "stats --cache c"), "pull src --all --cache c --min-free 0B",
    ),
    Row("cli/stats.py", "cachetool verify --repair", ("$ rm -r c/shards/*", "stats --cache c"), "!"),
    Row("cli/stats.py", "--watch cannot be used with", "stats --cache c --watch --json", "stats --cache c --json"),
    Row("cli/stats.py", "the name of the file", "stats --cache c --html ''", "stats --cache c --html new.html"),
    Row("cli/stats.py", "--html - is not the name", "stats --cache c --html -", "stats --cache c --html new.html"),
    Row("cli/stats.py", "cannot write --html {}: {}", "stats --cache c --html src", "stats --cache c --html new.html"),
    Row(
        "cli/stats.py", "cannot write --html {}: it is a device",
        "stats --cache c --html /dev/null", "stats --cache c --html new.html",
    ),
    Row(
        "cli/stats.py", "{} looks at one cache",
        "stats --cache c --html new.html --on ray", "stats --cache c --html new.html",
    ),
    Row("cli/verify.py", "cachetool verify --repair", ("$ rm -r c/shards/*", "verify --cache c"), "!"),
    Row("check/doctor.py", "run: cachetool verify --repair", ("$ rm -r c/shards", "doctor --cache c"), "!"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_advice_of_a_message_works(world: World, row: Row) -> None:
    follow(world, row)


@follows("bench/measure.py", "cachetool convert --to {}{}{}")
def test_a_cache_is_converted_to_the_faster_format(world: World) -> None:
    for dataset in ("default", "of {} more"):
        world.works("pull", "src", "--all", "--cache", "x", "--dataset", dataset)
    faster_from_disk(world, cache=str(world.folder / "x"), dataset="of {} more")


@follows("bench/measure.py", "cachetool convert --to {} --out NEW")
def test_files_are_converted_to_the_faster_format(world: World) -> None:
    faster_from_disk(world, data="src")


@follows("bench/measure.py", "cachetool pull SOURCE --to {}")
def test_a_new_cache_is_filled_in_the_faster_format(world: World) -> None:
    world.environment["CACHETOOL_CACHE"] = "c"
    faster_from_disk(world)


def faster_from_disk(world: World, **options: str) -> None:
    """Follow the advice of a benchmark that found HDF5 faster than the samples' format."""
    conversion = _conversion({"cache": None, "data": None, "dataset": None, **options})
    world.note(advice(replace(BIG, cold={**BIG.cold, "hdf5": 1400}, conversion=conversion)))
    world.advised(**VALUES)


@follows("bench/rates.py", "{}, {} % of its rate")
def test_a_cap_is_lowered_so_that_epochs_stay_in_memory(world: World) -> None:
    world.note(advice(BIG))
    world.works("pull src --all --cache c --max-size 40MB")
