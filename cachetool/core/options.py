"""Options declared once: a class whose fields say name, type, default, check and help of what a command takes.

::

    class PullOptions(Options):                  cachetool pull --samples N      a parameter of Typer
        samples: Annotated[int | None,    -->    Cache.pull(samples=N)           a keyword that help() and mypy see
            Option("Draw N.", "N")] = None       {"samples": N}                  JSON for child processes
                                                 a row of docs/options.md

A field without an :class:`Option` is no keyword: other code sets it, and it crosses processes with the rest. A class
takes over the options of its base class, so that :meth:`Options.only` gives each room those that are its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache, wraps
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
    overload,
)  # fmt: skip

from cachetool.core.errors import UsageError
from cachetool.core.units import (
    parse_choice,
    parse_count,
    parse_duration,
    parse_flag,
    parse_text,
    parse_workers,
)

__all__ = [
    "Address",
    "Declared",
    "MinEpochs",
    "On",
    "OnError",
    "Option",
    "Options",
    "Policy",
    "RoomWait",
    "Workers",
    "choice",
    "declared",
    "takes",
    "unknown_option",
]

_P = ParamSpec("_P")
_O = TypeVar("_O")
_R = TypeVar("_R")
_S = TypeVar("_S")
_A = TypeVar("_A")
_B = TypeVar("_B")


class Check(Protocol):
    """A function that gives the value to use, or raises :class:`UsageError`, in which ``what`` names the option."""

    def __call__(self, value: Any, *, what: str) -> Any:
        """The value to use."""
        ...


@dataclass(frozen=True)
class Option:
    """The meaning of an option, for its reader, and the check of its value."""

    help: str
    metavar: str | None = None
    """Stands for the value in the help of the command line; None for a switch."""
    check: Check | None = None
    flag: str | None = None
    """On the command line; None: ``--`` and the name of the field."""
    words: Callable[[list[str]], Any] | None = None
    """Makes the value of an option that may be given several times."""
    command_line: bool = True
    """False for a keyword of Python alone, which is no JSON either."""


@dataclass(frozen=True)
class Declared:
    """An option where it is declared."""

    name: str
    option: Option
    hint: Any
    """The type of the field, without the option."""
    default: Any
    """``MISSING`` where a value must be given."""

    @property
    def flag(self) -> str:
        """The option on the command line: ``--shard-size``, ``--key/--no-key``."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    def parameter(self) -> inspect.Parameter:
        """The keyword of Python."""
        default = inspect.Parameter.empty if self.default is MISSING else self.default
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=self.hint)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have."""
        return get_args(self.hint) if isinstance(self.hint, types.UnionType) else (self.hint,)


@cache
def _declared(options: type[Options]) -> Mapping[str, Declared]:
    """The options of a class by name, its own before those of its base class."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    defaults |= {
        field.name: field.default_factory()
        for field in dataclasses.fields(options)
        if field.default_factory is not MISSING
    }
    hints = get_type_hints(options, include_extras=True)
    names = [name for room in options.__mro__ for name in vars(room).get("__annotations__", ())]
    found = {}
    for name in names:
        extras = getattr(hints[name], "__metadata__", ())
        if extras and name in defaults:
            found[name] = Declared(name, extras[0], get_args(hints[name])[0], defaults[name])
    return found


def unknown_option(name: str, names: Iterable[str]) -> UsageError:
    """The error about an option that is none of these ``names``, with the one that is meant."""
    near = difflib.get_close_matches(name, names := list(names), 1)
    hint = f"do you mean {near[0]}=?" if near else f"there are {', '.join(names)}"
    return UsageError(f"unknown option {name!r}; {hint}")


