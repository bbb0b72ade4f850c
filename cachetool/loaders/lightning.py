"""Growth and resume in Lightning's Trainer: a callback for the training loaders, and a data module that brings it.

::

    data = CacheDataModule("data/cache", validation=0.1, batch_size=64, fields=["volume", "label"])
    trainer = Trainer(max_epochs=90)
    trainer.fit(model, datamodule=data)                          # later also: ckpt_path="last"

Lightning asks a loader for its length once and takes so many batches of every epoch, so a cache that grows would be
trained in part. It also restores the state of a loader only from checkpoints of the middle of an epoch. Both
``lightning`` and ``pytorch_lightning`` are supported: import the Trainer before this module where both are installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from cachetool.core.errors import CacheToolError, UsageError, without
from cachetool.core.text import shown
from cachetool.loaders.fixed_epochs import FixedEpochs, require_one_epoch
from cachetool.loaders.loader import BaseLoader, CacheOrPaths
from cachetool.loaders.torch import Loader

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # The two packages have classes of their own: a Trainer of one of them refuses a data module of the other.
    from pytorch_lightning import Callback, LightningDataModule
else:
    try:
        from lightning.pytorch import Callback, LightningDataModule
    except ModuleNotFoundError as error:
        try:
            from pytorch_lightning import Callback, LightningDataModule
        except ModuleNotFoundError:
            raise without("lightning", "lightning", error) from None

__all__ = ["CacheDataModule", "GrowthCallback"]

TrainingLoader: TypeAlias = Loader | FixedEpochs[dict[str, Any]]


class GrowthCallback(Callback):  # type: ignore[misc]
    """Lets Lightning train every epoch whole while the cache grows, and keeps the loaders' state in its checkpoints.

    ::

        with Loader("data/cache", batch_size=64) as loader:
            Trainer(max_epochs=90, callbacks=[GrowthCallback(loader)]).fit(model, loader)

    ``loaders`` are the training loaders: :class:`Loader` or the view of :meth:`Loader.epochs_of`, in the same order in
    every run of a training. Several callbacks in one Trainer need different values of ``name``. The validation loader
    is not given: every validation asks for its length anew. Raises :class:`UsageError` for no loader, and for what is
    none.
    """

    def __init__(self, *loaders: TrainingLoader, name: str | None = None) -> None:
        super().__init__()
        for loader in loaders:
            require_one_epoch(loader)
        if not loaders:
            raise UsageError("no loader was given; give the training loaders: GrowthCallback(loader)")
        self._loaders, self._name = loaders, name
        self._epoch_ended = False

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint."""
        return "GrowthCallback" if self._name is None else self._generate_state_key(name=self._name)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let Lightning set up the data, and so ask for the length, before every epoch."""
        trainer.reload_dataloaders_every_n_epochs = 1  # a plain attribute, which Lightning reads before each epoch
        self._epoch_ended = False  # no checkpoint was loaded in this run

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the lengths of earlier epochs, which no longer decide where this epoch ends."""
        _forget_lengths(self._loaders)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the next validation ask for its length.

        Lightning keeps the length of the sanity check for the first validation, and that of the first validation of an
        epoch for the others of that epoch.
        """
        _forget_lengths(trainer.val_dataloaders)
        # Private, since Lightning has no public way. A Lightning without this attribute keeps the lengths as described.
        validation: Any = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "val_loop", None)
        if hasattr(validation, "_last_val_dl_reload_epoch"):
            validation._last_val_dl_reload_epoch = float("-inf")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loaders. Lightning itself restores them only in the middle of an epoch."""
        return {"loaders": [loader.state_dict() for loader in self._loaders]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let Lightning go on where the loaders do: in the epoch of the checkpoint, or in the next one."""
        self._epoch_ended = _finish_epoch(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the loaders go on where the checkpoint was made, before Lightning asks them for a length.

        Raises :class:`UsageError` for the state of another number of loaders, and what ``load_state_dict`` of the
        loaders raises.
        """
        states = state_dict["loaders"]
        if len(states) != len(self._loaders):
            raise UsageError(f"the checkpoint has the state of {len(states)} loaders, here are {len(self._loaders)}")
        for loader, state in zip(self._loaders, states, strict=True):
            loader.load_state_dict(state)
            if self._epoch_ended:
                _begin_next(loader)


class CacheDataModule(LightningDataModule):  # type: ignore[misc]
    """A data module whose loaders read a cache; it adds the :class:`GrowthCallback` to the Trainer itself.

    ::

        data = CacheDataModule("data/cache", validation=0.1, batch_size=64)
        Trainer(max_epochs=90).fit(model, datamodule=data)

    ``options`` are those of :class:`cachetool.loaders.torch.Loader`. ``validation`` is the part of the samples that is
    held out, as there: the training loader then reads ``split="train"``, the validation loader ``split="validation"``
    in the order of the cache. ``validation_options`` replaces options of the validation loader, such as ``batch_size``
    or ``transform``; with ``{"dataset": "held-out"}`` and without ``validation`` it validates on another dataset.
    With ``steps`` an epoch of the Trainer has so many batches, pass after pass of the cache, as
    :meth:`Loader.epochs_of` says: for learning-rate schedules that count steps.

    Each process makes its loaders when Lightning first asks for them, so every strategy can start its processes; they
    are closed when a fit ends, and the next fit goes on with the next epoch. Raises :class:`UsageError` for options
    that this class sets itself; the other options are checked when the loaders are made.
    """

    def __init__(
        self,
        cache_or_paths: CacheOrPaths,
        *,
        validation: float | str | None = None,
        steps: int | None = None,
        validation_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(validation_options, Mapping | None):
            raise UsageError(f"validation_options={shown(validation_options)} cannot be used: a dict of options")
        if "split" in options or "split" in (validation_options or {}):
            raise UsageError("split= is set by validation=: a part of the samples, as 0.1, is held out from training")
        parts: list[dict[str, Any]] = [{}, {}]
        if validation is not None:
            parts = [{"split": split, "validation": validation} for split in ("train", "validation")]
        self._place, self._steps = cache_or_paths, steps
        self._training_options = {**options, **parts[0]}
        self._validation_options = {**options, "shuffle": False, "drop_last": False}
        self._validation_options.update(validation_options or {}, **parts[1])
        self._training: TrainingLoader | None = None
        self._validation: Loader | None = None
        self._growth: GrowthCallback | None = None
        self._is_parked = False
        if validation is None and validation_options is None:
            # Lightning looks which methods a data module has of its own: without held-out samples not this one, or it
            # would warn about a missing validation_step.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def train_dataloader(self) -> TrainingLoader:
        """Return the training loader, always the same one in a process."""
        if self._training is None:
            loader = Loader(self._place, **self._training_options)
            self._training = loader if self._steps is None else loader.epochs_of(steps=self._steps)
        return self._training

    def val_dataloader(self) -> Loader:
        """Return the validation loader, always the same one in a process."""
        if self._validation is None:
            self._validation = Loader(self._place, **self._validation_options)
        return self._validation

    def test_dataloader(self) -> NoReturn:
        """Raise :class:`UsageError`: a split has no third part."""
        raise UsageError(
            "a CacheDataModule has no samples for tests; give trainer.test() a loader of its own, such as"
            " dataloaders=Loader(cache, dataset='held-out', shuffle=False, batch_size=64)"
        )

    def setup(self, stage: str) -> None:
        """Add the callback to the Trainer of this fit, if it has none of this data module."""
        if stage != "fit":
            return
        loader = self.train_dataloader()
        if self._is_parked:
            _begin_next(loader)
        self._is_parked = False
        if self._growth is None:
            self._growth = GrowthCallback(loader, name="CacheDataModule")
        callbacks = getattr(self.trainer, "callbacks", None)
        if callbacks is not None and self._growth not in callbacks:
            callbacks.insert(0, self._growth)  # Lightning keeps the checkpoint callbacks last

    def teardown(self, stage: str) -> None:
        """Close the loaders. They go on in the next fit, validation or test."""
        if self._training is not None and not self._is_parked:
            _park(self._training)
            self._is_parked = stage == "fit"
        if self._validation is not None:
            self._validation.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the loaders, since Lightning calls no ``teardown`` after an exception."""
        self.teardown("fit")

    def __str__(self) -> str:
        # Lightning's would read an epoch of every loader to count its data sets.
        return f"CacheDataModule({str(self._place)!r}, batch_size={self._training_options.get('batch_size')})"


def _forget_lengths(loaders: Any) -> None:
    """Let the loaders print no line about an old length.

    A run that is stopped, or a sanity check, may leave an epoch exactly at the length of an earlier one.
    """
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        loader = getattr(loader, "loader", loader)  # of a view of epochs_of()
        if isinstance(loader, BaseLoader):
            loader._lengths.forget()


def _park(loader: TrainingLoader) -> None:
    """Close the loader so that its state can still be saved: ``trainer.save_checkpoint()`` comes after ``fit()``."""
    state = None
    with contextlib.suppress(CacheToolError):  # feeders that failed have no state
        state = loader.state_dict()
    loader.close()
    if state is not None:
        loader.load_state_dict(state)


def _begin_next(loader: TrainingLoader) -> None:
    """Let a loader whose epoch was left begin another one, as it does in a process that goes on.

    With the rest of the old epoch Lightning would end its new epoch early, and leave out the validation.
    """
    state = loader.state_dict()
    if isinstance(loader, FixedEpochs):
        loader.load_state_dict({**state, "at": 0})
    elif state["resume"]:
        loader.epoch = loader.epoch + 1


def _finish_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Change the counters of a checkpoint so that its last epoch has ended exactly if its last batch was trained;
    returns whether the epoch has ended.

    Lightning takes some checkpoints from behind the last batch for unfinished epochs: those of the last validation of
    an epoch, of ``every_n_train_steps``, and with ``max_steps`` also those of ``on_train_epoch_end``. It compares their
    number of batches with the length of the next epoch. When the cache has grown meanwhile, it takes the difference
    from the next pass of the loader and leaves that pass. An epoch that was stopped early it takes for finished. It
    then counts the rest of that epoch as another one, without its validation and without a step of its schedules.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, batches = loop.get("epoch_progress"), loop.get("epoch_loop.batch_progress")
    if not epochs or not batches or epochs["current"]["started"] < epochs["current"]["ready"]:
        return False
    is_processed = epochs["current"]["processed"] == epochs["current"]["ready"]
    if not batches["is_last_batch"]:
        if is_processed and batches["current"]["ready"]:
            for counts in (epochs["current"], epochs["total"]):
                counts.update(processed=counts["ready"] - 1, completed=counts["ready"] - 1)
        return False
    if not is_processed:
        # Lightning counts a step for its loggers only after the checkpoint of that step.
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for counts in (epochs["current"], epochs["total"], batches["total"]):
        counts.update(dict.fromkeys(counts, counts["ready"]))
    batches.update(current=dict.fromkeys(batches["current"], 0), is_last_batch=False)
    loop["state_dict"].pop("combined_loader", None)  # this callback has the states of the loaders
    return True
