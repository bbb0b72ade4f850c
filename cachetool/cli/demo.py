"""``cachetool demo``: all commands on a small made-up data set.

Each step runs as a process of its own, exactly as it is printed, so demo and commands cannot differ. Only the training
epochs run in this process. They read each shard of a snapshot whole, while a ``cachetool pull`` in the background fills
the cache.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachetool.cli.options import JsonOption, QuietOption
from cachetool.cli.output import Output, count
from cachetool.core.errors import CacheToolError, UsageError, from_json
from cachetool.core.units import format_duration, format_size
from cachetool.proc.folders import make_folder, make_missing, new_file
from cachetool.proc.scratch import scratch

if TYPE_CHECKING:
    from cachetool.api import Cache

__all__ = ["demo"]

SAMPLES = 240
SHAPE = (16, 32, 32)
CAP = "12MB"
EPOCHS = 3
PULLED_PER_EPOCH = 60


def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Work in this new folder and keep it. Default: a temporary one."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Try cachetool on made-up data, in some seconds.

    The demo pulls, converts and evicts samples, shows statistics, and trains for three epochs while the cache grows. It
    writes into one temporary folder only, which it deletes at the end. With --dir it uses that new folder and keeps it.

    \b
    Examples:
      cachetool demo
      cachetool demo --dir ./demo
    """
    out = Output(as_json=as_json, quiet=quiet)
    with _workplace(folder) as place:
        document = _Demo(out, place).run()
    if as_json:
        out.document(document)
    elif folder is None:
        out.line("The folder of this demo was deleted. To keep it, run: cachetool demo --dir ./demo")
    else:
        out.line(f"All files are in {folder}; run the commands there yourself.")


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    """Yield the folder of the demo: a temporary one, or the new folder that the user named."""
    if folder is None:
        with scratch(Path(tempfile.gettempdir()), "cachetool-demo-") as temporary_folder:
            yield temporary_folder
        return
    try:
        make_missing(folder.parent)
        make_folder(folder)
    # An existing folder is refused, because the demo would mix its files with the user's.
    except FileExistsError as error:
        raise UsageError(f"{str(folder)!r} exists already; --dir needs the name of a new folder") from error
    except OSError as error:
        raise UsageError(f"cannot create the folder {str(folder)!r}: {error.strerror}") from error
    yield folder


