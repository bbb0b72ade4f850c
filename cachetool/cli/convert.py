"""``cachetool convert``: write the same samples in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachetool.cli.options import (
    AddressOption,
    CacheOption,
    DecodeOption,
    ExcludeOption,
    FieldsOption,
    FollowLinksOption,
    FormatOption,
    IncludeOption,
    JsonOption,
    KeyOption,
    LabelFromFolderOption,
    OnErrorOption,
    OnOption,
    QuietOption,
    ReadAsOption,
    RenameOption,
    ResizeOption,
    RoomWaitOption,
    StemOption,
    ValueFormatOption,
    WorkersOption,
    field_names,
    renames,
)
from cachetool.cli.output import Output, count, notes_on_source
from cachetool.core.errors import UsageError
from cachetool.core.units import format_duration, format_size

if TYPE_CHECKING:
    from cachetool.conversion.run import ConvertResult

__all__ = ["convert"]

_SourceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="INPUT",
        help="What to write as plain files, with --out: a file, a folder or a URL. Default: the cache's samples.",
    ),
]
_OutOption = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Write plain files into this new folder instead of the cache."),
]
_MaxSizeOption = Annotated[
    str | None,
    typer.Option("--max-size", metavar="SIZE", help="Cap of the cache, kept for later; new: half of the free disk."),
]
_DatasetOption = Annotated[
    str | None, typer.Option("--dataset", metavar="NAME", help="Only this dataset of the cache.")
]
_ShardSizeOption = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Most bytes of values in one shard or file; without INPUT shards are cut or merged.",
    ),
]
_CompressionOption = Annotated[
    str | None,
    typer.Option(
        "--compression", metavar="NAME", help="gzip or lzf (hdf5); zstd, blosc or gzip (zarr); gzip (tfrecord)."
    ),
]
_VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Read every shard back through its own library and compare checksums.")
]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the samples and fields of INPUT, and what of it is left out.")
]


def convert(
    source: _SourceArgument = None,
    *,
    to: FormatOption,
    out: _OutOption = None,
    cache: CacheOption = None,
    max_size: _MaxSizeOption = None,
    dataset: _DatasetOption = None,
    fields: FieldsOption = None,
    rename: RenameOption = None,
    stem: StemOption = None,
    decode: DecodeOption = None,
    resize: ResizeOption = None,
    label_from_folder: LabelFromFolderOption = None,
    key: KeyOption = True,
    read_as: ReadAsOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    value_format: ValueFormatOption = None,
    follow_links: FollowLinksOption = False,
    shard_size: _ShardSizeOption = None,
    compression: _CompressionOption = None,
    workers: WorkersOption = 2,
    on: OnOption = "local",
    address: AddressOption = None,
    verify: _VerifyOption = False,
    wait: RoomWaitOption = "60s",
    on_error: OnErrorOption = "error",
    dry_run: _DryRunOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the same samples in another format, bit for bit.

    Without INPUT the cache's shards are replaced one by one (with --shard-size: cut, or merged with their neighbours),
    inside the cap, while readers go on. With --out the result is plain files (part-00000.h5, ...) that other tools
    open, of the cache's samples or of INPUT; to have the samples of INPUT in a cache: cachetool pull INPUT --all. With
    --on ray each node converts its own cache, in place or with --out DIR/{node}; the files of INPUT are written by all
    nodes into an --out that all of them see.

    \b
    Examples:
      cachetool convert --to tfrecord --shard-size 64MB
      cachetool convert volumes.h5 --to lmdb --out ./volumes-lmdb --verify
      cachetool convert s3://bucket/volumes.h5 --to zarr --out ./volumes-zarr
    """
    from cachetool import api

    output = Output(as_json=as_json, quiet=quiet)
    file_options: dict[str, Any] = {
        "fields": field_names(fields), "rename": renames(rename), "stem": stem, "decode": decode, "resize": resize,
        "label_from_folder": label_from_folder or False, "key": key, "read_as": read_as,
        "include": tuple(include or ()), "exclude": tuple(exclude or ()), "value_format": value_format,
        "follow_links": follow_links,
    }  # fmt: skip
    if source is None:
        _refuse_file_options(dry_run or on_error != "error", file_options)
    elif dry_run:
        _show_preview(output, source, file_options, on_error)
        return
    asked: dict[str, Any] = {
        "to": to, "out": out, "dataset": dataset, "shard_size": shard_size, "compression": compression,
        "workers": workers, "verify": verify, "wait": wait, "on_error": on_error,
    }  # fmt: skip
    place: dict[str, Any] = {"cache": cache, "max_size": max_size}
    if api.runs_on_cluster(on, cache, address=address):
        from cachetool.cli import nodes

        if source is None:
            nodes.convert_caches(output, cache, asked | {"max_size": max_size}, address)
            return
        result = nodes.convert_files(output, source, asked | file_options | place, address)
    else:
        with output.progress() as report:
            result = api.convert(source, progress=report, notify=output.note, **place, **asked, **file_options)
    _print(output, result)


def _refuse_file_options(asked: bool, file_options: dict[str, Any]) -> None:
    """Raise :class:`UsageError` for options of files where the cache's shards are converted."""
    of_files = [name for name in file_options if name != "key"]
    if asked or any(file_options[name] for name in of_files):
        raise UsageError(
            "--dry-run, --on-error, --fields, --rename, --stem, --decode, --resize, --label-from-folder, --read-as,"
            " --include, --exclude, --value-format and --follow-links go with an INPUT"
        )


def _print(output: Output, result: ConvertResult) -> None:
    """The result, as text or as JSON, after a note on what was left out."""
    from cachetool.sources.readers import NOT_ASKED

    skipped = [skip for skip in result.skipped if skip[1] != NOT_ASKED]
    notes_on_source(output, result.notes, skipped, result.left_out_counts, more="--dry-run lists them")
    if output.as_json:
        output.document(result.as_dict())
        return
    where = f"; the files are in {result.out}" if result.out else ""
    output.line(
        f"converted {count(result.samples, 'sample')} to {count(result.shards, f'{result.to} shard')},"
        f" {format_size(result.bytes)}, in {format_duration(result.seconds)}"
        f"{', verified' if result.verified else ''}{where}"
    )


def _show_preview(output: Output, source: str, file_options: dict[str, Any], on_error: str) -> None:
    """What ``--dry-run`` shows: the samples and fields of an input, and what of it is left out."""
    from cachetool.conversion.run import preview
    from cachetool.sources.options import SourceOptions

    with output.progress() as report:
        summary = preview(source, SourceOptions(**file_options), report=report, on_error=on_error)
    if output.as_json:
        output.document(summary.as_dict())
        return
    output.line(f"{summary.input}: {count(summary.samples, 'sample')}")
    for note in summary.notes:
        output.line(f"note: {note}")
    output.table(["field", "type"], summary.schema.items())
    if summary.skipped:
        output.table(["left out", "why"], summary.skipped)
    reasons = {why for _, why in summary.skipped}
    unnamed = {why: number for why, number in summary.left_out_counts.items() if why not in reasons}
    notes_on_source(output, (), (), unnamed, more="")
