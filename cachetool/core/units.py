"""Parsers for sizes, rates, durations and other values of options: ``50GB`` is 50 x 10^9 bytes, ``50GiB`` 50 x 2^30."""

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
# SQLite and NumPy keep integers in 64 bits with a sign.
_MAX_WHOLE = 2**63
_MAX_WORKERS = 1024
_MAX_TEXT = 64
"""Most characters of a size or a time, because Python refuses to parse integers of some thousand digits."""
_ENDLESS = 86400.0 * 3650
"""Ten years in seconds; a longer wait is infinite, because clocks of the operating system accept no such number."""


def _named(what: str) -> str:
    """Return the name of a value as it stands before the value in a message: ``max size 3``, ``seed=3``."""
    return what if what.endswith("=") else f"{what} "


def parse_whole(value: object, *, what: str, least: int | None = None) -> int:
    """Return a whole number of at most 63 bits, at least ``least``; NumPy integers are accepted. Raise
    :class:`UsageError` otherwise."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{_named(what)}{shown(value)} is not a whole number") from None
    # A bool is an int to Python, but workers=True is a mistake and not one worker.
    if isinstance(value, bool):
        raise UsageError(f"{_named(what)}{value} is not a whole number")
    if abs(number) >= _MAX_WHOLE:
        raise UsageError(f"{_named(what)}{shown(number)} is too large; it must be below 2**63")
    if least is not None and number < least:
        raise UsageError(
            f"{_named(what)}{number} cannot be used; it must be {f'at least {least}' if least else '0 or more'}"
        )
    return number


def parse_workers(value: object, *, what: str = "--workers") -> int:
    """Return a number of processes, 1 to 1,024. Raise :class:`UsageError` otherwise."""
    number = parse_whole(value, what=what)
    if not 1 <= number <= _MAX_WORKERS:
        raise UsageError(f"--workers must be at least 1 and at most {_MAX_WORKERS}, got {number}")
    return number


def parse_count(value: object, *, what: str) -> int:
    """Return a whole number of at least 0. Raise :class:`UsageError` otherwise."""
    return parse_whole(value, what=what, least=0)


def parse_flag(value: object, *, what: str) -> bool:
    """Return True or False; NumPy bools are accepted. Raise :class:`UsageError` otherwise."""
    # NumPy's bool (bool_ before NumPy 2) is recognised by its name, because commands that need no arrays must start
    # without importing NumPy.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise UsageError(f"{_named(what)}{shown(value)} cannot be used; it must be True or False")


def parse_text(value: object, *, what: str) -> str:
    """Return text that can be stored as UTF-8 in a file, without null characters. Raise :class:`UsageError`
    otherwise."""
    if not isinstance(value, str):
        raise UsageError(f"{_named(what)}{shown(value)} is not text")
    if not _is_unicode(value) or "\0" in value:
        raise UsageError(f"{_named(what)}{shown(value)} cannot be used: it has bytes that are not valid UTF-8 text")
    return str(value)


def is_one_of(value: object, choices: Container[Any]) -> bool:
    """Return True if ``value`` is one of these texts, flags or None."""
    # The type is checked first: `in` raises an error for a list, which has no hash, and for an array, whose comparison
    # has no truth value.
    return isinstance(value, str | bool | None) and value in choices


def parse_choice(value: object, choices: Collection[str], *, what: str) -> str:
    """Return one of ``choices``. Raise :class:`UsageError` otherwise."""
    if not is_one_of(value, choices):
        raise UsageError(f"{what} must be {' or '.join(choices)}, got {shown(value)}")
    return str(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    # Python reads bytes of a file name that are not UTF-8 as halves of surrogate pairs, which UTF-8 cannot encode.
    except UnicodeEncodeError:
        return False
    return True


def _match(text: object) -> re.Match[str] | None:
    """Return the match of a number and its unit; None for any other value."""
    return _NUMBER.fullmatch(text) if isinstance(text, str) and len(text) <= _MAX_TEXT else None


def parse_size(text: str | float, *, what: str = "size") -> int:
    """Return a size in bytes, at least 0; a number is a number of bytes, rounded up.

    Raises :class:`UsageError`, which quotes the text, if it is not a size; ``what`` names the option in the message.
    """
    # The comparison is False for NaN too, which has no size in bytes.
    if isinstance(text, numbers.Real) and not isinstance(text, bool) and abs(text) < math.inf:
        if text > _MAX_BYTES:
            raise UsageError(f"{_named(what)}{shown(text)} is larger than 4 EiB")
        text = str(math.ceil(text))
    match = _match(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{_named(what)}{shown(text)} is not a size; write it like 50GB, 512MiB or 1000000")
    # Whole numbers are multiplied as integers, because a float would round sizes above 2**53 bytes.
    value = math.ceil(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor
    if value > _MAX_BYTES:
        raise UsageError(f"{_named(what)}{shown(text)} is larger than 4 EiB")
    return value


def parse_rate(text: str | float, *, what: str = "rate") -> int:
    """Return bytes per second from a size with or without ``/s``. Raise :class:`UsageError` otherwise."""
    if isinstance(text, str):
        text = re.sub(r"(?i)(/s|ps)\s*$", "", text)
    rate = parse_size(text, what=what)
    if rate == 0:
        raise UsageError(f"{what} must be above 0")
    return rate


def parse_duration(text: str | float, *, what: str = "duration") -> float:
    """Return a time in seconds from ``60s``, ``10min``, ``500ms`` or a number of seconds.

    Raises :class:`UsageError`, which quotes the text, if it is not a duration.
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
    """Return a fraction between 0 and 1 from ``10%`` or ``0.1``. Raise :class:`UsageError` otherwise."""
    raw = text.strip() if isinstance(text, str) else ""
    percent = raw.endswith("%")
    try:
        if isinstance(text, numbers.Real) and not isinstance(text, bool):
            raw = str(float(text))
        value = float(raw.removesuffix("%")) / (100 if percent else 1)
    # -1 fails the check below, so that all texts that are no fraction get the same message.
    except (ValueError, OverflowError):
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{_named(what)}{shown(text)} is not a fraction; write it like 10% or 0.1")
    return value


def format_size(nbytes: int) -> str:
    """Return a size as text for users, in powers of ten: ``512 B``, ``1.5 GB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # A value of 999.95 or more would be printed as 1000.0, so the next unit is taken.
        if abs(value) < 999.95:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} PB"


def size_option(nbytes: int) -> str:
    """Return a size as an option accepts it, rounded up by less than a tenth: ``512B``, ``1.6GB``."""
    factors = [(unit, 1000**power) for power, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))]
    unit, factor = [pair for pair in factors if pair[1] <= max(1, nbytes)][-1]
    tenths = 10 if factor > 1 and nbytes < 100 * factor else 1
    # Rounded up: a message proposes this size as a minimum, and a smaller one would be refused again.
    value = -(-nbytes * tenths // factor)
    return f"{value / tenths:.{1 if tenths > 1 else 0}f}{unit}"


def format_duration(seconds: float) -> str:
    """Return a duration as text for users: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
