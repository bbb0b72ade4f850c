"""Cells of Keras with the backend in ``KERAS_BACKEND``: ``CASES FOLDER``, several cases separated by commas.

Several cases share a process, because importing TensorFlow takes seconds. Each has its own folder, and begins with a
line on stderr.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from cachetool.core.errors import UsageError
from cachetool.loaders.keras import LoaderDataset, LoaderStateCallback
from cachetool.loaders.numpy import Loader
from tests.trainers.growing import BATCH, FIRST, FIXED, fill, grow

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax

INPUTS = ["x", "id", "pass", "snapshot"]


class Seen:
    """The samples that the model received, in the form of :class:`tests.trainers.growing.Record`."""

    def __init__(self) -> None:
        self.records: dict[str, dict[int, Any]] = {"record": {}, "validation": {}}
        self.phase, self.epoch = "record", 0
        self.extra: dict[str, Any] = {"wrong": 0, "traces": 0}

    def note(self, x: Any, ids: Any, passes: Any, snapshots: Any) -> None:
        """Record the values that the model sees within a step."""
        x, ids, passes, snapshots = (np.array(value) for value in (x, ids, passes, snapshots))
        row = self.records[self.phase].setdefault(self.epoch, {"ids": [], "passes": {}})
        row["ids"] += ids.tolist()
        for one, number, snapshot in zip(ids.tolist(), passes.tolist(), snapshots.tolist(), strict=True):
            row["passes"].setdefault(str(number), {"snapshot": snapshot, "ids": []})["ids"].append(one)
        self.extra["wrong"] += int((x != (ids % 7)[:, None]).any(axis=1).sum())


SEEN = Seen()
"""The record of the running case; compiled functions are reused from case to case."""


def note(*values: Any) -> None:
    """Pass the values of a step to the running case."""
    SEEN.note(*values)


class Spy(keras.layers.Layer):
    """A layer that records its inputs and returns ``x``."""

    def call(self, x: Any, *others: Any) -> Any:
        """Record the inputs, with each backend in its own way. Building the model passes no values."""
        SEEN.extra["traces"] += 1
        if BACKEND == "tensorflow":
            tf.py_function(lambda *values: note(*(value.numpy() for value in values)), [x, *others], [])
        elif BACKEND == "jax":
            jax.debug.callback(note, x, *others, ordered=True)
        elif x.device.type != "meta":
            note(*(value.detach().numpy() for value in (x, *others)))
        return x


def model(learning_rate: Any = 0.01) -> Any:
    """Return a linear model of one field that sees the other fields."""
    shapes = {"x": ((4,), "float32"), **dict.fromkeys(INPUTS[1:], ((), "int32"))}
    inputs = [keras.Input(shape, dtype=dtype, name=name) for name, (shape, dtype) in shapes.items()]
    made = keras.Model(inputs, keras.layers.Dense(1)(Spy()(*inputs)))
    made.compile(keras.optimizers.SGD(learning_rate), "mse", jit_compile=BACKEND == "jax")
    SEEN.extra["traces"] = 0
    return made


class Watch(keras.callbacks.Callback):
    """A callback that tracks epoch and phase, calls ``then(steps)`` after each step, and stops after ``stop`` steps."""

    def __init__(self, then: Callable[[int], object] = lambda step: None, *, stop: int = 0, kill: int = 0) -> None:
        super().__init__()
        self.then, self.stop, self.kill = then, stop, kill
        self.steps = 0

    def _settle(self, phase: str) -> None:
        if BACKEND == "jax":
            jax.effects_barrier()
        SEEN.phase = phase

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the epoch's number."""
        SEEN.epoch = epoch

    def on_test_begin(self, logs: Any = None) -> None:
        """Record that a validation begins."""
        self._settle("validation")

    def on_test_end(self, logs: Any = None) -> None:
        """Record that the validation has ended."""
        self._settle("record")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step."""
        self.steps += 1
        self.then(self.steps)
        if self.steps == self.stop:
            self.model.stop_training = True
        if self.steps == self.kill:
            raise KeyboardInterrupt

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Wait for pending records."""
        self._settle("record")


