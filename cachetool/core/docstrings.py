"""The ``Args:`` section of docstrings, for functions whose arguments another class describes.

::

    a class of options     --> Args: of Cache.pull, Cache.convert, convert, BackgroundPull
    Args: of BaseLoader    --> Args: of the loaders for NumPy and PyTorch

Each argument is then described once, and ``help()`` shows all of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["arguments_of", "described", "with_arguments"]

_T = TypeVar("_T", bound=type[Any])
_HEAD = "Args:"
_NEXT = re.compile(r"^(?:Attributes|Returns|Yields|Raises|Example):$", flags=re.MULTILINE)
_NAME = re.compile(r"    \*{0,2}(\w+): ")


def described(docstring: str | None) -> dict[str, str]:
    """Return the arguments that the section ``Args:`` of a docstring describes: name to its lines, indented."""
    _, _, section = f"\n{inspect.cleandoc(docstring or '')}\n".partition(f"\n{_HEAD}\n")
    arguments: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        if (begun := _NAME.match(line)) is not None:
            name = begun[1]
            arguments[name] = line
        elif name:
            arguments[name] += f"\n{line}"
    return arguments


def with_arguments(docstring: str | None, arguments: Mapping[str, str], *, last: bool = True) -> str:
    """Return a docstring to whose section ``Args:`` more arguments are added.

    Args:
        docstring: The docstring. Without a section ``Args:`` it gets one, before ``Returns:`` and ``Raises:``.
        arguments: Name to lines, as :func:`described` returns them. A name that is described already stays as it is.
        last: True: the new arguments come after those that are there. False: before them.
    """
    text = inspect.cleandoc(docstring or "")
    own = described(text)
    new = {name: lines for name, lines in arguments.items() if name not in own}
    listed = [*own.values(), *new.values()] if last else [*new.values(), *own.values()]
    section = "\n".join([_HEAD, *listed])
    if own:
        return text.replace("\n".join([_HEAD, *own.values()]), section)
    at = following.start() if (following := _NEXT.search(text)) is not None else len(text)
    before, after = text[:at].rstrip(), text[at:]
    return "\n\n".join(filter(None, (before, section, after))) + ("" if after else "\n")


def arguments_of(base: type[Any], *names: str) -> Callable[[_T], _T]:
    """Let a class describe arguments in the words of the class ``base``, before its own.

    A docstring without a section ``Raises:`` also gets that of ``base``.

    Args:
        base: A class whose docstring has a section ``Args:``.
        *names: The arguments to take. Default: all.
    """

    def decorate(cls: _T) -> _T:
        if cls.__doc__ and base.__doc__:  # Python has no docstrings with -OO
            theirs = described(base.__doc__)
            chosen = {name: theirs[name] for name in names or theirs}
            cls.__doc__ = _with_errors(with_arguments(cls.__doc__, chosen, last=False), base.__doc__)
        return cls

    return decorate


def _with_errors(docstring: str, other: str) -> str:
    """Return a docstring with the section ``Raises:`` of another one, if it has none."""
    errors = re.search(r"^Raises:\n(?:    .*\n?)+", inspect.cleandoc(other), flags=re.MULTILINE)
    if errors is None or re.search(r"^Raises:$", docstring, flags=re.MULTILINE):
        return docstring
    before, example, after = docstring.partition("\nExample:\n")
    return f"{before.rstrip()}\n\n{errors[0].rstrip()}\n{example}{after}"
