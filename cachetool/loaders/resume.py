"""Taking an epoch up again: what it consisted of, and what of that is still there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetool.loaders.view import Part, View

__all__ = ["Resume", "found_again"]


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an epoch is taken up again: the samples it had, and how many of its order were read."""

    position: int
    samples: int
    parts: Sequence[Sequence[Any]]
    """Rows as :func:`~cachetool.loaders.plan.rows` gives them."""
    origins: Sequence[dict[str, Any]] = ()
    """Where they were pulled from, those that were."""


def found_again(view: View, resume: Resume) -> tuple[View, tuple[tuple[int, int], ...], list[str]]:
    """What is there now of the samples of an earlier snapshot, in its order; the ranges of indices that are not; and
    the parts that they were.

    A part that was converted since has the same content.
    """
    by_id = {part.id: part for part in view.parts}
    by_content = {(part.content, part.samples): part for part in view.parts if part.content}
    parts: list[Part] = []
    lost: list[tuple[int, int]] = []
    gone: list[str] = []
    start = 0
    for id, _, samples, content, *_ in resume.parts:
        found = by_id.get(id) or by_content.get((content, samples))
        if found is None:
            lost.append((start, start + samples))
            gone.append(id)
        else:
            parts.append(found)
        start += samples
    return replace(view, parts=tuple(parts)), tuple(lost), gone
