"""From an object's key to its sample and its field, as in WebDataset: a name's part up to its first dot is the sample.

::

    train/0001.npy          sample train/0001, field npy, an array
    train/0001.image.npy    sample train/0001, field image, an array
    train/0001.json         sample train/0001, its top-level keys as fields
    train/0001.meta.json    sample train/0001, its top-level keys as fields meta/...
    train/0001.left.jpg     sample train/0001, field left, bytes or a decoded image
    train/0001.tar.gz       sample train/0001, field tar.gz, bytes
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cachetool.core.errors import UsageError
from cachetool.core.text import shown
from cachetool.core.units import parse_text

__all__ = ["Kind", "Part", "Stem", "extension_of", "is_decoded"]

Kind = Literal["npy", "npz", "json", "int", "str", "image", "bytes"]

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")
"""Extensions of images."""
_KINDS: dict[str, Kind] = {
    "npy": "npy",
    "npz": "npz",
    "json": "json",
    "cls": "int",
    "id": "int",
    "txt": "str",
    **dict.fromkeys(IMAGES, "image"),
}
CONTAINERS = ("npz", "json")
"""Kinds of objects that hold several fields."""


@dataclass(frozen=True, slots=True)
class Part:
    """One object as a part of its sample."""

    sample: str
    """The sample's key."""
    field: str
    """The field's name; for a container what comes before the names of its fields, ``""`` or ending in ``/``."""
    kind: Kind


class Stem:
    """The rule that cuts a key in two: ``first`` or ``last`` dot of its last part, or a regular expression.

    The expression is matched at the beginning of the key. Its group ``key``, else its first group, else all that
    matched, is the sample's key. Its group ``field``, else what follows the sample's key (without dots, dashes,
    underscores and slashes at its ends, and without the extension), is the field. The extension of the key decides what
    the object is.
    """

    def __init__(self, rule: str) -> None:
        """Raises :class:`UsageError` for an expression that is none."""
        self.rule = parse_text(rule, what="--stem")
        self._pattern: re.Pattern[str] | None = None
        if rule not in ("first", "last"):
            try:
                self._pattern = re.compile(rule)
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(
                    f"--stem is first, last or a regular expression; {shown(rule)} is none: {error}"
                ) from None

    def split(self, key: str) -> Part | str:
        """The part that ``key`` is of its sample, or why it is none, in a few words."""
        name = key.rpartition("/")[2]
        if name.startswith(".") or "/." in key or key.startswith("."):
            return "hidden"
        if self._pattern is not None:
            return self._match(key)
        folder = key[: len(key) - len(name)]
        stem, dot, suffix = name.rpartition(".") if self.rule == "last" else name.partition(".")
        if not dot or not suffix:
            return "names without an extension"
        return _part(folder + stem, *_cut(suffix))

    def _match(self, key: str) -> Part | str:
        assert self._pattern is not None
        match = self._pattern.match(key)
        if match is None:
            return "names that --stem does not match"
        named = match.groupdict()
        group: int | str = "key" if "key" in named else min(match.re.groups, 1)
        sample = match.group(group)
        if not sample:
            return "names that --stem does not match"
        extension = extension_of(key)
        if named.get("field"):
            return _part(sample, named["field"], extension)
        field, last = _cut(key[match.end(group) :].strip("._-/"))
        if not field and last != extension:
            field = last
        return _part(sample, field, extension) if field or extension else "names without an extension"


def is_decoded(extension: str) -> bool:
    """Whether objects with this extension are more than bytes."""
    return extension in _KINDS


def extension_of(key: str) -> str:
    """What follows the last dot of a key's name, in lower case."""
    name = key.rpartition("/")[2]
    return name.rpartition(".")[2].lower() if "." in name else ""


def _cut(suffix: str) -> tuple[str, str]:
    """What follows the sample's key, as a field's name and an extension; an unknown extension stays with the name."""
    name, _, extension = suffix.rpartition(".")
    if extension.lower() in _KINDS:
        return name.strip("."), extension.lower()
    return "", suffix


def _part(sample: str, name: str, extension: str) -> Part:
    kind = _KINDS.get(extension, "bytes")
    if kind in CONTAINERS:
        return Part(sample, f"{name}/" if name else "", kind)
    return Part(sample, name or extension, kind)
