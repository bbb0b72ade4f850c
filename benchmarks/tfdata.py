"""``make_dataset`` compared with ``tf.data`` pipelines written by hand, as a share of the best of them.

    python benchmarks/tfdata.py FOLDER [--rounds 5] [--cases 1MiB,3KiB] [--split] [--json]

Samples are warm and shuffled, with the fields ``x`` and ``y``, in the cases of ``feed.py``. An epoch repeats the
samples until it lasts five seconds, because real epochs are not shorter; the additional shards are links to the
first ones. FOLDER receives a cache of TFRecord shards, and the same samples by ``tf.io.TFRecordWriter`` for the
pipelines by hand. These pipelines use ``TFRecordDataset`` in all combinations: one file after another, two files at
once, as many as TensorFlow chooses, or interleaved; buffered or not; parsed per batch or per record; prefetch by
TensorFlow or of two batches; with or without autotuning. Each pipeline first runs for one second, after a second
that does not count. Then the three fastest pipelines and ``make_dataset`` alternate, one epoch per round. *share* is
the median of ``make_dataset`` divided by the best of theirs.

Each case runs in its own process: batches of one size leave the C library's memory in a state that makes batches of
another size up to half as fast, for any reader. ``--split`` also measures ``split="train"`` with 5 % held out; it
counts the bytes of delivered samples. FOLDER must have about 1.7 GB free, and the machine about 3 GB of memory. The
benchmark deletes its files at the end.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from feed import CASES, Case, make
from tables import finish

from cachetool.bench.consumer import rate, touched
from cachetool.bench.samples import fill
from cachetool.cache import CacheDir, open_cache
from cachetool.core.block import Block, Ragged
from cachetool.core.schema import KEY, Field, Schema
from cachetool.loaders.tensorflow import make_dataset

AUTO = tf.data.AUTOTUNE
READS = {"one file": None, "two files": 2, "files by AUTOTUNE": AUTO, "interleave": "interleave"}
BUFFERS = {"buffered": None, "unbuffered": 0}
PARSES = ("batch, parse", "parse, batch")
PREFETCHES = {"prefetch AUTOTUNE": AUTO, "prefetch 2": 2}
TUNES = {"tuned": True, "untuned": False}
BEST = 3
EPOCH = 5.0
"""Least seconds of an epoch."""


def write(folder: Path, block: Block, shards: int) -> list[str]:
    """Write the samples with TensorFlow's writer."""
    files = []
    for number, rows in enumerate(np.array_split(np.arange(len(block)), shards)):
        files.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(files[-1]) as writer:
            for row in rows.tolist():
                feature = {
                    "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[block.columns["x"][row].tobytes()])),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[row])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return files


def pipeline(files: list[str], case: Case, buffer: int, *, setting: tuple[str, ...]) -> tf.data.Dataset:
    """Build one pipeline by hand."""
    reads, size, parse, prefetch = READS[setting[0]], BUFFERS[setting[1]], setting[2], PREFETCHES[setting[3]]
    spec = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.int64)}

    def decoded(found: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {"x": tf.io.decode_raw(found["x"], tf.float32, fixed_length=case.nbytes), "y": found["y"]}

    if reads == "interleave":
        data = tf.data.Dataset.from_tensor_slices(files).interleave(
            lambda file: tf.data.TFRecordDataset(file, buffer_size=size),
            cycle_length=4,
            num_parallel_calls=AUTO,
            deterministic=False,
        )
    else:
        data = tf.data.TFRecordDataset(files, buffer_size=size, num_parallel_reads=reads)
    data = data.shuffle(buffer)
    if parse == PARSES[0]:
        data = data.batch(case.batch, drop_remainder=True)
        data = data.map(lambda raw: decoded(tf.io.parse_example(raw, spec)), num_parallel_calls=AUTO)
    else:
        data = data.map(lambda raw: decoded(tf.io.parse_single_example(raw, spec)), num_parallel_calls=AUTO)
        data = data.batch(case.batch, drop_remainder=True)
    options = tf.data.Options()
    options.autotune.enabled = TUNES[setting[4]]
    return data.prefetch(prefetch).with_options(options)


def arrays(data: tf.data.Dataset) -> Iterator[dict[str, Any]]:
    for batch in data:
        yield {name: value.numpy() for name, value in batch.items()}


def repeated(cache: CacheDir, block: Block, case: Case, times: int) -> None:
    """Fill the cache with ``times`` copies of the samples. Their bytes lie on the disk once."""
    before = len(cache.shards())
    for _ in range(times):
        fill(cache, "tfrecord", block, case.shards)
        shards = cache.shards()
        for first, again in zip(shards[: case.shards], shards[before:], strict=True):
            path = again.data  # the file name of the existing shard
            path.unlink()
            os.link(first.data, path)
        before = len(shards)


def keyed(block: Block) -> Block:
    """Return the same samples with a ``__key__``."""
    keys = [f"{number:08d}".encode() for number in range(len(block))]
    column = Ragged(np.frombuffer(b"".join(keys), np.uint8), np.arange(len(keys) + 1, dtype=np.int64) * 8)
    return Block(Schema((*block.schema, Field(KEY, "str"))), {**block.columns, KEY: column})


def measure(title: str, parent: Path, *, rounds: int, split: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        return measured(title, Path(folder), rounds=rounds, split=split)


def measured(title: str, folder: Path, *, rounds: int, split: bool) -> dict[str, Any]:
    case = CASES[title]
    block = make(case)
    buffer = max(64, min(1000, 2**26 // case.nbytes))
    files = write(folder, block, case.shards)
    ours_block = keyed(block) if split else block
    with open_cache(folder / "cache", max_size="200GB") as cache:
        fill(cache, "tfrecord", ours_block, case.shards)
    made = functools.partial(make_dataset, folder / "cache", batch_size=case.batch, shuffle_buffer=buffer)
    made = functools.partial(made, drop_remainder=True, fields=["x", "y"])
    once = arrays(made())
    touched([next(once)])
    seconds = case.samples * case.nbytes / 1e6 / rate(lambda: touched(once))
    times = math.ceil(EPOCH / seconds * 1.2)  # later epochs are faster
    with open_cache(folder / "cache") as cache:
        repeated(cache, ours_block, case, times - 1)
    del block, ours_block
    files *= times
    ours = {"make_dataset": made()}
    if split:
        ours["make_dataset(split=)"] = made(split="train")
    settings = list(itertools.product(READS, BUFFERS, PARSES, PREFETCHES, TUNES))
    first = {}
    for setting in settings:
        data = pipeline(files, case, buffer, setting=setting)
        touched(arrays(data), seconds=1.0)
        first[setting] = rate(lambda data=data: touched(arrays(data), seconds=1.0))
    best = sorted(settings, key=lambda setting: -first[setting])[:BEST]
    rivals = {", ".join(setting): pipeline(files, case, buffer, setting=setting) for setting in best}
    found: dict[str, list[float]] = {name: [] for name in (*ours, *rivals)}
    for turn in range(rounds + 1):  # the first round does not count
        for name, data in (ours | rivals).items():
            reached = rate(lambda data=data: touched(arrays(data)))
            if turn:
                found[name].append(reached)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    hand = max(rivals, key=lambda name: medians[name])
    row = {"case": title, "best by hand": hand, "its MB/s": round(medians[hand])}
    for name in ours:
        row |= {f"{name} MB/s": round(medians[name]), f"share, {name}": round(medians[name] / medians[hand], 2)}
    return row | {"slowest by hand": round(min(first.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="1MiB,128KiB,3KiB")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    case = functools.partial(measure, parent=options.folder, rounds=options.rounds, split=options.split)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as pool:
        rows = list(pool.map(case, options.cases.split(",")))
    finish({"tfdata": rows}, as_json=options.json, rounds=options.rounds)


if __name__ == "__main__":
    main()