def loader_of(folder: Path, **options: Any) -> Loader:
    """Return a loader whose batches also have the number of their pass and its number of samples."""
    given = {"batch_size": BATCH, "fields": FIXED, "workers": 1, "prefetch": 2, "wait": 20, **options}
    loader = Loader(folder / "cache", **given)

    def tagged(batch: Any) -> dict[str, Any]:
        out = Loader._finish(loader, batch)
        begun, count = loader._progress.begun, len(out["id"])
        out["pass"] = np.full(count, begun.epoch, dtype=np.int32)
        out["snapshot"] = np.full(count, begun.steps.samples, dtype=np.int32)
        return out

    loader._finish = tagged
    return loader


def dataset_of(source: Any) -> LoaderDataset:
    """Return a dataset for :func:`model`."""
    return LoaderDataset(source, {name: name for name in INPUTS}, "y")


def growing(folder: Path, format: str = "lmdb") -> Callable[[int], object]:
    """Grow the cache after the first step of each pass: passes of 6, 9, 12 and 15 steps."""
    return lambda step: grow(folder / "cache", format=format) if step in (1, 7, 16) else None


CASES: dict[str, Callable[[Path], None]] = {}


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


@case
def grow_and_schedule(folder: Path) -> None:
    """Train on 96, 144, 192 and 240 samples in 42 steps; the learning rate is counted in these steps."""
    fill(folder / "cache")
    made = model(keras.optimizers.schedules.PolynomialDecay(0.01, decay_steps=42, end_learning_rate=0.0))
    with loader_of(folder) as loader:
        made.fit(dataset_of(loader.epochs_of(steps=6)), epochs=7, callbacks=[Watch(growing(folder))], verbose=0)
    SEEN.extra["steps"], SEEN.extra["rate"] = int(made.optimizer.iterations), float(made.optimizer.learning_rate)


def _two_runs(folder: Path, steps: int, epochs: tuple[int, int], between: Callable[[], object] = lambda: None) -> None:
    for run, (first, last) in enumerate(((0, epochs[0]), (epochs[0], epochs[1]))):
        made = model()
        with loader_of(folder) as loader:
            dataset = dataset_of(loader.epochs_of(steps=steps))
            saved = LoaderStateCallback(dataset, folder / "loader.json")
            made.fit(dataset, initial_epoch=first, epochs=last, callbacks=[saved, Watch()], verbose=0)
        if run == 0:
            between()


@case
def resume(folder: Path) -> None:
    """Stop after 80 of 240 samples, and resume in another loader."""
    fill(folder / "cache", 240)
    _two_runs(folder, 5, (1, 6))


@case
def resume_with_growth(folder: Path) -> None:
    """Stop after 48 of 144 samples; the cache has 240 when training resumes."""
    fill(folder / "cache", 144)
    _two_runs(folder, 3, (1, 8), lambda: [grow(folder / "cache") for _ in range(2)])


@case
def killed(folder: Path) -> None:
    """Save every 4 batches, and be killed after 6 of an epoch of 10. Batches after the save do not count."""
    fill(folder / "cache", FIRST)  # passes of 6 steps: the second one begins in the middle of the epoch
    made = model()
    with loader_of(folder) as loader:
        dataset = dataset_of(loader.epochs_of(steps=10))
        saved = LoaderStateCallback(dataset, folder / "loader.json", save_freq=4)
        try:
            made.fit(dataset, epochs=9, callbacks=[saved, Watch(kill=6)], verbose=0)
        except KeyboardInterrupt:
            Watch()._settle("record")
    SEEN.records["record"][0] = _first(SEEN.records["record"][0], 4 * BATCH)
    with loader_of(folder) as loader:
        dataset = dataset_of(loader.epochs_of(steps=4))
        saved = LoaderStateCallback(dataset, folder / "loader.json", save_freq=4)
        made.fit(dataset, initial_epoch=1, epochs=3, callbacks=[saved, Watch()], verbose=0)


