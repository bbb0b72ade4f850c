"""Options of commands, declared once: the fields of a class state name, type, default, check and help.

::

    class PullOptions(Options):                  cachetool pull --samples N      a parameter of Typer
        samples: Annotated[int | None,    -->    Cache.pull(samples=N)           a keyword that help() and mypy see
            Option("Draw N.", "N")] = None       {"samples": N}                  JSON for child processes
                                                 a line of docs/reference/commands.md and api.md

A field without an :class:`Option` is not a keyword: code sets it, and it is sent to child processes with the other
fields. A class inherits the options of its base class; :meth:`Options.only` returns the part of one base class.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import textwrap
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

from cachetool.core.docstrings import with_arguments
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
    "arguments",
    "choice",
    "declared",
    "documents",
    "takes",
    "unknown_option",
]

_P = ParamSpec("_P")
_O = TypeVar("_O")
_R = TypeVar("_R")
_S = TypeVar("_S")
_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C", bound=type[Any])


class Check(Protocol):
    """A function that returns the value to use, or raises :class:`UsageError` with the option's name ``what``."""

    def __call__(self, value: Any, *, what: str) -> Any:
        """Return the value to use."""
        ...


@dataclass(frozen=True)
class Option:
    """The description of an option: its help for the user and the check of its value.

    Args:
        help: One or two sentences for the user.
        metavar: Placeholder of the value in the help of the command line. Default: None, for a switch.
        check: Function that returns the value to use, or raises :class:`UsageError`. Default: None, any value.
        flag: Name on the command line. Default: None, ``--`` and the name of the field.
        words: Function from the list of the given texts to the value, for an option that may be given several times.
            Default: None, the option is given once.
        command_line: False for a keyword of Python alone; its value is not part of the JSON either. Default: True.

    Example:
        >>> from typing import Annotated
        >>> Depth = Annotated[int, Option("Depth of the search.", "N", parse_count)]
    """

    help: str
    metavar: str | None = None
    """Placeholder of the value in the help of the command line; None for a switch."""
    check: Check | None = None
    flag: str | None = None
    """Name on the command line; None: ``--`` and the name of the field."""
    words: Callable[[list[str]], Any] | None = None
    """Function from the list of given texts to the value, for an option that may be given several times."""
    command_line: bool = True
    """False for a keyword of Python alone, whose value is not part of the JSON either."""


@dataclass(frozen=True)
class Declared:
    """An option as one field of a class of options declares it.

    Args:
        name: Name of the field and of the keyword.
        option: The description.
        hint: Type of the field, without the description.
        default: Value of an option that is not given; ``dataclasses.MISSING`` if a value is required.
    """

    name: str
    option: Option
    hint: Any
    """Type of the field, without the :class:`Option`."""
    default: Any
    """Value of an option that is not given; ``MISSING`` if a value is required."""

    @property
    def flag(self) -> str:
        """Name on the command line: ``--shard-size``, ``--key/--no-key``."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    def parameter(self) -> inspect.Parameter:
        """Return the option as a keyword-only parameter of a Python function."""
        default = inspect.Parameter.empty if self.default is MISSING else self.default
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=self.hint)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Types that a value may have: the members of a union, otherwise the one type."""
        return get_args(self.hint) if isinstance(self.hint, types.UnionType) else (self.hint,)


@cache
def _declared(options: type[Options]) -> Mapping[str, Declared]:
    """Return the options of a class by name, its own before those of its base classes."""
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
        # A ClassVar has a hint but is no field of the dataclass, and a field without an Option has no extras; neither
        # is an option.
        if extras and name in defaults:
            found[name] = Declared(name, extras[0], get_args(hints[name])[0], defaults[name])
    return found


def unknown_option(name: str, names: Iterable[str]) -> UsageError:
    """Return the error for an option that does not exist, with the most similar name.

    Args:
        name: The unknown name.
        names: All names that exist.

    Returns:
        A :class:`UsageError`, which the caller raises.

    Example:
        >>> str(unknown_option("sample", ["samples", "seed"]))
        "unknown option 'sample'; do you mean samples=?"
    """
    near = difflib.get_close_matches(name, names := list(names), 1)
    hint = f"do you mean {near[0]}=?" if near else f"choose one of {', '.join(names)}"
    return UsageError(f"unknown option {name!r}; {hint}")


