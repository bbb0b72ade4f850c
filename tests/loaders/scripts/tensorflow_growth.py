"""Runs ``make_dataset`` over growing caches. ``tensorflow_growth.py ROOT``, ROOT an empty folder."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

import cachetool
from cachetool import CacheToolError
from cachetool.cache import CacheDir, open_cache
from cachetool.core.schema import Field, Schema
from cachetool.loaders.numpy import Loader
from cachetool.loaders.snapshots import follow as subscription
from cachetool.loaders.tensorflow import feature_spec, make_dataset, parse_batch
from tests.loaders.numbered import EVERY, KEYED, SMALL, leases, put, sample
from tests.loaders.processes import until


def plain(value: Any) -> Any:
    """Convert any value of TensorFlow or NumPy to nested lists of Python values."""
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    value = value.numpy() if hasattr(value, "numpy") else value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "mM":
        value = value.view("<i8")
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return value.encode() if isinstance(value, str) else value


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CacheToolError, tf.errors.OpError) as error:
        return str(error)
    return ""


def numbers(batches: Iterator[Any]) -> list[int]:
    return [n for batch in batches for n in batch["number"].numpy().tolist()]


def summary(found: list[int]) -> list[int]:
    return [min(found), max(found), len(found), len(set(found))]


def dtypes(root: Path, out: dict[str, Any]) -> None:
    """Compare every dtype, uncompressed and compressed, with the written values in their order."""
    with open_cache(root / "every", max_size="20MB") as cache:
        put(cache, range(5), schema=EVERY, format="tfrecord")
        put(cache, range(5, 10), schema=EVERY, format="tfrecord", compression="gzip")
        wrong = []
        seen = 0
        for batch in make_dataset(cache, batch_size=4):
            for field in EVERY:
                for i in range(len(batch["raw"])):
                    if plain(batch[field.name][i]) != plain(sample(EVERY, seen + i)[field.name]):
                        wrong.append([field.name, seen + i])
            seen += len(batch["raw"])
        out["every dtype"] = [wrong, seen]
        spec = make_dataset(cache, batch_size=4, drop_remainder=True).element_spec
        out["fixed spec"] = [str(spec["array int16"].dtype.name), list(spec["array int16"].shape)]
        out["ragged spec"] = [spec["cube"].ragged_rank, spec["cube"].dtype.name]
        with cachetool.open_cache(cache.root) as opened:
            opened.convert(to="tfrecord", out=root / "files")
        folder = [plain(b["cube"]) for b in make_dataset(root / "files", batch_size=4)]
        out["folder"] = folder == [plain(b["cube"]) for b in make_dataset(cache, batch_size=4)]
        chosen = next(iter(make_dataset(cache, batch_size=4, fields=["words", "deep"])))
        out["fields"] = list(chosen)


def growth(cache: CacheDir, out: dict[str, Any]) -> None:
    for start in (0, 1000, 2000):
        put(cache, range(start, start + 1000), format="tfrecord")
    taken = []
    newest = subscription.CacheSubscription.newest
    subscription.CacheSubscription.newest = lambda self, **more: taken.append(more) or newest(self, **more)
    dataset = make_dataset(cache.root, batch_size=10, fields=["number"], shuffle_buffer=200, seed=5)
    out["leases before"] = len(leases(cache))
    taken.clear()
    first = []
    for step, batch in enumerate(dataset):
        first += numbers(iter([batch]))
        if step == 0:
            out["leases in the epoch"] = len(leases(cache))
            put(cache, range(3000, 4000), format="tfrecord")
    out["epoch 1"], out["leases after"] = summary(first), len(leases(cache))
    out["epochs served"] = [shard.epochs for shard in cache.shards()]
    second = numbers(iter(dataset))
    out["epoch 2"], out["shuffled"] = summary(second), second[:1000] != sorted(second[:1000])
    out["snapshots taken"] = len(taken)
    again = make_dataset(cache, batch_size=50, fields=["number"], shuffle_buffer=200, seed=6)
    same = [numbers(iter(make_dataset(cache, batch_size=50, shuffle_buffer=200, seed=6).take(4))) for _ in range(2)]
    out["seed"] = [same[0] == same[1], same[0] == numbers(iter(again.take(4))), same[0] == second[:200]]
    tf.random.set_seed(0)  # elsewhere a seed that is a tensor is an error here
    drawn = tf.random.uniform([4]).numpy().tolist()
    tf.random.set_seed(0)
    same.append(numbers(iter(make_dataset(cache, batch_size=50, shuffle_buffer=200, seed=6).take(4))))
    out["user's seed"] = [same[0] == same[2], drawn == tf.random.uniform([4]).numpy().tolist()]
    both = [numbers(iter(again)) for _ in range(2)]
    out["epochs"] = [both[0] == both[1], sorted(both[0]) == sorted(both[1]) == sorted(second)]
    with open_cache(cache.root.parent / "one", max_size="20MB") as alone:
        put(alone, range(300), format="tfrecord")
        one = make_dataset(alone, batch_size=50, fields=["number"], shuffle_buffer=40, seed=-6)
        both = [numbers(iter(one)) for _ in range(2)]
    shutil.rmtree(alone.root)
    with open_cache(alone.root, max_size="20MB") as alone:
        put(alone, range(300), format="tfrecord", schema=Schema((Field("number", "<i8"), Field("x", "<f4", (2,)))))
        out["other fields"] = refused(lambda: list(one))
    out["decode"] = refused(lambda: make_dataset(cache, batch_size=50, decode={"image": "jpeg"}))
    out["one file"] = [*(each == sorted(each) for each in both), both[0] == both[1], *(len(set(each)) for each in both)]
    ordered = numbers(iter(make_dataset(cache, batch_size=100)))
    out["in order"] = ordered == list(range(4000))

    iterator = iter(dataset)
    next(iterator)
    held = len(leases(cache))
    del iterator
    out["abandoned"] = [held, len(leases(cache))]
    iterator = iter(dataset)
    next(iterator)
    with cache.catalog.write():  # the garbage collector may run here as well
        del iterator
    until(lambda: not leases(cache))

    # An epoch reads evicted samples to its end. The next epoch does not have them.
    found = []
    for step, batch in enumerate(dataset):
        found += numbers(iter([batch]))
        if step == 0:
            out["waits"] = bool(refused(lambda: cache.evict(cache.usage().total - 1)))
            out["on disk"] = len(list(cache.layout.shards.iterdir()))
    out["epoch 3"], out["on disk later"] = summary(found), len(list(cache.layout.shards.iterdir()))
    out["epoch 4"] = summary(numbers(iter(dataset)))

    endless = iter(make_dataset(cache, batch_size=1000, repeat=True))
    turns = [numbers(iter([next(endless)]))[0] for _ in range(3)]
    put(cache, range(4000, 5000), format="tfrecord")
    turns += [numbers(iter([next(endless)]))[0] for _ in range(4)]
    out["repeat"] = turns
    del endless
    out["leases at the end"] = len(leases(cache))


def in_a_function(cache: CacheDir, out: dict[str, Any]) -> None:
    """Use a dataset whose functions Python has released, beside one that replaces them, in a traced loop."""
    dataset = make_dataset(cache, batch_size=100, fields=["number"], shuffle_buffer=100)
    gc.collect()
    tf.config.run_functions_eagerly(True)
    other = make_dataset(cache, batch_size=100, fields=["words"])
    tf.config.run_functions_eagerly(False)

    @tf.function
    def total() -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for batch in dataset.prefetch(1):
            found += tf.reduce_sum(batch["number"])
        return found

    out["in a function"] = [int(total()), int(total()), sum(len(batch["words"]) for batch in other)]


def turns(root: Path, out: dict[str, Any]) -> None:
    """Count the calls into Python for epochs of 50 and of 5,000 samples in one and in four files."""
    elements: list[int] = []
    calls: list[int] = []
    from_generator, call = tf.data.Dataset.from_generator, script_ops.FuncRegistry.__call__

    def counted(generator: Callable[[], Iterator[Any]], **options: Any) -> tf.data.Dataset:
        def counting() -> Iterator[Any]:
            for element in generator():
                elements.append(1)
                yield element

        return from_generator(counting, **options)

    def counted_call(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return call(self, *arguments)

    tf.data.Dataset.from_generator, script_ops.FuncRegistry.__call__ = staticmethod(counted), counted_call
    try:
        with open_cache(root / "turns", max_size="20MB") as cache:
            put(cache, range(50), format="tfrecord")
            dataset = make_dataset(cache, batch_size=10, shuffle_buffer=100)
            found = [[len(numbers(iter(dataset))), len(elements), len(calls)]]
            for start in (50, 1700, 3400):
                put(cache, range(start, start + 1650), format="tfrecord")
            elements.clear(), calls.clear()
            found.append([len(numbers(iter(dataset))), len(elements), len(calls)])
    finally:
        tf.data.Dataset.from_generator = staticmethod(from_generator)
        script_ops.FuncRegistry.__call__ = call
    out["turns"] = found


def sides(root: Path, out: dict[str, Any]) -> None:
    """Compare train and validation of a growing cache with the sides of the NumPy loader."""
    found: list[Any] = []
    with open_cache(root / "sides", max_size="20MB") as cache:
        put(cache, range(400), schema=KEYED, format="tfrecord")
        kinds = [("train", 300), ("validation", 0)]
        made = [
            make_dataset(
                cache, batch_size=16, fields=["number"], shuffle_buffer=buffer, split=side, validation=0.2, seed=1
            )
            for side, buffer in kinds
        ]
        for more in (range(400, 700), range(700, 702), range(0)):
            read = [numbers(iter(dataset)) for dataset in made]
            other = []
            for side, _ in kinds:
                with Loader(cache, batch_size=16, fields=["number"], split=side, validation=0.2, workers=0) as loader:
                    other.append(sorted(int(n) for batch in loader for n in batch["number"]))
            found.append([sorted(read[0]), sorted(read[1]), sorted(read[0]) == other[0], read[1] == other[1]])
            if more:
                gzip = "gzip" if len(more) > 2 else None
                put(cache, more, schema=KEYED, format="tfrecord", compression=gzip)
        out["sides"] = found
        out["sides leases"] = len(leases(cache))

        few = make_dataset(cache, batch_size=16, fields=["number"], split="validation", validation=1e-9)
        out["empty side"] = numbers(iter(few))
        endless = make_dataset(cache, batch_size=16, split="validation", validation="0.0000001%", repeat=True)
        out["empty side for ever"] = refused(functools.partial(next, iter(endless)))
        out["bad split"] = [
            refused(lambda: make_dataset(cache, batch_size=1, split="test")),
            refused(lambda: make_dataset(cache, batch_size=1, split="train", validation=1.0)),
        ]
    with open_cache(root / "no keys", max_size="20MB") as cache:
        put(cache, range(5), format="tfrecord")
        out["no keys"] = refused(lambda: make_dataset(cache, batch_size=1, split="train"))


def large(root: Path, out: dict[str, Any]) -> None:
    """Read records that are large enough for other ways of reading and parsing. The last bytes of one file are
    damaged.
    """
    for nbytes in (2**17, 2**19):
        schema = Schema((Field("x", "<f4", (nbytes // 4,)), Field("number", "<i8"), Field("words", "str")))
        with open_cache(root / f"large {nbytes}", max_size="90MB") as cache:
            put(cache, range(9), schema=schema, format="tfrecord")
            put(cache, range(9, 18), schema=schema, format="tfrecord", compression="gzip")
            dataset = make_dataset(cache, batch_size=4)
            wrong, seen = [], 0
            for batch in dataset:
                for row in range(len(batch["number"])):
                    wrong += [n for n in schema.names if plain(batch[n][row]) != plain(sample(schema, seen)[n])]
                    seen += 1
            shuffled = numbers(iter(make_dataset(cache, batch_size=4, shuffle_buffer=6, drop_remainder=True)))
            path = cache.shards()[0].data
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.seek(-nbytes // 2, os.SEEK_END)
                file.write(b"damage")
            damaged = refused(functools.partial(list, dataset))
            spec = [tuple(each.shape) for each in dataset.element_spec.values()]
            out[f"large {nbytes}"] = [wrong, seen, len(set(shuffled)), "corrupted record" in damaged, spec]


def fit(cache: CacheDir, out: dict[str, Any]) -> None:
    """Run ``model.fit`` over the dataset: every epoch is a pass over the current samples."""
    seen: list[int] = []
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    dataset = make_dataset(cache, batch_size=100, shuffle_buffer=100, fields=["x", "number"])

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen[-1] += 1

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(0)

    pairs = dataset.map(lambda s: (s["x"], tf.cast(s["number"], tf.float32) / 5000))
    for epoch in range(2):
        model.fit(pairs, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[Count()])
        put(cache, range(5000, 5500), format="tfrecord")
    out["fit"] = seen
    out["own pipeline"] = int(
        parse_batch(
            next(iter(tf.data.TFRecordDataset(str(cache.shards()[0].data)).batch(3))), SMALL
        )["number"][2]
    )  # fmt: skip
    out["spec"] = sorted(feature_spec(SMALL))


def errors(root: Path, out: dict[str, Any]) -> None:
    with open_cache(root / "mixed", max_size="20MB") as cache:
        put(cache, range(5), format="tfrecord")
        dataset = make_dataset(cache, batch_size=2)
        out["no batch"] = refused(lambda: make_dataset(cache, batch_size=0))
        out["no seed"] = refused(lambda: make_dataset(cache, batch_size=1, seed="x"))
        out["no buffer"] = refused(lambda: make_dataset(cache, batch_size=1, shuffle_buffer=-1))
        large = [make_dataset(cache, batch_size=6, drop_remainder=True, repeat=repeat) for repeat in (False, True)]
        out["less than a batch"] = [refused(lambda each=each: next(iter(each))) for each in large]
        out["unknown field"] = refused(lambda: make_dataset(cache, batch_size=2, fields=["no"]))
        out["unknown dataset"] = refused(lambda: make_dataset(cache, batch_size=2, dataset="no"))
        put(cache, range(5, 10), format="hdf5")
        out["other format"] = refused(lambda: make_dataset(cache, batch_size=2))
        with cachetool.open_cache(cache.root) as opened:
            opened.convert(to="lmdb", out=root / "in lmdb")
        out["other folder"] = refused(lambda: make_dataset(root / "in lmdb", batch_size=2))
        out["other format later"] = refused(lambda: list(dataset))
        out["left by errors"] = len(leases(cache))
    with open_cache(root / "emptied", max_size="20MB") as cache:
        put(cache, range(5), format="tfrecord")
        datasets = [make_dataset(cache, batch_size=2, repeat=repeat) for repeat in (False, True)]
        with cachetool.open_cache(cache.root) as opened:
            opened.convert(to="tfrecord", out=root / "samples")
        cache.evict(cache.usage().total - cache.shards()[0].bytes)
        out["emptied"] = [refused(functools.partial(list, dataset)) for dataset in datasets]


def main(name: str) -> None:
    root, out, said = Path(name), {}, []
    tf.get_logger().addFilter(lambda record: said.append(record.getMessage()) or True)
    dtypes(root, out)
    with open_cache(root / "growing", max_size="50MB") as cache:
        growth(cache, out)
        in_a_function(cache, out)
        fit(cache, out)
    errors(root, out)
    turns(root, out)
    sides(root, out)
    large(root, out)
    out["warnings"] = said
    out["tfrecord package"] = "tfrecord" in sys.modules
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
