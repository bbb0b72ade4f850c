"""Runs one cell of the table of trainers and cases: a script of ``scripts/`` as one process or as two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Trained:
    """The record of the training in a cell."""

    ranks: list[dict[str, Any]]
    """The record of each rank: see :class:`tests.trainers.growing.Record`."""
    stderr: str
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Records with other names, such as that of the validation."""

    def epochs(self, name: str = "record") -> list[tuple[int, int]]:
        """Return the distinct samples that all ranks trained in each epoch of the trainer, and the number of repeated
        ones.
        """
        records = self.ranks if name == "record" else self.more[name]
        numbers = sorted({int(number) for record in records for number in record["epochs"]})
        out = []
        for number in numbers:
            ids = [one for record in records for one in record["epochs"].get(str(number), {"ids": []})["ids"]]
            out.append((len(set(ids)), len(ids) - len(set(ids))))
        return out

    def passes(self, name: str = "record") -> list[tuple[int, int, int]]:
        """Return, for each pass of the loader, the samples of its snapshot, the distinct trained ones, and the repeated
        ones.
        """
        records = self.ranks if name == "record" else self.more[name]
        ids: dict[int, list[int]] = {}
        snapshots: dict[int, int] = {}
        for record in records:
            for row in record["epochs"].values():
                for number, one in row["passes"].items():
                    ids.setdefault(int(number), []).extend(one["ids"])
                    snapshots[int(number)] = one["snapshot"]
        return [
            (snapshots[number], len(set(ids[number])), len(ids[number]) - len(set(ids[number])))
            for number in sorted(ids)
        ]

    @property
    def warnings(self) -> list[str]:
        """Return cachetool's lines on stderr about epochs that were cut or samples that were divided twice."""
        return [line for line in self.stderr.splitlines() if line.startswith("cachetool: ")]


Cell = Callable[..., Trained]


def free_port() -> int:
    """Return a port of the loopback interface without a listener."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def completed(command: Sequence[str], *, environment: dict[str, str], folder: Path, seconds: float) -> tuple[str, str]:
    """Run a program and return its stdout and stderr. Fail if it fails or takes too long.

    A launcher is ended by SIGTERM, because a killed launcher leaves its ranks running.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        said, warned = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        said, warned = process.communicate(timeout=60)
        raise AssertionError(f"it took more than {seconds} s: {said[-2000:]}\n{warned[-6000:]}") from None
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"{said[-2000:]}\n{warned[-6000:]}"
    return said, warned


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """Run ``scripts/NAME.py CASE FOLDER``, with ``ranks`` by torchrun. Fail with the output if the script fails."""

    def run(
        name: str,
        case: str,
        *,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        seconds: float = 200,
    ) -> Trained:
        script = [str(Path(__file__).parent / "scripts" / f"{name}.py"), case, str(tmp_path), *arguments]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
        _, warned = completed(
            [sys.executable, *(launcher if ranks > 1 else []), *script],
            folder=tmp_path,
            seconds=seconds,
            environment={
                **{key: value for key, value in os.environ.items() if key not in _LAUNCHER},
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONWARNINGS": "ignore",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                **(environment or {}),
            },
        )
        more: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(tmp_path.glob("*-*.json")):
            more.setdefault(path.stem.rpartition("-")[0], []).append(json.loads(path.read_text()))
        return Trained(more.pop("record"), warned, more)

    return run
