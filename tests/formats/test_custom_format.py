"""The example of a fifth format: installed as a user's package, it works like the four built-in formats."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_format.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder on the path as an installer leaves it: the module, and the entry points from the example's
    docstring.
    """
    place = tmp_path_factory.mktemp("site")
    text = EXAMPLE.read_text()
    (place / "custom_format.py").write_text(text)
    lines = re.search(r'\[project\.entry-points\."(cachetool\.formats)"\]\n +(\w+) = "([\w:]+)"', text)
    name = re.search(r'name = "([\w-]+)"\n +version = "([\d.]+)"', text)
    assert lines is not None
    assert name is not None
    info = place / f"{name[1].replace('-', '_')}-{name[2]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name[1]}\nVersion: {name[2]}\n")
    (info / "entry_points.txt").write_text(f"[{lines[1]}]\n{lines[2]} = {lines[3]}\n")
    return place


def run(installed: Path, *line: str | Path, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{installed}", "CACHETOOL_CACHE": str(cwd / "cache")}
    done = subprocess.run(
        [sys.executable, *map(str, line)], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_the_example_format_passes_the_contract_of_formats(installed: Path) -> None:
    told = run(
        installed,
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", "npydir", "tests/contracts/test_formats.py",
        cwd=ROOT,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed, (?:1 skipped, )?\d+ deselected", told)
    assert passed is not None, told
    assert int(passed[1]) >= 30


USE = """
import numpy as np
import cachetool
from cachetool.loaders.torch import CacheDataset
with cachetool.open_cache("cache") as cache:
    digests = {cache.convert(to=to, verify=True).digest for to in ("tfrecord", "npydir", "hdf5", "npydir")}
    assert len(digests) == 1
    assert cache.convert(to="npydir", shard_size="1kB").shards > 3
    assert {shard.format for shard in cache.shards()} == {"npydir"}
    assert all((shard.path / "extents.bin").exists() for shard in cache.shards())
with CacheDataset("cache", fields=["v", "n"]) as dataset:
    batch = dataset.__getitems__(list(range(len(dataset))))
    found = sorted(int(sample["n"]) for sample in batch)
    assert found == list(range(40)), found
    assert all((sample["v"].numpy() == int(sample["n"])).all() for sample in batch)
"""


def test_the_example_format_works_for_pull_convert_verify_and_training(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    for number in range(40):
        np.save(tmp_path / "remote" / f"{number:02d}.v.npy", np.full((3, 4), number, dtype=np.float32))
        (tmp_path / "remote" / f"{number:02d}.json").write_text(f'{{"n": {number}, "t": "{"x" * number}"}}')
    tool = ("-m", "cachetool")
    run(installed, *tool, "pull", "remote", "--all", "--to", "npydir", "--max-size", "30MB", cwd=tmp_path)
    assert '"npydir"' in run(installed, *tool, "ls", "--json", cwd=tmp_path)
    run(installed, "-c", USE, cwd=tmp_path)
    assert '"problems": []' in run(installed, *tool, "verify", "--json", cwd=tmp_path)
    run(installed, *tool, "convert", "--to", "npydir", "--out", "plain", cwd=tmp_path)
    with pytest.raises(AssertionError, match="an exported folder in the format 'npydir'"):
        run(installed, *tool, "convert", "plain", "--to", "lmdb", "--out", "back", cwd=tmp_path)

    values = np.load(tmp_path / "plain" / "part-00000.npydir" / "v.npy", mmap_mode="r")
    assert (values.shape, values.dtype) == ((40, 3, 4), np.float32)
    text, offsets = (np.load(tmp_path / "plain" / "part-00000.npydir" / f"t{end}.npy") for end in ("", ".offsets"))
    numbers = np.load(tmp_path / "plain" / "part-00000.npydir" / "n.npy")
    assert text[offsets[7] : offsets[8]].tobytes().decode() == "x" * int(numbers[7])
