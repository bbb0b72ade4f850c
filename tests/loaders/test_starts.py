"""Starting a loader in a notebook cell, and on an empty cache beside a pull of the same program."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.cache import CacheDir, open_cache
from tests.loaders.conftest import run_script
from tests.loaders.numbered import leases

NOTE = """
    import os
    offset = 5
    def note(name):
        with open("notes", "a") as file:
            file.write(f"{name} {os.getpid()}\\n")
    note("first")
"""
TRAIN = """
    note("second")
    from cachetool.loaders.numpy import Loader
    loader = Loader(%r, batch_size=8, workers=2, transform=lambda s: {"n": s["number"] + offset, "pid": os.getpid()})
    batches = list(loader)
    print(sorted(int(n) for batch in batches for n in batch["n"]) == list(range(5, 65)))
"""
AGAIN = """
    note("third")
    offset = 6
    print(sorted(int(n) for batch in loader for n in batch["n"]) == list(range(5, 65)))
    feeders = {int(pid) for batch in batches for pid in batch["pid"]}
    print(len(feeders), os.getpid() in feeders)
    loader.close()
"""


def test_a_notebook_trains_and_runs_none_of_its_cells_twice(cache: CacheDir, tmp_path: Path) -> None:
    """The transform is a lambda over a variable of an earlier cell. A later cell continues with the loader and its
    feeders, which keep the function as it was when they started.
    """
    cells = [textwrap.dedent(cell) for cell in (NOTE, TRAIN % str(cache.root), AGAIN)]

    printed = run_script("notebook.py", tmp_path, *cells)

    assert printed == ["", "True\n", "True\n2 False\n"]
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert [name for name, _ in notes] == ["first", "second", "third"]
    assert len({pid for _, pid in notes}) == 1
    assert leases(cache) == []


EMPTY = """
    import sys, cachetool
    from cachetool.loaders.numpy import Loader
    print("started", flush=True)
    cache = cachetool.open_cache(sys.argv[2], max_size="20MB")
    offset = 3
    loader = Loader(cache, batch_size=8, workers=2, transform=lambda s: {"three": offset}, min_samples=100)
    assert not cache.shards()
    background = cachetool.BackgroundPull(cache, sys.argv[1], seed=3, shard_size="20kB")
    epochs = [[int(three) for batch in loader for three in batch["three"]] for _ in range(2)]
    print([set(epoch) for epoch in epochs], 100 <= len(epochs[0]) <= len(epochs[1]), flush=True)
"""


def test_an_unguarded_script_starts_loader_and_pull_on_an_empty_cache_and_trains(
    digits: Path, script: Any, tmp_path: Path
) -> None:
    """The loader waits for ``min_samples``. The end of the program closes the pull and the feeders."""
    out, err = script(EMPTY, digits, tmp_path / "cache").communicate(timeout=120)

    assert out == "started\n[{3}, {3}] True\n"
    assert all(line.startswith("cachetool: waiting for samples (for ") for line in err.splitlines()), err
    with open_cache(tmp_path / "cache") as cache:
        assert leases(cache) == []
        assert cache.catalog.rows("SELECT 1 FROM jobs") == []


DAEMON = """
    import sys, cachetool
    from cachetool.loaders.numpy import Loader
    cache = cachetool.open_cache("cache", max_size="20MB")
    cache.pull(sys.argv[1], seed=3, shard_size="20kB")
    with Loader(cache, batch_size=8, workers=2) as loader:
        count = sum(len(batch["__key__"]) for batch in loader)
    with open("counted", "w") as file:
        print(count, file.fileno() > 2, file=file)
"""


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_daemon_without_standard_streams_pulls_and_trains(closed: str, tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / "source" / f"{number:03d}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.arange(number, number + 10))
    (tmp_path / "daemon.py").write_text(textwrap.dedent(DAEMON))

    command = ["sh", "-c", f'"$0" daemon.py source {closed}', sys.executable]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)

    assert (tmp_path / "counted").read_text() == "40 True\n"


def test_closed_standard_streams_are_replaced_for_child_processes(tmp_path: Path) -> None:
    code = "import os; from cachetool.proc.lines import keep_standard_streams as keep; keep(); keep()\n"
    code += "told = [(os.readlink(f'/proc/self/fd/{n}'), os.get_inheritable(n)) for n in range(3)]\n"
    code += "open('told', 'w').write(str([name == '/dev/null' and inherited for name, inherited in told]))"

    command = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)

    assert (tmp_path / "told").read_text() == "[True, True, True]"
