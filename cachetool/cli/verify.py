"""``cachetool verify``: a check that every byte is what was written, and that the catalog agrees with the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.core.errors import CorruptError
from cachetool.core.options import Address, On
from cachetool.core.units import format_size, parse_fraction

if TYPE_CHECKING:
    from cachetool.check.verify import Missing, Verified

__all__ = ["verify"]


def verify(
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Remove damaged shards, rebuild a lost catalog, fetch lost samples again."),
    ] = False,
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", metavar="SIZE", help="With --repair: the cap, if the files that store it are lost."),
    ] = None,
    repull: Annotated[
        bool, typer.Option("--repull/--no-repull", help="With --repair: fetch the samples of removed shards again.")
    ] = True,
    sample: Annotated[
        str,
        typer.Option("--sample", metavar="FRACTION", help="Read only this fraction of the shards, such as 5%."),
    ] = "100%",
    cache: CacheOption = None,
    on: On = "local",
    address: Address = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check every byte of every shard, and the catalog.

    Exit code 5 means that a problem was not repaired, or that damaged draws still have to be fetched again.

    With --repair, damaged shards are removed, and their samples are fetched again. With --no-repull the next pull
    of that source fetches them. If some cannot be fetched now, the next verify --repair or pull tries again.

    With --on ray, the command checks the cache of each node.

    \b
    Examples:
      cachetool verify
      cachetool verify --sample 5%
      cachetool verify --repair
    """
    # Imported here, so that `cachetool verify --help` does not load the catalog and formats.
    from cachetool.api import runs_on_cluster
    from cachetool.check.verify import verify as check

    out = Output(as_json=as_json, quiet=quiet)
    share = parse_fraction(sample, what="--sample")
    if runs_on_cluster(on, cache, address=address):
        from cachetool.cli import nodes

        arguments = {"repair": repair, "repull": repull, "max_size": max_size, "sample": share}
        nodes.verify(out, cache, arguments, address)
        return
    with out.progress() as report:
        result = check(cache, repair=repair, repull=repull, max_size=max_size, sample=share, report=report)
    if as_json:
        out.document(result.as_dict())
    else:
        _print(out, result)
    if not result.sound:
        if not as_json:
            # On stderr, and not with --json: a program that reads the document must not find advice in it.
            for hint in _hints(result, cache, repair=repair):
                out.note(hint)
        raise typer.Exit(CorruptError.exit_code)


def _print(out: Output, result: Verified) -> None:
    """Print the result as text."""
    if result.problems:
        out.table(
            ["shard", "file", "problem", "repair"],
            [(p.shard or "", p.file or "", p.what, p.action or "none") for p in result.problems],
        )
    for url, draws in result.reopened.items():
        out.line(f"the removed shards had {count(draws, 'draw')} of {url}")
    if result.repulled:
        out.line(f"{count(result.repulled, 'sample')} fetched again")
    for text in (*(f"not a file of cachetool, left unchanged: {name}" for name in result.foreign), *result.notes):
        out.line(text)
    for missing in result.missing:
        out.line(_missing(missing))
    gone = f", {result.gone} missing" if result.gone else ""
    read = f"{result.checked} of {result.shards} shards{gone}, {result.samples} samples, {format_size(result.bytes)}"
    out.line(f"read {read}: {_verdict(result)}")


def _missing(what: Missing) -> str:
    """Return the line about damaged draws of one source."""
    draws = f"{count(what.draws, 'damaged draw')} of {what.source}"
    line = f"{draws} will be fetched again by the next pull"
    if what.tried == what.draws:
        line = f"{draws} were fetched again, but returned no sample; a later pull will try once more"
    if what.failed is not None:
        return f"{line}; fetching failed now: {what.failed}"
    return f"{line}; the last error of that source: {what.last_error}" if what.last_error else line


def _verdict(result: Verified) -> str:
    """Return the summary of the last line."""
    if not result.problems and not result.missing:
        return "no problems"
    wrong = sum(problem.action is None for problem in result.problems)
    said = [(wrong, f"{count(wrong, 'problem')} not repaired")]
    mended = len(result.problems) - wrong
    said.append((mended, f"{count(mended, 'problem')} repaired"))
    missing = sum(row.draws for row in result.missing)
    said.append((missing, f"{count(missing, 'draw')} to be fetched again"))
    return ", ".join(text for number, text in said if number)


def _hints(result: Verified, cache: str | None, *, repair: bool) -> list[str]:
    """Return the commands to run next."""
    from cachetool.cache.layout import cache_option

    line = "cachetool verify --repair" + ("" if cache is None else cache_option(Path(cache)))
    if not repair and (result.missing or any(problem.action is None for problem in result.problems)):
        return [f"run: {line}"]
    return [f"to fetch them now, run: {line}"] if result.missing else []
