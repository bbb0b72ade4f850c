"""Keras 3 with any backend: the batches of a loader as a data set for ``fit``, and the state of the loader in a file.

::

    with Loader("data/cache", batch_size=64) as loader:                     # cachetool.loaders.numpy
        dataset = LoaderDataset(loader.epochs_of(steps=100), "volume", "label")
        saved = LoaderStateCallback(dataset, "run/loader.json")
        model.fit(dataset, epochs=90, callbacks=[saved])                    # TensorFlow, JAX and torch

Keras asks for the length once and takes that many batches of every epoch. So training needs epochs of a fixed number of
steps, which continue through pass after pass of the cache. Validation asks for the length each time, so it takes a
:class:`Loader` itself.

Keras asks for batches that it does not train. TensorFlow's backend reads two for their shapes and later reads ahead in
a thread; the other backends build the model with one or two. A data set hands those batches out again::

    loader -- one at a time --> handed -- trained, or more than were asked for in vain --> forgotten
                                  |  ^
          an epoch begins again   |  | before any new batch
                                  v  |
                                 queued
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
from cachetool.loaders.fixed_epochs import FixedEpochs, wait_metrics
from cachetool.loaders.loader import BaseLoader
from cachetool.proc.folders import make_missing, replacing

try:
    import keras
except ModuleNotFoundError as error:
    raise without("keras", "keras", error) from None

__all__ = ["LoaderDataset", "LoaderStateCallback"]

Names: TypeAlias = str | list[str] | dict[str, str]
"""Type of the fields of inputs or targets: one field, a list of fields by position, or a dict by the model's names."""

_IN_VAIN = 2
"""Most batches that Keras takes without training them: two for TensorFlow's signature; one to build the model, and on a
GPU JAX fetches another one meanwhile."""


class _Item(NamedTuple):
    """A batch that was fetched from the loader."""

    number: int
    """Number of batches that came from the loader before this one."""
    batch: tuple[Any, ...]


class LoaderDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """A data set of Keras (``PyDataset``) over the batches of a loader, for ``fit``, ``evaluate`` and ``predict``.

    An element is a tuple ``(inputs,)``, ``(inputs, targets)`` or ``(inputs, targets, sample_weights)``. Fields that are
    not named are left out. Keras takes only numbers of one shape: pad ragged fields, and turn text into numbers, with
    the loader's ``transform``. Keras looks at the first batches before it trains; the data set hands those batches out
    again, so none is lost. When training stops in the middle of an epoch, TensorFlow's backend has read ahead. With a
    :class:`LoaderStateCallback` the batches that were not trained come first in the next ``fit``; without the callback
    they are lost.

    Args:
        loader: A :class:`cachetool.loaders.numpy.Loader` for evaluation; for training the view
            ``loader.epochs_of(steps=N)``, with N of 3 or more.
        inputs: The fields of the model's inputs: a name, a list of names, or a dict from the names of the inputs to
            fields.
        targets: The fields of the targets, in the same forms. Default: no targets.
        sample_weights: The fields of the sample weights, in the same forms. Default: none.

    Raises:
        UsageError: ``loader`` is not a loader; an epoch has fewer than three steps; names have another type; or, with
            the first batch: a field does not exist, or is text, dates or ragged.

    Example:
        >>> from cachetool.loaders.keras import LoaderDataset
        >>> from cachetool.loaders.numpy import Loader
        >>> with Loader("data/cache", batch_size=8) as loader:
        ...     dataset = LoaderDataset(loader.epochs_of(steps=4), "volume", "label")
        ...     history = model.fit(dataset, epochs=2, verbose=0)
    """

    def __init__(
        self,
        loader: BaseLoader[dict[str, Any]] | FixedEpochs[dict[str, Any]],
        inputs: Names,
        targets: Names | None = None,
        *,
        sample_weights: Names | None = None,
    ) -> None:
        # Without arguments Keras asks in one thread. With several workers the batches would arrive in another order.
        super().__init__()
        self._steps = len(loader) if isinstance(loader, FixedEpochs) else None
        loader = loader.loader if isinstance(loader, FixedEpochs) else loader
        if not isinstance(loader, BaseLoader):
            raise UsageError(f"{loader!r} is not a loader of cachetool; use a Loader or loader.epochs_of(steps=N)")
        # Such a short epoch cannot be told from the batches that Keras takes to build the model.
        if self._steps is not None and self._steps <= _IN_VAIN:
            raise UsageError(
                f"epochs of {self._steps} steps are too short for Keras; use at least {_IN_VAIN + 1} steps"
            )
        self._loader = loader
        self._names = tuple(
            _parsed(what, names)
            for what, names in (("inputs", inputs), ("targets", targets), ("sample_weights", sample_weights))
        )
        # TensorFlow asks for batches in threads of its own, while the callback runs in the training thread.
        self._lock = threading.RLock()
        self._pass: Epoch[dict[str, Any]] | None = None
        self._fetched = 0
        """Number of batches that came from the loader."""
        self._handed: deque[_Item] = deque()
        """Batches handed out in this epoch that may not have been trained."""
        self._queued: deque[_Item] = deque()
        """Batches that are handed out before any new one."""
        self._states: dict[int, dict[str, Any]] = {}
        """State before a batch of a pass that is over, by number, for batches in ``_handed`` and ``_queued``."""
        self._kept = 0
        """Length that Keras relies on."""
        self._under_way = False
        """True while Keras reads an epoch."""
        self._count = 0
        """Number of batches handed out in this epoch."""
        self._trained: int | None = None
        """Number of batches of this epoch that were trained; None if no callback counts them."""

    # -- what Keras calls ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of an epoch: N of ``epochs_of(steps=N)``; of a loader, those of its next pass.

        Within an epoch the length is at most the length before it, because Keras takes no more batches.
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
        """Return the next batch of the epoch that Keras reads; the index says nothing, because ``fit`` shuffles the
        indices.

        Outside an epoch, return the first or second batch that the next epoch will have.
        """
        with self._lock:
            if not self._under_way:
                if not 0 <= index < _IN_VAIN:
                    raise UsageError("only fit(), evaluate() and predict() can read the batches of a LoaderDataset")
                while len(self._queued) <= index:
                    self._queued.append(self._fetch())
                return self._queued[index].batch
            item = self._queued.popleft() if self._queued else self._fetch()
            self._count += 1
            self._handed.append(item)
            # Without a callback nobody says which batches were trained. After more batches than Keras takes in vain
            # this is training, and keeping all batches would fill the memory.
            if self._trained is None and self._count > _IN_VAIN:
                self._forget()
            return item.batch

    def on_epoch_begin(self) -> None:
        """Begin an epoch; Keras calls this method."""
        with self._lock:
            self._end()
            self._under_way, self._trained = True, None if self._trained is None else 0

    def on_epoch_end(self) -> None:
        """End the epoch; Keras calls this method, also after it built the model with a first batch."""
        with self._lock:
            self._end()

    # -- the callback --------------------------------------------------------------------------------------------------

    def _count_trained(self, counts: bool) -> None:
        """Start or stop keeping each batch until the callback says that it was trained."""
        with self._lock:
            self._end()
            self._trained = 0 if counts else None

    def _confirm(self, trained: int) -> None:
        """Note that the first ``trained`` batches of this epoch were trained."""
        # This takes no lock: a thread of TensorFlow may hold it while it waits for samples, and training would wait
        # too.
        while self._trained is not None and self._trained < trained:
            if not self._handed:
                raise UsageError(
                    "LoaderStateCallback and fit() have different data sets; pass the same LoaderDataset to both"
                )
            self._states.pop(self._handed.popleft().number, None)
            self._trained += 1

    def _state(self) -> dict[str, Any]:
        """Return the state of the loader before the first batch that was not trained."""
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
        """End the epoch; batches that were not trained come first in the next one."""
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
            self._pass = None

    def _forget(self) -> None:
        self._handed.clear()
        self._states.clear()

    def _begin(self) -> None:
        """Begin a pass."""
        # The states of batches of the old pass are stored first, because the loader forgets that pass when it begins
        # another. The list is a copy, because _confirm() removes items in another thread meanwhile.
        for item in [*self._handed, *self._queued]:
            if item.number not in self._states:
                self._states[item.number] = self._loader.state_behind(self._fetched - item.number)
        self._pass = self._loader.begin()

    def _left(self) -> int:
        assert self._pass is not None
        return len(self._pass)

    def _fetch(self) -> _Item:
        # Three tries: the pass may be over, and if the next one was resumed at its end, nothing is left of it either.
        for _ in range(3):
            if self._pass is None:
                self._begin()
                assert self._pass is not None
            batch = next(self._pass, None)
            if batch is not None:
                self._fetched += 1
                return _Item(self._fetched - 1, self._picked(batch))
            if self._steps is None:
                raise UsageError(
                    "the loader has no more batches in this pass; for training use loader.epochs_of(steps=N)"
                )
            self._pass = None
        raise UsageError(f"an epoch of {self._steps} steps cannot be filled: the loader has no batches")

    def _picked(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        inputs, targets, weights = (_fields(names, batch) for names in self._names)
        if weights is not None:
            return inputs, targets, weights
        return (inputs,) if targets is None else (inputs, targets)


class LoaderStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of Keras that saves the state of a loader in a file, and loads it on resume.

    If the file exists when the first ``fit`` of this callback begins, training continues after the last batch that was
    trained before the file was written, also where Keras had read ahead. Every epoch has N steps, also the resumed one.
    Remove the file to begin anew. Save the model at the same times, with callbacks that stand before this one.

    Args:
        dataset: The training data of ``fit``: a :class:`LoaderDataset` over ``loader.epochs_of(steps=N)``.
        path: The file. It is JSON, which ``Loader.load_state_dict`` takes too.
        save_freq: ``"epoch"``: write the file at the end of each epoch. A number n: write it after every n batches and
            when ``fit`` ends. Default: ``"epoch"``.

    Raises:
        UsageError: The data set has no fixed length; ``save_freq`` is below 1; or, when ``fit`` begins: it counts
            another number of steps (``steps_per_epoch``), or the file holds no such state.

    Example:
        >>> from cachetool.loaders.keras import LoaderDataset, LoaderStateCallback
        >>> from cachetool.loaders.numpy import Loader
        >>> with Loader("data/cache", batch_size=8) as loader:
        ...     dataset = LoaderDataset(loader.epochs_of(steps=4), "volume", "label")
        ...     saved = LoaderStateCallback(dataset, "run/loader.json")
        ...     history = model.fit(dataset, epochs=2, callbacks=[saved], verbose=0)
    """

    def __init__(self, dataset: LoaderDataset, path: str | Path, *, save_freq: str | int = "epoch") -> None:
        super().__init__()
        if not isinstance(dataset, LoaderDataset):
            raise UsageError(f"{dataset!r} is not a LoaderDataset; pass the same LoaderDataset as to fit()")
        if dataset._steps is None:
            raise UsageError("the data set has no fixed length; create it from loader.epochs_of(steps=N)")
        self._every = None if save_freq == "epoch" else parse_whole(save_freq, what="save_freq=", least=1)
        self._dataset, self._path, self._steps = dataset, Path(path).expanduser(), dataset._steps
        self._loaded = False
        self._trained = self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Load the state in the first ``fit``; Keras calls this method.

        Args:
            logs: Figures of Keras; not used.

        Raises:
            UsageError: ``fit`` counts another number of steps, or the file holds no state of a loader.
        """
        if self.params.get("steps") != self._steps:
            raise UsageError(
                f"an epoch of fit() has {self.params.get('steps')} steps, but an epoch of the data set {self._steps};"
                " leave out steps_per_epoch= and use loader.epochs_of(steps=N)"
            )
        make_missing(self._path.parent)
        self._dataset._count_trained(True)
        if not self._loaded and self._path.exists():
            self._dataset._load(self._read())
        self._loaded, self._since = True, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from the first batch; Keras calls this method.

        Args:
            epoch: Number of the epoch; not used.
            logs: Figures of Keras; not used.
        """
        self._trained = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note that batches were trained, and save if it is time; Keras calls this method.

        Args:
            batch: Number of the last batch that was trained, from 0.
            logs: Figures of Keras; not used.
        """
        # With steps_per_execution= Keras counts whole groups, of which the last may have fewer batches.
        trained = min(batch + 1, self._steps)
        self._dataset._confirm(trained)
        self._since += trained - self._trained
        self._trained = trained
        if self._every is not None and self._since >= self._every:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the state if ``save_freq`` is ``"epoch"``, and add the waits for data to the figures; Keras calls this
        method.

        Args:
            epoch: Number of the epoch; not used.
            logs: Figures of Keras, which get those of ``loader.report().metrics`` for ``History`` and for the callbacks
                that stand behind this one.
        """
        if logs is not None:
            logs.update(wait_metrics(self._dataset._loader))
        if self._every is None:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save the state, because the model is often saved after ``fit``; Keras calls this method.

        The next ``fit`` begins with batches that were fetched and not trained.

        Args:
            logs: Figures of Keras; not used.
        """
        if self._since:
            self._save()
        self._dataset._count_trained(False)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if isinstance(state := json.loads(self._path.read_bytes()), dict):
                return state
        raise UsageError(f"{self._path} holds no state of a loader; remove the file or choose another path")

    def _save(self) -> None:
        self._since = 0
        # Written to a new file that is renamed, so that a training that is killed here leaves the old state or the new
        # one.
        with replacing(self._path) as file:
            file.write(json.dumps(self._dataset._state()).encode())


def _parsed(what: str, names: Any) -> Names | None:
    values = [names] if isinstance(names, str) else list(names.values() if isinstance(names, dict) else names or ())
    if names is None and what != "inputs":
        return None
    if not values or not isinstance(names, str | list | tuple | dict) or not all(isinstance(n, str) for n in values):
        raise UsageError(f"{what}={names!r} does not name fields; use a field name, a list or a dict of field names")
    return list(names) if isinstance(names, tuple) else names


def _fields(names: Names | None, batch: Mapping[str, Any]) -> Any:
    """Return the fields in the form that Keras takes."""
    if names is None or isinstance(names, str):
        return None if names is None else _field(names, batch)
    if isinstance(names, dict):
        return {key: _field(name, batch) for key, name in names.items()}
    # A tuple and not a list, because TensorFlow converts a list to one tensor.
    return tuple(_field(name, batch) for name in names)


def _field(name: str, batch: Mapping[str, Any]) -> Any:
    if name not in batch:
        raise UsageError(f"unknown field {name!r}; choose one of {', '.join(batch)}")
    value = batch[name]
    # Lists of text, Ragged and TensorList lack one of the two; Keras would fail on them without the name of the field.
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        what = "text" if isinstance(value, list) else "ragged"
        raise UsageError(f"field {name!r} is {what}, but Keras needs numbers of one shape; convert it with transform=")
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":
        raise UsageError(f"field {name!r} is {value.dtype}, but Keras needs numbers; convert it with transform=")
    # JAX uses the memory of a NumPy array for its own array if it can, and the feeders would fill that memory again.
    return np.array(value) if keras.backend.backend() == "jax" else value
