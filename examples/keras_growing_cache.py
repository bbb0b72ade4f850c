"""Train a small Keras model on a growing cache, stop, and resume.

    KERAS_BACKEND=jax python examples/keras_growing_cache.py [FOLDER]

The example works with every Keras backend. A folder of objects stands for the bucket: the 1,797 handwritten digits
of scikit-learn, an image and a label each. A process pulls them in the background. One digit in ten is held out for
validation. Keras needs epochs of equal length, so an epoch is 30 steps. A pass over the growing cache takes as many
steps as it needs. A learning rate that is counted in steps therefore ends with the training.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import cachetool
from cachetool.loaders.keras import LoaderDataset, LoaderStateCallback
from cachetool.loaders.numpy import Loader

EPOCHS, STEPS = 8, 30


def write_digits(folder: Path) -> None:
    """Write ``0007.image.npy`` and ``0007.json`` for digit 7: objects with the same key are one sample."""
    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.image.npy", image.astype(np.float32) / 16)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))


def digits_model() -> keras.Model:
    """Return a small model whose learning rate falls to 0 over all steps."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.01, decay_steps=EPOCHS * STEPS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def train(folder: Path, epochs: int) -> None:
    """Train until epoch ``epochs``, from the last checkpoint or from the beginning."""
    options = {"batch_size": 32, "fields": ["image", "label", "__key__"], "validation": 0.1, "seed": 0}
    cache = folder / "cache"
    with Loader(cache, split="train", **options) as loader, Loader(cache, split="validation", **options) as held_out:
        dataset = LoaderDataset(loader.epochs_of(steps=STEPS), "image", "label")
        history = digits_model().fit(
            dataset,
            epochs=epochs,
            validation_data=LoaderDataset(held_out, "image", "label"),  # a whole pass over the held-out samples
            callbacks=[
                keras.callbacks.BackupAndRestore(folder / "run", delete_checkpoint=False),  # saves the model
                LoaderStateCallback(dataset, folder / "loader.json"),  # saves the position in the pass, after the model
            ],
            verbose=0,
        )
        for epoch, accuracy in zip(history.epoch, history.history["val_accuracy"], strict=True):
            print(f"epoch {epoch}: accuracy {accuracy:.2f}", flush=True)
        print(f"after {loader.epoch} whole passes over the cache", flush=True)


def main(folder: Path) -> None:
    """Train the first half of the epochs, then resume and train the second half, as a later job would."""
    write_digits(folder / "bucket")
    with cachetool.open_cache(folder / "cache", max_size="8MB") as cache:
        cache.pull(str(folder / "bucket"), samples=300, seed=0)
    with cachetool.BackgroundPull(folder / "cache", str(folder / "bucket"), seed=0):
        train(folder, EPOCHS // 2)
        train(folder, EPOCHS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
