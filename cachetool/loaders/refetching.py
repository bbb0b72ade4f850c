"""Having shards pulled again by a process of its own: no loader talks to a remote store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from cachetool.boot import boot
from cachetool.errors import CacheToolError, CapBlocked, UsageError, from_json
from cachetool.loaders.resume import Resume, found_again
from cachetool.loaders.view import View

__all__ = ["have_again"]


def have_again(root: str, view: View, resume: Resume) -> None:
    """Have shards pulled again that an epoch had and that are gone from the view."""
    _, _, gone = found_again(view, resume)
    known = {each["id"]: each for each in resume.origins}
    if unknown := sorted(set(gone) - set(known)):
        raise UsageError(f"shard {unknown[0]} of the epoch to resume was not pulled, so it cannot be pulled again")
    if not gone:
        return
    try:
        _pulled_again(root, [known[id] for id in gone])
    except CapBlocked as error:
        raise CapBlocked(
            f"the {len(gone)} evicted shards of the epoch to resume find no room beside those that are there; raise"
            " --max-size, or go on without them: missing='skip'"
        ) from error


def _pulled_again(root: str, shards: Sequence[dict[str, Any]]) -> None:
    """Pull these evicted shards again (:mod:`cachetool.refetch`). Raises what went wrong there."""
    arguments = {"root": root, "shards": list(shards)}
    task = {"target": "cachetool.refetch:refetch", "arguments": arguments, "starter": os.getpid()}
    command = [sys.executable, "-c", boot("cachetool.engines.child")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
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
    raise CacheToolError("the process that was to pull evicted shards again ended without a word")
