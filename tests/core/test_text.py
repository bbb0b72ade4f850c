"""Texts for users."""

from __future__ import annotations

import sys

import pytest

from cachetool.core.text import program


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/home/me/train.py", "--token=CANARY", "x"], "train.py"),
        (["/usr/bin/cachetool", "pull", "s3://bucket/"], "cachetool pull"),
        (["/lib/python3/site-packages/cachetool/__main__.py", "stats"], "cachetool stats"),
        (["-c"], "python -c"),
        (["-"], "python -"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_a_program_is_named_as_the_user_started_it(argv: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)

    assert program() == name
