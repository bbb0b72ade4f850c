"""The words of the package and its docs: plain English, as in the table of :mod:`cachetool.core.text`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import cachetool
from cachetool.core import text

PACKAGE = Path(cachetool.__file__).parent
PAGES = [PACKAGE.parent / "README.md", *sorted((PACKAGE.parent / "docs").rglob("*.md"))]
TABLE = Path(text.__file__)
"""The module whose docstring is the table of words, with the words to avoid in it."""

PRIVATE = (
    "all at once",
    "all there is",
    "as ever",
    "elsewhere",
    "go on",
    "goes again",
    "goes on",
    "gone for good",
    "has no part in",
    "in front of it",
    "is not there",
    "known are",
    "made anew",
    "make room",
    "makes room",
    "no room",
    "take away",
    "taken away",
    "what went wrong",
    "whoever",
)
"""Expressions that readers with school English stumble over; the table has a plain word for each."""

_PRIVATE = re.compile(rf"\b({'|'.join(PRIVATE)})\b".replace(" ", r"\s+"), flags=re.IGNORECASE)
_RIDDLE = re.compile(r"\s*(What|Whether|Who|Where|Of)\b")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Those of attributes too. The line of each other one is printed."""
    wrong = [
        f"{path}:{node.lineno}: {node.value.value.strip().splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and _RIDDLE.match(node.value.value)
    ]

    assert not wrong, "\n".join(wrong)


def test_no_private_expression_is_in_a_text_of_the_package() -> None:
    """In no string, docstring or comment; names in code may be any words."""
    wrong = [
        f"{path}:{line}: {found[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, words in texts(path.read_text(encoding="utf-8"))
        for found in _PRIVATE.finditer(words)
        if not (path == TABLE and line == 1)
    ]

    assert not wrong, "\n".join(wrong)


def test_no_private_expression_is_in_the_docs() -> None:
    """Programs and commands on the pages are left out."""
    wrong = [
        f"{page}: {found[0]}"
        for page in PAGES
        for found in _PRIVATE.finditer(_CODE.sub("", page.read_text(encoding="utf-8")))
    ]

    assert not wrong, "\n".join(wrong)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string, and of each run of comments, of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    began, comments = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            began = began if comments else token.start[0]
            comments += f" {token.string.lstrip('# ')}"
        elif token.type not in (tokenize.NL, tokenize.NEWLINE) and comments:
            yield began, comments
            comments = ""
