"""``cachetool bench``: the numbers of this machine, and what to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from cachetool.cli.options import CacheOption, DatasetOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.errors import CacheToolError, from_json
from cachetool.core.options import Workers
from cachetool.proc.disk import parse_location

__all__ = ["bench"]


def bench(
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="A file or folder to take samples of. Default: the cache; else made up."),
    ] = None,
    cache: CacheOption = None,
    dataset: DatasetOption = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Measure the disk of this folder. Default: that of the cache."),
    ] = None,
    workers: Workers = 2,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="N", min=0.01, help="How long each rate is measured, at least.")
    ] = 1.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure how fast training can be fed here, and what slows it.

    Up to 128 MB of your samples are written in each format, to be deleted again, and read from memory and from the
    disk. It takes about a minute; nothing else should run meanwhile.

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
    command = [sys.executable, "-m", "cachetool.bench", json.dumps(options)]
    rows: list[list[Any]] = []
    said: dict[str, Any] = {}
    # A process of its own, as a training script is one: what this one has loaded and does is not measured.
    quiet_tensorflow = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (
        tempfile.TemporaryFile("w+") as words,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True, env=quiet_tensorflow) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            if "row" in message:
                rows.append(message["row"])
                what, how, number, unit = message["row"]
                out.note(f"{what}: {how}: {number:,} {unit}")
            said |= message
        if "error" in said:
            raise from_json(said["error"])
        if child.wait():
            words.seek(0)
            last = (words.read().strip().splitlines() or ["it said nothing"])[-1]
            raise CacheToolError(f"the measuring process ended with {child.returncode}: {last}")
    if as_json:
        names = ("what", "how", "number", "unit")
        document = {"samples": said["note"], "advice": said["advice"]}
        out.document({**document, "rows": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    out.line(said["note"])
    out.table(["what", "how", ">rate", "unit"], [(what, how, f"{number:,}", unit) for what, how, number, unit in rows])
    out.line()
    out.line(said["advice"])


def _place(data: str | None, cache: str | None, folder: Path | None) -> tuple[str | None, Path]:
    """The cache to take samples of, None for none; and the folder whose disk is measured."""
    from cachetool.cache.layout import root_of

    root = root_of(cache)
    there = os.path.isfile(root / "cachetool.json")  # where it may not be looked at there is none for us
    if folder is None and there:
        folder = root.parent
    return (str(root) if data is None and (there or cache is not None) else None), folder or Path.cwd()
