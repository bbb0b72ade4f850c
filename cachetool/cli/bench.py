"""``cachetool bench``: the speed of this machine, and what to change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.options import Workers
from cachetool.proc.disk import parse_location
from cachetool.proc.parent import LocalEngine
from cachetool.proc.task import Message, Task

__all__ = ["bench"]


def bench(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA", help="A file or folder whose samples are measured. Default: the cache, or made-up samples."
        ),
    ] = None,
    cache: CacheOption = None,
    dataset: DatasetOption = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Measure the disk of this folder. Default: the disk of the cache."),
    ] = None,
    workers: Workers = 2,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", min=0.01, help="Measure each rate for at least N seconds.")
    ] = 1.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure how fast this machine feeds samples, and what limits it.

    The command writes up to 128 MB of your samples in each format, reads them from memory and from the disk, and
    deletes them again. It takes about a minute. Run nothing else at the same time.

    \b
    Examples:
      cachetool bench
      cachetool bench ./volumes --dir /data
    """
    out = Output(as_json=as_json, quiet=quiet)
    data = None if data is None else parse_location(data, what="DATA")
    place, where = _place(data, cache, None if folder is None else folder.expanduser())
    chosen = {"dataset": dataset, "workers": workers, "seconds": seconds}
    options = {"data": data, "cache": place, "folder": str(where), **chosen}
    rows: list[list[Any]] = []
    said: dict[str, Any] = {}

    def hear(_: int, message: Message) -> None:
        if "row" in message:
            rows.append(message["row"])
            what, how, number, unit = message["row"]
            out.note(f"{what}: {how}: {number:,} {unit}")
        said.update(message)

    # A process of its own with the user's environment, like a training script. So the modules and threads of this
    # process do not change the figures.
    LocalEngine(quiet=True, env=os.environ).run([Task("cachetool.bench.measure:run", options)], hear)
    if as_json:
        names = ("what", "how", "number", "unit")
        document = {"samples": said["note"], "advice": said["advice"]}
        out.document({**document, "rows": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    out.line(said["note"])
    out.table(
        ["measured", "how", ">rate", "unit"], [(what, how, f"{number:,}", unit) for what, how, number, unit in rows]
    )
    out.line()
    out.line(said["advice"])


def _place(data: str | None, cache: str | None, folder: Path | None) -> tuple[str | None, Path]:
    """Return the cache to take samples from (None: no cache), and the folder whose disk is measured."""
    from cachetool.cache.layout import root_of

    root = root_of(cache)
    # isfile is False where this user may not look: for him there is no cache.
    there = os.path.isfile(root / "cachetool.json")
    if folder is None and there:
        # Not the cache itself: files of the measurement in it would count against its cap.
        folder = root.parent
    return (str(root) if data is None and (there or cache is not None) else None), folder or Path.cwd()
