"""The main function of the process that reads a foreign file for :mod:`cachetool.sources.guard`.

::

    stdin    {"path": ..., "options": {...}, "opener": "module:name", "about": {...}, "seconds": 120}
                                                                 one line, then requests, each answered:
             {"read": [start, stop]}
    stdout   u32 length | JSON, then what it announces:
             {"at": path}                                         about to touch this file; the answer follows
             {"schema": ..., "samples": n, "skipped": [...]}      the file is open
             {"arrays": [bytes, ...]} and the arrays              a block
             {"arrays": ..., "misfits": [[why, rows], ...]}       a block, and which of its rows are no samples
             {"error": class, "message": ...}                     of cachetool
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import BadObject, CacheToolError, to_json
from cachetool.proc.streams import keep_standard_streams
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import LimitedAccess, MisfitRows

__all__ = ["main"]

Opener = Callable[..., LimitedAccess]

MEMORY = 2**28
"""Bytes that reading may take beyond what the process has when it begins..."""
COPIES = 8
"""...and so many times the largest row or chunk."""

MAX_MISFITS = 2**20
"""Rows of one answer that are told one by one, about 10 bytes each."""


def main() -> None:
    """Answer until stdin ends."""
    keep_standard_streams()
    out = os.fdopen(os.dup(1), "wb", buffering=2**20)
    os.dup2(2, 1)
    if not (line := sys.stdin.buffer.readline()):
        return  # whoever started this ended before it asked for anything
    asked = json.loads(line)
    path, seconds = Path(asked["path"]), asked["seconds"]
    now = path
    with contextlib.suppress(BrokenPipeError):
        try:
            _limit(MEMORY)
            _patience(seconds)
            module, _, name = asked["opener"].partition(":")
            open_here: Opener = getattr(importlib.import_module(module), name)
            options = SourceOptions.from_json(asked["options"])

            def notice(at: Path) -> None:
                nonlocal now
                now = at
                _say(out, {"at": str(at)})

            source = open_here(path, options, notice=notice, about=asked["about"])
            _limit(MEMORY + COPIES * source.piece)
            about = {"schema": source.schema.to_json(), "samples": source.samples, "skipped": source.skipped}
            _say(out, about)
            _serve(out, source, seconds)
        except CacheToolError as error:
            _say(out, to_json(error))
        except MemoryError:
            _say(out, to_json(BadObject(f"{now}: reading it takes far more memory than its size can mean")))
        except BrokenPipeError:
            raise
        except Exception:  # noqa: BLE001 - a bug must reach the starter as text, not as a damaged file
            _say(out, to_json(CacheToolError(f"a bug while {path} was read:\n{traceback.format_exc()}")))
    os._exit(0)  # the file may have broken what a tidy end would touch


def _serve(out: IO[bytes], source: LimitedAccess, seconds: int) -> None:
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        _patience(seconds)
        misfits: dict[str, list[int]] = {}
        try:
            block = source.read(*asked["read"])
        except MisfitRows as error:
            if len(error.misfits) > MAX_MISFITS:  # as if all were: no pull goes on with so many
                raise
            block = error.block
            for row, why in error.misfits.items():
                misfits.setdefault(why, []).append(row)
        _send(out, block, {"misfits": list(misfits.items())} if misfits else {})


def _limit(most: int) -> None:
    """No more memory than reading can take, and no core file of somebody's data."""
    most += _taken()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _taken() -> int:
    """Bytes that count as this process's data by now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 2**27


def _patience(seconds: int) -> None:
    """End this process, by SIGPROF, after so many seconds of computing from now on."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(out: IO[bytes], block: Block, more: dict[str, Any]) -> None:
    """Answer with a block, and ``more`` about it."""
    arrays: list[Any] = []
    for field in block.schema:
        column = block.columns[field.name]
        if not isinstance(column, Ragged):
            # values of no bytes do not tell how many they are
            arrays.append(np.array([len(column)], dtype="<i8") if field.nbytes == 0 else np.ascontiguousarray(column))
            continue
        tight = column.compact()
        arrays.append(np.ascontiguousarray(tight.offsets))
        if tight.shapes is not None:
            arrays.append(np.ascontiguousarray(tight.shapes))
        arrays.append(np.ascontiguousarray(tight.values))
    _say(out, {"arrays": [array.nbytes for array in arrays], **more}, flush=False)
    for array in arrays:
        if array.nbytes:
            out.write(array.reshape(-1).view(np.uint8).data)
    out.flush()


def _say(out: IO[bytes], about: dict[str, Any], *, flush: bool = True) -> None:
    text = json.dumps(about).encode()
    out.write(struct.pack("<I", len(text)) + text)
    if flush:
        out.flush()