@case
def ended(folder: Path) -> None:
    """Save every 4 batches, and end after 10. The model is then saved, and another process resumes."""
    fill(folder / "cache", FIRST)
    made = model()
    for epoch, steps in enumerate((10, 8)):
        with loader_of(folder) as loader:
            dataset = dataset_of(loader.epochs_of(steps=steps))
            saved = LoaderStateCallback(dataset, folder / "loader.json", save_freq=4)
            made.fit(dataset, initial_epoch=epoch, epochs=epoch + 1, callbacks=[saved, Watch()], verbose=0)


def _first(row: dict[str, Any], count: int) -> dict[str, Any]:
    assert list(row["passes"]) == ["0"]
    ids = row["ids"][:count]
    return {"ids": ids, "passes": {"0": {**row["passes"]["0"], "ids": ids}}}


@case
def validation(folder: Path) -> None:
    """Train one side of a growing cache, and validate the complete other side."""
    fill(folder / "cache")
    made = model()
    sides = {"validation": 0.25, "fields": [*FIXED, "__key__"]}
    with (
        loader_of(folder, split="train", **sides) as loader,
        loader_of(folder, split="validation", shuffle=False, **sides) as held_out,
    ):
        made.fit(
            dataset_of(loader.epochs_of(steps=6)),
            validation_data=dataset_of(held_out),
            epochs=5,
            callbacks=[Watch(lambda step: grow(folder / "cache") if step in (1, 7, 13) else None)],
            verbose=0,
        )


@case
def default_fields(folder: Path) -> None:
    """Select fields from batches that also have text, bytes and ragged columns."""
    fill(folder / "cache")
    with loader_of(folder, fields=None) as loader:
        model().fit(dataset_of(loader.epochs_of(steps=6)), epochs=2, callbacks=[Watch()], verbose=0)


def padded(sample: dict[str, Any]) -> dict[str, Any]:
    """Pad the values of the ragged field and of the text to one shape in ``x``."""
    ragged = np.zeros((2, 2), dtype=np.float32)
    ragged[: len(sample["ragged"])] = sample["ragged"]
    length = np.float32(len(sample["name"]))
    return {"id": sample["id"], "x": np.array([ragged.sum(), length, 0, 0], dtype=np.float32), "y": sample["y"]}


@case
def ragged_and_text(folder: Path) -> None:
    """Refuse fields that Keras cannot take as input; padded by a transform they are accepted."""
    fill(folder / "cache")
    refused = []
    with loader_of(folder, fields=None) as loader:
        for name in ("ragged", "name", "blob", "nothing"):
            try:
                LoaderDataset(loader, name, "y")[0]
            except UsageError as error:
                refused.append(str(error))
    SEEN.extra["refused"] = refused
    rows: list[Any] = []
    with loader_of(folder, fields=None, transform=padded) as loader:
        made, taken = model(), SEEN.note

        def values(x: Any, ids: Any, *others: Any) -> None:
            rows.extend(zip(np.array(ids).tolist(), np.array(x).tolist(), strict=True))
            taken(x, ids, *others)

        SEEN.note = values
        made.fit(dataset_of(loader.epochs_of(steps=6)), epochs=1, callbacks=[Watch()], verbose=0)
    SEEN.extra["right"] = sum(
        values == [number % 3 * 2.0, float(len(f"näme {number}")), 0.0, 0.0] for number, values in rows
    )


@case
def early_stop(folder: Path) -> None:
    """Stop after 8 steps, in the middle of an epoch and of a pass. The next fit continues, with the same callback."""
    fill(folder / "cache")
    made = model()
    with loader_of(folder) as loader:
        dataset = dataset_of(loader.epochs_of(steps=6))
        saved = LoaderStateCallback(dataset, folder / "loader.json")
        made.fit(dataset, epochs=9, callbacks=[saved, Watch(stop=8)], verbose=0)
        SEEN.extra["stopped"] = sum(len(row["ids"]) for row in SEEN.records["record"].values())
        made.fit(dataset, initial_epoch=2, epochs=3, callbacks=[saved, Watch(stop=1)], verbose=0)
        made.fit(dataset, initial_epoch=3, epochs=4, callbacks=[saved, Watch(stop=3)], verbose=0)


