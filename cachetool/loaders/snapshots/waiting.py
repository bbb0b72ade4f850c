"""Waiting for the first samples of a dataset that a background pull fills, and telling the user so."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cachetool.cache import CacheDir, open_cache
from cachetool.cache.catalog import Connection
from cachetool.cache.layout import cache_option
from cachetool.core.errors import CacheToolError, SourceError, UsageError
from cachetool.core.text import plain, shown
from cachetool.loaders.settings import Settings, where_dict

if TYPE_CHECKING:
    from cachetool.cache.stats import PullState

__all__ = [
    "AGAIN",
    "FIRST",
    "WAIT",
    "NotYet",
    "Talk",
    "failed_pull",
    "given_up",
    "is_pulled",
    "no_dataset",
    "no_samples",
    "require",
    "say",
    "wait_for_samples",
]

WAIT = 600.0
"""Seconds that a loader waits for its first samples."""
_POLL = 0.1
"""Seconds between two looks at the catalog."""
FIRST, AGAIN = 3.0, 60.0
"""Seconds of waiting until the first line that says so, and between two lines."""


class NotYet(CacheToolError):
    """An error that says how many samples there are so far, and how many are needed.

    ``less`` is the argument by which a user would ask for less, such as ``min_samples=``.
    """

    def __init__(self, text: str, *, less: str = "") -> None:
        super().__init__(text)
        self.less = less


def require(settings: Settings, samples: int, *, world_size: int, grows: bool) -> None:
    """Raise :class:`NotYet` when there are too few samples for an epoch of ``world_size`` ranks.

    Raises :class:`UsageError` instead if the dataset never ``grows``, as with plain files.
    """
    least = settings.min_samples * (world_size if settings.min_each else 1)
    need = max(world_size, least) if grows else world_size
    global_batch = world_size * settings.batch_size if settings.drop_last else 0
    need = max(need, global_batch)
    if samples >= need:
        return
    side = f" of split={settings.split!r}" if settings.split else ""
    if settings.where is not None:
        side += f" with where={shown(where_dict(settings.where))}"
    if settings.offsets:
        side += " with all neighbours of offsets="
    text = f"{samples} of {need} samples{side} in {settings.root}"
    less = "min_samples="
    if need == global_batch:
        text += f", because drop_last=True uses only complete batches of {settings.batch_size}"
        less = "batch_size="
    elif settings.where is not None and not samples:
        less = "where="
    elif settings.offsets and not samples:
        less = "offsets="
    elif settings.split and not samples:
        less = "validation="
    if not grows:
        raise UsageError(f"{text}; plain files do not grow")
    raise NotYet(text, less=less)


def no_dataset(root: str, dataset: str, names: Sequence[str]) -> UsageError:
    """Return the error for a dataset that the cache does not have, while no pull runs."""
    return UsageError(
        f"unknown dataset {shown(dataset)} in {root}, and no pull is running; choose one of"
        f" {', '.join(map(plain, names))} with dataset=, or fill it with: {_command(Path(root), dataset)}"
    )


def is_pulled(cache: CacheDir) -> bool:
    """Return True if a pull draws into the cache, or if a background pull is about to."""
    with cache.catalog.read() as connection:
        drawing = connection.execute("SELECT 1 FROM jobs LIMIT 1").fetchone() is not None
        return drawing or any(state.alive for state in _pulls(connection, cache, None))


def no_samples(root: str, dataset: str | None, there: Sequence[str]) -> NotYet:
    """Return the error for a cache that has no samples of ``dataset``, but datasets of the names ``there``."""
    text = f"no samples{f' of dataset {shown(dataset)}' if dataset else ''} in {root}"
    return NotYet(f"{text} (it has {', '.join(map(plain, there))})", less="dataset=") if there else NotYet(text)


class Talk:
    """Lines on stderr that tell what a loader waits for and which pull brings it, if the wait takes longer than a
    moment.

    ``wait`` is the maximum of seconds, counted from now. ``dataset`` is the dataset that was asked for by name.
    """

    def __init__(self, root: str | Path, wait: float, *, dataset: str | None = None) -> None:
        self._root, self._dataset = Path(root), dataset
        self._most = f" (for {wait:g} s at most)" if math.isfinite(wait) else ""
        now = time.monotonic()
        self._next, self._until = now + FIRST, now + wait

    @property
    def over(self) -> bool:
        """Return True once the time is over."""
        return time.monotonic() >= self._until

    def tell(self, short: NotYet) -> None:
        """Print what is missing (``short``) if it is time for a line. Called again and again."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + AGAIN
        say(f"waiting for samples{self._most}: {short}; {_who_pulls(self._root, self._dataset, short.less)}")


