"""``docs/explanation/architecture.md`` names only modules and functions that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import DOCS, ROOT

TEXT = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(cachetool/[\w/]+\.py):([\w.]+)`", TEXT)))


def test_the_life_of_a_sample_passes_through_functions_of_every_layer() -> None:
    rooms = {file.split("/")[1] for file, _ in NAMED}

    assert len(NAMED) > 30
    assert {"cli", "pull", "stores", "sources", "proc", "formats", "cache", "loaders", "core"} <= rooms


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}:{name}" for file, name in NAMED])
def test_a_function_that_is_named_is_there(file: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        assert found, f"{file} has no {name}"
        body = found[0].body


def test_every_room_is_in_the_drawing() -> None:
    drawing = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1]
    rooms = {path.parent.name for path in (ROOT / "cachetool").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "cachetool").glob("*.py") if not path.stem.startswith("__")}

    assert rooms <= set(re.findall(r"(\w+)/", drawing))
    assert modules <= set(re.findall(r"\w+", drawing))


def test_every_module_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(cachetool/[\w/]+(?:\.py)?/?)`", TEXT))

    assert len(named) > 20
    assert {name for name in named if not (ROOT / name).exists()} == set()
