"""A training program for the chaos run: it compares all values, and resumes from its state when it is started again.

``chaos_loader.py ROOT FOLDER SEED [SOURCE]``: FOLDER keeps its state and its ledger, one line of JSON per batch. With
SOURCE it also pulls in the background.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

import cachetool
from cachetool.loaders.numpy import Loader
from tests.faults.test_chaos import expect


def main(root: str, folder: Path, seed: int, source: str | None) -> None:
    ledger, saved = folder / "ledger", folder / "state"
    with contextlib.ExitStack() as stack:
        if source is not None:
            stack.enter_context(cachetool.BackgroundPull(root, source, workers=1, shard_size="60kB"))
        loader = stack.enter_context(Loader(root, batch_size=8, seed=seed, workers=2, wait=600))
        lines: list[str] = []
        if saved.exists():
            state = json.loads(saved.read_text())
            lines = ledger.read_text().splitlines()[: state["lines"]]  # a kill came between the writes of the two files
            loader.load_state_dict(state["loader"])
        ledger.write_text("".join(f"{line}\n" for line in lines))
        count = len(lines)
        try:
            while True:
                epoch = loader.epoch
                for batch in loader:
                    numbers = expect(batch["x"], batch["r"])
                    with ledger.open("a") as file:
                        file.write(json.dumps({"epoch": epoch, "numbers": numbers}) + "\n")
                    count += 1
                    keep(saved, {"lines": count, "loader": loader.state_dict()})
                with ledger.open("a") as file:
                    file.write(json.dumps({"epoch": epoch, "end": True}) + "\n")
                count += 1
                keep(saved, {"lines": count, "loader": loader.state_dict()})
        except cachetool.UsageError as error:
            if "evicted" not in str(error):
                raise
            saved.unlink()  # samples of the epoch were evicted while no process leased them, so the epoch starts again
            ledger.rename(ledger.with_name(f"ledger-{os.getpid()}"))


def keep(path: Path, value: object) -> None:
    """Replace a file atomically."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(json.dumps(value))
    os.replace(aside, path)


if __name__ == "__main__":
    np.seterr(all="raise")
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
