"""Every message that advises something has a test that follows the advice, or a reason why no test can."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.advice.conftest import FOLLOWS
from tests.advice.messages import matches, messages, unknown_options
from tests.advice.untried import UNTRIED

OTHERS = {"--link-dest", "--node-name", "--force-reinstall", "--profile", "--format", "--merge"}
"""Options of other programs: of rsync, ray start, pip, aws configure and h5repack."""


def test_every_message_that_advises_something_is_followed_by_a_test() -> None:
    followed = set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.advice.{path.stem}")
        for value in vars(module).values():
            followed.update(getattr(value, FOLLOWS, ()))
        followed.update(message for row in getattr(module, "ROWS", ()) for message in row.texts)
    left = [message for message in messages() if message not in followed and not _reason(message.module, message.text)]
    assert not left, "\n".join(f"{message.module}: {message.text}" for message in left)


def test_every_reason_belongs_to_an_existing_message() -> None:
    for (module, beginning), reason in UNTRIED.items():
        assert reason
        assert any(m.module == module and m.text.startswith(beginning) for m in messages()), (module, beginning)


def test_every_option_in_a_message_exists() -> None:
    assert unknown_options() == OTHERS


def test_a_message_is_recognised_with_its_values() -> None:
    assert matches("cap {} of {}; run: cachetool verify", "error: cap 3 GB of 'c';\n    run: cachetool verify --x")
    assert not matches("cap {} of {}; run: cachetool verify", "error: cap 3 GB; run: cachetool verify")


def _reason(module: str, text: str) -> str:
    return next((why for (where, begins), why in UNTRIED.items() if where == module and text.startswith(begins)), "")
