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
from cachetool.core.units import is_one_of, parse_flag, parse_text, parse_whole
from cachetool.sources.keys import Stem
from cachetool.sources.value_format import check_value_format

__all__ = ["ImageSize", "Pixels", "SourceOptions", "image_size"]

LABEL = "label"
"""The field of ``label_from_folder``."""
ImageSize = tuple[int, int]
"""Height and width in pixels."""
MAX_SIDE = 10_000
OF_FILES = ("files", "groups", "rows")
READ_AS = ("objects", *OF_FILES)
DECODINGS = ("image", "mask", "cf")
"""The values of ``--decode``."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """How images become arrays."""

    size: ImageSize | None = None
    """Height and width that all get; None for their own."""
    masks: bool = False
    """True when images of one channel keep the numbers that are stored."""


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


def _check_minus(fields: Sequence[str]) -> None:
    """Raise :class:`UsageError` for names to keep beside names to leave out, and for a minus without a name."""
    dropped = [name for name in fields if name.startswith("-")]
    if dropped and len(dropped) < len(fields):
        kept = next(name for name in fields if not name.startswith("-"))
        raise UsageError(
            f"--fields either keeps fields or leaves fields out, and {shown(kept)} and {shown(dropped[0])} do both;"
            " give names of one kind"
        )
    if f"-{KEY}" in dropped:
        raise UsageError(f"{KEY} is left out with --no-key, not with --fields")
    if "-" in dropped:
        raise UsageError("--fields has a minus without a name; to leave a field out: --fields -NAME")


def _is_number(side: object) -> bool:
    """Whether it is text, which may be a number, or a number of a size that has a text."""
    return isinstance(side, str) or (isinstance(side, numbers.Integral) and abs(int(side)) <= MAX_SIDE)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What ``pull`` was asked for, as far as the source is concerned. Raises :class:`UsageError` when made wrongly."""

    fields: tuple[str, ...] | None = None
    """Only these fields, by their names after renaming, in this order; all but these where each name has a minus before
    it (``-mask``); None for all."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Field names as they are found, to what they shall be called; several may get one name."""
    stem: str | None = None
    """Where a name's key ends: ``first`` or ``last`` dot, or a regular expression; see :class:`Stem`. None: the first
    dot, unless the names say that it must be the last; see :mod:`cachetool.sources.grouping`."""
    decode: str | None = None
    """``image``: images become uint8 arrays (height, width, 3). ``mask``: likewise, but those of one channel that lose
    nothing (palette, gray) keep their numbers, (height, width). ``cf``: packed values of HDF5 and Zarr become those
    that they stand for. None: all is as it is stored."""
    resize: ImageSize | None = None
    """Height and width that decoded images get, whatever their own; anything that :func:`image_size` reads is taken."""
    label_from_folder: bool | str = False
    """Add the field ``label``: the name of the folder a sample lies in, or with ``int`` its number among the sorted
    names of all folders."""
    classes: tuple[str, ...] = ()
    """The names that the numbers stand for, once they are known; see :mod:`cachetool.sources.classes`."""
    read_as: str | None = None
    """``objects``: each object, or each group with one key, is a sample; ``files``: each file holds many, ``groups``:
    one in each of its groups, ``rows``: one in each row of its arrays; the name of a kind of files: those are read.
    None: by what lies there, see :mod:`cachetool.sources.kinds`, which checks it, and :mod:`cachetool.sources.groups`.
    """
    include: tuple[str, ...] = ()
    """Globs of names to take; none for all. See :mod:`cachetool.sources.globs`."""
    exclude: tuple[str, ...] = ()
    """Globs of names to leave out."""
    key: bool = True
    """Add the field ``__key__``."""
    value_format: str | None = None
    """The values of an LMDB file of others, and objects of bytes: ``bytes``, ``npy``, ``image`` or ``raw:DTYPE,SHAPE``;
    None: bytes, in LMDB unless they look pickled."""
    rows: int | None = None
    """First dimension of the arrays of a file to take; None for the one that most bytes have."""
    follow_links: bool = False
    """Read files that links in a folder lead to, wherever they lie; without it see :mod:`cachetool.stores.local`."""
    concurrency: int | None = None
    """Requests in flight; None for what suits the store."""

    def __post_init__(self) -> None:
        if self.stem is not None:
            Stem(self.stem)
        if not is_one_of(self.decode, (None, *DECODINGS)):
            raise UsageError(f"unknown --decode {shown(self.decode)}; there is {', '.join(DECODINGS)}")
        object.__setattr__(self, "resize", image_size(self.resize))
        if self.resize is not None and not (self.decodes_images or self.value_format == "image"):
            raise UsageError("--resize is for images that are decoded; give --decode image as well")
        if self.read_as is not None:
            parse_text(self.read_as, what="--read-as")
        for name in ("include", "exclude"):
            value = () if getattr(self, name) is None else getattr(self, name)
            if not isinstance(value, list | tuple) or value:
                from cachetool.sources.globs import checked_globs

                value = checked_globs(value, what=f"--{name}")
            object.__setattr__(self, name, tuple(value))
        if self.concurrency is not None:
            object.__setattr__(self, "concurrency", parse_whole(self.concurrency, what="--concurrency"))
            if not 1 <= self.concurrency <= 1024:
                raise UsageError(f"--concurrency must be 1 to 1024, got {self.concurrency}")
        if self.value_format is not None:
            check_value_format(parse_text(self.value_format, what="--value-format"))
        if self.rows is not None:
            object.__setattr__(self, "rows", parse_whole(self.rows, what="--samples"))
            if self.rows < 0:
                raise UsageError(f"the number of samples must be at least 0, got {self.rows}")
        for name in ("key", "follow_links"):
            flag = parse_flag(getattr(self, name), what=f"--{name.replace('_', '-')}")
            object.__setattr__(self, name, flag)
        if is_one_of(self.label_from_folder, ("int", "text")):
            label: bool | str = True if self.label_from_folder == "text" else "int"
        elif isinstance(self.label_from_folder, str):
            raise UsageError(f"--label-from-folder is text or int, got {shown(self.label_from_folder)}")
        else:
            label = parse_flag(self.label_from_folder, what="--label-from-folder")
        object.__setattr__(self, "label_from_folder", label)
        if not isinstance(self.classes, list | tuple) or not all(isinstance(name, str) for name in self.classes):
            raise UsageError(f"classes {shown(self.classes)} cannot be used: a list of names")
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.fields is not None:
            object.__setattr__(self, "fields", (self.fields,) if isinstance(self.fields, str) else self.fields)
            if not isinstance(self.fields, list | tuple) or not all(isinstance(name, str) for name in self.fields):
                raise UsageError(f"fields {shown(self.fields)} cannot be used: a list of names")
            object.__setattr__(self, "fields", tuple(dict.fromkeys(name for name in self.fields if name != KEY)))
            if not self.fields and not self.key:
                raise UsageError("--fields names no field")
            _check_minus(self.fields)
        object.__setattr__(self, "rename", _renames(self.rename))
        for name in (*(self.chosen or ()), *self.rename.values()):
            Field(name, "bytes")  # refuses names that no format can hold
        if KEY in (*self.rename, *self.rename.values()):
            raise UsageError(f"--rename cannot change or make {KEY}; leave it out with --no-key")

    @property
    def decodes_images(self) -> bool:
        """True when bytes that are images become arrays."""
        return self.decode in ("image", "mask")

    @property
    def pixels(self) -> Pixels:
        """The way in which images become arrays."""
        return Pixels(self.resize, self.decode == "mask")

    @property
    def chosen(self) -> tuple[str, ...] | None:
        """The fields asked for by name, in order; None for all, or for all but :attr:`dropped`."""
        return None if self.dropped else self.fields

    @property
    def dropped(self) -> frozenset[str]:
        """The fields to leave out, by their names after renaming."""
        return frozenset(name[1:] for name in self.fields or () if name.startswith("-"))

    def wants(self, name: str) -> bool:
        """Whether a field is asked for that its file calls ``name``."""
        new = self.rename.get(name, name)
        return new not in self.dropped and (self.chosen is None or new in self.chosen)

    def numbering(self) -> dict[str, Any]:
        """The part that decides what a unit number means."""
        facts: dict[str, Any] = {"stem": self.stem or "first"}
        globs = {name: sorted(getattr(self, name)) for name in ("include", "exclude") if getattr(self, name)}
        links = {"follow_links": True} if self.follow_links else {}
        return facts | ({} if self.read_as is None else {"read_as": self.read_as}) | globs | links

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        lists = {"include": list(self.include), "exclude": list(self.exclude)}
        return {**asdict(self), "fields": None if self.fields is None else list(self.fields), **lists}

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