def declared(options: type[Options]) -> Mapping[str, Declared]:
    """Return the options of a class, its own before those of its base classes.

    Args:
        options: A class of options.

    Returns:
        Name to declaration.
    """
    return _declared(options)  # type: ignore[arg-type] # mypy takes the hash of a class for that of its values


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of the options of a command: a frozen value that checks itself when it is made.

    A subclass is a frozen, keyword-only dataclass whose fields are annotated with an :class:`Option`.

    Raises:
        UsageError: If a value cannot be used. The message names the option.

    Example:
        >>> from typing import Annotated
        >>> @dataclass(frozen=True, kw_only=True)
        ... class SearchOptions(Options):
        ...     depth: Annotated[int, Option("Depth of the search.", "N", parse_count)] = 3
        >>> SearchOptions.of({"depth": 5}).to_json()
        {'depth': 5}
    """

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keywords that a user may expect here, each with the text that says what to use instead."""

    def __post_init__(self) -> None:
        for name, about in declared(type(self)).items():
            value, check = getattr(self, name), about.option.check
            # A union of bool and str, such as True or a name, has a check of its own; parse_flag() would refuse the
            # names.
            if check is None and bool in about.kinds and str not in about.kinds:
                check = parse_flag
            # None means "not given" if it is the default, and no check accepts it.
            if check is not None and not (value is None and about.default is None):
                self._set(name, check(value, what=about.flag.partition("/")[0]))
        self._check()

    def _set(self, name: str, value: object) -> None:
        # The dataclass is frozen, so that options cannot change after their check; only the checks may set a field.
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Check conditions that involve several options; subclasses override it."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Build the options from keywords.

        Args:
            given: Keyword to value.

        Returns:
            The checked options.

        Raises:
            UsageError: If a name is unknown, a required option is missing, or a value cannot be used.
        """
        names = declared(cls)
        for name in given:
            if name not in names:
                if name in cls.elsewhere:
                    raise UsageError(f"{name}= cannot be used here; {cls.elsewhere[name]}")
                raise unknown_option(name, names)
        for name, about in names.items():
            if about.default is MISSING and name not in given:
                raise UsageError(f"{about.flag} is missing: {about.option.help}")
        return cls(**given)

    def only(self, base: type[_T]) -> _T:
        """Return the options that a base class declares.

        Args:
            base: A base class of this class.

        Returns:
            A value of class ``base`` with the fields that it has.
        """
        return base(**{field.name: getattr(self, field.name) for field in dataclasses.fields(base)})

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain values, for a child process. Keywords of Python alone are left out."""
        only_python = {name for name, about in declared(type(self)).items() if not about.option.command_line}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items() if name not in only_python}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Rebuild the options that :meth:`to_json` described.

        Args:
            value: Name to plain value.

        Returns:
            The checked options.

        Raises:
            UsageError: If ``value`` does not describe options of this class.
        """
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
    """A decorator for functions whose last parameter is a value of one class of options."""

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
            # The function's own parameters may be given by name too. They are taken out first, because Options.of()
            # refuses names that are no options.
            named = {parameter.name: given.pop(parameter.name) for parameter in own if parameter.name in given}
            return function(*places, **named, **{last.name: options.of(given)})

        # help(), notebooks and Typer read the signature at run time, where they would see only **given. mypy reads the
        # overloads above instead.
        call.__signature__ = inspect.Signature([*own, *(one.parameter() for one in about)])  # type: ignore[attr-defined]
        if function.__name__ != "__init__":  # whose class has the docstring: see documents
            call.__doc__ = with_arguments(function.__doc__, arguments(options))
        return call


def takes(options: Callable[_P, _O]) -> _Takes[_P, _O]:
    """Let a function whose last parameter is a value of class ``options`` take these options as keywords.

    Type checkers and ``help()`` see the keywords, and the docstring describes them. A call raises :class:`UsageError`
    for options that cannot be used.

    Args:
        options: A class of options.

    Returns:
        A decorator, which also appends the help of all options to the docstring.

    Example:
        >>> @takes(Options)
        ... def pull(url: str, options: Options) -> str:
        ...     return url
        >>> pull("s3://bucket")
        's3://bucket'
    """
    return _Takes(options)


def arguments(options: type[Options]) -> dict[str, str]:
    """Return a line for the section ``Args:`` of a docstring for each option of a class."""
    lines = {}
    for name, one in declared(options).items():
        words = [f"{name}: {one.option.help}"]
        if "|" in (values := one.option.metavar or ""):
            words.append(f"Values: {values}.")
        if one.default not in (MISSING, None, (), {}) and one.option.command_line:
            words.append(f"Default: {one.default!r}.")
        lines[name] = textwrap.fill(
            " ".join(words), 100, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False
        )
    return lines


def documents(options: Callable[..., Options]) -> Callable[[_C], _C]:
    """Let the docstring of a class, whose constructor takes the class ``options``, describe these options too."""

    def decorate(cls: _C) -> _C:
        if cls.__doc__:  # Python has no docstrings with -OO
            cls.__doc__ = with_arguments(cls.__doc__, arguments(cast("type[Options]", options)))
        return cls

    return decorate


def choice(*values: str) -> Check:
    """Return the check of an option that takes one of some texts.

    Args:
        values: The texts.

    Returns:
        A function that returns the value, or raises :class:`UsageError` if it is none of ``values``.

    Example:
        >>> choice("local", "ray")("ray", what="--on")
        'ray'
    """

    def check(value: Any, *, what: str) -> str:
        return parse_choice(value, values, what=what)

    return check


# -- options of several commands ---------------------------------------------------------------------------------------

Workers = Annotated[int, Option("Number of worker processes.", "N", parse_workers)]
"""Type of ``--workers``: number of processes."""
MinEpochs = Annotated[int, Option("Keep a shard until K training epochs have read it.", "K", parse_count)]
"""Type of ``--min-epochs``: number of training epochs for which a shard is kept."""
Policy = Annotated[
    str, Option("Shards to evict first: oldest, most-used, lru (least recently used) or random.", "NAME", parse_text)
]
"""Type of ``--policy``: name of an eviction policy, which :mod:`cachetool.cache.policies` checks."""
RoomWait = Annotated[float | str, Option("How long to wait for space that readers hold.", "TIME", parse_duration)]
"""Type of ``--wait``: seconds, or a text such as ``10min``."""
On = Annotated[
    str,
    Option(
        "Run on this machine, or on all nodes of a Ray cluster, each with its own cache.",
        "local|ray",
        choice("local", "ray"),
    ),
]
"""Type of ``--on``: ``local`` or ``ray``."""
Address = Annotated[
    str | None,
    Option(
        "Address of the Ray cluster. Default: a cluster running on this machine, or a new one.", "HOST:PORT", parse_text
    ),
]
"""Type of ``--address``: address of a Ray cluster."""
OnError = Annotated[
    str, Option("Stop at a bad object, or skip it (up to 10 or 1 %).", "error|skip", choice("error", "skip"))
]
"""Type of ``--on-error``: ``error`` or ``skip``."""