def declared(options: type[Options]) -> Mapping[str, Declared]:
    """The options of a class by name, its own before those of its base class."""
    return _declared(options)  # type: ignore[arg-type] # mypy takes the hash of a class for that of its values


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a verb: one frozen value that checks itself. Raises :class:`UsageError` when made wrongly."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keywords that somebody may look for here, and what to do instead."""

    def __post_init__(self) -> None:
        for name, about in declared(type(self)).items():
            value, check = getattr(self, name), about.option.check
            if check is None and bool in about.kinds and str not in about.kinds:
                check = parse_flag
            if check is not None and not (value is None and about.default is None):
                self._set(name, check(value, what=about.flag.partition("/")[0]))
        self._check()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Check what no option alone decides."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The options with these keywords. Raises :class:`UsageError`, for a name that is none as well."""
        names = declared(cls)
        for name in given:
            if name not in names:
                if name in cls.elsewhere:
                    raise UsageError(f"there is no {name}= here; {cls.elsewhere[name]}")
                raise unknown_option(name, names)
        for name, about in names.items():
            if about.default is MISSING and name not in given:
                raise UsageError(f"{about.flag} is missing: {about.option.help}")
        return cls(**given)

    def only(self, base: type[_T]) -> _T:
        """The options that ``base``, a base class, has."""
        return base(**{field.name: getattr(self, field.name) for field in dataclasses.fields(base)})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        only_python = {name for name, about in declared(type(self)).items() if not about.option.command_line}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items() if name not in only_python}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The options that :meth:`to_json` described. Raises :class:`UsageError` when ``value`` is none."""
        try:
            return cls(**value)
        except TypeError as error:
            raise UsageError(f"not the options of a {cls.__name__}: {error}") from None


_T = TypeVar("_T", bound=Options)


def _plain(value: Any) -> Any:
    if hasattr(value, "__fspath__"):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


class _Takes(Generic[_P, _O]):
    """Decorates functions whose last parameter is a value of one class of options."""

    def __init__(self, options: Callable[_P, _O]) -> None:
        self._options = cast("type[Options]", options)

    @overload
    def __call__(self, function: Callable[[_S, _O], _R]) -> Callable[Concatenate[_S, _P], _R]: ...
    @overload
    def __call__(self, function: Callable[[_S, _A, _O], _R]) -> Callable[Concatenate[_S, _A, _P], _R]: ...
    @overload
    def __call__(self, function: Callable[[_S, _A, _B, _O], _R]) -> Callable[Concatenate[_S, _A, _B, _P], _R]: ...
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        options, about = self._options, declared(self._options).values()
        *own, last = inspect.signature(function).parameters.values()

        @wraps(function)
        def call(*places: Any, **given: Any) -> Any:
            named = {parameter.name: given.pop(parameter.name) for parameter in own if parameter.name in given}
            return function(*places, **named, **{last.name: options.of(given)})

        call.__signature__ = inspect.Signature([*own, *(one.parameter() for one in about)])  # type: ignore[attr-defined]
        listed = "\n".join(f"    {one.name}: {one.option.help}" for one in about)
        call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{listed}\n"
        return call


def takes(options: Callable[_P, _O]) -> _Takes[_P, _O]:
    """Let a function whose last parameter is a value of the class ``options`` take these options as keywords instead.

    Type checkers and ``help()`` see the keywords. A call raises :class:`UsageError` for options that cannot be used.
    """
    return _Takes(options)


def choice(*values: str) -> Check:
    """The check of an option that has one of these values."""

    def check(value: Any, *, what: str) -> str:
        return parse_choice(value, values, what=what)

    return check


# -- options of several commands ---------------------------------------------------------------------------------------

Workers = Annotated[int, Option("Processes that work side by side.", "N", parse_workers)]
"""``--workers``."""
MinEpochs = Annotated[int, Option("Keep a shard until K epochs of training used it.", "K", parse_count)]
"""``--min-epochs``."""
Policy = Annotated[
    str, Option("Which shards go first: oldest, most-used, lru (longest not used) or random.", "NAME", parse_text)
]
"""``--policy``, a name that :mod:`cachetool.cache.policies` checks."""
RoomWait = Annotated[float | str, Option("How long to wait for room that readers hold.", "TIME", parse_duration)]
"""``--wait``."""
On = Annotated[
    str, Option("Work here, or on all nodes of a Ray cluster, a cache on each.", "local|ray", choice("local", "ray"))
]
"""``--on``."""
Address = Annotated[
    str | None, Option("Of the Ray cluster. Default: the one that runs here, or a new one.", "HOST:PORT", parse_text)
]
"""``--address``."""
OnError = Annotated[
    str, Option("A bad object is an error, or is skipped (up to 1 %).", "error|skip", choice("error", "skip"))
]
"""``--on-error``."""
