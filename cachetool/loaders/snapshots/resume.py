"""Taking an epoch up again: what it consisted of, and what of that is still there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetool.core.errors import UsageError
from cachetool.core.permutation import MAX_N
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_whole
from cachetool.loaders.settings import EpochPlan, Settings
from cachetool.loaders.snapshots.waiting import say
from cachetool.loaders.view import ShardFile, View

__all__ = [
    "SAVED",
    "Resume",
    "are_rows",
    "asked_for",
    "match_parts",
    "is_count",
    "is_resume",
    "is_whole",
    "require_order",
    "require_seed",
    "require_state",
    "resumed",
]

_LONGEST = 200
"""Characters of a selection in a message."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an epoch is taken up again: the samples it had, and how many of its order were read."""

    position: int
    samples: int
    parts: Sequence[Sequence[Any]]
    """Rows as :func:`~cachetool.loaders.settings.rows` gives them."""


def asked_for(value: Mapping[str, Any] | None) -> Resume | None:
    """What a loader's state says of an epoch in the middle of which it was taken; None of one at an edge."""
    return Resume(**value) if value else None


def require_state(state: object, version: int, kinds: Mapping[str, Callable[[Any], bool]], *, of: str) -> None:
    """Raise :class:`UsageError` unless ``state`` is one of ``version`` that the class ``of`` gave: each of ``kinds``
    says whether what the state has of that name can be."""
    if not isinstance(state, Mapping) or not is_whole(state.get("state")) or state["state"] != version:
        raise UsageError(f"not a state of this version's {of}; load what state_dict() gave")
    for name, good in kinds.items():
        if not good(state.get(name)):
            raise UsageError(
                f"not a state of {of}: its {name!r} is {shown(state.get(name))}; load what state_dict() gave"
            )


def require_order(saved: Mapping[str, Any] | None, here: Mapping[str, Any], *, of: str) -> None:
    """Raise :class:`UsageError` where an epoch that is gone on with would have other samples, or another order, than
    its state says; earlier versions saved less."""
    if not isinstance(saved, Mapping | None):
        raise UsageError(f"not a state of {of}s: its 'order' is {shown(saved)}; load what state_dict() gave")
    # A state has no selection where there was none.
    saved = {"where": None, **(saved or {})} if "where" in here else saved
    for name, value in (saved or {}).items():
        if not isinstance(value, str | float | int | None) or here.get(name) != value:
            was, has = (_given(name, setting) for setting in (value, here.get(name)))
            raise UsageError(f"the state was made with {name}={was}, this {of} has {has}; make it with {name}={was}")


def _given(name: str, setting: object) -> str:
    """A setting of a state as the argument that it was."""
    if name == "where" and isinstance(setting, str):
        return setting if len(setting) <= _LONGEST else f"{setting[:_LONGEST]}..."
    return shown(False if is_one_of(setting, ("no",)) else setting)


def require_seed(saved: object, here: int, *, of: str) -> None:
    """Raise :class:`UsageError` unless the seed that a state has is that of the class ``of`` here."""
    try:
        same = parse_whole(saved, what="") == here
    except UsageError:
        same = False
    if not same:
        raise UsageError(f"the state was made with seed={shown(saved)}, this {of} has {here}")


def is_whole(value: object) -> bool:
    """Whether it is a whole number, 0 or more."""
    try:
        return parse_whole(value, what="") >= 0
    except UsageError:
        return False


def is_count(value: object) -> bool:
    """Whether it is a number of samples or batches."""
    return is_whole(value) and int(value) <= MAX_N  # type: ignore[call-overload]


def are_rows(value: object) -> bool:
    """Whether they are parts as :func:`~cachetool.loaders.settings.rows` gives them."""
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
    """Whether it says where an epoch is taken up again, or is empty."""
    if value is None:
        return True
    if not isinstance(value, Mapping):
        return False
    if not value:
        return True
    try:
        resume = Resume(**value)
    except TypeError:
        return False
    inside = is_count(resume.position) and is_count(resume.samples) and resume.position <= resume.samples
    return inside and are_rows(resume.parts) and sum(row[2] for row in resume.parts) >= resume.samples


def match_parts(view: View, resume: Resume) -> tuple[View, tuple[tuple[int, int], ...], list[str]]:
    """What is there now of the samples of an earlier snapshot, in its order; the ranges of indices that are not; and
    the parts that they were.

    A part that was converted since has the same content.
    """
    by_id = {part.id: part for part in view.parts}
    by_content = {(part.content, part.samples): part for part in view.parts if part.content}
    parts: list[ShardFile] = []
    lost: list[tuple[int, int]] = []
    gone: list[str] = []
    start = 0
    for id, _, samples, content, *_ in resume.parts:
        part = by_id.get(id) or by_content.get((content, samples))
        if part is None:
            lost.append((start, start + samples))
            gone.append(id)
        else:
            parts.append(part)
        start += samples
    return replace(view, parts=tuple(parts)), tuple(lost), gone


def resumed(
    generation: int, epoch: int, view: View, resume: Resume, *, settings: Settings, count: Callable[[View], int]
) -> EpochPlan:
    """The plan of what is left of an epoch, of which ``view`` has what is still there; ``count`` says how many of a
    view's samples are read.

    Raises :class:`UsageError` when samples are gone, unless ``missing="skip"`` goes on without them.
    """
    view, lost, _ = match_parts(view, resume)
    chooses = "split=" if settings.split is not None else "where=" if settings.where is not None else None
    next_one = f"begin the next epoch with loader.epoch = {epoch + 1}"
    if lost and settings.missing != "skip":
        if not view.parts:
            raise UsageError(
                f"none of the {len(resume.parts)} shards of the epoch to resume is in {settings.root}: the state is of"
                f" another cache, or they were evicted since; {next_one}"
            )
        skip = "missing='skip' goes on without their samples" if chooses is None else next_one
        raise UsageError(f"{len(lost)} of {len(resume.parts)} shards of the epoch to resume were evicted since; {skip}")
    if not lost:
        return EpochPlan(generation, epoch, view, count(view), resume.position)
    if chooses is not None:
        raise UsageError(
            f"an epoch with {chooses} cannot go on without evicted shards: nobody knows which of their samples it had;"
            f" {next_one}"
        )
    if not view.parts:
        say(
            f"none of the {len(resume.parts)} shards of epoch {epoch} is left, which was to be resumed: it ends at once"
        )
    plan = EpochPlan(generation, epoch, view, 0, lost=lost, of=(resume.samples, resume.position))
    return replace(plan, samples=len(plan.left(settings)[0]))


SAVED: dict[str, Callable[[Any], bool]] = {
    "epoch": is_whole,
    "taken": lambda value: value is None or is_count(value),
    "order": lambda value: value is None or isinstance(value, dict),
    "resume": is_resume,
}
"""What a loader's state has, and whether a value of it can be."""
