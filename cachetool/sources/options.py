"""How the objects of a place become samples: one frozen value that checks itself and crosses processes as JSON."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from cachetool.core.errors import UsageError
from cachetool.core.options import Option, Options
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_flag, parse_text, parse_whole
from cachetool.sources.keys import Stem

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


def image_size(value: int | str | Sequence[int] | None, *, what: str = "--resize") -> ImageSize | None:
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


def _renames(given: Any, *, what: str) -> dict[str, str]:
    """Old to new names. Raises :class:`UsageError`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"rename {shown(given)} cannot be used: old names to new ones")
    from cachetool.core.schema import KEY

    names = {parse_text(old, what="rename"): parse_text(new, what="rename") for old, new in given.items()}
    if KEY in (*names, *names.values()):
        raise UsageError(f"--rename cannot change or make {KEY}; leave it out with --no-key")
    return names


def _checked_fields(given: Any, *, what: str) -> tuple[str, ...]:
    """Names to keep, or names to leave out, each with a minus. Raises :class:`UsageError`."""
    if isinstance(given, list | tuple) and not given:  # what is left where the key alone was asked for
        return ()
    from cachetool.core.schema import KEY, names_of

    fields = names_of(given)
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
    return tuple(dict.fromkeys(name for name in fields if name != KEY))


def _checked_stem(value: Any, *, what: str) -> str:
    return Stem(value).rule


def _checked_decode(value: object, *, what: str) -> str:
    if not is_one_of(value, DECODINGS):
        raise UsageError(f"unknown --decode {shown(value)}; there is {', '.join(DECODINGS)}")
    return str(value)


def _checked_label(value: object, *, what: str) -> bool | str:
    if is_one_of(value, ("int", "text")):
        return True if value == "text" else "int"
    if isinstance(value, str):
        raise UsageError(f"--label-from-folder is text or int, got {shown(value)}")
    return parse_flag(value, what=what)


def _checked_globs(value: object, *, what: str) -> tuple[str, ...]:
    if value is None or (isinstance(value, list | tuple) and not value):
        return ()
    from cachetool.sources.globs import checked_globs

    return checked_globs(value, what=what)


def _checked_value_format(value: object, *, what: str) -> str:
    from cachetool.sources.value_format import check_value_format

    text = parse_text(value, what=what)
    check_value_format(text)
    return text


def _rows(value: object, *, what: str) -> int:
    return parse_whole(value, what=what, least=1)


def _concurrency(value: object, *, what: str) -> int:
    number = parse_whole(value, what=what)
    if not 1 <= number <= 1024:
        raise UsageError(f"--concurrency must be 1 to 1024, got {number}")
    return number


def _list_workers(value: object, *, what: str) -> int:
    number = parse_whole(value, what=what)
    if not 1 <= number <= 256:
        raise UsageError(f"--list-workers must be 1 to 256, got {number}")
    return number


