"""The page ``docs/reference/errors.md`` has every class of the error tree.

``test_pages.py`` runs its commands and compares their messages and classes.
"""

from __future__ import annotations

import re

from cachetool.core import errors
from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "reference" / "errors.md"
TEXT = PAGE.read_text(encoding="utf-8")
CLASSES = {name: getattr(errors, name) for name in errors.__all__ if name[0].isupper()}


def test_every_class_has_a_section_with_its_exit_code_and_a_message_of_a_run() -> None:
    sections = {section.split("\n", 1)[0]: section for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}

    assert set(sections) == set(CLASSES)
    for name, section in sections.items():
        assert f"\nExit code {CLASSES[name].exit_code}. " in section, name
        shown = [block for block in blocks(PAGE) if block.section == name and block.runs]
        if name in ("CacheToolError",):
            assert f"cachetool.core.errors.{name}: " in section
        else:
            assert any(re.search(r"^error: .*[^.\n]{5,}", block.text, flags=re.MULTILINE) for block in shown), name


def test_the_table_at_the_top_has_each_class_by_its_exit_code() -> None:
    rows = {int(code): names for code, names in re.findall(r"^\| (\d+) \| (.*?) \|", TEXT, flags=re.MULTILINE)}

    for name, kind in CLASSES.items():
        assert f"`{name}`" in rows[kind.exit_code]
