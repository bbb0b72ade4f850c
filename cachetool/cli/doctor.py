"""``cachetool doctor``: a check of the cache's disk, locks, catalog and readers."""

from __future__ import annotations

from typing import Annotated

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.errors import CatalogError

__all__ = ["doctor"]


def doctor(
    live: Annotated[
        bool, typer.Option("--live", help="Watch trainings and pulls that run, and say what slows them down.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, max=3600.0, metavar="N", help="With --live: watch for N seconds.")
    ] = 12.0,
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check the cache's disk, locks, catalog and readers. With --live, watch the trainings and pulls instead.

    The command changes nothing. Exit code 6 means that a problem must be solved before you can rely on the cache. To
    check the samples themselves, use: cachetool verify

    \b
    Examples:
      cachetool doctor
      cachetool doctor --cache /data/cache --json
      cachetool doctor --live
    """
    # Imported here, so that `cachetool doctor --help` does not load the catalog.
    from cachetool.check.doctor import examine

    out = Output(as_json=as_json, quiet=quiet)
    if live:
        _watch(out, cache, seconds)
        return
    findings = examine(cache)
    bad = any(finding.state == "bad" for finding in findings)
    if as_json:
        out.document({"findings": [finding.as_dict() for finding in findings], "well": not bad})
    else:
        out.table(["check", "state", "result"], [(f.what, f.state, f.text) for f in findings])
    if bad:
        raise typer.Exit(CatalogError.exit_code)


def _watch(out: Output, cache: str | None, seconds: float) -> None:
    """Print what slows trainings and pulls down, as one sentence and a table."""
    from cachetool.api import open_cache
    from cachetool.check.live import watched

    with open_cache(cache, create=False, notify=out.note) as opened:
        # A running training tells its waits every five seconds.
        out.note(f"watching for {seconds:g} s")
        sentence, findings = watched(opened, seconds)
    if out.as_json:
        out.document({"sentence": sentence, "findings": [finding.as_dict() for finding in findings]})
        return
    out.line(sentence)
    if findings:
        out.table(["what", "state", "result"], [(f.what, f.state, f.text) for f in findings])
