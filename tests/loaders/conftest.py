"""Common parts of the loader tests. Loaders run in separate processes: their workers are forked there, and no framework
is imported into pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachetool.cache import CacheDir, open_cache
from tests.loaders.numbered import put

REPOSITORY = Path(__file__).parents[2]
Script = Callable[..., dict[str, Any]]


def run_script(name: str, *arguments: object, seconds: float = 480) -> Any:
    """Return the line of JSON that a script in ``scripts/`` prints within ``seconds``."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": str(REPOSITORY),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "scripts" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDir]:
    """Create an LMDB cache of three shards of 20 samples."""
    with open_cache(tmp_path / "cache", max_size="20MB") as opened:
        for start in (0, 20, 40):
            put(opened, range(start, start + 20))
        yield opened


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Any]:
    """Run a program in a separate process that ends with the test."""
    begun: list[subprocess.Popen[str]] = []

    def run(text: str, *arguments: object, how: str = "script") -> subprocess.Popen[str]:
        stdin = how == "stdin"
        code = textwrap.dedent(text)
        path = tmp_path / "program.py"
        path.write_text(code)
        process = subprocess.Popen(
            [
                sys.executable,
                *{"script": [str(path)], "module": ["-m", "program"], "stdin": ["-"]}[how],
                *map(str, arguments),
            ],
            cwd=tmp_path,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        if stdin and process.stdin is not None:
            process.stdin.write(code)
            process.stdin.close()
            process.stdin = None
        begun.append(process)
        return process

    yield run
    for process in begun:
        process.kill()
        process.wait()
