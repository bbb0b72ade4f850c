"""Child process of the corruption tests: ``flip_bits.py FORMAT FOLDER COUNT SEED`` flips single bits and reads.

Prints how many flips raised an error and how many changed no value; exits with 1 at any other outcome. It is a separate
process, because a library that follows a damaged pointer may crash.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from cachetool.core.errors import CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from tests.formats.samples import block, write

SCHEMA = Schema((Field("x", "<f4", (50,)), Field("n", "<i8"), Field("r", "<i2", (None, None)), Field("t", "str")))


def main(name: str, folder: Path, count: int, seed: int) -> None:
    kind = get_format(name)
    path = folder / ("data" + kind.suffix)
    content = block(SCHEMA, 60, largest=40)
    written = write(kind, path, content)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    sizes = np.array([f.stat().st_size for f in files])
    rng = np.random.default_rng(seed)
    outcomes = {"error": 0, "caught": 0, "harmless": 0, "unnamed": 0}
    for position in rng.integers(sizes.sum(), size=count).tolist():
        which = int(np.searchsorted(sizes.cumsum(), position, side="right"))
        file, at, bit = files[which], position - int(sizes[:which].sum()), int(rng.integers(8))
        whole = file.read_bytes()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        print(
            f"byte {at} bit {bit} of {file.name}", file=sys.stderr, flush=True
        )  # the last line of a process that dies
        try:
            with kind.open(path, schema=SCHEMA) as reader:
                same = reader.samples == 60 and (checksums(reader.read(0, 60)) == written.checksums).all()
            outcomes["harmless" if same else "caught"] += 1
        except CorruptError as error:
            outcomes["error" if path.name in str(error) else "unnamed"] += 1
        file.write_bytes(whole)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