def say(text: str) -> None:
    """Print a line on stderr. If stderr is closed or its disk is full, the line is lost and training continues."""
    # RuntimeError comes of a signal handler that prints in the middle of another print.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if sys.stderr is not None:
            print(f"cachetool: {plain(text)}", file=sys.stderr, flush=True)  # noqa: T201


def given_up(settings: Settings, short: NotYet) -> CacheToolError:
    """Return the error of a wait that lasted too long, with the newest error of a pull if there is one."""
    text = f"waited {settings.wait:g} s for samples: {short}"
    with contextlib.suppress(CacheToolError), open_cache(settings.root, create=False) as cache:
        for event in cache.stats().errors[:1]:
            return CacheToolError(f"{text}\nthe last error of a pull: {event['text']}")
    less = f", or change {short.less}" if short.less else ""
    return UsageError(f"{text}; fill it with: {_command(Path(settings.root), settings.dataset)}{less}")


def _command(root: Path, dataset: str | None) -> str:
    name = "" if dataset is None else f" --dataset {shlex.quote(dataset)}"
    return f"cachetool pull SOURCE{name}{cache_option(root)}"


def _who_pulls(root: Path, dataset: str | None, less: str) -> str:
    """Return text that tells which pulls draw into a cache now, those in the foreground too, or how to start one."""
    # Opening the cache recovers it first, so every holder in the catalog is a living process.
    with contextlib.suppress(CacheToolError), open_cache(root, create=False) as cache:
        with cache.catalog.read() as connection:
            states = [state for state in _pulls(connection, cache, None) if state.alive]
            drawing = connection.execute(
                "SELECT url, dataset FROM jobs j JOIN sources s ON s.id = j.source JOIN holders h ON h.id = j.holder"
            ).fetchall()
        if states:
            return _described(states[0])
        if drawing:
            return f"the pull of {drawing[0]['url']} fills dataset {drawing[0]['dataset']!r}"
    start = f"start one with: {_command(root, dataset)}"
    return f"no pull is filling this cache; {start}{f', or change {less}' if less else ''}"


def wait_for_samples(cache: CacheDir, dataset: str | None, *, least: int = 1) -> None:
    """Wait until ``dataset`` has ``least`` samples, or until no pull fills it.

    Raises :class:`SourceError` with the pull's own error when the pull failed and there are too few samples, and after
    :data:`WAIT` seconds.
    """
    talk = Talk(cache.root, WAIT)
    while True:
        # A transaction for each look: a long one would keep the pull's commits out.
        with cache.catalog.read() as connection:
            have = connection.execute(
                "SELECT coalesce(sum(samples), 0) FROM shards WHERE state = 'ready' AND dataset = coalesce(?, dataset)",
                (dataset,),
            ).fetchone()[0]
            if have >= least:
                return
            states = _pulls(connection, cache, dataset)
        working = [state for state in states if state.alive]
        if not working:
            if (error := _failure(states)) is not None:
                raise error
            return
        if talk.over:
            raise SourceError(f"no samples to train on after {WAIT:.0f} s; {_described(working[0])}")
        talk.tell(NotYet(f"{have} of {least} in {cache.root}"))
        time.sleep(_POLL)


def failed_pull(cache: CacheDir, dataset: str | None) -> SourceError | None:
    """Return the error of the background pull that was to fill ``dataset``, if no pull is at work any more."""
    with cache.catalog.read() as connection:
        return _failure(_pulls(connection, cache, dataset))


def _pulls(connection: Connection, cache: CacheDir, dataset: str | None) -> list[PullState]:
    # Imported here, because most loaders wait for no pull, and the import takes 15 ms of their
    # start.
    from cachetool.cache.stats import pull_states

    return pull_states(connection, cache.layout, dataset=dataset)


def _failure(states: Sequence[PullState]) -> SourceError | None:
    failed = [state for state in states if state.error is not None]
    if not failed or any(state.alive for state in states):
        return None
    return SourceError(f"no samples to train on: the pull of {failed[0].url} failed: {failed[0].error}")


def _described(state: PullState) -> str:
    listed = f", {state.listed} objects so far" if state.listed else ""
    error = f" ({state.error})" if state.error else ""
    return f"the pull of {state.url} is {state.phase}{listed}{error}"
