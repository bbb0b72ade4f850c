"""``cachetool pull``: draw samples from a remote store into the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count, notes_on_source
from cachetool.core.units import format_duration, format_size
from cachetool.pull.options import PullCall

if TYPE_CHECKING:
    from cachetool.pull.run import PullResult

__all__ = ["pull"]

_SHOWN_SKIPS = 5

_SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A folder, a file, or a URL: s3://, gs://, az://, https://, sftp://, hf://."),
]
_MaxSizeOption = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="SIZE",
        help="Cap: the most space that the cache may take; kept for later runs. Default for a new cache: half of the"
        " free disk.",
    ),
]
_MinFreeOption = Annotated[
    str | None,
    typer.Option(
        "--min-free",
        metavar="SIZE",
        help="Keep at least this much of the disk free; kept for later runs. Default for a new cache: 0.",
    ),
]


def pull(
    source: _SourceArgument,
    cache: CacheOption = None,
    max_size: _MaxSizeOption = None,
    min_free: _MinFreeOption = None,
    *,
    options: PullCall,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw random samples from SOURCE into the cache.

    Without --samples, --all or --follow, the pull ends when the cache is full or all samples are drawn. No sample is
    drawn twice before all others were drawn once. This holds across all pulls of the same source.

    \b
    Examples:
      cachetool pull ./volumes --samples 1000 --max-size 50GB
      cachetool pull s3://bucket/train/ --to hdf5 --fields image,label --follow
      cachetool pull s3://bucket/run7.h5 --samples 500 --dataset run7
      cachetool pull 's3://bucket/shards/*.tar' --all
      cachetool pull s3://bucket/train/ --on ray --cache /data/{node}
    """
    # Imported here, so that `cachetool pull --help` does not load NumPy and the catalog.
    from cachetool.api import open_cache, pull_into
    from cachetool.sources.registry import check_place

    # Before the cache is opened: a mistyped source must not make a new cache.
    check_place(source)
    out = Output(as_json=as_json, quiet=quiet)
    with (
        open_cache(cache, max_size=max_size, min_free=min_free, notify=out.note) as opened,
        out.progress() as report,
    ):
        result = pull_into(opened, source, replace(options, progress=report))
    notes_on_source(out, result.notes, result.left_out, result.left_out_counts, more="--json lists them")
    if result.warning:
        out.note(f"warning: {result.warning}")
    if as_json:
        out.document(result.as_dict())
    else:
        _print(out, result)


def _print(out: Output, result: PullResult) -> None:
    """Print the result as text."""
    from cachetool.pull.job import AT_ITS_END

    out.line(
        f"pulled {count(result.samples, 'sample')}, {format_size(result.bytes)}, in {format_duration(result.seconds)}"
        f" into {count(result.shards, f'{result.format} shard')} of dataset {result.dataset!r}"
    )
    if result.cut > 1:
        out.line(f"parts {','.join(map(str, result.parts))} of {result.cut}, listing {result.listing[:16]}")
    if result.released:
        out.line(f"removed {count(result.released, 'sample')} of other parts")
    if result.nodes:
        out.table(
            ["node", ">samples", ">shards", ">bytes", ">evicted", "cache", "state"],
            [
                (
                    row["node"], row["samples"], row["shards"], format_size(row["bytes"]), row["evicted_shards"],
                    row["cache"], row["state"],
                )
                for row in result.nodes
            ],
        )  # fmt: skip
    if result.added or result.vanished:
        out.line(f"the source has {count(result.added, 'new sample')}; {result.vanished} were deleted or changed")
        for name in result.vanished_examples[:_SHOWN_SKIPS]:
            out.line(f"  deleted or changed: {name}")
    if result.evicted_shards:
        out.line(f"evicted {count(result.evicted_shards, 'older shard')} to free space")
    if result.skipped:
        out.line(f"skipped {result.skipped}:")
        for skip in result.skipped_examples[:_SHOWN_SKIPS]:
            out.line(f"  {skip['key']}: {skip['reason']}")
    if result.cut > 1 and not result.samples and result.reason == "done":
        out.line("nothing was left to draw: with --part, --samples counts for all nodes and all earlier pulls together")
    if result.reason == AT_ITS_END and not result.samples:
        refresh = "--refresh looks for new samples, " if result.of_objects else ""
        out.line(f"stopped: {result.reason}, all samples were drawn; {refresh}--follow draws evicted samples again")
    elif result.reason != "done":
        out.line(f"stopped: {result.reason}")
