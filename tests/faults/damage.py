"""Damages a file at one place after another, and reads it in a process that may die of it.

Each case runs in a fork of a process that has imported every library, so thousands of cases need no thousand imports. A
case that kills its process or never ends is counted, and the next process continues after it. Processes that cachetool
starts for foreign files are forked likewise (:mod:`tests.zygote`).
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.zygote import fork_zygote

__all__ = ["Case", "Report", "applied", "cases", "look_at_all"]

SILENCE = 60.0
"""Seconds until a case counts as hung. A reader of a foreign file is stopped long before."""


@dataclass(frozen=True, slots=True)
class Case:
    """One damage of one file."""

    file: Path
    at: int
    bit: int | None
    """The bit that is flipped. None: the file is truncated at ``at``."""

    def __str__(self) -> str:
        return f"{self.file.name} cut at {self.at}" if self.bit is None else f"{self.file.name} {self.at}:{self.bit}"


def cases(files: Sequence[Path], *, cuts: int, flips: int, seed: int) -> list[Case]:
    """Return ``cuts`` and ``flips`` over these files: one half spread evenly over all bytes, the other half evenly over
    the files. Small files, which describe the others, then get their share.
    """
    chance = random.Random(seed)
    sizes = [path.stat().st_size for path in files]
    known = [path for path, size in zip(files, sizes, strict=True) if size]
    size_of = dict(zip(files, sizes, strict=True))
    weights = [size_of[path] for path in known]
    out: list[Case] = []
    for number in range(cuts + flips):
        path = known[number // 2 % len(known)] if number % 2 else chance.choices(known, weights)[0]
        at = chance.randrange(size_of[path])
        out.append(Case(path, at, None if number < cuts else chance.randrange(8)))
    return out


@contextmanager
def applied(case: Case) -> Iterator[None]:
    """Damage the file inside the ``with`` block. It keeps its inode and size, for catalogs that know its size."""
    whole = case.file.read_bytes()
    try:
        if case.bit is None:
            os.truncate(case.file, case.at)
        else:
            _write(case.file, case.at, bytes([whole[case.at] ^ 1 << case.bit]))
        yield
    finally:
        if case.bit is None:
            case.file.write_bytes(whole)
        else:
            _write(case.file, case.at, whole[case.at : case.at + 1])


def _write(path: Path, at: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, at)
    os.close(fd)


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """The outcome of all cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """The cases that broke a promise, and how."""
    main_mib: int = 0
    """Peak memory of the reading process above its start, in MiB."""
    guard_mib: int = 0
    """Peak memory of the processes that read foreign files above their start, in MiB."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "cases": sum(self.outcomes.values()),
            **dict(sorted(self.outcomes.items())),
            "main_mib": self.main_mib,
            "guard_mib": self.guard_mib,
            "seconds": round(self.seconds, 1),
            "bad": self.bad,
        }


def look_at_all(every: Sequence[Case], look: Callable[[Case], str], *, spare: Path) -> Report:
    """Call ``look`` for each damaged file in a separate process. ``look`` returns the outcome as a word and raises
    AssertionError for a broken promise. ``spare`` keeps the sound file meanwhile.
    """
    began, report, at = time.monotonic(), Report(), 0
    while at < len(every):
        at = _look_from(every, at, look, report, spare)
    report.seconds = time.monotonic() - began
    return report


def _look_from(every: Sequence[Case], first: int, look: Callable[[Case], str], report: Report, spare: Path) -> int:
    """Run the cases from ``first`` until one kills the process. Return the number of the next case."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _child(every, first, look, tell, spare)
    os.close(tell)
    lines = b""
    done = first
    hung = False
    with os.fdopen(told, "rb", buffering=0) as stream:
        while True:
            if not select.select([stream], [], [], SILENCE)[0]:
                os.kill(pid, signal.SIGKILL)
                hung = True
                break
            data = stream.read(65536)
            if not data:
                break
            *whole, lines = (lines + data).split(b"\n")
            for line in whole:
                value = json.loads(line)
                done = value["number"] + 1
                report.outcomes[value["outcome"]] += 1
                report.main_mib = max(report.main_mib, value["main"])
                report.guard_mib = max(report.guard_mib, value["guard"])
                if value["bad"]:
                    report.bad.append(f"{every[value['number']]}: {value['bad']}")
    _, status = os.waitpid(pid, 0)
    if done < len(every):
        how = "hung" if hung else f"died ({os.waitstatus_to_exitcode(status)})"
        report.outcomes["hung" if hung else "crashed"] += 1
        report.bad.append(f"{every[done]}: {how}")
        every[done].file.write_bytes(spare.read_bytes())
        done += 1
    return done


def _child(every: Sequence[Case], first: int, look: Callable[[Case], str], tell: int, spare: Path) -> None:
    code = 1
    try:
        fork_zygote()
        begun, resident = _high_water(), _resident()
        for number in range(first, len(every)):
            case, bad = every[number], ""
            spare.write_bytes(case.file.read_bytes())
            try:
                with applied(case):
                    outcome = look(case)
            except AssertionError as error:
                outcome, bad = "broken", " ".join(str(error).split())[:300] or "an assertion"
            except Exception as error:  # noqa: BLE001 - a user would see any exception raised here as a traceback
                outcome, bad = "traceback", f"{type(error).__name__}: {error}"[:300]
            value = {"number": number, "outcome": outcome, "bad": bad, "main": _high_water() - begun}
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
            os.write(tell, json.dumps({**value, "guard": max(0, most - resident)}).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _high_water() -> int:
    """Return the peak memory of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) >> 10
    return 0


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
