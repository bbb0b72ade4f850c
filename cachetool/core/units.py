"""Sizes, rates and durations as people write them: ``50GB`` is 50 x 10^9 bytes, ``50GiB`` 50 x 2^30, ``50`` bytes."""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Collection, Container
from typing import Any

from cachetool.core.errors import UsageError
from cachetool.core.text import shown

__all__ = [
    "format_duration",
    "format_size",
    "is_one_of",
    "parse_choice",
    "parse_count",
    "parse_duration",
    "parse_flag",
    "parse_fraction",
    "parse_rate",
    "parse_size",
    "parse_text",
    "parse_whole",
    "parse_workers",
    "size_option",
]

_FACTORS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**k for k, p in enumerate("kmgtp", start=1)},
    **{p: 1000**k for k, p in enumerate("kmgtp", start=1)},
    **{f"{p}ib": 1024**k for k, p in enumerate("kmgtp", start=1)},
}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
_MAX_BYTES = 2**62
_MAX_WHOLE = 2**63
_MAX_WORKERS = 1024
_MAX_TEXT = 64
"""Characters of a size or a time: Python refuses to read numbers of some thousand digits."""
_ENDLESS = 86400.0 * 3650
"""Seconds; longer waits have no end, since clocks of the system take no more."""


def _named(what: str) -> str:
    """What a value belongs to, before it: ``max size 3``, ``seed=3``."""
    return what if what.endswith("=") else f"{what} "


def parse_whole(value: object, *, what: str, least: int | None = None) -> int:
    """A whole number of at most 63 bits, one of NumPy as well; ``least`` or more. Raises :class:`UsageError`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{_named(what)}{shown(value)} is not a whole number") from None
    if isinstance(value, bool):
        raise UsageError(f"{_named(what)}{value} is not a whole number")
    if abs(number) >= _MAX_WHOLE:
        raise UsageError(f"{_named(what)}{shown(number)} is too large; it must be below 2**63")
    if least is not None and number < least:
        raise UsageError(f"{_named(what)}{number} cannot be used: {f'at least {least}' if least else '0 or more'}")
    return number


def parse_workers(value: object, *, what: str = "--workers") -> int:
    """A number of processes. Raises :class:`UsageError`."""
    number = parse_whole(value, what=what)
    if not 1 <= number <= _MAX_WORKERS:
        raise UsageError(f"--workers must be at least 1 and at most {_MAX_WORKERS}, got {number}")
    return number


def parse_count(value: object, *, what: str) -> int:
    """A whole number of at least 0. Raises :class:`UsageError`."""
    return parse_whole(value, what=what, least=0)


def parse_flag(value: object, *, what: str) -> bool:
    """True or False, one of NumPy as well. Raises :class:`UsageError`."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise UsageError(f"{_named(what)}{shown(value)} cannot be used: True or False")


def parse_text(value: object, *, what: str) -> str:
    """Text that a file can hold, so without half of a surrogate pair. Raises :class:`UsageError`."""
    if not isinstance(value, str):
        raise UsageError(f"{_named(what)}{shown(value)} is not text")
    if not _is_unicode(value) or "\0" in value:
        raise UsageError(f"{_named(what)}{shown(value)} cannot be used: it has bytes that are no text in UTF-8")
    return str(value)


def is_one_of(value: object, choices: Container[Any]) -> bool:
    """Whether ``value`` is one of these texts and flags, as no array and no list is."""
    return isinstance(value, str | bool | None) and value in choices


def parse_choice(value: object, choices: Collection[str], *, what: str) -> str:
    """One of ``choices``. Raises :class:`UsageError`."""
    if not is_one_of(value, choices):
        raise UsageError(f"{what} is {' or '.join(choices)}, got {shown(value)}")
    return str(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: how Python reads bytes of a name that are not UTF-8
        return False
    return True


def _match(text: object) -> re.Match[str] | None:
    """A number and its unit; None for anything else."""
    return _NUMBER.fullmatch(text) if isinstance(text, str) and len(text) <= _MAX_TEXT else None


def parse_size(text: str | float, *, what: str = "size") -> int:
    """Bytes that ``text`` stands for, at least 0; a number is one of bytes, rounded up.

    Raises :class:`UsageError`, quoting the text, when it is no size; ``what`` names it in the message.
    """
    if isinstance(text, numbers.Real) and not isinstance(text, bool) and abs(text) < math.inf:  # no NaN either
        if text > _MAX_BYTES:
            raise UsageError(f"{_named(what)}{shown(text)} is larger than 4 EiB")
        text = str(math.ceil(text))
    match = _match(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{_named(what)}{shown(text)} is not a size; write it like 50GB, 512MiB or 1000000")
    value = math.ceil(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor
    if value > _MAX_BYTES:
        raise UsageError(f"{_named(what)}{shown(text)} is larger than 4 EiB")
    return value


def parse_rate(text: str | float, *, what: str = "rate") -> int:
    """Bytes a second: a size, with or without ``/s``. Raises :class:`UsageError`."""
    if isinstance(text, str):
        text = re.sub(r"(?i)(/s|ps)\s*$", "", text)
    rate = parse_size(text, what=what)
    if rate == 0:
        raise UsageError(f"{what} must be above 0")
    return rate


def parse_duration(text: str | float, *, what: str = "duration") -> float:
    """Seconds that ``text`` stands for: ``60s``, ``10min``, ``500ms``, a bare number is seconds.

    Raises :class:`UsageError`, quoting the text, when it is none.
    """
    if isinstance(text, numbers.Real) and not isinstance(text, bool) and text >= 0:
        return math.inf if text > _ENDLESS else float(text)
    match = _match(text)
    factor = _SECONDS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{_named(what)}{shown(text)} is not a duration; write it like 60s, 10min or 2h")
    seconds = float(match.group(1)) * factor
    return math.inf if seconds > _ENDLESS else seconds


def parse_fraction(text: str | float, *, what: str = "fraction") -> float:
    """A share between 0 and 1, from ``10%`` or ``0.1``. Raises :class:`UsageError`."""
    raw = text.strip() if isinstance(text, str) else ""
    percent = raw.endswith("%")
    try:
        if isinstance(text, numbers.Real) and not isinstance(text, bool):
            raw = str(float(text))
        value = float(raw.removesuffix("%")) / (100 if percent else 1)
    except (ValueError, OverflowError):
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{_named(what)}{shown(text)} is not a share; write it like 10% or 0.1")
    return value


def format_size(nbytes: int) -> str:
    """``nbytes`` for people, in powers of ten: ``512 B``, ``1.5 GB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.95:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} PB"


def size_option(nbytes: int) -> str:
    """At least ``nbytes``, and not a tenth more, as an option takes it: ``512B``, ``1.6GB``."""
    factors = [(unit, 1000**power) for power, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))]
    unit, factor = [pair for pair in factors if pair[1] <= max(1, nbytes)][-1]
    tenths = 10 if factor > 1 and nbytes < 100 * factor else 1
    value = -(-nbytes * tenths // factor)
    return f"{value / tenths:.{1 if tenths > 1 else 0}f}{unit}"


def format_duration(seconds: float) -> str:
    """``seconds`` for people: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
