"""Keras 3 with any backend: batches of a loader as a data set for ``fit``, and the loader's state in a file.

::

    with Loader("data/cache", batch_size=64) as loader:                     # cachetool.loaders.numpy
        dataset = LoaderDataset(loader.epochs_of(steps=100), "volume", "label")
        saved = LoaderStateCallback(dataset, "run/loader.json")
        model.fit(dataset, epochs=90, callbacks=[saved])                    # TensorFlow, JAX and torch

Keras asks for the length once and takes so many batches of every epoch, so training wants epochs of a fixed number of
steps, which go on through pass after pass of the cache. Validation asks for the length anew each time, so it takes a
:class:`Loader` itself.

Keras asks for batches that it does not train: TensorFlow's backend reads two for their shapes and later reads ahead in
a thread, the others build the model with one or two. A data set hands those out again::

    loader -- one at a time --> handed -- trained, or more than were asked for in vain --> forgotten
                                  |  ^
             an epoch begins anew |  | before any new one
                                  v  |
                                 again
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cachetool.core.errors import UsageError, without
from cachetool.core.units import parse_whole
from cachetool.loaders.epoch import Epoch
from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.loader import BaseLoader
from cachetool.proc.folders import make_missing, replacing

try:
    import keras
except ModuleNotFoundError as error:
    raise without("keras", "keras", error) from None

__all__ = ["LoaderDataset", "LoaderStateCallback"]

Names: TypeAlias = str | list[str] | dict[str, str]
"""A field; or fields by their place; or by the name of the model's input or output."""

_IN_VAIN = 2
"""Batches that Keras takes at most without training them: two for TensorFlow's signature, one to build the model, and
on a GPU JAX fetches another one meanwhile."""


class _Item(NamedTuple):
    """A batch that was fetched."""

    number: int
    """How many came from the loader before it."""
    batch: tuple[Any, ...]


class LoaderDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of a loader for ``fit``, ``evaluate`` and ``predict``.

    ::

        train = LoaderDataset(loader.epochs_of(steps=100), {"image": "volume"}, "label")
        model.fit(train, epochs=90, validation_data=LoaderDataset(validation, {"image": "volume"}, "label"))

    ``loader`` is a :class:`cachetool.loaders.numpy.Loader`; for training it is the view ``loader.epochs_of(steps=N)``.
    ``inputs``, ``targets`` and ``sample_weights`` name fields: one field, a list of fields, or a dict from the names of
    the model's inputs or outputs to fields. Other fields of a batch are left out. Keras takes only numbers of one
    shape: pad ragged fields, and turn text into numbers, with the loader's ``transform=``.

    Keras looks at the first batches before it trains; the data set hands those batches out again, so none is lost. When
    training stops in mid-epoch, TensorFlow's backend has read ahead. With a :class:`LoaderStateCallback` the batches
    that were not trained come first in the next ``fit``. Without the callback they are lost, and a stop after one or
    two batches repeats these.

    Raises :class:`UsageError` for what is no loader, for epochs of fewer than three steps, for names of another type,
    and with the first batch for a field that is not there, is text, dates or ragged.
    """

    def __init__(
        self,
        loader: BaseLoader[dict[str, Any]] | FixedEpochs[dict[str, Any]],
        inputs: Names,
        targets: Names | None = None,
        *,
        sample_weights: Names | None = None,
    ) -> None:
        super().__init__()  # one thread: the order of the batches is the loader's
        self._steps = len(loader) if isinstance(loader, FixedEpochs) else None
        loader = loader.loader if isinstance(loader, FixedEpochs) else loader
        if not isinstance(loader, BaseLoader):
            raise UsageError(f"{loader!r} is no loader of cachetool; give the Loader, or loader.epochs_of(steps=N)")
        if self._steps is not None and self._steps <= _IN_VAIN:  # building the model would look like an epoch
            raise UsageError(f"epochs of {self._steps} steps are too short for Keras; give at least {_IN_VAIN + 1}")
        self._loader = loader
        self._names = tuple(
            _parsed(what, names)
            for what, names in (("inputs", inputs), ("targets", targets), ("sample_weights", sample_weights))
        )
        self._lock = threading.RLock()  # TensorFlow asks for batches in threads of its own
        self._pass: Epoch[dict[str, Any]] | None = None
        self._fetched = 0
        """Batches that came from the loader."""
        self._handed: deque[_Item] = deque()
        """Batches handed out in this epoch that may not have been trained."""
        self._queued: deque[_Item] = deque()
        """Batches that are handed out before any new one."""
        self._states: dict[int, dict[str, Any]] = {}
        """State before a batch of a pass that is over, for batches in ``_handed`` and ``_queued``."""
        self._kept = 0
        """Length that Keras counts on."""
        self._under_way = False
        """True while Keras reads an epoch."""
        self._count = 0
        """Batches handed out in this epoch."""
        self._trained: int | None = None
        """Batches of this epoch that were trained; None where no callback counts them."""

    # -- what Keras calls ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of an epoch: N of ``epochs_of(steps=N)``; of a :class:`Loader`, those of its next pass.

        Within an epoch no more than were told before it, because Keras takes no more.
        """
        with self._lock:
            if self._steps is not None:
                self._kept = self._steps
            elif not self._under_way:
                if self._pass is None:
                    self._begin()
                self._kept = len(self._loader)
            elif not self._count:
                if self._pass is None:
                    self._begin()
                return min(self._kept, len(self._queued) + self._left())
            return self._kept

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return the next batch of the epoch that Keras reads; ``fit`` shuffles the numbers, so they say nothing.

        Outside of one, return the first or second batch that the next epoch will have.
        """
        with self._lock:
            if not self._under_way:
                if not 0 <= index < _IN_VAIN:
                    raise UsageError("a LoaderDataset gives its batches to fit(), evaluate() and predict() alone")
                while len(self._queued) <= index:
                    self._queued.append(self._fetch())
                return self._queued[index].batch
            item = self._queued.popleft() if self._queued else self._fetch()
            self._count += 1
            self._handed.append(item)
            if self._trained is None and self._count > _IN_VAIN:
                self._forget()
            return item.batch

    def on_epoch_begin(self) -> None:
        """Begin an epoch; called by Keras."""
        with self._lock:
            self._end()
            self._under_way, self._trained = True, None if self._trained is None else 0

    def on_epoch_end(self) -> None:
        """End the epoch; called by Keras, also after it built the model with a first batch."""
        with self._lock:
            self._end()

    # -- the callback --------------------------------------------------------------------------------------------------

    def _count_trained(self, counts: bool) -> None:
        """Keep every batch until the callback says that it was trained, or stop doing so."""
        with self._lock:
            self._end()
            self._trained = 0 if counts else None

    def _confirm(self, trained: int) -> None:
        """So many batches of this epoch were trained. Takes no lock, because a fetch that waits for samples has it."""
        while self._trained is not None and self._trained < trained:
            if not self._handed:
                raise UsageError("LoaderStateCallback was given another data set than fit() was")
            self._states.pop(self._handed.popleft().number, None)
            self._trained += 1

    def _state(self) -> dict[str, Any]:
        """State of the loader before the first batch that was not trained."""
        with self._lock:
            waiting = [*self._handed, *self._queued]
            if not waiting:
                return self._loader.state_dict()
            first = waiting[0].number
            return self._states.get(first) or self._loader.state_behind(self._fetched - first)

    def _load(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._loader.load_state_dict(state)
            self._pass = None
            self._queued.clear()
            self._forget()

    # -- batches -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The epoch is over: batches that were not trained come first in the next one."""
        if not self._under_way:
            return
        in_vain = self._count <= _IN_VAIN and self._count < self._kept
        if self._trained is not None or in_vain:
            self._queued.extendleft(reversed(self._handed))
            self._handed.clear()
            waiting = {item.number for item in self._queued}
            self._states = {number: state for number, state in self._states.items() if number in waiting}
        else:
            self._forget()
        self._under_way, self._count = False, 0
        if self._steps is None and not self._queued:
            self._pass = None  # the next epoch begins a pass

    def _forget(self) -> None:
        self._handed.clear()
        self._states.clear()

    def _begin(self) -> None:
        """Begin a pass, and note the states of batches of the one before, which the loader then no longer knows."""
        for item in [*self._handed, *self._queued]:  # a copy, because the callback removes some meanwhile
            if item.number not in self._states:
                self._states[item.number] = self._loader.state_behind(self._fetched - item.number)
        self._pass = self._loader.begin()

    def _left(self) -> int:
        assert self._pass is not None
        return len(self._pass)

    def _fetch(self) -> _Item:
        for _ in range(3):  # a pass may be over, and of the next one, which was resumed, nothing left
            if self._pass is None:
                self._begin()
                assert self._pass is not None
            batch = next(self._pass, None)
            if batch is not None:
                self._fetched += 1
                return _Item(self._fetched - 1, self._picked(batch))
            if self._steps is None:
                raise UsageError("the loader has no more batches in this pass; for training give loader.epochs_of()")
            self._pass = None
        raise UsageError(f"an epoch of {self._steps} steps cannot be filled: the loader gives no batch")

    def _picked(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        inputs, targets, weights = (_fields(names, batch) for names in self._names)
        if weights is not None:
            return inputs, targets, weights
        return (inputs,) if targets is None else (inputs, targets)


class LoaderStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the state of a data set's loader in a file, and loads it when training begins anew.

    ::

        model.fit(dataset, epochs=90, callbacks=[keras.callbacks.BackupAndRestore("run"),
                                                 LoaderStateCallback(dataset, "run-loader.json")])

    ``dataset`` is the training data of ``fit``, over ``loader.epochs_of(steps=N)``. ``path`` is written at the end of
    each epoch, or with ``save_freq=n`` after every n batches and when ``fit`` ends, as JSON that
    ``Loader.load_state_dict`` takes too. If the file is there when this callback's first ``fit`` begins, training goes
    on behind the last batch that was trained before it was written, also where Keras had read ahead. Every epoch has N
    steps, also that one. Remove the file to begin anew. Save the model at the same times, with callbacks that stand
    before this one.

    Raises :class:`UsageError` for a data set without a fixed length, for a ``save_freq`` below 1, when ``fit`` begins
    with another length (``steps_per_epoch=``) and for a file that holds no such state.
    """

    def __init__(self, dataset: LoaderDataset, path: str | Path, *, save_freq: str | int = "epoch") -> None:
        super().__init__()
        if not isinstance(dataset, LoaderDataset):
            raise UsageError(f"{dataset!r} is no LoaderDataset; give the one that fit() is given")
        if dataset._steps is None:
            raise UsageError("the data set has no fixed length; make it of loader.epochs_of(steps=N)")
        self._every = None if save_freq == "epoch" else parse_whole(save_freq, what="save_freq=", least=1)
        self._dataset, self._path, self._steps = dataset, Path(path).expanduser(), dataset._steps
        self._loaded = False
        self._trained = self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Load the state, the first time."""
        if self.params.get("steps") != self._steps:
            raise UsageError(
                f"fit() counts {self.params.get('steps')} steps in an epoch, the data set {self._steps}; leave out"
                " steps_per_epoch= and give loader.epochs_of(steps=N)"
            )
        make_missing(self._path.parent)
        self._dataset._count_trained(True)
        if not self._loaded and self._path.exists():
            self._dataset._load(self._read())
        self._loaded, self._since = True, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from the first batch."""
        self._trained = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note that batches were trained; save if it is time."""
        trained = min(batch + 1, self._steps)  # with steps_per_execution= the last ones may be fewer
        self._dataset._confirm(trained)
        self._since += trained - self._trained
        self._trained = trained
        if self._every is not None and self._since >= self._every:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if that is done at the end of epochs."""
        if self._every is None:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save, since the model is often saved behind ``fit``; let the next one begin with batches that were fetched,
        and not trained."""
        if self._since:
            self._save()
        self._dataset._count_trained(False)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if isinstance(state := json.loads(self._path.read_bytes()), dict):
                return state
        raise UsageError(f"{self._path} holds no state of a loader; remove it, or give another path")

    def _save(self) -> None:
        self._since = 0
        with replacing(self._path) as file:
            file.write(json.dumps(self._dataset._state()).encode())


def _parsed(what: str, names: Any) -> Names | None:
    values = [names] if isinstance(names, str) else list(names.values() if isinstance(names, dict) else names or ())
    if names is None and what != "inputs":
        return None
    if not values or not isinstance(names, str | list | tuple | dict) or not all(isinstance(n, str) for n in values):
        raise UsageError(f"{what}={names!r} names no fields; give a name, a list of names, or a dict of them")
    return list(names) if isinstance(names, tuple) else names


def _fields(names: Names | None, batch: Mapping[str, Any]) -> Any:
    """The fields as Keras takes them. A list of them is a tuple, since TensorFlow takes a list for one tensor."""
    if names is None or isinstance(names, str):
        return None if names is None else _field(names, batch)
    if isinstance(names, dict):
        return {key: _field(name, batch) for key, name in names.items()}
    return tuple(_field(name, batch) for name in names)


def _field(name: str, batch: Mapping[str, Any]) -> Any:
    if name not in batch:
        raise UsageError(f"there is no field {name!r}; a batch has {', '.join(batch)}")
    value = batch[name]
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):  # a list of text, a Ragged, a TensorList
        what = "text" if isinstance(value, list) else "ragged"
        raise UsageError(f"field {name!r} is {what}, Keras takes numbers of one shape: make some with transform=")
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":
        raise UsageError(f"field {name!r} is {value.dtype}, Keras takes numbers: make some with transform=")
    # JAX takes the memory of a NumPy array for its own where it can, and the loader would fill it again.
    return np.array(value) if keras.backend.backend() == "jax" else value
