"""The task of the process that reads a foreign file for :mod:`cachetool.sources.guard`.

::

    message  {"at": path}                                         the process is about to read this file
    ask      {"schema": ..., "samples": n, "skipped": [...]}      the file is open
             {"misfits": [[why, rows], ...]}, arrays in blocks    the samples, and which rows are no samples
    answer   {"read": [start, stop]}                              the next request
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
"""Bytes that reading may take in addition to the memory that the process has when it begins. Ordinary files took 3 to
45 MiB."""
COPIES = 8
"""Number of times the largest row or chunk that reading may take in addition to ``MEMORY``."""

MAX_MISFITS = 2**20
"""Number of rows of one answer that are reported one by one, about 10 bytes each."""


def read(
    channel: Asking, *, path: str, options: Message, opener: str, about: Message, sockets: list[int], seconds: int
) -> Message:
    """Open the file and answer requests until stdin ends."""
    now = path

    def notice(at: Path) -> None:
        nonlocal now
        now = str(at)
        channel.send({"at": now})

    try:
        # The first limit comes before the library sees a byte of the file.
        _limit(MEMORY)
        _patience(seconds)
        asked = SourceOptions.from_json(options)
        source: LimitedAccess = named(opener)(path, asked, notice=notice, about=about, sockets=sockets)
        # Only now is the largest row or chunk known. `piece` was checked against the size of the file, so a hostile
        # file cannot raise the limit at will.
        _limit(MEMORY + COPIES * source.piece)
        said = {"schema": source.schema.to_json(), "samples": source.samples, "skipped": source.skipped}
        blocks: list[npt.NDArray[np.uint8]] = []
        while True:
            start, stop = channel.ask(said, *blocks)["read"]
            _patience(seconds)
            said, blocks = _answer(source, start, stop)
    # RLIMIT_DATA makes malloc fail, so the process can still report the file. The kernel's out-of-memory killer would
    # choose any process of the machine.
    except MemoryError:
        raise BadObject(f"{now}: reading it needs far more memory than a file of this size should need") from None


def _answer(source: LimitedAccess, start: int, stop: int) -> tuple[Message, list[npt.NDArray[np.uint8]]]:
    misfits: dict[str, list[int]] = {}
    try:
        block = source.read(start, stop)
    except MisfitRows as error:
        # Reported as an error of the whole file: a pull does not continue with so many misfits in any case.
        if len(error.misfits) > MAX_MISFITS:
            raise
        block = error.block
        for row, why in error.misfits.items():
            misfits.setdefault(why, []).append(row)
    return {"misfits": list(misfits.items())}, _arrays(block)


def _limit(most: int) -> None:
    """Limit the memory of this process to ``most`` bytes more than it has now, and forbid core files, which would hold
    user data."""
    most += _taken()
    # The hard limit stays, because the limit is raised once more when the largest chunk is known.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _taken() -> int:
    """Return the bytes that count as data of this process now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        # No /proc, so not Linux. 128 MiB is an estimate of what Python and the libraries have taken.
        return 2**27


def _patience(seconds: int) -> None:
    """End this process by SIGPROF after ``seconds`` more seconds of processor time."""
    # Processor time and not wall time: a slow disk or store is no fault of the file. The default action of SIGPROF ends
    # the process inside C code, too, where a Python handler would not run.
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _arrays(block: Block) -> list[npt.NDArray[np.uint8]]:
    """Return the bytes of a block's arrays, in the order in which :func:`cachetool.sources.guard.read_block` takes
    them."""
    arrays: list[npt.NDArray[Any]] = []
    for field in block.schema:
        column = block.columns[field.name]
        if isinstance(column, Ragged):
            tight = column.compact()
            arrays += [tight.offsets, *([] if tight.shapes is None else [tight.shapes]), tight.values]
        else:
            # Values of no bytes do not tell how many they are, so their number is sent instead.
            arrays.append(np.array([len(column)], dtype="<i8") if field.nbytes == 0 else column)
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
