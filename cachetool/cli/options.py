"""The options of the command line: those that only the command line has, and the translation of all
others for Typer."""

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
    # Text and not Path: Path turns an empty name into the current folder, and the cache would be made there.
    str | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="The cache folder. Default: $CACHETOOL_CACHE, else the user cache folder of this platform.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, no progress and no notes.")]
DatasetOption = Annotated[str | None, typer.Option("--dataset", metavar="NAME", help="Only this dataset.")]


def _formats(incomplete: str) -> list[str]:
    """Return the formats whose names begin with the typed text, for shell completion."""
    # Imported here: completion runs at each Tab, and all other uses of this module need no formats.
    from cachetool.formats import format_names

    return [name for name in format_names() if name.startswith(incomplete)]


def _policies(incomplete: str) -> list[str]:
    """Return the eviction policies whose names begin with the typed text, for shell completion."""
    from cachetool.cache import policy_names

    return [name for name in policy_names() if name.startswith(incomplete)]


_COMPLETIONS: Mapping[str, Callable[[str], list[str]]] = {"to": _formats, "policy": _policies}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with a signature for Typer.

    A parameter whose type is a class of :class:`~cachetool.core.options.Options` is replaced by all options of that
    class. The function gets their values as one object. A parameter with one :class:`~cachetool.core.options.Option` as
    annotation becomes the option that it declares, and its value is checked.
    """
    parameters: list[inspect.Parameter] = []
    classes: dict[str, type[Options]] = {}
    alone: dict[str, Declared] = {}
    # eval_str, because annotations are text here (from __future__ import annotations).
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
            # Typer passes every value by its name.
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(function)
    def run(**given: Any) -> None:
        for name, one in alone.items():
            if one.option.check is not None and given[name] is not None:
                given[name] = one.option.check(given[name], what=one.flag)
        for name, options in classes.items():
            # None means "not given" for Typer. Such options keep the defaults of their class, so defaults stand in one
            # place.
            values = {one: value for one in declared(options) if (value := given.pop(one, None)) is not None}
            for each in values:
                if (words := declared(options)[each].option.words) is not None:
                    values[each] = words(values[each])
            given[name] = options.of(values)
        function(**given)

    # Typer reads the options from this signature. It is made at run time, so each option is declared once, in its
    # Options class.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(one: Declared) -> inspect.Parameter:
    """Return the parameter for Typer.

    Its type is text if a value may be text, and a list if there may be several. Its default is None if the option is
    not given and the default has another type.
    """
    types = [each for each in (str, bool, int) if each in one.kinds]
    plain: Any = types[0] if types else list[str]
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    # A default that is no plain value, such as a tuple, would be shown as Python code on the help page.
    if default is not inspect.Parameter.empty and type(default) is not plain:
        default, plain = None, plain | None
    option = typer.Option(
        one.flag, metavar=one.option.metavar, help=one.option.help, autocompletion=_COMPLETIONS.get(one.name)
    )
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[plain, option]
    )


def with_label_kind(args: Sequence[str]) -> list[str]:
    """Return the command line with ``--label-from-folder`` joined to its kind, ``text`` if none is given.

    Typer would otherwise take the next word as the kind, and that word may be the source.
    """
    out: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        # Words behind -- are no options, whatever they look like.
        if word == "--":
            return [*out, word, *words]
        if word == _LABEL:
            kind = words.pop(0) if words and words[0] in _LABEL_KINDS else _LABEL_KINDS[0]
            word = f"{_LABEL}={kind}"
        out.append(word)
    return out
