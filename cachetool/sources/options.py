"""The options that decide how the objects of a place become samples: one frozen value that checks itself and is passed
between processes as JSON."""

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
"""The name of the field that ``label_from_folder`` adds."""
ImageSize = tuple[int, int]
"""Height and width in pixels."""
MAX_SIDE = 10_000
"""Most pixels of one side of a resized image."""
OF_FILES = ("files", "groups", "rows")
READ_AS = ("objects", *OF_FILES)
DECODINGS = ("image", "mask", "cf")
"""The values of ``--decode``."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """The way in which images become arrays.

    Args:
        size: Height and width in pixels that every image gets. Default None: each image keeps its own size.
        masks: True if images with one channel keep their stored numbers, shape (height, width). Default False.

    Example:
        >>> Pixels(size=(224, 224)).masks
        False
    """

    size: ImageSize | None = None
    """Height and width in pixels that every image gets; None for its own size."""
    masks: bool = False
    """True when images with one channel keep their stored numbers."""


def image_size(value: int | str | Sequence[int] | None, *, what: str = "--resize") -> ImageSize | None:
    """Return the height and width that ``--resize`` means.

    Args:
        value: A side in pixels (``224`` is 224 x 224), ``"HEIGHTxWIDTH"``, or a list or tuple of one or two sides. None
            means no resizing.
        what: Name of the option in messages. Default ``--resize``.

    Returns:
        (height, width) in pixels, each from 1 to 10,000; None for None.

    Raises:
        UsageError: ``value`` is none of these.

    Example:
        >>> image_size("224x320")
        (224, 320)
    """
    if value is None:
        return None
    sides: Sequence[Any] = value.split("x") if isinstance(value, str) else [value]
    if isinstance(value, list | tuple):
        sides = value
    # At most five digits reach int(), which raises ValueError for texts of more than 4,300 digits.
    integers = [int(side) for side in sides if re.fullmatch("[0-9]{1,5}", f"{side}" if _is_number(side) else "")]
    sizes = [side for side in integers if 1 <= side <= MAX_SIDE]
    if not 1 <= len(sides) == len(sizes) <= 2:
        raise UsageError(
            f"--resize must be SIDE or HEIGHTxWIDTH in pixels, each 1 to {MAX_SIDE}, such as 224 or 224x320;"
            f" got {shown(value)}"
        )
    return sizes[0], sizes[-1]


def _renames(given: Any, *, what: str) -> dict[str, str]:
    """Return a mapping of old to new names. Raises :class:`UsageError`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"rename {shown(given)} cannot be used; give a mapping of old names to new names")
    # Imported here and below, so that `cachetool --help` does not import NumPy.
    from cachetool.core.schema import KEY

    names = {parse_text(old, what="rename"): parse_text(new, what="rename") for old, new in given.items()}
    if KEY in (*names, *names.values()):
        raise UsageError(f"--rename cannot change or create {KEY}; to leave {KEY} out: --no-key")
    return names


