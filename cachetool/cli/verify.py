"""``cachetool verify``: is every byte still what was written, and does the catalog agree with the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachetool.cli.options import AddressOption, CacheOption, JsonOption, OnOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.core.errors import CorruptError
from cachetool.core.units import format_size, parse_fraction

if TYPE_CHECKING:
    from cachetool.check.verify import Missing, Verified

__all__ = ["verify"]


def verify(
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend it: remove or set aside what is bad, rebuild a lost catalog, pull again."),
    ] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge", help="With --repair: delete what is in quarantine, and give up what could not be pulled again."
        ),
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
    on: OnOption = "local",
    address: AddressOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check every byte of every shard, and the catalog.

    Exit code 5 when something is wrong and not repaired, or samples are missing. With --repair a bad shard that can be
    pulled again is removed and exactly its samples are pulled again (with --no-repull by the next pull); one that
    exists nowhere else is kept in quarantine, where no training reads it and which takes room under the cap until
    --purge. What could not be pulled again is tried again by the next --repair. With --on ray the cache of each node.

    \b
    Examples:
      cachetool verify
      cachetool verify --sample 5%
      cachetool verify --repair
      cachetool verify --repair --purge
    """
    from cachetool.api import runs_on_cluster
    from cachetool.check.verify import verify as check

    out = Output(as_json=as_json, quiet=quiet)
    share = parse_fraction(sample, what="--sample")
    if runs_on_cluster(on, cache, address=address):
        from cachetool.cli import nodes

        arguments = {"repair": repair, "repull": repull, "purge": purge, "max_size": max_size, "sample": share}
        nodes.verify(out, cache, arguments, address)
        return
    with out.progress() as report:
        result = check(cache, repair=repair, repull=repull, purge=purge, max_size=max_size, sample=share, report=report)
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
    if result.quarantine:
        out.table(
            ["in quarantine", "dataset", ">samples", ">bytes", "why"],
            [(q["id"], q["dataset"], q["samples"], format_size(q["bytes"]), q["why"]) for q in result.quarantine],
        )
    for url, draws in result.reopened.items():
        out.line(f"{draws} draws of {url} are open again")
    if result.repulled:
        earlier = f"{count(result.repulled, 'sample')} that were missing since an earlier repair"
        out.line(f"{result.repulled if result.reopened else earlier} pulled again")
    if result.purged is not None:
        samples, freed = count(result.purged["samples"], "sample"), format_size(result.purged["bytes"])
        out.line(f"purged {count(result.purged['shards'], 'shard')} with {samples}, {freed}")
    for text in (*(f"not of cachetool, left alone: {name}" for name in result.foreign), *result.notes):
        out.line(text)
    for missing in result.missing:
        out.line(_missing(missing))
    gone = f", {result.gone} missing" if result.gone else ""
    read = f"{result.checked} of {result.shards} shards{gone}, {result.samples} samples, {format_size(result.bytes)}"
    out.line(f"read {read}: {_verdict(result)}")


def _missing(what: Missing) -> str:
    line = f"{count(what.samples, 'sample')} of {what.source} are missing"
    if what.failed is not None:
        return f"{line} and could not be pulled again: {what.failed}"
    return f"{line}; the last error of that source: {what.last_error}" if what.last_error else line


def _verdict(result: Verified) -> str:
    if result.sound and not result.problems:
        return "all as it was written"
    wrong = sum(problem.action is None for problem in result.problems)
    said = [(wrong, f"{count(wrong, 'thing')} wrong")]
    mended = len(result.problems) - wrong
    said.append((mended, f"{count(mended, 'thing')} repaired"))
    missing = sum(loss.samples for loss in result.missing)
    said.append((missing, f"{count(missing, 'sample')} missing"))
    said.append((len(result.quarantine), f"{count(len(result.quarantine), 'shard')} in quarantine"))
    return ", ".join(text for number, text in said if number)


def _hints(result: Verified, cache: str | None, *, repair: bool) -> list[str]:
    """What to do next."""
    from cachetool.cache.layout import cache_option

    line = "cachetool verify --repair" + ("" if cache is None else cache_option(Path(cache)))
    if not repair and (result.missing or any(problem.action is None for problem in result.problems)):
        return [f"run: {line}"]
    hints = []
    if result.missing:
        hints.append(f"the next pull of that source draws them, and so does: {line}; to give them up: {line} --purge")
    if result.quarantine:
        size = format_size(sum(shard["bytes"] for shard in result.quarantine))
        hints.append(f"the quarantine takes {size} of the cap and nobody reads it; to delete it: {line} --purge")
    return hints
