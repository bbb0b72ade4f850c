"""``cachetool pull``: draw samples out of a remote store into the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cachetool.cli.options import (
    AddressOption,
    CacheOption,
    DecodeOption,
    ExcludeOption,
    FieldsOption,
    FollowLinksOption,
    IncludeOption,
    JsonOption,
    KeyOption,
    LabelFromFolderOption,
    MinEpochsOption,
    OnErrorOption,
    OnOption,
    PolicyOption,
    QuietOption,
    ReadAsOption,
    RenameOption,
    ResizeOption,
    RoomWaitOption,
    ShardSizeOption,
    StemOption,
    ValueFormatOption,
    WorkersOption,
    complete_format,
    field_names,
    renames,
)
from cachetool.cli.output import Output, count, notes_on_source
from cachetool.core.units import format_duration, format_size

if TYPE_CHECKING:
    from cachetool.pull.run import PullResult

__all__ = ["pull"]

_SHOWN_SKIPS = 5
_AT_ITS_END = "source at its end"

_SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A folder, a file, or s3://, gs://, az://, https://, sftp://, hf://."),
]
_ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="Format of the shards: lmdb (default for a new dataset), hdf5, zarr or tfrecord.",
        autocompletion=complete_format,
    ),
]
_SamplesOption = Annotated[
    int | None, typer.Option("--samples", metavar="N", help="Draw N samples that were not drawn before.")
]
_EverythingOption = Annotated[bool, typer.Option("--all", help="Draw all that is left of the source.")]
_FollowOption = Annotated[
    bool, typer.Option("--follow", help="Keep drawing until stopped; once the cache is full old shards go.")
]
_MaxSizeOption = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="SIZE",
        help="Most that the cache may ever take; kept for later runs. Default of a new one: half of the free disk.",
    ),
]
_MinFreeOption = Annotated[
    str | None,
    typer.Option(
        "--min-free",
        metavar="SIZE",
        help="Leave at least this much of the disk free; kept for later runs. Default of a new one: 0.",
    ),
]
_DatasetOption = Annotated[str, typer.Option("--dataset", metavar="NAME", help="Put them into this dataset.")]
_SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Decides the order of the draw. Default: 0.")
]
_OrderOption = Annotated[
    str | None,
    typer.Option("--order", metavar="random|sequential", help="Draw at random (default), or in order of names."),
]
_RefreshOption = Annotated[
    bool, typer.Option("--refresh", help="List SOURCE again: what is new is drawn too, what is gone is named.")
]
_StartEarlyOption = Annotated[
    bool,
    typer.Option("--start-early", help="Draw while a long listing goes on, 2^20 names at a time (s3, gs, az)."),
]
_ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", min=1, metavar="N", help="Requests in flight in each worker.")
]
_MaxRateOption = Annotated[
    str | None,
    typer.Option("--max-rate", metavar="RATE", help="Most bytes a second of all workers together, as 200MB/s."),
]
_FirstShardAfterOption = Annotated[
    str,
    typer.Option(
        "--first-shard-after",
        metavar="TIME",
        help="Close the first shard of a new dataset after TIME with what it has, so that training can begin;"
        " none: when it is full. Replicas, which must be alike, close it when it is full.",
    ),
]
_RenewOption = Annotated[
    str,
    typer.Option("--renew", metavar="SHARE", help="Share of a full cache that each epoch gives up for new samples."),
]
_PlacementOption = Annotated[
    str | None,
    typer.Option(
        "--placement",
        metavar="split|replicate",
        help="With --on ray: each sample on one node (default), or the same samples on every node.",
    ),
]


def pull(
    source: _SourceArgument,
    to: _ToOption = None,
    samples: _SamplesOption = None,
    everything: _EverythingOption = False,
    follow: _FollowOption = False,
    cache: CacheOption = None,
    max_size: _MaxSizeOption = None,
    min_free: _MinFreeOption = None,
    policy: PolicyOption = "oldest",
    dataset: _DatasetOption = "default",
    seed: _SeedOption = None,
    order: _OrderOption = None,
    refresh: _RefreshOption = False,
    start_early: _StartEarlyOption = False,
    workers: WorkersOption = 2,
    concurrency: _ConcurrencyOption = None,
    max_rate: _MaxRateOption = None,
    shard_size: ShardSizeOption = None,
    first_shard_after: _FirstShardAfterOption = "10s",
    fields: FieldsOption = None,
    rename: RenameOption = None,
    stem: StemOption = None,
    decode: DecodeOption = None,
    resize: ResizeOption = None,
    label_from_folder: LabelFromFolderOption = None,
    read_as: ReadAsOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    key: KeyOption = True,
    value_format: ValueFormatOption = None,
    follow_links: FollowLinksOption = False,
    on_error: OnErrorOption = "error",
    renew: _RenewOption = "10%",
    min_epochs: MinEpochsOption = 0,
    wait: RoomWaitOption = "60s",
    on: OnOption = "local",
    address: AddressOption = None,
    placement: _PlacementOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw random samples from SOURCE into the cache.

    Without --samples, --all or --follow it draws until the cache is full or the source at its end. A sample is drawn
    once before any is drawn again, across all pulls of the same source.

    \b
    Examples:
      cachetool pull ./volumes --samples 1000 --max-size 50GB
      cachetool pull s3://bucket/train/ --to hdf5 --fields image,label --follow
      cachetool pull s3://bucket/run7.h5 --samples 500 --dataset run7
      cachetool pull 's3://bucket/shards/*.tar' --all
      cachetool pull s3://bucket/train/ --on ray --cache /data/{node}
    """
    from cachetool.api import open_cache
    from cachetool.sources.registry import check_place

    check_place(source)
    out = Output(as_json=as_json, quiet=quiet)
    with (
        open_cache(cache, max_size=max_size, min_free=min_free, notify=out.note) as opened,
        out.progress() as report,
    ):
        result = opened.pull(
            source, to=to, samples=samples, everything=everything, follow=follow, dataset=dataset, seed=seed,
            order=order, refresh=refresh, start_early=start_early, workers=workers, max_rate=max_rate,
            shard_size=shard_size, first_shard_after=first_shard_after, policy=policy, fields=field_names(fields),
            rename=renames(rename), stem=stem, decode=decode, resize=resize,
            label_from_folder=label_from_folder or False, read_as=read_as, include=include or (),
            exclude=exclude or (), key=key, value_format=value_format, follow_links=follow_links, on_error=on_error,
            renew=renew, min_epochs=min_epochs, wait=wait, concurrency=concurrency, on=on, address=address,
            placement=placement, progress=report,
        )  # fmt: skip
    notes_on_source(out, result.notes, result.left_out, result.left_out_counts, more="--json lists them")
    if result.warning:
        out.note(f"warning: {result.warning}")
    if as_json:
        out.document(result.as_dict())
    else:
        _print(out, result)


def _print(out: Output, result: PullResult) -> None:
    out.line(
        f"pulled {count(result.samples, 'sample')}, {format_size(result.bytes)}, in {format_duration(result.seconds)}"
        f" into {count(result.shards, f'{result.format} shard')} of dataset {result.dataset!r}"
    )
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
        out.line(f"the source has {count(result.added, 'new sample')}, and {result.vanished} are gone or were changed")
        for name in result.vanished_examples[:_SHOWN_SKIPS]:
            out.line(f"  gone: {name}")
    if result.evicted_shards:
        out.line(f"evicted {count(result.evicted_shards, 'older shard')} to make room")
    if result.skipped:
        out.line(f"skipped {result.skipped}:")
        for skip in result.skipped_examples[:_SHOWN_SKIPS]:
            out.line(f"  {skip['key']}: {skip['reason']}")
    if result.reason == _AT_ITS_END and not result.samples:
        refresh = "--refresh looks for what is new, " if result.of_objects else ""
        out.line(f"stopped: {result.reason}, all was drawn; {refresh}--follow draws again what was evicted")
    elif result.reason != "done":
        out.line(f"stopped: {result.reason}")
