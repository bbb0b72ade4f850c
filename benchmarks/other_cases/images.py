"""JPEG images decoded while training: ``decode=`` of a loader beside tf.data and FFCV, two workers each.

2,000 JPEG images of 500 x 375 pixels and quality 90, about 48 kB each, are cut out of photographs of scikit-learn and
scikit-image. The cases: the whole image resized to 224 x 224 (``whole``), the largest square in the middle
(``center``), a random box and flip (``random``). FFCV has no whole images of another ratio. All results are
antialiased. The last case reads images that were decoded when they were pulled.

Run it on a machine without other work: feeders have sessions of their own, so beside other programs the kernel gives a
loader more processor time than peers of one session.

FFCV needs the headers that ``benchmarks/peers/starting.py`` names; without them its rows have an error.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_sample_images

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.imaging import SIDE, epoch
from benchmarks.peers.starting import LOADERS, PeerError, environment
from benchmarks.tables import finish
from cachetool.bench.samples import fill
from cachetool.cache import open_cache
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import JPEG, Loader

PEERS = Path(__file__).parents[1] / "peers"
COUNT, BATCH, WORKERS = 2000, 64, 2
CASES = {
    "whole": JPEG(size=SIDE),
    "center": JPEG(size=SIDE, crop="center"),
    "random": JPEG(size=SIDE, crop="random", flip=True),
}
DECODED = 30_000
"""Images a second of a cache that was pulled decoded."""


def images(count: int) -> list[bytes]:
    """Return JPEG images of 500 x 375 pixels."""
    photos = [photographs.astronaut(), photographs.coffee(), photographs.chelsea(), photographs.rocket()]
    photos += load_sample_images().images
    rng = np.random.default_rng(0)
    out = []
    for number in range(count):
        photo = photos[number % len(photos)]
        height = int(rng.uniform(0.6, 1.0) * min(photo.shape[0], photo.shape[1] * 3 // 4))
        width = height * 4 // 3
        top, left = rng.integers(0, photo.shape[0] - height + 1), rng.integers(0, photo.shape[1] - width + 1)
        box = Image.fromarray(photo[top : top + height, left : left + width])
        buffer = io.BytesIO()
        box.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        out.append(buffer.getvalue())
    return out


class Peer:
    """A peer's script in a process of its own."""

    def __init__(self, python: str | Path, script: str, *arguments: object) -> None:
        command = [str(python), str(PEERS / script), *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def __call__(self) -> float:
        """Run an epoch and return its images a second. Raises PeerError."""
        assert self._process.stdin is not None
        self._process.stdin.write("{}\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["images"] / answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            self.close()
            raise PeerError(answer["error"])
        return dict(answer)


def ffcv(folder: Path) -> Path:
    return environment(folder / "peers", "feed_ffcv.py", LOADERS["FFCV"][2])


def measure(folder: Path, rounds: int) -> list[dict[str, str | float]]:
    """Return a row for each case and peer: medians of images a second."""
    jpegs = images(COUNT)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        place = Path(made)
        (place / "jpg").mkdir()
        for number, data in enumerate(jpegs):
            (place / "jpg" / f"{number:05d}.jpg").write_bytes(data)
        schema = Schema((Field("image", "bytes"), Field("label", "<i8")))
        block = Block.from_samples(schema, [{"image": data, "label": at} for at, data in enumerate(jpegs)])
        with open_cache(place / "cache", max_size="1GB") as cache:
            fill(cache, "lmdb", block, 4)
        rows = [row for case in CASES for row in _case(case, folder, place, rounds)]
        return [*rows, _decoded(place, rounds)]


def _case(case: str, folder: Path, place: Path, rounds: int) -> list[dict[str, str | float]]:
    peers: dict[str, Callable[[Path], tuple[str | Path, str]]] = {
        "tf.data": lambda _: (sys.executable, "images_tfdata.py")
    }
    if case != "whole":
        peers["FFCV"] = lambda folder: (ffcv(folder), "images_ffcv.py")
    started: dict[str, Callable[[], float]] = {}
    rows: list[dict[str, str | float]] = []
    with ExitStack() as stack:
        loader = stack.enter_context(
            Loader(place / "cache", batch_size=BATCH, workers=WORKERS, decode={"image": CASES[case]})
        )
        for name, of in peers.items():
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            try:
                peer = Peer(*of(folder), place / "jpg", case, BATCH, WORKERS, own)
            except PeerError as error:
                rows.append({"case": f"images, {case}", "peer": name, "error": str(error)})
                continue
            stack.callback(peer.close)
            started[name] = peer

        def ours() -> float:
            result = epoch(batch["image"] for batch in loader)
            return result["images"] / result["seconds"]

        rates: dict[str, list[float]] = {name: [] for name in ("ours", *started)}
        for turn in range(rounds + 1):  # the first round does not count
            for name, run in {"ours": ours, **started}.items():
                reached = run()
                if turn:
                    rates[name].append(reached)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name in started:
        ratio = medians["ours"] / medians[name]
        rows.append(_row(f"images, {case}", medians["ours"], name, medians[name], ratio))
    return rows


def _decoded(place: Path, rounds: int) -> dict[str, str | float]:
    """Return the row of a cache that holds 1,000 decoded images."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, size=(1000, SIDE, SIDE, 3), dtype=np.uint8)
    block = Block(Schema((Field("image", "|u1", pixels.shape[1:]),)), {"image": pixels})
    with open_cache(place / "decoded", max_size="1GB") as cache:
        fill(cache, "lmdb", block, 4)
    rates = []
    with Loader(place / "decoded", batch_size=BATCH, workers=WORKERS) as loader:
        for turn in range(5 * rounds + 2):
            result = epoch(batch["image"] for batch in loader)
            if turn > 1:
                rates.append(result["images"] / result["seconds"])
    rate = statistics.median(rates)
    return _row("images pulled decoded", rate, "images/s as before", DECODED, rate / DECODED)


def _row(case: str, ours: float, peer: str, theirs: float, ratio: float) -> dict[str, str | float]:
    return {
        "case": case,
        "ours": round(ours),
        "peer": peer,
        "theirs": round(theirs),
        "ratio": round(ratio, 2),
        "unit": "images/s",
        "target": 1.0,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    finish({"images": measure(options.folder, options.rounds)}, as_json=options.json, rounds=options.rounds)
