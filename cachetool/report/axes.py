"""Axes of charts: which numbers are written at an axis, in which unit, so that no two overlap."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Axis", "age_axis", "bytes_axis", "count_axis", "log_bytes_axis", "seconds_axis", "time_axis"]

_SIZES = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12), ("PB", 10**15))
_DURATIONS = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAYS = (1, 2, 5, 7, 14, 30, 60, 90, 180, 365, 730, 1825)


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values from ``low`` to ``high``."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Values, and the text that is written at each."""
    title: str
    """The name of the values, with their unit."""

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def bytes_axis(most: float, *, per: str = "") -> Axis:
    """Return an axis from 0 to a little above ``most`` bytes; ``per`` is a suffix such as ``/s``."""
    unit, factor = [pair for pair in _SIZES if pair[1] <= max(1.0, most)][-1]
    return _linear(most, factor, f"{unit}{per}")


def seconds_axis(most: float, what: str) -> Axis:
    """Return an axis from 0 to a little above ``most`` seconds."""
    unit, factor = _duration(most)
    return _linear(most, factor, f"{what}, {unit}")


def age_axis(most: float) -> Axis:
    """Return an axis from 0 seconds to exactly ``most``."""
    unit, factor = _duration(most)
    axis = _linear(most, factor, f"age in {unit}", most_ticks=6)
    ticks = tuple((value, text) for value, text in axis.ticks if value <= most)
    return Axis(0.0, most, ticks, axis.title)


def count_axis(most: float, what: str) -> Axis:
    """Return an axis from 0 to a little above ``most``, in whole numbers."""
    return _linear(most, 1, what, least_step=1.0)


def log_bytes_axis(low: float, high: float) -> Axis:
    """Return an axis of bytes from ``low`` to ``high``, as their logarithm to base 10."""
    values = [factor * 10.0**power for power in range(16) for factor in (1, 2, 5)]
    inside = [value for value in values if low <= value <= high]
    while len(inside) > 6:
        inside = inside[::2]
    ticks = tuple((math.log10(value), _in_unit(value)) for value in inside or [math.sqrt(low * high)])
    return Axis(math.log10(low), math.log10(high), ticks, "bytes of a shard, logarithmic")


def time_axis(begin: float, end: float) -> Axis:
    """Return an axis of seconds since 1970, in local time."""
    length = end - begin
    small = next((step for step in _STEPS if length / step <= 5), None)
    ticks = _days(begin, end) if small is None else _clock(begin, end, small)
    # The offset as a number: the name of a time zone may be any text, and tells a colleague in
    # another country little.
    offset = time.strftime("%z", time.localtime(end))
    first, last = (time.strftime("%d %b %Y", time.localtime(at)) for at in (begin, end))
    days = last if first == last else f"{first} to {last}"
    return Axis(begin, end, tuple(ticks), f"local time (UTC{offset[:3]}:{offset[3:]}), {days}")


def _clock(begin: float, end: float, step: int) -> list[tuple[float, str]]:
    shift = time.localtime(begin).tm_gmtoff
    # Ticks at round local times: zones are off UTC by hours, and some by half an hour.
    at = math.ceil((begin + shift) / step) * step - shift
    ticks = []
    while at <= end:
        here = time.localtime(at)
        midnight = (here.tm_hour, here.tm_min, here.tm_sec) == (0, 0, 0)
        form = "%d %b" if midnight else "%H:%M:%S" if step < 60 else "%H:%M"
        ticks.append((float(at), time.strftime(form, here)))
        at += step
    return ticks


def _days(begin: float, end: float) -> list[tuple[float, str]]:
    step = next((days for days in _DAYS if (end - begin) / 86400 / days <= 5), _DAYS[-1])
    here = time.localtime(begin)
    form = "%d %b" if (end - begin) < 300 * 86400 else "%b %Y"
    ticks = []
    # Midnights by the calendar, because the day on which clocks change has 23 or 25 hours.
    for number in range(1, 12):
        at = time.mktime((here.tm_year, here.tm_mon, here.tm_mday + number * step, 0, 0, 0, 0, 0, -1))
        if at > end:
            break
        ticks.append((at, time.strftime(form, time.localtime(at))))
    return ticks


def _duration(seconds: float) -> tuple[str, int]:
    return [pair for pair in _DURATIONS if pair[1] <= max(1.0, seconds / 2)][-1]


def _in_unit(nbytes: float) -> str:
    unit, factor = [pair for pair in _SIZES if pair[1] <= max(1.0, nbytes)][-1]
    return f"{nbytes / factor:g} {unit}"


def _linear(most: float, factor: int, title: str, *, least_step: float = 0.0, most_ticks: int = 4) -> Axis:
    step = max(least_step, _nice(max(most, 1e-9) / factor / most_ticks)) if most else 1.0
    # A thousandth of tolerance, so that a value above a tick by rounding alone gets no further
    # step.
    ends = max(1, math.ceil(most / factor / step * 0.999))
    number: Callable[[float], str] = lambda value: f"{value:,.10g}"  # noqa: E731
    ticks = tuple((tick * step * factor, number(round(tick * step, 10))) for tick in range(ends + 1))
    return Axis(0.0, ends * step * factor, ticks, title)


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
