"""``BackgroundPull``: pulls beside any script, one pull process per source, which ends with its trainer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.api import read_sample
from cachetool.cache import CacheDir
from cachetool.core.errors import CatalogError
from cachetool.loaders.numpy import Loader
from cachetool.loaders.snapshots.waiting import wait_for_samples
from cachetool.pull import background as module
from cachetool.pull.listing import PROBED
from cachetool.pull.options import PullOptions

SCRIPT = Path(__file__).parent / "scripts" / "background.py"
REPOSITORY = Path(__file__).parents[2]


def until(holds: Callable[[], Any]) -> Any:
    """Wait until ``holds`` returns a true value, and return that value."""
    deadline = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come true in a minute"
        time.sleep(0.02)
    return found


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Script:
    """A running training script."""

    def __init__(self, what: str, source: Path, root: Path, *, stdin: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), what, str(source), str(root)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, word: str = "state") -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(digits: Path, tmp_path: Path) -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def begin(what: str = "plain") -> Script:
        started.append(Script(what, digits, tmp_path / "cache"))
        return started[-1]

    yield begin
    for script in started:
        script.kill()


def keys(cache: CacheDir) -> list[str]:
    return [read_sample(cache, shard.id, at)["__key__"] for shard in cache.shards() for at in range(shard.samples)]


def test_an_unguarded_script_trains_on_an_empty_cache_without_a_pull_thread(start: Callable[..., Script]) -> None:
    script = start()

    assert script.first["samples"] > 0
    assert script.first["threads"] == 1
    assert until(lambda: script.ask()["samples"] > script.first["samples"])
    pullers = [script.first["pid"], *children(script.first["pid"])]
    assert children(script.process.pid) == pullers[:1]
    assert script.ask("close")["phase"] == "stopped"
    assert not [pid for pid in pullers if runs(pid)]


def test_a_pull_process_that_must_be_killed_at_the_end_is_reported_as_stopped(start: Callable[..., Script]) -> None:
    script = start()
    os.kill(script.first["pid"], signal.SIGSTOP)

    closed = script.ask("close")
    assert closed["phase"] == "stopped"
    assert not runs(script.first["pid"])


def test_a_program_read_from_stdin_may_pull_too(digits: Path, tmp_path: Path) -> None:
    program = (
        "import cachetool, sys\n"
        "from cachetool.loaders.snapshots.follow import subscribe\n"
        "cachetool.BackgroundPull(sys.argv[2], sys.argv[1], shard_size='20kB')\n"
        "print(sum(part.samples for part in subscribe(sys.argv[2], dataset=None, run=None).newest().parts) > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-", digits, tmp_path / "cache"], input=program, capture_output=True, text=True, timeout=120
    )

    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
    with cachetool.open_cache(tmp_path / "cache") as cache:
        assert cache.stats().holders == []


@pytest.mark.parametrize("what", ["plain", "fork"])
def test_the_pull_process_of_a_killed_trainer_ends_and_leaves_no_partial_work(
    what: str, start: Callable[..., Script], digits: Path, tmp_path: Path
) -> None:
    script = start(what)
    puller = script.first["pid"]
    workers = until(lambda: children(puller))
    script.process.send_signal(signal.SIGKILL)
    until(lambda: not any(map(runs, [puller, *workers])))

    with cachetool.open_cache(tmp_path / "cache") as cache:
        assert cache.catalog.rows("SELECT 1 FROM claims WHERE holder IS NOT NULL") == []
        assert cache.catalog.rows("SELECT 1 FROM jobs") == []
        assert cache.catalog.rows("SELECT 1 FROM shards WHERE state = 'staging'") == []
        assert sorted(shard.id for shard in cache.shards()) == sorted(os.listdir(tmp_path / "cache" / "shards"))
        found = keys(cache)
        assert len(found) == len(set(found))
        assert cache.pull(str(digits), samples=10).samples == 10


def test_the_pull_of_a_killed_trainer_evicts_no_sample_of_the_interrupted_epoch(tmp_path: Path) -> None:
    """The lease dies with the trainer, and the pull may notice that seconds later: here it notices when it
    continues.
    """
    source, root = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    for number in range(3000):
        np.save(source / f"{number:04d}.npy", np.full(250, number, dtype=np.float64))
    with cachetool.open_cache(root, max_size="4MB") as cache:
        cache.pull(source, shard_size="20kB")
    script = subprocess.Popen(
        [sys.executable, SCRIPT.with_name("left_epoch.py"), source, root],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    puller = 0
    try:
        assert script.stdout is not None
        state = json.loads(script.stdout.readline())
        with cachetool.open_cache(root) as cache:
            (puller,) = (pull["pid"] for pull in cache.stats().pulls)
            workers = until(lambda: children(puller))
            until(lambda: cache.stats().pulls[0]["phase"] == "waiting for space")
            os.kill(puller, signal.SIGSTOP)  # it stops none of its workers
            script.kill()
            script.communicate()
            until(lambda: not cache.stats().leases)
            time.sleep(2)  # two checks for space by the workers must change nothing
            assert all(map(runs, workers))
            there = {shard.id for shard in cache.shards()}
            assert {row[0] for row in state["resume"]["parts"]} <= there
            os.kill(puller, signal.SIGCONT)
            until(lambda: not any(map(runs, [puller, *workers])))
        with Loader(root, batch_size=8, workers=1, seed=0) as loader:
            loader.load_state_dict(state)
            assert sum(len(batch["npy"]) for batch in loader) == sum(row[2] for row in state["resume"]["parts"]) - 8
    finally:
        script.kill()
        script.communicate()
        if puller:
            with contextlib.suppress(ProcessLookupError):
                os.kill(puller, signal.SIGCONT)


def test_a_second_process_waits_and_takes_over_the_pull(start: Callable[..., Script]) -> None:
    first, second = start(), start()

    assert second.first["pid"] == first.first["pid"]
    assert second.ask()["pid"] == first.first["pid"]
    first.kill()
    assert until(lambda: (state := second.ask())["pid"] != first.first["pid"] and state["phase"] == "pulling")


def test_an_unusable_source_is_refused_at_the_start_as_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    np.save(mixed / "a.npy", np.zeros(2))
    np.save(mixed / "b.other.npy", np.zeros(2))
    with cachetool.open_cache(tmp_path / "cache", max_size="3MB") as cache:
        for url in ("s3://bucket/x", "gopher://host", str(tmp_path / "nothing"), str(tmp_path / "empty"), str(mixed)):
            with pytest.raises(cachetool.CacheToolError) as expected:
                cache.pull(url)
            with pytest.raises(type(expected.value)) as found:
                cachetool.BackgroundPull(cache, url)
            assert str(found.value) == str(expected.value)
        with pytest.raises(cachetool.UsageError, match="samples"):
            cachetool.BackgroundPull(cache, str(mixed), samples=3)
        with pytest.raises(cachetool.UsageError, match="unknown option 'colour'"):
            cachetool.BackgroundPull(cache, str(mixed), colour="red")
        assert cache.stats().pulls == []


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Create a folder in which all objects that are not probed are junk."""
    from cachetool.core.permutation import Permutation

    folder = tmp_path / "bad"
    folder.mkdir()
    good = set(Permutation(200)[np.arange(PROBED)].tolist())
    for number in range(200):
        if number in good:
            np.save(folder / f"{number:03d}.npy", np.zeros(3))
        else:
            (folder / f"{number:03d}.npy").write_bytes(b"junk")
    return folder