class _Demo:
    """One run of the demo in ``place``, which has ``remote/`` (in the role of a bucket) and ``cache/``."""

    def __init__(self, out: Output, place: Path) -> None:
        self._out = out
        self._place = place
        self._steps: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Run all steps in order. Return the document of ``--json``."""
        began = time.monotonic()
        size = _make_remote(self._place / "remote")
        self._say(
            f"A folder 'remote' stands for a bucket: {SAMPLES} float32 volumes of {SHAPE} with labels,"
            f" {format_size(size)}.",
            f"The cache may take {CAP}, so it can never hold all of them.",
        )
        self._say("1. Pull: draw 120 of them at random, without repeats, and write them as LMDB shards.")
        self._type("pull", "remote", "--samples", "120", "--seed", "7", "--max-size", CAP)
        self._say("2. Convert: write the same samples as HDF5, one shard after another, inside the cap.")
        self._type("convert", "--to", "hdf5")
        self._say("3. Evict: delete the oldest shards until the cache takes at most 5 MB.")
        self._type("evict", "--max-size", "5MB")
        self._say(
            "4. Train for three epochs. Each epoch reads one snapshot of the cache; a pull in the background adds new",
            "   samples meanwhile, and evicts old ones once the cache is full. The next epoch sees the new set.",
        )
        epochs = self._train()
        self._say("5. Stats: what the cache holds now, and how much of the source was drawn.")
        self._type("stats")
        seconds = time.monotonic() - began
        self._say(f"Done in {format_duration(seconds)}.")
        return {"steps": self._steps, "epochs": epochs, "seconds": round(seconds, 3)}

    def _say(self, *lines: str) -> None:
        if not self._out.as_json:
            for text in ("", *lines):
                self._out.line(text)

    def _command(self, args: Sequence[str]) -> tuple[list[str], str]:
        """Return the command to run, and the words that a user would type for it."""
        shown = ["cachetool", *args, "--cache", "cache"]
        extra = (["--json"] if self._out.as_json else []) + (["--quiet"] if self._out.quiet else [])
        # This interpreter, because the program `cachetool` may be missing in PATH, or another version.
        return [sys.executable, "-m", *shown, *extra], shlex.join(shown)

    def _type(self, *args: str) -> None:
        """Run a command as a user would."""
        command, shown = self._command(args)
        if self._out.as_json:
            done = subprocess.run(command, cwd=self._place, stdout=subprocess.PIPE, text=True, check=False)
        else:
            self._out.line(f"$ {shown}")
            done = subprocess.run(command, cwd=self._place, text=True, check=False)
        self._finish(shown, done.returncode, done.stdout)

    @contextmanager
    def _typed_beside(self, *args: str) -> Iterator[None]:
        """Run a command in the background during the block, and wait for its end."""
        command, shown = self._command(args)
        if not self._out.as_json:
            self._out.line(f"$ {shown} &")
        process = subprocess.Popen(command, cwd=self._place, stdout=subprocess.PIPE, text=True)
        try:
            yield
            # Reading while waiting: a child that fills the pipe would otherwise wait for ever.
            stdout, _ = process.communicate()
        finally:
            # The block failed or was interrupted. The pull must not run on after the demo.
            if process.poll() is None:
                process.terminate()
                process.wait()
        if not self._out.as_json:
            for text in stdout.splitlines():
                self._out.line(text)
        self._finish(shown, process.returncode, stdout)

    def _finish(self, shown: str, returncode: int, stdout: str | None) -> None:
        """Keep the document that a command printed. Raise the error with which it ended."""
        document = json.loads(stdout) if self._out.as_json and stdout else None
        self._steps.append({"command": shown, "result": document})
        if returncode != 0:
            if document is not None:
                raise from_json(document)
            raise CacheToolError(f"'{shown}' ended with exit code {returncode}")

    def _train(self) -> list[dict[str, Any]]:
        from cachetool.api import open_cache

        epochs = []
        with open_cache(self._place / "cache", create=False) as cache:
            for number in range(1, EPOCHS + 1):
                # The last epoch has no pull beside it: the printed statistics must not change under it.
                grows = number < EPOCHS
                pull = ("pull", "remote", "--samples", str(PULLED_PER_EPOCH), "--seed", "7")
                with self._typed_beside(*pull) if grows else nullcontext():
                    epochs.append(_epoch(cache, number))
                    if not self._out.as_json:
                        self._out.line(_describe(epochs[-1]))
        return epochs


def _make_remote(folder: Path) -> int:
    """Write the made-up data set, the same bytes in every run. Return their number."""
    import numpy as np

    make_folder(folder)
    # A fixed seed, so that every run prints the same numbers.
    rng = np.random.default_rng(0)
    total = 0
    for number in range(SAMPLES):
        label = number % 4
        volume = rng.normal(loc=label, size=SHAPE).astype(np.float32)
        with new_file(folder / f"scan{number:04d}.volume.npy") as file:
            np.save(file, volume)
        with new_file(folder / f"scan{number:04d}.json") as file:
            file.write(json.dumps({"label": label, "spacing": 0.5}).encode())
        total += volume.nbytes
    return total


def _epoch(cache: Cache, number: int) -> dict[str, Any]:
    """Read every sample of one snapshot, as a training epoch does.

    The "model" predicts a label by rounding a volume's mean brightness.
    """
    import numpy as np

    from cachetool.formats import get_format
    from cachetool.formats.shard import open_shard

    samples = nbytes = right = 0
    with cache.snapshot(run="demo", epoch=number) as snapshot:
        for shard in snapshot.shards:
            with open_shard(shard.path, get_format(shard.format), shard.schema) as reader:
                block = reader.read(0, reader.samples)
            brightness = np.asarray(block.columns["volume"]).mean(axis=(1, 2, 3))
            right += int((np.rint(brightness) == np.asarray(block.columns["label"])).sum())
            samples += block.samples
            nbytes += block.nbytes
        # Counts the epoch: eviction with --min-epochs and the statistics know by this what was read.
        snapshot.served()
        return {
            "epoch": number,
            "version": snapshot.version,
            "shards": len(snapshot.shards),
            "samples": samples,
            "bytes": nbytes,
            "right": right,
        }


def _describe(epoch: dict[str, Any]) -> str:
    return (
        f"epoch {epoch['epoch']}: {count(epoch['samples'], 'sample')} from {count(epoch['shards'], 'shard')},"
        f" {format_size(epoch['bytes'])} read; {epoch['right']} labels predicted correctly"
    )
