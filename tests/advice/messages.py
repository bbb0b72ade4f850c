"""The package's messages that advise a command or an option, collected from its source.

A message is a string in the code that is neither a docstring nor a help text; inserted values are ``{}``. It advises
something if it names an option (``--max-size``) or a command (``cachetool verify``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import typer

import cachetool
from cachetool.cli.app import VERBS, program

__all__ = ["Message", "matches", "messages", "unknown_options"]

_PACKAGE = Path(cachetool.__file__).parent
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_COMMAND = re.compile(r"\bcachetool (?=(\w+))")
_STYLES = "\n:root {"
"""The beginning of a page's style sheet, which contains names such as ``--blue``."""
_HELP = {"help", "epilog", "metavar", "rich_help_panel"}


@dataclass(frozen=True, slots=True)
class Message:
    """A text that advises something, and its location in the package."""

    module: str
    text: str


def matches(pattern: str, text: str) -> bool:
    """Return True if a message, with values for its ``{}``, occurs in the text."""
    pieces = [re.escape(piece) for piece in re.split(r"\s+", pattern.strip())]
    return re.search(r"\s+".join(pieces).replace(re.escape("{}"), r".*?"), text, re.DOTALL) is not None


@cache
def messages() -> tuple[Message, ...]:
    """Return all messages that advise something, in the order of modules and lines."""
    return tuple(
        Message(path.relative_to(_PACKAGE).as_posix(), text)
        for path in sorted(_PACKAGE.rglob("*.py"))
        for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
        if _advises(text)
    )


def unknown_options() -> set[str]:
    """Return the options that messages name but no command has."""
    commands = typer.main.get_group(program()).commands.values()
    parameters = [parameter for command in commands for parameter in command.params]
    own = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    return {option for message in messages() for option in _OPTION.findall(message.text)} - own - {"--help"}


def _advises(text: str) -> bool:
    named = _OPTION.search(text) or any(match[1] in VERBS for match in _COMMAND.finditer(text))
    return bool(named) and len(text.split()) > 2 and not text.startswith(_STYLES)


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module that a program may print, in the order of its lines."""
    passed_over: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings, also those of attributes
            passed_over.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Option":
            passed_over.update(ast.walk(node))
        elif isinstance(node, ast.keyword) and node.arg in _HELP:
            passed_over.update(ast.walk(node.value))
        elif isinstance(node, ast.JoinedStr | ast.BinOp) and node not in passed_over:
            passed_over.update(set(ast.walk(node)) - {node})
    for node in ast.walk(tree):
        if node not in passed_over and isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = _written(node)
            if text:
                yield text


def _written(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else _written(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(_written(side) or "{}" for side in (node.left, node.right))
    return ""