def test_an_error_during_the_pull_is_raised_by_check_and_not_by_close(
    bad: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with cachetool.open_cache(tmp_path / "cache", max_size="3MB") as cache:
        with cachetool.BackgroundPull(cache, str(bad), shard_size="20kB") as background:
            assert ".npy" in until(lambda: background.error)
            with pytest.raises(cachetool.BadObject, match="npy"):
                background.check()
            with pytest.raises(cachetool.SourceError, match=r"no samples to train on: the pull of .* failed"):
                wait_for_samples(cache, None, least=PROBED + 1)
            assert 0 < cache.stats().samples <= PROBED, "what came before it is kept"
            assert background.progress().phase == "failed"
            assert cache.stats().pulls[0]["phase"] == "failed"
        background = cachetool.BackgroundPull(cache, str(bad), shard_size="20kB")
        until(lambda: background.progress().phase == "failed")
        with pytest.warns(RuntimeWarning, match="had failed") as told:
            background.close()
        assert told[0].filename == __file__
        background.close()
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if line.startswith(f"warning: the background pull of {bad} ended: ")] == said[::2]
    assert len(said) == 4  # the kind of each problem, and its remedy


def test_a_pull_into_a_full_cache_pauses_until_an_epoch_has_read_it_and_the_cap_holds(
    digits: Path, tmp_path: Path
) -> None:
    with (
        cachetool.open_cache(tmp_path / "cache", max_size="2MB") as cache,
        warnings.catch_warnings(action="error"),
        cachetool.BackgroundPull(cache, str(digits), shard_size="20kB", renew=0.3) as background,
    ):
        until(lambda: background.progress().phase == "waiting for space")
        full = {shard.id for shard in cache.shards()}
        assert background.progress().evicted == 0
        with cache.snapshot(sparing=True) as first:
            shown = {shard.id for shard in first.shards}
            assert shown < full, "a share is left for the next"
            assert {shard.id for shard in cache.shards()} == full, "nobody has had any of it before"
        with cache.snapshot() as snapshot:
            held = {shard.id for shard in snapshot.shards}
            assert full - shown <= held < full
            # Shards that the snapshot retired free space for new samples. Shards that the snapshot reads stay.
            until(lambda: {shard.id for shard in cache.shards()} - full)
            assert held <= set(os.listdir(cache.layout.shards))
        until(lambda: background.progress().pass_number > 1 or background.progress().evicted > len(full) / 2)
        assert background.progress().used <= cache.max_size
        assert background.error is None


