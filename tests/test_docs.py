"""What README shows works: its Python blocks run as they stand, its command lines parse, CI runs its test command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from cachetool.cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
LINES = [line.strip() for line in re.findall(r"^    (.+)$", README, flags=re.MULTILINE)]


def cachetool(*args: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "cachetool", *args], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with ``data/volumes``, as README's programs expect it."""
    volumes = tmp_path / "data" / "volumes"
    volumes.mkdir(parents=True)
    for number in range(70):
        np.save(volumes / f"scan{number}.volume.npy", np.full((2, 4, 4), number, dtype=np.float32))
        (volumes / f"scan{number}.json").write_text(json.dumps({"label": number}))
    return tmp_path


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: f"block{n}")
def test_a_python_block_of_readme_runs_as_it_stands(place: Path, number: int) -> None:
    block = BLOCKS[number]
    if "open_cache" not in block:
        to = "tfrecord" if "tensorflow" in block else "lmdb"
        cachetool("pull", "data/volumes", "--samples", "70", "--to", to, "--cache", "data/cache", cwd=place)

    done = subprocess.run(
        [sys.executable, "-c", block], cwd=place, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr


def test_readme_has_a_training_loop_for_each_framework_and_the_library() -> None:
    assert len(BLOCKS) == 3
    assert [
        word for word in ("loaders.torch", "loaders.tensorflow", "open_cache") if any(word in b for b in BLOCKS)
    ] == [
        "loaders.torch",
        "loaders.tensorflow",
        "open_cache",
    ]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("cachetool ")])
def test_a_command_line_of_readme_parses(line: str) -> None:
    name, *args = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    page = command.commands[name]  # type: ignore[attr-defined]

    assert page.make_context(name, args).params


def test_every_command_is_in_the_table_of_readme() -> None:
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"^\| .*`cachetool {name}\b", README, flags=re.MULTILINE), name


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
