"""The rules that turn an object's key into a sample and a field. As in WebDataset, the name up to its first dot is the
sample.

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
from cachetool.sources.names import NamedPage

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
_MOST = 2**12
"""Most suffixes whose fields are remembered."""
CONTAINERS = ("npz", "json")
"""Kinds of objects that hold several fields."""


@dataclass(frozen=True, slots=True)
class Part:
    """The sample and field that one object belongs to."""

    sample: str
    """The sample's key."""
    field: str
    """The field's name. For a container: the prefix of the names of its fields, ``""`` or a text that ends in ``/``."""
    kind: Kind


class Stem:
    """The rule that cuts a key into sample and field: the first or last dot of the name, or a regular expression.

    The expression is matched at the beginning of the key. The sample's key is its group ``key``, otherwise its first
    group, otherwise the whole match. The field is its group ``field``, otherwise the text after the sample's key
    without the extension and without dots, dashes, underscores and slashes at its ends. The extension of the key
    decides how the object is decoded.
    """

    def __init__(self, rule: str) -> None:
        """Raise :class:`UsageError` for a regular expression that is not valid."""
        self.rule = parse_text(rule, what="--stem")
        self._pattern: re.Pattern[str] | None = None
        self._parts: dict[str, tuple[str, Kind]] = {}
        if rule not in ("first", "last"):
            try:
                self._pattern = re.compile(rule)
            except (re.error, OverflowError, RecursionError) as error:
                # re.compile raises OverflowError for repeat counts above 2**32 and RecursionError for deep nesting,
                # both of which a user can type.
                raise UsageError(
                    f"--stem must be first, last or a regular expression; {shown(rule)} is not a valid one: {error}"
                ) from None

    def split(self, key: str) -> Part | str:
        """Return the sample and field of ``key``, or the reason why it belongs to no sample, in a few words."""
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

    def suffixes(self, page: NamedPage) -> list[str] | None:
        """Return the text of each name behind the dot that cuts it, empty for a name that cannot be cut.

        Return None if a rule other than a dot cuts names. Each name that is cut is the sample's key, a dot and its
        suffix; :meth:`part` tells the field.
        """
        if self.rule == "first":
            return page.suffixes
        return [name.rpartition(".")[2] if "." in name else "" for name in page.names] if self.rule == "last" else None

    def suffix(self, name: str) -> str | None:
        """Return the text of one key behind the dot that cuts it; None if a rule other than a dot cuts names."""
        if self.rule == "first":
            return name.rpartition("/")[2].partition(".")[2]
        return name.rpartition("/")[2].rpartition(".")[2] if self.rule == "last" else None

    def part(self, suffix: str) -> tuple[str, Kind]:
        """Return the field that a suffix stands for, and its kind."""
        # The names of a listing share a few suffixes.
        if (part := self._parts.get(suffix)) is None:
            cut = _part("", *_cut(suffix))
            part = cut.field, cut.kind
            if len(self._parts) < _MOST:
                self._parts[suffix] = part
        return part

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
    """Return True if objects with this extension are decoded, not kept as bytes."""
    return extension in _KINDS


def extension_of(key: str) -> str:
    """Return the text after the last dot of a key's name, in lower case; empty without a dot."""
    name = key.rpartition("/")[2]
    return name.rpartition(".")[2].lower() if "." in name else ""


def _cut(suffix: str) -> tuple[str, str]:
    """Return the field's name and the extension from the text after the sample's key."""
    name, _, extension = suffix.rpartition(".")
    # An unknown extension stays part of the field's name, so that 0001.tar.gz gets the field tar.gz and not gz.
    if extension.lower() in _KINDS:
        return name.strip("."), extension.lower()
    return "", suffix


def _part(sample: str, name: str, extension: str) -> Part:
    kind = _KINDS.get(extension, "bytes")
    if kind in CONTAINERS:
        return Part(sample, f"{name}/" if name else "", kind)
    return Part(sample, name or extension, kind)
