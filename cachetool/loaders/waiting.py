"""Waiting for the first samples of a dataset that a background pull is filling."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cachetool.cache import CacheDir
from cachetool.cache.pullers import PullState, pull_states
from cachetool.errors import SourceError

__all__ = ["WAIT", "failed_pull", "wait_for_samples"]

WAIT = 600.0
"""Seconds that a loader waits for its first samples."""
_POLL = 0.1


def wait_for_samples(cache: CacheDir, dataset: str | None, *, least: int = 1, wait: float = WAIT) -> None:
    """Come back when ``dataset`` has ``least`` samples, or nobody pulls into it.

    Raises :class:`SourceError` with the pull's own error when that failed and there are too few samples, and after
    ``wait`` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        with cache.catalog.read() as connection:
            states = pull_states(connection, cache.layout, dataset=dataset)
            have = connection.execute(
                "SELECT coalesce(sum(samples), 0) FROM shards WHERE state = 'ready' AND dataset = coalesce(?, dataset)",
                (dataset,),
            ).fetchone()[0]
        if have >= least:
            return
        working = [state for state in states if state.alive]
        if not working:
            if (error := _failure(states)) is not None:
                raise error
            return
        if time.monotonic() > deadline:
            raise SourceError(f"no samples to train on after {wait:.0f} s; {_described(working[0])}")
        time.sleep(_POLL)


def failed_pull(cache: CacheDir, dataset: str | None) -> SourceError | None:
    """The error of the background pull that was to fill ``dataset``, when none is at work any more."""
    with cache.catalog.read() as connection:
        return _failure(pull_states(connection, cache.layout, dataset=dataset))


def _failure(states: Sequence[PullState]) -> SourceError | None:
    failed = [state for state in states if state.error is not None]
    if not failed or any(state.alive for state in states):
        return None
    return SourceError(f"no samples to train on: the pull of {failed[0].url} failed: {failed[0].error}")


def _described(state: PullState) -> str:
    listed = f", {state.listed} objects so far" if state.listed else ""
    error = f" ({state.error})" if state.error else ""
    return f"the pull of {state.url} is {state.phase}{listed}{error}"
