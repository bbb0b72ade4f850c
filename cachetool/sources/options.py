"""How the objects of a place become samples: one frozen value that checks itself and crosses processes as JSON."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Field
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_choice, parse_flag, parse_text, parse_whole
from cachetool.sources.keys import Stem

__all__ = ["ImageSize", "SourceOptions", "image_size"]

ImageSize = tuple[int, int]
"""Height and width in pixels."""
MAX_SIDE = 10_000


def image_size(value: int | str | Sequence[int] | None) -> ImageSize | None:
    """What ``--resize`` means: ``224`` is 224 x 224 pixels, ``224x320`` or ``(224, 320)`` height and width.

    Raises :class:`UsageError`.
    """
    if value is None:
        return None
    sides: Sequence[Any] = value.split("x") if isinstance(value, str) else [value]
    if isinstance(value, list | tuple):
        sides = value
    integers = [int(side) for side in sides if re.fullmatch("[0-9]{1,5}", f"{side}" if _is_number(side) else "")]
    sizes = [side for side in integers if 1 <= side <= MAX_SIDE]
    if not 1 <= len(sides) == len(sizes) <= 2:
        raise UsageError(
            f"--resize is a side or HEIGHTxWIDTH in pixels, up to {MAX_SIDE}, such as 224 or 224x320;"
            f" got {shown(value)}"
        )
    return sizes[0], sizes[-1]


def _renames(given: object) -> dict[str, str]:
    """Old to new names. Raises :class:`UsageError`."""
    if not isinstance(given, Mapping):
        raise UsageError(f"rename {shown(given)} cannot be used: old names to new ones")
    return {parse_text(old, what="rename"): parse_text(new, what="rename") for old, new in given.items()}


def _is_number(side: object) -> bool:
    """Whether it is text, which may be a number, or a number of a size that has a text."""
    return isinstance(side, str) or (isinstance(side, numbers.Integral) and abs(int(side)) <= MAX_SIDE)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What ``pull`` was asked for, as far as the source is concerned. Raises :class:`UsageError` when made wrongly."""

    fields: tuple[str, ...] | None = None
    """Only these fields, by their names after renaming, in this order; None for all."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Field names as they are found, to what they shall be called; several may get one name."""
    stem: str = "first"
    """Where a name's key ends: ``first`` or ``last`` dot, or a regular expression; see :class:`Stem`."""
    decode: str | None = None
    """``image``: images become uint8 arrays (height, width, 3). None: they stay bytes."""
    resize: ImageSize | None = None
    """Height and width that decoded images get, whatever their own; anything that :func:`image_size` reads is taken."""
    label_from_folder: bool = False
    """Add the field ``label``: the name of the folder a sample lies in."""
    read_as: str | None = None
    """``objects``: each object, or each group with one key, is a sample; ``files``: each file holds many. None: by what
    lies there, see :mod:`cachetool.sources.kinds`."""
    key: bool = True
    """Add the field ``__key__``."""
    value_format: str | None = None
    """The values of an LMDB file of others: ``bytes``, ``npy``, ``image`` or ``raw:DTYPE,SHAPE``; None: bytes, unless
    they look pickled."""
    rows: int | None = None
    """First dimension of the arrays of a file to take; None for the one that most arrays have."""
    concurrency: int | None = None
    """Requests in flight; None for what suits the store."""

    def __post_init__(self) -> None:
        Stem(self.stem)
        if not is_one_of(self.decode, (None, "image")):
            raise UsageError(f"unknown --decode {shown(self.decode)}; there is image")
        object.__setattr__(self, "resize", image_size(self.resize))
        if self.resize is not None and not self._decodes_images():
            raise UsageError("--resize is for images that are decoded; give --decode image as well")
        if self.read_as is not None:
            parse_choice(self.read_as, ("objects", "files"), what="--read-as")
        if self.concurrency is not None:
            object.__setattr__(self, "concurrency", parse_whole(self.concurrency, what="--concurrency"))
            if not 1 <= self.concurrency <= 1024:
                raise UsageError(f"--concurrency must be 1 to 1024, got {self.concurrency}")
        if self.value_format is not None:
            object.__setattr__(self, "value_format", parse_text(self.value_format, what="--value-format"))
        if self.rows is not None:
            object.__setattr__(self, "rows", parse_whole(self.rows, what="--samples"))
            if self.rows < 0:
                raise UsageError(f"the number of samples must be at least 0, got {self.rows}")
        for name in ("label_from_folder", "key"):
            flag = parse_flag(getattr(self, name), what=f"--{name.replace('_', '-')}")
            object.__setattr__(self, name, flag)
        if self.fields is not None:
            object.__setattr__(self, "fields", (self.fields,) if isinstance(self.fields, str) else self.fields)
            if not isinstance(self.fields, list | tuple) or not all(isinstance(name, str) for name in self.fields):
                raise UsageError(f"fields {shown(self.fields)} cannot be used: a list of names")
            object.__setattr__(self, "fields", tuple(dict.fromkeys(name for name in self.fields if name != KEY)))
            if not self.fields and not self.key:
                raise UsageError("--fields names no field")
        object.__setattr__(self, "rename", _renames(self.rename))
        for name in (*(self.fields or ()), *self.rename.values()):
            Field(name, "bytes")  # refuses names that no format can hold
        if KEY in (*self.rename, *self.rename.values()):
            raise UsageError(f"--rename cannot change or make {KEY}; leave it out with --no-key")

    def _decodes_images(self) -> bool:
        return self.decode == "image" or self.value_format == "image"

    def wants(self, name: str) -> bool:
        """Whether a field is asked for that its file calls ``name``."""
        return self.fields is None or self.rename.get(name, name) in self.fields

    def numbering(self) -> dict[str, Any]:
        """The part that decides what a unit number means."""
        return {"stem": self.stem} | ({} if self.read_as is None else {"read_as": self.read_as})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "fields": None if self.fields is None else list(self.fields)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The options that :meth:`to_json` described. Raises :class:`UsageError` when ``value`` is none."""
        try:
            given = dict(value)
            if given.get("fields") is not None:
                given["fields"] = tuple(given["fields"])
            return cls(**given)
        except TypeError as error:
            raise UsageError(f"not the options of a source: {error}") from None