def _checked_fields(given: Any, *, what: str) -> tuple[str, ...]:
    """Return the names to keep, or the names to leave out, each with a minus. Raises :class:`UsageError`."""
    # An empty list reaches this check when only the key was asked for: its name was removed before.
    if isinstance(given, list | tuple) and not given:
        return ()
    from cachetool.core.schema import KEY, names_of

    fields = names_of(given)
    dropped = [name for name in fields if name.startswith("-")]
    if dropped and len(dropped) < len(fields):
        kept = next(name for name in fields if not name.startswith("-"))
        raise UsageError(
            f"--fields can keep fields or leave fields out, but not both: {shown(kept)}, {shown(dropped[0])};"
            " give a minus before every name, or before none"
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
        raise UsageError(f"unknown --decode {shown(value)}; choose one of {', '.join(DECODINGS)}")
    return str(value)


def _checked_label(value: object, *, what: str) -> bool | str:
    if is_one_of(value, ("int", "text")):
        return True if value == "text" else "int"
    if isinstance(value, str):
        raise UsageError(f"--label-from-folder must be text or int, got {shown(value)}")
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


EDGES = ("keep", "drop", "pad")


def _checked_edges(value: object, *, what: str) -> str:
    if not is_one_of(value, EDGES):
        raise UsageError(f"unknown --edges {shown(value)}; choose one of {', '.join(EDGES)}")
    return str(value)


def _block(given: Any, *, what: str) -> dict[str, int]:
    """Return the sizes of a block by the names of dimensions. Raises :class:`UsageError`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"block {shown(given)} cannot be used; give a mapping of dimensions to sizes")
    names = [parse_text(str(name) if isinstance(name, int) else name, what="block") for name in given]
    for name in names:
        if name.isdigit() and not (name.isascii() and len(name) < 3):
            raise UsageError(f"--block names the dimension {shown(name)}, but numbers of dimensions are 0 to 99")
    sizes = [
        parse_whole(size, what=f"--block {name}", least=1) for name, size in zip(names, given.values(), strict=True)
    ]
    return dict(zip(names, sizes, strict=True))


def block_sizes(pairs: Sequence[str]) -> dict[str, int | str]:
    """Return the sizes in ``--block z=128,y=512`` or ``--block z=128 --block y=512``. Raises :class:`UsageError`."""
    sizes: dict[str, int | str] = {}
    for pair in ",".join(pairs).split(","):
        name, equals, size = (part.strip() for part in pair.partition("="))
        if not (name and equals and size.isascii() and size.isdecimal() and len(size) < 19):
            raise UsageError(f"--block {pair!r} is not DIM=SIZE; write it like --block z=128,y=512,x=512")
        if name in sizes:
            raise UsageError(f"--block names the dimension {name!r} twice; give each dimension one size")
        sizes[name] = int(size)
    return sizes


def _level(value: object, *, what: str) -> int:
    return parse_whole(value, what=what)


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
    """Return the names in ``--fields a,b --fields c``."""
    return tuple(name.strip() for name in ",".join(texts).split(","))


def renames(pairs: Sequence[str]) -> dict[str, str]:
    """Return old and new names of ``--rename a=b --rename c=d`` or ``--rename a=b,c=d``. Raises :class:`UsageError`."""
    names: dict[str, str] = {}
    for pair in ",".join(pairs).split(","):
        old, equals, new = (part.strip() for part in pair.partition("="))
        if not (old and equals and new):
            raise UsageError(f"--rename {pair!r} is not OLD=NEW; write it like --rename npy=volume")
        names[old] = new
    return names


def _is_number(side: object) -> bool:
    """Return True for a text, or for a whole number within the allowed size."""
    # The size is checked before the number becomes text, because Python refuses to print integers of thousands of
    # digits.
    return isinstance(side, str) or (isinstance(side, numbers.Integral) and abs(int(side)) <= MAX_SIDE)


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """The options that decide how samples are made of the objects or files of a source.

    Args:
        fields: Names of the fields to keep, after renaming; or names with a minus in front, to keep all others.
            Default:
            all fields.
        rename: Old to new names of fields. Several fields may get one name, if no sample has two of them.
        stem: Rule that cuts a name into sample and field: ``"first"`` or ``"last"`` dot, or a regular expression.
            Default: the first dot, or the last if the names of a place can only mean that.
        decode: ``"image"``, ``"mask"`` or ``"cf"``. Default None: images stay bytes, and packed numbers stay packed.
        resize: Size in pixels for every image, see :func:`image_size`. Needs ``decode="image"`` or ``"mask"``, or
            ``value_format="image"``.
        label_from_folder: True or ``"text"`` adds the folder's name as the field ``label``, ``"int"`` its number among
            the sorted names. Default False.
        read_as: ``"objects"``, ``"files"``, ``"groups"``, ``"rows"`` or a kind of files such as ``"tar"``. Default
            None: the files of the source decide.
        include: Globs of names to use. Default: all names.
        exclude: Globs of names to leave out. Default: none.
        key: True adds the field ``__key__``, which says where a sample came from. Default True.
        value_format: Format of objects and values whose bytes do not show it: ``"bytes"``, ``"npy"``, ``"image"`` or
            ``"raw:DTYPE,SHAPE"``.
        rows: Number of rows (first dimension) of the arrays of a file to use. Default: the number whose arrays have
            the most bytes together.
        block: Size of a block by the name or number of each dimension that is cut; a sample is such a block of each
            array. Default: samples are rows.
        edges: ``"keep"``, ``"drop"`` or ``"pad"``: the treatment of incomplete blocks. Default ``"keep"``.
        level: With ``block``, the resolution of images in OME-Zarr that is read. Default: 0, the full resolution.
        runs: Number of neighbouring rows of a file that are drawn together, in their order, so that the cache has the
            neighbours of most samples. Default: rows are drawn by chance.
        follow_links: True follows links in a local folder to any file that this user may read. Default False.
        concurrency: Requests in flight in each worker, 1 to 1024. Default: the store's own number.
        list_workers: Pages of the list that are requested at the same time, 1 to 256, for S3, GCS and Azure. Default 1.
        classes: Folder names whose positions are the numbers of ``label_from_folder="int"``. Set by ``pull``.

    Raises:
        UsageError: An option has a wrong value, or two options contradict each other.

    Example:
        >>> options = SourceOptions(fields=["image"], rename={"jpg": "image"}, decode="image", resize=224)
        >>> options.pixels.size
        (224, 224)
    """

    fields: Annotated[
        Sequence[str] | None,
        Option(
            "Keep only these fields (names after --rename); with a minus before each name, drop these. Repeatable.",
            "A,B|-A,-B", _checked_fields, words=field_names,
        ),
    ] = None  # fmt: skip
    rename: Annotated[
        Mapping[str, str],
        Option("Rename a field; several may get the same name. Repeatable.", "OLD=NEW", _renames, words=renames),
    ] = field(default_factory=dict)
    stem: Annotated[
        str | None,
        Option(
            "Objects form one sample if their names agree up to the first dot, the last dot, or in group 1 of REGEX."
            " Default: first, or last if the names leave no other choice; a note then says so.",
            "first|last|REGEX", _checked_stem,
        ),
    ] = None  # fmt: skip
    decode: Annotated[
        str | None,
        Option(
            "image: images become uint8 arrays (height, width, 3); mask: the same, but an image of one channel"
            " (palette, gray) becomes an array (height, width) of its stored numbers; cf: packed numbers and times of"
            " HDF5, netCDF and Zarr are unpacked.",
            "image|mask|cf", _checked_decode,
        ),
    ] = None  # fmt: skip
    resize: Annotated[
        int | str | tuple[int, int] | None,
        Option(
            "With --decode image or mask: resize every image to this size in pixels; 224 means 224x224.",
            "SIDE|HxW", image_size,
        ),
    ] = None  # fmt: skip
    label_from_folder: Annotated[
        bool | str,
        Option(
            "Add the folder's name as the field 'label'; with int, its number among the sorted names.",
            "[text|int]", _checked_label,
        ),
    ] = False  # fmt: skip
    read_as: Annotated[
        str | None,
        Option(
            "objects: objects are samples; files: each file holds many samples; groups, rows: each group or row of a"
            " file is a sample; KIND (tar, parquet, hdf5, ...): read only such files. Default: depends on SOURCE.",
            "objects|files|groups|rows|KIND", parse_text,
        ),
    ] = None  # fmt: skip
    include: Annotated[
        Sequence[str],
        Option(
            "Use only objects whose names match GLOB. A glob without / must match the last component of a name. A glob"
            " that contains / must match the whole name below SOURCE; ** matches folders. Repeatable.",
            "GLOB", _checked_globs,
        ),
    ] = ()  # fmt: skip
    exclude: Annotated[
        Sequence[str],
        Option("Leave out objects whose names match GLOB; globs as for --include. Repeatable.", "GLOB", _checked_globs),
    ] = ()
    key: Annotated[bool, Option("Store the origin of each sample in the field '__key__'.", flag="--key/--no-key")] = (
        True
    )
    value_format: Annotated[
        str | None,
        Option(
            "Format of objects that are stored as bytes, and of the values of an LMDB that cachetool did not write:"
            " bytes, npy, image or raw:DTYPE,SHAPE.",
            "KIND", _checked_value_format,
        ),
    ] = None  # fmt: skip
    rows: Annotated[
        int | None,
        Option(
            "Use the arrays of a file that have N rows. Default: arrays are grouped by their number of rows, and the"
            " group with the most bytes is used.",
            "N",
            _rows,
        ),
    ] = None
    block: Annotated[
        Mapping[str, int],
        Option(
            "HDF5, netCDF, Zarr and .npy: a sample is a block of this size of each array, rounded up to complete"
            " chunks. DIM is the name of a dimension, or its number from 0. Other dimensions are not cut. Repeatable.",
            "DIM=SIZE,...", _block, words=block_sizes,
        ),
    ] = field(default_factory=dict)  # fmt: skip
    edges: Annotated[
        str,
        Option(
            "Incomplete blocks at the ends of dimensions: keep makes smaller samples; drop leaves them out; pad fills"
            " them with the fill value of the array.",
            "keep|drop|pad", _checked_edges,
        ),
    ] = "keep"  # fmt: skip
    level: Annotated[
        int | None,
        Option(
            "With --block: the resolution of the images of OME-Zarr to read. Default: 0, the full resolution.",
            "N", _level,
        ),
    ] = None  # fmt: skip
    runs: Annotated[
        int | None,
        Option(
            "Draw K neighbouring rows of a file together, in their order, for windows in time. Rounded up to complete"
            " chunks. Default: rows are drawn by chance.",
            "K", _rows,
        ),
    ] = None  # fmt: skip
    follow_links: Annotated[
        bool,
        Option(
            "Follow links in a folder to any file that you may read, also outside of the folder. Use it only if you"
            " trust the links."
        ),
    ] = False
    concurrency: Annotated[
        int | None,
        Option("Number of requests in flight in each worker. Default: depends on the store.", "N", _concurrency),
    ] = None
    list_workers: Annotated[
        int,
        Option(
            "Number of requests in flight that list a folder of s3, gs or az. Manifests and other sources are not"
            " affected.",
            "K", _list_workers,
        ),
    ] = 1  # fmt: skip
    classes: Sequence[str] = ()
    """The folder names that the numbers of labels stand for, once they are known; see
    :mod:`cachetool.sources.classes`."""

    elsewhere: ClassVar = {
        **dict.fromkeys(("max_size", "min_free"), "set the cap on the cache: open_cache(..., max_size=, min_free=)"),
        **dict.fromkeys(("on", "address", "dry_run"), "it is an option of the command line only"),
    }

    def _check(self) -> None:
        if self.resize is not None and not (self.decodes_images or self.value_format == "image"):
            raise UsageError("--resize needs decoded images; add --decode image")
        if not isinstance(self.classes, list | tuple) or not all(isinstance(name, str) for name in self.classes):
            raise UsageError(f"classes {shown(self.classes)} cannot be used; give a list of names")
        self._set("classes", tuple(self.classes))
        if self.edges != "keep" and not self.block:
            raise UsageError(f"--edges {self.edges} is for blocks; add --block DIM=SIZE, or leave --edges out")
        if self.level is not None and not self.block:
            raise UsageError("--level is for blocks of OME-Zarr; add --block DIM=SIZE, or leave --level out")
        if self.block and self.runs is not None:
            raise UsageError("--runs draws neighbouring rows, but samples are blocks; leave --runs or --block out")
        if self.block and self.rows is not None:
            raise UsageError("--rows chooses arrays by their rows, but samples are blocks; leave --rows or --block out")
        if self.block and self.read_as in ("objects", "groups", "rows"):
            raise UsageError(f"--block and --read-as {self.read_as} contradict each other; leave one of them out")
        if self.fields is not None and not self.fields and not self.key:
            raise UsageError("--fields names no field; name at least one")
        if self.fields or self.rename:
            from cachetool.core.schema import Field

            for name in (*(self.chosen or ()), *self.rename.values()):
                # Field raises UsageError for a name that no format can hold.
                Field(name, "bytes")

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
        """The fields asked for by name, in order; None for all fields, or for all but :attr:`dropped`."""
        return None if self.dropped or self.fields is None else tuple(self.fields)

    @property
    def dropped(self) -> frozenset[str]:
        """The fields to leave out, by their names after renaming."""
        return frozenset(name[1:] for name in self.fields or () if name.startswith("-"))

    def wants(self, name: str) -> bool:
        """Return True if a field is asked for.

        Args:
            name: The field's name in its file, before renaming.

        Returns:
            True unless ``fields`` leaves the field out.
        """
        new = self.rename.get(name, name)
        return new not in self.dropped and (self.chosen is None or new in self.chosen)

    def numbering(self) -> dict[str, Any]:
        """Return the options that decide the meaning of a unit's number.

        Returns:
            Plain JSON values: the rule of cutting names, and ``read_as``, ``include``, ``exclude`` and ``follow_links``
                if
            they are set.
        """
        facts: dict[str, Any] = {"stem": self.stem or "first"}
        globs = {name: sorted(getattr(self, name)) for name in ("include", "exclude") if getattr(self, name)}
        # Only options that are set: the dictionary is part of a source's identity, which must not change when a new
        # option appears.
        links = {"follow_links": True} if self.follow_links else {}
        return facts | ({} if self.read_as is None else {"read_as": self.read_as}) | globs | links
