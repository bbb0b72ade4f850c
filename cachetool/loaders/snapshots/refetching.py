"""Having shards pulled again by a process of its own: no loader talks to a remote store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

from cachetool.core.errors import BadObject, CacheToolError, CapBlocked, NotFound, SourceError, UsageError, from_json
from cachetool.loaders.settings import Settings
from cachetool.loaders.snapshots.resume import Resume, found_again
from cachetool.loaders.snapshots.waiting import AGAIN, FIRST, say
from cachetool.loaders.view import View
from cachetool.proc.boot import begin

__all__ = ["have_again"]


def have_again(settings: Settings, view: View, resume: Resume) -> None:
    """Have shards pulled again that an epoch had and that are gone from the view. Those that it still has stay; others
    may go for them, so nobody may lease these here."""
    there, _, gone = found_again(view, resume)
    known = {each["id"]: each for each in resume.origins}
    if unknown := sorted(set(gone) - set(known)):
        raise UsageError(f"shard {unknown[0]} of the epoch to resume was not pulled, so it cannot be pulled again")
    if not gone:
        return
    try:
        _pulled_again(settings.root, [known[id] for id in gone], keep=[part.id for part in there.parts])
    except (CapBlocked, SourceError) as error:
        what = f"{len(gone)} of {len(resume.parts)} shards of the epoch to resume cannot be pulled again"
        skip = "go on without them: missing='skip'" if settings.split is None else "begin the next epoch"
        if isinstance(error, CapBlocked):
            remedy = f"{error}, or {skip}"
        elif isinstance(error, BadObject | NotFound):  # what a pull may do about it is no option of a loader
            first = str(error).partition(";\n")[0]
            remedy = f"{first};\nput the source back as it was, its files with their times, or {skip}"
        else:
            remedy = f"{str(error).replace(chr(10), ' ')};\nor {skip}"
        raise type(error)(f"{what}: {remedy}") from error


def _pulled_again(root: str, shards: Sequence[dict[str, Any]], *, keep: Sequence[str]) -> None:
    """Pull these evicted shards again (:mod:`cachetool.pull.refetch`), and say so on stderr when it takes longer than a
    moment. Raises what went wrong there."""
    arguments = {"root": root, "shards": list(shards), "keep": list(keep)}
    task = {"target": "cachetool.pull.refetch:refetch", "arguments": arguments, "starter": os.getpid()}
    samples, due = sum(shard["samples"] for shard in shards), time.monotonic() + FIRST
    with begin("cachetool.proc.child", gives_back=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()  # and it stays open: its end would stop the work
        for line in process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise from_json(answer)
            if "result" in answer:
                return
            if time.monotonic() >= due:
                due = time.monotonic() + AGAIN
                now, note = answer["message"]["samples"], answer["message"]["note"]
                say(
                    f"pulling evicted shards of the epoch to resume again: {now} of {samples} samples"
                    f"{f'; {note}' if note else ''}"
                )
    raise CacheToolError("the process that was to pull evicted shards again ended without a word")
