"""The options of the command line: those that only it has, and how the others are made of their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from cachetool.core.options import Declared, Option, Options, declared

__all__ = ["CacheOption", "DatasetOption", "JsonOption", "QuietOption", "command", "with_label_kind"]

_LABEL, _LABEL_KINDS = "--label-from-folder", ("text", "int")

CacheOption = Annotated[
    str | None,  # no Path: that takes an empty name for the present folder
    typer.Option(
        "--cache",
        metavar="DIR",
        help="The cache folder. Default: $CACHETOOL_CACHE, else the user cache folder of this platform.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only the result.")]
DatasetOption = Annotated[str | None, typer.Option("--dataset", metavar="NAME", help="Only this dataset.")]


def _formats(incomplete: str) -> list[str]:
    """The formats whose names begin with what was typed, for shell completion."""
    from cachetool.formats import format_names

    return [name for name in format_names() if name.startswith(incomplete)]


def _policies(incomplete: str) -> list[str]:
    """The eviction policies whose names begin with what was typed, for shell completion."""
    from cachetool.cache import policy_names

    return [name for name in policy_names() if name.startswith(incomplete)]


_COMPLETIONS: Mapping[str, Callable[[str], list[str]]] = {"to": _formats, "policy": _policies}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer is to see it.

    A parameter whose type is a class of :class:`~cachetool.core.options.Options` stands for all its options: the
    function gets them as one value. A parameter annotated with a single :class:`~cachetool.core.options.Option` is
    declared by that, and its value is checked.
    """
    parameters: list[inspect.Parameter] = []
    classes: dict[str, type[Options]] = {}
    alone: dict[str, Declared] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        hint, extras = parameter.annotation, getattr(parameter.annotation, "__metadata__", ())
        if isinstance(hint, type) and issubclass(hint, Options):
            classes[parameter.name] = hint
            parameters += [_parameter(one) for one in declared(hint).values() if one.option.command_line]
        elif extras and isinstance(extras[0], Option):
            one = Declared(parameter.name, extras[0], get_args(hint)[0], parameter.default)
            alone[one.name] = one
            parameters.append(_parameter(one))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(function)
    def run(**given: Any) -> None:
        for name, one in alone.items():
            if one.option.check is not None and given[name] is not None:
                given[name] = one.option.check(given[name], what=one.flag)
        for name, options in classes.items():
            values = {one: value for one in declared(options) if (value := given.pop(one, None)) is not None}
            for each in values:
                if (words := declared(options)[each].option.words) is not None:
                    values[each] = words(values[each])
            given[name] = options.of(values)
        function(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(one: Declared) -> inspect.Parameter:
    """The parameter for Typer: text where a value may be text, a list where it may be several; None where it is
    not given and the default is of another type."""
    types = [each for each in (str, bool, int) if each in one.kinds]
    plain: Any = types[0] if types else list[str]
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    if default is not inspect.Parameter.empty and type(default) is not plain:
        default, plain = None, plain | None
    option = typer.Option(
        one.flag, metavar=one.option.metavar, help=one.option.help, autocompletion=_COMPLETIONS.get(one.name)
    )
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain, option]
    )


def with_label_kind(args: Sequence[str]) -> list[str]:
    """The command line with ``--label-from-folder`` joined to its kind, text where none is given: Typer would take the
    next word for it, which may be the source."""
    out: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*out, word, *words]
        if word == _LABEL:
            kind = words.pop(0) if words and words[0] in _LABEL_KINDS else _LABEL_KINDS[0]
            word = f"{_LABEL}={kind}"
        out.append(word)
    return out
