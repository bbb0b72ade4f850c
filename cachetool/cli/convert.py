"""``cachetool convert``: write the same samples in another format."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count, notes_on_source
from cachetool.conversion.options import ConvertCall
from cachetool.core.errors import UsageError
from cachetool.core.options import Address, On
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
_MaxSizeOption = Annotated[
    str | None,
    typer.Option("--max-size", metavar="SIZE", help="Cap of the cache, kept for later; new: half of the free disk."),
]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the samples and fields of INPUT, and what of it is left out.")
]


def convert(
    source: _SourceArgument = None,
    cache: CacheOption = None,
    max_size: _MaxSizeOption = None,
    *,
    options: ConvertCall,
    on: On = "local",
    address: Address = None,
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
    from cachetool.api import open_cache, runs_on_cluster
    from cachetool.cli import nodes
    from cachetool.conversion import run

    output = Output(as_json=as_json, quiet=quiet)
    if source is None and dry_run:
        raise UsageError("--dry-run shows what of an INPUT would be read; name one")
    if source is None:
        options.refuse_input()
    if source is None and options.out is not None and max_size is not None:
        raise UsageError("--max-size has no part in --out, which takes nothing into a cache; leave it out")
    on_cluster = runs_on_cluster(on, cache, address=address)
    if source is not None and (cache is not None or max_size is not None):
        if options.out is None and not dry_run:
            raise nodes.needs_out(source, cache, address) if on_cluster else run.needs_out(source, cache)
        name = "--max-size" if cache is None else "--cache"
        raise UsageError(
            f"{name} has no part in INPUT with --out, which makes plain files of it; leave one of the two out"
        )
    if dry_run:
        assert source is not None
        _show_preview(output, source, options)
        return
    if on_cluster:
        if source is None:
            nodes.convert_caches(output, cache, options, max_size, address)
            return
        result = nodes.convert_files(output, source, options, address)
    else:
        with ExitStack() as stack:
            opened = None
            if source is None:
                opened = stack.enter_context(open_cache(cache, max_size=max_size, create=False, notify=output.note))
            report = stack.enter_context(output.progress())
            result = run.convert(options, cache=opened, source=source, out=options.folder, report=report)
    _print(output, result)


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


def _show_preview(output: Output, source: str, options: ConvertCall) -> None:
    """What ``--dry-run`` shows: the samples and fields of an input, and what of it is left out."""
    from cachetool.conversion.run import preview

    with output.progress() as report:
        summary = preview(source, options, report=report)
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
