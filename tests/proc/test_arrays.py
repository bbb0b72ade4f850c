"""Reading arrays while other threads parse."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from cachetool.proc.arrays import literal, load_array


def test_a_header_that_python_fails_to_parse_beside_another_thread_is_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    parse, failures = ast.parse, iter([True, True, False, True, False, True, False])

    def fails_now_and_then(*args: object, **options: object) -> ast.AST:
        if next(failures):
            raise SystemError("AST constructor recursion depth mismatch (before=57, after=54)")
        return parse(*args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(ast, "parse", fails_now_and_then)
    assert literal("{'shape': (2, 3)}") == {"shape": (2, 3)}
    for mapped in (False, True):
        assert load_array(tmp_path / "a.npy", mapped=mapped).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_array(tmp_path / "a.npy")
