"""``cachetool convert``: write the same samples in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachetool.cli.options import CacheOption, DatasetOption, FormatOption, JsonOption, QuietOption, WorkersOption
from cachetool.cli.output import Output, count
from cachetool.units import format_duration, format_size

__all__ = ["convert"]


def convert(
    to: FormatOption,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write plain files into this new folder instead of the cache."),
    ] = None,
    cache: CacheOption = None,
    dataset: DatasetOption = None,
    shard_size: Annotated[
        str | None, typer.Option("--shard-size", metavar="SIZE", help="Most bytes of values in one file of --out.")
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression", metavar="NAME", help="gzip or lzf (hdf5); zstd, blosc or gzip (zarr); gzip (tfrecord)."
        ),
    ] = None,
    workers: WorkersOption = 2,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every shard back through its own library and compare checksums.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the same samples in another format, bit for bit.

    The cache's shards are replaced one by one, inside the cap, while readers go on. With --out the cache stays as it is
    and the result is plain files (part-00000.h5, ...) that other tools open.

    \b
    Examples:
      cachetool convert --to tfrecord
      cachetool convert --to hdf5 --out ./volumes-h5 --verify
    """
    from cachetool import api

    output = Output(as_json=as_json, quiet=quiet)
    with output.progress() as report:
        result = api.convert(
            to=to,
            out=out,
            cache=cache,
            dataset=dataset,
            shard_size=shard_size,
            compression=compression,
            workers=workers,
            verify=verify,
            progress=report,
        )
    if as_json:
        output.document(result.as_dict())
        return
    where = f" in {result.out}" if result.out else ""
    output.line(
        f"converted {count(result.samples, 'sample')} to {count(result.shards, f'{result.to} shard')},"
        f" {format_size(result.bytes)},{where} in {format_duration(result.seconds)}"
        f"{', verified' if result.verified else ''}"
    )
