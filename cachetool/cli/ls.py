"""``cachetool ls``: the shards of the cache."""

from __future__ import annotations

import time

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.units import format_duration, format_size

__all__ = ["ls"]


def ls(
    dataset: DatasetOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the shards of the cache, oldest first.

    A shard in the state "retiring" is not used by new epochs. Its files are deleted when its last reader ends.

    \b
    Examples:
      cachetool ls
      cachetool ls --dataset volumes --json
    """
    # Imported here, so that `cachetool ls --help` does not load NumPy and the catalog.
    from cachetool.api import open_cache

    out = Output(as_json=as_json, quiet=quiet)
    with open_cache(cache, create=False, notify=out.note) as opened:
        shards = opened.shards(None if dataset is None else opened.dataset(dataset), retiring=True)
    if as_json:
        rows = [
            {
                "id": shard.id,
                "dataset": shard.dataset,
                "format": shard.format,
                "state": shard.state,
                "samples": shard.samples,
                "bytes": shard.bytes,
                "payload": shard.payload,
                "created": shard.created,
                "path": str(shard.path),
            }
            for shard in shards
        ]
        out.document({"root": str(opened.root), "shards": rows})
        return
    now = time.time()
    out.table(
        ["shard", "dataset", "format", "state", ">samples", ">bytes", ">age"],
        [
            (
                s.id,
                s.dataset,
                s.format,
                s.state,
                s.samples,
                format_size(s.bytes),
                # A clock that was set back must not show a negative age.
                format_duration(max(0.0, now - s.created)),
            )
            for s in shards
        ],
    )
