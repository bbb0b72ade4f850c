"""The example of another kind of file: installed as a user's package, it works like the built-in kinds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cachetool.core.errors import UsageError
from cachetool.sources.kinds import ENTRY_POINTS, kinds

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_kind.py"


def test_the_example_kind_passes_the_contract_of_kinds(tmp_path: Path) -> None:
    """The package is installed as an installer leaves it: the module, and the entry points from the example's
    docstring.
    """
    text = EXAMPLE.read_text()
    (tmp_path / "custom_kind.py").write_text(text)
    lines = re.search(r'\[project\.entry-points\."(cachetool\.sources)"\]\n +(\w+) = "([\w:]+)"', text)
    name = re.search(r'name = "([\w-]+)"\n +version = "([\d.]+)"', text)
    assert lines is not None
    assert name is not None
    info = tmp_path / f"{name[1].replace('-', '_')}-{name[2]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name[1]}\nVersion: {name[2]}\n")
    (info / "entry_points.txt").write_text(f"[{lines[1]}]\n{lines[2]} = {lines[3]}\n")

    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", lines[2],
            "tests/contracts/test_kinds.py",
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed, \d+ deselected", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 8


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("rawrows = custom_kind:NOTHING", "kind 'rawrows' cannot be loaded from custom_kind:NOTHING: .* no attribute"),
        ("rawrows = custom_kind:MAGIC", "kind 'rawrows' cannot be loaded from custom_kind:MAGIC: it is not a .*Kind"),
        ("raw = custom_kind:KIND", r"entry point 'raw' \(custom_kind:KIND\) names the kind 'rawrows'; .* same name"),
    ],
)
def test_an_unusable_entry_point_is_named(point: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    name, _, value = point.partition(" = ")
    points = [EntryPoint(name, value, ENTRY_POINTS)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)
    with pytest.raises(UsageError, match=says):
        kinds.__wrapped__()