def field_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The names in ``--fields a,b --fields c``."""
    return tuple(name.strip() for name in ",".join(texts).split(","))


def renames(pairs: Sequence[str]) -> dict[str, str]:
    """Old to new name of ``--rename a=b --rename c=d`` or ``--rename a=b,c=d``. Raises :class:`UsageError`."""
    names: dict[str, str] = {}
    for pair in ",".join(pairs).split(","):
        old, equals, new = (part.strip() for part in pair.partition("="))
        if not (old and equals and new):
            raise UsageError(f"--rename {pair!r} is not OLD=NEW; write it like --rename npy=volume")
        names[old] = new
    return names


def _is_number(side: object) -> bool:
    """Whether it is text, which may be a number, or a number of a size that has a text."""
    return isinstance(side, str) or (isinstance(side, numbers.Integral) and abs(int(side)) <= MAX_SIDE)


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """How samples are made of what lies at a source."""

    fields: Annotated[
        Sequence[str] | None,
        Option(
            "Keep only these fields (names after --rename); with a minus before each name all but these. Repeatable.",
            "A,B|-A,-B", _checked_fields, words=field_names,
        ),
    ] = None  # fmt: skip
    rename: Annotated[
        Mapping[str, str],
        Option("Give a field another name; several may get one. Repeatable.", "OLD=NEW", _renames, words=renames),
    ] = field(default_factory=dict)
    stem: Annotated[
        str | None,
        Option(
            "Objects are one sample when their names agree up to the first dot, the last dot, or in group 1 of REGEX."
            " Default: the first, or the last where only that can be meant, which a note says.",
            "first|last|REGEX", _checked_stem,
        ),
    ] = None  # fmt: skip
    decode: Annotated[
        str | None,
        Option(
            "image: images become uint8 arrays (height, width, 3); mask: likewise, but those of one channel (palette,"
            " gray) keep their numbers, (height, width); cf: packed numbers and times of HDF5, netCDF4 and Zarr become"
            " what they stand for.",
            "image|mask|cf", _checked_decode,
        ),
    ] = None  # fmt: skip
    resize: Annotated[
        int | str | tuple[int, int] | None,
        Option(
            "With --decode image or mask: give every image this size in pixels, 224 meaning 224x224.",
            "SIDE|HxW", image_size,
        ),
    ] = None  # fmt: skip
    label_from_folder: Annotated[
        bool | str,
        Option(
            "Add the folder's name as the field 'label', or with int its number among the sorted names.",
            "[text|int]", _checked_label,
        ),
    ] = False  # fmt: skip
    read_as: Annotated[
        str | None,
        Option(
            "A sample is an object, or lies in a file of many: as a group, or as a row; or in those of one KIND (tar,"
            " parquet, hdf5, ...). Default: by what is there.",
            "objects|files|groups|rows|KIND", parse_text,
        ),
    ] = None  # fmt: skip
    include: Annotated[
        Sequence[str],
        Option(
            "Take only these names; repeatable. Without / a glob is for the last part of a name, with / for all of it"
            " below SOURCE; ** matches folders.",
            "GLOB", _checked_globs,
        ),
    ] = ()  # fmt: skip
    exclude: Annotated[
        Sequence[str], Option("Leave out these names, as for --include; repeatable.", "GLOB", _checked_globs)
    ] = ()
    key: Annotated[bool, Option("Store where a sample came from as '__key__'.", flag="--key/--no-key")] = True
    value_format: Annotated[
        str | None,
        Option(
            "What the bytes of objects and of the values of a foreign LMDB are: bytes, npy, image or raw:DTYPE,SHAPE.",
            "KIND", _checked_value_format,
        ),
    ] = None  # fmt: skip
    rows: Annotated[
        int | None,
        Option("First dimension of the arrays of a file to take. Default: the one that most bytes have.", "N", _rows),
    ] = None
    follow_links: Annotated[
        bool,
        Option(
            "Read what links in a folder lead to, also outside of it: any file that you may read. Only for folders"
            " whose links you trust."
        ),
    ] = False
    concurrency: Annotated[
        int | None, Option("Requests in flight in each worker. Default: what suits the store.", "N", _concurrency)
    ] = None
    list_workers: Annotated[
        int,
        Option(
            "Pages of the list of SOURCE that are asked for at once, in folders of s3, gs and az; other places are"
            " listed as ever, a manifest in one piece.",
            "K", _list_workers,
        ),
    ] = 1  # fmt: skip
    classes: Sequence[str] = ()
    """The names that the numbers stand for, once they are known; see :mod:`cachetool.sources.classes`."""

    elsewhere: ClassVar = {
        **dict.fromkeys(("max_size", "min_free"), "the cap is the cache's: open_cache(..., max_size=, min_free=)"),
        **dict.fromkeys(("on", "address", "dry_run"), "it is an option of the command line alone"),
    }

    def _check(self) -> None:
        if self.resize is not None and not (self.decodes_images or self.value_format == "image"):
            raise UsageError("--resize is for images that are decoded; give --decode image as well")
        if not isinstance(self.classes, list | tuple) or not all(isinstance(name, str) for name in self.classes):
            raise UsageError(f"classes {shown(self.classes)} cannot be used: a list of names")
        self._set("classes", tuple(self.classes))
        if self.fields is not None and not self.fields and not self.key:
            raise UsageError("--fields names no field")
        if self.fields or self.rename:
            from cachetool.core.schema import Field

            for name in (*(self.chosen or ()), *self.rename.values()):
                Field(name, "bytes")  # refuses names that no format can hold

    @property
    def decodes_images(self) -> bool:
        """True when bytes that are images become arrays."""
        return self.decode in ("image", "mask")

    @property
    def pixels(self) -> Pixels:
        """The way in which images become arrays."""
        return Pixels(image_size(self.resize), self.decode == "mask")

    @property
    def chosen(self) -> tuple[str, ...] | None:
        """The fields asked for by name, in order; None for all, or for all but :attr:`dropped`."""
        return None if self.dropped or self.fields is None else tuple(self.fields)

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
