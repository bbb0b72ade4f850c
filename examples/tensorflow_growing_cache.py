"""Train a small Keras model on a ``tf.data`` dataset over a cache that grows from epoch to epoch.

    python examples/tensorflow_growing_cache.py [FOLDER]

A folder of objects stands for the bucket: the 1,797 handwritten digits of scikit-learn, an image and a label each. The
cache holds TFRecord files. Each pass over the dataset reads the files that exist when the pass begins. Meanwhile a
thread pulls more samples.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import cachetool
from cachetool.loaders.tensorflow import make_dataset

EPOCHS = 4
PULLED_PER_EPOCH = 300


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def main(folder: Path) -> None:
    """Pull, then train and pull at the same time."""
    write_digits(folder / "bucket")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

    with cachetool.open_cache(folder / "cache", max_size="8MB") as cache, ThreadPoolExecutor(1) as background:

        def pull() -> None:
            cache.pull(str(folder / "bucket"), samples=PULLED_PER_EPOCH, to="tfrecord", seed=0)

        pull()
        dataset = make_dataset(cache, batch_size=32, fields=["image", "label"], shuffle_buffer=300, seed=0)
        for epoch in range(1, EPOCHS + 1):
            samples, right = 0, 0.0
            for batch in dataset:  # takes a new snapshot of the cache
                if samples == 0:
                    more = background.submit(pull)  # the next epoch reads these samples
                # metrics of this batch only
                told = model.train_on_batch(batch["image"], batch["label"], return_dict=True)
                samples += len(batch["label"])
                right += float(told["accuracy"]) * len(batch["label"])
            print(f"epoch {epoch}: {samples} samples, accuracy {right / samples:.2f}", flush=True)
            more.result()  # only so that every run prints the same numbers


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
