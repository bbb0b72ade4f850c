"""Writes ``docs/reference/commands.md`` out of the commands and their options: ``python docs/make_commands.py``."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import typer

from cachetool.cli.app import VERBS, program
from cachetool.conversion.options import ConvertCall
from cachetool.core.options import Declared, Options, declared
from cachetool.pull.options import PullCall
from cachetool.sources.options import SourceOptions

OPTIONS: dict[str, type[Options]] = {"pull": PullCall, "convert": ConvertCall}
"""Commands whose options are declared as a class, which Python takes as keywords."""
COMMON = ("--cache", "--json", "--quiet", "--help")
HEAD = """# Commands

This page is made from the program itself by `python docs/make_commands.py`. `cachetool COMMAND --help` shows the same
text. In Python, `cache.pull()` and `cache.convert()` have the same options with the same defaults, as keyword
arguments: `shard_size=` for `--shard-size`, `key=False` for `--no-key` ([API reference](api.md#cachepull)).
[Words](../README.md#words) has the terms.

SIZE is a number of bytes, or text such as `50GB` and `512MiB`. TIME is a number of seconds, or text such as `10min`.
FRACTION is a number such as `0.1`, or text such as `10%`. A command checks its arguments before it reads or writes
anything.

Exit codes: 0 done, 1 a killed process or a bug, 2 wrong usage, 3 the source or its store, 4 no space in the cache or on
the disk, 5 damaged data in the cache, 6 the catalog (database) of the cache, 130 interrupted. [Errors](errors.md) has
the messages.
"""


def page() -> str:
    """The page."""
    group: Any = typer.main.get_command(program())
    parts = [HEAD, "## Options of every command\n", "`demo` has no `--cache`; every other command has all of them.\n"]
    common: dict[str, Any] = {}
    for verb in VERBS:
        for one in group.commands[verb].params:
            common.setdefault(_flag(one), one)
    parts += [_table([_row(common[flag]) for flag in COMMON if flag in common])]
    parts += ["`cachetool --version` prints the version. `--install-completion` lets your shell complete commands.\n"]
    parts += [_command(verb, group.commands[verb]) for verb in VERBS]
    parts += [
        "## Options of sources\n",
        "These options of `pull`, and of `convert` with an INPUT, say how samples are made from files."
        " An object is a file of a folder, or a key of a bucket.\n",
        _table([_row(one) for one in group.commands["pull"].params if one.name in declared(SourceOptions)]),
    ]
    return "\n".join(parts)


def _command(verb: str, command: Any) -> str:
    text, _, examples = inspect.cleandoc(command.help).partition("\b\nExamples:\n")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and _flag(one) not in COMMON]
    of_sources = [one for one in options if verb in OPTIONS and one.name in declared(SourceOptions)]
    usage = " ".join(["cachetool", verb, "[OPTIONS]", *map(_usage, arguments)])
    parts = [f"## {verb}\n", f"    {usage}\n", _markdown(text.strip()), ""]
    if arguments:
        parts += ["| argument | meaning |", "|---|---|"]
        parts += [
            f"| `{_cell(one.metavar or one.name.upper())}` | {_markdown(_cell(one.help or ''))} |" for one in arguments
        ]
        parts += [""]
    if own := [one for one in options if one not in of_sources]:
        parts += [_table([_row(one, OPTIONS.get(verb)) for one in own])]
    if of_sources:
        parts += ["Also the [options of sources](#options-of-sources).\n"]
    if examples:
        parts += ["```sh", inspect.cleandoc(f"\n{examples}"), "```", ""]
    return "\n".join(parts)


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _flag(one: Any) -> str:
    return str(one.opts[0])


def _table(rows: list[str]) -> str:
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows, ""])


def _row(one: Any, options: type[Options] | None = None) -> str:
    flags = ", ".join(one.opts) + "".join(f"/{flag}" for flag in one.secondary_opts)
    value = f" {one.metavar}" if one.metavar and not one.is_flag else ""
    about: Declared | None = declared(options or SourceOptions).get(one.name)
    default = one.default if about is None or about.default is MISSING else about.default
    if one.required:
        shown = "required"
    elif default is True:
        shown = f"`{_flag(one)}`"
    else:  # what has no value by default, and switches that are off, need no words
        shown = f"`{default}`" if isinstance(default, str | int | float) and default is not False else ""
    return f"| `{_cell(flags + value)}` | {shown} | {_markdown(_cell(one.help or ''))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _markdown(text: str) -> str:
    text = re.sub(r"'(__\w+__)'", r"`\1`", text)
    text = re.sub(r"(?<![\w`-])--[a-z][a-z-]*", r"`\g<0>`", text)
    return re.sub(r"[*<]", r"\\\g<0>", text)


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "commands.md").write_text(page(), encoding="utf-8")
