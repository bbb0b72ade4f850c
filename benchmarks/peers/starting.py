"""Peers in their own environments. Pip creates an environment at its first use; then each peer runs as one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TORCH = "torch==2.13.0"
PEERS = {
    "MDSWriter": ("mds_writer.py", ["mosaicml-streaming==0.13.0", TORCH]),
    "LitData optimize": ("litdata_optimize.py", ["litdata==0.2.76", TORCH]),
    "tfrecord writer": ("tfrecord_writer.py", ["tfrecord==1.14.6"]),
}
"""The peers that only write. Name: script, and the packages of its environment."""
PRODUCERS = {"Ray object store": ("ray_producer.py", ["ray==2.60.0", "numpy==2.4.6"])}
_FFCV = ["ffcv==1.0.2", "numba==0.68.1", TORCH, "torchvision==0.28.0", "opencv-python==5.0.0.93", "pillow==13.0.0"]
_FFCV += [
    "assertpy==1.1",
    "fastargs==1.2.0",
    "pytorch-pfn-extras==0.9.0",
    "pandas==3.1.1",
    "matplotlib==3.11.2",
    "tqdm",
]
_DATALOADER = [TORCH, "lmdb==3.0.0", "h5py==3.16.0", "zarr==3.1.6"]
_TF = ["tensorflow-cpu==2.21.0"]
LOADERS: dict[str, tuple[str, list[str], list[str]]] = {
    "FFCV": ("feed_ffcv.py", [], _FFCV),
    "tf.data, batch then parse": ("feed_tfdata.py", ["batch-parse"], _TF),
    "tf.data, parse then batch": ("feed_tfdata.py", ["parse-batch"], _TF),
    "SPDL over npy": ("feed_spdl.py", [], ["spdl==0.8.0", "numpy==2.4.6"]),
    "DataLoader, LMDB with pickles": ("feed_dataloader.py", ["lmdb"], _DATALOADER),
    "DataLoader, HDF5": ("feed_dataloader.py", ["hdf5"], _DATALOADER),
    "DataLoader, npy files": ("feed_dataloader.py", ["npy"], _DATALOADER),
    "DataLoader, Zarr": ("feed_dataloader.py", ["zarr"], _DATALOADER),
    "MosaicML Streaming": ("feed_streaming.py", [], ["mosaicml-streaming==0.13.0", TORCH]),
    "LitData": ("feed_litdata.py", [], ["litdata==0.2.76", TORCH]),
    "WebDataset": ("feed_webdataset.py", [], ["webdataset==1.0.2", TORCH]),
    "HF datasets": ("feed_datasets.py", [], ["datasets==5.2.0", TORCH]),
    "Grain": ("feed_grain.py", [], ["grain==0.2.18", "array_record==0.8.6"]),
    "Ray Data": ("feed_ray.py", [], ["ray[data]==2.60.0", "aiohttp", "pydantic", "numpy==2.4.6"]),
}
"""The peers that load. Name: script, its last arguments, and the packages of its environment.

FFCV is built from source and needs the headers of OpenCV and turbojpeg (Debian: libopencv-dev, libturbojpeg0-dev,
pkg-config).
"""


MIXTURES: dict[str, tuple[str, list[str], list[str]]] = {
    f"{name}, three parts": (script, ["mixed"], packages)
    for name, (script, _, packages) in LOADERS.items()
    if name in ("MosaicML Streaming", "LitData")
}
"""Peers that draw from several datasets in a ratio."""


class PeerError(Exception):
    """A peer failed, or could not be installed or started."""


def environment(folder: Path, script: str, requirements: list[str]) -> Path:
    """Return the Python of a script's environment under ``folder``. Create a missing environment. Raise PeerError."""
    home = folder.resolve() / Path(script).stem
    python = home / "bin" / "python"
    done = home / "installed.json"
    if not done.exists() or json.loads(done.read_text()) != requirements:
        print(f"installing {', '.join(requirements)} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        # FFCV's build imports the installed NumPy and PyTorch without declaring them, so they are installed first.
        first = [each for each in requirements if not each.startswith("ffcv")]
        for command in ([*first, "setuptools", "wheel"], ["--no-build-isolation", *requirements]):
            pip = subprocess.run([python, "-m", "pip", "install", "-q", *command], capture_output=True, text=True)
            if pip.returncode:
                said = pip.stderr.strip().splitlines() or ["failed"]
                why = [line.strip() for line in said if "error:" in line.lower()]  # the last line is only a hint
                raise PeerError(f"pip: {(why or said)[-1]}; what a peer needs beside is in {Path(__file__).name}")
        done.write_text(json.dumps(requirements))
    return python


class Peer:
    """A running peer: a writer, which takes the number of samples and the bytes of each, or a loader (see
    ``feeding.py``).
    """

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        loaders = LOADERS | MIXTURES
        if name not in loaders and name not in PEERS:
            raise PeerError("no such peer; benchmarks/peers/starting.py has their names")
        script, more, requirements = loaders[name] if name in loaders else (PEERS[name][0], [], PEERS[name][1])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [environment(folder, script, requirements), HERE / script, *arguments, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # the peer has workers of its own, which close() must end too
        )
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the peer's answer. Raise PeerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return self._answer()

    def write(self, folder: Path) -> float:
        """Return the seconds to write the samples durably into the new ``folder``. Raise PeerError."""
        return float(self.ask({"folder": str(folder)})["seconds"])

    def close(self) -> None:
        """End the process and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["ended without a word"])[-1]
