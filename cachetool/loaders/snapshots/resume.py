"""Resuming: the states of loaders and samplers, the checks of a state, and what is left of its epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.core.permutation import MAX_N
from cachetool.core.ranges import Range, Ranges
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_whole
from cachetool.loaders.mixture import MOST_DRAWS
from cachetool.loaders.order import Int64s
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.snapshots.waiting import say
from cachetool.loaders.view import ShardFile, View

__all__ = [
    "SAVED",
    "STATE",
    "Resume",
    "are_rows",
    "is_count",
    "is_resume",
    "is_whole",
    "places",
    "require_same",
    "require_state",
    "resumed",
    "taken",
]

STATE = 1
"""Version of the states."""
_LONGEST = 200
"""Maximum of characters of a selection in a message."""


class Resume(NamedTuple):
    """The place at which an epoch is resumed: the samples it had, and how many of its order were read."""

    position: int
    samples: int
    parts: Sequence[Sequence[Any]]
    """Rows as :func:`~cachetool.loaders.settings.rows` returns them."""
    members: Sequence[int] = ()
    """Number of the parts of each dataset of a mixture."""
    ratio: Sequence[int] = ()
    """The shares of the groups of a mixture."""

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Resume | None:
        """Return the place that a loader's state holds; None for a state between two epochs."""
        return cls(**value) if value else None


# -- checks ------------------------------------------------------------------------------------------------------------


def require_state(state: object, kinds: Mapping[str, Callable[[Any], bool]], *, of: str) -> None:
    """Raise :class:`UsageError` unless ``state`` is a state of the class ``of``.

    Each function of ``kinds`` returns True if the entry of its name is possible.
    """
    # A state comes from a file of the user's, so anything in it may be of any type.
    if not isinstance(state, Mapping) or not is_whole(state.get("state")) or state["state"] != STATE:
        raise UsageError(f"this is not a state of {of} of this version; load the result of state_dict()")
    for name, good in kinds.items():
        if not good(state.get(name)):
            raise UsageError(
                f"this is not a state of {of}: {name!r} is {shown(state.get(name))}; load the result of state_dict()"
            )


def require_same(saved: Mapping[str, Any], here: Mapping[str, Any], *, of: str) -> None:
    """Raise :class:`UsageError` if the class ``of`` has another setting here than the state was made with."""
    # With another setting the epoch would have other samples, or another order, and nobody would
    # notice.
    for name, value in saved.items():
        if not isinstance(value, str | float | int | None) or here.get(name) != value:
            if name == "mixture":
                was, has = (str(setting or "one dataset") for setting in (value, here.get(name)))
                raise UsageError(
                    f"the state was saved by a {of} with the mixture {was}, but this {of} has {has}; create it with the"
                    " same datasets in the same order, and the same options"
                )
            was, has = (_given(name, setting) for setting in (value, here.get(name)))
            raise UsageError(
                f"the state was saved with {name}={was}, but this {of} has {has}; create it with {name}={was}"
            )


def _given(name: str, setting: object) -> str:
    """Return a setting of a state as the argument that it was."""
    if name in ("where", "crop", "offsets") and isinstance(setting, str):
        return setting if len(setting) <= _LONGEST else f"{setting[:_LONGEST]}..."
    return shown(False if is_one_of(setting, ("no",)) else setting)


def is_whole(value: object) -> bool:
    """Return True for a whole number, 0 or more."""
    try:
        return parse_whole(value, what="") >= 0
    except UsageError:
        return False


def is_count(value: object) -> bool:
    """Return True for a number of samples or batches."""
    # The order of an epoch cannot be computed beyond MAX_N samples.
    return is_whole(value) and int(value) <= MAX_N  # type: ignore[call-overload]


def are_rows(value: object) -> bool:
    """Return True for parts as :func:`~cachetool.loaders.settings.rows` returns them."""
    return isinstance(value, list | tuple) and all(
        isinstance(row, list | tuple)
        and len(row) >= 4
        and isinstance(row[0], str)
        and is_count(row[2])
        and isinstance(row[3], str)
        and all(isinstance(cell, str | int | float | None) for cell in row)
        for row in value
    )


def is_resume(value: object) -> bool:
    """Return True for the place at which an epoch is resumed, and for None."""
    if not isinstance(value, Mapping):
        return value is None
    try:
        resume = Resume.of(value)
    except TypeError:
        return False
    if resume is None:
        return True
    inside = is_count(resume.position) and is_count(resume.samples) and resume.position <= resume.samples
    numbers = all(isinstance(value, list | tuple) and all(map(is_count, value)) for value in resume[3:])
    return inside and are_rows(resume.parts) and numbers and (not resume.ratio or 0 < sum(resume.ratio) <= MOST_DRAWS)


