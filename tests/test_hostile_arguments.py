"""Hostile values for every public argument, every command line option and every field of a saved state: the call works,
or fails with one or two lines. No traceback, no hang, no internal error.

The arguments come from the signatures, the options from the commands, the fields from real states, so later additions
are tested too. The default run tries every value for some arguments and some values for all; ``-m soak`` tries all.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import cachetool
from cachetool.api import find_shard, read_sample
from cachetool.cache import CacheDir
from cachetool.cli.app import program
from cachetool.conversion.options import ConvertOptions
from cachetool.core.errors import CacheToolError
from cachetool.loaders.numpy import Loader
from cachetool.pull.options import PullOptions
from cachetool.sources.options import SourceOptions
from tests.cli.conftest import Run, here
from tests.loaders.numbered import put

__all__ = ["here"]

SECONDS = 60
"""A limit that ends a hang; an answer takes milliseconds."""
HUGE = "9" * 5000

PLAIN: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 10**5000, 1.5, -0.0,
    math.nan, math.inf, -math.inf, 1e300, "", " ", "x", "-1", "1e999", "nan", "inf", HUGE, "1" * 30 + "GB", "\0",
    "a\0b", "\ud800", "x\udcff", "\u202e\x1b[2J\n[bold]", "../../x", "/dev/zero", "/dev/null", "a" * 100_000,
    b"x", [], [None], [1, 2],
    ["x", "x"], [[]], (), {}, {"x": 1}, {"": ""}, {1: 2}, {"a": "\ud800"},
]  # fmt: skip
OBJECTS: list[Any] = [
    set(), object(), np.int64(-1), np.int64(3), np.uint64(2**64 - 1), np.float32("nan"), np.array([1, 2]), np.array(3),
    np.bool_(True), np.str_("x"), int, Ellipsis, 1j, Path("\0"), Path("\ud800"), range(3),
]  # fmt: skip
TEXTS = [
    "", "x", "-1", "0", "1e999", "nan", "inf", "9" * 30, HUGE, "1" * 30 + "GB", "\ud800", "x\udcff", "a\0b",
    "\u202e\x1b[2J\n[bold]", "/dev/zero", "/dev/null", "a" * 100_000, "1.5", "true", "%s%n{}", "--", "http://[", "s3://",
    "ftp://x", "http://127.0.0.1:99999/", "*", "A=B", "=",
]  # fmt: skip


class _Hang(BaseException):
    pass


@contextlib.contextmanager
def answered(what: str, wrong: list[str]) -> Iterator[None]:
    """Append to ``wrong`` an exception of the block that is not a documented error, and a hang."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    except CacheToolError as error:
        said = str(error)
        if type(error) is CacheToolError or not said or said.count("\n") > 1 or len(said) > 4100:
            wrong.append(f"{what}: {type(error).__name__}: {said[:200]}")
    except _Hang:
        wrong.append(f"{what}: no answer in {SECONDS} s")
    except Exception as error:  # noqa: BLE001 - the test searches for such exceptions
        wrong.append(f"{what}: {error!r:.200}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def some(values: list[Any], turn: int, *, every: int) -> list[Any]:
    """Return each ``every``-th value, others in each turn, so that all arguments together cover all values."""
    return values[turn % every :: every]


def name_of(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:
        return "a number of 5,000 digits"


def attack(call: Callable[..., Any], names: list[str], *, every: int = 1, values: list[Any] | None = None) -> int:
    wrong: list[str] = []
    count = 0
    for turn, name in enumerate(names):
        for value in some(PLAIN + OBJECTS if values is None else values, turn, every=every):
            count += 1
            with answered(f"{name}={name_of(value)}", wrong):
                call(**{name: value})
    assert not wrong, "\n".join(wrong)
    return count


def arguments(call: Callable[..., Any], *without: str) -> list[str]:
    known = inspect.signature(call).parameters.values()
    named = [each.name for each in known if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    return [name for name in named if name not in ("self", *without)]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return paths that are not files, and a folder for files with names like ``x``."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CACHETOOL_CACHE", str(tmp_path / "default"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("hello")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        short = os.path.relpath(tmp_path / "socket")  # names of sockets are limited to 107 bytes
        listening.bind(short)
        yield [str(tmp_path / name) for name in ("pipe", "file", "loop", "socket", "nothing")] + [str(tmp_path)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDir]:
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as opened:
        for start in (0, 20, 40):
            put(opened, range(start, start + 20))
        yield opened


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_options_of_pulls_and_conversions_accept_or_refuse_any_value_in_one_line() -> None:
    """All options with every value: they are checked before any action, and are then plain JSON."""
    pull = arguments(cachetool.Cache.pull, "source", "on", "address", "placement", "progress")
    attack(lambda **given: json.dumps(PullOptions.of(given).to_json()), pull)
    attack(lambda **given: json.dumps(SourceOptions(**given).to_json()), arguments(SourceOptions))
    convert = arguments(ConvertOptions)
    attack(lambda **given: json.dumps(ConvertOptions(**{"to": "lmdb", **given}).to_json()), convert)


def open_and_look(**given: Any) -> None:
    with cachetool.open_cache(**{"max_size": "8MB", **given}) as opened:
        _ = opened.max_size


def _verbs(cache: CacheDir) -> list[tuple[Callable[..., Any], list[str]]]:
    def snapshot(**given: Any) -> None:
        with cache.snapshot(**given):
            pass

    def evict(**given: Any) -> None:
        cache.evict(**{"max_size": "20MB", **given})

    shard = cache.shards()[0].id
    return [
        *((getattr(cache, name), arguments(getattr(cache, name))) for name in ("dataset", "schema", "shards", "stats")),
        *((getattr(cache, name), arguments(getattr(cache, name))) for name in ("source", "listing")),
        (evict, arguments(cache.evict)),
        (snapshot, arguments(cache.snapshot, "instead", "known")),  # these are objects of cachetool
        (lambda **given: find_shard(cache, **given), ["name"]),
        (lambda **given: read_sample(cache, **{"shard": shard, "index": 0, **given}), ["shard", "index"]),
    ]


def test_methods_of_a_cache_handle_every_value(cache: CacheDir, places: list[str]) -> None:
    for call, names in _verbs(cache):
        attack(call, names)
    attack(open_and_look, arguments(cachetool.open_cache, "notify"), every=5)
    attack(open_and_look, ["root"], values=places)
    with pytest.raises(cachetool.UsageError, match="notify=3 cannot be used"):
        cachetool.open_cache("x", notify=3)  # type: ignore[arg-type]


MIXTURE = ["cache", "mix", "epoch_samples", "epoch_of", "weights"]


def read(place: Any, /, **given: Any) -> None:
    options = {"batch_size": 4, "workers": 0, "wait": 0.05, **given}
    with Loader(place, **options) as loader:
        if options["workers"] in (None, 0):
            len(loader)
            list(itertools.islice(loader, 1))
            loader.state_dict()


def at(cache: CacheDir, **given: Any) -> None:
    with Loader(cache, batch_size=4, workers=0) as loader:
        list(itertools.islice(loader, 2))
        for name, value in given.items():
            if name == "epoch":
                loader.epoch = value
            else:
                getattr(loader, name)(value)
        list(itertools.islice(loader, 1))
        loader.state_dict()


LOADER = arguments(Loader, "cache_or_paths", "transform", "wait")


def test_loaders_handle_every_value(cache: CacheDir, places: list[str]) -> None:
    attack(lambda **given: read(cache, **given), LOADER, every=9)
    attack(lambda **given: read(given["place"]), ["place"], every=9)
    attack(lambda **given: read({"default": 1}, **{"cache": cache, **given}), MIXTURE, every=5)
    attack(lambda **given: at(cache, **given), ["epoch", "set_epoch", "state_behind"], every=9)


@pytest.mark.soak
def test_loaders_handle_every_value_of_every_argument(
    cache: CacheDir, places: list[str], record_property: Callable[[str, object], None]
) -> None:
    import cachetool.loaders.jax as jax
    import cachetool.loaders.torch as torch
    from cachetool.loaders.lightning import CacheDataModule

    count = attack(lambda **given: read(cache, **given), [*LOADER, "wait"])
    count += attack(lambda **given: read(given["place"]), ["place"])
    count += attack(lambda **given: read(given["place"]), ["place"], values=places)
    count += attack(lambda **given: read({"default": 1}, **{"cache": cache, **given}), MIXTURE)
    count += attack(lambda **given: at(cache, **given), ["epoch", "set_epoch", "state_behind"])
    count += attack(open_and_look, arguments(cachetool.open_cache, "notify"))

    def indexed(**given: Any) -> None:
        dataset = torch.CacheDataset(**{"cache_or_paths": cache, **given})
        len(dataset), dataset[0]

    def drawn(**given: Any) -> None:
        sampler = torch.EpochSampler(torch.CacheDataset(cache), **given)
        len(sampler), list(itertools.islice(iter(sampler), 3))

    def stood(**given: Any) -> None:
        torch.LMDBDataset(**{"cache": cache, **given})[0]

    def placed(**given: Any) -> None:
        with torch.Loader(cache, batch_size=4, workers=0, wait=0.05, **given) as loader:
            list(itertools.islice(loader, 1))

    for call, made in ((indexed, torch.CacheDataset), (stood, torch.LMDBDataset)):
        count += attack(call, arguments(made))
    count += attack(drawn, arguments(torch.EpochSampler, "dataset"))
    count += attack(placed, ["device", "agree"])
    count += attack(lambda **given: Loader(cache, batch_size=4, workers=0).epochs_of(**given), ["steps"])
    count += attack(lambda **given: list(jax.prefetch_to_device([{"x": np.zeros(2)}], **given)), ["size"])
    count += attack(
        lambda **given: CacheDataModule(**{"cache_or_paths": cache, "batch_size": 4, "workers": 0, **given}),
        arguments(CacheDataModule),
    )
    record_property("arguments tried", count)


# -- states ------------------------------------------------------------------------------------------------------------

GONE = object()
"""A marker that removes the field."""


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in pairs:
        yield from fields(inner, (*path, name))


def with_field(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(state, tuple):
        state = list(state)
    state = copy.copy(state)
    if len(path) > 1:
        state[path[0]] = with_field(state[path[0]], path[1:], value)
    elif value is GONE:
        del state[path[0]]
    else:
        state[path[0]] = value
    return state


def attack_state(state: Any, load: Callable[[Any], Any], *, every: int = 1) -> int:
    wrong: list[str] = []
    count = 0
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    values = [*PLAIN, *OBJECTS, GONE, [state] * 1000, deep, {**state, "more": state}, state]
    for turn, path in enumerate(fields(state)):
        for value in some(values, turn, every=every):
            if path or value is not GONE:
                count += 1
                with answered(f"{path} = {'gone' if value is GONE else type(value).__name__}", wrong):
                    load(with_field(state, path, value))
    while deep:  # otherwise Python's own recursion limit would be reached
        deep = deep.pop()
    assert not wrong, "\n".join(wrong)
    return count


def states(cache: CacheDir) -> list[tuple[Any, Callable[[Any], Any]]]:
    with Loader(cache, batch_size=4, workers=0) as loader:
        edge = loader.state_dict()
        list(itertools.islice(loader, 3))
        middle = loader.state_dict()
        epochs = loader.epochs_of(steps=5)
        list(itertools.islice(epochs, 2))
        fixed = epochs.state_dict()

    def go_on(state: Any) -> None:
        with Loader(cache, batch_size=4, workers=0, wait=0.1) as loader:
            before = loader.state_dict()
            try:
                loader.load_state_dict(state)
            except CacheToolError:
                assert loader.state_dict() == before  # a refused state changes nothing
                raise
            len(loader)
            list(itertools.islice(loader, 1))
            loader.state_dict()

    def go_on_fixed(state: Any) -> None:
        with Loader(cache, batch_size=4, workers=0, wait=0.1) as loader:
            epochs = loader.epochs_of(steps=5)
            epochs.load_state_dict(state)
            list(itertools.islice(epochs, 1))

    return [(edge, go_on), (middle, go_on), (fixed, go_on_fixed)]


def test_a_loader_accepts_or_refuses_a_state_with_any_values(cache: CacheDir) -> None:
    for state, load in states(cache)[:2]:
        attack_state(state, load, every=20)


@pytest.mark.soak
def test_all_loaders_accept_or_refuse_states_with_every_value_in_every_field(
    cache: CacheDir, record_property: Callable[[str, object], None]
) -> None:
    import cachetool.loaders.torch as torch

    count = sum(attack_state(state, load) for state, load in states(cache))
    dataset = torch.CacheDataset(cache)
    indices = iter(torch.EpochSampler(dataset))
    list(itertools.islice(indices, 3))

    def draw_on(state: Any) -> None:
        again: Any = iter(torch.EpochSampler(dataset))
        again.load_state_dict(state)
        list(itertools.islice(again, 2))

    count += attack_state(indices.state_dict(), draw_on)  # type: ignore[attr-defined]
    record_property("states tried", count)


# -- the command line --------------------------------------------------------------------------------------------------

STARTS = {
    "pull": ["pull", "nothing-there"], "convert": ["convert", "--to", "lmdb"], "evict": ["evict", "--max-size", "7MB"],
    "stats": ["stats"], "ls": ["ls"], "show": ["show", "x"], "verify": ["verify"], "doctor": ["doctor"],
}  # fmt: skip


def lines() -> list[tuple[str, list[str]]]:
    """Yield each option and argument of each command, and the words before its value."""
    found = []
    for verb, command in get_command(program()).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            if verb in STARTS and not getattr(parameter, "is_flag", False) and parameter.name != "help":
                option = parameter.param_type_name == "option"
                found.append((f"{verb} {parameter.name}", [*STARTS[verb], parameter.opts[-1]] if option else [verb]))
    return found


def attack_lines(here: Run, cases: list[tuple[str, list[str]]], texts: list[str], *, every: int) -> int:
    wrong: list[str] = []
    count = 0
    for turn, (name, words) in enumerate(cases):
        for text in some(texts, turn, every=every):
            count += 1
            with answered(f"{name} {text!r:.60}", wrong):
                ran = here(*words, text)
                shown = [line for line in ran.stderr.splitlines() if not line.startswith(("new cache", "left out"))]
                good = ran.code in (0, 2, 3, 4, 5, 6) and len(shown) <= 2 and "Traceback" not in ran.stderr
                if not good or (ran.code and not shown[0].startswith("error: ")) or "\x1b" in ran.stderr + ran.stdout:
                    wrong.append(f"{name} {text!r:.60}: {ran.code} {ran.stderr[-300:]!r}")
    assert not wrong, "\n".join(wrong)
    return count


def test_every_command_line_option_handles_hostile_values_in_two_lines(here: Run, places: list[str]) -> None:
    quick = [(name, words) for name, words in lines() if not name.endswith((" source", " input", " out"))]
    assert len(quick) > 40
    attack_lines(here, quick, TEXTS, every=14)


@pytest.mark.soak
def test_every_command_line_option_handles_every_text_in_two_lines(
    here: Run, places: list[str], record_property: Callable[[str, object], None]
) -> None:
    count = attack_lines(here, lines(), [*TEXTS, *places], every=1)
    record_property("command lines tried", count)


def test_inputs_that_are_no_files_are_refused_at_once(here: Run, places: list[str]) -> None:
    cases = [("pull", ["pull"]), ("convert", ["convert", "--to", "lmdb", "--out", "out"])]
    attack_lines(here, cases, places[:1], every=1)  # a pipe
