"""``doctor --live``: watches the trainings and pulls of a cache for some seconds, and says what to change."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cachetool.cache import CacheDir
from cachetool.check.doctor import Finding
from cachetool.core.causes import main_cause, pull_sentence, sentence

__all__ = ["watched"]

Row = Mapping[str, Any]


def watched(cache: CacheDir, seconds: float) -> tuple[str, list[Finding]]:
    """Look at a cache for ``seconds``. Return one sentence, what to change or that nothing is late, and a finding for
    each training and each pull."""
    before = cache.stats().as_dict()
    time.sleep(seconds)
    after = cache.stats().as_dict()
    trainers = [_since(row, before["trainers"]) for row in after["trainers"]]
    pulls = [_since(row, before["pulling"]) for row in after["pulling"]]
    findings = [
        Finding(f"training pid {row['pid']}", "ok" if _cause(row) is None else "note", _trainer_text(row))
        for row in trainers
    ]
    findings += [Finding(f"pull pid {row['pid']}", "ok", _pull_text(row)) for row in pulls]
    # A training that told nothing meanwhile may be paused. Its last epoch explains nothing that happens now.
    fresh = [row for row, told in zip(trainers, after["trainers"], strict=True) if told not in before["trainers"]]
    return _sentence(fresh, pulls), findings


def _sentence(trainers: list[Row], pulls: list[Row]) -> str:
    """Return the sentence about the training that waits most, or about the pull that it waits for; otherwise about the
    pull."""
    late = [row for row in trainers if _cause(row) is not None]
    pull = f"the pull brings {_pull_text(pulls[0])}" if pulls else ""
    if late:
        worst = max(late, key=lambda row: sum(row["causes"].values()) / row["seconds"])
        if _cause(worst) == "samples" and pull:
            return f"training waits for samples, and {pull}"
        return f"pid {worst['pid']} ({worst['what']}): {_trainer_text(worst)}"
    if trainers:
        return f"nothing is late: {_trainer_text(trainers[0]).removeprefix('nothing was late: ')}{pull and f'; {pull}'}"
    return pull or "no training and no pull of this cache told anything meanwhile; an epoch tells after five seconds"


def _cause(row: Row) -> str | None:
    return main_cause(row["causes"], row["seconds"] or 0.0)


def _trainer_text(row: Row) -> str:
    return sentence(row["causes"], row["seconds"] or 0.0)


def _pull_text(row: Row) -> str:
    return pull_sentence(row["causes"], row["bytes"], row["seconds"])


def _since(row: Row, before: list[Row]) -> Row:
    """Return the figures of a row since the first look, or its own if it tells of another epoch or of nothing new."""
    for old in before:
        same = old["pid"] == row["pid"] and old.get("epoch") == row.get("epoch")
        if same and (old["seconds"] or 0.0) < (row["seconds"] or 0.0):
            causes = {name: max(0.0, each - old["causes"].get(name, 0.0)) for name, each in row["causes"].items()}
            new = {**row, "seconds": row["seconds"] - (old["seconds"] or 0.0), "causes": causes}
            return new | ({"bytes": row["bytes"] - old["bytes"]} if "bytes" in row else {})
    return row
