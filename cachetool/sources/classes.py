"""``--label-from-folder int``: which number each folder has, decided once, from the names of all folders of a listing.

The first pull numbers the sorted names. They are part of the dataset's schema from then on, so every later pull, on any
node, uses the same numbers. A folder that they lack is refused: it would shift them, or mean nothing to a model that is
trained already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from cachetool.core.errors import UsageError
from cachetool.core.schema import Field, Schema
from cachetool.core.text import shown
from cachetool.sources.keys import Stem
from cachetool.sources.listing import TABLE_FILE
from cachetool.sources.options import LABEL, SourceOptions
from cachetool.sources.segments import SegmentedListing

__all__ = ["LABEL", "folder_of", "label_field", "numbered", "with_label"]

_SHOWN = 5


def folder_of(key: str) -> str:
    """The name of the folder that a sample lies in; empty if it lies in none."""
    return key.rpartition("/")[0].rpartition("/")[2]


def label_field(options: SourceOptions) -> Field:
    """The field that is added: text, or a number with the names of all numbers."""
    return (
        Field(LABEL, "<i8", classes=tuple(options.classes))
        if options.label_from_folder == "int"
        else Field(LABEL, "str")
    )


def with_label(schema: Schema, options: SourceOptions) -> Schema:
    """The schema of samples whose label is a number, with the names of the numbers."""
    if options.label_from_folder != "int" or LABEL not in schema:
        return schema
    return Schema(tuple(label_field(options) if field.name == LABEL else field for field in schema))


def numbered(options: SourceOptions, folders: Iterable[Path]) -> SourceOptions:
    """Options with the names of all folders in the listings that lie in ``folders``; those that have names keep them.

    Raises :class:`UsageError` for a folder that the names lack, and for archives, whose folders no listing knows.
    """
    if options.label_from_folder != "int":
        return options
    names: set[str] = set()
    for folder in folders:
        names |= _names(folder, options)
    names.discard("")  # who draws such a sample says which it is
    if not options.classes:
        return replace(options, classes=tuple(sorted(names)))
    if unknown := sorted(names.difference(options.classes)):
        raise UsageError(
            f"{_listed(unknown)} {'is no class' if len(unknown) == 1 else 'are no classes'} of this dataset, which has"
            f" {_listed(options.classes)}; draw the source into another --dataset, which numbers its folders anew"
        )
    return options


def _names(folder: Path, options: SourceOptions) -> set[str]:
    if not (folder / TABLE_FILE).exists():
        listing = SegmentedListing.open(folder)
        stem = Stem(listing.stem)
        records = (record for part in listing.parts for _, record in part.records(stem))
        return {folder_of(sample.decode("utf-8", "surrogateescape")) for sample, *_ in records}
    from cachetool.sources.file_table import Table
    from cachetool.sources.listing import Listing

    table, files = Table.open(folder), Listing.open(folder)
    if table.kind.name == "tar":
        raise UsageError(
            "--label-from-folder int numbers all folders before the first sample, and those inside of tar files are"
            " known when they are read; give plain --label-from-folder, whose labels are text"
        )
    return {folder_of(files.object(index).key) for index in range(1 if table.roots else files.objects)}


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(shown, names[:_SHOWN])) + more