@case
def early_stopping(folder: Path) -> None:
    """Stop by ``EarlyStopping`` between two epochs, because the loss does not fall."""
    fill(folder / "cache")
    with loader_of(folder) as loader:
        dataset = dataset_of(loader.epochs_of(steps=6))
        stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
        model().fit(dataset, epochs=9, callbacks=[stop, Watch()], verbose=0)


@case
def second_fit(folder: Path) -> None:
    """Fit twice, and predict in between, without any callback of cachetool."""
    fill(folder / "cache", 100)  # batches of 15 and of 14
    made = model()
    with loader_of(folder, fields=[*FIXED, "__key__"]) as loader, loader_of(folder) as other:
        dataset = dataset_of(loader.epochs_of(steps=7))
        made.fit(dataset, epochs=2, callbacks=[Watch()], verbose=0)
        SEEN.phase = "validation"
        SEEN.extra["predicted"] = len(made.predict(dataset_of(other), verbose=0))
        Watch()._settle("record")
        for epoch in (2, 3):
            made.fit(dataset, initial_epoch=epoch, epochs=epoch + 1, callbacks=[Watch()], verbose=0)


@case
def kept_length(folder: Path) -> None:
    """Train on a loader without a fixed length while its cache grows."""
    fill(folder / "cache")
    with loader_of(folder) as loader:
        model().fit(dataset_of(loader), epochs=4, callbacks=[Watch(growing(folder))], verbose=0)


@case
def short_epochs(folder: Path) -> None:
    """Use epochs of the fewest steps, and validations of one batch; fewer steps are refused."""
    fill(folder / "cache")
    with loader_of(folder) as loader, loader_of(folder, batch_size=FIRST) as held_out:
        dataset = dataset_of(loader.epochs_of(steps=3))
        model().fit(dataset, validation_data=dataset_of(held_out), epochs=4, callbacks=[Watch()], verbose=0)
        try:
            dataset_of(loader.epochs_of(steps=2))
        except UsageError as error:
            SEEN.extra["refused"] = str(error)


@case
def wrong_steps(folder: Path) -> None:
    """Pass ``steps_per_epoch`` as well."""
    fill(folder / "cache")
    with loader_of(folder) as loader:
        dataset = dataset_of(loader.epochs_of(steps=6))
        saved = LoaderStateCallback(dataset, folder / "loader.json")
        try:
            model().fit(dataset, epochs=1, steps_per_epoch=4, callbacks=[saved, Watch()], verbose=0)
        except UsageError as error:
            SEEN.extra["refused"] = str(error)


@case
def make_dataset(folder: Path) -> None:
    """Fit over ``make_dataset(repeat=True)`` with a growing cache, then stop by ``EarlyStopping``."""
    from cachetool.loaders.tensorflow import make_dataset

    fill(folder / "cache", format="tfrecord")
    made = model()

    def pairs(batch: dict[str, Any]) -> Any:
        return {**batch, "pass": batch["id"], "snapshot": batch["id"]}, batch["y"]

    def batches() -> Any:
        return make_dataset(folder / "cache", batch_size=BATCH, fields=FIXED, repeat=True).map(pairs)

    grows = Watch(growing(folder, "tfrecord"))
    made.fit(batches(), steps_per_epoch=10, epochs=6, callbacks=[grows], verbose=0)
    SEEN.extra["ids"] = [one for row in SEEN.records["record"].values() for one in row["ids"]]
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
    history = made.fit(batches(), steps_per_epoch=15, epochs=9, callbacks=[stop, Watch()], verbose=0)
    SEEN.extra["epochs until it stopped"] = len(history.epoch)


def main(names: str, folder: str) -> None:
    """Run the cases one after another. A failing case leaves its traceback, and no record."""
    global SEEN
    for name in names.split(","):
        keras.utils.set_random_seed(0)
        SEEN = Seen()
        Path(folder, name).mkdir()
        print(f"case {name}", file=sys.stderr, flush=True)
        try:
            CASES[name](Path(folder, name))
        except Exception:  # noqa: BLE001 - the other cases are independent
            traceback.print_exc()
            continue
        for kind, epochs in SEEN.records.items():
            Path(folder, name, f"{kind}-0.json").write_text(json.dumps({"epochs": epochs, **SEEN.extra}))


if __name__ == "__main__":
    main(*sys.argv[1:])
