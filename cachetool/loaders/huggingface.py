"""Growth and resume in the Trainer of Hugging Face transformers.

::

    class GrowingTrainer(GrowthMixin, Trainer):
        pass

    train = Loader("data/cache", batch_size=32, split="train")            # cachetool.loaders.torch
    held_out = Loader("data/cache", batch_size=32, split="validation")
    trainer = GrowingTrainer(model, args, train_dataset=train, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=False)

The Trainer asks for the length of an epoch once, and computes the number of the present epoch from ``global_step`` and
that length. Both are wrong when the cache grows, so :class:`GrowthMixin` begins each epoch itself. The Trainer's own
schedule still counts the steps of the first length; ``train_dataset=loader.epochs_of(steps=N)`` corrects it.

The state of the loader is part of ``trainer_state.json`` in the checkpoint. So there is no second file, and training
can be resumed from a checkpoint in any folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from cachetool.core.errors import UsageError, without

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    raise without("transformers", "huggingface", error) from None

from cachetool.loaders.fixed_epochs import FixedEpochs, wait_metrics
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.snapshots.resume import taken
from cachetool.loaders.snapshots.waiting import say
from cachetool.loaders.torch import CacheDataset, LMDBDataset, TensorList

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    # The user's class names the Trainer after the mixin, so at run time the mixin needs no base of its own.
    _Trainer = object

__all__ = ["GrowthMixin", "LoaderStateCallback"]

_Ours: TypeAlias = BaseLoader[Any] | FixedEpochs[Any]
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
"""Learning-rate schedules of the Trainer that do not end at a step."""


def _is_ours(value: object) -> TypeGuard[_Ours]:
    return isinstance(value, BaseLoader | FixedEpochs)


class LoaderStateCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback of the Hugging Face Trainer that saves the state of a loader in checkpoints, and loads it on resume.

    A class with :class:`GrowthMixin` adds this callback by itself; any other Trainer needs it. The state is an entry of
    ``trainer_state.json``. The callback sets ``ignore_data_skip``, because the loader continues by itself. A Trainer
    takes one callback of this class.

    Args:
        loader: A :class:`cachetool.loaders.torch.Loader` or its ``epochs_of(steps=N)``. Default: the object that the
            Trainer's ``get_train_dataloader()`` returns.

    Attributes:
        resumed: Of a resumed epoch: its number, its batches trained before, all its batches, and the batches that the
            Trainer takes for the whole epoch. None otherwise.

    Raises:
        UsageError: ``loader`` is not a loader; or, when training begins: there is no loader, or the checkpoint has no
            state of such a loader.

    Example:
        >>> from transformers import Trainer
        >>> from cachetool.loaders.huggingface import LoaderStateCallback
        >>> from cachetool.loaders.torch import Loader
        >>> class OwnTrainer(Trainer):
        ...     def get_train_dataloader(self):
        ...         return epochs
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     epochs = loader.epochs_of(steps=4)
        ...     trainer = OwnTrainer(model, arguments, callbacks=[LoaderStateCallback(epochs)])
        ...     result = trainer.train()
    """

    def __init__(self, loader: BaseLoader[Any] | FixedEpochs[Any] | None = None) -> None:
        if loader is not None and not _is_ours(loader):
            raise UsageError(
                f"LoaderStateCallback needs a Loader or loader.epochs_of(steps=N), not {type(loader).__name__}"
            )
        self._given = loader
        self._loader: _Ours | None = None
        """Loader of the training that is under way; None between trainings."""
        self.resumed: tuple[int, int, int, int] | None = None
        """Number of the epoch that is resumed, its batches trained before, all its batches, and the batches that the
        Trainer takes for the whole epoch."""

    def state(self) -> dict[str, Any]:
        """Return the entry for ``trainer_state.json``, with the state of the loader while training runs.

        Returns:
            A dict of plain values.

        Raises:
            UsageError: The loader has no state; see ``Loader.state_dict()``.
        """
        entry: dict[str, Any] = {"args": {}, "attributes": {}}
        return entry if self._loader is None else {**entry, "loader": self._loader.state_dict()}

    def on_init_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Set ``ignore_data_skip``, because the loader skips what was trained; the Trainer calls this method.

        Args:
            args: The ``TrainingArguments``.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **rest: Other arguments of the Trainer.
        """
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **rest: Any) -> None:
        """Look up the loader, and load its state if this training is resumed; the Trainer calls this method.

        Args:
            args: The ``TrainingArguments``.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            train_dataloader: The object that ``get_train_dataloader()`` returned. Default: None.
            **rest: Other arguments of the Trainer.

        Raises:
            UsageError: There is no loader, or the checkpoint has no state of such a loader.
        """
        # Again, because on_init_end() is not called for a callback that was added after the trainer was made.
        args.ignore_data_skip = True
        loader = train_dataloader if self._given is None else self._given
        if not _is_ours(loader):
            raise UsageError(
                f"the trainer's get_train_dataloader() returned a {type(loader).__name__}, not a loader of cachetool;"
                " pass the loader itself: LoaderStateCallback(loader)"
            )
        self.resumed = None
        if state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not isinstance(saved, dict) or "loader" not in saved:
                raise UsageError(
                    f"the checkpoint of step {state.global_step} has no state of a loader, so its position is unknown;"
                    " resume from a checkpoint that was saved with exactly one LoaderStateCallback, or leave out"
                    " resume_from_checkpoint="
                )
            loader.load_state_dict(saved["loader"])
            if before := taken(loader.state_dict()):
                length = len(loader)
                self.resumed = int(state.epoch), before, length, length
        self._loader = loader

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Correct ``state.epoch`` in a resumed epoch, which the Trainer counts from the place of the resume.

        Args:
            args: The ``TrainingArguments``.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **rest: Other arguments of the Trainer.
        """
        if self.resumed is not None:
            epoch, before, length, counted = self.resumed
            state.epoch = epoch + (before + round((state.epoch - epoch) * counted)) / length

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Note that later epochs are counted from their beginning; the Trainer calls this method.

        Args:
            args: The ``TrainingArguments``.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **rest: Other arguments of the Trainer.
        """
        self.resumed = None

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Forget the loader, which may be closed before the next training begins; the Trainer calls this method.

        Args:
            args: The ``TrainingArguments``.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **rest: Other arguments of the Trainer.
        """
        self.forget()

    def forget(self) -> None:
        """Forget the loader of a training that ended; checkpoints have no state of a loader until the next training
        begins.
        """
        self._loader = None


