"""A cache that grows, and resume, in the Trainer of Hugging Face transformers.

::

    class GrowingTrainer(GrowthMixin, Trainer):
        pass

    train = Loader("data/cache", batch_size=32, split="train")            # cachetool.loaders.torch
    held_out = Loader("data/cache", batch_size=32, split="validation")
    trainer = GrowingTrainer(model, args, train_dataset=train, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=False)

The Trainer asks for the length of an epoch once. It also computes today's epoch from ``global_step`` and that length.
Both are wrong when the cache grows, so :class:`GrowthMixin` begins each epoch itself. The Trainer's own schedule still
counts the steps of the first length: ``train_dataset=loader.epochs_of(steps=N)`` makes it right.

The state of the loader is part of ``trainer_state.json`` in the checkpoint, so there is no second file, and a
checkpoint in any folder can be resumed from.
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

from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.snapshots.resume import taken
from cachetool.loaders.snapshots.waiting import say
from cachetool.loaders.torch import CacheDataset, LMDBDataset, TensorList

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the user's class has the Trainer behind the mixin

__all__ = ["GrowthMixin", "LoaderStateCallback"]

_Ours: TypeAlias = BaseLoader[Any] | FixedEpochs[Any]
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
"""Schedules of the Trainer that do not end at a step."""


def _is_ours(value: object) -> TypeGuard[_Ours]:
    return isinstance(value, BaseLoader | FixedEpochs)


class LoaderStateCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the state of a loader in the Trainer's checkpoints, and loads it when training is resumed.

    ``loader`` is a :class:`~cachetool.loaders.torch.Loader` or its ``epochs_of(steps=N)``. Default: the object that the
    trainer's ``get_train_dataloader()`` returns. A class with :class:`GrowthMixin` adds this callback by itself; any
    other Trainer needs it::

        class OwnTrainer(Trainer):
            def get_train_dataloader(self):
                return epochs

        epochs = loader.epochs_of(steps=100)
        trainer = OwnTrainer(model, args, callbacks=[LoaderStateCallback(epochs)])

    The state lies in ``trainer_state.json``. Sets ``ignore_data_skip``, because the loader continues by itself.
    When training begins, raises :class:`UsageError` for a checkpoint without a loader's state, for the state of another
    kind of loader, and if there is no loader. A Trainer takes one callback of this class.
    """

    def __init__(self, loader: BaseLoader[Any] | FixedEpochs[Any] | None = None) -> None:
        if loader is not None and not _is_ours(loader):
            raise UsageError(
                f"a LoaderStateCallback is of a Loader or its epochs_of(steps=N), not of {type(loader).__name__}"
            )
        self._given = loader
        self._loader: _Ours | None = None
        """The loader of the training that is under way."""
        self.resumed: tuple[int, int, int, int] | None = None
        """Number of the epoch that is resumed, its batches trained before, all its batches, and the batches that the
        Trainer takes for the whole epoch."""

    def state(self) -> dict[str, Any]:
        """Return the entry for ``trainer_state.json``; with the loader's state while training is under way."""
        entry: dict[str, Any] = {"args": {}, "attributes": {}}
        return entry if self._loader is None else {**entry, "loader": self._loader.state_dict()}

    def on_init_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Let the loader skip what was trained: the Trainer needs a ``DataLoader`` for it."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **rest: Any) -> None:
        """Find the loader, and load its state if this training is resumed."""
        args.ignore_data_skip = True  # of a callback that was added after the trainer was made
        loader = train_dataloader if self._given is None else self._given
        if not _is_ours(loader):
            raise UsageError(
                f"the trainer's get_train_dataloader() returned a {type(loader).__name__}; name the loader whose state"
                " is to be saved: LoaderStateCallback(loader)"
            )
        self.resumed = None
        if state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not isinstance(saved, dict) or "loader" not in saved:
                raise UsageError(
                    f"the checkpoint of step {state.global_step} has no state of a loader, so its position is unknown;"
                    " resume from one that was saved with exactly one LoaderStateCallback, or train without"
                    " resume_from_checkpoint="
                )
            loader.load_state_dict(saved["loader"])
            if before := taken(loader.state_dict()):
                length = len(loader)
                self.resumed = int(state.epoch), before, length, length
        self._loader = loader

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Correct ``state.epoch`` in an epoch that was resumed: the Trainer counts from where it was resumed."""
        if self.resumed is not None:
            epoch, before, length, counted = self.resumed
            state.epoch = epoch + (before + round((state.epoch - epoch) * counted)) / length

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Later epochs are counted from their beginning."""
        self.resumed = None

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Forget the loader, which may be closed before the next training begins."""
        self.forget()

    def forget(self) -> None:
        """Forget the loader of a training that ended; checkpoints have no state of a loader until the next begins."""
        self._loader = None


class GrowthMixin(_Trainer):  # type: ignore[misc]
    """Makes a Trainer train every epoch on the grown cache, and resume in the middle of one.

    ::

        class GrowingTrainer(GrowthMixin, Trainer):
            pass

        trainer = GrowingTrainer(model, args, train_dataset=loader, eval_dataset=held_out)

    ``train_dataset`` is a :class:`~cachetool.loaders.torch.Loader` or its ``epochs_of(steps=N)``, ``eval_dataset`` a
    loader or a dict of loaders; both are iterated as they are. Datasets of other packages are treated as without the
    mixin. The loader decides the batch size; ``per_device_train_batch_size`` only scales the Trainer's speed figures.

    ``get_train_dataloader()`` of the user's class may also return a loader. The mixin adds a
    :class:`LoaderStateCallback` if there is none. One line on stderr says so if a learning-rate schedule of the Trainer
    ends before the training, because the cache grew.

    Raises what :class:`LoaderStateCallback` raises, and :class:`UsageError` for a class where the Trainer comes before
    the mixin, a Trainer that it does not fit, and a ``CacheDataset`` to train on, in which the Trainer does not see
    growth.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if any(base.__module__.startswith("transformers.") for base in cls.__mro__[: cls.__mro__.index(GrowthMixin)]):
            raise UsageError(f"class {cls.__name__}: GrowthMixin comes before the Trainer: (GrowthMixin, Trainer)")

    def __init__(self, *args: Any, **options: Any) -> None:
        # Of no promised name: without them the methods below would never be called, and growth not seen.
        trainer = super()
        missing = [name for name in ("_run_epoch", "_init_training_state") if not hasattr(trainer, name)]
        if missing:
            raise UsageError(
                f"the Trainer of this transformers has no {missing[0]}(), which GrowthMixin extends; version 5.24 has"
                " it, and loader.epochs_of(steps=N) with LoaderStateCallback needs no GrowthMixin"
            )
        super().__init__(*args, **options)
        if isinstance(self.train_dataset, CacheDataset | LMDBDataset):
            raise UsageError(
                f"train_dataset is a {type(self.train_dataset).__name__}, of which the Trainer reads only the samples"
                " that are in the cache now; use cachetool.loaders.torch.Loader"
            )
        self._scheduled = 0
        """Steps that the learning-rate schedule is made for."""
        self._iterated: _Ours | None = None
        """The loader of the training that is under way."""
        self._said_scheduled = False

    def _state_callback(self) -> LoaderStateCallback | None:
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, LoaderStateCallback)), None)

    # -- the loaders as they are ---------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return ``train_dataset`` itself if it is a loader."""
        return self.train_dataset if _is_ours(self.train_dataset) else super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return ``eval_dataset`` itself, or the one of that name, if it is a loader."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        return chosen if _is_ours(chosen) else super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return ``test_dataset`` itself if it is a loader."""
        return test_dataset if _is_ours(test_dataset) else super().get_test_dataloader(test_dataset)

    def _prepare_input(self, data: Any) -> Any:
        """The Trainer leaves objects that it does not know on the CPU."""
        return data.to(self.args.device) if isinstance(data, TensorList) else super()._prepare_input(data)

    # -- predictions of several processes ------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Evaluate or predict with batches that may differ by one sample from process to process."""
        self._uneven = _is_ours(dataloader) and self.args.world_size > 1
        try:
            output = super().evaluation_loop(dataloader, *args, **options)
        finally:
            self._uneven = False
        if isinstance(dataloader, BaseLoader):
            # The Trainer asked for the length once more, which took the snapshot of the next evaluation: too early.
            dataloader.refresh()
        return output

    @property
    def gather_function(self) -> Any:
        """The Trainer's own function waits forever, or fails, for tensors of different lengths."""
        return self._gather_rows if self.__dict__.get("_uneven") else self.__dict__["_gather_function"]

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        """The Trainer sets its own function, before and after each evaluation."""
        self.__dict__["_gather_function"] = function

    def _gather_rows(self, values: Any) -> Any:
        """Return ``values`` with the rows of all processes in each tensor, the first process's first."""
        from accelerate.utils import recursively_apply

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0:
                tensor = tensor[None]
            rows = self.accelerator.gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
            padded = self.accelerator.gather(self.accelerator.pad_across_processes(tensor, dim=0))
            return torch.cat([part[:count] for part, count in zip(padded.split(max(rows)), rows, strict=True)])

        return recursively_apply(gather, values)

    # -- one epoch after another ---------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the Trainer's values; with ``max_steps=``, let the Trainer begin as many epochs as that takes.

        The Trainer calls this when training begins, before it reads the states of the callbacks.
        """
        values = super().set_initial_training_values(args, dataloader)
        self._iterated = dataloader if _is_ours(dataloader) else None
        self._scheduled = values[-1]
        if self._iterated is not None:
            if (callback := self._state_callback()) is None:
                # The first one: the user's callbacks then see the corrected state.epoch.
                self.callback_handler.callbacks.insert(0, LoaderStateCallback())
            else:
                callback.forget()  # the loader of a training that ended with an error
        if self._iterated is not None and args.max_steps > 0:
            # The number of epochs is unknown, because earlier and later ones have other lengths. Each has at least one
            # step, and the training ends at max_steps.
            return (args.max_steps, *values[1:])
        return values

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """The Trainer divides ``global_step`` by today's length, but earlier epochs were shorter."""
        trained: tuple[int, int] = super()._init_training_state(*args)
        return trained if self._iterated is None else (int(self.state.epoch), 0)

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **options: Any) -> Any:
        """Begin the epoch, then let the Trainer take all its batches.

        It gets the iterator, not the loader: a second ``iter()`` or ``set_epoch()`` cannot begin another epoch.
        """
        loader = self._iterated
        if loader is None or train_dataloader is not loader:
            return super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **options)
        if isinstance(loader, FixedEpochs):
            # The number of an epoch means nothing to it. Only the first epoch after a resume can have a beginning.
            resumed = epoch == options["epochs_trained"] and options["resume_from_checkpoint"] is not None
            before = taken(loader.state_dict()) if resumed else 0
            batches: Iterator[Any] = iter(loader)
        else:
            loader.set_epoch(epoch)  # ignored if the loader resumes an epoch
            batches = iter(loader)  # before len(), which then is the length of this epoch
            loader._lengths.forget()
            before = taken(loader.state_dict())
        length = len(loader)
        left = length - before
        if before and (callback := self._state_callback()) is not None:
            callback.resumed = epoch, before, length, left
        if isinstance(loader, BaseLoader) and self.args.max_steps <= 0:
            self._count_steps(epoch, before, length)
        # Only the batches that are left: the Trainer steps after the last of them, also in the middle of a group of
        # gradient_accumulation_steps.
        options["steps_in_epoch"], options["num_update_steps_per_epoch"] = left, self._updates(left)
        return super()._run_epoch(epoch=epoch, train_dataloader=batches, **options)

    def _updates(self, batches: int) -> int:
        group: int = self.args.gradient_accumulation_steps
        return max(1, -(-batches // group))

    def _count_steps(self, epoch: int, before: int, length: int) -> None:
        """Set ``state.max_steps`` as if this epoch's length were that of all that follow."""
        later = self.args.num_train_epochs - epoch - 1
        if later >= 0:
            steps = self._updates(length - before) + math.ceil(later * self._updates(length))
        else:  # num_train_epochs=2.5 ends in the middle of this one
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
