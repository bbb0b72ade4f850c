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
        help="With --out: the file, folder or URL to write as plain files. Default: the samples of the cache.",
    ),
]
_MaxSizeOption = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="SIZE",
        help="New cap of the cache, kept for later runs. Default: the cap does not change.",
    ),
]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only show the samples and fields of INPUT, and the files that are left out.")
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

    Without INPUT and --out, new shards replace the cache's shards one by one. The cache stays inside its cap, and
    training can continue. With --shard-size, shards are cut or merged with their neighbours.

    With --out, the samples of the cache or of INPUT are written as plain files (part-00000.h5, ...) that other tools
    open. To get the samples of INPUT into a cache, use: cachetool pull INPUT --all

    With --on ray, each node converts its own cache, in place or into --out DIR/{node}. All nodes together write the
    files of INPUT into an --out folder that all of them see.

    \b
    Examples:
      cachetool convert --to tfrecord --shard-size 64MB
      cachetool convert volumes.h5 --to lmdb --out ./volumes-lmdb --verify
      cachetool convert s3://bucket/volumes.h5 --to zarr --out ./volumes-zarr
    """
    # Imported here and not above, so that `cachetool convert --help` loads neither NumPy nor a format.
    from cachetool.api import open_cache, runs_on_cluster
    from cachetool.cli import nodes
    from cachetool.conversion import run

    output = Output(as_json=as_json, quiet=quiet)
    if source is None and dry_run:
        raise UsageError("--dry-run needs an INPUT: name the file, folder or URL to look at")
    if source is None:
        # Before a cache is opened: a wrong line must change nothing.
        options.refuse_input()
    if source is None and options.out is not None and max_size is not None:
        raise UsageError("--max-size cannot be used with --out, which stores nothing in a cache; leave --max-size out")
    on_cluster = runs_on_cluster(on, cache, address=address)
    if source is not None and (cache is not None or max_size is not None):
        if options.out is None and not dry_run:
            raise nodes.needs_out(source, cache, address) if on_cluster else run.needs_out(source, cache)
        name = "--max-size" if cache is None else "--cache"
        raise UsageError(f"{name} is for a cache, but INPUT with --out becomes plain files; leave one of the two out")
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
    """Print the result as text or JSON, after a note about samples that were left out."""
    from cachetool.sources.readers import NOT_ASKED

    # Fields that the user himself excluded are no news.
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
    """Print what ``--dry-run`` shows: samples and fields of an input, and the objects that would be left out."""
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
    # Reasons with names are in the table above; the rest are only counted.
    reasons = {why for _, why in summary.skipped}
    unnamed = {why: number for why, number in summary.left_out_counts.items() if why not in reasons}
    notes_on_source(output, (), (), unnamed, more="")