def test_a_store_that_is_unreachable_for_a_while_is_tried_again(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs the loop alone, with a store that becomes unreachable twice after it was reached."""
    outcomes = [cachetool.Unreachable("no answer"), cachetool.Unreachable("no answer yet"), None]
    told: list[str] = []

    def unsteady(cache: CacheDir, url: str, options: PullOptions, *, report: Callable[[Any], None]) -> None:
        report(module.Progress("list", 0))
        report(module.Progress("pull", 0))
        told.append(cache.stats().pulls[0]["phase"])
        if (error := outcomes.pop(0)) is not None:
            raise error

    class Channel:
        def send(self, message: dict[str, Any]) -> None:
            told.append(message["phase"])

    pulling = sys.modules["cachetool.pull.run"]
    monkeypatch.setattr(pulling, "pull", unsteady)
    monkeypatch.setattr(pulling, "RETRY", (0.01, 0.01))
    with cachetool.open_cache(tmp_path / "cache", max_size="3MB") as cache:
        _ = cache.catalog
        module.follow(Channel(), root=str(cache.root), url=str(digits), options=PullOptions(follow=True).to_json())
        # the trainer gets no more reports after it began
        assert told == ["list", "pull", "pulling", "pulling", "pulling"]
        assert cache.stats().pulls == []


def test_skipped_objects_are_fetched_once_more_and_then_the_pull_rests(tmp_path: Path) -> None:
    """Ten bad objects, each in its own claim, stay within the tolerated share for any number of passes."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(97):
        np.save(source / f"{number:03d}.npy", np.full(250, number, dtype=np.float64))
    for number in range(97, 107):
        (source / f"{number:03d}.npy").write_bytes(b"junk")
    with (
        cachetool.open_cache(tmp_path / "cache", max_size="8MB") as cache,
        cachetool.BackgroundPull(
            cache, str(source), workers=1, shard_size="8kB", order="sequential", on_error="skip"
        ) as pull,
    ):

        def done(turn: int) -> bool:
            pull.check()
            (row,) = cache.catalog.rows("SELECT * FROM sources JOIN parts ON source = id")
            pending = cache.catalog.rows("SELECT 1 FROM claims")
            return bool(row["pass_number"] == turn and row["frontier"] == row["units"] and not pending)

        until(lambda: done(1))
        for _ in range(20):
            assert done(1), "another pass began, which can bring nothing"
            time.sleep(0.05)
        cache.evict(cache.usage().total - 1)
        until(lambda: done(2) or done(3))
        assert cache.stats().samples == 97


def test_the_pull_process_ends_although_the_catalog_cannot_be_read(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped in the middle of a transaction causes this."""

    def locked(pull: cachetool.BackgroundPull) -> None:
        raise CatalogError("catalog is locked by pid 1, which is stopped")

    background = cachetool.BackgroundPull(tmp_path / "cache", str(digits))
    child = background._child
    assert child is not None
    monkeypatch.setattr(cachetool.BackgroundPull, "_look", locked)
    with pytest.warns(RuntimeWarning, match="locked by pid 1"):
        background.close()
    assert child.process.returncode is not None
