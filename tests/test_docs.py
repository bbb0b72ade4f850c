"""README is short and names every command, and CI runs its test command. ``tests/docs`` runs the programs of README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import typer

from cachetool.cli.app import program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line.strip() for line in re.findall(r"^    (.+)$", README, flags=re.MULTILINE)]


def test_every_command_is_in_the_table_of_readme() -> None:
    for name in typer.main.get_command(program()).commands:  # type: ignore[attr-defined]
        assert re.search(rf"^\| .*`cachetool {name}\b", README, flags=re.MULTILINE), name


def test_readme_is_short_and_its_first_screen_has_a_demo_and_a_first_command() -> None:
    lines = README.splitlines()
    commands = [n for n, line in enumerate(lines) if line.startswith("    ")]

    assert len(lines) < 200
    assert "cachetool demo" in lines[commands[0]]
    assert lines[commands[1]].startswith("    cachetool pull ")
    assert commands[1] < 25


def test_ci_runs_the_test_command_of_readme() -> None:
    commands = [line for line in LINES if line.startswith("python3 -m venv")]

    assert [("demo" in line, "pytest" in line) for line in commands] == [(True, False), (False, True)]
    pattern = re.search(r"grep -m 1 -E '([^']+)' README.md", (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    found = subprocess.run(["grep", "-m", "1", "-E", pattern[1], "README.md"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == commands[1]


def test_the_constraints_name_one_version_of_each_requirement() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]

    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines), lines
    assert {"typer", "numpy", "h5py", "lmdb", "zarr", "obstore", "torch", "pytest"} <= {
        line.split("==")[0] for line in lines
    }
