"""``cachetool doctor``: a check of the cache's disk, locks, catalog and readers."""

from __future__ import annotations

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.errors import CatalogError

__all__ = ["doctor"]


def doctor(cache: CacheOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Check the cache's disk, locks, catalog and readers.

    The command changes nothing. Exit code 6 means that a problem must be solved before you can rely on the cache. To
    check the samples themselves, use: cachetool verify

    \b
    Examples:
      cachetool doctor
      cachetool doctor --cache /data/cache --json
    """
    # Imported here, so that `cachetool doctor --help` does not load the catalog.
    from cachetool.check.doctor import examine

    out = Output(as_json=as_json, quiet=quiet)
    findings = examine(cache)
    bad = any(finding.state == "bad" for finding in findings)
    if as_json:
        out.document({"findings": [finding.as_dict() for finding in findings], "well": not bad})
    else:
        out.table(["check", "state", "result"], [(f.what, f.state, f.text) for f in findings])
    if bad:
        raise typer.Exit(CatalogError.exit_code)
