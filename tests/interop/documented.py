"""The readers of ``docs/reference/formats.md``, run unchanged in processes that cannot import cachetool."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.core.block import Block
from cachetool.core.schema import Schema

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
READERS = {
    section.split()[0].lower(): section.split("```python\n")[1].split("```")[0]
    for section in re.split(r"^## ", DOC, flags=re.MULTILINE)
    if "```python\n" in section
}
"""The program that reads each format, or ``extents.bin``."""

_CHILD = """
import hashlib, json, sys
sys.modules["cachetool"] = None
program, jobs = json.load(sys.stdin)
names = {}
exec(program, names)
import numpy as np
def digest(value):
    array = np.frombuffer(value, "u1") if isinstance(value, bytes) else np.asarray(value)
    return hashlib.blake2b(repr((array.dtype.str, array.shape)).encode() + array.tobytes(), digest_size=8).hexdigest()
for job in jobs:
    if "samples" in names:
        found = names["samples"](*job["arguments"])
    else:
        found = (names["sample"](*job["arguments"], n) for n in range(job["count"]))
    print(json.dumps([{name: digest(value) for name, value in one.items()} for one in found]))
"""


def read(
    name: str, jobs: Sequence[tuple[int, Sequence[Any]]], *, library: Path | None = None
) -> list[list[dict[str, str]]]:
    """Return a digest for each field of each sample that the reader ``name`` reads.

    A job is the number of samples, and the reader's arguments before the number of the sample. ``library`` is a folder
    with another version of the format's library.
    """
    lines = [{"count": count, "arguments": list(arguments)} for count, arguments in jobs]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps([READERS[name], lines]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **({"PYTHONPATH": str(library)} if library else {})},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def arguments(name: str, path: Path, schema: Schema, *, compression: str | None = None) -> list[Any]:
    """Return the arguments of the reader of format ``name`` for the file ``path``."""
    if name != "tfrecord":
        return [str(path)]
    return [str(path), schema.to_json(), compression and compression.upper()]


def expected(content: Block) -> list[dict[str, str]]:
    """Return the digests that a reader must compute for a file of these samples."""
    return [{name: _digest(value) for name, value in content.sample(n).items()} for n in range(len(content))]


def _digest(value: Any) -> str:
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    array = np.frombuffer(value, "u1") if isinstance(value, bytes) else np.asarray(value)
    return hashlib.blake2b(repr((array.dtype.str, array.shape)).encode() + array.tobytes(), digest_size=8).hexdigest()
