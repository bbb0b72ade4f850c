"""``cachetool verify``: is every byte still what was written, and does the catalog agree with the disk."""

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
        typer.Option("--repair", help="Mend it: remove what is bad, rebuild a lost catalog, pull again."),
    ] = False,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size", metavar="SIZE", help="With --repair: the cap, when no file of the cache tells it any more."
        ),
    ] = None,
    repull: Annotated[
        bool, typer.Option("--repull/--no-repull", help="Whether --repair fetches again what had to be removed.")
    ] = True,
    sample: Annotated[
        str,
        typer.Option("--sample", metavar="SHARE", help="Read the bytes of this share of the shards only, such as 5%."),
    ] = "100%",
    cache: CacheOption = None,
    on: On = "local",
    address: Address = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check every byte of every shard, and the catalog.

    Exit code 5 when something is wrong and not repaired, or damaged draws are still to be fetched again. With --repair
    a bad shard is removed and exactly its draws are fetched again (with --no-repull by the next pull). Draws that could
    not be fetched are tried again by the next --repair or pull. With --on ray the cache of each node.

    \b
    Examples:
      cachetool verify
      cachetool verify --sample 5%
      cachetool verify --repair
    """
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
            for hint in _hints(result, cache, repair=repair):
                out.note(hint)
        raise typer.Exit(CorruptError.exit_code)


def _print(out: Output, result: Verified) -> None:
    if result.problems:
        out.table(
            ["shard", "file", "what is wrong", "what was done"],
            [(p.shard or "", p.file or "", p.what, p.action or "nothing") for p in result.problems],
        )
    for url, draws in result.reopened.items():
        out.line(f"{draws} draws of {url} are open again")
    if result.repulled:
        out.line(f"{count(result.repulled, 'sample')} pulled again")
    for text in (*(f"not of cachetool, left alone: {name}" for name in result.foreign), *result.notes):
        out.line(text)
    for missing in result.missing:
        out.line(_missing(missing))
    gone = f", {result.gone} missing" if result.gone else ""
    read = f"{result.checked} of {result.shards} shards{gone}, {result.samples} samples, {format_size(result.bytes)}"
    out.line(f"read {read}: {_verdict(result)}")


def _missing(what: Missing) -> str:
    line = f"{count(what.draws, 'damaged draw')} of {what.source} will be fetched again by the next pull"
    if what.tried == what.draws:
        line = f"{count(what.draws, 'damaged draw')} of {what.source} gave nothing again; a later pull tries once more"
    if what.failed is not None:
        return f"{line}, and could not be now: {what.failed}"
    return f"{line}; the last error of that source: {what.last_error}" if what.last_error else line


def _verdict(result: Verified) -> str:
    if not result.problems and not result.missing:
        return "all as it was written"
    wrong = sum(problem.action is None for problem in result.problems)
    said = [(wrong, f"{count(wrong, 'thing')} wrong")]
    mended = len(result.problems) - wrong
    said.append((mended, f"{count(mended, 'thing')} repaired"))
    missing = sum(row.draws for row in result.missing)
    said.append((missing, f"{count(missing, 'draw')} to be fetched again"))
    return ", ".join(text for number, text in said if number)


def _hints(result: Verified, cache: str | None, *, repair: bool) -> list[str]:
    """What to do next."""
    from cachetool.cache.layout import cache_option

    line = "cachetool verify --repair" + ("" if cache is None else cache_option(Path(cache)))
    if not repair and (result.missing or any(problem.action is None for problem in result.problems)):
        return [f"run: {line}"]
    return [f"the next pull of that source draws them, and so does: {line}"] if result.missing else []
