"""Peers in environments of their own: made with pip when first asked for, then one process of each that writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

PEERS = {
    "MDSWriter": ("mds_writer.py", ["mosaicml-streaming==0.13.0", "torch==2.13.0"]),
    "LitData optimize": ("litdata_optimize.py", ["litdata==0.2.76", "torch==2.13.0"]),
    "tfrecord writer": ("tfrecord_writer.py", ["tfrecord==1.14.6"]),
}
"""Writers. Name to script and what its environment holds."""
PRODUCERS = {"Ray object store": ("ray_producer.py", ["ray==2.60.0", "numpy==2.4.6"])}


class PeerError(Exception):
    """A peer could not be installed or started, or failed."""


def environment(folder: Path, name: str) -> Path:
    """The Python of the environment of a peer under ``folder``, made if it is not there. Raises PeerError."""
    script, requirements = {**PEERS, **PRODUCERS}[name]
    home = folder.resolve() / Path(script).stem
    python = home / "bin" / "python"
    done = home / "installed.json"
    if not done.exists() or json.loads(done.read_text()) != requirements:
        print(f"installing {', '.join(requirements)} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        pip = subprocess.run([python, "-m", "pip", "install", "-q", *requirements], capture_output=True, text=True)
        if pip.returncode:
            raise PeerError(f"pip: {(pip.stderr.strip().splitlines() or ['failed'])[-1]}")
        done.write_text(json.dumps(requirements))
    return python


class Peer:
    """A running peer, which holds the samples of one case."""

    def __init__(self, folder: Path, name: str, samples: int, nbytes: int) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [environment(folder, name), HERE / PEERS[name][0], str(samples), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def write(self, folder: Path) -> float:
        """Seconds to write the samples into the new ``folder``, durably. Raises PeerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"folder": str(folder)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        answer = self._answer()
        if "error" in answer:
            raise PeerError(answer["error"])
        return float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["ended without a word"])[-1]
