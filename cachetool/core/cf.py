"""CF attributes of an array: the meaning of its stored numbers, and the computation of the values.

netCDF4 keeps these attributes with a dataset of HDF5, and xarray with an array of Zarr (https://cfconventions.org,
2.5.1, 4.4 and 8.1). The files of one series may differ in them. ``--decode cf`` of a pull applies those of each file;
``decode="cf"`` of a loader applies those of a field, which all of its samples must share::

    _Unsigned                     the same bits as integers without, or with, a sign
    _FillValue, missing_value     not a number
    scale_factor, add_offset      number * scale_factor + add_offset
    units "hours since 1900-1-1"  datetime64[ns], UTC; a missing value is NaT

Values become float32 if float32 holds each number that can be stored: integers of 8 and 16 bits, floats of 16 and
32. Other values become float64. All computation is in float64.

Times outside of the years 1678 to 2262 are refused. So are months and years as units, because their length is not
fixed, and calendars other than ``standard`` (``gregorian``) and ``proleptic_gregorian``. ``valid_range``,
``valid_min`` and ``valid_max`` are ignored: they say which measurements are good, not what a number means.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.text import shown

__all__ = ["ATTRIBUTES", "DIFFER", "Packing", "checked", "decoder", "described", "packing_of"]

ATTRIBUTES = ("_Unsigned", "_FillValue", "missing_value", "scale_factor", "add_offset", "units", "calendar")

Packing = Mapping[str, Any]
"""The attributes of :data:`ATTRIBUTES` that change the meaning of an array's numbers, as plain values. Empty if there
are none."""
DIFFER: Packing = {"differ": True}
"""In place of the attributes of a field whose samples do not share them."""
Array = npt.NDArray[Any]

# A limit against hostile files: an attribute may hold any number of fill values, and each is compared with every number
# of the array.
_MAX_FILLS = 16
_MAX_TEXT = 100
_SINCE = re.compile(
    r"\s*(?P<unit>[A-Za-z]+)\s+since\s+(?P<year>[+-]?\d{1,5})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T\s]+(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2}(?:\.\d*)?))?)?)?"
    r"\s*(?P<zone>Z|UTC|GMT|[+-]\d{1,2}(?::?\d{2})?)?\s*",
    re.IGNORECASE,
)
_UNITS = {
    1: ("nanosecond", "nanoseconds", "ns", "nsec", "nsecs"),
    10**3: ("microsecond", "microseconds", "us", "usec", "usecs"),
    10**6: ("millisecond", "milliseconds", "ms", "msec", "msecs"),
    10**9: ("second", "seconds", "s", "sec", "secs"),
    60 * 10**9: ("minute", "minutes", "min", "mins"),
    3600 * 10**9: ("hour", "hours", "h", "hr", "hrs"),
    86400 * 10**9: ("day", "days", "d"),
}
_NANOSECONDS = {name: count for count, names in _UNITS.items() for name in names}
_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
# The standard calendar is Julian before this day and Gregorian from it on.
_REFORM = np.datetime64("1582-10-15", "D")
_JULIAN_DAY = 2440588
"""The Julian day number of 1970-01-01."""


def packing_of(attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> Packing:
    """Return those of ``attributes`` that change the meaning of numbers of ``dtype``."""
    if dtype.kind not in "iuf":
        return {}
    packing: dict[str, Any] = {}
    unsigned = _text(attributes.get("_Unsigned")).lower()
    if (unsigned, dtype.kind) in (("true", "i"), ("false", "u")):
        packing["_Unsigned"] = unsigned
    for name in ("_FillValue", "missing_value"):
        # NaN as a fill value needs no treatment: it is not a number before and after.
        fills = [number for number in _numbers(attributes.get(name)) if number == number]
        if fills:
            packing[name] = fills[:_MAX_FILLS]
    for name, nothing in (("scale_factor", 1.0), ("add_offset", 0.0)):
        numbers = _numbers(attributes.get(name))
        if len(numbers) == 1 and numbers[0] != nothing:
            packing[name] = float(numbers[0])
    units = _text(attributes.get("units"))
    if re.match(r"\s*\w+\s+since\s", units):
        # The packing is written into table.json of the listing, once for each layout, so the text of a hostile file is
        # cut.
        packing["units"] = units[:_MAX_TEXT]
        if calendar := _text(attributes.get("calendar")):
            packing["calendar"] = calendar[:_MAX_TEXT]
    return packing


def checked(packing: object, dtype: np.dtype[Any]) -> Packing:
    """Return attributes that were read from a record, for numbers of ``dtype``; none if some are not as
    :func:`packing_of` returns them."""
    if not isinstance(packing, Mapping) or not packing or dtype.kind not in "iuf":
        return {}
    if "differ" in packing:
        return DIFFER
    return dict(packing) if all(name in _GOOD and _GOOD[name](value) for name, value in packing.items()) else {}


def _is_number(value: object) -> bool:
    # JSON may hold integers of any size, which float64 does not, and words for numbers that other programs refuse.
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return type(value) is float and math.isfinite(value)


def _are_fills(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _MAX_FILLS and all(map(_is_number, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


_GOOD: Mapping[str, Callable[[object], bool]] = {
    "_Unsigned": lambda value: value in ("true", "false"),
    "_FillValue": _are_fills,
    "missing_value": _are_fills,
    "scale_factor": _is_number,
    "add_offset": _is_number,
    "units": _is_text,
    "calendar": _is_text,
}


def described(packings: Sequence[Mapping[str, Packing]]) -> str:
    """Return a note on files whose numbers stand for other values, or an empty text. ``packings`` has for each file the
    packing of its fields."""
    fields = list(dict.fromkeys(name for file in packings for name in file))
    if not fields:
        return ""
    present = {attribute for file in packings for packing in file.values() for attribute in packing}
    names = ", ".join(name for name in ATTRIBUTES if name in present)
    differ = any(file.get(name) != packings[0].get(name) for file in packings for name in fields)
    more = f" and {len(fields) - 5} more" if len(fields) > 5 else ""
    files = ", which differ from file to file" if differ else ""
    return (
        f"CF attributes of {', '.join(fields[:5])}{more} ({names}{files}): the stored numbers are encoded;"
        f" --decode cf decodes them{_loader_way(fields, differ=differ)}"
    )


def _loader_way(fields: Sequence[str], *, differ: bool) -> str:
    """Return the advice to decode in a loader, which needs attributes that all samples share."""
    if differ:
        return ""
    return f", or decode={{{fields[0]!r}: 'cf'}} of a loader" if len(fields) == 1 else ", or decode='cf' of a loader"


def decoder(
    dtype: np.dtype[Any], packing: Packing, *, counts: str = "; leave out --decode cf to read the counts as numbers"
) -> tuple[np.dtype[Any], Callable[[Array], Array]] | str:
    """Return the dtype of the values that numbers of ``dtype`` stand for, and a function that computes them; or the
    reason why this is impossible. ``counts`` is the way to read times as plain numbers, for messages."""
    other = "u" if dtype.kind == "i" else "i"
    plain = np.dtype(f"<{other}{dtype.itemsize}") if "_Unsigned" in packing else dtype
    fills = _fills(packing, dtype, plain)
    scale, offset = packing.get("scale_factor"), packing.get("add_offset")

    def numbers(stored: Array) -> tuple[Array, Array]:
        """Return the numbers as float64, and a mask of the missing ones."""
        raw = stored.view(plain)
        values = raw.astype(np.float64)
        if scale is not None:
            values *= scale
        if offset is not None:
            values += offset
        return values, np.isin(raw, fills) | (values != values)

    if "units" in packing:
        origin = _origin(packing)
        if isinstance(origin, str):
            return origin + counts
        # Integer counts stay integers: nanoseconds since 1970 need more than the 53 bits of float64.
        exact = dtype.kind in "iu" and scale is None and offset is None

        def times(stored: Array) -> Array:
            raw = stored.view(plain)
            # Without NaN and scale the numbers themselves are the counts.
            values, missing = (raw, np.isin(raw, fills)) if exact else numbers(stored)
            try:
                return _times(values, missing, *origin)
            except ValueError as error:
                raise ValueError(f"{error}{counts}") from error

        return np.dtype("<M8[ns]"), times
    if not fills.size and scale is None and offset is None:
        return plain, lambda stored: stored.view(plain)
    # float32 holds every integer of 16 bits and every float of 32. A wider type would double the bytes of each sample
    # in the cache.
    narrow = dtype.itemsize <= (4 if dtype.kind == "f" else 2)
    wanted = np.dtype("<f4" if narrow else "<f8")

    def floats(stored: Array) -> Array:
        values, missing = numbers(stored)
        values[missing] = np.nan
        with np.errstate(over="ignore"):
            return values.astype(wanted, copy=False)

    return wanted, floats


def _fills(packing: Packing, dtype: np.dtype[Any], plain: np.dtype[Any]) -> Array:
    """Return the fill values in the dtype of the stored numbers."""
    fills: list[Any] = []
    for number in (*packing.get("_FillValue", ()), *packing.get("missing_value", ())):
        if plain.kind == "f":
            with np.errstate(over="ignore"):
                fills.append(plain.type(number))
        elif np.isfinite(number) and number == int(number):
            fill, bits = int(number), 8 * plain.itemsize
            # The file writes the fill value with the sign of its stored dtype. Its bits are reinterpreted as the
            # numbers' bits are, so that -1 in int8 matches 255.
            if plain != dtype and -(2 ** (bits - 1)) <= fill < 2**bits:
                fill = int(np.array(fill % 2**bits, dtype=f"u{plain.itemsize}").view(plain))
            if np.iinfo(plain).min <= fill <= np.iinfo(plain).max:
                fills.append(fill)
    return np.array(fills, dtype=plain)


def _origin(packing: Packing) -> tuple[int, int] | str:
    """Return the nanoseconds of a unit of time, and the nanoseconds from 1970 to the origin of the counts; or the
    reason why the units are refused."""
    units, calendar = str(packing["units"]), str(packing.get("calendar", "standard")).lower()
    match = _SINCE.fullmatch(units)
    if calendar not in _CALENDARS:
        return f"its times use the calendar {shown(calendar)}, which datetime64 does not support"
    unit = None if match is None else _NANOSECONDS.get(match["unit"].lower())
    if match is None or unit is None:
        return f"its units {shown(units)} are not a supported unit of time"
    year, month, day = int(match["year"]), int(match["month"]), int(match["day"])
    try:
        date = np.datetime64(
            f"{year:05d}-{month:02d}-{day:02d}" if year < 0 else f"{year:04d}-{month:02d}-{day:02d}", "D"
        )
    except ValueError:
        return f"its units {shown(units)} have no valid date"
    days = int(date.astype(np.int64))
    # Until the reform of 1582 the standard calendar is the Julian one, which NumPy does not know. proleptic_gregorian
    # extends the Gregorian calendar backwards.
    if date < _REFORM and calendar != "proleptic_gregorian":
        days = _julian_day(year, month, day) - _JULIAN_DAY
    seconds = 3600 * int(match["hour"] or 0) + 60 * int(match["minute"] or 0) - _zone_seconds(match["zone"] or "")
    nanoseconds = round(float(match["second"] or 0) * 10**9)
    return unit, (86400 * days + seconds) * 10**9 + nanoseconds


def _julian_day(year: int, month: int, day: int) -> int:
    """Return the Julian day number of a date of the Julian calendar (Meeus, Astronomical Algorithms, 7)."""
    if month <= 2:
        year, month = year - 1, month + 12
    return (1461 * (year + 4716)) // 4 + (306001 * (month + 1)) // 10000 + day - 1524


def _zone_seconds(zone: str) -> int:
    digits = zone[1:].replace(":", "")
    if not digits.isdigit():
        return 0
    hours, minutes = (int(digits), 0) if len(digits) <= 2 else (int(digits[:-2]), int(digits[-2:]))
    return (-1 if zone[0] == "-" else 1) * (3600 * hours + 60 * minutes)


def _times(counts: Array, missing: Array, unit: int, origin: int) -> Array:
    """Return the times that are ``counts`` units of ``unit`` nanoseconds after ``origin``, in nanoseconds since 1970.

    Raise ``ValueError`` for times outside of datetime64.
    """
    # Whole units of the origin are added to the counts, and the remainder in nanoseconds later: then only the sum must
    # fit into 64 bits, and a fraction of a float loses no digits to the origin.
    units, nanoseconds = divmod(origin, unit)
    # A missing count may be NaN, which no integer holds, or the largest number of its dtype, with which the product
    # below would overflow.
    counts = np.where(missing, counts.dtype.type(0), counts)
    floors = np.floor(counts) if counts.dtype.kind == "f" else counts
    if (~missing).any():
        ends = [int(end) if np.isfinite(end) else 2**63 for end in (floors[~missing].min(), floors[~missing].max())]
        # Python's integers do not overflow. The arrays below would wrap around silently to a wrong date.
        if any(not -(2**63) < (end + units + step) * unit < 2**63 for end in ends for step in (0, 1)):
            raise ValueError("times outside of the years 1678 to 2262")
    nanos = (floors.astype(np.int64) + np.where(missing, 0, units)) * unit + nanoseconds
    if counts.dtype.kind == "f":
        nanos += np.rint((counts - floors) * unit).astype(np.int64)
    times = nanos.view("<M8[ns]")
    times[missing] = np.datetime64("NaT", "ns")
    return times


def _numbers(value: Any) -> list[int | float]:
    """Return the numbers of an attribute: a scalar, an array, or a number written as text."""
    if isinstance(value, bytes | str):
        return _number_of_text(value)
    if not isinstance(value, int | float | np.generic | np.ndarray | list):
        return []
    try:
        array = np.asarray(value).reshape(-1)
    except ValueError:
        return []
    return array[:_MAX_FILLS].tolist() if array.dtype.kind in "iuf" else []


def _number_of_text(value: bytes | str) -> list[int | float]:
    """Return a number written as text. The fill value of a float in Zarr v3 is eight bytes in base64, as xarray writes
    it."""
    text = _text(value)
    try:
        return [float(text)]
    except ValueError:
        pass
    try:
        return [struct.unpack("<d", base64.b64decode(text, validate=True))[0]]
    except (binascii.Error, struct.error, ValueError):
        return []


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""
