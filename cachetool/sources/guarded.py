"""The task of the process that reads a foreign file for :mod:`cachetool.sources.guard`: it asks for requests.

::

    message  {"at": path}                                         about to touch this file
    ask      {"schema": ..., "samples": n, "skipped": [...]}      the file is open
             {"misfits": [[why, rows], ...]}, arrays in blocks    what was asked for, and which rows are no samples
    answer   {"read": [start, stop]}
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import BadObject
from cachetool.proc.task import Asking, Message, named
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import LimitedAccess, MisfitRows

__all__ = ["read"]

MEMORY = 2**28
"""Bytes that reading may take beyond what the process has when it begins..."""
COPIES = 8
"""...and so many times the largest row or chunk."""

MAX_MISFITS = 2**20
"""Rows of one answer that are told one by one, about 10 bytes each."""


def read(
    channel: Asking, *, path: str, options: Message, opener: str, about: Message, sockets: list[int], seconds: int
) -> Message:
    """Answer until stdin ends."""
    now = path

    def notice(at: Path) -> None:
        nonlocal now
        now = str(at)
        channel.send({"at": now})

    try:
        _limit(MEMORY)
        _patience(seconds)
        asked = SourceOptions.from_json(options)
        source: LimitedAccess = named(opener)(path, asked, notice=notice, about=about, sockets=sockets)
        _limit(MEMORY + COPIES * source.piece)
        said = {"schema": source.schema.to_json(), "samples": source.samples, "skipped": source.skipped}
        blocks: list[npt.NDArray[np.uint8]] = []
        while True:
            start, stop = channel.ask(said, *blocks)["read"]
            _patience(seconds)
            said, blocks = _answer(source, start, stop)
    except MemoryError:
        raise BadObject(f"{now}: reading it takes far more memory than its size can mean") from None


def _answer(source: LimitedAccess, start: int, stop: int) -> tuple[Message, list[npt.NDArray[np.uint8]]]:
    misfits: dict[str, list[int]] = {}
    try:
        block = source.read(start, stop)
    except MisfitRows as error:
        if len(error.misfits) > MAX_MISFITS:  # as if all were: no pull goes on with so many
            raise
        block = error.block
        for row, why in error.misfits.items():
            misfits.setdefault(why, []).append(row)
    return {"misfits": list(misfits.items())}, _arrays(block)


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


def _arrays(block: Block) -> list[npt.NDArray[np.uint8]]:
    """The bytes of a block's arrays, as :func:`cachetool.sources.guard.read_block` takes them."""
    arrays: list[npt.NDArray[Any]] = []
    for field in block.schema:
        column = block.columns[field.name]
        if isinstance(column, Ragged):
            tight = column.compact()
            arrays += [tight.offsets, *([] if tight.shapes is None else [tight.shapes]), tight.values]
        else:  # values of no bytes do not tell how many they are
            arrays.append(np.array([len(column)], dtype="<i8") if field.nbytes == 0 else column)
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
