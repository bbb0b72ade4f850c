"""Work beside the plain feed, each case beside its peer: compressed shards, ingest, images, ragged samples, and others.

    python benchmarks/other.py FOLDER [--cases compressed,images] [--rounds 5] [--json]

The cases are the modules of ``other_cases``; each runs in a process of its own and says in its docstring what it
compares. Figures are medians of interleaved rounds, and ratios are those of ours to the peer unless the unit says
otherwise. FOLDER is the disk to be measured; 10 GB must be free. Everything together takes more than an hour.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
CASES = (
    "compressed", "dataloader", "busy", "ingest", "large_objects", "images", "ragged", "crops", "mixture", "shards",
)  # fmt: skip


def measure(case: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one case, or a row with its error."""
    with tempfile.TemporaryFile("w+") as answer:
        command = [sys.executable, __file__, str(folder), "--only", case, "--rounds", str(rounds)]
        code = subprocess.run(command, stdout=answer, check=False).returncode
        answer.seek(0)
        lines = answer.read().splitlines()
    if code or not lines:
        return [{"case": case, "error": f"exit code {code}"}]
    rows: list[dict[str, Any]] = json.loads(lines[-1])
    return rows


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only is not None:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            rows = importlib.import_module(f"other_cases.{options.only}").measure(Path(place), options.rounds)
        print(json.dumps(rows))
        return
    # Imported here, because a measured case needs no tables.
    from tables import finish

    tables = {case: measure(case, options.folder, options.rounds) for case in options.cases.split(",")}
    finish(tables, as_json=options.json, rounds=options.rounds)


if __name__ == "__main__":
    main()
