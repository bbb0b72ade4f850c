"""Options that more than one command takes, declared once so that they read the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from cachetool.core.errors import UsageError

__all__ = [
    "AddressOption",
    "CacheOption",
    "DatasetOption",
    "DecodeOption",
    "ExcludeOption",
    "FieldsOption",
    "FollowLinksOption",
    "FormatOption",
    "IncludeOption",
    "JsonOption",
    "KeyOption",
    "LabelFromFolderOption",
    "MinEpochsOption",
    "OnErrorOption",
    "OnOption",
    "PolicyOption",
    "QuietOption",
    "ReadAsOption",
    "RenameOption",
    "ResizeOption",
    "RoomWaitOption",
    "ShardSizeOption",
    "StemOption",
    "ValueFormatOption",
    "WorkersOption",
    "complete_format",
    "complete_policy",
    "field_names",
    "renames",
    "with_label_kind",
]


_LABEL, _LABEL_KINDS = "--label-from-folder", ("text", "int")


def complete_format(incomplete: str) -> list[str]:
    """The formats whose names begin with what was typed, for shell completion."""
    from cachetool.formats import format_names

    return [name for name in format_names() if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> list[str]:
    """The eviction policies whose names begin with what was typed, for shell completion."""
    from cachetool.cache import policy_names

    return [name for name in policy_names() if name.startswith(incomplete)]


CacheOption = Annotated[
    str | None,  # no Path: that takes an empty name for the present folder
    typer.Option(
        "--cache",
        metavar="DIR",
        help="The cache folder. Default: $CACHETOOL_CACHE, else the user cache folder of this platform.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only the result.")]
DatasetOption = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME", help="Only this dataset."),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Format of the new shards: lmdb, hdf5, zarr or tfrecord.",
        autocompletion=complete_format,
    ),
]
ShardSizeOption = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Most bytes of values in one shard. Default: 64MB, or a sixteenth of the cap where that is smaller.",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Which shards go first: oldest, most-used, lru (longest not used) or random.",
        autocompletion=complete_policy,
    ),
]
MinEpochsOption = Annotated[
    int,
    typer.Option("--min-epochs", min=0, metavar="K", help="Keep a shard until K epochs of training used it."),
]
RoomWaitOption = Annotated[
    str, typer.Option("--wait", metavar="TIME", help="How long to wait for room that readers hold.")
]
WorkersOption = Annotated[
    int,
    typer.Option("--workers", min=1, metavar="N", help="Processes that work side by side."),
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fields",
        metavar="A,B|-A,-B",
        help="Keep only these fields (names after --rename); with a minus before each name all but these. Repeatable.",
    ),
]
RenameOption = Annotated[
    list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="Give a field another name; repeatable.")
]
StemOption = Annotated[
    str | None,
    typer.Option(
        "--stem",
        metavar="first|last|REGEX",
        help="Objects are one sample when their names agree up to the first dot, the last dot, or in group 1 of REGEX."
        " Default: the first, or the last where only that can be meant, which a note says.",
    ),
]
DecodeOption = Annotated[
    str | None,
    typer.Option(
        "--decode",
        metavar="image|mask|cf",
        help="image: images become uint8 arrays of colours; mask: likewise, but those of one channel (palette, gray)"
        " keep their numbers; cf: packed numbers and times of HDF5, netCDF4 and Zarr become what they stand for.",
    ),
]
ResizeOption = Annotated[
    str | None,
    typer.Option(
        "--resize",
        metavar="SIDE|HxW",
        help="With --decode image or mask: give every image this size, 224 meaning 224x224.",
    ),
]
KeyOption = Annotated[bool, typer.Option("--key/--no-key", help="Store where a sample came from as '__key__'.")]
LabelFromFolderOption = Annotated[
    str | None,
    typer.Option(
        "--label-from-folder",
        metavar="[text|int]",
        help="Add the folder's name as the field 'label', or with int its number among the sorted names.",
    ),
]
ReadAsOption = Annotated[
    str | None,
    typer.Option(
        "--read-as",
        metavar="objects|files|groups|rows|KIND",
        help="A sample is an object, or lies in a file of many: as a group, or as a row; or in those of one KIND (tar,"
        " parquet, hdf5, ...). Default: by what is there.",
    ),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        help="Take only these names; repeatable. Without / a glob is for the last part of a name, with / for all of it"
        " below SOURCE; ** matches folders.",
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Leave out these names, as for --include; repeatable."),
]
FollowLinksOption = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Read what links in a folder lead to, also outside of it: any file that you may read. Only for folders"
        " whose links you trust.",
    ),
]
ValueFormatOption = Annotated[
    str | None,
    typer.Option(
        "--value-format",
        metavar="KIND",
        help="What the values of a foreign LMDB are: bytes, npy, image or raw:DTYPE,SHAPE.",
    ),
]
OnErrorOption = Annotated[
    str,
    typer.Option("--on-error", metavar="error|skip", help="A bad object is an error, or is skipped (up to 1 %)."),
]

OnOption = Annotated[
    str, typer.Option("--on", metavar="local|ray", help="Work here, or on all nodes of a Ray cluster, a cache on each.")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="Of the Ray cluster. Default: the one that runs here, or a new one."
    ),
]


def field_names(texts: list[str] | None) -> tuple[str, ...] | None:
    """The names in ``--fields a,b --fields c``."""
    return tuple(name.strip() for name in ",".join(texts).split(",")) if texts else None


def with_label_kind(args: Sequence[str]) -> list[str]:
    """The command line with ``--label-from-folder`` joined to its kind, text where none is given: Typer would take the
    next word for it, which may be the source."""
    out: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*out, word, *words]
        if word == _LABEL:
            kind = words.pop(0) if words and words[0] in _LABEL_KINDS else _LABEL_KINDS[0]
            word = f"{_LABEL}={kind}"
        out.append(word)
    return out


def renames(pairs: list[str] | None) -> dict[str, str]:
    """Old to new name of ``--rename a=b --rename c=d`` or ``--rename a=b,c=d``. Raises :class:`UsageError`."""
    names: dict[str, str] = {}
    for pair in ",".join(pairs).split(",") if pairs else []:
        old, equals, new = (part.strip() for part in pair.partition("="))
        if not (old and equals and new):
            raise UsageError(f"--rename {pair!r} is not OLD=NEW; write it like --rename npy=volume")
        names[old] = new
    return names
