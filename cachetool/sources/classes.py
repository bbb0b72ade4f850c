"""``--label-from-folder int``: the number of each folder, decided once from the names of all folders of a listing.

The first pull numbers the sorted names. The names are then part of the dataset's schema, so every later pull, on any
node, uses the same numbers. A new folder is refused: it would shift the numbers, or mean nothing to a model that is
already trained.
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
    """Return the name of the folder that contains a sample, or an empty text if the key has no folder."""
    return key.rpartition("/")[0].rpartition("/")[2]


def label_field(options: SourceOptions) -> Field:
    """Return the field for the label: text, or a number with the names of all classes."""
    return (
        Field(LABEL, "<i8", classes=tuple(options.classes))
        if options.label_from_folder == "int"
        else Field(LABEL, "str")
    )


def with_label(schema: Schema, options: SourceOptions) -> Schema:
    """Return the schema with the names of the classes, if the label is a number."""
    if options.label_from_folder != "int" or LABEL not in schema:
        return schema
    return Schema(tuple(label_field(options) if field.name == LABEL else field for field in schema))


def numbered(options: SourceOptions, folders: Iterable[Path]) -> SourceOptions:
    """Return options with the names of all folders of the listings in ``folders``. Options that have names already keep
    them.

    Raise :class:`UsageError` for a folder that the names lack, and for archives, whose folders no listing knows.
    """
    if options.label_from_folder != "int":
        return options
    names: set[str] = set()
    for folder in folders:
        names |= _names(folder, options)
    # A sample without a folder is no class here. The read of that sample raises an error that names the object.
    names.discard("")
    if not options.classes:
        return replace(options, classes=tuple(sorted(names)))
    if unknown := sorted(names.difference(options.classes)):
        raise UsageError(
            f"{_listed(unknown)} {'is not a class' if len(unknown) == 1 else 'are not classes'} of this dataset, whose"
            f" classes are {_listed(options.classes)}; to number the folders again, pull the source into another"
            " --dataset"
        )
    return options


def _names(folder: Path, options: SourceOptions) -> set[str]:
    # A listing without a table has one sample a key. With a table the keys are files of many samples.
    if not (folder / TABLE_FILE).exists():
        listing = SegmentedListing.open(folder)
        stem = Stem(listing.stem)
        records = (record for part in listing.parts for _, record in part.records(stem))
        return {folder_of(sample.decode("utf-8", "surrogateescape")) for sample, *_ in records}
    # Imported here, because only listings of files of many samples need the table and all kinds of files behind it.
    from cachetool.sources.file_table import Table
    from cachetool.sources.listing import Listing

    table, files = Table.open(folder), Listing.open(folder)
    if table.kind.name == "tar":
        raise UsageError(
            "--label-from-folder int needs the names of all folders before the first sample, but folders inside of tar"
            " files are unknown until the files are read; use --label-from-folder text"
        )
    # The objects of a Zarr are its chunks, whose folders name arrays and not classes. A read takes the label from the
    # folder of the first key, so only that folder is named here.
    return {folder_of(files.object(index).key) for index in range(1 if table.roots else files.objects)}


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(shown, names[:_SHOWN])) + more