SAVED: dict[str, Callable[[Any], bool]] = {
    "epoch": is_whole,
    "taken": lambda value: value is None or is_count(value),
    "order": lambda value: isinstance(value, dict | None),
    "resume": is_resume,
}
"""The entries of a loader's state, each with the check of its value."""


def taken(state: Mapping[str, Any]) -> int:
    """Return the number of batches that a state has behind it, of a loader or of its epochs of fixed length."""
    batches: int = state["at"] if "at" in state else state["taken"] if state["resume"] else 0
    return batches


# -- what is left ------------------------------------------------------------------------------------------------------


def _left(view: View, resume: Resume) -> tuple[View, Ranges]:
    """Return the part of ``view`` that belongs to an earlier snapshot, in its order, and the ranges of indices that are
    lost."""
    parts: list[ShardFile] = []
    lost: list[Range] = []
    members: list[int] = []
    start = at = first = 0
    # Datasets of a mixture may hold the same content, so each is looked at by itself.
    for count, here in zip(resume.members or (len(resume.parts),), view.members or (len(view.parts),), strict=False):
        own, first = view.parts[first : first + here], first + here
        by_id = {part.id: part for part in own}
        by_content = {(part.content, part.samples): part for part in own if part.content}
        before = len(parts)
        for id, _, samples, content, *_ in resume.parts[at : at + count]:
            # A shard that was converted since has another id, but the same content.
            part = by_id.get(id) or by_content.get((content, samples))
            if part is None:
                lost.append((start, start + samples))
            else:
                parts.append(part)
            start += samples
        at += count
        members.append(len(parts) - before)
    return replace(view, parts=tuple(parts), members=tuple(members) if view.members else ()), tuple(lost)


def _evicted(resume: Resume, lost: Ranges, way_out: str) -> UsageError:
    return UsageError(
        f"{len(lost)} of {len(resume.parts)} shards of the epoch to resume were evicted after the state was saved;"
        f" {way_out}"
    )


def places(view: View, resume: Resume) -> Callable[[Int64s], Int64s]:
    """Return a function that turns indices of the snapshot that a sampler resumes into indices of ``view``.

    Both are int64, (k,). Raises :class:`UsageError` when shards of the snapshot were evicted.
    """
    there, lost = _left(view, resume)
    if lost:
        raise _evicted(resume, lost, "begin the next epoch with sampler.set_epoch(n)")
    now = {part.id: start for part, start in zip(view.parts, view.starts.tolist(), strict=False)}
    starts = np.array([now[part.id] for part in there.parts], dtype=np.int64)

    def places(indices: Int64s) -> Int64s:
        part, inside = there.find(indices)
        moved: Int64s = starts[part] + inside
        return moved

    return places


def resumed(
    generation: int, epoch: int, view: View, resume: Resume, *, settings: Settings, count: Callable[[View], int]
) -> EpochPlan:
    """Return the plan of what is left of an epoch, of which ``view`` has what still exists.

    ``count`` returns how many samples of a view are read. Raises :class:`UsageError` when samples are gone, unless
    ``missing="skip"`` continues without them.
    """
    view, lost = _left(view, resume)
    ratio = tuple(resume.ratio)
    if not lost:
        return EpochPlan(generation, epoch, view, count(view), resume.position, ratio=ratio)
    crops = 1 if settings.crop is None else settings.crop.each(view.schema)
    chooses = (
        "split=" if settings.split is not None
        else "where=" if settings.where is not None
        else "offsets=" if settings.offsets
        else "balance=" if settings.mixture is not None and settings.mixture.balance is not None
        else "sample_weights=" if settings.mixture is not None and settings.mixture.sample_weights
        else "a mixture" if settings.mixture is not None
        else "crops='grid' over samples of different shapes" if crops is None
        else None
    )  # fmt: skip
    next_one = f"begin the next epoch with loader.epoch = {epoch + 1}"
    none_of = f"none of the {len(resume.parts)} shards of"
    if settings.missing != "skip":
        if not view.parts:
            raise UsageError(
                f"{none_of} the epoch to resume is in {settings.root}: the state belongs to another cache, or the"
                f" shards were evicted; {next_one}"
            )
        skip = "missing='skip' continues without their samples" if chooses is None else next_one
        raise _evicted(resume, lost, skip)
    # The state holds no indices. Only the shard itself tells which of its samples were selected,
    # and it is evicted.
    if chooses is not None:
        raise UsageError(
            f"an epoch with {chooses} cannot continue without evicted shards, because only the shards say which of"
            f" their samples were selected; {next_one}"
        )
    if not view.parts:
        say(f"{none_of} the epoch to resume, {epoch}, is left, so this epoch ends immediately")
    # The epoch counts crops, of which a lost sample takes several with it.
    lost = tuple((start * (crops or 1), stop * (crops or 1)) for start, stop in lost)
    plan = EpochPlan(generation, epoch, view, 0, lost=lost, of=(resume.samples, resume.position))
    return replace(plan, samples=len(plan.left(settings)[0]))