class GrowthMixin(_Trainer):  # type: ignore[misc]
    """A mixin for the Hugging Face Trainer that trains every epoch on the grown cache and resumes in the middle of an
    epoch.

    Put the mixin before the Trainer: ``class GrowingTrainer(GrowthMixin, Trainer)``. ``train_dataset`` is a
    :class:`cachetool.loaders.torch.Loader` or its ``epochs_of(steps=N)``; ``eval_dataset`` is a loader or a dict of
    loaders. Datasets of other packages work as without the mixin. The loader decides the batch size;
    ``per_device_train_batch_size`` only scales the Trainer's figures of speed. One line on stderr says so if a
    learning-rate schedule ends before the training because the cache grew.

    Args:
        *args: Positional arguments of the Trainer.
        **options: Keyword arguments of the Trainer.

    Raises:
        UsageError: The Trainer comes before the mixin; this version of transformers is not supported; ``train_dataset``
            is a ``CacheDataset`` or ``LMDBDataset``; or :class:`LoaderStateCallback` raises it.

    Example:
        >>> from transformers import Trainer
        >>> from cachetool.loaders.huggingface import GrowthMixin
        >>> from cachetool.loaders.torch import Loader
        >>> class GrowingTrainer(GrowthMixin, Trainer):
        ...     pass
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     trainer = GrowingTrainer(model, arguments, train_dataset=loader.epochs_of(steps=4))
        ...     result = trainer.train()
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if any(base.__module__.startswith("transformers.") for base in cls.__mro__[: cls.__mro__.index(GrowthMixin)]):
            raise UsageError(f"GrowthMixin must come before the Trainer: class {cls.__name__}(GrowthMixin, Trainer)")

    def __init__(self, *args: Any, **options: Any) -> None:
        # Both methods are private, so another version of transformers may lack them. The methods below would then never
        # be called, and the Trainer would not see that the cache grows, without any error.
        trainer = super()
        missing = [name for name in ("_run_epoch", "_init_training_state") if not hasattr(trainer, name)]
        if missing:
            raise UsageError(
                f"the Trainer of this version of transformers has no {missing[0]}(), which GrowthMixin needs;"
                " use version 5.24, or loader.epochs_of(steps=N) with LoaderStateCallback instead of GrowthMixin"
            )
        super().__init__(*args, **options)
        if isinstance(self.train_dataset, CacheDataset | LMDBDataset):
            raise UsageError(
                f"train_dataset is a {type(self.train_dataset).__name__}: the Trainer would read only the samples that"
                " are in the cache now; use cachetool.loaders.torch.Loader"
            )
        self._scheduled = 0
        """Number of steps for which the learning-rate schedule is made."""
        self._iterated: _Ours | None = None
        """Loader of the training that is under way."""
        self._said_scheduled = False

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log figures, and beside those of training how long the epoch waited for data so far, and for what; the
        Trainer calls this method.

        Args:
            logs: The figures of the Trainer.
            *args: Other arguments of the Trainer.
            **options: Other arguments of the Trainer.
        """
        waits = {} if self._iterated is None or "loss" not in logs else wait_metrics(self._iterated)
        super().log({**logs, **waits}, *args, **options)

    def _state_callback(self) -> LoaderStateCallback | None:
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, LoaderStateCallback)), None)

    # -- the loaders as they are ---------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return ``train_dataset`` itself if it is a loader, otherwise the Trainer's own ``DataLoader``.

        Returns:
            A loader or a ``DataLoader``.
        """
        return self.train_dataset if _is_ours(self.train_dataset) else super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation dataset itself if it is a loader, otherwise the Trainer's own ``DataLoader``.

        Args:
            eval_dataset: A loader, a dataset, or a name in the dict ``eval_dataset`` of the Trainer. Default: that of
                the Trainer.

        Returns:
            A loader or a ``DataLoader``.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        return chosen if _is_ours(chosen) else super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the test dataset itself if it is a loader, otherwise the Trainer's own ``DataLoader``.

        Args:
            test_dataset: A loader or a dataset.

        Returns:
            A loader or a ``DataLoader``.
        """
        return test_dataset if _is_ours(test_dataset) else super().get_test_dataloader(test_dataset)

    def _prepare_input(self, data: Any) -> Any:
        """Move a :class:`TensorList` to the device too; the Trainer leaves objects of unknown classes on the CPU."""
        return data.to(self.args.device) if isinstance(data, TensorList) else super()._prepare_input(data)

    # -- predictions of several processes ------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Evaluate or predict; the Trainer calls this method.

        Batches may differ by one sample from process to process.

        Args:
            dataloader: A loader or a ``DataLoader``.
            *args: Further arguments of the Trainer's method.
            **options: Keyword arguments of the Trainer's method.

        Returns:
            The result of the Trainer's method.
        """
        self._uneven = _is_ours(dataloader) and self.args.world_size > 1
        try:
            output = super().evaluation_loop(dataloader, *args, **options)
        finally:
            self._uneven = False
        if isinstance(dataloader, BaseLoader):
            # After the loop the Trainer asked for the length once more, for which the loader took the snapshot of the
            # next evaluation. That evaluation would not see the samples that arrive until then.
            dataloader.refresh()
        return output

    @property
    def gather_function(self) -> Any:
        """The function that collects predictions of all processes, also for tensors of different lengths.

        The function of the Trainer itself waits forever, or fails, for such tensors.
        """
        return self._gather_rows if self.__dict__.get("_uneven") else self.__dict__["_gather_function"]

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        """The Trainer sets its own function, before and after each evaluation."""
        self.__dict__["_gather_function"] = function

    def _gather_rows(self, values: Any) -> Any:
        """Return ``values`` in which each tensor has the rows of all processes, those of the first process first."""
        # Imported here, because only an evaluation in several processes needs it.
        from accelerate.utils import recursively_apply

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0:
                tensor = tensor[None]
            rows = self.accelerator.gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
            # A gather of tensors of different lengths fails or waits for ever, depending on the backend. So all are
            # padded to the longest, and the padding is cut off again by the number of rows of each process.
            padded = self.accelerator.gather(self.accelerator.pad_across_processes(tensor, dim=0))
            return torch.cat([part[:count] for part, count in zip(padded.split(max(rows)), rows, strict=True)])

        return recursively_apply(gather, values)

    # -- one epoch after another ---------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the Trainer's values; with ``max_steps`` let the Trainer begin as many epochs as ``max_steps`` takes.

        The Trainer calls this method when training begins, before it reads the states of the callbacks.

        Args:
            args: The ``TrainingArguments``.
            dataloader: The loader or ``DataLoader`` of this training.

        Returns:
            The tuple of the Trainer's method.
        """
        values = super().set_initial_training_values(args, dataloader)
        self._iterated = dataloader if _is_ours(dataloader) else None
        self._scheduled = values[-1]
        if self._iterated is not None:
            if (callback := self._state_callback()) is None:
                # Inserted first, so that the user's callbacks see the corrected state.epoch.
                self.callback_handler.callbacks.insert(0, LoaderStateCallback())
            else:
                # The callback may still have the loader of an earlier training that ended with an error.
                callback.forget()
        if self._iterated is not None and args.max_steps > 0:
            # Nobody knows the number of epochs, because earlier and later epochs have other lengths. Each epoch has at
            # least one step, so max_steps epochs are enough; the training ends at max_steps.
            return (args.max_steps, *values[1:])
        return values

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """Return the number of the epoch to resume, and no batches to skip."""
        # The Trainer divides global_step by the present length. Earlier epochs were shorter, so state.epoch is taken
        # instead. The loader itself skips the batches that were trained.
        trained: tuple[int, int] = super()._init_training_state(*args)
        return trained if self._iterated is None else (int(self.state.epoch), 0)

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **options: Any) -> Any:
        """Begin the epoch, then let the Trainer take all its batches."""
        loader = self._iterated
        if loader is None or train_dataloader is not loader:
            return super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **options)
        if isinstance(loader, FixedEpochs):
            # The view ignores the number of an epoch. Only the first epoch after a resume can have a part that was
            # trained before.
            resumed = epoch == options["epochs_trained"] and options["resume_from_checkpoint"] is not None
            before = taken(loader.state_dict()) if resumed else 0
            batches: Iterator[Any] = iter(loader)
        else:
            # The loader ignores the number if it resumes an epoch. iter() comes before len(), which is then the length
            # of this epoch.
            loader.set_epoch(epoch)
            batches = iter(loader)
            loader._lengths.forget()
            before = taken(loader.state_dict())
        length = len(loader)
        left = length - before
        if before and (callback := self._state_callback()) is not None:
            callback.resumed = epoch, before, length, left
        if isinstance(loader, BaseLoader) and self.args.max_steps <= 0:
            self._count_steps(epoch, before, length)
        # The Trainer makes an optimizer step after the last of these batches, even within a group of
        # gradient_accumulation_steps. So it must be given the number of batches that are left, not that of the whole
        # epoch.
        options["steps_in_epoch"], options["num_update_steps_per_epoch"] = left, self._updates(left)
        # The iterator and not the loader: a second iter() or set_epoch() of the Trainer must not begin another epoch.
        return super()._run_epoch(epoch=epoch, train_dataloader=batches, **options)

    def _updates(self, batches: int) -> int:
        group: int = self.args.gradient_accumulation_steps
        return max(1, -(-batches // group))

    def _count_steps(self, epoch: int, before: int, length: int) -> None:
        """Set ``state.max_steps`` as if all later epochs had the length of this one."""
        later = self.args.num_train_epochs - epoch - 1
        if later >= 0:
            steps = self._updates(length - before) + math.ceil(later * self._updates(length))
        else:
            # num_train_epochs=2.5 ends in the middle of this epoch.
            steps = max(1, math.ceil((later + 1) * self._updates(length)) - self._updates(before) * bool(before))
        self.state.max_steps = self.state.global_step + steps
        kind = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
        ends_early = self._created_lr_scheduler and kind not in _ENDLESS and self._scheduled < self.state.max_steps
        if ends_early and not self._said_scheduled and self.is_world_process_zero():
            self._said_scheduled = True
            say(
                f"the cache grew, so training takes {self.state.max_steps} steps, but the learning-rate schedule"
                f" {kind!r} was made for {self._scheduled}; use loader.epochs_of(steps=N), max_steps=, or a constant"
                " schedule"
            )
