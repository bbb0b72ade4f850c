"""Writes ``docs/options.md`` out of the declarations of the options: ``python docs/make_options.py``."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path

from cachetool.conversion.options import ConvertCall
from cachetool.core.options import Declared, Options, declared
from cachetool.pull.options import DrawOptions, PullCall
from cachetool.sources.options import SourceOptions

HEAD = """# Options

Made by `python docs/make_options.py` out of the declarations in the code. The same names and defaults hold on the
command line and in Python; what is given is checked before anything is touched. Sizes are bytes or text such as `50GB`
and `512MiB`, times are seconds or text such as `10min`, shares are numbers such as `0.1` or text such as `10%`.
"""


def page() -> str:
    """The page."""
    drawn, files = declared(DrawOptions), declared(SourceOptions)
    parts = [
        HEAD,
        "## How samples are made of files and objects\n",
        "For `pull` and `BackgroundPull`, and for `convert` with an INPUT.\n",
        _table(SourceOptions, set()),
        "## Pull\n",
        "For `cachetool pull`, `Cache.pull` and `BackgroundPull`.\n",
        _table(DrawOptions, set(files)),
        "For `cachetool pull` and `Cache.pull` alone, since a `BackgroundPull` has no end.\n",
        _table(PullCall, set(drawn)),
        "## Convert\n",
        "For `cachetool convert`, `Cache.convert` and, of files, `cachetool.convert`.\n",
        _table(ConvertCall, set(files)),
    ]
    return "\n".join(parts)


def _table(options: type[Options], without: set[str]) -> str:
    rows = [_row(one) for name, one in declared(options).items() if name not in without]
    return "\n".join(["| command line | Python | default | |", "|---|---|---|---|", *rows, ""])


def _row(one: Declared) -> str:
    value = f" {one.option.metavar}" if one.option.metavar else ""
    line = f"`{one.flag}{value}`".replace("|", "\\|") if one.option.command_line else ""
    default = "" if one.default is MISSING or not one.option.command_line else f"`{one.default!r}`"
    return f"| {line} | `{one.name}=` | {default} | {one.option.help} |"


if __name__ == "__main__":
    Path(__file__).with_name("options.md").write_text(page(), encoding="utf-8")
