"""``cachetool doctor``: is this place fit for a cache, and is the cache there well."""

from __future__ import annotations

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.errors import CatalogError

__all__ = ["doctor"]


def doctor(cache: CacheOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Look at the cache's disk, locks, catalog and readers.

    Changes nothing. Exit code 6 when something must be done before the cache can be relied on; the data itself is
    checked by cachetool verify.

    \b
    Examples:
      cachetool doctor
      cachetool doctor --cache /data/cache --json
    """
    from cachetool.check.doctor import examine

    out = Output(as_json=as_json, quiet=quiet)
    findings = examine(cache)
    bad = any(finding.state == "bad" for finding in findings)
    if as_json:
        out.document({"findings": [finding.as_dict() for finding in findings], "well": not bad})
    else:
        out.table(["what", "state", "found"], [(f.what, f.state, f.text) for f in findings])
    if bad:
        raise typer.Exit(CatalogError.exit_code)
