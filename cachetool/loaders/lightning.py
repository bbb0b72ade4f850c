"""Growth and resume in Lightning's Trainer: a callback for the training loaders, and a data module that adds it.

::

    data = CacheDataModule("data/cache", validation=0.1, batch_size=64, fields=["volume", "label"])
    trainer = Trainer(max_epochs=90)
    trainer.fit(model, datamodule=data)                          # later also: ckpt_path="last"

Lightning asks a loader for its length once and takes that many batches of every epoch, so it would train only a part of
a growing cache. It restores the state of a loader only from checkpoints in the middle of an epoch. Both ``lightning``
and ``pytorch_lightning`` are supported; if both are installed, import the Trainer before this module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from cachetool.core.errors import CacheToolError, UsageError, without
from cachetool.core.text import shown
from cachetool.loaders.fixed_epochs import FixedEpochs, require_one_epoch, wait_metrics
from cachetool.loaders.loader import BaseLoader, CacheOrPaths
from cachetool.loaders.torch import Loader

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # Each of the two packages has classes of its own, and a Trainer of one refuses a data module of the other. So the
    # package that the user has imported decides.
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
    """A callback of Lightning's Trainer that trains every epoch whole while the cache grows.

    The callback lets Lightning ask for the length before every epoch, and keeps the state of the loaders in the
    checkpoints of the Trainer. Do not give it the validation loader: every validation asks for its length anyway.

    Args:
        *loaders: The training loaders: :class:`cachetool.loaders.torch.Loader` or its ``epochs_of(steps=N)``, in the
            same order in every run of a training. At least one.
        name: Name of the state in a checkpoint. Needed where one Trainer has several of these callbacks. Default:
            ``GrowthCallback``.

    Raises:
        UsageError: No loader was given, an argument is not a loader, or a loader has ``concurrent=True``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from cachetool.loaders.lightning import GrowthCallback
        >>> from cachetool.loaders.torch import Loader
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     trainer = Trainer(max_epochs=2, callbacks=[GrowthCallback(loader)], accelerator="cpu", logger=False)
        ...     trainer.fit(model, loader)
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
        """The name of this callback's state in a checkpoint."""
        return "GrowthCallback" if self._name is None else self._generate_state_key(name=self._name)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let Lightning ask for the length before every epoch; Lightning calls this method.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        # A plain attribute of the trainer, which Lightning reads before each epoch, so it can be set after the trainer
        # was made.
        trainer.reload_dataloaders_every_n_epochs = 1
        self._epoch_ended = False  # no checkpoint was loaded in this run

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the lengths of earlier epochs, which do not decide where this epoch ends; Lightning calls this method.

        Args:
            trainer: The Trainer.
            pl_module: The model.
        """
        _forget_lengths(self._loaders)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log how long the epoch waited for data, and for what; Lightning calls this method.

        The figures are those of ``loader.report().metrics``. Of several loaders those of the first are logged.

        Args:
            trainer: The Trainer.
            pl_module: The model, whose ``log_dict`` is called.
        """
        pl_module.log_dict(wait_metrics(self._loaders[0]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the next validation ask for its length; Lightning calls this method.

        Lightning keeps the length of the sanity check for the first validation, and the length of the first validation
        of an epoch for the others of that epoch.

        Args:
            trainer: The Trainer.
            pl_module: The model.
        """
        _forget_lengths(trainer.val_dataloaders)
        # The attribute is private, because Lightning has no public way. A Lightning without it keeps the old lengths,
        # so a validation may then miss new samples, but nothing fails.
        validation: Any = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "val_loop", None)
        if hasattr(validation, "_last_val_dl_reload_epoch"):
            validation._last_val_dl_reload_epoch = float("-inf")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loaders for a checkpoint; Lightning itself restores them only in the middle of an
        epoch.

        Returns:
            A dict of plain values.

        Raises:
            UsageError: A loader has no state; see ``Loader.state_dict()``.
        """
        return {"loaders": [loader.state_dict() for loader in self._loaders]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let Lightning continue where the loaders do: in the epoch of the checkpoint, or in the next one.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            checkpoint: The checkpoint, whose counters are corrected.
        """
        self._epoch_ended = _finish_epoch(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the loaders continue where the checkpoint was made, before Lightning asks them for a length.

        Args:
            state_dict: A dict from :meth:`state_dict`.

        Raises:
            UsageError: The state is that of another number of loaders, or ``Loader.load_state_dict()`` refuses it.
        """
        states = state_dict["loaders"]
        if len(states) != len(self._loaders):
            raise UsageError(
                f"the checkpoint has the state of {len(states)} loaders, this GrowthCallback has {len(self._loaders)}"
            )
        for loader, state in zip(self._loaders, states, strict=True):
            loader.load_state_dict(state)
            if self._epoch_ended:
                _begin_next(loader)


class CacheDataModule(LightningDataModule):  # type: ignore[misc]
    """A data module of Lightning whose loaders read a cache.

    The data module adds a :class:`GrowthCallback` to the Trainer. Each process makes its loaders when Lightning first
    asks for them, so every strategy can start its processes. The loaders are closed when a fit ends; the next fit
    begins the next epoch.

    Args:
        cache_or_paths: The samples, as for :class:`cachetool.loaders.torch.Loader`.
        validation: Share of the samples that is held out for validation, between 0 and 1 or text such as ``"10%"``. The
            training loader then has ``split="train"``, the validation loader ``split="validation"`` and the order of
            the cache. Default: no validation.
        steps: Number of batches in an epoch of the Trainer, pass after pass of the cache, as
            ``loader.epochs_of(steps=N)``; for learning-rate schedules that count steps. Default: an epoch is one pass.
        validation_options: Options of the validation loader in place of those in ``options``, such as ``batch_size`` or
            ``transform``. With ``{"dataset": "held-out"}`` and without ``validation`` the module validates on another
            dataset. Default: none.
        **options: Keyword arguments of :class:`cachetool.loaders.torch.Loader` for both loaders; ``batch_size`` is
            required, ``split`` is not allowed. They are checked when the loaders are made.

    Raises:
        UsageError: ``split`` is given, or ``validation_options`` is not a dict.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from cachetool.loaders.lightning import CacheDataModule
        >>> data = CacheDataModule("data/cache", validation=0.2, batch_size=8, fields=["volume", "label"])
        >>> Trainer(max_epochs=2, accelerator="cpu", logger=False).fit(model, datamodule=data)
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
            raise UsageError(
                f"validation_options={shown(validation_options)} cannot be used; it must be a dict of options"
            )
        if "split" in options or "split" in (validation_options or {}):
            raise UsageError(
                "leave out split=; use validation= for the fraction of samples that is held out, such as 0.1"
            )
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
            # Lightning checks which methods a data module overrides. Without held-out samples this one must not count
            # as overridden, or Lightning would warn about a missing validation_step.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def train_dataloader(self) -> TrainingLoader:
        """Return the training loader, always the same object in a process; Lightning calls this method.

        Returns:
            A :class:`cachetool.loaders.torch.Loader`, or with ``steps`` its ``epochs_of(steps=N)``.

        Raises:
            UsageError: An option of the loader cannot be used.
        """
        if self._training is None:
            loader = Loader(self._place, **self._training_options)
            self._training = loader if self._steps is None else loader.epochs_of(steps=self._steps)
        return self._training

    def val_dataloader(self) -> Loader:
        """Return the validation loader, always the same object in a process; Lightning calls this method.

        Returns:
            A :class:`cachetool.loaders.torch.Loader`.

        Raises:
            UsageError: An option of the loader cannot be used.
        """
        if self._validation is None:
            self._validation = Loader(self._place, **self._validation_options)
        return self._validation

    def test_dataloader(self) -> NoReturn:
        """Raise :class:`UsageError`, because a split has no third part; give ``trainer.test()`` a loader of its own."""
        raise UsageError(
            "a CacheDataModule has no samples for tests; give trainer.test() a loader of its own, such as"
            " dataloaders=Loader(cache, dataset='held-out', shuffle=False, batch_size=64)"
        )

    def setup(self, stage: str) -> None:
        """Add the callback to the Trainer of this fit; Lightning calls this method.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``. Only ``"fit"`` does something.
        """
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
            # Inserted first, because Lightning relies on the checkpoint callbacks being last.
            callbacks.insert(0, self._growth)

    def teardown(self, stage: str) -> None:
        """Close the loaders, which continue in the next fit, validation or test; Lightning calls this method.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        if self._training is not None and not self._is_parked:
            _park(self._training)
            self._is_parked = stage == "fit"
        if self._validation is not None:
            self._validation.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the loaders, because Lightning calls no ``teardown`` after an exception.

        Args:
            exception: The exception that ended the fit.
        """
        self.teardown("fit")

    def __str__(self) -> str:
        # The method of Lightning would count the samples of each data set by reading an epoch of every loader.
        return f"CacheDataModule({str(self._place)!r}, batch_size={self._training_options.get('batch_size')})"


def _forget_lengths(loaders: Any) -> None:
    """Let the loaders forget the lengths that they returned, so that they print no line about an old one."""
    # A run that is stopped, or a sanity check, may leave an epoch exactly at the length of an earlier one, which is no
    # mistake of the trainer.
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        loader = getattr(loader, "loader", loader)
        if isinstance(loader, BaseLoader):
            loader._lengths.forget()


def _park(loader: TrainingLoader) -> None:
    """Close the loader, but keep its state."""
    state = None
    # trainer.save_checkpoint() may come after fit(), when the loader is closed, so the state is asked for before and
    # loaded again. Feeders that failed have no state.
    with contextlib.suppress(CacheToolError):
        state = loader.state_dict()
    loader.close()
    if state is not None:
        loader.load_state_dict(state)


def _begin_next(loader: TrainingLoader) -> None:
    """Let a loader whose epoch was left begin the next epoch, as it does in a process that continues."""
    # With only the rest of the old epoch Lightning would end its new epoch early, and leave out the validation.
    state = loader.state_dict()
    if isinstance(loader, FixedEpochs):
        loader.load_state_dict({**state, "at": 0})
    elif state["resume"]:
        loader.epoch = loader.epoch + 1


def _finish_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Correct the counters of a checkpoint, so that its last epoch counts as ended exactly if its last batch was
    trained.

    Returns True if the epoch has ended.
    """
    # Lightning takes some checkpoints after the last batch for ones of an unfinished epoch: those of the last
    # validation of an epoch, of every_n_train_steps, and with max_steps also those of on_train_epoch_end. It compares
    # their number of batches with the length of the next epoch. If the cache has grown meanwhile, Lightning takes the
    # difference from the next pass of the loader and then leaves that pass. An epoch that was stopped early counts as
    # finished for Lightning. It then counts the rest of that epoch as another one, without a validation and without a
    # step of its schedules.
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
        # Lightning saves the checkpoint of a step before it counts this step for its loggers, so the count is one too
        # low.
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for counts in (epochs["current"], epochs["total"], batches["total"]):
        counts.update(dict.fromkeys(counts, counts["ready"]))
    batches.update(current=dict.fromkeys(batches["current"], 0), is_last_batch=False)
    # This callback has the states of the loaders. Lightning must not restore them once more.
    loop["state_dict"].pop("combined_loader", None)
    return True
